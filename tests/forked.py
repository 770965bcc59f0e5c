"""Ranks that are forked from servers which have imported torch, so that a test's `launch` takes tenths of a second.

`torch.multiprocessing.spawn` starts a new interpreter for each rank, and two seconds of each launch go to importing
torch. Here a rank is forked from a process that has imported torch, what modules of tests import and what every rank
of this package runs, and has done nothing else (`multiprocessing`'s forkserver). It has an environment, a folder and a
path of its own, imports the rest itself, and ends like any other. There are two servers, each with a seed of its own
for Python's hashes, and a launch takes another one for each rank than the launch before: ranks which rely on the order
of a set would differ, as they do when they are spawned.

What cannot be had this way is left to the tests marked `spawned` and to the notebooks: a rank's
parent is the server, which the kernel tells it of when it dies, and the environment that other processes see is the
server's.

The process that starts the servers may lend them to others, by an environment variable (`lent`): the kernels of all
notebooks that nbval runs have those of its tests.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import numpy as np
import torch.multiprocessing

# The trainer and with it most of the package, what it imports late, and what modules of tests import.
PRELOADED = [
    "ddp_tutorial.training.tasks",
    "torch._dynamo",
    "datasets",
    "tensorboardX",
    "pytest",
    "hypothesis",
    "nbformat",  # a second and a half, for the grammars of addresses that it is never given
]
SERVERS = 2
LENT = "FORKED_SERVERS"  # the environment variable

# Of the tests: inside a launch there is more, by which it finds and ends what it has started. Nothing may wake up a GPU
# in a server, or forked processes could not use it; and no thread may be started, such as pyarrow's, which tidies up
# its memory, as a forked process would have to do without it.
_OWN = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_servers: list[forkserver.ForkServer] = []
_launches = itertools.count()


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True) -> Any:
    """In place of `torch.multiprocessing.spawn`: the same processes, started sooner."""
    turn = next(_launches)
    contexts = []
    for rank in range(nprocs):
        with _served_by(_server((turn + rank) % SERVERS)):
            start = torch.multiprocessing.start_processes
            contexts.append(start(_run, (rank, dict(os.environ), fn, args), 1, join=False, start_method="forkserver"))
    context = torch.multiprocessing.ProcessContext(
        [process for one in contexts for process in one.processes],
        [file for one in contexts for file in one.error_files],
    )
    while join and not context.join():
        pass
    return context


def _run(_: int, rank: int, environ: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the new process: be what a spawned one would be, then do as told."""
    assert set(PRELOADED) <= sys.modules.keys(), "the server goes on where it cannot import, and every rank is slow"
    _become(environ)
    torch.distributed.set_debug_level_from_env()  # torch does this when it is imported
    np.random.seed()  # Python does this for its own random numbers; torch begins with the same in any process
    for job in args:
        if hasattr(job, "parent"):  # that of a spawned rank is the process that launches it
            job.parent = os.getppid()
    fn(rank, *args)


def _server(index: int) -> forkserver.ForkServer:
    """All are started at the first call, where none are lent; until one has imported what it should, its ranks wait."""
    if not _servers and LENT in os.environ:
        _servers.extend(_Borrowed(*each) for each in json.loads(os.environ[LENT]))
    while len(_servers) < SERVERS:
        server = forkserver.ForkServer()
        server.set_forkserver_preload(PRELOADED)
        with _environment(_OWN):
            server.ensure_running()
        _servers.append(server)
    return _servers[index]


class _Borrowed(forkserver.ForkServer):
    """A server that another process has started; it ends with that one."""

    def __init__(self, address: str, key: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_authkey = bytes.fromhex(key)
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # sent along; what is behind it keeps nobody alive

    def ensure_running(self) -> None: ...


def lent() -> str:
    """The value of `LENT` with which another process uses the servers of this one."""
    _server(0)  # starts all
    keys = [getattr(server, "_forkserver_authkey", b"") for server in _servers]  # Python has them from 3.14 on
    return json.dumps([(server._forkserver_address, key.hex()) for server, key in zip(_servers, keys, strict=True)])


def servers() -> list[int]:
    """The process numbers of those that have been started; they live as long as this process."""
    return [server._forkserver_pid for server in _servers]


def _become(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


@contextmanager
def _environment(environ: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _become(environ)
    try:
        yield
    finally:
        _become(before)


@contextmanager
def _served_by(server: forkserver.ForkServer) -> Iterator[None]:
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before
