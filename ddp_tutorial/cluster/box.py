"""The process that holds a cluster: the first one of its own namespaces, so that all in it ends when it does.

`Cluster` starts it and asks it for things, one at a time, over a socket; it forks, and the child goes to a host. It
ends when the other end of the socket is closed, which the kernel does if the parent is killed.

A request is one packet, which the kernel sends whole or not at all, even if the sender is interrupted. A packet has
room for 128 KiB, and an environment may be larger, so the arguments are in a file in memory that comes with the packet.
"""

import errno
import os
import pickle
import pkgutil
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ddp_tutorial.cluster.delay import run_delay_line
from ddp_tutorial.cluster.network import Network
from ddp_tutorial.config import ConfigError, FailedError

LARGEST = 2**17  # bytes of a packet
_LONGEST_ERROR = 4000  # characters, so that a reply fits into a packet
NO_DELAY = 3  # the box's exit code where the process that delays frames has ended: no host reaches another any more
DESCRIPTORS = 9  # of a request: its arguments, input, output, exit code, and five for a function


def send_request(channel: socket.socket, number: int, name: str, args: tuple[Any, ...], fds: Sequence[int]) -> None:
    """Send a request for `do_NAME(*args, fds)`, with duplicates of the open files `fds`."""
    with os.fdopen(os.memfd_create("request"), "wb", buffering=0) as body:
        body.write(pickle.dumps(args))
        files = [body.fileno(), *fds]
        socket.send_fds(channel, [pickle.dumps((number, name, len(files)))], files)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return the next packet and its files. Raises `EOFError` if the other side has exited."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, LARGEST, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        raise EOFError from None
    if not data:
        raise EOFError
    return pickle.loads(data), fds


class Box:
    """The process beside the caller's that builds the hosts and starts processes on them, as `channel` asks."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.network: Network
        self.running: dict[int, int] = {}  # process -> the file to which its exit code goes
        self.off: set[int] = set()
        self.holder: int | None = None  # the process that delays frames

    def serve(self) -> None:
        """Answer requests, and reap what has ended, until the parent hangs up."""
        woken, wake = os.pipe()
        for fd in (woken, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            ready, _, _ = select.select([self.channel.fileno(), woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
            self.reap()
            if self.channel.fileno() in ready:
                self.answer()

    def answer(self) -> None:
        """Answer one request. The reply has the number of its request, since a caller that was interrupted leaves its
        reply in the socket. A request that fails leaves the cluster as it is: the reply is the error."""
        (number, name, files), fds = receive(self.channel)
        error: Exception | None = None
        answer = None
        try:
            if len(fds) < files:  # the kernel has dropped those for which this process has no room
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            with os.fdopen(fds.pop(0), "rb") as body:
                body.seek(0)
                args = pickle.load(body)
            answer = getattr(self, f"do_{name}")(*args, fds)
        except ConfigError as refused:
            error = ConfigError(str(refused)[:_LONGEST_ERROR])
        except Exception as failed:
            error = FailedError(f"the cluster cannot {name}: {type(failed).__name__}: {failed}"[:_LONGEST_ERROR])
        finally:
            for fd in fds:
                os.close(fd)
        self.channel.send(pickle.dumps((number, error, answer)))

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.holder:
                os._exit(NO_DELAY)
            if (fd := self.running.pop(pid, None)) is not None:
                with suppress(OSError):  # nobody listens any more
                    os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(fd)

    # Requests. Each gets the files that came with it, and its value is the answer.

    def do_hello(self, fds: list[int]) -> None:
        pass

    def do_build(self, nodes: int, rate: str | None, delay: float, fds: list[int]) -> None:
        """`delay`, in seconds; 0 for none."""
        self.network = Network(nodes, rate, delayed=delay > 0)
        if delay:
            wire = self.network.divert()
            self.holder = os.fork()
            if self.holder == 0:
                self.channel.close()
                try:
                    run_delay_line(wire, delay)
                finally:
                    os._exit(1)
            os.close(wire)

    def do_start(self, argv: list[str], node: int, env: dict[str, str], cwd: str, fds: list[int]) -> int:
        """Start a command on a host: its id."""

        def become() -> None:
            os.chdir(cwd)
            try:
                os.execvpe(argv[0], argv, env)
            except OSError as error:
                print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
                os._exit(127)

        return self.fork(node, fds, become)

    def do_fork(self, entry: str, node: int, env: dict[str, str], cwd: str, fds: list[int]) -> int:
        """Call a function on a host, with the files that came after the third. This process imports it first, and with
        it torch, once for all forks to come."""
        function = pkgutil.resolve_name(entry)

        def become() -> None:
            os.environ.clear()
            os.environ.update(env)
            os.chdir(cwd)
            function(*fds[3:])

        return self.fork(node, fds, become)

    def do_set_rate(self, rate: str | None, fds: list[int]) -> None:
        self.network.set_rate(rate)

    def do_connect(self, node: int, up: bool, fds: list[int]) -> None:
        self.network.connect(node, up)

    def do_kill(self, node: int, fds: list[int]) -> None:
        """The host loses its power: its cable is dead, and so are its processes, at once. Who waits for one of them has
        been told its exit code when this returns: a process that is ending is none of the host's any more."""
        self.off.add(node)
        self.network.connect(node, False)
        killed: set[int] = set()
        while (found := self.network.processes_of(node)) or killed & self.running.keys():
            killed.update(found)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            self.reap()

    def do_signal(self, pid: int, number: int, fds: list[int]) -> None:
        if pid in self.running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def fork(self, node: int, fds: list[int], become: Any) -> int:
        """`fds`: what the child has for input and for output, and where its exit code will be written."""
        if node in self.off:
            raise ConfigError(f"n{node} has been killed, and does not come back")
        sys.stdout.flush()
        status = os.dup(fds[2])
        try:
            pid = os.fork()
        except OSError:
            os.close(status)
            raise
        if pid == 0:
            self._in_the_child(node, fds, become)
        self.running[pid] = status
        return pid

    def _in_the_child(self, node: int, fds: list[int], become: Any) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            self.network.enter(node)
            os.dup2(fds[0], 0)
            os.dup2(fds[1], 1)
            os.dup2(fds[1], 2)
            self.channel.close()
            become()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with suppress(EOFError):
        Box(channel).serve()
    os._exit(0)  # and the kernel ends all others


if __name__ == "__main__":
    main()
