"""Record when each rank computes and communicates, and measure the overlap.

    def steps(world):
        ...
        with record(model.link) as recorder:
            train_step()
        return gather(world, recorder)

    timeline = launch(steps, 2)[0]
    plots.gantt({"one step": timeline})
    timeline.overlap(rank=0).fraction

Times are in seconds on the machine's monotonic clock. `gather` converts the spans of all ranks to rank 0's clock.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.ddp.buckets import Bucket
from ddp_tutorial.ddp.link import Link, Transfer
from ddp_tutorial.files import write_atomically
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.world import World, require_group

COMPUTE, LINK = "compute", "link"
TORCHS_OWN = "torch's own all-reduces, from its profiler"


class Span(NamedTuple):
    """A time interval from `start` to `end`, in seconds, in one lane of a figure."""

    lane: str
    name: str
    start: float
    end: float


class Overlap(NamedTuple):
    """Overlap between communication and the backward pass, in seconds.

    `hidden` is the communication time within the backward pass. `hideable`, the upper bound of `hidden`, is the shorter
    of the total communication time and the duration of the backward pass.
    """

    communication: float
    hidden: float
    hideable: float

    @property
    def fraction(self) -> float:
        """The overlapped communication time as a fraction (0 to 1) of its upper bound, `hideable`."""
        return self.hidden / self.hideable if self.hideable else 0.0


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks, in seconds on rank 0's clock. `link` describes the link that carried the gradients."""

    ranks: list[list[Span]]
    link: str

    def of(self, rank: int, name: str) -> list[Span]:
        """Return a rank's spans with the given name, in chronological order."""
        return sorted((span for span in self.ranks[rank] if span.name == name), key=lambda span: span.start)

    def overlap(self, rank: int) -> Overlap:
        """Return the overlap between a rank's communication and its backward pass."""
        return overlap(self.ranks[rank])

    def save_trace(self, path: Path) -> None:
        """Write a trace for chrome://tracing or https://ui.perfetto.dev.

        In the trace, each rank is a process and each lane is a thread.
        """
        write_atomically(path, json.dumps({"traceEvents": list(self._events())}).encode())

    @classmethod
    def load_trace(cls, path: Path) -> "Timeline":
        """Return the timeline that `save_trace` wrote, with times relative to the start of the first span."""
        events = json.loads(path.read_text())["traceEvents"]
        named = [event for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
        lanes = {(event["pid"], event["tid"]): event["args"]["name"].partition(" (") for event in named}
        ranks: list[list[Span]] = [[] for _ in range(1 + max(event["pid"] for event in events))]
        for event in events:
            if event["ph"] == "X":
                lane, start, end = lanes[event["pid"], event["tid"]][0], event["ts"], event["ts"] + event["dur"]
                ranks[event["pid"]].append(Span(lane, event["name"], start / 1e6, end / 1e6))
        links = [description.removesuffix(")") for lane, _, description in lanes.values() if lane == LINK]
        return cls(ranks, links[0] if links else "")

    def _events(self) -> Iterator[dict[str, Any]]:
        zero = min((span.start for spans in self.ranks for span in spans), default=0.0)
        for rank, spans in enumerate(self.ranks):
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            lanes = list(dict.fromkeys(span.lane for span in spans))
            for number, lane in enumerate(lanes):
                named = f"{lane} ({self.link})" if lane == LINK else lane
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": named}}
            for span in spans:  # times in microseconds
                start, duration = (span.start - zero) * 1e6, (span.end - span.start) * 1e6
                place = {"pid": rank, "tid": lanes.index(span.lane)}
                yield {"ph": "X", "name": span.name, "ts": start, "dur": duration, **place}


class Recorder:
    """A recorder that stores phases as spans in the compute lane, and transfers as spans in the link lane."""

    def __init__(self, link: str = "") -> None:
        """Create an empty recorder. `link` describes the link."""
        self.link = link
        self.spans: list[Span] = []
        self._open: dict[str, float] = {}
        self._issued: list[Transfer] = []

    def on_edge(self, edge: PhaseEvent) -> None:
        """Record the start or the end of a phase."""
        if edge.entered:
            self._open[edge.name] = edge.time
        elif edge.name in self._open:
            self.spans.append(Span(COMPUTE, edge.name, self._open.pop(edge.name), edge.time))

    def on_transfer(self, transfer: Transfer) -> None:
        """Record a completed transfer."""
        self.spans.append(Span(LINK, transfer.name, transfer.start, transfer.end))
        self._issued.append(transfer)

    def close(self) -> None:
        """Split the duration of PyTorch's backward pass into computation and waiting time.

        With PyTorch's DDP, the backward pass returns only after the last all-reduce. The method shortens the `backward`
        span to the time until the last all-reduce is issued. The remaining time is recorded as `finish`, the phase in
        which the other DDP variants wait for the all-reduces.
        """
        for place, span in enumerate(self.spans):
            within = [each for each in self._issued if span.start <= each.issued <= span.end]
            if span.name == "backward" and within and all(each.end <= span.end for each in within):
                done = max(each.issued for each in within)
                self.spans[place] = span._replace(end=done)
                self.spans.append(Span(COMPUTE, "finish", done, span.end))


@contextmanager
def record(link: Link | None) -> Iterator[Recorder]:
    """Record the phases of this rank and the transfers of `link` while the block runs.

    Raises:
        ValueError: If `link` is None. For PyTorch's DDP without a hook, use `record_torch`.
    """
    if link is None:
        raise ValueError("record() cannot record torch's DDP, which communicates in C++. Use record_torch().")
    recorder = Recorder(str(link))
    link.observer = recorder.on_transfer
    try:
        with observe(recorder.on_edge):
            yield recorder
        recorder.close()
    finally:
        link.observer = None


@contextmanager
def record_torch() -> Iterator[Recorder]:
    """Record this rank's phases, and use PyTorch's profiler to record the all-reduces of PyTorch's DDP.

    The offset between the recorder's and the profiler's clocks is computed from the phases that both recorded.

    Raises:
        ValueError: If the block contains no phase.
    """
    recorder = Recorder(TORCHS_OWN)
    with ExitStack() as stack:
        stack.enter_context(observe(recorder.on_edge))
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU], acc_events=True))
        yield recorder
    add_transfers_of_torch(recorder, profiler.events() or [])
    recorder.close()


