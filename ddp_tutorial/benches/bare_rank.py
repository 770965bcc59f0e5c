"""What a rank of a bare spawn runs. By itself, because a spawned process imports the module of its function: this one
should import torch and nothing else."""

import os
import socket

import torch
import torch.distributed as dist


def form_group_and_leave(rank: int, size: int, port: int) -> None:
    """Meet the others on the loopback interface, with one thread, as a rank of `launch` does."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name in {"lo", "lo0"})
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.destroy_process_group()
