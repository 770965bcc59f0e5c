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
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


def notify_observers(operation: Operation, path: Path) -> None:
    """Tell the observers of the disk. Raises what they raise."""
    for observer in _observers:
        observer(operation, path)


def temporary_path(path: Path) -> Path:
    """A name beside `path` for what is not complete yet, or is about to be deleted; a new one each time.

    Process numbers would not do: in a container each life has the same, and finds what the one before has left.
    """
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.part")


def final_name(path: Path) -> str:
    """The name that `temporary_path` was made of; of any other path, its own."""
    return re.sub(r"^\.(.+)\.[0-9a-f]{8}\.part$", r"\1", path.name)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write `data` to `path` atomically: a reader, or a crash at any moment, finds the old content or the new.

    The file's permissions are `mode`, less the process's umask.
    """
    aside = temporary_path(path)
    try:
        notify_observers("write", path)
        with open(aside, "wb", opener=partial(os.open, mode=mode)) as file:
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
    aside = temporary_path(path)
    notify_observers("write", aside)
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
    notify_observers("fsync", path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if not (path.is_dir() and error.errno in {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}):
            raise
    finally:
        os.close(fd)


def build_once(folder: Path, fill: Callable[[Path], object]) -> None:
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
    notify_observers("rename", name)
    path.rename(name)


def replaced_path(path: Path) -> Path:
    """The name, beside `path`, of the folder that another is about to replace: see `replace_directory`."""
    return path.with_name(f".{path.name}.old")


def replace_directory(new: Path, path: Path) -> None:
    """Give the complete folder `new` the name `path`; what had it before is removed once that has reached the disk.

    Two renames are needed, and between them `path` is not there: a kill leaves the old folder as
    `replaced_path(path)`, and `recover(path)` gives it back its name.
    """
    if path.exists():
        remove(replaced_path(path))
        rename(path, replaced_path(path))
    try:
        rename(new, path)
    except OSError:
        recover(path)
        raise
    sync(path.parent)
    remove(replaced_path(path))


def recover(path: Path) -> None:
    """End what a killed `replace_directory` has begun: `path` is the new folder if that had the name, else the old."""
    if replaced_path(path).exists() and not path.exists():
        rename(replaced_path(path), path)
    remove(replaced_path(path))


def remove(path: Path) -> None:
    """Delete a file, or a folder with all in it, if it is there. What the system refuses to delete stays, without an
    error."""
    with suppress(OSError):
        if path.exists():
            notify_observers("remove", path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_temporary(folder: Path, name: str) -> None:
    """Remove what killed processes have left of `folder/name`, which may have wildcards in it.

    Only where no other process can be writing it: lock the folder first.
    """
    for path in folder.glob(f".{name}.*.part"):
        remove(path)


def new_directory(parent: Path, name: str, mode: int = 0o777) -> Path:
    """Create and return `parent/name`, or if that exists `name-2`, `name-3` and so on. `name` may contain slashes.

    The umask may take some of the permissions in `mode` away. Two processes that call it at the same time get two
    folders. Raises `FileExistsError` after 9,999 names that are taken.
    """
    (parent / name).parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(mode)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{parent / name}: ten thousand folders of that name are there already")


_LOCK = ".lock"  # the name of the lock file in a locked folder
_TOUCH_SECONDS = 5.0


class FolderInUseError(ConfigError):
    """Another process has locked the folder."""


class _Owner(NamedTuple):
    """The process that has locked a folder, as written in the lock file."""

    machine: str
    pid: int
    started: float  # so that another process with the same number is not taken for it
    inode: int  # of the lock file, so that a copy of the folder is not locked


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` until the block ends, or this process exits, even if it is killed.

    The lock is a file in `folder`, removed at the end. Two mechanisms keep others out:

    - The kernel's lock of this file. NFS and Lustre may keep it on one host only, and some file systems have none.
    - The owner that is written in the file. On the same machine, it counts as long as its process runs. On a different
      machine, it counts as long as it touches the file, which it does every 5 seconds. So resuming a run on a different
      machine than the one on which it was killed waits 15 seconds.

    The second mechanism has limits: two machines that lock at the same instant may both succeed, and an owner that is
    suspended for 15 seconds loses the folder.

    Raises:
        FolderInUseError: If another process has locked the folder.
    """
    path = folder / _LOCK
    fd = _open_lock(path)
    try:
        owner = _read_owner(fd)
        if owner and (_is_running(owner) if owner.machine == _machine() else _is_touched(path)):
            raise _in_use(path)
        _write_owner(fd)
        try:
            with _touching(fd):
                yield
        finally:
            os.ftruncate(fd, 0)  # no owner, even if the file cannot be removed
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked `folder`, without waiting. Takes the kernel's lock for an instant, for which
    `locked` waits. The clocks of two machines may differ by less than a minute."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDONLY)
    except OSError:  # there is none, or this user may not read it
        return False
    try:
        with suppress(OSError):  # the file system has no locks
            if not _flock(fd, fcntl.LOCK_SH):
                return True
            _flock(fd, fcntl.LOCK_UN)
        owner, touched = _read_owner(fd), os.fstat(fd).st_mtime
    finally:
        os.close(fd)
    if owner is None:
        return False
    return _is_running(owner) if owner.machine == _machine() else time.time() - touched < 60