def add_transfers_of_torch(recorder: Recorder, events: Sequence[Any]) -> None:
    """Add the all-reduces in the profiler's `events` to `recorder`. Both must contain the same phases.

    If the profiler traces a GPU, it records phases and all-reduces on the CPU and on the GPU. On the CPU, an NCCL
    all-reduce ends when its kernel has been launched, so the times on the GPU are preferred.
    """
    on_cpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    on_gpu = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    ahead = _ahead_of_profiler(recorder.spans, on_cpu)
    reduced = _all_reduces(on_gpu) or _all_reduces(on_cpu)
    for number, times in enumerate(sorted(reduced, key=lambda times: times.start)):
        start, end = ahead + times.start / 1e6, ahead + times.end / 1e6
        recorder.on_transfer(Transfer(f"bucket {number}", 0, start, start, end))


def _all_reduces(events: Sequence[Any]) -> list[Any]:
    return [event.time_range for event in events if event.name.endswith(":all_reduce")]


def _ahead_of_profiler(spans: Sequence[Span], events: Sequence[Any]) -> float:
    """Return the offset in seconds to add to the profiler's times to get the recorder's times.

    Observers are called shortly before the profiler records the start of a phase, and shortly after it records the end.
    Therefore, the offset is between the largest offset measured at a phase's start and the smallest offset measured at
    a phase's end. The profiler does not record phases of other threads, such as the thread that writes a checkpoint.
    """
    least, most = [], []
    for name in {span.name for span in spans}:
        ours = sorted((span for span in spans if span.name == name), key=lambda span: span.start)
        seen = sorted((event.time_range for event in events if event.name == name), key=lambda times: times.start)
        if len(ours) == len(seen):
            least += [span.start - times.start / 1e6 for span, times in zip(ours, seen, strict=True)]
            most += [span.end - times.end / 1e6 for span, times in zip(ours, seen, strict=True)]
    if not least:
        raise ValueError(
            "record_torch() requires at least one phase in its block, got none. Mark the code with a phase, such as "
            '`with phase("backward"):`'
        )
    return (max(least) + min(most)) / 2


