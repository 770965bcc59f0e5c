"""The box of a cluster as its owner sees it: started, asked for one thing after another, and ended."""

import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from ddp_tutorial.cluster.box import NO_DELAY, receive, send_request
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
        """Return whether the box answers: not before `start`, not after `close`, and not if it has been killed."""
        if self._channel is None or self._box.poll() is not None:
            return False
        try:
            self.ask("hello")  # `unshare` may take a moment to notice that its child, the box, has been killed
        except FailedError:
            return False
        return True

    @property
    def is_open(self) -> bool:
        """Between `start` and `close`, whether it lives or not."""
        return self._channel is not None

    @property
    def pid(self) -> int:
        """The process whose child the box is."""
        return self._box.pid

    def start(self) -> None:
        """Raises `ConfigError` if this system cannot hold a cluster, and `FailedError` if the box does not start."""
        _look_at_the_system()
        refused = ""
        for as_whom in ((), ("-U", "-r")) if os.geteuid() == 0 else (("-U", "-r"),):
            if not (refused := self._start(as_whom)):
                return
        raise ConfigError(f"no cluster: the kernel permits no namespaces here ({refused})")

    def _start(self, as_whom: tuple[str, ...]) -> str:
        """Start the box. Returns the message of `unshare` if the kernel permits no namespaces, otherwise ""."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        python = [sys.executable, "-m", "ddp_tutorial.cluster.box", str(its.fileno())]
        # Its forks are ranks. Where no name server answers, torch warns in each that it does not know who connects.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "PASSIVE"} | environment()
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
                printed = errors.read().decode(errors="replace").strip()
                last = printed.rpartition("\n")[2]
                if last.startswith("unshare: "):
                    return last
                raise FailedError(
                    f"the cluster did not start: its first process exited with {self._box.returncode}\n{printed}"
                ) from None
        return ""

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

        Raises `ConfigError` if the box refuses, and `FailedError` if it cannot, or is gone.
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
                send_request(self._channel, self._asked, name, args, fds)
                while (reply := receive(self._channel)[0])[0] != self._asked:
                    if reply[2] is not None:  # only `start` and `fork` have an answer: the process
                        self._nobodys.append(reply[2])
                _, error, answer = reply
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._box.wait(_END_SECONDS)
            holder = "delays its messages" if self._box.returncode == NO_DELAY else "holds it"
            raise FailedError(f"the cluster has ended: the process that {holder} is gone") from None
        if error is not None:
            raise error
        return answer


def environment() -> dict[str, str]:
    """Return the environment of this process, in which Python finds the same modules.

    PYTHONPATH lists the folders that were added to `sys.path`, such as a script's, and not those of the interpreter: a
    command may run a different Python, which must not find this one's library.
    """
    interpreters = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    found = [path for path in sys.path if path and Path(path).exists()]
    added = [path for path in found if not any(Path(path).is_relative_to(own) for own in interpreters)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(added)}


def _look_at_the_system() -> None:
    """Raise `ConfigError` on a system on which no cluster can be built."""
    if sys.platform != "linux":
        raise ConfigError(f"needs Linux: a cluster consists of the kernel's namespaces, and this is {sys.platform}")
    if which("unshare") is None:
        raise ConfigError("no cluster: the command 'unshare' is missing (package util-linux)")
    if find_spec("pyroute2") is None:
        raise ConfigError("no cluster: the package pyroute2 is missing. Try: pip install pyroute2")
