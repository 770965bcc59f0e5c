"""Disks that fail on purpose, for tests; see `files.observe_disk`."""

import os
from pathlib import Path

from ddp_tutorial.files import DiskObserver, Operation, final_name

Point = tuple[Operation, str]  # the operation, and the current or future name of the file


def failing(at: Point, number: int, before: int = 0) -> DiskObserver:
    """Return an observer that fails this operation with this error number, after `before` successes."""
    left = before

    def fail(operation: Operation, path: Path) -> None:
        nonlocal left
        if (operation, final_name(path)) == at:
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number))

    return fail


def noting(points: list[Point]) -> DiskObserver:
    """Return an observer that records the operations."""
    return lambda operation, path: points.append((operation, final_name(path)))
