"""Mount a tmpfs of a few megabytes, visible only to this process and its children, to test a full disk.

On Linux, an unprivileged user can mount a tmpfs in separate user and mount namespaces, which many containers forbid.
The tmpfs disappears when the last process that can see it exits.
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
    """Mount a tmpfs of `nbytes` bytes at `folder`, for this process and the processes that it forks afterward.

    The process must be single-threaded; Linux rejects the call otherwise.

    Returns:
        An empty string, or the reason why the disk could not be mounted.
    """
    if not hasattr(os, "getuid") or not Path("/proc/self/uid_map").exists():
        return "user namespaces are not available; they require Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USERS | _NEW_MOUNTS):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:  # the new namespace contains no user until the IDs are mapped
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if libc.mount(b"small-disk", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode()):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return ""


def fill_up(folder: Path, free_bytes: int) -> None:
    """Create a file that leaves only `free_bytes` bytes free on the disk mounted at `folder`."""
    with (folder / _BALLAST).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(_PAGE))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - free_bytes))


def empty(folder: Path) -> None:
    """Remove the file that fills the disk."""
    (folder / _BALLAST).unlink(missing_ok=True)


def limit_files(nbytes: int) -> None:
    """Limit the size of each file that this process writes.

    A write that would exceed the limit is truncated, and the next write fails.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
