"""Timelines: recorded spans are on one clock, and the overlap is computed correctly."""

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import DeviceType

from ddp_tutorial.ddp.buckets import Bucket
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.timeline import (
    COMPUTE,
    LINK,
    Recorder,
    Span,
    Timeline,
    add_transfers_of_torch,
    arrivals,
    clock_offset,
    gather,
    overlap,
    predict_step,
    ready_times,
    record,
    record_torch,
)
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.figures import plots
from ddp_tutorial.phases import phase
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World
from ranks import wait_until

# --------------------------------------------------------------------------------------------------- arithmetic


def spans(*link: tuple[float, float], backward: tuple[float, float] = (0.0, 10.0)) -> list[Span]:
    carried = [Span(LINK, f"bucket {i}", *times) for i, times in enumerate(link)]
    return [Span(COMPUTE, "backward", *backward), Span(COMPUTE, "forward", -5.0, 0.0), *carried]


@pytest.mark.parametrize(
    ("link", "communication", "hidden", "hideable", "fraction"),
    [
        ([(10.0, 14.0)], 4.0, 0.0, 4.0, 0.0),  # after backward
        ([(2.0, 6.0)], 4.0, 4.0, 4.0, 1.0),  # inside it
        ([(8.0, 12.0)], 4.0, 2.0, 4.0, 0.5),
        ([(2.0, 5.0), (5.0, 8.0)], 6.0, 6.0, 6.0, 1.0),
        ([(2.0, 6.0), (4.0, 8.0)], 6.0, 6.0, 6.0, 1.0),  # overlapping transfers count once
        ([(5.0, 35.0)], 30.0, 5.0, 10.0, 0.5),  # at most the backward pass can be overlapped
        ([(-4.0, -1.0)], 3.0, 0.0, 3.0, 0.0),  # the forward pass does not count here
        ([], 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_overlap_is_the_communication_during_backward(
    link: list[tuple[float, float]], communication: float, hidden: float, hideable: float, fraction: float
) -> None:
    found = overlap(spans(*link))
    assert found == (communication, hidden, hideable)
    assert found.fraction == fraction


@given(st.lists(st.tuples(st.floats(-20, 40), st.floats(0, 20)), max_size=8))
def test_hidden_is_never_more_than_hideable(link: list[tuple[float, float]]) -> None:
    found = overlap(spans(*[(start, start + length) for start, length in link]))
    assert 0 <= found.hidden <= found.hideable + 1e-9
    assert found.hideable <= found.communication + 1e-9


@pytest.mark.parametrize(
    ("ready", "seconds", "expected"),
    [
        ([10.0], [4.0], 14.0),  # one bucket after the backward pass: no overlap
        ([2.0, 10.0], [4.0, 4.0], 14.0),  # the first bucket overlaps
        ([2.0, 3.0, 10.0], [4.0, 4.0, 4.0], 14.0),  # 2 to 6, 6 to 10, 10 to 14
        ([2.0, 3.0, 10.0], [8.0, 8.0, 8.0], 26.0),  # the link is never idle after 2
        ([2.0, 3.0], [1.0, 1.0], 10.0),  # full overlap: the backward pass is the bottleneck
    ],
)
def test_a_step_ends_after_backward_and_the_last_bucket(
    ready: list[float], seconds: list[float], expected: float
) -> None:
    assert predict_step(ready, seconds, backward=10.0) == expected
    assert predict_step(ready, seconds, backward=10.0, rest=3.0) == expected + 3.0


def test_a_bucket_is_ready_after_its_last_gradient_and_earlier_buckets() -> None:
    buckets = [Bucket("", torch.empty(0), names, [], []) for names in (["a", "b"], ["c"], ["d"])]
    assert ready_times(buckets, {"a": 1.0, "b": 4.0, "c": 2.0, "d": 5.0}) == [4.0, 4.0, 5.0]


def test_arrivals_follow_the_backward_pass_and_leave_no_hook() -> None:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    loss = module(torch.randn(8, 64)).sum()
    start = time.monotonic()
    arrived = arrivals(module, loss.backward)
    took = time.monotonic() - start
    assert set(arrived) == {name for name, _ in module.named_parameters()}
    assert arrived["3.weight"] < arrived["2.weight"] < arrived["1.weight"] < arrived["0.weight"]
    assert min(arrived.values()) > 0
    assert max(arrived.values()) <= took
    before = dict(arrived)
    module(torch.randn(8, 64)).sum().backward()
    assert arrived == before


def test_without_a_link_nothing_can_be_recorded() -> None:
    with pytest.raises(ValueError, match=r"Use record_torch\(\)"), record(None):
        pass


# ------------------------------------------------------------------------------------------------- on real ranks


def test_recording_torch_requires_a_phase() -> None:
    with pytest.raises(ValueError, match="requires at least one phase in its block, got none"), record_torch():
        torch.ones(2).sum()


def one_step(model: Any) -> None:
    with phase("forward"):
        loss = model(torch.randn(16, 128)).pow(2).mean()
    with phase("backward"):
        loss.backward()
    with phase("finish"):
        model.finish()


def wait_for_a_transfer(recorder: Recorder) -> None:
    assert wait_until(lambda: any(span.lane == LINK for span in recorder.spans))


def record_a_step(world: World, variant: str, slow: bool) -> Timeline:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)])
    link = LinkConfig(latency_ms=2, megabytes_per_second=50) if slow else None
    options = {"bucket_cap_mb": 0.1} if variant in {"bucket", "torch"} else {}
    model = data_parallel(module, world, DDPConfig(variant=variant, simulated_link=link, **options))  # type: ignore[arg-type]
    for _ in range(2):
        one_step(model)
        module.zero_grad()
    with record_torch() if model.link is None else record(model.link) as recorder:
        if model.link is not None and variant in {"bucket", "torch"}:
            # The backward pass waits for the first transfer, because a busy machine may suspend the other rank.
            module[1].register_full_backward_hook(lambda *_: wait_for_a_transfer(recorder))
        one_step(model)
    return gather(world, recorder)


