"""Detect sudden jumps in the gradient norm, and a diverging loss."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import Observable, StepObservation

# Minimum number of values for a median.
_KNOWN = 10


class GradientSpike(Detector):
    """Detector of ranks whose gradient norm is more than `times` times its median over the last `window` steps.

    The detector uses each rank's own gradient, before averaging and clipping, so the finding identifies the rank with
    the unusual samples. With several ranks, a jump of all losses and gradients by about the same factor is a change of
    scale, and is not reported.
    """

    name: ClassVar[str] = "spike"
    size: ClassVar[int] = 2
    observes: ClassVar[frozenset[Observable]] = frozenset({"gradients", "losses"})

    def __init__(self, times: float = 10.0, window: int = 50) -> None:
        """Store the arguments.

        Args:
            times: A norm is reported if its ratio to the median exceeds this value.
            window: The number of steps over which the median is computed.

        Raises:
            ValueError: If `times` is not above 1, or if `window` is below 10.
        """
        if times <= 1 or window < _KNOWN:
            raise ValueError(
                f"'times' must be above 1, and 'window' must be at least {_KNOWN} steps, got {times=}, {window=}"
            )
        self.times, self.window = times, window

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._norms, self._losses = deque[float](maxlen=self.window), deque[float](maxlen=self.window)
        self._largest: dict[int, str] = {}  # step with a jump -> the parameter with the largest norm

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return the ratio of the gradient norm to its median, and the ratio of the loss to its median."""
        norm, loss = math.hypot(*observation.gradients.values()), abs(observation.loss)
        higher = [ratio_to_median(norm, self._norms), ratio_to_median(loss, self._losses)]
        if higher[0] > self.times:
            self._largest[self.program.step] = max(observation.gradients, key=observation.gradients.__getitem__)
        for value, kept in ((norm, self._norms), (loss, self._losses)):
            if math.isfinite(value):
                kept.append(value)
        return higher

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return a finding if the gradient of a rank has jumped. Collective."""
        higher, losses_higher = zip(*reports, strict=True)
        mine = self._largest.pop(step, "")
        ranks = tuple(rank for rank, ratio in enumerate(higher) if ratio > self.times)
        if not ranks or (len(reports) > 1 and _scale_has_changed(higher, losses_higher)):
            return []
        largest = self.program.gather(mine)
        description = "; ".join(
            f"on rank {rank} to {higher[rank]:.0f} times its median, mostly in {largest[rank]!r}" for rank in ranks
        )
        message = f"the gradient norm jumps (measured before averaging and clipping): {description}"
        return [Finding(self.name, step, ranks, message, "warning", largest[ranks[0]])]


def ratio_to_median(value: float, before: Sequence[float]) -> float:
    """Return `value` divided by the median of `before`.

    The result is 0 if there are too few values, if `value` is not finite, or if the median is 0.
    """
    if len(before) < _KNOWN or not math.isfinite(value):
        return 0.0
    median = sorted(before)[len(before) // 2]
    return value / median if median > 0 else 0.0


def _scale_has_changed(higher: Sequence[float], losses_higher: Sequence[float]) -> bool:
    """Return whether the gradients and losses of all ranks have jumped by about the same factor."""
    both = [*higher, *losses_higher]
    return min(both) > 0 and max(both) < 2 * min(both)


class LossDivergence(Detector):
    """Detector that reports an error if the mean loss over all ranks has grown by more than a factor of `times`.

    The initial and the current loss are medians over `window` steps. The loss is the tensor on which `backward` is
    called, excluding the scale factor of a `GradScaler`.
    """

    name: ClassVar[str] = "divergence"
    size: ClassVar[int] = 1
    observes: ClassVar[frozenset[Observable]] = frozenset({"losses"})

    def __init__(self, times: float = 2.0, window: int = 10) -> None:
        """Store the arguments.

        Args:
            times: The largest allowed ratio of the loss to the initial loss; see `has_diverged`.
            window: The number of steps in each median.

        Raises:
            ValueError: If `times` is not above 1, or if `window` is below 1.
        """
        if times <= 1 or window < 1:
            raise ValueError(f"'times' must be above 1, and 'window' must be at least 1 step, got {times=}, {window=}")
        self.times, self.window = times, window

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._first: list[float] = []
        self._last = deque[float](maxlen=self.window)

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return the loss of this rank."""
        return [observation.loss]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return a finding with severity "error" if the loss has diverged."""
        values = [value for [value] in reports if math.isfinite(value)]
        if not values:
            return []
        loss = statistics.fmean(values)
        (self._first if len(self._first) < self.window else self._last).append(loss)
        if len(self._last) < self.window or not has_diverged(self._first, list(self._last), self.times):
            return []
        first, now = statistics.median(self._first), statistics.median(self._last)
        message = (
            f"the loss diverges: its median was {first:.4g} in the first {self.window} steps, and is {now:.4g} in the "
            "last. Try a lower learning rate, a longer warmup or gradient clipping"
        )
        return [Finding(self.name, step, tuple(range(len(reports))), message, "error", "loss")]


def has_diverged(first: Sequence[float], now: Sequence[float], times: float) -> bool:
    """Return whether the loss has increased by more than `(times - 1) * scale`.

    `scale` is the larger of the absolute median and the range of `first`. The increase is the difference between the
    medians of `now` and `first`.
    """
    began = statistics.median(first)
    return statistics.median(now) > began + (times - 1) * max(abs(began), max(first) - min(first))
