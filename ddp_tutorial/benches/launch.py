"""What `launch` adds to a bare spawn: two ranks that form a group and do nothing else."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.launch import launch


def measure(repeats: int) -> dict[str, Any]:
    """Seconds from the call until both ranks have ended."""
    arms: dict[str, Callable[[], object]] = {"bare_spawn": _spawn_bare, "launch": _launch_nothing}
    samples: Samples = {name: [] for name in arms}
    for arm in arms.values():  # once without counting: the files come into the cache
        arm()
    for _ in range(repeats):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            samples[name].append(time.perf_counter() - start)
    return report("launch", samples, "s", {"launch_vs_bare_spawn": ("launch", "bare_spawn")})


def _launch_nothing() -> None:
    launch(lambda world: None, 2, device="cpu", threads=1, echo=False)


def _spawn_bare() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_bare_rank, (port,), nprocs=2)


def _bare_rank(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.destroy_process_group()
