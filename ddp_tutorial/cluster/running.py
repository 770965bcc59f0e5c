"""What runs on the hosts: commands and ranks, what they print, and how they end."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple


class Ended(NamedTuple):
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

    def wait(self, timeout: float | None = None) -> Ended:
        """Wait for its end. Raises `TimeoutError` after `timeout` seconds, and leaves it running."""
        wait([self], timeout)
        return self.ended()

    def ended(self) -> Ended:
        assert self.code is not None
        return Ended(self.node, self.code, self.output)

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
