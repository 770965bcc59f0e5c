"""Exercises on tensors of any length, a transpose, a ring, and halving-doubling, for notebook 02_collectives."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, counted, expect, on_ranks
from ddp_tutorial.world import World

# --------------------------------------------------------------------------------------------- 1. tensors of any length

_LENGTHS = (6, 7, 8, 1)


def _instead(*_: object, **__: object) -> None:
    raise WrongAnswerError(
        "Do not call dist.all_reduce. Build the all-reduce from reduce_scatter_tensor and all_gather_into_tensor."
    )


def _run_any_length(world: World, answer: Answer) -> list[list[float] | str]:
    """Return the answer's result for each length. If torch raises an error, the error message is the last item."""
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
    stuck = "A rank waits forever. All ranks must enter both collectives, with tensors of equal length."
    results = on_ranks(_run_any_length, 3, answer, stuck=stuck, timeout=20)
    for rank, seen in enumerate(results):
        for length, got in zip(_LENGTHS, seen, strict=False):
            case = f"With 3 ranks and {length} elements per rank"
            expect(
                not isinstance(got, str),
                f"{case}, torch raises an error ({got}). reduce_scatter_tensor requires equal chunks, so pad the "
                f"{length} elements to a multiple of 3.",
            )
            true = [111.0 * (i + 1) for i in range(length)]
            expect(
                got == true,
                f"{case}, rank {rank} must return the sum\n  {true} ({length} elements),\ngot\n  {got} ({len(got)}).",
            )
    return f"All three ranks return the sum for the lengths {', '.join(map(str, _LENGTHS))}."


def _any_length(world: World, tensor: torch.Tensor) -> torch.Tensor:
    padded = F.pad(tensor, (0, -len(tensor) % world.size))  # append zeros up to a multiple of the world size
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
        "With missing = -len(tensor) % world.size, torch.nn.functional.pad(tensor, (0, missing)) appends enough zeros.",
        "Create chunk = padded.new_empty(len(padded) // world.size). Call both collectives, and remove the padding.",
    ),
)

# ------------------------------------------------------------------------------------------------ 2. transpose a matrix

_ROWS = (1, 2)  # rows per rank


def _run_transpose(world: World, answer: Answer) -> list[torch.Tensor | str]:
    """Return the answer's result (this rank's rows of the transposed matrix) for each number of rows per rank.

    The matrix entry in row i and column j is 10 i + j. If torch raises an error, the error message is the last item.
    """
    results: list[torch.Tensor | str] = []
    names = [*(name for name in _OTHERS if name != "all_to_all_single"), "send", "recv"]
    changed: dict[str, Any] = {name: partial(_not_this, "dist.all_to_all_single", name) for name in names}
    for rows in _ROWS:
        width = rows * world.size
        matrix = 10.0 * torch.arange(width)[:, None] + torch.arange(width)
        try:
            with patch.multiple(dist, **changed), counted(["all_to_all_single"]) as called:
                got = answer(world, matrix[rows * world.rank : rows * (world.rank + 1)].clone())
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, NotImplementedError):
                raise
            results.append(re.sub(r"^.*\.cpp:\d+\] ", "", str(error)).rstrip(" .\n"))
            break
        expect(isinstance(got, torch.Tensor), f"The result must be a tensor, got {got!r}.")
        expect(len(called) == 1, f"Your answer must call dist.all_to_all_single once, got {len(called)} calls.")
        results.append(got)
    return results


def _test_transpose(answer: Answer) -> str:
    stuck = "A rank waits forever. All ranks must enter the same collectives."
    size = 3
    for rank, results in enumerate(on_ranks(_run_transpose, size, answer, stuck=stuck, timeout=20)):
        for rows, got in zip(_ROWS, results, strict=False):
            width = rows * size
            case = f"With {size} ranks and {rows} rows per rank"
            expect(not isinstance(got, str), f"{case}, torch raises an error ({got}).")
            true = 10.0 * torch.arange(width) + torch.arange(rows * rank, rows * (rank + 1))[:, None]
            expect(
                got.shape == true.shape,
                f"{case}, the result must have the shape {list(true.shape)}, got {list(got.shape)}.",
            )
            expect(
                torch.equal(got, true),
                f"{case}, rank {rank} must return\n  {true.tolist()},\ngot\n  {got.tolist()}.\nThe entry in row i and "
                "column j of the matrix is 10 i + j.",
            )
    return f"With {_ROWS[0]} and {_ROWS[1]} rows per rank, every rank returns its rows of the transposed matrix."


def _transpose(world: World, rows: torch.Tensor) -> torch.Tensor:
    count = len(rows)
    # Block r contains the columns of `rows` that become rows on rank r. The block is sent transposed.
    outgoing = rows.reshape(count, world.size, count).permute(1, 2, 0).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    return incoming.permute(1, 0, 2).reshape(count, -1)


