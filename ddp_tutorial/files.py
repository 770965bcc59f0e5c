"""Files and folders that are either complete or not there, and locks on folders.

They are written under a temporary name, flushed to the disk, and then renamed, which is atomic. Whoever wants to know
what a failing disk does, or a kill at the worst moment, observes what is about to be done to files: `observe_disk`.
"""

import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from ddp_tutorial.config import ConfigError

LOG = logging.getLogger(__name__)

# Runs write below this folder, which is relative to the working directory of the command or the notebook's kernel.
RUNS = Path("runs")

Operation = Literal["write", "fsync", "rename", "remove", "read"]
DiskObserver = Callable[[Operation, Path], object]

# Replaced, never changed in place: an observer may come or go while another thread is writing.
_observers: tuple[DiskObserver, ...] = ()


@contextmanager
def observe_disk(observer: DiskObserver) -> Iterator[None]:
    """Until the block ends, call `observer(operation, path)` before each operation on a file that has to survive.

    In any thread of this process; a rename is told by the new name. An observer may raise `OSError`, which is how a
    disk fails on purpose, or end the process.
    """
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


def about_to(operation: Operation, path: Path) -> None:
    """Tell the observers of the disk. Raises what they raise."""
    for observer in _observers:
        observer(operation, path)


def unfinished(path: Path) -> Path:
    """A name beside `path` for what is not complete yet, or is about to be deleted; a new one each time.

    Process numbers would not do: in a container each life has the same, and finds what the one before has left.
    """
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.part")


def finished_name(path: Path) -> str:
    """The name that `unfinished` was made of; of any other path, its own."""
    return re.sub(r"^\.(.+)\.[0-9a-f]{8}\.part$", r"\1", path.name)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: a reader, or a crash at any moment, finds the old content or the new."""
    aside = unfinished(path)
    try:
        about_to("write", path)
        with aside.open("wb") as file:
            file.write(data)
        sync(aside)
        rename(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """`content` as indented JSON, atomically. Raises `ValueError` for NaN and infinity, which are not JSON."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: a diverged loss becomes null, and readers show a gap."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


@contextmanager
def directory_written_atomically(path: Path) -> Iterator[Path]:
    """A temporary folder to fill, which is renamed to `path` when the block ends, and removed if the block raises.

    Raises `FileExistsError` if `path` is there already.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    with _aside(path) as aside:
        yield aside
        _sync_all(aside)
        rename(aside, path)
        sync(path.parent)


@contextmanager
def directory_replaced_atomically(path: Path) -> Iterator[Path]:
    """The same, for a `path` that may be there already: see `replace_directory`."""
    with _aside(path) as aside:
        yield aside
        _sync_all(aside)
        replace_directory(aside, path)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    aside = unfinished(path)
    about_to("write", aside)
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        remove(aside)  # unless it has the other name now


def _sync_all(folder: Path) -> None:
    for inner in (folder, *folder.rglob("*")):
        sync(inner)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk. A rename is durable after the latter.

    Some file systems (9p, CIFS, some of FUSE) cannot do this for a folder, which is ignored: there is no other way.
    """
    about_to("fsync", path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    except OSError as error:
        if not (path.is_dir() and error.errno in {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}):
            raise


def made_once(folder: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write `folder`, by a temporary name, unless it is there. Several processes may do so at once: the
    first to end makes it, for all."""
    if folder.exists():
        return
    try:
        with directory_written_atomically(folder) as aside:
            fill(aside)
    except OSError:
        if not folder.exists():
            raise


def rename(path: Path, name: Path) -> None:
    """Give a file or folder another name. That is atomic, and on the disk once the folder that it lies in is synced."""
    about_to("rename", name)
    path.rename(name)


def replaced(path: Path) -> Path:
    """The name, beside `path`, of the folder that another is about to replace: see `replace_directory`."""
    return path.with_name(f".{path.name}.old")


def replace_directory(new: Path, path: Path) -> None:
    """Give the complete folder `new` the name `path`; what had it before is removed once that has reached the disk.

    Two renames are needed, and between them `path` is not there: a kill leaves the old folder as `replaced(path)`, and
    `settle(path)` gives it back its name.
    """
    if path.exists():
        remove(replaced(path))
        rename(path, replaced(path))
    try:
        rename(new, path)
    except OSError:
        settle(path)
        raise
    sync(path.parent)
    remove(replaced(path))


def settle(path: Path) -> None:
    """End what a killed `replace_directory` has begun: `path` is the new folder if that had the name, else the old."""
    if replaced(path).exists() and not path.exists():
        rename(replaced(path), path)
    remove(replaced(path))


def remove(path: Path) -> None:
    """Delete a file, or a folder with all in it, if it is there. What the system refuses to delete stays, without an
    error."""
    with suppress(OSError):
        if path.exists():
            about_to("remove", path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def clear_unfinished(folder: Path, name: str) -> None:
    """Remove what killed processes have left of `folder/name`, which may have wildcards in it.

    Only where no other process can be writing it: lock the folder first.
    """
    for path in folder.glob(f".{name}.*.part"):
        remove(path)


def new_directory(parent: Path, name: str) -> Path:
    """Make and return `parent/name`, or where that exists `name-2`, `name-3` and so on. `name` may have slashes in it.

    Two processes that call it at the same time get two folders. Raises `FileExistsError` after 9,999 names that are
    taken.
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


class FolderInUseError(ConfigError):
    """Another process has locked the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` until the block ends, or this process, even if it is killed. Raises `FolderInUseError` if another
    process has locked it. On a file system without locks, that is logged, and nothing is locked.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            _lock(fd, folder)
        except OSError as error:  # some network file systems; to refuse every run there would help nobody
            LOG.warning(
                "%s lies on a file system without locks (%s): nothing keeps two runs out of one folder, so take care "
                "that no other uses it",
                folder,
                error.strerror,
            )
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    deadline = time.monotonic() + 0.2
    while not _locked(fd, fcntl.LOCK_EX):  # `is_locked` in another process holds it for an instant
        if time.monotonic() > deadline:
            raise FolderInUseError(
                f"{folder} is in use by another run. Wait until that one has ended, or use another name."
            )
        time.sleep(0.01)


def is_locked(folder: Path) -> bool:
    """Has a process locked `folder`? Takes a shared lock for an instant, for which `locked` waits."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # it is gone, or we may not read it
        return False
    try:
        return not _locked(fd, fcntl.LOCK_SH)
    except OSError:  # the file system has no locks, so nobody has locked it
        return False
    finally:
        os.close(fd)


def _locked(fd: int, kind: int) -> bool:
    """Try to take a lock of this kind, without waiting. Has it worked?"""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