def _open_lock(path: Path) -> int:
    """Open the lock file with the kernel's lock on it. Raises `FolderInUseError` if another process has that lock."""
    deadline = time.monotonic() + 0.2
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if _flock(fd, fcntl.LOCK_EX) and _is_at(fd, path):
                return fd
        except OSError as error:  # some network file systems; to refuse every run there would help nobody
            LOG.warning(
                "%s is on a file system without locks (%s). Do not start two runs in one folder at the same time.",
                path.parent,
                error.strerror,
            )
            return fd
        os.close(fd)  # `is_locked` holds the lock for an instant, or the file has been removed meanwhile
        if time.monotonic() > deadline:
            raise _in_use(path)
        time.sleep(0.01)


def _flock(fd: int, kind: int) -> bool:
    """Take or release a lock of this kind without waiting, and return whether that has worked."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Return whether the open file has this path still."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _in_use(path: Path) -> FolderInUseError:
    return FolderInUseError(
        f"{path.parent} is in use by another run. Wait until that one has ended, or use another name."
    )


def _machine() -> str:
    """Return a name that all processes of this machine's kernel share, and no others, also not after a reboot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _started(pid: int) -> float | None:
    """Return when this process has started, None if it does not run."""
    import psutil  # slow to import, and only needed here

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _write_owner(fd: int) -> None:
    owner = _Owner(_machine(), os.getpid(), _started(os.getpid()) or 0.0, os.fstat(fd).st_ino)
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(owner._asdict()).encode(), 0)
    os.fsync(fd)  # so that other hosts see it


def _read_owner(fd: int) -> _Owner | None:
    """Return the owner in a lock file, None if the file is empty or a copy of another."""
    content = os.pread(fd, 4096, 0)
    try:
        owner = _Owner(**json.loads(content))
    except (ValueError, TypeError):  # cut short by a crash, or of another version
        return _Owner("", 0, 0.0, 0) if content else None
    return owner if owner.inode == os.fstat(fd).st_ino else None


def _is_running(owner: _Owner) -> bool:
    started = _started(owner.pid)
    return started is not None and abs(started - owner.started) < 2  # the clock may have been set meanwhile


@contextmanager
def _touching(fd: int) -> Iterator[None]:
    """Until the block ends, touch the file every few seconds, from a thread."""
    over = threading.Event()

    def touch() -> None:
        while not over.wait(_TOUCH_SECONDS):
            with suppress(OSError):
                os.utime(fd)

    thread = threading.Thread(target=touch, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_touched(path: Path) -> bool:
    """Return whether somebody touches or writes the file, after up to three times the seconds between two touches.

    The file is opened anew each time, for which network file systems ask their server.
    """

    def seen() -> tuple[int, int]:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
        return found.st_mtime_ns, found.st_size

    before, deadline = seen(), time.monotonic() + 3 * _TOUCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_TOUCH_SECONDS / 5)
        if seen() != before:
            return True
    return False