def _without_transposing_blocks(world: World, rows: torch.Tensor) -> torch.Tensor:
    count = len(rows)
    outgoing = rows.reshape(count, world.size, count).permute(1, 0, 2).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    return incoming.permute(1, 0, 2).reshape(count, -1)


def _in_order_of_memory(world: World, rows: torch.Tensor) -> torch.Tensor:
    incoming = torch.empty_like(rows.flatten())
    dist.all_to_all_single(incoming, rows.flatten())
    return incoming.reshape(len(rows), -1)


def _blocks_below_each_other(world: World, rows: torch.Tensor) -> torch.Tensor:
    count = len(rows)
    outgoing = rows.reshape(count, world.size, count).permute(1, 2, 0).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    return incoming.reshape(count, -1)


def _gathers_the_matrix(world: World, rows: torch.Tensor) -> torch.Tensor:
    matrix = rows.new_empty(rows.shape[1], rows.shape[1])
    dist.all_gather_into_tensor(matrix, rows)
    return matrix.T[len(rows) * world.rank : len(rows) * (world.rank + 1)]


def _own_block_only(world: World, rows: torch.Tensor) -> torch.Tensor:
    mine = slice(len(rows) * world.rank, len(rows) * (world.rank + 1))
    transposed = rows.clone()
    transposed[:, mine] = rows[:, mine].T
    return transposed


def _row_by_row(world: World, rows: torch.Tensor) -> torch.Tensor:
    columns = [torch.empty_like(row) for row in rows]
    for column, row in zip(columns, rows, strict=True):
        dist.all_to_all_single(column, row.contiguous())
    return torch.stack([column.view(world.size, -1) for column in columns], 2).transpose(0, 1).reshape(len(rows), -1)


transpose = Exercise(
    task=(
        "transpose(world, rows): every rank has the same number of consecutive rows of a square matrix. Return the "
        "rows with the same indices from the transposed matrix. Call dist.all_to_all_single once."
    ),
    test=_test_transpose,
    solution=_transpose,
    wrong={
        "does not transpose the blocks": _without_transposing_blocks,
        "splits its rows in memory order": _in_order_of_memory,
        "puts the received blocks below each other": _blocks_below_each_other,
        "gathers the full matrix on every rank": _gathers_the_matrix,
        "transposes its own block and sends nothing": _own_block_only,
        "sends each row separately": _row_by_row,
    },
    hints=(
        "Split the rows into one square block per rank. Which rank needs which block?",
        "dist.all_to_all_single(incoming, outgoing) sends outgoing[r] to rank r, and receives incoming[s] from rank s. "
        "Both tensors must be contiguous. The shape of outgoing must be [ranks, rows, rows].",
        "rows.reshape(count, world.size, count).permute(1, 2, 0).contiguous() contains the transposed blocks. "
        "Place the received blocks side by side.",
    ),
)

# ---------------------------------------------------------------------------------------------------- 3. the whole ring

_SIZES = (2, 3, 4)
_LENGTHS_IN_PLACE = (12, 7, 3)  # divisible by all sizes; by no size; shorter than a ring of four
_TIMEOUT = 10.0  # seconds that a rank waits in one send or receive
_OTHERS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_object"),
    *("isend", "irecv", "batch_isend_irecv"),
)


class _Run(NamedTuple):
    """The final values of a tensor on one rank, and the numbers of bytes and messages that the rank sent."""

    got: list[float]
    sent: dict[int, int]  # bytes sent to each rank
    messages: int


def _not_this(allowed: str, name: str, *_: object, **__: object) -> None:
    raise WrongAnswerError(f"Your answer must call only {allowed}, but it called dist.{name}.")


def _wait(begin: Callable[..., Any], what: str, world: World, tensor: torch.Tensor, other: int, tag: int) -> None:
    """Start a send or a receive, and wait for its completion with a timeout."""
    case = f"With {world.size} ranks, rank {world.rank} {what} rank {other}"
    expect(
        0 <= other < world.size and other != world.rank,
        f"{case}, which is not a different rank from 0 to {world.size - 1}.",
    )
    try:
        begin(tensor, other, tag=tag).wait(timedelta(seconds=_TIMEOUT))
    except RuntimeError as error:
        if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
            raise
        raise WrongAnswerError(
            f"{case} and has waited for {_TIMEOUT:.0f} seconds. Blocking calls that wait for each other in a cycle "
            "never return. Does each rank receive while its neighbor sends?"
        ) from None


