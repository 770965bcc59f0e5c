"""Processes that are found by a mark which they have inherited, and ended: whatever they have started, too.

torchrun puts each rank into a session of its own, and whatever outlives its parent is anybody's child: neither children
nor process groups have them all. But each has the environment of the process that was started first, and a variable
in that is its mark.
"""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

TORCHRUN = "DDP_TUTORIAL_TORCHRUN"  # the variable that marks a torchrun and its ranks
_END_SECONDS = 10.0


def tagged_processes(variable: str, is_ours: Callable[[str], bool]) -> list[psutil.Process]:
    """All processes but this one whose environment has `variable`, with a value that is ours."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mark = process.environ().get(variable)
            if mark and process.pid != os.getpid() and is_ours(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_tagged(variable: str, is_ours: Callable[[str], bool]) -> None:
    """Kill them, again and again until there are none: one may have been starting another. Gives up after ten seconds,
    with those that the system does not let go of."""
    deadline = time.monotonic() + _END_SECONDS
    while (left := tagged_processes(variable, is_ours)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def kill_torchrun(agent: "subprocess.Popen[Any] | psutil.Popen", tag: str) -> None:
    """Kill a torchrun that was started with `TORCHRUN=mark` in its environment, and all that it has started; the agent
    first, for it would start others. Waits for it."""
    with suppress(psutil.Error, OSError):
        agent.kill()
    kill_tagged(TORCHRUN, tag.__eq__)
    agent.wait()
