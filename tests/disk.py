"""A disk that fails on purpose, for tests: see `files.observe_disk`."""

import os
import re
from pathlib import Path

from ddp_tutorial.files import DiskObserver, Operation

Point = tuple[Operation, str]  # what is done, and to what: the name that a file has or will have


def name_of(path: Path) -> str:
    """The name of a file or folder, or what it will be once it is complete."""
    return re.sub(r"^\.(.+?)\.[0-9a-f.]+\.part$", r"\1", path.name)


def failing(at: Point, number: int, before: int = 0) -> DiskObserver:
    """An observer that fails this operation with the error of this number, after it has succeeded `before` times."""
    left = before

    def fail(operation: Operation, path: Path) -> None:
        nonlocal left
        if (operation, name_of(path)) == at:
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number))

    return fail


def noting(points: list[Point]) -> DiskObserver:
    """An observer that writes down what is done."""
    return lambda operation, path: points.append((operation, name_of(path)))
