"""What runs on the hosts: commands and ranks, how they are started, what they print, and how they end."""

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

_KILLED_SECONDS = 5.0  # that a process has to be gone when it has been killed


class CommandResult(NamedTuple):
    """A command that has ended. `code` is -9 if it was killed by signal 9; `output` has what it printed, errors too."""

    node: str
    code: int
    output: str


@dataclass
class Process:
    """A command, or a rank, that runs on a node."""

    node: str
    pid: int  # as the cluster counts
    stdout: int
    status: int
    signal: Callable[[int, int], object] = field(repr=False)
    line: Callable[[str, str], None] | None = field(default=None, repr=False)
    code: int | None = None
    text: bytearray = field(default_factory=bytearray, repr=False)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.text.decode(errors="replace")

    def wait(self, timeout: float | None = None) -> CommandResult:
        """Wait for its end. Raises `TimeoutError` after `timeout` seconds, and leaves it running."""
        wait([self], timeout)
        return self.poll_result()

    def poll_result(self) -> CommandResult:
        assert self.code is not None
        return CommandResult(self.node, self.code, self.output)

    def send_signal(self, number: int) -> None:
        self.signal(self.pid, int(number))

    def kill(self) -> None:
        """End it by SIGKILL, alone; its host goes on."""
        self.send_signal(signal.SIGKILL)

    def read(self) -> bool:
        """Take what has been printed; False at its end, or where there is nothing yet."""
        try:
            data = os.read(self.stdout, 2**16)
        except OSError:
            return False
        begun = self.text.rfind(b"\n") + 1
        self.text += data
        if self.line:
            *whole, _ = self.text[begun:].split(b"\n")
            for each in whole:
                self.line(self.node, each.decode(errors="replace"))
        return bool(data)

    def end(self, code: int) -> None:
        """It has ended: read what it had printed. Others that it has started may hold its output: not waited for."""
        os.set_blocking(self.stdout, False)
        while self.read():
            pass
        os.close(self.stdout)
        os.close(self.status)
        self.code = code


def wait(processes: Sequence[Process], timeout: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
    """Read what processes print until all have ended, or `until()`. Raises `TimeoutError` after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if process.code is None:
                selector.register(process.stdout, selectors.EVENT_READ, (process, False))
                selector.register(process.status, selectors.EVENT_READ, (process, True))
        while any(process.code is None for process in processes) and not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"still running after {timeout:g} s")
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
    """Starts processes on the nodes of a cluster, and ends them. `names` and `folders` are those of the nodes."""

    def __init__(self, box: BoxClient, names: Sequence[str], folders: Sequence[Path]) -> None:
        self._box, self._names, self._folders = box, names, folders
        self._processes: list[Process] = []

    def fork(
        self, kind: str, what: str | list[str], node: int, env: Mapping[str, str] | None, files: Sequence[int]
    ) -> int:
        """`kind` is "start", and `what` a command, or it is "fork", and `what` a function, "package.module:function".

        It prints into `files[0]`, and its exit code is written to `files[1]`. Returns its number in the box.
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
        """As `fork`, with pipes for what it prints and its exit code, and `files` for the function."""
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
        """`begin(0)`, `begin(1)`, ...: `count` processes. None is left where one of them cannot be started, or this is
        interrupted meanwhile."""
        begun: list[Process] = []
        try:
            for number in range(count):
                begun.append(begin(number))
        except BaseException:
            self.end(begun)
            self._box.ask("hello")  # and kills the one of which an interrupt has kept us from hearing
            raise
        return begun

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.code is None]

    def end(self, processes: Sequence[Process]) -> None:
        """Kill those that still run."""
        if not self._box.is_open:
            return
        running = [process for process in processes if process.code is None]
        for process in running:
            process.kill()
        with suppress(TimeoutError):
            wait(running, _KILLED_SECONDS)
        if any(process.code == -signal.SIGKILL for process in processes):
            self._box.ask("hello")  # raises if all of them have been killed because the cluster has ended

    def drain_all(self) -> None:
        """The cluster has ended, and so all that ran on it: take what is left of what they have printed."""
        with suppress(TimeoutError):
            wait(self._running(), _KILLED_SECONDS)
