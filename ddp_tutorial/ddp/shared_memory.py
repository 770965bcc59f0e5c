"""Two ranks of one host add up gradients in memory that both of them see.

Between processes of one machine, gloo's ring sends all bytes through sockets, in several messages that wait for one
another. Here each rank copies a bucket into memory that the other has mapped too, and rings a bell; at the end of
backward each adds up the two. That is one copy and one wait, with the bits of the ring, since a + b is b + a.

A rank that waits for longer than `PATIENCE` goes on waiting in an all-reduce of gloo, where torch's time limit, its
errors and its flight recorder are. The other finds that out when it comes, and follows; if that is in the middle of its
backward, it does not go on with the layers below until the sum is there.

Steps with 34 kB, 480 kB and 3.3 MB of gradients took 4.5, 15 and 53 ms on two cores, and 6.7, 18 and 58 ms through gloo
(`bench overhead`).
"""

import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.compat import after_backward
from ddp_tutorial.ddp.buckets import check_dense
from ddp_tutorial.ddp.link import Transfer
from ddp_tutorial.world import World

PATIENCE = 0.1  # seconds that a rank waits here for the other; who is later by more is as well waited for in gloo

# A rank's memory begins with three numbers, which it alone writes: the last bucket that lies there, the last one that
# it has added up, and the last one for which it went to gloo.
_WRITTEN, _ADDED, _LEFT = range(3)
_ALIGNED = 64  # bytes, of those numbers and of each bucket


class _Sum(NamedTuple):
    """A sum that has been started: of `mine`, and of what the other rank has, or will have, at the same `place`."""

    number: int
    mine: torch.Tensor
    place: slice
    future: Future[torch.Tensor]
    name: str
    issued: float


