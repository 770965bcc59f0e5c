"""Start and terminate the rank processes of `launch` and of the `Ranks` pool."""

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

# Seconds that ranks have to exit after SIGTERM, and again after SIGKILL.
END_SECONDS = 1.0
# Environment variable that identifies the processes that ranks have started.
MARK = "DDP_TUTORIAL_LAUNCH"
# Child processes inherit the environment and the main module, which all threads share, so only one thread at a time may
# change them. Otherwise, ranks would inherit the variables of a launch in a different thread, including its mark, and
# would be killed when that launch finishes.
_INHERITED = threading.RLock()
# Ranks per core above which `oversubscription_warning` returns a warning.
_CROWD = 8


def announce(nprocs: int, device: str, backend: str) -> str:
    """Return one line that states the number of ranks, the device and the backend."""
    ranks = "1 rank" if nprocs == 1 else f"{nprocs} ranks"
    if device == "cuda":
        return f"{ranks} on cuda, {backend}"
    gpus = torch.cuda.device_count()
    return f"{ranks} on cpu, {backend}" + (f" (GPUs found: {gpus}, fewer than ranks)" if gpus else "")


def oversubscription_warning(nprocs: int, device: str, cores: int) -> str | None:
    """Return a warning if so many ranks share the CPU cores that startup takes minutes; otherwise, return None."""
    if device != "cpu" or nprocs <= _CROWD * cores:
        return None
    several = "1 core" if cores == 1 else f"{cores} cores"
    return f"{nprocs} ranks share {several}: starting them may take minutes and requires about 150 MB per rank"


def exit_descriptor(process: Any) -> int:
    """Return a new file descriptor that becomes readable when `process` exits. The caller must close it.

    The descriptor is a pidfd if the system supports it, and otherwise a duplicate of `Process.sentinel`. The sentinel
    is a pipe whose other end leaks into the programs that the process starts. The sentinel therefore becomes readable
    only after those programs have also exited.
    """
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError, TypeError):  # not Linux, an old kernel, a sandbox, or a process without an ID
        return os.dup(process.sentinel)


def has_exited(process: Any) -> bool:
    """Return whether `process` has exited and its exit code is known. This function never blocks."""
    process.join(0)
    return process.exitcode is not None


def terminate_all(processes: list[Any], mark: str) -> list[Any]:
    """Terminate the ranks, and kill the processes with `MARK=mark` in their environment.

    Child processes inherit this variable. Each rank receives SIGTERM and, after `END_SECONDS` seconds, SIGKILL.

    Returns:
        The processes of ranks that still exist `END_SECONDS` seconds after SIGKILL, for example because they are
        waiting for an unresponsive NFS server.
    """
    for process in processes:
        process.terminate()
    for process in wait_for_exit(processes):
        process.kill()
    stuck = wait_for_exit(processes)
    # A process that a rank started may have outlived the rank, and is then no longer its child.
    kill_tagged(MARK, mark.__eq__)
    return stuck


def cannot_be_killed(rank: int, pid: int) -> str:
    """Return an error message for a rank's process that still exists after SIGKILL."""
    return (
        f"rank {rank}'s process {pid} still exists after SIGKILL: it is blocked in the kernel by a disk or network "
        f"file system that does not respond, or held by a debugger. Inspect it with: ps -o pid,stat,wchan -p {pid}"
    )


def wait_for_exit(processes: list[Any]) -> list[Any]:
    """Wait at most `END_SECONDS` seconds, and return the processes that have not exited."""
    deadline = time.monotonic() + END_SECONDS
    while (left := [process for process in processes if not has_exited(process)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def loopback_store(nprocs: int) -> dist.TCPStore | None:
    """Create a store, hosted by this process, for the rendezvous of `nprocs` ranks.

    Because this function opens the listening socket itself, no other process can take the port first. The store listens
    on the loopback interface only, whereas a `TCPStore` listens on all interfaces by default.

    Returns:
        The store, or None for a single rank, which does not need a store.
    """
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
    """Return the environment variables that have the same values on all ranks.

    OpenMP reads its variables when torch is imported, so they must be set before the process starts.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), "lo")
    return {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store, and every rank is a client
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(threads),
        # The threads of a matrix product wait for one another, by default in a busy loop. If a different process
        # occupies one of the cores, two busy-waiting threads are several times slower than one thread.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer interrupts until the block exits, in this process and in child processes that start inside the block.

    Two mechanisms are needed. Child processes inherit the blocked signal mask, so no child is interrupted before it
    ignores SIGINT. However, a mask applies to one thread only. In a process with several threads, such as a Jupyter
    kernel, a different thread receives the signal. A handler therefore delays the interrupt until the block exits.
    """
    resource_tracker.ensure_running()  # spawn would start the tracker inside the block and unblock SIGINT (Python 3.11)
    interrupts: list[int] = []
    try:
        with handling([signal.SIGINT], lambda number, _: interrupts.append(number)):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if interrupts:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for child processes that start inside the block, then restore the previous values."""
    with _INHERITED, variables_restored(*variables):
        os.environ.update(variables)
        yield


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Prevent `multiprocessing` from importing the caller's script in new processes.

    Only processes that start inside the block are affected; see `script`. `multiprocessing` checks `__main__.__spec__`,
    and imports nothing if the module is the `__main__.py` of a package or directory.
    """
    with _INHERITED:
        main = sys.modules["__main__"]
        spec, main.__spec__ = getattr(main, "__spec__", None), ModuleSpec("__main__", None)
        try:
            yield
        finally:
            main.__spec__ = spec


def cell_sources() -> dict[str, list[str]]:
    """Return a dict that maps each notebook cell's file name to its source lines.

    A `linecache` entry is a cell if it contains no modification time and its file does not exist.
    """
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and entry[2] and not Path(name).exists()
    }


def rename_cells(trace: str) -> str:
    """Replace the file names of notebook cells with the labels that the notebook shows.

    Example:
        `File "ipykernel_7/3.py", line 2` becomes `Cell In[4], line 2`.
    """
    known_as = getattr(getattr(ipython_shell(), "compile", None), "format_code_name", lambda name: None)
    return re.sub(r'File "([^"]+)"', lambda match: " ".join(known_as(match[1]) or [match[0]]), trace)


def strip_noise(text: str) -> str:
    """Remove the C++ source location and the general advice from gloo's error messages."""
    text = re.sub(r"\[/\S+\.cc:\d+\] ", "", text)
    return re.sub(r"\. This is typically caused by .*", "", text)
