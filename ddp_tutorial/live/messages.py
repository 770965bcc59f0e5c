"""Define the messages that a pool and its ranks exchange, such as progress reports and failures."""

import os
from dataclasses import dataclass, field
from typing import Any

from ddp_tutorial.debug.hangs import RankStatus
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.rank import ParentInfo
from ddp_tutorial.processes.transport import Descriptor, Message, take_messages


@dataclass
class WorkerSpec(ParentInfo):
    """The pipes and settings of a new rank in a pool.

    The main thread reads `requests`. A second thread reads `control`, even during a call. If `control` is closed, the
    pool no longer exists.
    """

    rank: int
    output: Descriptor
    messages: Descriptor
    requests: Descriptor
    control: Descriptor
    device: str
    backend: str
    collective_timeout: float


@dataclass(frozen=True)
class Failure:
    """The failure of a call on one rank.

    Attributes:
        raised: The exception.
        traceback: The traceback, limited to the user's code.
        at: Time of the failure on the machine's monotonic clock.
        line: Location of the failure in the user's code.
        in_collective: Whether torch.distributed raised the error.
    """

    raised: Raised
    traceback: str
    at: float
    line: str = ""
    in_collective: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The progress of a rank.

    Attributes:
        progress: Dict from process group to the sequence numbers of its last entered and last completed collectives.
        names: Dict from process group ID to the group's name, which is the same on all ranks. Empty if not requested.
        members: Dict from group name to the group's ranks. Empty if not requested.
    """

    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)

    @property
    def steps(self) -> dict[str, tuple[int, int]]:
        """The progress, keyed by group name."""
        return {self.names[int(group)]: each for group, each in self.progress.items() if int(group) in self.names}

    @property
    def waits(self) -> bool:
        """Whether the rank has entered a collective that has not completed."""
        return any(entered > left for entered, left in self.progress.values())


@dataclass(frozen=True)
class MimeBundle:
    """One displayed value, such as a figure or a table, with a representation for each MIME type."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The plain-text representation."""
        return str(self.data.get("text/plain", ""))

    @property
    def is_rich(self) -> bool:
        """Whether the value has a representation other than plain text."""
        return set(self.data) != {"text/plain"}


Answer = RankStatus | Snapshot


class Receiver:
    """Blocking reader for a message pipe."""

    def __init__(self, fd: int) -> None:
        """Create a receiver that reads from file descriptor `fd`."""
        self._fd = fd
        self._inbox = bytearray()

    def __call__(self) -> Message | None:
        """Wait for the next message, and return it. Return None if the other end of the pipe is closed."""
        while True:
            for message in take_messages(self._inbox):
                return message
            data = os.read(self._fd, 1 << 20)
            if not data:
                return None
            self._inbox += data
