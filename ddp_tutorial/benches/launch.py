"""Compare `launch` with `torch.multiprocessing.spawn`, for two ranks that form a process group and do nothing else."""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.bare_rank import form_group_and_leave
from ddp_tutorial.processes.launcher import launch


def measure(repeats: int) -> dict[str, Any]:
    """Measure the time in seconds from the call until both ranks have exited."""
    arms: dict[str, Callable[[], object]] = {"bare_spawn": _spawn_bare, "launch": _launch_nothing}
    samples: Samples = {name: [] for name in arms}
    for arm in arms.values():  # a warm-up, which fills the file cache
        arm()
    for repeat in range(repeats):
        for name in sorted(arms, reverse=bool(repeat % 2)):  # alternate the order
            start = time.perf_counter()
            arms[name]()
            samples[name].append(time.perf_counter() - start)
    return report("launch", samples, "s", {"launch_vs_bare_spawn": ("launch", "bare_spawn")})


def _launch_nothing() -> None:
    launch(lambda world: None, 2, device="cpu", threads=1, echo=False)


def _spawn_bare() -> None:
    """Spawn two ranks that connect to a store in this process, as under torchrun.

    The operating system chooses the store's port. Otherwise, a different process could take the port before the store
    opens it. The store outlives all ranks; a store in rank 0 could disappear while the other rank still uses it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(form_group_and_leave, (2, store.port), nprocs=2)
