"""Compare `launch` with `torch.multiprocessing.spawn`, for two ranks that form a process group and do nothing else."""

from functools import partial
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.benches import report
from ddp_tutorial.benches.bare_rank import form_group_and_leave
from ddp_tutorial.experiments.arms import alternate, seconds_of
from ddp_tutorial.processes.launcher import launch


def measure(repeats: int) -> dict[str, Any]:
    """Measure the time in seconds from the call until both ranks have exited."""
    arms = {"bare_spawn": _spawn_bare, "launch": launch_nothing}
    samples = alternate({name: partial(seconds_of, arm) for name, arm in arms.items()}, repeats)
    return report("launch", samples, "s", {"launch_vs_bare_spawn": ("launch", "bare_spawn")})


def launch_nothing() -> None:
    """Launch two ranks that form a process group and exit."""
    launch(lambda world: None, 2, device="cpu", threads=1, echo=False)


def _spawn_bare() -> None:
    """Spawn two ranks that connect to a store in this process, as under torchrun.

    The operating system chooses the store's port. Otherwise, a different process could take the port before the store
    opens it. The store outlives all ranks; a store in rank 0 could disappear while the other rank still uses it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(form_group_and_leave, (2, store.port), nprocs=2)
