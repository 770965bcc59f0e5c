"""Run a rank on a cluster host. The rank is forked from the cluster's main process, which has imported torch."""

import gc
import io
import os
import pickle
import sys
from datetime import timedelta

import torch

import ddp_tutorial.processes.rank  # noqa: F401  imported once, because all ranks need it
from ddp_tutorial.compat import import_dynamo
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.transport import dump_result
from ddp_tutorial.world import World, process_group

UP = b"\1"

import_dynamo()
gc.collect()
gc.freeze()  # forked ranks share the memory of the current objects until a process writes to it


def call_here(call: int, result: int) -> None:
    """Join the process group as the rank that the environment variables specify, and call the pickled function.

    Args:
        call: Descriptor of the file with the pickled call, which all ranks share.
        result: Descriptor of the file for the outcome. The first byte is written when the rank has joined the process
            group. The pickled result or exception follows.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    outcome: tuple[str, object]
    try:
        # `pread` is used because the ranks share the file offset
        threads, timeout, sent = pickle.loads(os.pread(call, os.fstat(call).st_size, 0))
        torch.set_num_threads(threads)
        fn, args = pickle.loads(sent)
        with process_group(World.detect(device="cpu", timeout=timedelta(seconds=timeout))) as world:
            os.write(result, UP)
            outcome = "result", dump_result(fn(world, *args))
    except BaseException as error:
        outcome = "raised", Raised.of(error)
    os.pwrite(result, pickle.dumps(outcome), len(UP))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(outcome[0] == "raised"))
