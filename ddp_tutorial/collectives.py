"""The few things that ranks do together, by name. Every rank must enter each of them.

They take the `World`, so that one process needs no group, and several processes without one raise instead of
each going its own way in silence.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_tutorial.world import World, require_group

Thing = TypeVar("Thing")


def total(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, the same on each; any shape and dtype. The input is left as it is."""
    require_group(world)
    summed = tensor.detach().clone()
    if world.size > 1:
        dist.all_reduce(summed)
    return summed


def mean(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """The mean of `tensor` over all ranks. Right only where each rank stands for equally many samples; of losses,
    add up sums and counts with `total` and divide once."""
    return total(world, tensor) / world.size


def all_gather(world: World, thing: Thing) -> list[Thing]:
    """What each rank gave, rank 0's first, on every rank. For small picklable things, not for tensors."""
    require_group(world)
    if world.size == 1:
        return [thing]
    things: list[Thing | None] = [None] * world.size
    dist.all_gather_object(things, thing)
    return things  # type: ignore[return-value]


def from_rank_zero(world: World, thing: Thing) -> Thing:
    """Rank 0's `thing`, on every rank."""
    require_group(world)
    if world.size == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0, device=world.device if world.device.type == "cuda" else None)
    return box[0]


@contextmanager
def rank_zero_first(world: World) -> Iterator[None]:
    """The block runs on rank 0, then on the others: rank 0 builds a cache that the others find.

    If it raises on rank 0, the others raise too instead of waiting for ever. Rank 0 does not wait for their blocks.
    """
    require_group(world)
    if world.is_main:
        try:
            yield
        except BaseException as error:
            from_rank_zero(world, f"{type(error).__name__}: {error}")
            raise
    problem: str | None = from_rank_zero(world, None)
    if not world.is_main:
        if problem is not None:
            raise RuntimeError(f"rank 0 failed, while rank {world.rank} waited for it: {problem}")
        yield


def assert_same(world: World, tensors: Mapping[str, torch.Tensor], what: str = "tensor") -> None:
    """Raise on every rank if any of the named tensors differs between ranks, bit for bit, in shape or in dtype.

    Each rank compares with all others, so all come to the same verdict and none is left waiting.
    """
    digests = all_gather(world, {name: digest({name: tensor}) for name, tensor in tensors.items()})
    if not any(digests):
        raise ValueError(f"assert_same was given no {what} to compare, so it would pass whatever happened")
    if all(list(each.items()) == list(digests[0].items()) for each in digests):  # dicts do not compare their order
        return
    for name in dict.fromkeys(name for each in digests for name in each):
        seen = [each.get(name) for each in digests]
        if len(set(seen)) > 1:
            differing = [rank for rank, each in enumerate(seen) if each != seen[0]]
            ranks = ", ".join(map(str, differing))
            raise RuntimeError(f"{what} {name!r} is not the same on all ranks: rank {ranks} differs from rank 0")
    raise RuntimeError(f"{what}s come in another order on some ranks")


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A sha256 over names, shapes, dtypes and every bit of the tensors, in the order given."""
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
