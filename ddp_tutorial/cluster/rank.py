"""A rank on a host of a cluster: a fork of the box, which has imported torch already, so that it is up at once."""

import gc
import io
import os
import pickle
import sys
from datetime import timedelta

import torch

import ddp_tutorial.processes.rank  # noqa: F401  what a rank will need, imported once for all
from ddp_tutorial.compat import import_dynamo
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.transport import dump_result
from ddp_tutorial.world import World, process_group

UP = b"\1"

import_dynamo()
gc.collect()
gc.freeze()  # what is here now is shared with all ranks, as long as nobody touches it


def call_here(call: int, result: int) -> None:
    """Be the rank that the environment says, and call the function in the file `call`. Its result goes to `result`, or
    what it raised, after a byte that says that it has met the others. Both are open files that others hold, too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    outcome: tuple[str, object]
    try:
        threads, timeout, sent = pickle.loads(os.pread(call, os.fstat(call).st_size, 0))  # others read it, too
        torch.set_num_threads(threads)
        fn, args = pickle.loads(sent)
        with process_group(World.detect(device="cpu", timeout=timedelta(seconds=timeout))) as world:
            os.write(result, UP)
            outcome = "result", dump_result(fn(world, *args))
    except (Exception, SystemExit) as error:
        outcome = "raised", Raised.of(error)
    os.pwrite(result, pickle.dumps(outcome), len(UP))
    os._exit(int(outcome[0] == "raised"))
