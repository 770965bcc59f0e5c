"""What it takes to start processes as ranks and to end them, whoever does: `launch`, or a pool of ranks that stay."""

import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.environment import variables_restored
from ddp_tutorial.processes.console import ipython_shell
from ddp_tutorial.processes.process_tags import kill_tagged
from ddp_tutorial.processes.signals import handling

# How long ranks have to end when they are asked to.
END_SECONDS = 1.0
# The environment variable by which the processes that ranks have started are found.
MARK = "DDP_TUTORIAL_LAUNCH"
# What children inherit, environment and main module, there is once in a process: one thread at a time may change
# it. Else ranks took on the variables of another thread's launch, its mark too, and were killed when that one ended.
_INHERITED = threading.RLock()
# From so many ranks for each core on, a person is told.
_CROWD = 8


def announce(nprocs: int, device: str, backend: str) -> str:
    """One line that says how many ranks are started, on which device and with which backend."""
    ranks = "1 rank" if nprocs == 1 else f"{nprocs} ranks"
    if device == "cuda":
        return f"{ranks} on cuda, {backend}"
    gpus = torch.cuda.device_count()
    return f"{ranks} on cpu, {backend}" + (f" (GPUs found: {gpus}, fewer than ranks)" if gpus else "")


def oversubscription_warning(nprocs: int, device: str, cores: int) -> str | None:
    """One line that warns where so many ranks share `cores` cores that starting them takes minutes; else None."""
    if device != "cpu" or nprocs <= _CROWD * cores:
        return None
    several = "1 core" if cores == 1 else f"{cores} cores"
    return f"{nprocs} ranks take turns with {several}: starting them may take minutes, and needs about 150 MB for each"


def exit_descriptor(process: Any) -> int:
    """Return a new descriptor that becomes readable when `process` exits. The caller closes it.

    `Process.sentinel` is a pipe whose other end leaks into the programs that the process starts: it becomes readable
    only when those have exited too. It is the fallback where the system has no pidfd.
    """
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError, TypeError):  # not Linux, an old kernel, a sandbox; or the process has no number
        return os.dup(process.sentinel)


def has_exited(process: Any) -> bool:
    """Return whether `process` has exited and its exit code is known. Never blocks."""
    process.join(0)
    return process.exitcode is not None


def terminate_all(processes: list[Any], mark: str) -> list[Any]:
    """Terminate the ranks' processes, and every process that has `mark` in its environment because a rank started it.

    Each rank gets SIGTERM, then SIGKILL after `END_SECONDS`.

    Returns:
        The processes that are still there `END_SECONDS` after SIGKILL, such as one that waits for a dead NFS server.
    """
    for process in processes:
        process.terminate()
    for process in wait_for_exit(processes):
        process.kill()
    stuck = wait_for_exit(processes)
    # A process that a rank has started may have outlived the rank, and is no child of it any more.
    kill_tagged(MARK, mark.__eq__)
    return stuck


def cannot_be_killed(rank: int, pid: int) -> str:
    """Return the sentence that names a process which SIGKILL does not end."""
    return (
        f"rank {rank}'s process {pid} is still there after SIGKILL: it waits in the kernel, for a disk or network file "
        f"system that does not answer, or a debugger holds it. Look at it with: ps -o pid,stat,wchan -p {pid}"
    )


def wait_for_exit(processes: list[Any]) -> list[Any]:
    """Wait at most `END_SECONDS`. Returns the processes that have not exited."""
    deadline = time.monotonic() + END_SECONDS
    while (left := [process for process in processes if not has_exited(process)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def loopback_store(nprocs: int) -> dist.TCPStore | None:
    """The store at which `nprocs` ranks meet, hosted by this process; None for one rank. Its socket is opened here:
    nobody can take the port in between, and it listens on the loopback interface only, where TCPStore by itself listens
    on all."""
    if nprocs == 1:
        return None
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(nprocs, 16))
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        nprocs,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def rank_environment(nprocs: int, threads: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set, all but RANK and LOCAL_RANK, and those that torch's threads need.

    OpenMP reads its own when torch is imported, so they have to be there when the process starts.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), "lo")
    return {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client; the parent is the server
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(threads),
        # Threads of a matrix product wait for one another. By default they spin, and where another process has one of
        # the cores, two threads are several times slower than one.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let interrupts wait until the end of the block, here and in the children that are started inside.

    Two things are needed. Children inherit the signal mask, so none of them is hit before it has learnt to ignore
    interrupts. But the mask is the thread's own, and a process with several threads, such as a Jupyter kernel, is hit
    all the same; hence the handler, which takes a note.
    """
    resource_tracker.ensure_running()  # else spawn starts it inside, which unblocks SIGINT (Python 3.11)
    noted: list[int] = []
    try:
        with handling([signal.SIGINT], lambda number, _: noted.append(number)):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if noted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set for the children that start inside, from their first moment on, and put back for this process."""
    with _INHERITED, variables_restored(*variables):
        os.environ.update(variables)
        yield


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep `multiprocessing` from importing the caller's script in the processes that start inside: see `script`.

    It looks at `__main__.__spec__`, and imports nothing where that is the `__main__.py` of a package or folder.
    """
    with _INHERITED:
        main = sys.modules["__main__"]
        spec, main.__spec__ = getattr(main, "__spec__", None), ModuleSpec("__main__", None)
        try:
            yield
        finally:
            main.__spec__ = spec


def cell_sources() -> dict[str, list[str]]:
    """The source lines of notebook cells, by file name: entries of linecache with no time of change and no file."""
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and entry[2] and not Path(name).exists()
    }


def rename_cells(trace: str) -> str:
    """Call a cell what the notebook calls it: `File "ipykernel_7/3.py", line 2` -> `Cell In[4], line 2`."""
    known_as = getattr(getattr(ipython_shell(), "compile", None), "format_code_name", lambda name: None)
    return re.sub(r'File "([^"]+)"', lambda match: " ".join(known_as(match[1]) or [match[0]]), trace)


def strip_noise(text: str) -> str:
    """gloo's messages without the line of its C++ source in front and the general advice at the end."""
    text = re.sub(r"\[/\S+\.cc:\d+\] ", "", text)
    return re.sub(r"\. This is typically caused by .*", "", text)
