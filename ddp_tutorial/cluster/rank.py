"""A rank on a host of a cluster: a fork of the box, which has imported torch already, so that it is up at once."""

import gc
import io
import os
import pickle
import sys
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch._dynamo

import ddp_tutorial.processes.rank  # noqa: F401  what a rank will need, imported once for all
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.transport import dump_result
from ddp_tutorial.world import World, process_group

gc.collect()
gc.freeze()  # what is here now is shared with all ranks, as long as nobody touches it


def call_here(call: int, result: int) -> None:
    """Be the rank that the environment says, and call the function in the file `call`. Its result goes to `result`, or
    what it raised. Both are open files that others hold, too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with ExitStack() as stack:
        try:
            threads, timeout, sent = pickle.loads(os.pread(call, os.fstat(call).st_size, 0))  # others read it, too
            torch.set_num_threads(threads)
            fn, args = pickle.loads(sent)
            world = World.detect(device="cpu", timeout=timedelta(seconds=timeout))
            stack.enter_context(process_group(world))
            outcome: tuple[str, object] = ("result", dump_result(fn(world, *args)))
        except (Exception, SystemExit) as error:
            outcome = ("raised", Raised.of(error))
        with open(result, "wb") as file:
            pickle.dump(outcome, file)
    os._exit(int(outcome[0] == "raised"))
