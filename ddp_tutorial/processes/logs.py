"""What a notebook or script has told Python's `logging` holds in its ranks too, which are new processes."""

import logging
from typing import NamedTuple


class Logs(NamedTuple):
    """From which level on messages are shown, and how they are written (None: as `basicConfig` does by default)."""

    level: int
    formatter: logging.Formatter | None


def current_logging() -> Logs | None:
    """What goes to this process's terminal or cell, as `logging.basicConfig(level=logging.INFO)` sets it up; None where
    nobody has, and Python shows warnings and errors. Levels of single loggers and handlers for files do not count."""
    root = logging.getLogger()
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler:  # a subclass may write elsewhere
            known = type(handler.formatter) is logging.Formatter  # a subclass may be one of the script's own
            return Logs(max(root.level, handler.level), handler.formatter if known else None)
    return None


def configure(logs: Logs | None) -> None:
    """In a rank: write what is logged to stderr, which the parent shows under the rank's name."""
    if logs is None:
        return
    logging.basicConfig(level=logs.level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logs.formatter or handler.formatter)
