"""A disk of a few megabytes, which really can be full: a tmpfs that only this process and its children see.

Linux lets also ordinary users mount one, in a user and a mount namespace of their own, where that is not forbidden, as
it is in many containers. It is gone with the last process that sees it, however that ends.
"""

import ctypes
import errno
import os
import resource
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x0002_0000, 0x1000_0000  # CLONE_NEWNS and CLONE_NEWUSER, see `man 2 unshare`
_BALLAST = "ballast"  # the file that fills the disk
_PAGE = 4096


def mount_small_disk(folder: Path, nbytes: int) -> str:
    """Mount a tmpfs of this size at `folder`, for this process and those that it forks from now on.

    Returns "", or why it could not be done. Only for a process without other threads: Linux refuses it to others.
    """
    if not hasattr(os, "getuid") or not Path("/proc/self/uid_map").exists():
        return "only Linux has namespaces"
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USERS | _NEW_MOUNTS):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:  # we are nobody in the new namespace until it is told who we are
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if libc.mount(b"small-disk", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode()):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return ""


def fill_up(folder: Path, room: int) -> None:
    """Write into a file in `folder`, the root of a small disk, until the disk is full; then give back `room` bytes."""
    with (folder / _BALLAST).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(_PAGE))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - room))


def empty(folder: Path) -> None:
    """Take away what fills the disk."""
    (folder / _BALLAST).unlink(missing_ok=True)


def limit_files(nbytes: int) -> None:
    """From now on, no file of this process can be longer: a write stops there, and the next one fails."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
