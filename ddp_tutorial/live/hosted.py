"""A rank of a pool on a node of a cluster: a fork of the process that holds the cluster, which has imported this."""

import gc
import os
import pickle

from ddp_tutorial.live.member import serve
from ddp_tutorial.live.moments import Seat
from ddp_tutorial.processes.transport import Descriptor

gc.collect()
gc.freeze()  # what is here now is shared with all ranks, as long as nobody touches it


def serve_here(seat: int, messages: int, requests: int, control: int) -> None:
    """Be the rank that the environment and the file `seat` describe, until the pool is gone. The numbers are open
    files; this process prints into the rank's output already."""
    settings = pickle.loads(os.pread(seat, os.fstat(seat).st_size, 0))
    serve(
        0,
        Seat(
            output=Descriptor(os.dup(1)),
            messages=Descriptor(messages),
            requests=Descriptor(requests),
            control=Descriptor(control),
            parent=os.getppid(),
            dies_with_thread=True,
            **settings,
        ),
    )