def gather(world: World, recorder: Recorder) -> Timeline:
    """Return the spans of all ranks on rank 0's clock. The result is the same on every rank. Collective."""
    behind = clock_offset(world)
    mine = [span._replace(start=span.start + behind, end=span.end + behind) for span in recorder.spans]
    return Timeline(all_gather(world, mine), recorder.link)


def clock_offset(world: World, clock: Callable[[], float] = time.monotonic, rounds: int = 16) -> float:
    """Return the offset in seconds to add to this rank's clock to obtain rank 0's time. Collective.

    As in NTP (Mills, 1991), each rank polls rank 0's clock repeatedly, and uses the reply with the shortest round trip.
    The error is at most half a round trip. On one machine, ranks share a monotonic clock, so the result is about zero.
    """
    require_group(world)
    offset, best = 0.0, float("inf")
    for other in range(1, world.size):
        for _ in range(rounds):
            if world.is_main:
                dist.recv(_time(world), other)
                dist.send(_time(world, clock()), other)
            elif world.rank == other:
                asked = clock()
                dist.send(_time(world), 0)
                answer = _time(world)
                dist.recv(answer, 0)
                answered = clock()
                trip = answered - asked
                if trip < best:
                    best, offset = trip, float(answer) - (asked + answered) / 2
    return offset


def _time(world: World, seconds: float = 0.0) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64, device=world.message_device)


def arrivals(module: nn.Module, backward: Callable[[], object]) -> dict[str, float]:
    """Return the time in seconds from the start of `backward()` until each gradient is ready, by parameter name.

    The parameter names are sorted by time. A gradient's all-reduce cannot start before the gradient is ready.
    `backward` must not run all-reduces, because they would delay the backward pass.
    """
    seconds: dict[str, float] = {}

    def note(name: str, _: nn.Parameter) -> None:
        seconds[name] = time.monotonic()

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(note, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    start = time.monotonic()
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: moment - start for name, moment in seconds.items()}


def ready_times(buckets: Sequence[Bucket], arrivals: Mapping[str, float]) -> list[float]:
    """Return when each bucket's all-reduce can start, in seconds from the start of the backward pass.

    An all-reduce can start when the bucket's last gradient is ready and the previous bucket's all-reduce has started.
    """
    return list(accumulate((max(arrivals[name] for name in bucket.names) for bucket in buckets), max))


def predict_step(
    ready: Sequence[float], all_reduce_seconds: Sequence[float], backward: float, rest: float = 0.0
) -> float:
    """Return the predicted step time, in seconds, for a link that transfers one bucket at a time.

    The all-reduce of a bucket starts when the bucket is ready and the previous all-reduce has ended. The step continues
    when the backward pass and the last all-reduce have ended.

    Args:
        ready: The time in seconds from the start of the backward pass until each bucket is ready.
        all_reduce_seconds: The duration of each bucket's all-reduce in seconds.
        backward: The duration of the backward pass in seconds.
        rest: The duration in seconds of the rest of the step, before and after the backward pass.
    """
    free = 0.0
    for bucket_ready, seconds in zip(ready, all_reduce_seconds, strict=True):
        free = max(free, bucket_ready) + seconds
    return max(backward, free) + rest


def overlap(spans: Sequence[Span]) -> Overlap:
    """Return the overlap between the communication spans and the spans named "backward"."""
    carried = _union([(span.start, span.end) for span in spans if span.lane == LINK])
    backward = _union([(span.start, span.end) for span in spans if span.name == "backward"])
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in carried for b in backward)
    communication, computing = (sum(end - start for start, end in each) for each in (carried, backward))
    return Overlap(communication, both, min(communication, computing))


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of the intervals as a sorted list of disjoint intervals."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
