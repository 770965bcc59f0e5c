"""The box of a cluster as its owner sees it: started, asked for one thing after another, and ended."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ddp_tutorial.cluster.box import NO_DELAY, receive, send
from ddp_tutorial.config import ConfigError, FailedError

_END_SECONDS = 5.0  # that the box has to end by itself


class BoxClient:
    """The process that holds a cluster (`box`), and the socket on which it answers."""

    def __init__(self) -> None:
        self._box: subprocess.Popen[bytes]
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()  # one question at a time
        self._asked = 0  # questions so far; an answer has the number of its question
        self._nobodys: list[int] = []  # processes started for a caller who was interrupted before it heard of them

    @property
    def is_up(self) -> bool:
        """Is it there? Not before `start`, not after `close`, and not if it has been killed."""
        return self._channel is not None and self._box.poll() is None

    @property
    def is_open(self) -> bool:
        """Between `start` and `close`, whether it lives or not."""
        return self._channel is not None

    @property
    def pid(self) -> int:
        """The process whose child the box is."""
        return self._box.pid

    def start(self) -> None:
        """Raises `ConfigError` where the system does not allow namespaces."""
        _look_at_the_system()
        refused = []
        for as_whom in ((), ("-U", "-r")) if os.geteuid() == 0 else (("-U", "-r"),):
            if (error := self._start(as_whom)) is None:
                return
            refused.append(error)
        raise ConfigError(f"no cluster: this system does not allow namespaces ({refused[-1]})")

    def _start(self, as_whom: tuple[str, ...]) -> str | None:
        """Start the box; the reason if that is not possible."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        python = [sys.executable, "-m", "ddp_tutorial.cluster.box", str(its.fileno())]
        # Its forks are ranks. Where no name server answers, torch warns in each that it does not know who connects.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | environment()
        with its, tempfile.TemporaryFile() as errors:
            self._box = subprocess.Popen(
                ["unshare", *as_whom, *namespaces, *python],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[its.fileno()],
                env=environ,
                start_new_session=True,  # an interrupt is for this process to handle
            )
            self._channel = ours
            its.close()
            try:
                self.ask("hello")
            except FailedError:
                self.close()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().split("\n")
                return said[-1] or f"unshare has ended with {self._box.returncode}"
        return None

    def close(self) -> None:
        """End the box, and by that all that it holds."""
        if self._channel is None:
            return
        self._channel.close()  # the box ends then, and the kernel all others
        self._channel = None
        try:
            self._box.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._box.kill()
            self._box.wait()

    def ask(self, name: str, *args: Any, fds: Sequence[int] = ()) -> Any:
        """Have the box do something, as its `do_NAME` does it, with the files `fds`; its answer.

        A caller may be interrupted while it waits: the box does what it was asked all the same. Its answer is passed
        over when somebody asks again, and if it is that a process has been started, that process is killed.

        Raises `ConfigError` where the box refuses, and `FailedError` where it is gone.
        """
        answer = self._ask(name, *args, fds=fds)
        with suppress(IndexError):
            while True:
                self._ask("signal", self._nobodys.pop(), int(signal.SIGKILL))
        return answer

    def _ask(self, name: str, *args: Any, fds: Sequence[int] = ()) -> Any:
        if self._channel is None:
            raise RuntimeError("the cluster is not there: use it inside of 'with Cluster(...) as cluster:'")
        try:
            with self._lock:
                self._asked += 1
                send(self._channel, (self._asked, name, args), list(fds))
                while (reply := receive(self._channel)[0])[0] != self._asked:
                    if reply[2] is not None:  # only `start` and `fork` have an answer: the process
                        self._nobodys.append(reply[2])
                _, error, answer = reply
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._box.wait(_END_SECONDS)
            holder = "delays its messages" if self._box.returncode == NO_DELAY else "holds it"
            raise FailedError(f"the cluster has ended: the process that {holder} is gone") from None
        if error is not None:
            raise ConfigError(error)
        return answer


def environment() -> dict[str, str]:
    """That of this process, and Python finds the same modules in it."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _look_at_the_system() -> None:
    """Raise `ConfigError` on a system on which no cluster can be built."""
    if sys.platform != "linux":
        raise ConfigError(f"no cluster: it needs the namespaces of Linux, and this is {sys.platform}")
    from shutil import which

    if which("unshare") is None:
        raise ConfigError("no cluster: the command 'unshare' is missing (package util-linux)")
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        raise ConfigError("no cluster: the package pyroute2 is missing. Try: pip install pyroute2") from None
