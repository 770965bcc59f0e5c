"""Define the function that each rank runs in the `torch.multiprocessing.spawn` arm of the launch benchmark.

A spawned process imports the module that defines its target function, so this module imports no package except torch.
"""

import os
import socket

import torch
import torch.distributed as dist


def form_group_and_leave(rank: int, size: int, port: int) -> None:
    """Join and leave a gloo process group of `size` ranks on the loopback interface.

    Like the ranks in the `launch` arm, the process uses one thread.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name in {"lo", "lo0"})
    # The initialization ends with a barrier. Otherwise, a rank could exit early, and a rank that is still connecting
    # would fail with "Gloo connectFullMesh failed with ... Connection closed by peer".
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.destroy_process_group()
