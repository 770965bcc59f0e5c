"""Mark the named phases of a training step, as in `with phase("data"): ...`.

Timings, profiler traces, plots, logs, and injected faults all refer to a phase by its name. Observers receive one event
at the start of each phase and one event at the end.

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
    """The start or end of a phase.

    Attributes:
        name: The name of the phase.
        entered: True at the start of the phase, and False at its end.
        time: The time in seconds. All processes on a machine use the same monotonic clock.
    """

    name: str
    entered: bool
    time: float


Observer = Callable[[PhaseEvent], object]
SomeObserver = TypeVar("SomeObserver", bound=Observer)

# This tuple is replaced, never changed in place, because an observer may be added while another thread is in a phase.
_observers: tuple[Observer, ...] = ()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark the block as the phase `name`, for all observers and for any running profiler.

    To inject a fault, an observer may raise an exception at the start of the phase. The end of the phase is reported
    even if the block raises an exception.
    """
    return _Phase(name)


class _Phase(AbstractContextManager[None]):
    """The context manager of a phase.

    The context manager is a class, because a generator would be slower. For the same reason, `record_function` is used
    only while a profiler is recording. Without these optimizations, a 5 ms step would be measurably slower.
    """

    __slots__ = ("_name", "_record")

    def __init__(self, name: str) -> None:
        """Store the name."""
        self._name = name
        self._record: record_function | None = None

    def __enter__(self) -> None:
        """Report the start of the phase."""
        _notify(self._name, entered=True)  # first, because an observer may raise
        if is_profiling():
            self._record = record_function(self._name)
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Report the end of the phase."""
        if self._record is not None:
            self._record.__exit__(*error)
        _notify(self._name, entered=False)


@contextmanager
def observe(observer: SomeObserver) -> Iterator[SomeObserver]:
    """Call `observer` with an event at the start and end of every phase of this process, until the block exits."""
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
    """An observer that sums the seconds spent in each phase. A nested phase also counts toward the outer phase.

    Phases in different threads may overlap, for example while threads write checkpoint files. The durations in all
    threads are summed.

    On a GPU, the stopwatch measures the execution time between two events in the CUDA stream. The Python execution time
    would not be meaningful, because Python only launches kernels.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Create a stopwatch for a rank on `device`."""
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._open: dict[tuple[int, str], Any] = {}  # by thread and phase
        self._spans: deque[tuple[str, Any, Any]] = deque()  # any thread appends to this

    def __call__(self, edge: PhaseEvent) -> None:
        """Record the start or end of a phase."""
        mark = edge.time if self._gpu is None else _gpu_event(self._gpu)
        key = threading.get_ident(), edge.name
        if edge.entered:
            self._open[key] = mark
        elif key in self._open:  # otherwise, the phase started before this observer was added
            self._spans.append((edge.name, self._open.pop(key), mark))

    def take(self) -> dict[str, float]:
        """Return the seconds spent in each phase since the last call. On a GPU, wait for the launched kernels."""
        seconds: defaultdict[str, float] = defaultdict(float)
        while self._spans:
            name, start, end = self._spans.popleft()
            seconds[name] += end - start if self._gpu is None else _gpu_seconds(start, end)
        return dict(seconds)


def _gpu_event(device: torch.device) -> Any:
    """Record an event in the current stream of `device`, even if the thread's current device is a different GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _gpu_seconds(start: Any, end: Any) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1e3
