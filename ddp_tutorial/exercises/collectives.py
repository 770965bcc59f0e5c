"""Exercises of 02_collectives: chunks of a ring, tensors of any length, the cost of ring and tree, and a full ring."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# -------------------------------------------------------------------------------------- 1. which chunk, in which round?


def _test_chunk_to_send(answer: Answer) -> str:
    for size in range(1, 9):
        # holds[rank][chunk] counts how often each rank's contribution has been added to the chunk
        holds = [[Counter({rank: 1}) for _ in range(size)] for rank in range(size)]
        for step in range(size - 1):
            sends = [answer(rank, step, size) for rank in range(size)]
            for rank, chunk in enumerate(sends):
                case = f"With {size} ranks, in round {step}, rank {rank} sends chunk {chunk!r}"
                expect(isinstance(chunk, int) and -size <= chunk < size, f"{case}, but there is no such chunk.")
            passed = [holds[rank][chunk].copy() for rank, chunk in enumerate(sends)]
            for rank, (chunk, shares) in enumerate(zip(sends, passed, strict=True)):
                receiver = (rank + 1) % size
                holds[receiver][chunk] += shares
                twice = [each for each, times in holds[receiver][chunk].items() if times > 1]
                expect(
                    not twice,
                    f"With {size} ranks, in round {step}, rank {rank} sends chunk {chunk % size} to rank {receiver}, "
                    f"which then contains the contribution of rank {twice and twice[0]} twice.",
                )
        complete = [[chunk for chunk in range(size) if len(holds[rank][chunk]) == size] for rank in range(size)]
        missing = sorted(set(range(size)) - {chunk for chunks in complete for chunk in chunks})
        expect(
            not missing,
            f"With {size} ranks, no rank has the complete chunk {', '.join(map(str, missing))} after the last round. "
            f"Every rank must have one complete chunk, got {complete}.",
        )
    return "With 1 to 8 ranks, every rank has a different complete chunk, and no contribution was added twice."


def _chunk_to_send(rank: int, step: int, size: int) -> int:
    return (rank - step) % size


def _always_its_own(rank: int, step: int, size: int) -> int:
    return rank


def _all_the_same(rank: int, step: int, size: int) -> int:
    return step


def _against_the_ring(rank: int, step: int, size: int) -> int:
    return (rank + step) % size


def _ring_not_closed(rank: int, step: int, size: int) -> int:
    return max(rank - step, 0)


chunk_to_send = Exercise(
    task="chunk_to_send(rank, step, size): return the chunk that rank sends to rank + 1 in round step = 0, 1, ...",
    test=_test_chunk_to_send,
    solution=_chunk_to_send,
    wrong={
        "sends its own chunk in every round": _always_its_own,
        "lets all ranks send the same chunk": _all_the_same,
        "counts up, against the ring": _against_the_ring,
        "stops at chunk 0 instead of wrapping around": _ring_not_closed,
    },
    hints=(
        "In the first round, rank r sends chunk r. Which chunk does it receive in that round, and from which rank?",
        "A rank forwards the chunk that it received in the previous round, which its left neighbor sent.",
        "So chunk(rank, step) is chunk(rank - 1, step - 1). Go back to step 0, and wrap around with % size.",
    ),
)

# --------------------------------------------------------------------------------------------- 2. tensors of any length

_LENGTHS = (6, 7, 8, 1)


def _instead(*_: object, **__: object) -> None:
    raise WrongAnswerError(
        "Do not call torch's own all-reduce. Build one from reduce_scatter_tensor and all_gather_into_tensor."
    )


def _run_any_length(world: World, answer: Answer) -> list[list[float] | str]:
    """Return the answer's result for each length. If torch raises an error (on all ranks), its message comes last."""
    results: list[list[float] | str] = []
    for length in _LENGTHS:
        mine = (torch.arange(float(length)) + 1) * 10**world.rank
        try:
            with patch.object(dist, "all_reduce", _instead):
                results.append(answer(world, mine).tolist())
        except NotImplementedError:
            raise
        except (RuntimeError, ValueError) as error:
            results.append(re.sub(r"^.*\.cpp:\d+\] ", "", str(error)).rstrip(" .\n"))
            break
    return results


