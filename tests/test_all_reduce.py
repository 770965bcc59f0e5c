"""The all-reduces made of send and receive equal `dist.all_reduce` and have the cost of their formulas; so has a link.

Hypothesis draws the cases in this process. Ranks are started once for each world size, and run all cases.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from ddp_tutorial.collectives import digest
from ddp_tutorial.ddp.link import LinkModel, fit_link
from ddp_tutorial.lessons.all_reduce import Message, ring_all_reduce, tree_all_reduce
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

ALGORITHMS: dict[str, Callable[[World, torch.Tensor], list[Message]]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
}
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.uint8]


# ------------------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """A tensor to sum: a view of a different tensor, so that it may have gaps or permuted dimensions."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    seed: int

    def on(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensor of `rank` and the tensor that it is a view of.

        The values are integers, so that sums are exact: small in floating-point tensors, and large enough to overflow
        in integer tensors.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        low, high = (-8, 9) if self.dtype.is_floating_point else (0, 256)
        whole = torch.randint(low, high, [2 * length + 1 for length in self.shape], generator=generator).to(self.dtype)
        if self.layout == "with gaps":
            view = whole[tuple(slice(1, None, 2) for _ in self.shape)]
        else:
            whole = whole[tuple(slice(0, length) for length in self.shape)].contiguous()
            view = whole.permute(list(reversed(range(whole.dim())))) if self.layout == "transposed" else whole
        return view, whole


def a_case() -> st.SearchStrategy[Case]:
    """Draw a case. Lengths start at 0, may be shorter than the ring, and are mostly not a multiple of its size."""
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.integers(0, 300).map(lambda length: (length,))
    layouts = st.sampled_from(["contiguous", "transposed", "with gaps"])
    return st.builds(Case, shapes, layouts, st.sampled_from(FLOATS + INTEGERS), st.integers(0, 99))


LENGTHS = [Case((length,), "contiguous", torch.float32, 1) for length in range(10)]
DTYPES = [Case((11,), layout, dtype, 2) for dtype in FLOATS + INTEGERS for layout in ("contiguous", "with gaps")]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return fixed and drawn cases. They are drawn here, because each rank would draw different cases."""
    found = [*LENGTHS, *DTYPES, Case((), "contiguous", torch.int64, 3)]

    @settings(max_examples=60, phases=[Phase.generate])
    @given(a_case())
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def test_the_cases_cover_every_kind(cases: list[Case]) -> None:
    tensors = [(case, case.on(0)[0]) for case in cases]
    assert {case.dtype for case in cases} == {*FLOATS, *INTEGERS}
    assert {tensor.dim() for _, tensor in tensors} >= {0, 1, 2, 3}
    assert sum(not tensor.is_contiguous() for _, tensor in tensors) >= 10
    assert {0, 1, 2, 3} <= {tensor.numel() for _, tensor in tensors}
    assert sum(tensor.numel() % 12 != 0 for _, tensor in tensors) >= 30


# ------------------------------------------------------------------------------------------------- the ranks at work


@dataclass
class Seen:
    """The observations of one rank for one case and algorithm."""

    right: bool
    beside_untouched: bool
    nbytes: int
    sent: list[Message]


def sum_everything(world: World, cases: list[Case]) -> dict[str, Any]:
    seen = {name: [sum_one(world, case, all_reduce) for case in cases] for name, all_reduce in ALGORITHMS.items()}
    return {"whole numbers": seen, "random floats": {name: sum_floats(world, name) for name in ALGORITHMS}}


def sum_one(world: World, case: Case, all_reduce: Callable[[World, torch.Tensor], list[Message]]) -> Seen:
    (mine, whole), (expected, _) = case.on(world.rank), case.on(world.rank)
    expected = expected.contiguous()
    if world.size > 1:
        dist.all_reduce(expected)
    before = whole.clone()
    sent = all_reduce(world, mine)
    right = torch.equal(mine, expected)
    mine.copy_(case.on(world.rank)[0])  # elements outside the view must be unchanged
    return Seen(right, torch.equal(whole, before), mine.nbytes, sent)


def sum_floats(world: World, name: str) -> dict[str, Any]:
    """Sum numbers whose sum depends on the order of addition."""
    mine = torch.randn(1001, generator=torch.Generator().manual_seed(world.rank))
    everyones = [
        torch.randn(1001, generator=torch.Generator().manual_seed(rank)).double() for rank in range(world.size)
    ]
    ALGORITHMS[name](world, mine)
    return {"digest": digest({"sum": mine}), "error": float((mine - sum(everyones)).abs().max())}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def nprocs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def heard(nprocs: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Return the observations of each rank. The ranks are started once for all tests."""
    return launch(sum_everything, nprocs, cases, device="cpu", threads=1, echo=False, timeout=300)


algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@algorithm
def test_the_result_equals_the_all_reduce_of_torch_on_every_rank(
    heard: list[dict[str, Any]], cases: list[Case], name: str
) -> None:
    for rank, each in enumerate(heard):
        for case, seen in zip(cases, each["whole numbers"][name], strict=True):
            assert seen.right, f"rank {rank}: {case}"


@algorithm
def test_elements_between_those_of_a_view_are_unchanged(
    heard: list[dict[str, Any]], cases: list[Case], name: str
) -> None:
    for rank, each in enumerate(heard):
        for case, seen in zip(cases, each["whole numbers"][name], strict=True):
            assert seen.beside_untouched, f"rank {rank}: {case}"


@algorithm
def test_results_are_bitwise_identical_on_all_ranks(heard: list[dict[str, Any]], name: str) -> None:
    """Each element is summed along one path and then copied, so all ranks round in the same way."""
    assert len({each["random floats"][name]["digest"] for each in heard}) == 1
    assert max(each["random floats"][name]["error"] for each in heard) < 2e-6


@algorithm
def test_all_ranks_together_send_the_tensor_twice_per_other_rank(
    heard: list[dict[str, Any]], cases: list[Case], name: str, nprocs: int
) -> None:
    for number, case in enumerate(cases):
        seen = [each["whole numbers"][name][number] for each in heard]
        total = sum(message.nbytes for each in seen for message in each.sent)
        assert total == 2 * (nprocs - 1) * seen[0].nbytes, case


@algorithm
def test_messages_record_their_sender_in_the_order_of_rounds(heard: list[dict[str, Any]], name: str) -> None:
    for rank, each in enumerate(heard):
        for seen in each["whole numbers"][name]:
            assert all(message.sender == rank != message.receiver for message in seen.sent)
            rounds = [message.round for message in seen.sent]
            assert rounds == sorted(set(rounds)), "one message a round at most"
            assert all(message.nbytes > 0 for message in seen.sent), "nothing is not sent"


def test_each_rank_of_a_ring_sends_every_chunk_twice_except_for_two(
    heard: list[dict[str, Any]], cases: list[Case], nprocs: int
) -> None:
    """A rank does not send the chunk that it completes in the reduce-scatter, and not the last chunk that it receives
    in the all-gather.
    """
    for rank, each in enumerate(heard):
        for case, seen in zip(cases, each["whole numbers"]["ring"], strict=True):
            chunks = [chunk.nbytes for chunk in case.on(0)[0].contiguous().reshape(-1).tensor_split(nprocs)]
            expected = 2 * seen.nbytes - chunks[(rank + 1) % nprocs] - chunks[(rank + 2) % nprocs]
            assert sum(message.nbytes for message in seen.sent) == (expected if nprocs > 1 else 0)
            assert all(message.receiver == (rank + 1) % nprocs for message in seen.sent)
            assert all(message.round < 2 * (nprocs - 1) for message in seen.sent)


def test_a_tree_rank_sends_the_tensor_once_to_its_parent_and_each_child(
    heard: list[dict[str, Any]], nprocs: int
) -> None:
    receivers = {1: [[]], 2: [[1], [0]], 3: [[2, 1], [0], [0]], 4: [[2, 1], [0], [0, 3], [2]]}[nprocs]
    for rank, each in enumerate(heard):
        for seen in each["whole numbers"]["tree"]:
            assert [message.receiver for message in seen.sent] == (receivers[rank] if seen.nbytes else [])
            assert all((message.chunk, message.nbytes) == (0, seen.nbytes) for message in seen.sent)
            assert all(message.round < 2 * math.ceil(math.log2(nprocs)) for message in seen.sent)


@algorithm
def test_several_ranks_without_a_group_are_rejected(name: str) -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        ALGORITHMS[name](World(rank=0, size=2, local_size=2), torch.ones(3))


@algorithm
def test_a_parameter_that_requires_a_gradient_can_be_summed(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert ALGORITHMS[name](World(), weight) == []
    assert weight.tolist() == [1, 1, 1]


# ----------------------------------------------------------------------------------------- the alpha-beta model

ETHERNET = LinkModel(latency=1e-4, bandwidth=1e8)  # 100 microseconds, 100 MB/s


def test_a_message_takes_the_latency_plus_its_bytes_over_the_bandwidth() -> None:
    assert ETHERNET.seconds(0) == 1e-4
    assert ETHERNET.seconds(1e6) == pytest.approx(0.0101)  # 100 us + 10 ms
    assert ETHERNET.seconds(1e6, rounds=5) == pytest.approx(0.0105)  # the bytes of all rounds


def test_a_ring_has_many_latencies_and_less_than_twice_the_bytes() -> None:
    # 4 ranks: 6 rounds of 0.25 MB: 6 * 0.1 ms + 1.5 MB / 100 MB/s = 0.6 ms + 15 ms
    assert ETHERNET.ring_seconds(1e6, 4) == pytest.approx(0.0156)
    assert ETHERNET.ring_seconds(1e6, 2) == pytest.approx(0.0102)
    assert ETHERNET.ring_seconds(1e6, 1) == 0


def test_a_tree_has_few_latencies_and_all_bytes_in_each_round() -> None:
    # 4 ranks: 4 rounds of 1 MB: 0.4 ms + 40 ms; 3 and 4 ranks take as many rounds
    assert ETHERNET.tree_seconds(1e6, 4) == ETHERNET.tree_seconds(1e6, 3) == pytest.approx(0.0404)
    assert ETHERNET.tree_seconds(1e6, 5) == pytest.approx(0.0606)
    assert ETHERNET.tree_seconds(1e6, 1) == 0


@given(latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e7, 1e11), rounds=st.integers(1, 14))
def test_a_fit_of_exact_times_recovers_the_link(latency: float, bandwidth: float, rounds: int) -> None:
    link = LinkModel(latency, bandwidth)
    sizes = [latency * bandwidth * factor for factor in (0.01, 0.1, 1, 10)]
    fitted = fit_link([rounds] * 4, sizes, [link.seconds(size, rounds) for size in sizes])
    assert fitted.latency == pytest.approx(latency)
    assert fitted.bandwidth == pytest.approx(bandwidth)


@given(
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e7, 1e11),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=9, max_size=9),
)
def test_a_fit_of_noisy_times_is_close_to_the_link(latency: float, bandwidth: float, noise: list[float]) -> None:
    """Times have errors of up to 5 %. Sizes range from latency-bound to bandwidth-bound."""
    link = LinkModel(latency, bandwidth)
    sizes = [latency * bandwidth * 10.0**power for power in np.linspace(-2, 2, 9)]
    seconds = [link.seconds(size) * (1 + off) for size, off in zip(sizes, noise, strict=True)]
    fitted = fit_link([1] * 9, sizes, seconds)
    assert fitted.latency == pytest.approx(latency, rel=0.12)
    assert fitted.bandwidth == pytest.approx(bandwidth, rel=0.12)


