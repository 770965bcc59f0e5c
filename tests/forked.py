"""Fork ranks from servers that have imported torch, so that `launch` takes tenths of a second.

`torch.multiprocessing.spawn` starts a new interpreter for each rank, and importing torch takes two seconds. Here, a
rank is a fork of a process that has imported torch, the imports of test modules, and the common modules of this package
(`multiprocessing`'s forkserver). A rank has its own environment, folder and path, and exits like any other rank.

There are two servers with different hash seeds, and a launch assigns each rank to a different server than the launch
before. Ranks that rely on the order of a set would differ, as spawned ranks do.

Two properties differ from spawned ranks, and are tested with the marker `spawned` and in the notebooks: a rank's parent
is the server, and other processes see the server's environment. The process that starts the servers can share them with
other processes through an environment variable (`lent`). The kernels of all notebooks under nbval share servers in this
way.
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
    "jinja2",  # for a model's card
    "pytest",
    "hypothesis",
    "nbformat",  # importing it would take 1.5 s for unused address grammars
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
    """Replace `torch.multiprocessing.spawn`: start the same processes faster."""
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
    """Set up the new process like a spawned process, then run its function."""
    assert set(PRELOADED) <= sys.modules.keys(), "the server goes on where it cannot import, and every rank is slow"
    _become(environ)
    torch.distributed.set_debug_level_from_env()  # torch does this at import
    np.random.seed()  # Python does this for its own random numbers; torch begins with the same in any process
    for job in args:
        if hasattr(job, "parent"):  # the parent of a spawned rank is the launching process
            job.parent = os.getppid()
    fn(rank, *args)


def _server(index: int) -> forkserver.ForkServer:
    """Return a server.

    The first call starts all servers unless they are shared; ranks wait until a server has imported its modules.
    """
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
    """A server that a different process has started. It exits with that process."""

    def __init__(self, address: str, key: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_authkey = bytes.fromhex(key)
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # passed on; the other end keeps no process alive

    def ensure_running(self) -> None: ...


def lent() -> str:
    """Return the value of `LENT` with which a different process can use the servers of this process."""
    _server(0)  # starts all servers
    keys = [getattr(server, "_forkserver_authkey", b"") for server in _servers]  # exists since Python 3.14
    return json.dumps([(server._forkserver_address, key.hex()) for server, key in zip(_servers, keys, strict=True)])


def servers() -> list[int]:
    """Return the process IDs of the servers. They run as long as this process."""
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
