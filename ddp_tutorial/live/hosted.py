"""Run a rank of a pool on a cluster node. The cluster's main process imports this module, and forks the ranks."""

import gc
import os
import pickle

from ddp_tutorial.live.messages import WorkerSpec
from ddp_tutorial.live.worker import serve
from ddp_tutorial.processes.transport import Descriptor

gc.collect()
gc.freeze()  # forked ranks share the memory of the current objects until a process writes to it


def serve_here(spec: int, messages: int, requests: int, control: int) -> None:
    """Run the rank that the environment and `spec` describe, until the pool closes.

    All arguments are open file descriptors. The output of this process is already redirected to the pool.

    Args:
        spec: File that contains the pickled settings.
        messages: Pipe for messages to the pool.
        requests: Pipe for calls.
        control: Pipe for messages to the control thread.
    """
    settings = pickle.loads(os.pread(spec, os.fstat(spec).st_size, 0))
    serve(
        0,
        WorkerSpec(
            output=Descriptor(os.dup(1)),
            messages=Descriptor(messages),
            requests=Descriptor(requests),
            control=Descriptor(control),
            parent=os.getppid(),
            dies_with_thread=True,
            **settings,
        ),
    )
