"""One vocabulary for what a rank is doing: `with phase("data"): ...`.

The same names serve timing, profiler traces, plots, logs and injected faults, because each of them is an
observer of the same two events: a phase is entered, a phase is left.

    with observe(Stopwatch()) as watch:
        with phase("data"):
            ...
    watch.take()   # {"data": 0.0123}
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import record_function

from ddp_tutorial.compat import is_profiling


class PhaseEvent(NamedTuple):
    """One end of a phase. `time` is in seconds of the machine's monotonic clock, one clock for all its ranks."""

    name: str
    entered: bool
    time: float


Observer = Callable[[PhaseEvent], object]
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
        _notify(self._name, entered=True)  # first: should an observer raise, nothing has been opened
        if is_profiling():
            self._record = record_function(self._name)
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*error)
        _notify(self._name, entered=False)


@contextmanager
def observe(observer: SomeObserver) -> Iterator[SomeObserver]:
    """Call `observer(edge)` at both ends of every phase of this process, until the block ends."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield observer
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


def _notify(name: str, *, entered: bool) -> None:
    observers = _observers
    if observers:
        edge = PhaseEvent(name, entered, time.monotonic())
        for observer in observers:
            observer(edge)


class Stopwatch:
    """An observer that sums the seconds spent in each phase. A phase inside another counts in both.

    Phases may overlap in several threads, which write the files of a checkpoint: the seconds of all threads are summed.

    With the `device` of a GPU, they are seconds of the GPU's work, between two events in its queue. Python's own time
    in a phase says little there, because Python only queues kernels.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._open: dict[tuple[int, str], Any] = {}  # by thread and phase
        self._spans: deque[tuple[str, Any, Any]] = deque()  # appended to by any thread

    def __call__(self, edge: PhaseEvent) -> None:
        mark = edge.time if self._gpu is None else _gpu_event(self._gpu)
        key = threading.get_ident(), edge.name
        if edge.entered:
            self._open[key] = mark
        elif key in self._open:  # otherwise the phase was entered before this stopwatch observed
            self._spans.append((edge.name, self._open.pop(key), mark))

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call. Waits until a GPU has done the work in its queue."""
        seconds: defaultdict[str, float] = defaultdict(float)
        while self._spans:
            name, start, end = self._spans.popleft()
            seconds[name] += end - start if self._gpu is None else _gpu_seconds(start, end)
        return dict(seconds)


def _gpu_event(device: torch.device) -> Any:
    """Return an event in the queue of `device`, also in a thread for which another GPU is the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _gpu_seconds(start: Any, end: Any) -> float:
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
