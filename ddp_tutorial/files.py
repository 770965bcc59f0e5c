"""Write files and folders atomically, and lock folders.

A file or folder is written under a temporary name, flushed to disk, and then renamed atomically. `observe_disk`
registers an observer that is called before each disk operation. The observer can simulate a failing disk or a crash at
the worst moment.
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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ddp_tutorial.config import ConfigError

LOG = logging.getLogger(__name__)


def _find_runs() -> Path:
    """Return the folder that contains all runs.

    If the working directory is read-only, print a message and use a folder in the home directory. In a notebook
    kernel, also change the working directory, because some cells write directly to `runs/...`.
    """
    named = os.environ.get("DDP_TUTORIAL_RUNS")
    home = Path(os.environ.get("HOME", ""))  # without HOME, Path.home() may raise an error, as in a container
    if named or os.access("runs" if Path("runs").exists() else ".", os.W_OK) or not os.access(home, os.W_OK):
        return Path(named or "runs")
    elsewhere = home / "ddp_tutorial"
    print(f"{Path.cwd()} is read-only, so runs are written to {elsewhere / 'runs'}", file=sys.stderr)
    os.environ["DDP_TUTORIAL_RUNS"] = str(elsewhere / "runs")
    if "ipykernel" in sys.modules:
        elsewhere.mkdir(exist_ok=True)
        os.chdir(elsewhere)
    return elsewhere / "runs"


# The folder of all runs. A relative path is relative to the working directory of the command or the notebook's kernel.
# Ranks, sweep points and kernels inherit the variable DDP_TUTORIAL_RUNS, which the option `--runs-dir` sets.
RUNS = _find_runs()

# The folder that contains `notebooks` and `data`: the package if it was installed from a wheel, otherwise the root of
# the repository.
PACKAGE = Path(__file__).parent
PROJECT = PACKAGE if (PACKAGE / "notebooks").is_dir() else PACKAGE.parent

Operation = Literal["write", "fsync", "rename", "remove", "read"]
DiskObserver = Callable[[Operation, Path], object]

# This tuple is replaced, never changed in place, because an observer may be added while another thread is writing.
_observers: tuple[DiskObserver, ...] = ()


@contextmanager
def observe_disk(observer: DiskObserver) -> Iterator[None]:
    """Call `observer(operation, path)` before each disk operation of this package, until the block ends.

    The observer runs in the thread that performs the operation. For a rename, `path` is the new name. The observer may
    raise `OSError` to simulate a failing disk, or terminate the process.
    """
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


def notify_observers(operation: Operation, path: Path) -> None:
    """Call the disk observers. An observer's exception is not caught."""
    for observer in _observers:
        observer(operation, path)


def temporary_path(path: Path) -> Path:
    """Return a randomly named path next to `path` for a file that is incomplete or about to be deleted.

    A name with the process ID would not be unique. In a container, a restarted process often has the same ID as the
    previous process, and would find that process's files.
    """
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.part")


def final_name(path: Path) -> str:
    """Return the original file name of a path from `temporary_path`. Return any other path's name unchanged."""
    return re.sub(r"^\.(.+)\.[0-9a-f]{8}\.part$", r"\1", path.name)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write `data` to `path` atomically. Even after a crash, the file contains either the old or the new content.

    `mode` specifies the file's permissions before the umask is applied.
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
    """Write `content` as indented JSON, atomically.

    Raises:
        ValueError: If `content` contains NaN or infinity, which JSON does not support.
    """
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with None in place of NaN and infinity, which JSON does not support. Plots show None as a gap."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


