"""The exercises of 02_collectives: which chunk to send, a length that does not divide, and the cost of both ways."""

import math
import re
from collections import Counter
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------- 1. which chunk, in which round?


def _test_chunk_to_send(answer: Answer) -> str:
    for size in range(1, 9):
        # holds[rank][chunk] counts how often the share of each rank has been added to it
        holds = [[Counter({rank: 1}) for _ in range(size)] for rank in range(size)]
        for step in range(size - 1):
            sends = [answer(rank, step, size) for rank in range(size)]
            for rank, chunk in enumerate(sends):
                said = f"With {size} ranks, in round {step}, rank {rank} sends chunk {chunk!r}"
                expect(isinstance(chunk, int) and -size <= chunk < size, f"{said}, but there is no such chunk.")
            passed = [holds[rank][chunk].copy() for rank, chunk in enumerate(sends)]
            for rank, (chunk, shares) in enumerate(zip(sends, passed, strict=True)):
                receiver = (rank + 1) % size
                holds[receiver][chunk] += shares
                twice = [each for each, times in holds[receiver][chunk].items() if times > 1]
                expect(
                    not twice,
                    f"With {size} ranks, in round {step}, rank {rank} sends chunk {chunk % size} to rank {receiver}, "
                    f"which then has the share of rank {twice and twice[0]} in it twice.",
                )
        complete = [[chunk for chunk in range(size) if len(holds[rank][chunk]) == size] for rank in range(size)]
        missing = sorted(set(range(size)) - {chunk for chunks in complete for chunk in chunks})
        expect(
            not missing,
            f"With {size} ranks, after the last round, no rank has all shares of chunk "
            f"{', '.join(map(str, missing))}. Expected one complete chunk on each rank, found {complete}.",
        )
    return "From 1 to 8 ranks, each ends with a complete chunk of its own, and no share was added twice."


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
        "stops at chunk 0, where the ring should close": _ring_not_closed,
    },
    hints=(
        "In the first round rank r sends chunk r. What has it just received then, and from whom?",
        "A rank passes on what it received in the round before: the chunk that its left neighbour sent.",
        "So chunk(rank, step) is chunk(rank - 1, step - 1). Go back to step 0, and close the ring with % size.",
    ),
)

# --------------------------------------------------------------------------------- 2. a length that does not divide

_LENGTHS = (6, 7, 8, 1)


def _instead(*_: object, **__: object) -> None:
    raise WrongAnswerError(
        "That is torch's own all-reduce. Build one from reduce_scatter_tensor and all_gather_into_tensor."
    )


def _run_any_length(world: World, answer: Answer) -> list[list[float] | str]:
    """What the answer returned for each length, until torch raised an error (on all ranks alike), then its message."""
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
    stuck = "Some rank waits for ever. All ranks must enter both collectives, with equal lengths."
    results = on_ranks(_run_any_length, 3, answer, stuck=stuck, timeout=20)
    for rank, seen in enumerate(results):
        for length, got in zip(_LENGTHS, seen, strict=False):
            said = f"3 ranks, each with {length} numbers"
            refused = (
                f"{said}: torch refuses it ({got}). reduce_scatter_tensor cuts into equal parts: make {length} divide."
            )
            expect(not isinstance(got, str), refused)
            true = [111.0 * (i + 1) for i in range(length)]
            expect(
                got == true,
                f"{said}: the sum is\n  {true}, {length} numbers;\nrank {rank} returned\n  {got}, {len(got)}.",
            )
    return f"All three ranks have the sum, for lengths {', '.join(map(str, _LENGTHS))}."


def _any_length(world: World, tensor: torch.Tensor) -> torch.Tensor:
    padded = F.pad(tensor, (0, -len(tensor) % world.size))  # zeros at the end, as many as are missing
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
    task="any_length(world, tensor): return the sum of tensor over all ranks, whatever its length, by "
    "dist.reduce_scatter_tensor(chunk, padded) and dist.all_gather_into_tensor(padded, chunk).",
    test=_test_any_length,
    solution=_any_length,
    wrong={
        "does not pad": _does_not_pad,
        "drops what does not divide": _drops_the_rest,
        "returns the padding too": _keeps_the_padding,
        "stops after the reduce-scatter": _stops_half_way,
        "gathers without adding up": _gathers_without_adding,
    },
    hints=(
        "Both collectives want chunks of equal length. What could you append so that the sum stays right?",
        "-len(tensor) % world.size zeros are missing; torch.nn.functional.pad(tensor, (0, missing)) appends them.",
        "chunk = padded.new_empty(len(padded) // world.size); then both collectives; then cut off what you appended.",
    ),
)

# -------------------------------------------------------------------------------------------- 3. what will it cost?


def _test_ring_or_tree(answer: Answer) -> str:
    cases = [
        (1e8, 4, 1e-4, 1e8),  # large: ring
        (4, 4, 1e-4, 1e8),  # small: tree
        (4, 2, 1e-4, 1e8),  # two ranks: as many rounds, half the bytes
        (1e6, 64, 1e-5, 1e10),  # a megabyte, but 126 rounds
        (1e9, 64, 1e-5, 1e10),
        (1e4, 5, 1e-3, 1e9),  # a tree of five needs as many rounds as one of eight
    ]
    for nbytes, size, latency, bandwidth in cases:
        link = LinkModel(latency, bandwidth)
        ring, tree = link.ring_seconds(nbytes, size), link.tree_seconds(nbytes, size)
        got = answer(nbytes, size, latency, bandwidth)
        said = f"{nbytes:,.0f} bytes, {size} ranks, {latency * 1e6:,.0f} us, {bandwidth / 1e6:,.0f} MB/s"
        expect(isinstance(got, tuple) and len(got) == 2, f"Return a name and a time, a pair; you gave {got!r}.")
        name, seconds = got
        true_name, true_seconds = ("ring", ring) if ring < tree else ("tree", tree)
        expected = f"{said}: the ring takes {ring:.6g} s, the tree {tree:.6g} s. You gave {name!r}, {seconds:.6g} s."
        expect(name == true_name and math.isclose(seconds, true_seconds, rel_tol=1e-6), expected)
    return "You can say before you start which one will be faster, and how long it will take."


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
        "leaves the latency out": _without_latency,
        "lets a tree have a fraction of a round": _fraction_of_a_round,
    },
    hints=(
        "A round takes latency + bytes of its message / bandwidth. How many rounds, and of how many bytes?",
        "The ring: 2 (N - 1) rounds of nbytes / N. The tree: up and down, and each round halves those that are left.",
        "The tree has 2 * math.ceil(math.log2(size)) rounds of all nbytes.",
    ),
)
