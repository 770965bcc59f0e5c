"""Files that are either whole or not there: written aside, flushed to the disk, then renamed into place."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Everything that a run writes goes below this folder, seen from where the command or the notebook's kernel runs.
RUNS = Path("runs")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: a reader, or a crash at any moment, sees the old file or the new."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """`content` as indented JSON, atomically. Raises `ValueError` for NaN and infinity, which are not JSON."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


@contextmanager
def directory_written_atomically(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `path` when the block ends well and vanishes when it does not.

    Raises `FileExistsError` if `path` is there already.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in aside.rglob("*"):
            if file.is_file():
                sync(file)
        aside.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, have reached the disk: a rename is durable only then."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_directory(parent: Path, name: str) -> Path:
    """Make and return `parent/name`, or `name-2`, `name-3` and so on where that is taken. Safe against races.

    `name` may be several folders deep.
    """
    (parent / name).parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{parent / name}: ten thousand folders of that name are there already")