def _test_any_length(answer: Answer) -> str:
    stuck = "A rank waits forever. All ranks must enter both collectives, with equal lengths."
    results = on_ranks(_run_any_length, 3, answer, stuck=stuck, timeout=20)
    for rank, seen in enumerate(results):
        for length, got in zip(_LENGTHS, seen, strict=False):
            case = f"3 ranks, each with {length} numbers"
            expect(
                not isinstance(got, str),
                f"{case}: torch raises an error ({got}). reduce_scatter_tensor splits a tensor into equal chunks: pad "
                f"{length} numbers to a multiple of 3.",
            )
            true = [111.0 * (i + 1) for i in range(length)]
            expect(
                got == true,
                f"{case}: the sum is\n  {true} ({length} numbers);\nrank {rank} returned\n  {got} ({len(got)}).",
            )
    return f"All three ranks return the sum, for lengths {', '.join(map(str, _LENGTHS))}."


def _any_length(world: World, tensor: torch.Tensor) -> torch.Tensor:
    padded = F.pad(tensor, (0, -len(tensor) % world.size))  # append zeros up to a multiple
    chunk = padded.new_empty(len(padded) // world.size)
    dist.reduce_scatter_tensor(chunk, padded)
    dist.all_gather_into_tensor(padded, chunk)
    return padded[: len(tensor)]


def _does_not_pad(world: World, tensor: torch.Tensor) -> torch.Tensor:
    chunk = tensor.new_empty(len(tensor) // world.size)
    dist.reduce_scatter_tensor(chunk, tensor)
    summed = torch.empty_like(tensor)
    dist.all_gather_into_tensor(summed, chunk)
    return summed


def _drops_the_rest(world: World, tensor: torch.Tensor) -> torch.Tensor:
    return _any_length(world, tensor[: len(tensor) // world.size * world.size])


def _keeps_the_padding(world: World, tensor: torch.Tensor) -> torch.Tensor:
    return _any_length(world, F.pad(tensor, (0, -len(tensor) % world.size)))


def _stops_half_way(world: World, tensor: torch.Tensor) -> torch.Tensor:
    padded = F.pad(tensor, (0, -len(tensor) % world.size))
    chunk = padded.new_empty(len(padded) // world.size)
    dist.reduce_scatter_tensor(chunk, padded)
    return chunk


def _gathers_without_adding(world: World, tensor: torch.Tensor) -> torch.Tensor:
    padded = F.pad(tensor, (0, -len(tensor) % world.size))
    summed = torch.empty_like(padded)
    dist.all_gather_into_tensor(summed, padded.chunk(world.size)[world.rank].contiguous())
    return summed[: len(tensor)]


any_length = Exercise(
    task="any_length(world, tensor): return the sum of a tensor of any length over all ranks. Use "
    "dist.reduce_scatter_tensor(chunk, padded) and dist.all_gather_into_tensor(padded, chunk).",
    test=_test_any_length,
    solution=_any_length,
    wrong={
        "does not pad": _does_not_pad,
        "drops the remainder": _drops_the_rest,
        "returns the padding too": _keeps_the_padding,
        "stops after the reduce-scatter": _stops_half_way,
        "gathers without summing": _gathers_without_adding,
    },
    hints=(
        "Both collectives require chunks of equal length. What can you append without changing the sum?",
        "-len(tensor) % world.size zeros are missing; torch.nn.functional.pad(tensor, (0, missing)) appends them.",
        "chunk = padded.new_empty(len(padded) // world.size); then both collectives; then remove the padding.",
    ),
)

# -------------------------------------------------------------------------------------------------- 3. predict the cost


def _test_ring_or_tree(answer: Answer) -> str:
    cases = [
        (1e8, 4, 1e-4, 1e8),  # large: ring
        (4, 4, 1e-4, 1e8),  # small: tree
        (4, 2, 1e-4, 1e8),  # two ranks: the same number of rounds, half the bytes
        (1e6, 64, 1e-5, 1e10),  # a megabyte, but 126 rounds
        (1e9, 64, 1e-5, 1e10),
        (1e4, 5, 1e-3, 1e9),  # a tree of five needs as many rounds as one of eight
    ]
    for nbytes, size, latency, bandwidth in cases:
        link = LinkModel(latency, bandwidth)
        ring, tree = link.ring_seconds(nbytes, size), link.tree_seconds(nbytes, size)
        got = answer(nbytes, size, latency, bandwidth)
        case = f"{nbytes:,.0f} bytes, {size} ranks, {latency * 1e6:,.0f} us, {bandwidth / 1e6:,.0f} MB/s"
        expect(isinstance(got, tuple) and len(got) == 2, f"The result must be a pair (name, seconds), got {got!r}.")
        name, seconds = got
        true_name, true_seconds = ("ring", ring) if ring < tree else ("tree", tree)
        expected = f"{case}: the ring takes {ring:.6g} s, the tree {tree:.6g} s; got {name!r}, {seconds:.6g} s."
        expect(name == true_name and math.isclose(seconds, true_seconds, rel_tol=1e-6), expected)
    return "You can predict which algorithm is faster, and how long it takes."


def _ring_or_tree(nbytes: float, size: int, latency: float, bandwidth: float) -> tuple[str, float]:
    ring_rounds, tree_rounds = 2 * (size - 1), 2 * math.ceil(math.log2(size))
    ring = ring_rounds * (latency + nbytes / size / bandwidth)
    tree = tree_rounds * (latency + nbytes / bandwidth)
    return ("ring", ring) if ring < tree else ("tree", tree)


def _whole_tensors_in_the_ring(nbytes: float, size: int, latency: float, bandwidth: float) -> tuple[str, float]:
    message = latency + nbytes / bandwidth
    ring, tree = 2 * (size - 1) * message, 2 * math.ceil(math.log2(size)) * message
    return ("ring", ring) if ring < tree else ("tree", tree)


def _one_way_only(nbytes: float, size: int, latency: float, bandwidth: float) -> tuple[str, float]:
    name, seconds = _ring_or_tree(nbytes, size, latency, bandwidth)
    return name, seconds / 2


def _without_latency(nbytes: float, size: int, latency: float, bandwidth: float) -> tuple[str, float]:
    return _ring_or_tree(nbytes, size, 0.0, bandwidth)


def _fraction_of_a_round(nbytes: float, size: int, latency: float, bandwidth: float) -> tuple[str, float]:
    ring = 2 * (size - 1) * (latency + nbytes / size / bandwidth)
    tree = 2 * math.log2(size) * (latency + nbytes / bandwidth)
    return ("ring", ring) if ring < tree else ("tree", tree)


ring_or_tree = Exercise(
    task='ring_or_tree(nbytes, size, latency, bandwidth): return which is faster, "ring" or "tree", and its seconds.',
    test=_test_ring_or_tree,
    solution=_ring_or_tree,
    wrong={
        "sends the whole tensor in each round of the ring": _whole_tensors_in_the_ring,
        "forgets the way back": _one_way_only,
        "ignores the latency": _without_latency,
        "does not round up the number of rounds of a tree": _fraction_of_a_round,
    },
    hints=(
        "A round takes latency + message bytes / bandwidth. How many rounds are there, and how large is a message?",
        "The ring has 2 (N - 1) rounds of nbytes / N. The tree goes up and down; going up halves the ranks.",
        "The tree has 2 * math.ceil(math.log2(size)) rounds of nbytes each.",
    ),
)

# ---------------------------------------------------------------------------------------------------- 4. the whole ring

_SIZES = (2, 3, 4)
_RING_LENGTHS = (12, 7, 3)  # divides by all sizes; by none; shorter than a ring of four
_TIMEOUT = 10.0  # seconds that a rank waits in one send or receive
_OTHERS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_object"),
    *("isend", "irecv", "batch_isend_irecv"),
)


class _RingRun(NamedTuple):
    """Effects of the answer on one tensor of this rank: the values in the tensor, and the bytes sent to each rank."""

    got: list[float]
    sent: dict[int, int]


def _not_this(name: str, *_: object, **__: object) -> None:
    raise WrongAnswerError(f"Use only dist.send and dist.recv; your answer called dist.{name}.")


def _wait(begin: Callable[..., Any], what: str, world: World, tensor: torch.Tensor, other: int) -> None:
    """Send or receive like the blocking function of torch, but with a timeout."""
    case = f"{world.size} ranks: rank {world.rank} {what} rank {other}"
    expect(0 <= other < world.size and other != world.rank, f"{case}, which is not a different rank of the ring.")
    try:
        begin(tensor, other).wait(timedelta(seconds=_TIMEOUT))
    except RuntimeError as error:
        if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
            raise
        raise WrongAnswerError(
            f"{case}, and has waited for {_TIMEOUT:.0f} seconds. Blocking calls that wait for one another in a cycle "
            "never return: does each rank receive while its neighbor sends?"
        ) from None


def _run_whole_ring(world: World, answer: Answer) -> list[_RingRun | None]:
    """Run the answer in rings of the first 2, 3 and 4 ranks, with tensors of each length."""
    isend, irecv = dist.isend, dist.irecv
    runs: list[_RingRun | None] = []
    for size in _SIZES:
        for length in _RING_LENGTHS:
            dist.barrier()
            if world.rank >= size:
                runs.append(None)
                continue
            ring, sent = replace(world, size=size, local_size=size), Counter[int]()

            def send(tensor: torch.Tensor, dst: int, ring: World = ring, sent: Counter[int] = sent) -> None:
                sent[dst] += tensor.nbytes
                _wait(isend, "sends to", ring, tensor, dst)

            def recv(tensor: torch.Tensor, src: int, ring: World = ring) -> None:
                _wait(irecv, "receives from", ring, tensor, src)

            tensor = (torch.arange(float(length)) + 1) * 10**world.rank
            changed: dict[str, Any] = {name: partial(_not_this, name) for name in _OTHERS}
            with patch.multiple(dist, **changed, send=send, recv=recv):
                answer(ring, tensor)
            runs.append(_RingRun(tensor.tolist(), dict(sent)))
    return runs


def _test_whole_ring(answer: Answer) -> str:
    stuck = "A rank does not return, although no send or receive blocks it. Is there an infinite loop?"
    of_ranks = on_ranks(_run_whole_ring, max(_SIZES), answer, stuck=stuck, timeout=30)
    cases = [(size, length) for size in _SIZES for length in _RING_LENGTHS]
    for number, (size, length) in enumerate(cases):
        runs: list[_RingRun] = [of_ranks[rank][number] for rank in range(size)]
        case = f"{size} ranks, each with {length} numbers"
        true = [float("1" * size) * (i + 1) for i in range(length)]
        for rank, run in enumerate(runs):
            expect(
                run.got == true,
                f"{case}: the sum is\n  {true};\nafter your answer, rank {rank} has\n  {run.got}, where each digit is "
                "the contribution of one rank. Leave the sum in the tensor itself, on every rank.",
            )
        most = 2 * (size - 1) * math.ceil(length / size) * 4
        each = [sum(run.sent.values()) for run in runs]
        expect(
            max(each) <= most and sum(each) == 2 * (size - 1) * length * 4,
            f"{case}: the sums are right, but this is not a ring. The ranks send {each} bytes for a tensor of "
            f"{4 * length} bytes. In a ring, each rank sends 2 (N - 1) / N of the tensor, here at most {most} bytes.",
        )
        for rank, run in enumerate(runs):
            expect(
                len(run.sent) <= 1,
                f"{case}: rank {rank} sends to ranks {sorted(run.sent)}. In a ring, a rank sends to one neighbor only.",
            )
    return "On 2, 3 and 4 ranks, every rank has the sum for any length, and sends only 2 (N - 1) / N of the tensor."


def _whole_ring(world: World, tensor: torch.Tensor) -> None:
    chunks = tensor.tensor_split(world.size)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for step in range(2 * (world.size - 1)):
        outgoing, incoming = chunks[(world.rank - step) % world.size], chunks[(world.rank - step - 1) % world.size]
        theirs = torch.empty_like(incoming)
        for sending in (True, False) if world.rank % 2 == 0 else (False, True):  # avoids a deadlock around the ring
            if sending and outgoing.numel():
                dist.send(outgoing, right)
            if not sending and theirs.numel():
                dist.recv(theirs, left)
        incoming.copy_(incoming + theirs if step < world.size - 1 else theirs)


def _all_send_first(world: World, tensor: torch.Tensor) -> None:
    chunks = tensor.tensor_split(world.size)
    for step in range(2 * (world.size - 1)):
        incoming = chunks[(world.rank - step - 1) % world.size]
        dist.send(chunks[(world.rank - step) % world.size], (world.rank + 1) % world.size)
        theirs = torch.empty_like(incoming)
        dist.recv(theirs, (world.rank - 1) % world.size)
        incoming.copy_(incoming + theirs if step < world.size - 1 else theirs)


def _exchange(world: World, outgoing: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """Send `outgoing` to the next rank, and return the tensor received, which has the shape of `incoming`."""
    theirs = torch.empty_like(incoming)
    for sending in (True, False) if world.rank % 2 == 0 else (False, True):
        if sending and outgoing.numel():
            dist.send(outgoing, (world.rank + 1) % world.size)
        if not sending and theirs.numel():
            dist.recv(theirs, (world.rank - 1) % world.size)
    return theirs


def _one_round_each(world: World, tensor: torch.Tensor) -> None:
    chunks = tensor.tensor_split(world.size)
    for step, adds in ((0, True), (1, False)):
        outgoing, incoming = chunks[(world.rank - step) % world.size], chunks[(world.rank - step - 1) % world.size]
        theirs = _exchange(world, outgoing, incoming)
        incoming.copy_(incoming + theirs if adds else theirs)


def _all_to_rank_zero(world: World, tensor: torch.Tensor) -> None:
    theirs = torch.empty_like(tensor)
    if world.rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for other in range(1, world.size):
        dist.recv(theirs, other)
        tensor += theirs
    for other in range(1, world.size):
        dist.send(tensor, other)


def _whole_tensors(world: World, tensor: torch.Tensor) -> None:
    passed = tensor.clone()
    for _ in range(world.size - 1):
        passed = _exchange(world, passed, tensor)
        tensor += passed


def _leaves_the_rest(world: World, tensor: torch.Tensor) -> None:
    _whole_ring(world, tensor[: len(tensor) // world.size * world.size])


def _first_half_only(world: World, tensor: torch.Tensor) -> None:
    chunks = tensor.tensor_split(world.size)
    for step in range(world.size - 1):
        incoming = chunks[(world.rank - step - 1) % world.size]
        incoming += _exchange(world, chunks[(world.rank - step) % world.size], incoming)


whole_ring = Exercise(
    task=(
        "whole_ring(world, tensor): sum a tensor of one dimension and any length over all ranks, in place, around a "
        "ring: a reduce-scatter, then an all-gather. Use only dist.send and dist.recv, which block."
    ),
    test=_test_whole_ring,
    solution=_whole_ring,
    wrong={
        "sends on all ranks before any rank receives": _all_send_first,
        "runs one round in each half, which is right on two ranks only": _one_round_each,
        "sends everything to rank 0": _all_to_rank_zero,
        "passes whole tensors around": _whole_tensors,
        "ignores the remainder": _leaves_the_rest,
        "stops after the reduce-scatter": _first_half_only,
    },
    hints=(
        "tensor.tensor_split(world.size) returns chunks of nearly equal length. They are views, so writing to a chunk "
        "writes to the tensor. Exercise 1 computes the chunk to send in each round.",
        "send returns when the receiver receives. If all ranks send first, no rank receives. Let the even ranks send "
        "first, and the odd ranks receive first.",
        "After world.size - 1 rounds of adding, rank r has the complete chunk r + 1. Send that chunk next. In "
        "world.size - 1 further rounds, overwrite each chunk with the received one.",
        "If the tensor is shorter than the ring, some chunks are empty: skip the send and the receive for those.",
    ),
)