def test_a_fit_weights_small_and_large_messages_equally() -> None:
    """Least squares of the absolute error would follow the largest message, and could give a negative latency."""
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    off = [1, 1, 1, 1, 1, 1.05]  # the largest message took 5 % longer: 50 ms, 500 latencies
    seconds = [ETHERNET.seconds(size) * factor for size, factor in zip(sizes, off, strict=True)]
    assert fit_link([1] * 6, sizes, seconds).latency == pytest.approx(1e-4, rel=0.01)


def test_a_fit_never_returns_a_negative_latency() -> None:
    fitted = fit_link([1, 1], [1e6, 2e6], [1.0, 2.2])  # doubling the size more than doubles the time
    assert fitted.latency == 0
    # per byte b, the relative errors are 1 - 1e6 b and 1 - 2e6 b / 2.2: the least squares lie between the two
    assert fitted.bandwidth == pytest.approx((1 + (2 / 2.2) ** 2) / (1 + 2 / 2.2) * 1e6)


@given(
    nbytes=st.floats(1, 1e9), rounds=st.integers(1, 9), seconds=st.lists(st.floats(1e-6, 10), min_size=1, max_size=5)
)
def test_measurements_of_a_single_size_do_not_determine_a_link(
    nbytes: float, rounds: int, seconds: list[float]
) -> None:
    with pytest.raises(ValueError, match="the latency and the bandwidth cannot be determined"):
        fit_link([rounds] * len(seconds), [nbytes] * len(seconds), seconds)


