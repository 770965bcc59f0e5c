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

    On a GPU these are the seconds that it takes to launch kernels, not to run them: the work goes on meanwhile.
    """

    def __init__(self) -> None:
        self._open: dict[str, float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, edge: Edge) -> None:
        if edge.entered:
            self._open[edge.name] = edge.time
        elif edge.name in self._open:  # else the phase was entered before this stopwatch observed
            self._seconds[edge.name] += edge.time - self._open.pop(edge.name)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and start again from zero."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
