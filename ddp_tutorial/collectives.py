"""Run collectives on tensors and on Python objects.

Every rank must call each collective. The first argument of a collective is the `World`. A single process does not need
a process group. If there are several ranks but no process group, a collective raises an error, because each rank would
otherwise train a separate model.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_tutorial.config import FailedError, named_ranks
from ddp_tutorial.world import World, require_group

T = TypeVar("T")


def all_reduce_sum(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over all ranks. Collective. The input is not changed."""
    require_group(world)
    summed = tensor.detach().clone()
    if summed.layout == torch.strided:  # gloo sums memory in storage order, which depends on the strides
        summed = summed.contiguous()
    if world.size > 1:
        dist.all_reduce(summed)
    return summed


def all_reduce_mean(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of `tensor` over all ranks. Collective.

    The result is the mean over samples only if all ranks process the same number of samples. To average a loss,
    all-reduce its sum and the sample count with `all_reduce_sum`, and then divide.
    """
    return all_reduce_sum(world, tensor) / world.size


def to_vector(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return `values` as a 1-D float64 tensor on `device`.

    On a GPU, kernels write the Python numbers, because a copy from the CPU would block until all queued kernels finish.
    """
    if device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    return torch.stack(
        [
            value.to(device, torch.float64).view(())
            if isinstance(value, torch.Tensor)
            else torch.full((), value, dtype=torch.float64, device=device)
            for value in values
        ]
    )


def any_rank(world: World, flag: bool) -> bool:
    """Return whether `flag` is true on any rank, so that all ranks make the same decision. Collective."""
    return bool(all_reduce_sum(world, torch.tensor(float(flag), device=world.device)) > 0)


def all_gather(world: World, obj: T) -> list[T]:
    """Gather one object from each rank, and return the list in rank order on every rank. Collective.

    Use this function for small picklable objects, not for tensors.
    """
    require_group(world)
    if world.size == 1:
        return [obj]
    things: list[T | None] = [None] * world.size
    dist.all_gather_object(things, obj)
    return things  # type: ignore[return-value]


def to_rank_zero(world: World, obj: T) -> list[T]:
    """Gather one object from each rank, and return the list in rank order on rank 0. Collective.

    Return an empty list on all other ranks. The objects must be picklable. After pickling, each object is padded
    to the size of the largest object.
    """
    require_group(world)
    if world.size == 1:
        return [obj]
    things: list[T | None] | None = [None] * world.size if world.is_main else None
    dist.gather_object(obj, things, dst=0)
    return things or []  # type: ignore[return-value]


def from_rank_zero(world: World, obj: T) -> T:
    """Return rank 0's `obj` on every rank. Collective."""
    require_group(world)
    if world.size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=0, device=world.device if world.backend == "nccl" else None)
    return box[0]


def decide_on_rank_zero(world: World, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 and return its result on every rank. Collective.

    Use this function for any decision that depends on files, because nodes might not share a disk. If `decide` raises
    an exception, every rank raises that exception. If the exception cannot be pickled, the other ranks raise
    `RankZeroFailedError` instead.
    """
    result: T | None = None
    error: Exception | None = None
    if world.is_main:
        try:
            result = decide()
        except Exception as caught:
            error = caught
    result, sent = from_rank_zero(world, (result, None if error is None else _picklable(error)))
    if sent is not None:
        raise sent if error is None else error
    return result  # type: ignore[return-value]


def run_on_all_ranks(world: World, function: Callable[[], T], error_type: type[Exception] = FailedError) -> T:
    """Call `function` on every rank, and return its result if the call succeeds on all ranks. Collective.

    Raises:
        error_type: On all ranks, if `function` raises an exception on any rank. The message contains the error of each
            failed rank.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = function()
    except error_type as error:
        problem = str(error) or type(error).__name__
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = all_gather(world, problem)
    if len(set(problems)) == 1 and problems[0]:
        raise error_type(problems[0])
    if failures := "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(problems) if each):
        raise error_type(failures)
    return result  # type: ignore[return-value]


def _picklable(error: Exception) -> Exception:
    """Return `error`, or a `RankZeroFailedError` that describes it if `error` cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankZeroFailedError(f"rank 0 failed: {type(error).__name__}: {error}")
    return error


@torch.no_grad()
def broadcast_tensors(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Replace the values of `tensors` with rank 0's values, in place. Collective.

    Tensors with the same dtype and device are broadcast together.
    """
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
    """Split `flat` according to the sizes of `tensors`, and copy the values into `tensors`."""
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


class RankZeroFailedError(FailedError):
    """Raised if rank 0 fails while the other ranks wait for rank 0. The message contains rank 0's exception."""


@contextmanager
def rank_zero_first(world: World) -> Iterator[None]:
    """Run the block on rank 0, and then on the other ranks. Collective.

    For example, rank 0 can build a cache that the other ranks read. Rank 0 does not wait for the other ranks.

    Raises:
        RankZeroFailedError: On the other ranks, if the block raises an exception on rank 0.
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
            raise RankZeroFailedError(f"rank 0 failed while rank {world.rank} was waiting for it: {problem}")
        yield


def assert_same(world: World, tensors: Mapping[str, torch.Tensor], what: str = "tensor") -> None:
    """Raise an error on every rank if the tensors are not bitwise identical on all ranks. Collective.

    The names, order, shapes, and dtypes must also match. Error messages refer to a tensor as `what`.

    Raises:
        RuntimeError: If the tensors or their order differ between ranks.
        ValueError: If `tensors` is empty, because the check would then always pass.
    """
    digests = all_gather(world, {name: digest({name: tensor}) for name, tensor in tensors.items()})
    if not any(digests):
        raise ValueError(f"assert_same requires at least one {what} to compare, got none")
    if all(list(each.items()) == list(digests[0].items()) for each in digests):  # dict comparison ignores the order
        return
    if found := first_difference(digests):
        raise RuntimeError(f"{what} {found[0]!r} is not the same on all ranks: {found[1]}")
    raise RuntimeError(f"the order of the {what}s is not the same on all ranks")


def first_difference(of_ranks: Sequence[Mapping[str, object]], first: int = 0) -> tuple[str, str] | None:
    """Return the first differing value's name and a description of the difference, or None if all ranks agree.

    `first` is the rank that provided `of_ranks[0]`.
    """
    for name in dict.fromkeys(name for each in of_ranks for name in each):
        others = [rank for rank, each in enumerate(of_ranks, first) if each.get(name) != of_ranks[0].get(name)]
        if others:
            return name, f"{named_ranks(others)} {'differ' if others[1:] else 'differs'} from rank {first}"
    return None


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 hash of the tensors' names, shapes, dtypes, and bytes, in the given order."""
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().cpu().to_dense().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
