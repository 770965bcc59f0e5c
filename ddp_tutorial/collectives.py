"""What ranks do together: sums, broadcasts, gathers, comparisons. Every rank must enter each of them.

All take the `World`: one process needs no process group, and several without one raise instead of each training alone
in silence. The second half shows how an all-reduce works inside: a ring and a tree, written with nothing but send and
receive.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddp_tutorial.config import FailedError
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
    """The mean of `tensor` over all ranks. It is the mean over samples only where all ranks have equally many; for
    losses, add up sums and counts with `total` and divide once."""
    return total(world, tensor) / world.size


@dataclass(frozen=True)
class Mean:
    """A sum and its count, not yet divided: unlike means, they can be summed over ranks and micro-batches."""

    sum: torch.Tensor
    count: float

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.count + other.count)


def mean_over_ranks(world: World, means: list[Mean]) -> list[float]:
    """Each mean over the samples of all ranks, in one collective. Every rank must give equally many means."""
    pairs = [as_vector([mean.sum, mean.count], mean.sum.device) for mean in means]
    sums, counts = total(world, torch.stack(pairs)).unbind(1)
    values: list[float] = (sums / counts).tolist()
    return values


def as_vector(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """The values as one tensor of float64. On a GPU without reading them, which would wait for what computes them."""
    if device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).view(()) for value in values])


def any_rank(world: World, flag: bool) -> bool:
    """True on every rank if `flag` is true on any of them, so that all act alike: stop, skip, fail."""
    return bool(total(world, torch.tensor(float(flag), device=world.device)) > 0)


def all_gather(world: World, thing: Thing) -> list[Thing]:
    """The list of what the ranks gave, rank 0's first, on every rank. For small picklable things, not for tensors."""
    require_group(world)
    if world.size == 1:
        return [thing]
    things: list[Thing | None] = [None] * world.size
    dist.all_gather_object(things, thing)
    return things  # type: ignore[return-value]


def to_rank_zero(world: World, thing: Thing) -> list[Thing]:
    """The list of what the ranks gave, rank 0's first, on rank 0; an empty one elsewhere. Of any picklable things, but
    each is sent in as many bytes as the largest has."""
    require_group(world)
    if world.size == 1:
        return [thing]
    things: list[Thing | None] | None = [None] * world.size if world.is_main else None
    dist.gather_object(thing, things, dst=0)
    return things or []  # type: ignore[return-value]


def from_rank_zero(world: World, thing: Thing) -> Thing:
    """Rank 0's `thing`, on every rank."""
    require_group(world)
    if world.size == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0, device=world.device if world.backend == "nccl" else None)
    return box[0]


def decided_by_rank_zero(world: World, decide: Callable[[], Thing]) -> Thing:
    """Call `decide` on rank 0 and return its result on every rank. Collective.

    Use it for anything that depends on a disk: nodes may not share one. If `decide` raises, every rank raises the same
    exception, or `RankZeroFailedError` if it cannot be pickled.
    """
    found: Thing | None = None
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


# ---------------------------------------------------------------------------------------- all-reduce, from scratch


class Message(NamedTuple):
    """Something that a rank sent: in which round, to whom, which chunk of the tensor, and how many bytes."""

    round: int
    sender: int
    receiver: int
    chunk: int
    nbytes: int


def ring_all_reduce(world: World, tensor: torch.Tensor) -> list[Message]:
    """Sum `tensor` over all ranks, in place, around a ring; returns what this rank sent.

    The tensor is cut into as many chunks as there are ranks. In N - 1 rounds (the reduce-scatter) each rank passes
    a chunk to the next one, which adds its own share: then each rank has one chunk that is complete. In N - 1 more
    (the all-gather) the complete chunks go round. A rank sends 2 (N - 1) / N of the tensor, hardly more for many
    ranks than for few, in 2 (N - 1) rounds. Any shape, length and dtype that adds up, on CPUs. A chunk is added up once
    and then copied, so all ranks end with the same bits; another number of ranks may round differently.

    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    require_group(world)
    flat = tensor.detach().contiguous().reshape(-1)  # a view of a contiguous tensor, else a copy
    chunks = flat.tensor_split(world.size)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent: list[Message] = []
    for round_ in range(2 * (world.size - 1)):
        reducing = round_ < world.size - 1
        # Rank r starts with chunk r, and then passes on what it has just received, all the way.
        outgoing, incoming = (world.rank - round_) % world.size, (world.rank - round_ - 1) % world.size
        received = torch.empty_like(chunks[incoming]) if reducing else chunks[incoming]
        # Ready to receive before anyone sends: else each message would first wait for its receiver. A tensor shorter
        # than the ring leaves some chunks empty, and nothing to pass on.
        receiving = dist.irecv(received, left) if received.numel() else None
        sending = dist.isend(chunks[outgoing], right) if chunks[outgoing].numel() else None
        if receiving is not None:
            receiving.wait()
        if sending is not None:
            sending.wait()
            sent.append(Message(round_, world.rank, right, outgoing, chunks[outgoing].nbytes))
        if reducing:
            chunks[incoming].add_(received)
    _put_back(tensor, flat)
    return sent


def tree_all_reduce(world: World, tensor: torch.Tensor) -> list[Message]:
    """Sum `tensor` over all ranks, in place, up a binomial tree and down again; returns what this rank sent.

    In the first round every second rank sends all it has to its neighbour and is done; in the next round every second
    one of those that are left does; after log2 N rounds rank 0 has the sum, which goes back the same way. Few rounds,
    so quick for small tensors; but whole tensors, so slow for large ones. All ranks end with the same bits: rank 0's.
    """
    require_group(world)
    flat = tensor.detach().contiguous().reshape(-1)
    steps = [1 << bit for bit in range((world.size - 1).bit_length())]
    sent: list[Message] = []
    rounds = [(step, True) for step in steps] + [(step, False) for step in reversed(steps)]
    for round_, (step, upwards) in enumerate(rounds):
        place = world.rank % (2 * step)
        child = world.rank + step if place == 0 and world.rank + step < world.size else None
        parent = world.rank - step if place == step else None
        receiver, sender = (parent, child) if upwards else (child, parent)
        if not flat.numel():
            continue
        if receiver is not None:
            dist.send(flat, receiver)
            sent.append(Message(round_, world.rank, receiver, 0, flat.nbytes))
        if sender is not None:
            received = torch.empty_like(flat) if upwards else flat
            dist.recv(received, sender)
            if upwards:
                flat.add_(received)
    _put_back(tensor, flat)
    return sent


def _put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Where `flat` is not a view of `tensor`, copy it there."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
