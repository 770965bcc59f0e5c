"""Collectives on tensors and on Python objects: sums, broadcasts, gathers and comparisons.

Every rank must call each of them. All take the `World`: a single process needs no process group, and several ranks
without one raise an error instead of training separate models.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_tutorial.config import FailedError
from ddp_tutorial.world import World, require_group

T = TypeVar("T")


def all_reduce_sum(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, the same on each; any shape and dtype. The input is left as it is."""
    require_group(world)
    summed = tensor.detach().clone()
    if world.size > 1:
        dist.all_reduce(summed)
    return summed


def all_reduce_mean(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """The mean of `tensor` over all ranks. It is the mean over samples only where all ranks have equally many; for
    losses, add up sums and counts with `total` and divide once."""
    return all_reduce_sum(world, tensor) / world.size


@dataclass(frozen=True)
class Mean:
    """A sum and its count, not yet divided: unlike means, they can be summed over ranks and micro-batches."""

    sum: torch.Tensor
    count: float

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.count + other.count)


def all_reduce_means(world: World, means: list[Mean]) -> list[float]:
    """Each mean over the samples of all ranks, in one collective. Every rank must give equally many means."""
    pairs = [to_vector([mean.sum, mean.count], mean.sum.device) for mean in means]
    sums, counts = all_reduce_sum(world, torch.stack(pairs)).unbind(1)
    values: list[float] = (sums / counts).tolist()
    return values


def to_vector(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """The values as one tensor of float64. On a GPU without reading them, which would wait for what computes them."""
    if device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).view(()) for value in values])


def any_rank(world: World, flag: bool) -> bool:
    """True on every rank if `flag` is true on any of them, so that all act alike: stop, skip, fail."""
    return bool(all_reduce_sum(world, torch.tensor(float(flag), device=world.device)) > 0)


def all_gather(world: World, obj: T) -> list[T]:
    """The list of what the ranks gave, rank 0's first, on every rank. For small picklable things, not for tensors."""
    require_group(world)
    if world.size == 1:
        return [obj]
    things: list[T | None] = [None] * world.size
    dist.all_gather_object(things, obj)
    return things  # type: ignore[return-value]


def to_rank_zero(world: World, obj: T) -> list[T]:
    """The list of what the ranks gave, rank 0's first, on rank 0; an empty one elsewhere. Of any picklable things, but
    each is sent in as many bytes as the largest has."""
    require_group(world)
    if world.size == 1:
        return [obj]
    things: list[T | None] | None = [None] * world.size if world.is_main else None
    dist.gather_object(obj, things, dst=0)
    return things or []  # type: ignore[return-value]


def from_rank_zero(world: World, obj: T) -> T:
    """Rank 0's `thing`, on every rank."""
    require_group(world)
    if world.size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=0, device=world.device if world.backend == "nccl" else None)
    return box[0]


def decide_on_rank_zero(world: World, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 and return its result on every rank. Collective.

    Use it for anything that depends on a disk: nodes may not share one. If `decide` raises, every rank raises the same
    exception, or `RankZeroFailedError` if it cannot be pickled.
    """
    found: T | None = None
    error: Exception | None = None
    if world.is_main:
        try:
            found = decide()
        except Exception as caught:
            error = caught
    found, sent = from_rank_zero(world, (found, None if error is None else _picklable(error)))
    if sent is not None:
        raise sent if error is None else error
    return found  # type: ignore[return-value]


def run_on_all_ranks(world: World, function: Callable[[], T], error_type: type[Exception] = FailedError) -> T:
    """Call `function` on every rank and return its result if it succeeds on all of them. Collective.

    Raises:
        error_type: On all ranks, if `function` raises on any of them. The message contains the ranks and their errors.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = function()
    except error_type as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = all_gather(world, problem)
    if len(set(problems)) == 1 and problems[0]:
        raise error_type(problems[0])
    if found := "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(problems) if each):
        raise error_type(found)
    return result  # type: ignore[return-value]


def _picklable(error: Exception) -> Exception:
    """Return `error`, or a `RankZeroFailedError` that describes it if other ranks could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankZeroFailedError(f"rank 0 failed: {type(error).__name__}: {error}")
    return error


@torch.no_grad()
def broadcast_tensors(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Rank 0's values for all of `tensors`, in place on every rank; one broadcast for each dtype and device."""
    require_group(world)
    if world.size == 1:
        return
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src=0)
        copy_from_flat(flat, same)


def copy_from_flat(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Cut `flat` [sum of their lengths] into the tensors that it was put together from, in place."""
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


class RankZeroFailedError(FailedError):
    """Rank 0 failed while this rank waited for it. This is an effect; the cause is what rank 0 itself has raised."""


@contextmanager
def rank_zero_first(world: World) -> Iterator[None]:
    """The block runs on rank 0, then on the others: rank 0 builds a cache that the others find.

    If it raises on rank 0, the others raise `RankZeroFailedError` instead of waiting for ever. Rank 0 does not wait for
    their blocks.
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
            raise RankZeroFailedError(f"rank 0 failed, while rank {world.rank} waited for it: {problem}")
        yield


def assert_same(world: World, tensors: Mapping[str, torch.Tensor], what: str = "tensor") -> None:
    """Raise on every rank if any of the named tensors differs between ranks, bit for bit, in shape or in dtype.

    Each rank compares all ranks, so all raise or none does, and none is left waiting. Raises `ValueError` without any
    tensor to compare.
    """
    digests = all_gather(world, {name: digest({name: tensor}) for name, tensor in tensors.items()})
    if not any(digests):
        raise ValueError(f"assert_same was given no {what} to compare, so it would pass whatever happened")
    if all(list(each.items()) == list(digests[0].items()) for each in digests):  # dicts do not compare their order
        return
    if found := first_difference(digests):
        raise RuntimeError(f"{what} {found[0]!r} is not the same on all ranks: {found[1]}")
    raise RuntimeError(f"{what}s come in another order on some ranks")


def first_difference(of_ranks: Sequence[Mapping[str, object]], first: int = 0) -> tuple[str, str] | None:
    """The first name whose value is not the same on all ranks, and a sentence that says on which; None if there is
    none. Ranks count from `first`."""
    for name in dict.fromkeys(name for each in of_ranks for name in each):
        others = [rank for rank, each in enumerate(of_ranks, first) if each.get(name) != of_ranks[0].get(name)]
        if others:
            return name, f"rank {', '.join(map(str, others))} differs from rank {first}"
    return None


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A sha256 over names, shapes, dtypes and every bit of the tensors, in the order given."""
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
