"""Start, await and kill commands and ranks on the hosts, and collect their output."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ddp_tutorial.cluster.client import BoxClient, environment

_KILLED_SECONDS = 5.0  # timeout in seconds for a process to exit after SIGKILL


class CommandResult(NamedTuple):
    """Result of a finished command.

    Attributes:
        node: Name of the node.
        code: Exit code; -9 if the command was killed by signal 9.
        output: Output of the command, including stderr.
    """

    node: str
    code: int
    output: str


@dataclass
class Process:
    """A command or rank that runs on a node."""

    node: str
    pid: int  # inside the cluster
    stdout: int
    status: int
    signal: Callable[[int, int], object] = field(repr=False)
    line: Callable[[str, str], None] | None = field(default=None, repr=False)
    code: int | None = None
    text: bytearray = field(default_factory=bytearray, repr=False)

    @property
    def output(self) -> str:
        """The output received so far."""
        return self.text.decode(errors="replace")

    def wait(self, timeout: float | None = None) -> CommandResult:
        """Wait until the process exits, and return its result.

        Raises:
            TimeoutError: If the process is still running after `timeout` seconds. The process is not killed.
        """
        wait([self], timeout)
        return self.poll_result()

    def poll_result(self) -> CommandResult:
        """Return the result of a process that has exited."""
        assert self.code is not None
        return CommandResult(self.node, self.code, self.output)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        self.signal(self.pid, int(number))

    def kill(self) -> None:
        """Kill only this process with SIGKILL. Its host keeps running."""
        self.send_signal(signal.SIGKILL)

    def read(self) -> bool:
        """Read available output. Return False at the end of the output, or if no output is available."""
        try:
            data = os.read(self.stdout, 2**16)
        except OSError:
            return False
        line_start = self.text.rfind(b"\n") + 1
        self.text += data
        if self.line:
            *whole, _ = self.text[line_start:].split(b"\n")
            for each in whole:
                self.line(self.node, each.decode(errors="replace"))
        return bool(data)

    def end(self, code: int) -> None:
        """Record the exit of the process, and read the rest of its output.

        The method does not wait for child processes that keep the output pipe open.
        """
        os.set_blocking(self.stdout, False)
        while self.read():
            pass
        if self.line and (unfinished := self.text[self.text.rfind(b"\n") + 1 :]):
            self.line(self.node, unfinished.decode(errors="replace"))
        os.close(self.stdout)
        os.close(self.status)
        self.code = code


def wait(processes: Sequence[Process], timeout: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
    """Read the processes' output until all processes have exited or `until()` returns true.

    Raises:
        TimeoutError: If a process is still running after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if process.code is None:
                selector.register(process.stdout, selectors.EVENT_READ, (process, False))
                selector.register(process.status, selectors.EVENT_READ, (process, True))
        while any(process.code is None for process in processes) and not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"at least 1 process was still running after {timeout:g} s")
            for key, _ in selector.select(left):
                process, is_status = key.data
                if is_status:
                    selector.unregister(process.status)
                    with suppress(KeyError):
                        selector.unregister(process.stdout)
                    process.end(int(os.read(process.status, 16) or -signal.SIGKILL))
                elif process.code is None and not process.read():
                    selector.unregister(process.stdout)


class Runner:
    """Manager that starts and kills processes on a cluster's nodes."""

    def __init__(self, box: BoxClient, names: Sequence[str], folders: Sequence[Path]) -> None:
        """Create a runner for nodes with the given names and working directories."""
        self._box, self._names, self._folders = box, names, folders
        self._processes: list[Process] = []

    def fork(
        self, kind: str, what: str | list[str], node: int, env: Mapping[str, str] | None, files: Sequence[int]
    ) -> int:
        """Start a process on a node, and return its process ID inside the cluster.

        Args:
            kind: "start" for a command, or "fork" for a function.
            what: The command with its arguments, or the function as "package.module:function".
            node: Index of the node.
            env: Additional environment variables.
            files: Open files that the process inherits. The first file receives the output, and the second file
                receives the exit code. The remaining files are passed to the function.
        """
        environ = environment() | dict(env or {})
        with open(os.devnull) as nothing:
            fds = [nothing.fileno(), *files]
            number: int = self._box.ask(kind, what, node, environ, str(self._folders[node]), fds=fds)
        return number

    def start(
        self,
        kind: str,
        what: str | list[str],
        node: int,
        env: Mapping[str, str] | None,
        files: tuple[int, ...] = (),
        line: Callable[[str, str], None] | None = None,
    ) -> Process:
        """Start a process with `fork`, and create pipes for its output and exit code.

        If `kind` is "fork", the open files `files` are passed to the function.
        """
        stdout, its_stdout = os.pipe()
        status, its_status = os.pipe()
        try:
            pid = self.fork(kind, what, node, env, (its_stdout, its_status, *files))
        except BaseException:
            os.close(stdout)
            os.close(status)
            raise
        finally:
            os.close(its_stdout)
            os.close(its_status)
        process = Process(self._names[node], pid, stdout, status, partial(self._box.ask, "signal"), line)
        self._processes = [*self._running(), process]
        return process

    def start_all(self, begin: Callable[[int], Process], count: int) -> list[Process]:
        """Call `begin(0)`, `begin(1)`, ... to start `count` processes.

        If a process cannot be started or an interrupt occurs, the processes that have already started are killed.
        """
        started: list[Process] = []
        try:
            for number in range(count):
                started.append(begin(number))
        except BaseException:
            self.end(started)
            self._box.ask("hello")  # also kills a process that an interrupted request has started
            raise
        return started

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.code is None]

    def end(self, processes: Sequence[Process]) -> None:
        """Kill the processes that are still running."""
        if not self._box.is_open:
            return
        running = [process for process in processes if process.code is None]
        for process in running:
            process.kill()
        with suppress(TimeoutError):
            wait(running, _KILLED_SECONDS)
        if any(process.code == -signal.SIGKILL for process in processes):
            self._box.ask("hello")  # raises an error if the processes were killed because the cluster has stopped

    def drain_all(self) -> None:
        """Read the remaining output of all processes after the cluster has stopped."""
        with suppress(TimeoutError):
            wait(self._running(), _KILLED_SECONDS)
