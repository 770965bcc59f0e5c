"""What `launch` adds to a bare spawn: two ranks that form a group and do nothing else."""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.bare_rank import form_group_and_leave
from ddp_tutorial.processes.launcher import launch


def measure(repeats: int) -> dict[str, Any]:
    """Seconds from the call until both ranks have ended."""
    arms: dict[str, Callable[[], object]] = {"bare_spawn": _spawn_bare, "launch": _launch_nothing}
    samples: Samples = {name: [] for name in arms}
    for arm in arms.values():  # once without counting: the files come into the cache
        arm()
    for repeat in range(repeats):
        for name in sorted(arms, reverse=bool(repeat % 2)):  # who goes first alternates
            start = time.perf_counter()
            arms[name]()
            samples[name].append(time.perf_counter() - start)
    return report("launch", samples, "s", {"launch_vs_bare_spawn": ("launch", "bare_spawn")})


def _launch_nothing() -> None:
    launch(lambda world: None, 2, device="cpu", threads=1, echo=False)


def _spawn_bare() -> None:
    """The ranks meet at a store that this process hosts, as under torchrun: on a port that the system has chosen (one
    that is looked for first and opened later, somebody else may take in between), and for as long as a rank lives (the
    store of rank 0 would be gone with rank 0, while others still ask it)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(form_group_and_leave, (2, store.port), nprocs=2)
