"""Measure what the project claims about its own speed: `python -m ddp_tutorial bench NAME [--json]`.

The arms of a benchmark take turns within one execution, so that other load on the machine affects all of them alike. A
benchmark reports the median, lowest and highest value of each arm, and ratios of two arms: the median of the ratios of
single repeats. Compare ratios between machines, not absolute values.
"""

import importlib
import statistics
from typing import Any

# Each is a module in this folder, with a function `measure(repeats)`. It is imported only when it is run, because the
# ranks that a benchmark starts import this package too, and should load no more than what is measured.
NAMES = [
    "launch",
    "overhead",
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

# Arm -> its value in each repeat.
Samples = dict[str, list[float]]


def run_bench(name: str, repeats: int) -> dict[str, Any]:
    """Run one benchmark. Raises `ConfigError` for a name that is not known."""
    from ddp_tutorial.config import ConfigError, did_you_mean

    if name not in NAMES:
        raise ConfigError(f"no benchmark is called {name!r}.{did_you_mean(name, NAMES)}")
    measured: dict[str, Any] = importlib.import_module(f"{__name__}.{name}").measure(repeats)
    return measured


def report(
    name: str, samples: Samples, units: dict[str, str] | str, ratios: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """The one JSON object that every benchmark prints. `ratios` maps a name to (arm above, arm below)."""
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
            }
            for arm, values in samples.items()
        },
        "ratios": {
            ratio: statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))
            for ratio, (above, below) in ratios.items()
        },
    }


def as_text(result: dict[str, Any]) -> str:
    """A report as a table to print."""
    environment = ", ".join(f"{key} {value}" for key, value in result["environment"].items() if value)
    lines = [f"bench {result['bench']} ({environment})"]
    width = max(map(len, result["arms"]))
    lines += [
        f"  {name:{width}} {arm['median']:>10,.4g} {arm['unit']:9} "
        f"from {arm['low']:,.4g} to {arm['high']:,.4g} in {arm['repeats']} repeats"
        for name, arm in result["arms"].items()
    ]
    lines += [f"  {name} = {value:.3f}" for name, value in result["ratios"].items()]
    if crowded := result.get("oversubscribed"):
        lines.append(f"  more processes than cores, so no measure of speed: {', '.join(crowded)}")
    return "\n".join(lines)