def _run_one(world: World, answer: Answer, tensor: torch.Tensor) -> _Run:
    """Run the answer with versions of `dist.send` and `dist.recv` that time out, and that count bytes and messages."""
    isend, irecv = dist.isend, dist.irecv
    sent, messages = Counter[int](), 0

    def send(tensor: torch.Tensor, dst: int, group: object = None, tag: int = 0) -> None:
        nonlocal messages
        sent[dst] += tensor.nbytes
        messages += 1
        _wait(isend, "sends to", world, tensor, dst, tag)

    def recv(tensor: torch.Tensor, src: int, group: object = None, tag: int = 0) -> int:
        _wait(irecv, "receives from", world, tensor, src, tag)
        return src

    changed: dict[str, Any] = {name: partial(_not_this, "dist.send and dist.recv", name) for name in _OTHERS}
    with patch.multiple(dist, **changed, send=send, recv=recv):
        answer(world, tensor)
    return _Run(tensor.tolist(), dict(sent), messages)


def _run_all_reduce(world: World, answer: Answer, sizes: Sequence[int]) -> list[_Run | None]:
    """Run the answer on the first `size` ranks, for each `size` in `sizes` and each tensor length. Collective."""
    runs: list[_Run | None] = []
    for size in sizes:
        for length in _LENGTHS_IN_PLACE:
            dist.barrier()
            if world.rank >= size:
                runs.append(None)
                continue
            tensor = (torch.arange(float(length)) + 1) * 10**world.rank
            runs.append(_run_one(replace(world, size=size, local_size=size), answer, tensor))
    return runs


def _sums_in_place(answer: Answer, sizes: Sequence[int]) -> Iterator[tuple[str, int, int, list[_Run]]]:
    """Run the answer, check the sums, and yield (case, size, length, runs of all ranks) for each size and length."""
    stuck = "A rank does not return, although no send or receive blocks it. Check for an infinite loop."
    of_ranks = on_ranks(_run_all_reduce, max(sizes), answer, sizes, stuck=stuck, timeout=30)
    cases = [(size, length) for size in sizes for length in _LENGTHS_IN_PLACE]
    for number, (size, length) in enumerate(cases):
        runs: list[_Run] = [of_ranks[rank][number] for rank in range(size)]
        case = f"With {size} ranks and {length} elements per rank"
        true = [float("1" * size) * (i + 1) for i in range(length)]
        for rank, run in enumerate(runs):
            expect(
                run.got == true,
                f"{case}, the tensor on rank {rank} must contain the sum\n  {true},\ngot\n  {run.got}.\nEach digit is "
                "the contribution of one rank. Write the sum to the tensor itself on every rank.",
            )
        yield case, size, length, runs


def _test_whole_ring(answer: Answer) -> str:
    for case, size, length, runs in _sums_in_place(answer, _SIZES):
        most = 2 * (size - 1) * math.ceil(length / size) * 4
        each = [sum(run.sent.values()) for run in runs]
        expect(
            max(each) <= most,  # also if the answer pads the tensor to chunks of equal length
            f"{case}, the sums are correct, but this is not a ring. The ranks send {each} bytes for a tensor of "
            f"{4 * length} bytes. In this ring, a rank sends at most {most} bytes, which is about 2 (N - 1) / N of the "
            "tensor.",
        )
        for rank, run in enumerate(runs):
            expect(
                len(run.sent) <= 1,
                f"{case}, rank {rank} sends to ranks {sorted(run.sent)}. In a ring, a rank sends to one neighbor only.",
            )
    return "On 2, 3 and 4 ranks, every rank computes the sum, and sends only 2 (N - 1) / N of the tensor."


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
    """Send `outgoing` to the next rank, and return the previous rank's tensor, which has the shape of `incoming`."""
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
        "whole_ring(world, tensor): sum a one-dimensional tensor of any length over all ranks, in place. Send around a "
        "ring, first for a reduce-scatter and then for an all-gather. Use only dist.send and dist.recv, which block."
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
        "tensor.tensor_split(world.size) returns chunks of nearly equal length. The chunks are views, so writing to a "
        "chunk writes to the tensor. In round 0, rank r sends chunk r. In every later round, rank r sends the chunk "
        "that it has just received.",
        "send returns only when the receiver calls recv. If all ranks send first, no rank receives. Let the even ranks "
        "send first, and the odd ranks receive first.",
        "After world.size - 1 rounds with additions, rank r has the complete sum of chunk r + 1. Send this chunk next. "
        "In another world.size - 1 rounds, overwrite each chunk with the received chunk.",
        "If the tensor is shorter than the ring, some chunks are empty. Skip the send and the receive for these "
        "chunks.",
    ),
)

# ------------------------------------------------------------------------------------ 4. recursive halving and doubling

_POWERS = (2, 4)


