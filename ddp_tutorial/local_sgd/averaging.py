"""The mean of tensors over all ranks, in place, and a count of the bytes that it takes."""

from collections.abc import Callable, Sequence

import torch
from torch.futures import Future

from ddp_tutorial.collectives import copy_from_flat
from ddp_tutorial.ddp.link import Link, Transfer, bytes_all_reduced
from ddp_tutorial.world import World


class CountingLink:
    """Any link, and in `sent` how many bytes this rank has sent through it: of an all-reduce of n bytes over W ranks
    2 n (W - 1) / W, as a ring does."""

    def __init__(self, link: Link, world: World) -> None:
        self.link, self.world, self.sent = link, world, 0

    def __str__(self) -> str:
        return str(self.link)

    @property
    def observer(self) -> Callable[[Transfer], object] | None:
        """Called with each all-reduce that has ended."""
        return self.link.observer

    @observer.setter
    def observer(self, observer: Callable[[Transfer], object] | None) -> None:
        self.link.observer = observer

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start summing `tensor` over all ranks, in place."""
        self.sent += bytes_all_reduced(tensor.nbytes, self.world.size)
        return self.link.all_reduce(tensor, name)


@torch.no_grad()
def average(world: World, link: Link, tensors: Sequence[torch.Tensor], name: str = "average") -> None:
    """Make each of `tensors`, of any shapes, its mean over all ranks, in place: one all-reduce for each dtype.

    Collective. Each rank divides before the sum, as torch's averagers do. All ranks end with the same bits.
    """
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same]).div_(world.size)
        link.all_reduce(flat, name).wait()
        copy_from_flat(flat, same)
