"""Gradients that jump, and a loss that goes up for good."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import Observable, StepObservation

# Before there are so many values, it is not known what is usual.
_KNOWN = 10


class GradientSpike(Detector):
    """A rank whose gradient is more than `times` as long as it has been, in the median of its last `window` steps.

    Each rank's own gradient is looked at, before it is averaged and clipped, so the rank with the odd samples is known.
    Where loss and gradient of all ranks have jumped alike, it is their scale that has changed.
    """

    name: ClassVar[str] = "spike"
    size: ClassVar[int] = 2
    observes: ClassVar[frozenset[Observable]] = frozenset({"gradients", "losses"})

    def __init__(self, times: float = 10.0, window: int = 50) -> None:
        if times <= 1 or window < _KNOWN:
            raise ValueError(f"times={times}, window={window}: should be above 1, and {_KNOWN} steps or more")
        self.times, self.window = times, window

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._norms, self._losses = deque[float](maxlen=self.window), deque[float](maxlen=self.window)
        self._largest: dict[int, str] = {}  # step in which the gradient has jumped -> the parameter with most of it

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        norm, loss = math.hypot(*observation.gradients.values()), abs(observation.loss)
        higher = [ratio_to_median(norm, self._norms), ratio_to_median(loss, self._losses)]
        if higher[0] > self.times:
            self._largest[self.program.step] = max(observation.gradients, key=observation.gradients.__getitem__)
        for value, kept in ((norm, self._norms), (loss, self._losses)):
            if math.isfinite(value):
                kept.append(value)
        return higher

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        higher, losses_higher = zip(*reports, strict=True)
        mine = self._largest.pop(step, "")
        ranks = tuple(rank for rank, ratio in enumerate(higher) if ratio > self.times)
        if not ranks or (len(reports) > 1 and _is_another_scale(higher, losses_higher)):
            return []
        largest = self.program.gather(mine)
        told = "; ".join(
            f"on rank {rank} {higher[rank]:.0f} times its median, most of it in {largest[rank]!r}" for rank in ranks
        )
        message = f"the norm of the gradient jumps, before it is averaged and clipped: {told}"
        return [Finding(self.name, step, ranks, message, "warning", largest[ranks[0]])]


def ratio_to_median(value: float, before: Sequence[float]) -> float:
    """How many times the median of those before; 0 where that is not known, or is nothing."""
    if len(before) < _KNOWN or not math.isfinite(value):
        return 0.0
    median = sorted(before)[len(before) // 2]
    return value / median if median > 0 else 0.0


def _is_another_scale(higher: Sequence[float], losses_higher: Sequence[float]) -> bool:
    """Have gradient and loss of all ranks jumped by about the same factor?"""
    both = [*higher, *losses_higher]
    return min(both) > 0 and max(both) < 2 * min(both)


class LossDivergence(Detector):
    """The loss over all ranks is `times` what it was at the beginning, in the median of `window` steps: a stop.

    The loss is what backward is called on, without the scale of a `GradScaler`.
    """

    name: ClassVar[str] = "divergence"
    size: ClassVar[int] = 1
    observes: ClassVar[frozenset[Observable]] = frozenset({"losses"})

    def __init__(self, times: float = 2.0, window: int = 10) -> None:
        if times <= 1 or window < 1:
            raise ValueError(f"times={times}, window={window}: should be above 1, and 1 step or more")
        self.times, self.window = times, window

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._first: list[float] = []
        self._last = deque[float](maxlen=self.window)

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        return [observation.loss]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        values = [value for [value] in reports if math.isfinite(value)]
        if not values:
            return []
        loss = statistics.fmean(values)
        (self._first if len(self._first) < self.window else self._last).append(loss)
        if len(self._last) < self.window or not has_diverged(self._first, list(self._last), self.times):
            return []
        first, now = statistics.median(self._first), statistics.median(self._last)
        message = (
            f"the loss diverges: it began at {first:.4g} and is {now:.4g} now, over {self.window} steps. A lower "
            "learning rate, a longer warm-up or clipping may help"
        )
        return [Finding(self.name, step, tuple(range(len(reports))), message, "error", "loss")]


def has_diverged(first: Sequence[float], now: Sequence[float], times: float) -> bool:
    """Is the median of `now` above that of `first` by `times - 1` of its size, and of the range of `first`?"""
    began = statistics.median(first)
    return statistics.median(now) > began + (times - 1) * max(abs(began), max(first) - min(first))
