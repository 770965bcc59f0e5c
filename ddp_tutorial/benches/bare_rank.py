"""What a rank of a bare spawn runs, in a module of its own: a spawned process imports the module of its function, and
this one should import nothing but torch."""

import os
import socket

import torch
import torch.distributed as dist


def form_group_and_leave(rank: int, size: int, port: int) -> None:
    """Join a gloo group of `size` ranks on the loopback interface, with one thread, as a rank of `launch` does."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name in {"lo", "lo0"})
    # All ranks leave the initialisation together. A rank that has nothing else to do would be gone while another still
    # connects to it, and that one would fail: "Gloo connectFullMesh failed with ... Connection closed by peer".
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.destroy_process_group()
