"""Benchmarks that verify the project's performance claims. Run `python -m ddp_tutorial bench NAME [--json]`.

The arms of a benchmark alternate within one run, so that background load affects all arms equally. A report contains
each arm's median, minimum and maximum, and the ratios between arms. Each ratio is the median of the per-repeat ratios.
To compare machines, use the ratios instead of the absolute values.
"""

import importlib
import statistics
from typing import Any

# Each name is a module in this folder with a function `measure(repeats)`. A module is imported only when its benchmark
# runs, because the ranks that a benchmark starts also import this package and should load only the measured code.
NAMES = [
    "launch",
    "overhead",
    "compile",
    "ddp",
    "buckets",
    "sources",
    "accumulation",
    "checkpoint",
    "scaling",
    "debug",
    "sharded",
    "pipeline",
    "cluster",
    "ranks",
    "peers",
]
CHECKS = ["chaos", "restarts", "hangs"]  # benchmarks that can fail; each has its own function and report

# The values of each arm, one per repeat.
Samples = dict[str, list[float]]


def run_bench(name: str, repeats: int) -> dict[str, Any]:
    """Run one benchmark and return its report.

    Raises:
        ConfigError: If the name is unknown.
    """
    from ddp_tutorial.config import ConfigError, did_you_mean

    if name not in NAMES:
        raise ConfigError(f"unknown benchmark {name!r}.{did_you_mean(name, [*NAMES, *CHECKS])}")
    measured: dict[str, Any] = importlib.import_module(f"{__name__}.{name}").measure(repeats)
    return measured


def report(
    name: str, samples: Samples, units: dict[str, str] | str, ratios: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return a benchmark's report as a dict that can be serialized as JSON.

    Args:
        name: The name of the benchmark.
        samples: The values of each arm, one per repeat.
        units: The unit of each arm, or one unit for all arms.
        ratios: The numerator arm and the denominator arm of each ratio.
    """
    from ddp_tutorial.environment import describe_environment

    return {
        "bench": name,
        "environment": describe_environment(),
        "arms": {
            arm: {
                "median": statistics.median(values),
                "low": min(values),
                "high": max(values),
                "unit": units if isinstance(units, str) else units[arm],
                "repeats": len(values),
                "values": values,
            }
            for arm, values in samples.items()
        },
        "ratios": {
            ratio: statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))
            for ratio, (above, below) in ratios.items()
        },
    }


def as_text(result: dict[str, Any]) -> str:
    """Return a report as a text table."""
    environment = ", ".join(f"{key} {value}" for key, value in result["environment"].items() if value)
    lines = [f"bench {result['bench']} ({environment})"]
    width = max(map(len, result["arms"]))
    lines += [
        f"  {name:{width}} {arm['median']:>10,.4g} {arm['unit']:9} "
        f"from {arm['low']:,.4g} to {arm['high']:,.4g} in {arm['repeats']} repeats"
        for name, arm in result["arms"].items()
    ]
    lines += [f"  {name} = {value:.3f}" for name, value in result["ratios"].items()]
    if note := result.get("note"):
        lines.append(f"  {note}")
    if crowded := result.get("oversubscribed"):
        lines.append(f"  times are not meaningful for arms with more processes than cores: {', '.join(crowded)}")
    return "\n".join(lines)