def record_all(world: World) -> dict[str, Timeline]:
    told = {variant: record_a_step(world, variant, slow=True) for variant in ("naive", "flat", "bucket", "torch")}
    return told | {
        "direct": record_a_step(world, "bucket", slow=False),
        "own": record_a_step(world, "torch", slow=False),
    }


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Timeline]]:
    return launch(record_all, 2, device="cpu", threads=1, echo=False, timeout=300)


def test_every_rank_gets_the_same_timelines(recorded: list[dict[str, Timeline]]) -> None:
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("arm", ["naive", "flat", "bucket", "torch", "direct", "own"])
def test_the_parts_of_a_step_are_in_order(recorded: list[dict[str, Timeline]], arm: str, rank: int) -> None:
    timeline = recorded[0][arm]
    [forward], [backward] = timeline.of(rank, "forward"), timeline.of(rank, "backward")
    finish = timeline.of(rank, "finish")[-1]
    assert forward.start < forward.end <= backward.start < backward.end <= finish.end
    carried = [span for span in timeline.ranks[rank] if span.lane == LINK]
    assert all(forward.end <= span.start < span.end <= finish.end + 0.5 for span in carried)
    # six buckets of two layers, and the used parameters, which torch does not send by default
    assert len(carried) == {"naive": 25, "flat": 2, "bucket": 7, "torch": 6, "direct": 7, "own": 6}[arm]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_buckets_overlap_communication_with_backward(recorded: list[dict[str, Timeline]], rank: int) -> None:
    hidden = {arm: timeline.overlap(rank).fraction for arm, timeline in recorded[0].items()}
    assert hidden["naive"] == hidden["flat"] == 0
    for arm in ("bucket", "torch"):
        [backward] = recorded[0][arm].of(rank, "backward")
        first = min(span.start for span in recorded[0][arm].ranks[rank] if span.lane == LINK)
        assert first < backward.end
        assert hidden[arm] > 0


def test_the_timeline_describes_the_link(recorded: list[dict[str, Timeline]], tmp_path: Path) -> None:
    assert recorded[0]["bucket"].link == "simulated link: 2 ms, 50 MB/s"
    assert recorded[0]["direct"].link == "direct link"
    assert "profiler" in recorded[0]["own"].link
    recorded[0]["bucket"].save_trace(tmp_path / "trace.json")
    assert "simulated link: 2 ms, 50 MB/s" in (tmp_path / "trace.json").read_text()


def test_the_trace_contains_every_span_in_microseconds(recorded: list[dict[str, Timeline]], tmp_path: Path) -> None:
    timeline = recorded[0]["bucket"]
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == sum(map(len, timeline.ranks))
    assert min(event["ts"] for event in drawn) == 0
    [backward] = timeline.of(1, "backward")
    [event] = [event for event in drawn if event["name"] == "backward" and event["pid"] == 1]
    assert event["dur"] == pytest.approx((backward.end - backward.start) * 1e6)
    lanes = {(event["pid"], event["tid"]) for event in drawn}
    assert lanes == {(0, 0), (0, 1), (1, 0), (1, 1)}
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names.count("rank 0") == names.count("rank 1") == 1


