"""Copy the `logging` setup of a notebook or script to its ranks, which are new processes."""

import logging
from typing import NamedTuple


class Logs(NamedTuple):
    """The logging setup of a process.

    Attributes:
        level: Lowest log level that is shown.
        formatter: Formatter of the log lines, or None for the default of `logging.basicConfig`.
    """

    level: int
    formatter: logging.Formatter | None


def current_logging() -> Logs | None:
    """Return the logging setup of this process, based on the root logger's first stream handler.

    `logging.basicConfig(level=logging.INFO)` installs such a handler. Other kinds of handlers, such as file handlers,
    are ignored, and so are the levels of individual loggers.

    Returns:
        The setup, or None if the root logger has no stream handler. Without a handler, Python shows only warnings and
        errors.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler:  # a subclass may not write to a stream
            known = type(handler.formatter) is logging.Formatter  # a subclass may be defined in the script
            return Logs(max(root.level, handler.level), handler.formatter if known else None)
    return None


def configure(logs: Logs | None) -> None:
    """Set up logging in a rank. Log lines are written to stderr, and the parent shows them with the rank's number."""
    if logs is None:
        return
    logging.basicConfig(level=logs.level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logs.formatter or handler.formatter)
