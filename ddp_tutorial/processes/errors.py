"""Define the errors that report a rank's failure to its parent process.

This module does not import torch, so a command can check an error's type without loading torch.
"""

import re
import textwrap
from dataclasses import dataclass
from typing import Any

from ddp_tutorial.config import FailedError

# Messages of gloo, NCCL and torch's store when the peer process has exited. These libraries raise RuntimeError and
# other general types, so only the text identifies the error. A lost connection is usually an effect of a failure, not
# its cause.
_LOST_CONNECTION = re.compile(r"by peer|broken pipe|connection was likely closed|connection refused", re.IGNORECASE)


def lost_connection(error: BaseException | str) -> bool:
    """Return whether an exception or error message indicates that a connection's peer process has exited."""
    return _LOST_CONNECTION.search(str(error)) is not None


@dataclass(frozen=True)
class Raised:
    """Plain-text copy of a rank's exception. The receiving process does not need the exception's class.

    Attributes:
        types: Full names of the exception's class and of all its base classes, in method resolution order, such as
            "ddp_tutorial.config.ConfigError" and "builtins.ValueError".
        message: The exception's message.
    """

    types: tuple[str, ...]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """Return the plain-text copy of `error`.

        If the exception's own `__str__` raises an exception, the message describes that exception.
        """
        try:
            message = str(error)
        except Exception as failed:
            message = f"its message cannot be shown, because __str__ raised {type(failed).__name__}"
        return cls(tuple(map(_full_name, type(error).__mro__)), message)

    def is_a(self, kind: type[BaseException]) -> bool:
        """Return whether the exception is an instance of `kind`, as `isinstance` would report on the rank."""
        return _full_name(kind) in self.types

    def __str__(self) -> str:
        """Return the class name and the message, such as "ValueError: no disk"."""
        return f"{self.types[0].rpartition('.')[2]}: {self.message}"


def _full_name(kind: type) -> str:
    """Return the module and name of a class, such as "builtins.ValueError".

    `__qualname__` is not used, because cloudpickle does not preserve it for a class that is defined inside a function.
    The script's module is named `__main__` in the parent and `__mp_main__` in the ranks.
    """
    return f"{kind.__module__.replace('__mp_main__', '__main__')}.{kind.__name__}"


class RankError(FailedError):
    """Raised when a rank has failed and all ranks have been terminated.

    Attributes:
        rank: The first rank that failed.
        reason: How the rank failed, such as "raised ValueError: no disk" or "was killed by SIGKILL".
        raised: The rank's exception, or None if the rank did not raise an exception. Use `is_a` to check the type.
        traceback: The rank's traceback, including the source lines of notebook cells.
        log: The last lines that the rank printed.
        others: The state of the other ranks at the time of the failure.
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
        """Store the arguments, and build the error message. The class docstring describes the arguments."""
        self.rank, self.reason, self.traceback, self.log, self.others = rank, reason, traceback, log, others
        self.raised = raised
        printed = (
            f"Last lines that rank {rank} printed:\n{textwrap.indent(log, '    ', lambda line: True)}" if log else ""
        )
        story = [f"rank {rank} {reason}", traceback.rstrip(), printed, others]
        super().__init__("\n\n".join(part for part in story if part))

    def is_a(self, kind: type[BaseException]) -> bool:
        """Return whether the rank raised an exception of type `kind`.

        The result is False if the rank did not raise an exception, for example because it was killed or timed out.
        """
        return self.raised is not None and self.raised.is_a(kind)

    @property
    def message(self) -> str:
        """The rank's error message without the exception type, or an empty string if there is no exception."""
        return self.raised.message if self.raised else ""

    def __reduce__(self) -> tuple[type["RankError"], tuple[Any, ...]]:
        """Pickle the error as the arguments of its constructor."""
        return type(self), (self.rank, self.reason, self.traceback, self.log, self.others, self.raised)

    def _render_traceback_(self) -> list[str]:
        """Return the traceback lines that IPython shows.

        The lines omit the parent's frames inside `launch`, which do not explain the failure.
        """
        return "\n".join([f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])]).split("\n")


class RankTimeoutError(RankError, TimeoutError):
    """Raised when ranks exceed the timeout. The message contains each rank's stack and last collective."""
