"""Find and kill processes based on an environment variable that they inherit.

Each rank of torchrun starts in a new session, and a process that outlives its parent is adopted by a different process.
Therefore, neither the list of child processes nor the POSIX process group contains all descendants. However, all
descendants inherit the first process's environment, so a variable in that environment identifies them.
"""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

TORCHRUN = "DDP_TUTORIAL_TORCHRUN"  # the variable that tags a torchrun agent and its ranks
_END_SECONDS = 10.0
_EXEC_SECONDS = 1.0


def tagged_processes(variable: str, is_ours: Callable[[str], bool]) -> list[psutil.Process]:
    """Return all other processes in which the environment variable `variable` has a value that `is_ours` accepts."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mark = _environment_of(process).get(variable)
            if mark and process.pid != os.getpid() and is_ours(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process.

    While a process replaces its program (`execve`), its environment and its command line are empty for a moment, or for
    longer on a busy machine. The function waits at most one second for that moment to end. The kernel's own threads
    have no environment either, but they have no program.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while not (found := process.environ()) and not process.cmdline() and process.exe() and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def kill_tagged(variable: str, is_ours: Callable[[str], bool]) -> None:
    """Kill the processes that `tagged_processes` returns, and repeat until none is left.

    Repeating is necessary because a process may start another process just before it is killed. After ten seconds,
    `kill_tagged` returns even if some of the processes still exist.
    """
    deadline = time.monotonic() + _END_SECONDS
    while (left := tagged_processes(variable, is_ours)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def kill_torchrun(agent: "subprocess.Popen[Any] | psutil.Popen", tag: str) -> None:
    """Kill a torchrun agent and all processes that it started, then wait for the agent to exit.

    The agent must have been started with `TORCHRUN=tag` in its environment. The agent is killed first, because it would
    otherwise restart its ranks.
    """
    with suppress(psutil.Error, OSError):
        agent.kill()
    kill_tagged(TORCHRUN, tag.__eq__)
    agent.wait()
