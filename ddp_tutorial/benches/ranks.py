"""Compare the duration of a call on two persistent ranks with the duration of a launch. The ranks do nothing."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from ddp_tutorial.benches import report
from ddp_tutorial.benches.launch import launch_nothing
from ddp_tutorial.experiments.arms import alternate, seconds_of
from ddp_tutorial.live.pool import Ranks

CALLS = 50  # per repeat; the result is the median of the calls


def measure(repeats: int) -> dict[str, Any]:
    """Measure the time in seconds from a call until both ranks have completed the call.

    The arms are an empty call, a cell with one expression, a function passed by value, a value sent to the parent
    process, and a launch.
    """
    with Ranks(2, threads=1, device="cpu", echo=False) as ranks:
        ranks.put(x=1)
        calls = {
            "pool_call": ranks.nothing,
            "pool_cell": lambda: ranks.execute("x + 1"),
            "pool_function": lambda: ranks.run(lambda world: world.rank),
            "pool_get": lambda: ranks.get("x"),
        }
        arms = {name: partial(_median_seconds, call) for name, call in calls.items()}
        samples = alternate(arms | {"launch": partial(seconds_of, launch_nothing)}, repeats)
    return report("ranks", samples, "s", {"pool_call_vs_launch": ("pool_call", "launch")})


def _median_seconds(call: Callable[[], object]) -> float:
    return statistics.median(seconds_of(call) for _ in range(CALLS))
