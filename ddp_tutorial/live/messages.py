"""What a pool and its ranks tell one another, beside calls and results: where a rank is, and how a call has ended."""

import os
from dataclasses import dataclass, field
from typing import Any

from ddp_tutorial.debug.hangs import RankStatus
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.logs import Logs
from ddp_tutorial.processes.transport import Descriptor, Message, take_messages


@dataclass
class WorkerSpec:
    """What a process is given to become a rank of a pool: its pipes, and what launch gives a rank.

    Requests arrive in `requests` and wait for the main thread; what arrives in `control` is read by a thread of its
    own, at any time. When `control` is closed, the pool is gone.
    """

    rank: int
    output: Descriptor
    messages: Descriptor
    requests: Descriptor
    control: Descriptor
    threads: int
    device: str
    backend: str
    collective_timeout: float
    sources: dict[str, list[str]]
    logs: Logs | None
    parent: int
    dies_with_thread: bool


@dataclass(frozen=True)
class Failure:
    """How a call has failed on one rank. `line` is where it was in the user's code, `in_collective` whether the error
    came out of torch.distributed."""

    raised: Raised
    traceback: str
    at: float  # on the machine's monotonic clock
    line: str = ""
    in_collective: bool = False


@dataclass(frozen=True)
class Snapshot:
    """How far a rank is in each group: the last collective that it has entered, and the last that has ended."""

    progress: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        return any(entered > ended for entered, ended in self.progress.values())


@dataclass(frozen=True)
class MimeBundle:
    """One thing to show, by MIME type: what a figure, a table, or a plain value is in a notebook."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return str(self.data.get("text/plain", ""))

    @property
    def is_rich(self) -> bool:
        return set(self.data) != {"text/plain"}


Answer = RankStatus | Snapshot


class Receiver:
    """The reading end of a pipe of messages. Reading waits for the next one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._inbox = bytearray()

    def __call__(self) -> Message | None:
        """The next message; None where the other end is closed."""
        while True:
            for message in take_messages(self._inbox):
                return message
            data = os.read(self._fd, 1 << 20)
            if not data:
                return None
            self._inbox += data