@contextmanager
def directory_written_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` after the block.

    If the block raises an exception, the temporary folder is removed.

    Raises:
        FileExistsError: If `path` already exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} already exists")
    with _aside(path) as aside:
        yield aside
        _sync_all(aside)
        rename(aside, path)
        sync(path.parent)


@contextmanager
def directory_replaced_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` after the block; see `replace_directory`."""
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
        remove(aside)  # does nothing after a rename


def _sync_all(folder: Path) -> None:
    for inner in (folder, *folder.rglob("*")):
        sync(inner)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk.

    A rename is durable only after the parent folder has been flushed to disk.

    Some file systems (9p, CIFS, some FUSE file systems) do not support flushing folders. The resulting error is
    ignored, because there is no alternative.
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
    """Call `fill` to create `folder` if it does not exist. Several processes may call this function at the same time.

    The first process to finish creates the folder for all processes. `fill` receives a temporary folder, and must write
    all files there.
    """
    if folder.exists():
        return
    try:
        with directory_written_atomically(folder) as aside:
            fill(aside)
    except OSError:
        if not folder.exists():
            raise


def rename(path: Path, name: Path) -> None:
    """Rename a file or folder atomically. The rename is durable only after a `sync` of the parent folder."""
    notify_observers("rename", name)
    path.rename(name)


def replaced_path(path: Path) -> Path:
    """Return the path to which `replace_directory` temporarily renames the old folder."""
    return path.with_name(f".{path.name}.old")


def replace_directory(new: Path, path: Path) -> None:
    """Rename the complete folder `new` to `path`, and remove the old folder afterward.

    Two folders are renamed, and `path` does not exist between the renames. If the process is killed between the
    renames, the old folder is at `replaced_path(path)`, and `recover(path)` restores it.
    """
    try:
        if path.exists():
            remove(replaced_path(path))
            rename(path, replaced_path(path))
        rename(new, path)
    except BaseException:  # also an interrupt
        recover(path)
        raise
    sync(path.parent)
    remove(replaced_path(path))


def recover(path: Path) -> None:
    """Complete or undo a `replace_directory` that was interrupted.

    If the new folder has already been renamed to `path`, remove the old folder. Otherwise, restore the old folder.
    """
    if replaced_path(path).exists() and not path.exists():
        rename(replaced_path(path), path)
    remove(replaced_path(path))


def remove(path: Path) -> None:
    """Delete a file or folder if it exists. Ignore errors from the operating system."""
    with suppress(OSError):
        if path.exists():
            notify_observers("remove", path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_temporary(folder: Path, name: str) -> None:
    """Remove the temporary files of `folder/name` that a killed process left behind. `name` may contain wildcards.

    The caller must ensure that no other process writes to these files, for example by locking the folder.
    """
    for path in folder.glob(f".{name}.*.part"):
        remove(path)


def new_directory(parent: Path, name: str, mode: int = 0o777) -> Path:
    """Create and return `parent/name`. If this name exists, use `name-2`, `name-3`, and so on.

    If two processes call this function at the same time, each process creates its own folder. `name` may contain
    slashes. `mode` specifies the folder's permissions before the umask is applied.

    Raises:
        FileExistsError: If `name` and `name-2` to `name-9999` all exist.
    """
    (parent / name).parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(mode)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(
        f"{parent / name} and 9,998 numbered folders already exist; remove old folders, or use a different name"
    )


_LOCK = ".lock"  # the name of the lock file in a locked folder
_TOUCH_SECONDS = 5.0
# Seconds that a process may hold the lock in `is_locked`. The system may suspend the process at that moment.
_READER_SECONDS = 30.0


class FolderInUseError(ConfigError):
    """Raised if a different process has locked the folder."""


class _Owner(NamedTuple):
    """The process that has locked a folder, as stored in the lock file."""

    machine: str
    pid: int
    started: float  # distinguishes processes with the same ID
    inode: int  # the inode of the lock file, so that a copy of the folder is not locked


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` until the block ends, or until this process exits or is killed.

    The lock is a file in `folder`, and is removed when the block ends. Two mechanisms exclude other processes:

    - The kernel's lock on this file. NFS and Lustre may enforce this lock only within one host, and some file systems
      do not support locks.
    - The lock owner stored in the file. On the owner's machine, the owner is valid until its process exits. On all
      other machines, the owner is valid while its process touches the file every 5 seconds. Therefore, if a run is
      killed, a different machine waits for 15 seconds before it locks the folder.

    The second mechanism has limits. If processes on two machines lock the folder at the same instant, both processes
    may succeed. An owner that is suspended for 15 seconds can lose the lock to a different machine.

    Raises:
        FolderInUseError: If a different process has locked the folder.
    """
    path = folder / _LOCK
    fd = _open_lock(path)
    try:
        owner = _read_owner(fd)
        if owner and (_is_running(owner) if owner.machine == _machine() else _is_touched(path)):
            raise _in_use(path)
        mine = _write_owner(fd)
        try:
            with _touching(fd):
                yield
        finally:
            if _read_owner(fd) == mine:  # otherwise, a process on a different machine has acquired the lock
                os.ftruncate(fd, 0)  # clear the owner, even if the file cannot be removed
                path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked `folder`, without waiting for the lock.

    The function briefly holds the kernel's lock, so a concurrent call to `locked` waits for a moment. The clocks of the
    machines must differ by less than a minute.
    """
    try:
        fd = os.open(folder / _LOCK, os.O_RDONLY)
    except OSError:  # there is no lock file, or this user may not read it
        return False
    try:
        with suppress(OSError):  # the file system does not support locks
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
    """Open the lock file and acquire the kernel's lock.

    Raises:
        FolderInUseError: If a different process holds the lock.
    """
    began = time.monotonic()
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if _flock(fd, fcntl.LOCK_EX) and _is_at(fd, path):
                return fd
            is_owned = not _flock(fd, fcntl.LOCK_SH)  # succeeds if only `is_locked` holds the lock
        except OSError as error:  # some network file systems do not support locks
            LOG.warning(
                "%s is on a file system without locks (%s). Do not start two runs in one folder at the same time.",
                path.parent,
                error.strerror,
            )
            return fd
        os.close(fd)  # `is_locked` holds the lock for an instant, or the file has just been removed
        if time.monotonic() - began > (0.2 if is_owned else _READER_SECONDS):
            raise _in_use(path)
        time.sleep(0.01)


def _flock(fd: int, kind: int) -> bool:
    """Acquire or release a lock of the given `kind` without waiting. Return whether the operation succeeded."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Return whether `path` still refers to the open file `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _in_use(path: Path) -> FolderInUseError:
    return FolderInUseError(f"{path.parent} is in use by another run. Wait until it exits, or use a different name.")


