"""Numeric decisions of detectors: slopes, spikes, divergence, stragglers, overlap."""

import gc
import math
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_tutorial.benches.debug import Triple, _compared
from ddp_tutorial.debug import checking
from ddp_tutorial.debug.detector import Finding, Program
from ddp_tutorial.debug.instrumentation import OUTPUT, Instrumentation, StepObservation, norm_of
from ddp_tutorial.debug.memory import Kind, ProcessMemory, describe_growth, growth_per_step, live_tensors
from ddp_tutorial.debug.overlap import DataOverlap, Epoch, rows_hashed
from ddp_tutorial.debug.pace import slow_rank
from ddp_tutorial.debug.replicas import ReplicaDrift, checksums, first_drift
from ddp_tutorial.debug.spikes import has_diverged, ratio_to_median
from ddp_tutorial.world import World

NOISE = st.lists(st.floats(-1, 1), min_size=40, max_size=40)


@given(slope=st.floats(1, 100), noise=NOISE, jump=st.floats(0, 1000), at=st.integers(0, 39))
def test_the_slope_of_a_leak_is_robust_to_noise_and_outliers(
    slope: float, noise: list[float], jump: float, at: int
) -> None:
    used = [100 + slope * step + each for step, each in enumerate(noise)]
    used[at] += jump
    assert 0.8 * slope < growth_per_step(used) < 1.2 * slope


@given(noise=NOISE, jump=st.floats(5, 1000), at=st.integers(1, 39))
def test_a_single_jump_of_memory_is_not_a_leak(noise: list[float], jump: float, at: int) -> None:
    assert growth_per_step([each / 10 + jump * (step >= at) for step, each in enumerate(noise)]) < 0.5


@given(usual=st.lists(st.floats(1, 5), min_size=10, max_size=50), scale=st.floats(1e-6, 1e6))
def test_a_spike_is_relative_to_the_median_at_any_scale(usual: list[float], scale: float) -> None:
    scaled = [scale * each for each in usual]
    assert all(ratio_to_median(each, scaled) <= 5.001 for each in scaled)
    assert ratio_to_median(scale * 60, scaled) > 10
    assert ratio_to_median(float("nan"), scaled) == ratio_to_median(scale, scaled[:9]) == 0.0


@given(st.lists(st.floats(0, 10), min_size=10, max_size=10))
def test_a_loss_that_stays_at_its_initial_value_does_not_diverge(first: list[float]) -> None:
    assert not has_diverged(first, first, 2.0)
    assert not has_diverged(first, [each / 2 for each in first], 2.0)
    assert has_diverged(first, [3 * max(first) + 1] * 10, 2.0)


def test_the_slow_rank_is_named_with_its_phase() -> None:
    even = {"data": [0.1] * 3, "forward": [1.0] * 3, "backward": [2.0] * 3, "step": [4.0] * 3}
    assert slow_rank(even) is None
    late = even | {"backward": [2.0, 2.0, 6.0], "step": [8.0] * 3}
    assert slow_rank(late) == (2, "backward", 4.0)


def test_reshuffled_epochs_do_not_overlap_but_separate_permutations_do() -> None:
    def epoch(number: int) -> list[int]:
        return torch.randperm(400, generator=torch.Generator().manual_seed(number)).tolist()

    seen = Epoch(2)
    for number in range(50):  # each rank has every second sample of a common order
        order = epoch(number)
        assert seen.add([[order[i + rank : i + 16 : 2] for i in range(0, 400, 16)] for rank in range(2)]) is None
    own = Epoch(2)
    found = own.add([[epoch(rank)[i : i + 8] for i in range(0, 400, 8)] for rank in range(2)])
    assert found is not None
    assert found[0] == (0, 1)


@given(
    steps=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40),
    every=st.integers(1, 12),
    capacity=st.integers(0, 300),
)
def test_values_of_two_ranks_arrive_in_order_for_any_capacity(
    steps: list[tuple[int, int]], every: int, capacity: int
) -> None:
    """Steps have any number of samples, some steps have an exchange, and the first capacity is too small."""
    ranks = [DataOverlap(), DataOverlap()]
    heard: list[list[Any]] = [[], []]
    for rank, detector in enumerate(ranks):
        detector.attach(Program(World(rank, 2), nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)])))
        detector._capacity = capacity
        detector._seen.add = heard[rank].extend  # type: ignore[method-assign, assignment]

    def exchange() -> None:
        brought = torch.stack([detector.values_to_exchange() for detector in ranks])  # with the same norm
        for rank, detector in enumerate(ranks):
            before = len(heard[rank])
            assert detector.on_exchanged(1, brought) == []
            of_ranks = heard[rank][before:]
            heard[rank][before:] = list(zip(*of_ranks, strict=True))

    for number, lengths in enumerate(steps):
        for rank, detector in enumerate(ranks):
            detector._now = [torch.arange(lengths[rank]) + 100 * number]
            detector.local_report(StepObservation())
        if number % every == 0:
            exchange()
    for _ in range(8):  # there is twice the capacity each time
        exchange()
    wanted = [
        tuple([100 * number + place for place in range(length)] for length in lengths)
        for number, lengths in enumerate(steps)
    ]
    assert heard == [wanted, wanted]


