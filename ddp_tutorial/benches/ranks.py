"""Compare the duration of a call on two persistent ranks with the duration of a launch. The ranks do nothing."""

import statistics
import time
from typing import Any

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.live.pool import Ranks
from ddp_tutorial.processes.launcher import launch

CALLS = 50  # per repeat; the result is the median of the calls


def measure(repeats: int) -> dict[str, Any]:
    """Measure the time in seconds from a call until both ranks have completed the call.

    The arms are an empty call, a cell with one expression, a function passed by value, a value sent to the parent
    process, and a launch.
    """
    samples: Samples = {name: [] for name in ("pool_call", "pool_cell", "pool_function", "pool_get", "launch")}
    with Ranks(2, threads=1, device="cpu", echo=False) as ranks:
        ranks.put(x=1)
        arms = {
            "pool_call": ranks.nothing,
            "pool_cell": lambda: ranks.execute("x + 1"),
            "pool_function": lambda: ranks.run(lambda world: world.rank),
            "pool_get": lambda: ranks.get("x"),
        }
        for arm in arms.values():
            arm()
        for _ in range(repeats):
            for name, arm in arms.items():
                samples[name].append(statistics.median(_seconds(arm) for _ in range(CALLS)))
            samples["launch"].append(
                _seconds(lambda: launch(lambda world: None, 2, device="cpu", threads=1, echo=False))
            )
    return report("ranks", samples, "s", {"pool_call_vs_launch": ("pool_call", "launch")})


def _seconds(act: Any) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
