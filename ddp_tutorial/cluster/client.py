"""Start and stop the server that is a cluster's main process (see `box`), and send requests to the server."""

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

_END_SECONDS = 5.0  # timeout in seconds for the server to exit before it is killed
_EXIT_SECONDS = 60.0  # timeout in seconds for the server to exit after its end of the socket has been closed


class BoxClient:
    """Client that sends requests over a socket to a cluster's main process (see `box`)."""

    def __init__(self) -> None:
        """Create a client without starting the server."""
        self._box: subprocess.Popen[bytes]
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()  # one request at a time
        self._asked = 0  # number of the last request; its reply repeats the number
        self._orphans: list[int] = []  # processes whose caller was interrupted before the reply

    @property
    def is_up(self) -> bool:
        """Whether the server has been started, and still replies."""
        if self._channel is None or self._box.poll() is not None:
            return False
        try:
            self.ask("hello")  # `unshare` may take a moment to notice that the server was killed
        except FailedError:
            return False
        return True

    @property
    def is_open(self) -> bool:
        """Whether `start` has been called and `close` has not, even if the server has exited."""
        return self._channel is not None

    @property
    def pid(self) -> int:
        """Process ID of `unshare`, the server's parent process."""
        return self._box.pid

    def start(self) -> None:
        """Start the server.

        Raises:
            ConfigError: If this system does not support clusters.
            FailedError: If the server failed to start.
        """
        _check_system()
        refused = ""
        for as_whom in ((), ("-U", "-r")) if os.geteuid() == 0 else (("-U", "-r"),):
            if not (refused := self._start(as_whom)):
                return
        raise ConfigError(f"the cluster cannot be started: the kernel does not permit namespaces ({refused})")

    def _start(self, as_whom: tuple[str, ...]) -> str:
        """Start the server with `unshare` and the additional options `as_whom`.

        Returns:
            `unshare`'s error message if the kernel does not permit namespaces. Otherwise, an empty string.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        python = [sys.executable, "-m", "ddp_tutorial.cluster.box", str(its.fileno())]
        # The forks of the server are ranks. Without a name server, torch would warn in each rank that it cannot resolve
        # its peers.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "PASSIVE"} | environment()
        with its, tempfile.TemporaryFile() as errors:
            self._box = subprocess.Popen(
                ["unshare", *as_whom, *namespaces, *python],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[its.fileno()],
                env=environ,
                start_new_session=True,  # only this process handles interrupts
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
                    f"the cluster did not start: its first process exited with code {self._box.returncode}\n{printed}"
                ) from None
        return ""

    def close(self) -> None:
        """Stop the server, after which the kernel kills all other processes in the cluster."""
        if self._channel is None:
            return
        self._channel.close()  # the server then exits, and the kernel kills all other processes
        self._channel = None
        try:
            self._box.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._box.kill()
            self._box.wait()

    def ask(self, name: str, *args: Any, fds: Sequence[int] = ()) -> Any:
        """Send a request, and return the reply.

        If the caller is interrupted while waiting, the server still completes the request. The next call to `ask`
        discards the reply to the interrupted request, and kills any process that the request started.

        Args:
            name: Name of the request, which calls `Box.do_NAME` on the server.
            *args: Arguments of `Box.do_NAME`.
            fds: Open files to pass with the request.

        Raises:
            ConfigError: If the server rejects the request.
            FailedError: If the request failed, or the server has exited.
            RuntimeError: If the server has not been started.
        """
        answer = self._ask(name, *args, fds=fds)
        with suppress(IndexError):
            while True:
                self._ask("signal", self._orphans.pop(), int(signal.SIGKILL))
        return answer

    def _ask(self, name: str, *args: Any, fds: Sequence[int] = ()) -> Any:
        if self._channel is None:
            raise RuntimeError("the cluster is not running: use it inside 'with Cluster(...) as cluster:'")
        try:
            with self._lock:
                self._asked += 1
                send_request(self._channel, self._asked, name, args, fds)
                while (reply := receive(self._channel)[0])[0] != self._asked:
                    if reply[2] is not None:  # only `start` and `fork` return an answer, a process ID
                        self._orphans.append(reply[2])
                _, error, answer = reply
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._box.wait(_EXIT_SECONDS)
            holder = "delays its messages" if self._box.returncode == NO_DELAY else "hosts it"
            raise FailedError(f"the cluster has stopped: the process that {holder} has exited") from None
        if error is not None:
            raise error
        return answer


def environment() -> dict[str, str]:
    """Return the environment of this process, with a PYTHONPATH that makes the same modules importable.

    PYTHONPATH lists the directories that were added to `sys.path`, such as a script's directory. PYTHONPATH omits the
    interpreter's own directories, because a command may run a different Python interpreter.
    """
    interpreters = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    found = [path for path in sys.path if path and Path(path).exists()]
    added = [path for path in found if not any(Path(path).is_relative_to(own) for own in interpreters)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(added)}


def _check_system() -> None:
    """Raise `ConfigError` if this system cannot run a cluster."""
    if sys.platform != "linux":
        raise ConfigError(f"a cluster requires Linux, because it uses kernel namespaces; got platform {sys.platform!r}")
    if which("unshare") is None:
        raise ConfigError(
            "a cluster requires the command 'unshare', which was not found. Install the package util-linux"
        )
    if find_spec("pyroute2") is None:
        raise ConfigError(
            "a cluster requires the package pyroute2, which is not installed. "
            "Run: pip install 'ddp-tutorial[notebooks]'"
        )
