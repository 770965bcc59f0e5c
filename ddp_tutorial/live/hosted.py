"""A rank of a pool on a node of a cluster: a fork of the process that holds the cluster, which has imported this."""

import gc
import os
import pickle

from ddp_tutorial.live.messages import WorkerSpec
from ddp_tutorial.live.worker import serve
from ddp_tutorial.processes.transport import Descriptor

gc.collect()
gc.freeze()  # what is here now is shared with all ranks, as long as nobody touches it


def serve_here(spec: int, messages: int, requests: int, control: int) -> None:
    """Be the rank that the environment and the file `seat` describe, until the pool is gone. The numbers are open
    files; this process prints into the rank's output already."""
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
