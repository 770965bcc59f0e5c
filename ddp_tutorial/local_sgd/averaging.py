"""Average tensors over all ranks in place, and count the bytes sent."""

from collections.abc import Callable, Sequence

import torch
from torch.futures import Future

from ddp_tutorial.collectives import copy_from_flat
from ddp_tutorial.ddp.link import Link, Transfer
from ddp_tutorial.ddp.link_model import bytes_all_reduced
from ddp_tutorial.world import World


class CountingLink:
    """A link that counts the bytes that this rank sends.

    An all-reduce of n bytes over W ranks counts as 2 n (W - 1) / W bytes, as in a ring all-reduce.

    Attributes:
        sent: The number of bytes sent so far.
    """

    def __init__(self, link: Link, world: World) -> None:
        """Wrap `link`."""
        self.link, self.world, self.sent = link, world, 0

    def __str__(self) -> str:
        """Return the description of the wrapped link."""
        return str(self.link)

    @property
    def observer(self) -> Callable[[Transfer], object] | None:
        """The function that is called after each all-reduce, or None."""
        return self.link.observer

    @observer.setter
    def observer(self, observer: Callable[[Transfer], object] | None) -> None:
        self.link.observer = observer

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start an all-reduce that sums `tensor` over all ranks in place. Collective."""
        self.sent += bytes_all_reduced(tensor.nbytes, self.world.size)
        return self.link.all_reduce(tensor, name)


@torch.no_grad()
def average(world: World, link: Link, tensors: Sequence[torch.Tensor], name: str = "average") -> None:
    """Replace each tensor with its mean over all ranks, in place. Collective.

    One all-reduce runs for each combination of dtype and device. Before the all-reduce, each rank divides its tensors
    by the world size, as torch's averagers do. The results are bitwise identical on all ranks. The tensors may have
    different shapes.
    """
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same]).div_(world.size)
        link.all_reduce(flat, name).wait()
        copy_from_flat(flat, same)