def test_a_loaded_trace_equals_the_saved_timeline(recorded: list[dict[str, Timeline]], tmp_path: Path) -> None:
    for timeline in recorded[0].values():
        timeline.save_trace(tmp_path / "trace.json")
        loaded = Timeline.load_trace(tmp_path / "trace.json")
        assert loaded.link == timeline.link
        zero = min(span.start for spans in timeline.ranks for span in spans)
        for before, after in zip(timeline.ranks, loaded.ranks, strict=True):
            assert [span[:2] for span in after] == [span[:2] for span in before]
            assert [span.start for span in after] == pytest.approx([span.start - zero for span in before], abs=1e-9)
            assert [span.end for span in after] == pytest.approx([span.end - zero for span in before], abs=1e-9)


def offsets(world: World) -> tuple[float, float]:
    return clock_offset(world), clock_offset(world, lambda: time.monotonic() + 5 * world.rank)


def test_clocks_are_aligned_with_rank_0s() -> None:
    for rank, (same, shifted) in enumerate(launch(offsets, 3, device="cpu", echo=False, timeout=300)):
        assert abs(same) < 0.2  # half of the shortest of 16 round trips, on a busy machine
        assert shifted == pytest.approx(-5 * rank, abs=0.2)


def test_an_outer_phase_is_not_drawn_over_its_inner_phases() -> None:
    inner = [Span(COMPUTE, "forward", 0.0, 1.0), Span(COMPUTE, "backward", 1.0, 3.0)]
    around = [Span(COMPUTE, "grads", 0.0, 3.0), *inner]
    with_it, without = (plots.gantt({"a": Timeline([spans], "")}) for spans in (around, inner))
    bars = [[patch.get_bbox().bounds for patch in figure.axes[0].patches] for figure in (with_it, without)]
    assert bars[0] == bars[1]


def test_a_sweep_marks_the_best_measured_and_the_best_modeled_size() -> None:
    measured = {"slow": ([0.5, 1.0, 2.0], [[9.0, 8.0], [7.0, 20.0], [7.5, 7.6]])}  # 1 has the fastest, 2 the median
    model = {"slow": ([0.5, 1.0, 1.5, 2.0], [9.0, 8.0, 6.0, 7.0])}
    figure = plots.sweeps(measured, model, "title", "MiB", "ms")
    [axes] = figure.axes
    plt.close(figure)
    assert axes.get_title(loc="left") == "slow\nbest: 1 measured, 1.5 modeled"
    marks = {line.get_marker(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert marks["v"] == ([1.5], [6.0])
    assert marks["o"] == ([1.0], [7.0])  # the ring, which is drawn last


def test_labels_at_the_ends_of_curves_do_not_overlap() -> None:
    series = {f"run {number}": ([0.0, 1.0], [0.0, 1.0 + number / 1000]) for number in range(5)}  # all end at the top
    figure = plots.curves(series, "a title", "x", "y")
    [axes] = figure.axes
    plt.close(figure)
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert len(heights) == 5
    assert heights[-1] <= 0.97
    assert min(high - low for low, high in pairwise(heights)) > 0.06


def profiled(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> Any:
    """Return an event of PyTorch's profiler, with times in microseconds."""
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


def test_phases_of_other_threads_do_not_affect_the_profiler_clock() -> None:
    """A separate thread writes checkpoints, which the profiler does not record."""
    seen = profiled("forward", 1e6, 2e6)
    spans = [Span("phases", "forward", 11.0, 12.0), Span("phases", "save: write", 11.2, 11.4)]
    recorder = Recorder("torch's own")
    recorder.spans.extend(spans)
    add_transfers_of_torch(recorder, [seen, profiled("gloo:all_reduce", 1.25e6, 1.5e6)])
    assert [(span.start, span.end) for span in recorder.spans if span.name == "bucket 0"] == [(11.25, 11.5)]


def test_events_on_a_gpu_do_not_affect_the_profiler_clock() -> None:
    """The profiler records phases and NCCL all-reduces twice: when the CPU launches kernels, and when the GPU runs."""
    recorder = Recorder("torch's own")
    recorder.spans.append(Span("phases", "forward", 11.0, 12.0))
    events = [profiled("forward", 1e6, 2e6), profiled("nccl:all_reduce", 1.25e6, 1.5e6)]
    events += [profiled("forward", 1.1e6, 3e6, DeviceType.CUDA), profiled("nccl:all_reduce", 2e6, 3e6, DeviceType.CUDA)]
    add_transfers_of_torch(recorder, events)
    assert [(span.start, span.end) for span in recorder.spans if span.name.startswith("bucket")] == [(12.0, 13.0)]