def test_a_row_hash_depends_only_on_the_row() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        rows = torch.arange(35).view(5, 7).to(dtype)
        hashes = rows_hashed((rows, rows * 2)).tolist()
        assert len(set(hashes)) == 5
        assert rows_hashed((rows[2:], rows[2:] * 2)).tolist() == hashes[2:]
    assert rows_hashed(()).tolist() == []


@pytest.mark.parametrize(
    "unusual",
    [torch.ones(4, 0), torch.ones(4, 2, dtype=torch.int64).to_sparse(), torch.ones(0)],
    ids=["no columns", "sparse", "no rows"],
)
def test_an_input_without_dense_rows_does_not_affect_the_hashes(unusual: torch.Tensor) -> None:
    rows = torch.randn(4, 3)
    assert rows_hashed((rows, unusual)).tolist() == rows_hashed((rows,)).tolist()
    assert rows_hashed((unusual,)).tolist() == []


def test_a_lazily_conjugated_input_is_hashed() -> None:
    numbers = torch.randn(4, 3, dtype=torch.complex64).conj()
    assert rows_hashed((numbers,)).tolist() == rows_hashed((numbers.resolve_conj(),)).tolist()


class ConjugatedLinear(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.conj().t()  # PyTorch conjugates the gradient lazily


@pytest.mark.parametrize("kind", [nn.Linear, ConjugatedLinear])
def test_a_complex_model_is_checked(kind: type[nn.Linear]) -> None:
    model = kind(2, 1, bias=False, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with checking(World(), model, optimizer) as checks:
        for _ in range(4):
            model(torch.randn(3, 2, dtype=torch.complex64)).abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert checks.findings == []


def test_a_checksum_depends_on_every_bit_and_its_position() -> None:
    for length in (3, 5000):
        tensor = torch.arange(float(length))
        [before] = checksums({"it": tensor}).values()
        for index in (0, length // 2, length - 1):
            changed = tensor.clone()
            changed[index] = torch.nextafter(changed[index], torch.tensor(torch.inf))
            assert list(checksums({"it": changed}).values()) != [before]
        assert list(checksums({"it": tensor.flip(0)}).values()) != [before]
        assert list(checksums({"it": tensor.clone()}).values()) == [before]


def test_the_minority_differs_and_without_a_majority_all_ranks_do() -> None:
    a, b = {"w": 1, "v": 2}, {"w": 1, "v": 3}
    assert first_drift([a, b, a]) == ("v", (1,))
    assert first_drift([b, a]) == ("v", (0, 1))
    assert first_drift([a, a, a]) is None


def test_private_memory_agrees_with_psutil() -> None:
    process, own = psutil.Process(), ProcessMemory()
    for _ in range(2):
        used = process.memory_info()
        assert abs(own() - (used.rss - used.shared)) < 4e6


def test_private_memory_closes_its_file_even_in_a_reference_cycle() -> None:
    def opened() -> int:
        """Count only this kind of file, because other threads may open and close files."""
        return [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()].count(statm)

    statm = f"/proc/{os.getpid()}/statm"
    gc.collect()
    before = opened()
    owner = {"own": ProcessMemory()}
    owner["itself"] = owner
    assert opened() == before + 1
    del owner
    gc.collect()
    assert opened() == before


def test_growth_is_described_by_shape_type_and_graph() -> None:
    gc.collect()  # tensors of earlier tests, which would otherwise disappear between the two lists
    before, weight = live_tensors(), torch.ones(7, 1000, requires_grad=True)
    kept = [torch.zeros(3, 50_000) for _ in range(4)]
    kept += [kept[0].view(-1)[:77], *(weight.sum() for _ in range(5))]
    told = describe_growth(before, live_tensors())
    assert told[0] == "4 of [3, 50000] float32 (2.4 MB)"
    assert "5 of [] float32 with its autograd graph (0.0 MB)" in told
    assert describe_growth(live_tensors(), live_tensors()) == []
    assert live_tensors()[Kind((77,), torch.float32, "cpu", has_graph=False)] == (1, 0)


def test_a_forward_pass_is_repeated_exactly_and_without_side_effects() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
    norms: list[float] = []
    for part in model:
        part.register_forward_hook(lambda _, __, output: norms.append(float(norm_of(output))))
    with Instrumentation(model, {"forwards"}) as taps:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
        seen, before = taps.take(), [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]
        [*first_time] = norms
        trace = seen.in_full(model, torch.device("cpu"))
    after = [torch.get_rng_state(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [norm for phase, _, norm in trace if phase == "forward"] == first_time
    assert [f"{phase} {name}" for phase, name, _ in trace] == 2 * [
        *(f"forward {i}" for i in range(4)),
        f"loss {OUTPUT}",
    ]


def drift_of_two(other: int) -> ReplicaDrift:
    """Return the detector of one of two ranks; the checksums of the other rank are larger by `other`."""
    module = nn.Linear(2, 1)
    program = Program(World(), module, torch.optim.SGD(module.parameters()), after=lambda: program.taken + 1)
    program.gather_numbers = lambda numbers: torch.stack([numbers, numbers + other])  # type: ignore
    program.gather = lambda thing: [thing, thing]  # type: ignore
    detector = ReplicaDrift(every=1000)
    program.taken = 1
    detector.attach(program)
    return detector


def one_step(detector: ReplicaDrift, norms: list[float]) -> list[Finding]:
    """Evaluate the detector in its own step."""
    detector.program.taken += 1
    step = detector.program.step
    return detector.check(step, [[0.0, norm, 0.0] for norm in norms]) + detector.after_update(step)


def test_different_gradients_trigger_a_full_comparison_in_the_same_step() -> None:
    detector = drift_of_two(other=1)
    assert one_step(detector, [1.5, 1.5]) == []
    assert one_step(detector, [math.nan, float("nan")]) == []
    with pytest.raises(AssertionError, match="the combined checksums differ"):
        one_step(detector, [1.5, 1.75])  # no single tensor differs here: the ranks would be reported


def test_gradients_that_differed_earlier_trigger_a_full_comparison() -> None:
    detector = drift_of_two(other=1)
    detector.program.taken += 3
    with pytest.raises(AssertionError, match="the combined checksums differ"):
        detector.check(detector.program.step - 1, [[0.0, 1.5, 0.0], [0.0, 1.75, 0.0]])


def test_equal_weights_with_different_gradients_are_compared_occasionally() -> None:
    detector = drift_of_two(other=0)
    compared: list[int] = []
    detector.program.gather_numbers = lambda numbers: compared.append(1) or numbers.repeat(2, 1)  # type: ignore
    assert [one_step(detector, [1.5, 1.75]) for _ in range(3)] == [[]] * 3
    assert len(compared) == 1


@given(columns=st.integers(1, 3000), offset=st.integers(0, 3))
def test_fast_hashes_equal_the_slow_hash(columns: int, offset: int) -> None:
    """Ranks may use different code paths, depending on type and device of their tensors, and must agree."""
    values = torch.randn(16 * columns + offset, generator=torch.Generator().manual_seed(columns))[offset:]
    assert checksums({"it": values}) == checksums({"it": values.view(torch.int32)})
    tokens = torch.randint(1 << 62, (3, columns + offset), generator=torch.Generator().manual_seed(columns))[:, offset:]
    assert rows_hashed((tokens,)).tolist() == rows_hashed((tokens.view(3, columns, 1),)).tolist()


@pytest.mark.filterwarnings("error")
def test_steps_without_checks_are_neither_checked_nor_counted() -> None:
    net, backward = nn.Linear(2, 1), torch.autograd.backward
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def step(factor: float = 1.0) -> None:
        (net(torch.ones(1, 2)).sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()

    with checking(World(), net, optimizer) as checks:
        step()
        with checks.detached():
            assert [*net._forward_hooks, *optimizer._optimizer_step_pre_hooks] == []
            assert torch.autograd.backward is backward
            step(1e30)
        step()
        assert checks.program.taken == 2
        assert net._forward_hooks
    assert [*net._forward_hooks, *optimizer._optimizer_step_pre_hooks] == []
    assert checks.findings == []


def test_the_overhead_counts_periodic_checks_fully_and_slowdowns_not() -> None:
    """In ms: 45 without checks, 0.3 more with them, and 4 more at one of twenty positions, on a machine that slows
    down.
    """
    triples = []
    for number in range(200):
        begin, is_backwards = 45.0 + 0.03 * number, number % 2
        default = begin + 0.01 + 0.3 + 4 * (number % 20 == 7)
        times = (begin + 0.02, default, begin) if is_backwards else (begin, default, begin + 0.02)
        triples.append(Triple(*times))
    triples[50] = triples[50]._replace(default=80.0)
    triples[67] = triples[67]._replace(off=90.0)
    found = _compared(triples)
    assert found["default"] - found["off"] == pytest.approx(0.3 + 4 / 20, abs=1e-6)
    assert found["again"] - found["off"] == pytest.approx(0.0, abs=1e-6)
