"""Run the server that is a cluster's main process.

The server is the first process in its own namespaces, so the kernel kills all processes in these namespaces when the
server exits. `Cluster` starts the server and sends it requests over a socket, one at a time. To start a process, the
server forks, and the child enters a host's namespaces. The server exits when its client closes the socket or is killed.

A request is one packet, which the kernel sends completely or not at all, even if the sender is interrupted. The packet
passes the request's arguments in an in-memory file, because they can exceed the maximum packet size of 128 KiB.
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

LARGEST = 2**17  # maximum packet size in bytes
_LONGEST_ERROR = 4000  # maximum length of an error message, so that a reply fits into a packet
NO_DELAY = 3  # exit code of the box if the process that delays frames has exited, which disconnects all hosts
DESCRIPTORS = 9  # maximum number of files per request: arguments, input, output, exit code, and five for a function


def send_request(channel: socket.socket, number: int, name: str, args: tuple[Any, ...], fds: Sequence[int]) -> None:
    """Send a request to call `do_NAME(*args, fds)`, and pass duplicates of the open files `fds`."""
    with os.fdopen(os.memfd_create("request"), "wb", buffering=0) as body:
        body.write(pickle.dumps(args))
        files = [body.fileno(), *fds]
        socket.send_fds(channel, [pickle.dumps((number, name, len(files)))], files)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return the content of the next packet, and the descriptors of the files passed with it.

    Raises:
        EOFError: If the process at the other end of the socket has exited.
    """
    try:
        data, fds, _, _ = socket.recv_fds(channel, LARGEST, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        raise EOFError from None
    if not data:
        raise EOFError
    return pickle.loads(data), fds


class Box:
    """Server that creates hosts and starts processes on them in response to requests received from a socket."""

    def __init__(self, channel: socket.socket) -> None:
        """Create a server that handles requests from `channel`."""
        self.channel = channel
        self.network: Network
        self.running: dict[int, int] = {}  # process ID -> file that receives the exit code
        self.off: set[int] = set()
        self.holder: int | None = None  # process that delays frames

    def serve(self) -> None:
        """Handle requests and reap exited processes until the client closes the socket."""
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
        """Handle one request, and send the reply. If the request fails, the reply contains the error.

        The reply contains the request's number, because an interrupted caller may leave an earlier reply unread in the
        socket.
        """
        (number, name, files), fds = receive(self.channel)
        error: Exception | None = None
        answer = None
        try:
            if len(fds) < files:  # the kernel drops files that exceed this process's limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            with os.fdopen(fds.pop(0), "rb") as body:
                body.seek(0)
                args = pickle.load(body)
            answer = getattr(self, f"do_{name}")(*args, fds)
        except ConfigError as refused:
            error = ConfigError(str(refused)[:_LONGEST_ERROR])
        except Exception as failed:
            error = FailedError(f"cluster request '{name}' failed: {type(failed).__name__}: {failed}"[:_LONGEST_ERROR])
        finally:
            for fd in fds:
                os.close(fd)
        self.channel.send(pickle.dumps((number, error, answer)))

    def reap(self) -> None:
        """Reap all exited processes, and write each process's exit code to its exit-code file."""
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
                with suppress(OSError):  # the reader has exited
                    os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(fd)

    # The following methods handle requests. Each method receives the request's files, and returns the answer.

    def do_hello(self, fds: list[int]) -> None:
        """Do nothing. The reply shows that the server is running."""

    def do_build(self, nodes: int, rate: str | None, delay: float, fds: list[int]) -> None:
        """Create the hosts and the network. `delay` is in seconds; 0 means no delay."""
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
        """Start a command on a host, and return the command's process ID."""

        def become() -> None:
            os.chdir(cwd)
            try:
                os.execvpe(argv[0], argv, env)
            except OSError as error:
                print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
                os._exit(127)

        return self.fork(node, fds, become)

    def do_fork(self, entry: str, node: int, env: dict[str, str], cwd: str, fds: list[int]) -> int:
        """Call a function in a forked process on a host, and return the process ID.

        The function receives all file descriptors except the first three (input, output and exit code). The server
        imports the function's module before the first fork, so forked processes import neither the module nor torch.
        """
        function = pkgutil.resolve_name(entry)

        def become() -> None:
            os.environ.clear()
            os.environ.update(env)
            os.chdir(cwd)
            function(*fds[3:])

        return self.fork(node, fds, become)

    def do_set_rate(self, rate: str | None, fds: list[int]) -> None:
        """Set the rate of all links."""
        self.network.set_rate(rate)

    def do_connect(self, node: int, up: bool, fds: list[int]) -> None:
        """Plug in or unplug a host's emulated network cable."""
        self.network.connect(node, up)

    def do_kill(self, node: int, fds: list[int]) -> None:
        """Simulate a host's power failure by disconnecting its cable and killing its processes immediately.

        The method returns after all exit codes have been written, including the exit codes of exiting processes that
        are no longer listed on the host.
        """
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
        """Send a signal to a process, unless the process has exited."""
        if pid in self.running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def fork(self, node: int, fds: list[int], become: Any) -> int:
        """Fork a process that calls `become()` on a host, and return the process ID.

        `fds` are the files for the child's input, output and exit code, followed by additional files.
        """
        if node in self.off:
            raise ConfigError(f"n{node} has been killed and cannot be restarted")
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
    """Serve requests from the socket whose file descriptor is the first command-line argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with suppress(EOFError):
        Box(channel).serve()
    os._exit(0)  # the kernel then kills all other processes in the namespaces


if __name__ == "__main__":
    main()