def _machine() -> str:
    """Return a name that identifies this machine's running kernel. The name changes at each reboot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _started(pid: int) -> float | None:
    """Return the start time of a process, or None if the process is not running."""
    import psutil  # slow to import

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _write_owner(fd: int) -> _Owner:
    """Store this process as the owner, and return the stored owner."""
    owner = _Owner(_machine(), os.getpid(), _started(os.getpid()) or 0.0, os.fstat(fd).st_ino)
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(owner._asdict()).encode(), 0)
    os.fsync(fd)  # make the owner visible to other hosts
    return owner


def _read_owner(fd: int) -> _Owner | None:
    """Return the owner stored in a lock file, or None if the file is empty or was copied from a different folder."""
    content = os.pread(fd, 4096, 0)
    try:
        owner = _Owner(**json.loads(content))
    except (ValueError, TypeError):  # truncated by a crash, or from a different version
        return _Owner("", 0, 0.0, 0) if content else None
    return owner if owner.inode == os.fstat(fd).st_ino else None


def _is_running(owner: _Owner) -> bool:
    started = _started(owner.pid)
    return started is not None and abs(started - owner.started) < 2  # the clock may have been adjusted


@contextmanager
def _touching(fd: int) -> Iterator[None]:
    """Touch the file every few seconds from a background thread until the block ends."""
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
    """Wait for up to three touch intervals, and return whether the file was touched, written, or removed.

    The file is opened again for each check, so that network file systems query their server.
    """

    def seen() -> tuple[int, int] | None:
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
        except FileNotFoundError:  # the owner has just removed the file
            return None
        return found.st_mtime_ns, found.st_size

    before = seen()
    for _ in range(15):  # a deadline would also pass while this process is suspended
        time.sleep(_TOUCH_SECONDS / 5)
        if (now := seen()) is None or now != before:
            return True
    return False
