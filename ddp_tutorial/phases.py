"""One vocabulary for what a rank is doing: `with phase("data"): ...`.

The same names serve timing, profiler traces, plots, logs and injected faults, because each of them is an
observer of the same two events: a phase is entered, a phase is left.

    with observe(Stopwatch()) as watch:
        with phase("data"):
            ...
    watch.take()   # {"data": 0.0123}
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import record_function


class Edge(NamedTuple):
    """One end of a phase. `time` is in seconds of the machine's monotonic clock, one clock for all its ranks."""

    name: str
    entered: bool
    time: float


Observer = Callable[[Edge], object]
SomeObserver = TypeVar("SomeObserver", bound=Observer)

# Replaced, never changed in place: an observer may come or go while another thread is inside a phase.
_observers: tuple[Observer, ...] = ()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark what runs inside as `name`, for every observer and, while torch's profiler records, for its trace.

    An observer may raise when the phase is entered (that is how faults are injected). It is told of the end also when
    the phase ends with an exception.
    """
    return _Phase(name)


class _Phase(AbstractContextManager[None]):
    """A class rather than a generator, and no `record_function` unless someone records: a step that takes 5 ms
    would feel the difference."""

    __slots__ = ("_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record: record_function | None = None

    def __enter__(self) -> None:
        _tell(self._name, entered=True)  # first: should an observer raise, nothing has been opened
        if torch.autograd._profiler_enabled():
            self._record = record_function(self._name)
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*error)
        _tell(self._name, entered=False)


@contextmanager
def observe(observer: SomeObserver) -> Iterator[SomeObserver]:
    """Call `observer(edge)` at both ends of every phase of this process, until the block ends."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield observer
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


def _tell(name: str, *, entered: bool) -> None:
    observers = _observers
    if observers:
        edge = Edge(name, entered, time.monotonic())
        for observer in observers:
            observer(edge)


class Stopwatch:
    """An observer that adds up the seconds spent in each phase. A phase inside another counts in both.

    With the `device` of a GPU they are seconds of the GPU's work: a mark goes into its queue at both ends of a phase,
    and the time between the two marks counts. How long Python is in the phase says little there: it only queues
    kernels.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._is_gpu = device is not None and device.type == "cuda"
        self._open: dict[str, Any] = {}
        self._spans: list[tuple[str, Any, Any]] = []  # on a GPU: their lengths are known when it has come so far
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, edge: Edge) -> None:
        mark = _gpu_event() if self._is_gpu else edge.time
        if edge.entered:
            self._open[edge.name] = mark
        elif edge.name in self._open:  # else the phase was entered before this stopwatch observed
            start = self._open.pop(edge.name)
            if self._is_gpu:
                self._spans.append((edge.name, start, mark))
            else:
                self._seconds[edge.name] += mark - start

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call; the next ones start from zero. Waits until a GPU has done what is
        queued."""
        for name, start, end in self._spans:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3  # of milliseconds
        self._spans = []
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def _gpu_event() -> Any:
    """A mark in the queue of the GPU's work, which notes when the GPU comes to it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
