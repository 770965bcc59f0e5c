"""Helpers that several tests use, many of them on ranks."""

import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ddp_tutorial.ddp.link import Transfer

# Two ranks, started by torch itself; what they run comes after it.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def error_of(function: Callable[[], object]) -> str:
    """Return the error that a function raises, as text, so that a rank reports it instead of failing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Return whether the condition holds within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def is_gone(pid: int) -> bool:
    """Return whether a process has exited. A zombie has exited: if nobody reaps orphans, it stays."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def open_files() -> set[Path]:
    """Return what the file descriptors of this process refer to, such as a path or "socket:[4711]"."""
    found = set()
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(descriptor.readlink())
    return found


def free_port() -> int:
    """Return a free port outside the range from which the kernel assigns ports, so that no other process gets it.

    Linux assigns ports from 32768 on. The tests that run at the same time open hundreds of those.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def watched(link: Any) -> list[Transfer]:
    """Return a list that receives the future transfers of the link."""
    transfers: list[Transfer] = []
    link.observer = transfers.append
    return transfers
