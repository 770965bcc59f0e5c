"""Measure what the project claims about its own speed: `python -m ddp_tutorial bench NAME [--json]`.

The arms of a benchmark run in turn, in one go, so that whatever else the machine does falls on all of them. Each
arm is told by its median, lowest and highest value; a ratio is the median of the ratios repeat by repeat. Ratios
are what to compare between machines, absolute values are not.
"""

import importlib
import statistics
from typing import Any

# Each is a module beside this one, with a function `measure(repeats)`. They are imported when asked for: ranks
# that a benchmark starts import its module too, and should not load more than what it measures.
NAMES = ["launch", "overhead", "ddp", "buckets", "sources", "accumulation", "checkpoint", "scaling"]

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
    """A table for people."""
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
