"""Two ranks add up a bucket of gradients with one message in each direction.

In a ring, a rank sends half of a buffer, waits for the sum of the other half, and sends that on; gloo cuts the halves
into pieces, whose messages follow one another too. Two ranks can as well send each other the whole buffer at once: as
many bytes, one wait, and the same bits, since a + b is b + a. Of more ranks each would send more than in a ring.

One after another on two cores, that took 0.6 ms for 34 kB and 0.7 for 480 kB, and gloo's ring 1.5 and 1.7; for 3.3 MB,
both 3.8. It is not the default: a rank that waits here does so in no collective, so torch's flight recorder, by which
`debug.hangs` tells who waits for whom, has nothing to tell.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from ddp_tutorial.ddp.link import Transfer
from ddp_tutorial.world import World

_TAG = 0x646470  # of these messages: those that others send on the same group are not taken for them


class _Sum(NamedTuple):
    """A sum that has been started: `mine` has been sent, `theirs` is expected, and is yet to be added to `mine`."""

    mine: torch.Tensor
    theirs: torch.Tensor
    works: tuple[Any, Any]
    future: Future[torch.Tensor]
    name: str
    issued: float


class Exchange:
    """A `Link` of two ranks, for buckets of torch's DDP, whose hook is `exchange`.

        ddp.register_comm_hook(Exchange(world), exchange)

    Messages travel while backward goes on with the layers below; at its end it waits for them. Until then a rank needs
    room for the other's gradients.
    """

    def __init__(self, world: World) -> None:
        self.peer = 1 - world.rank
        self.observer: Callable[[Transfer], object] | None = None
        self._started: list[_Sum] = []

    def __str__(self) -> str:
        return "exchange of two ranks"

    @staticmethod
    def can_serve(world: World) -> bool:
        """Are there two ranks, on CPUs? NCCL has better ways of its own, and gloo's messages are of the CPU."""
        return world.size == 2 and world.device.type == "cpu"

    def begin(self) -> None:
        """In a backward, before its first bucket: forget what one that failed has left, and wait at the end."""
        self._started = []
        # Called once all layers are done, and before DDP, which asks for it later, looks for the sums.
        Variable._execution_engine.queue_callback(self._wait)

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start summing `tensor` over both ranks, in place; it is summed at the end of backward."""
        group = dist.group.WORLD
        assert group is not None
        theirs = torch.empty_like(tensor)
        works = group.recv([theirs], self.peer, _TAG), group.send([tensor], self.peer, _TAG)
        self._started.append(_Sum(tensor, theirs, works, Future(), name, time.monotonic()))
        return self._started[-1].future

    def _wait(self) -> None:
        """Raises what a collective would, where the other rank is lost or late."""
        started, self._started = self._started, []
        for mine, theirs, works, future, name, issued in started:
            for work in works:
                work.wait()
            if self.observer is not None:
                self.observer(Transfer(name, mine.nbytes, issued, issued, time.monotonic()))
            future.set_result(mine.add_(theirs))


def exchange(link: Exchange, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: torch's DDP calls it for each bucket that is full, in the same order on both ranks."""
    if bucket.index() == 0:
        link.begin()
    return link.all_reduce(bucket.buffer().div_(2), f"bucket {bucket.index()}")