class SharedMemory:
    """A `Link` of two ranks, for buckets of torch's DDP, whose hook is `add_in_memory`.

        link = SharedMemory.connect(world, ddp.parameters())
        ddp.register_comm_hook(link, add_in_memory)

    It takes as much memory again as the gradients of each rank. That has no name: it is gone with the two processes.
    Buckets are numbered alike on both ranks, from 1.
    """

    def __init__(self, world: World, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """`mine` and `theirs` are open here: of each rank its memory, and the bell that calls it."""
        self.observer: Callable[[Transfer], object] | None = None
        self.world = world
        (my_memory, self._my_bell), (their_memory, self._their_bell) = mine, theirs
        self._lock = my_memory if world.is_main else their_memory
        self._my_bytes, self._my_numbers = _mapped(my_memory)
        self._their_bytes, self._their_numbers = _mapped(their_memory)
        self._bell = select.poll()
        self._bell.register(self._my_bell, select.POLLIN)
        self._number = 0  # of the last bucket
        self._before = 0  # that of the last bucket of the backward before
        self._end = _ALIGNED  # of the memory that this backward has filled
        self._started: list[_Sum] = []
        self._is_queued = False  # `_finish`, for the end of backward
        finalize(self, _close, [*mine, *theirs])

    def __str__(self) -> str:
        return "memory of two ranks"

    @classmethod
    def connect(cls, world: World, parameters: Iterable[nn.Parameter]) -> "SharedMemory | None":
        """Memory for the gradients of `parameters`. Collective.

        Returns:
            The link; None on all ranks if there are not two ranks on the CPU of one host, or if the system has no
            unnamed memory, as Linux has.
        """
        if world.size != 2 or world.local_size != 2 or world.device.type != "cpu":
            return None
        nbytes = _ALIGNED + sum(_aligned(each.nbytes) for each in parameters)
        mine = _memory_and_bell(nbytes)
        theirs = _swapped(world, mine)
        is_valid = len(theirs) == len(mine) > 0 and _is_sealed(theirs[0], nbytes)
        if not all(all_gather(world, is_valid)):
            _close([*mine, *theirs])
            return None
        return cls(world, mine, theirs)

    def begin(self) -> None:
        """A backward comes to its first bucket. It may overwrite those of the one before, once they are added up; what
        is left of one that has raised is dropped."""
        self._before, self._end = self._number, _ALIGNED
        self._started, self._is_queued = [], False

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start summing `tensor` over both ranks, in place; it is summed at the end of backward. Within a backward.

        Raises `ValueError` for a sparse tensor.
        """
        check_dense(name, tensor)
        self._number += 1
        place = slice(self._end, self._end + tensor.nbytes)
        self._end += _aligned(tensor.nbytes)
        started = _Sum(self._number, tensor, place, Future(), name, time.monotonic())
        if not self._is_queued:
            # It is called once all layers are done, and before DDP, which asks for it later, looks for the sums. In a
            # backward within backward (a reentrant checkpoint) it is called at the end of the inner one.
            after_backward(self._finish)
            self._is_queued = True
        if self._write(tensor, place):
            self._started.append(started)
        else:
            self._add_by_gloo(started)
        return started.future

    def _write(self, tensor: torch.Tensor, place: slice) -> bool:
        """Put it where the other rank sees it. False where one of the two has gone to gloo for it."""
        if not self._comes(_ADDED, self._before, self._number):
            return False
        self._my_bytes[place].view(tensor.dtype).copy_(tensor.view(-1))
        with self._locked():
            if self._their_numbers[_LEFT] == self._number:
                return False
            self._my_numbers[_WRITTEN] = self._number
        os.eventfd_write(self._their_bell, 1)
        return True

    def _finish(self) -> None:
        """Add up what has been started. Raises what gloo does, where the other rank is lost or late."""
        started, self._started, self._is_queued = self._started, [], False
        for each in started:
            if self._comes(_WRITTEN, each.number, each.number):
                mine = each.mine.view(-1)
                theirs = self._their_bytes[each.place].view(mine.dtype)
                # Rank 0's first on both: of two NaN, a sum is the first.
                torch.add(*((mine, theirs) if self.world.is_main else (theirs, mine)), out=mine)
                self._done(each)
            else:
                self._add_by_gloo(each)
        with self._locked():
            self._my_numbers[_ADDED] = self._number
        os.eventfd_write(self._their_bell, 1)

    def _add_by_gloo(self, each: _Sum) -> None:
        dist.all_reduce(each.mine)
        self._done(each)

    def _done(self, each: _Sum) -> None:
        if self.observer is not None:
            self.observer(Transfer(each.name, each.mine.nbytes, each.issued, each.issued, time.monotonic()))
        each.future.set_result(each.mine)

    def _comes(self, which: int, value: int, number: int) -> bool:
        """Wait until a number of the other rank's has come to `value`. False where that takes too long: then this rank
        has gone to gloo for the bucket `number`. As it looks and goes under the lock, the other rank has either written
        that bucket before, or finds, when it is about to, that this one has left."""
        deadline = time.monotonic() + PATIENCE
        while True:
            left = deadline - time.monotonic()
            with self._locked():
                if self._their_numbers[which] >= value:
                    return True
                if left <= 0:
                    self._my_numbers[_LEFT] = number
                    return False
            self._bell.poll(left * 1e3)
            with suppress(BlockingIOError):
                os.eventfd_read(self._my_bell)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Inside, the other rank is not; what it has written before it was there, is seen here. The lock of a process
        that has died is free. Raises `TimeoutError` where one has been stopped in there."""
        deadline = time.monotonic() + self.world.timeout.total_seconds()
        try:
            while not _try_to_lock(self._lock):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {1 - self.world.rank} keeps the shared memory locked: it was stopped")
                time.sleep(0)
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


def add_in_memory(link: SharedMemory, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: torch's DDP calls it for each bucket that is full, in the same order on both ranks."""
    if bucket.index() == 0:
        link.begin()
    return link.all_reduce(bucket.buffer().div_(2), f"bucket {bucket.index()}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _try_to_lock(file: int) -> bool:
    """Lock it for this process, unless another has it. Not with flock, as `files` does: that locks an open file, and
    both ranks have the same one."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # as systems differ
        return False
    return True


def _memory_and_bell(nbytes: int) -> list[int]:
    """A file in memory, and a counter to wait for, both without a name; none, where the system or this Python has no
    such things."""
    files: list[int] = []
    try:
        files.append(os.memfd_create("gradients", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(files[0], nbytes)
        fcntl.fcntl(files[0], fcntl.F_ADD_SEALS, _seals())
        files.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    except (OSError, AttributeError):
        _close(files)
        return []
    return files


def _swapped(world: World, mine: Sequence[int]) -> list[int]:
    """Return the other rank's files, open in this process; empty if a rank has none or cannot send them. Collective.

    Each rank receives on a socket in a folder that only its user can enter, so another user of the machine cannot send
    files of their own.
    """
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        path = f"{folder}/mailbox"
        is_ready = bool(mine) and _succeeds(lambda: mailbox.bind(path))
        theirs = all_gather(world, path)[1 - world.rank]
        sent = is_ready and _succeeds(lambda: _send(theirs, mine))  # fails if the other rank has no mailbox
        if not all(all_gather(world, sent)):
            return []
        return list(socket.recv_fds(mailbox, 1, len(mine), socket.MSG_CMSG_CLOEXEC)[1])


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _send(path: str, files: Sequence[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(path)
        socket.send_fds(sender, [b"!"], files)


def _seals() -> int:
    """The seals that fix a file's size, on Linux: an access beyond the end of a shortened file kills the process."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _is_sealed(memory: int, nbytes: int) -> bool:
    """Return whether a file in memory has this size, and keeps it."""
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:  # not a file in memory
        return False
    return os.fstat(memory).st_size == nbytes and seals & _seals() == _seals()


def _mapped(memory: int) -> tuple[torch.Tensor, memoryview]:
    """All of a file as bytes, and the numbers with which it begins."""
    whole = mmap.mmap(memory, 0)
    return torch.frombuffer(whole, dtype=torch.uint8), memoryview(whole)[:_ALIGNED].cast("q")


def _close(files: Iterable[int]) -> None:
    for each in files:
        os.close(each)
