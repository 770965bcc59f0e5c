"""What has gone wrong on a rank, as its parent tells it. Loads no torch, so that a command may ask what an error is."""

import re
from dataclasses import dataclass
from typing import Any

from ddp_tutorial.config import FailedError

# What gloo, NCCL and torch's store say when the process at the other end is gone. They raise it as a RuntimeError among
# others, so here the text has to be looked at. It is an effect, hardly ever a cause.
_LOST_CONNECTION = re.compile(r"by peer|broken pipe|connection was likely closed|connection refused", re.IGNORECASE)


def lost_connection(error: BaseException | str) -> bool:
    """Does this error, or its message, say that the process at the other end of a connection is gone?"""
    return _LOST_CONNECTION.search(str(error)) is not None


@dataclass(frozen=True)
class Raised:
    """An exception that a rank raised, as plain text: its class need not exist in the process that is told of it.

    `types` are the full names of its class and of all bases of that, such as "ddp_tutorial.config.ConfigError" and
    "builtins.ValueError"; its own comes first.
    """

    types: tuple[str, ...]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        return cls(tuple(map(_full_name, type(error).__mro__)), str(error))

    def is_a(self, kind: type[BaseException]) -> bool:
        """As `isinstance` where it was raised: true for its class, and for every base of that."""
        return _full_name(kind) in self.types

    def __str__(self) -> str:
        return f"{self.types[0].rpartition('.')[2]}: {self.message}"


def _full_name(kind: type) -> str:
    """Return module and name. Not `__qualname__`: of a class inside a function, which travels by value, that is lost.

    The script that is `__main__` in the parent is `__mp_main__` in its ranks.
    """
    return f"{kind.__module__.replace('__mp_main__', '__main__')}.{kind.__name__}"


class RankError(FailedError):
    """A rank failed, and all ranks have been ended.

    - `rank`: the one that failed first.
    - `reason`: how, in words for people: "raised ValueError: no disk", "was killed by SIGKILL".
    - `raised`: the exception, where it was one. Ask `error.is_a(ConfigError)` for its type; `error.message` is its bare
      message.
    - `traceback`: the rank's own, with the lines of the notebook's cells.
    - `log`: the last lines that the rank printed.
    - `others`: what the other ranks did meanwhile.
    """

    def __init__(
        self,
        rank: int,
        reason: str,
        traceback: str = "",
        log: str = "",
        others: str = "",
        raised: Raised | None = None,
    ) -> None:
        self.rank, self.reason, self.traceback, self.log, self.others = rank, reason, traceback, log, others
        self.raised = raised
        printed = f"Last lines that rank {rank} printed:\n{_indent(log)}" if log else ""
        story = [f"rank {rank} {reason}", traceback.rstrip(), printed, others]
        super().__init__("\n\n".join(part for part in story if part))

    def is_a(self, kind: type[BaseException]) -> bool:
        """Was what the rank raised an exception of this type? False where it was killed, or left, or was late."""
        return self.raised is not None and self.raised.is_a(kind)

    @property
    def message(self) -> str:
        """The message of what the rank raised, without the type in front; empty where it raised nothing."""
        return self.raised.message if self.raised else ""

    def __reduce__(self) -> tuple[type["RankError"], tuple[Any, ...]]:
        return type(self), (self.rank, self.reason, self.traceback, self.log, self.others, self.raised)

    def _render_traceback_(self) -> list[str]:
        """For IPython: the rank's story. The parent's frames inside `launch` say nothing about the fault."""
        return "\n".join([f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])]).split("\n")


class RankTimeoutError(RankError, TimeoutError):
    """The time was up. The message shows where each rank stood: its stack, and its last collective."""


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