def _test_halving_doubling(answer: Answer) -> str:
    for case, size, length, runs in _sums_in_place(answer, _POWERS):
        rounds = 2 * (size.bit_length() - 1)
        messages = [run.messages for run in runs]
        expect(
            max(messages) <= rounds,
            f"{case}, the sums are correct, but a rank sends up to {max(messages)} messages. Halving and doubling "
            f"takes 2 log2 N rounds, so a rank must send at most {rounds} messages.",
        )
        each = [sum(run.sent.values()) for run in runs]
        most = 2 * (size - 1) / size * length * 4 + rounds * 4  # a half may be one element longer
        in_total = 2 * (size - 1) * math.ceil(length / size) * size * 4  # the answer may pad the tensor
        expect(
            max(each) <= most and sum(each) <= in_total,
            f"{case}, the sums are correct, but the ranks send {each} bytes for a tensor of {4 * length} bytes. Each "
            f"rank may send 2 (N - 1) / N of the tensor. All ranks together may send {in_total} bytes.",
        )
    return "On 2 and 4 ranks, every rank computes the sum, with as few rounds as a tree and as few bytes as a ring."


def _pair(world: World, partner: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Exchange tensors with the partner. The lower rank sends first."""
    for sending in (True, False) if world.rank < partner else (False, True):
        if sending and outgoing.numel():
            dist.send(outgoing, partner)
        if not sending and incoming.numel():
            dist.recv(incoming, partner)


def _halving_doubling(world: World, tensor: torch.Tensor) -> None:
    def exchange(partner: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        for sending in (True, False) if world.rank < partner else (False, True):  # avoids a deadlock
            if sending and outgoing.numel():
                dist.send(outgoing, partner)
            if not sending and incoming.numel():
                dist.recv(incoming, partner)

    segment, halves = tensor, []
    distance = world.size // 2
    while distance:  # reduce-scatter: keep one half of the segment, and send the other half
        first, second = segment.tensor_split(2)
        kept, given = (first, second) if world.rank & distance == 0 else (second, first)
        received = torch.empty_like(kept)
        exchange(world.rank ^ distance, given, received)
        kept += received
        halves.append((distance, kept, given))
        segment, distance = kept, distance // 2
    for distance, kept, given in reversed(halves):  # all-gather: the same exchanges in reverse order
        exchange(world.rank ^ distance, kept, given)


def _both_send_first(world: World, tensor: torch.Tensor) -> None:
    received = torch.empty_like(tensor)
    distance = 1
    while distance < world.size:
        dist.send(tensor, world.rank ^ distance)
        dist.recv(received, world.rank ^ distance)
        tensor += received
        distance *= 2


def _doubling_only(world: World, tensor: torch.Tensor) -> None:
    received = torch.empty_like(tensor)
    distance = 1
    while distance < world.size:
        _pair(world, world.rank ^ distance, tensor.clone(), received)
        tensor += received
        distance *= 2


def _halving_only(world: World, tensor: torch.Tensor) -> None:
    segment, distance = tensor, world.size // 2
    while distance:
        first, second = segment.tensor_split(2)
        kept, given = (first, second) if world.rank & distance == 0 else (second, first)
        received = torch.empty_like(kept)
        _pair(world, world.rank ^ distance, given, received)
        kept += received
        segment, distance = kept, distance // 2


def _halves_of_equal_length(world: World, tensor: torch.Tensor) -> None:
    _halving_doubling(world, tensor[: len(tensor) // world.size * world.size])


def _same_partner_in_every_round(world: World, tensor: torch.Tensor) -> None:
    received = torch.empty_like(tensor)
    for _ in range(world.size.bit_length() - 1):
        _pair(world, world.rank ^ 1, tensor.clone(), received)
        tensor += received


halving_doubling = Exercise(
    task=(
        "halving_doubling(world, tensor): sum a one-dimensional tensor of any length over 2, 4, 8, ... ranks, in "
        "place, in 2 log2 N rounds. Use recursive halving for a reduce-scatter, and then recursive doubling for an "
        "all-gather. Use only dist.send and dist.recv, which block."
    ),
    test=_test_halving_doubling,
    solution=_halving_doubling,
    wrong={
        "lets both partners send first": _both_send_first,
        "exchanges full tensors": _doubling_only,
        "is a ring": _whole_ring,
        "stops after the reduce-scatter": _halving_only,
        "ignores the remainder": _halves_of_equal_length,
        "uses the same partner in every round": _same_partner_in_every_round,
    },
    hints=(
        "In the first round, the partner of rank r is r ^ (N / 2), which flips the highest bit of r. Each partner "
        "keeps one half of the tensor, sends the other half, and adds the received half to its own half.",
        "In the next round, each rank continues with its own half only, and the distance to the partner is halved, "
        "too. After log2 N rounds, every rank has 1 / N of the sum. tensor_split(2) splits a tensor of any length.",
        "Record (distance, kept half, sent half) in each round. The all-gather repeats the exchanges in reverse order: "
        "send the kept half, and receive into the other half.",
    ),
)