@pytest.mark.parametrize(
    ("nbytes", "seconds", "said"),
    [
        ([], [], "cannot be determined from the 0 measurements"),
        ([0, 0], [1, 1], "cannot be determined from the 2 measurements"),
        ([10, 1000], [1.0, 0.5], "cannot be determined from the 2 measurements"),  # the larger message was faster
        ([10, 1000], [0.0, 1.0], "must be above zero"),
    ],
)
def test_invalid_measurements_are_rejected(nbytes: list[float], seconds: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_link([1] * len(nbytes), nbytes, seconds)


@given(size=st.integers(2, 64), nbytes=st.floats(1, 1e9))
def test_the_ring_is_faster_above_a_single_size(size: int, nbytes: float) -> None:
    """Both times are linear in the size: 2 (N - 1) rounds and 2 (N - 1) / N of the bytes, and 2 log2 N rounds with all
    bytes.
    """
    ring, tree = 2 * (size - 1), 2 * math.ceil(math.log2(size))
    crossover = (ring - tree) * ETHERNET.latency * ETHERNET.bandwidth / (tree - ring / size)
    assume(not math.isclose(nbytes, crossover, rel_tol=1e-3))
    assert (ETHERNET.ring_seconds(nbytes, size) < ETHERNET.tree_seconds(nbytes, size)) == (nbytes > crossover)
