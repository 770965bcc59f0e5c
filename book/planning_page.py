"""Write the tables of the page `planning.md`: thresholds, and predictions beside published runs."""

import re
from collections.abc import Callable
from pathlib import Path

from ddp_tutorial.planning.comparison import comparison, summary
from ddp_tutorial.planning.hardware import DEVICES, NETWORKS
from ddp_tutorial.planning.step import tokens_to_hide_communication

PAGE = Path(__file__).parent / "planning.md"
MACHINES = (("A100-80", "DGX A100"), ("A100-40", "AWS p4d"), ("H100", "DGX H100"), ("B200", "DGX B200"))


def planning_page() -> str:
    """Return the page with current tables."""
    page = PAGE.read_text(encoding="utf-8")
    tables: dict[str, Callable[[], str]] = {"thresholds": thresholds, "comparison": comparison_table}
    for name, make in tables.items():
        block = rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)"
        page = re.sub(block, lambda match, make=make: f"{match[1]}\n{make()}\n\n{match[2]}", page, flags=re.DOTALL)
    return page


def thresholds() -> str:
    """Return the tokens per device from which communication is hidden."""
    lines = ["| device | network | `ddp`, `zero3` | `hsdp`: shards within a node |", "|---|---|---|---|"]
    for device, network in MACHINES:
        flat, hybrid = (
            tokens_to_hide_communication(strategy, 64, DEVICES[device], NETWORKS[network])
            for strategy in ("ddp", "hsdp")
        )
        lines.append(f"| {device} | {network} | {flat:,.0f} | {hybrid:,.0f} |")
    return "\n".join(lines)


def comparison_table() -> str:
    """Return the comparison with published runs."""
    rows = comparison()
    lines = ["| run | software | published MFU | predicted | error | left out |", "|---|---|---|---|---|---|"]
    lines += [
        f"| [{row.run.name}]({row.run.source}) | {row.run.software} | {row.published:.1%} | {row.estimate.mfu:.1%} | "
        f"{row.error:+.0%} | {row.left_out:+.0%} |"
        for row in rows
    ]
    return "\n".join([*lines, "", summary(rows)])
