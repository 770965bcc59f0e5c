"""Detect stragglers, and ranks that wait for data."""

from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.config import named_ranks
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import Observable, StepObservation
from ddp_tutorial.runs.summaries import straggler

# The first steps open files and allocate memory.
_WARM_UP = 2
# Waits of at most this many seconds per step are not reported.
_MIN_WAIT = 0.005


class _WindowDetector(Detector):
    """Base class of detectors that sum each rank's phase times over `window` steps, and then evaluate the sums."""

    observes: ClassVar[frozenset[Observable]] = frozenset({"seconds"})
    phases: ClassVar[tuple[str, ...]]

    def __init__(self, window: int = 10) -> None:
        """Store the arguments.

        Args:
            window: The number of steps in a window.

        Raises:
            ValueError: If `window` is below 1.
        """
        if window < 1:
            raise ValueError(f"'window' must be at least 1 step, got {window}")
        self.window = window

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._from = program.step + _WARM_UP
        self._steps = 0
        self._sums = [[0.0] * len(self.phases) for _ in range(program.world.size)]
        self._has_reported = False

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return the duration of each phase on this rank, in seconds."""
        return [observation.seconds.get(name, 0.0) for name in self.phases]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Accumulate each rank's phase times. Until there is a finding, evaluate the sums at the end of each window."""
        if self._has_reported or step < self._from:
            return []
        self._sums = [[a + b for a, b in zip(*each, strict=True)] for each in zip(self._sums, reports, strict=True)]
        self._steps += 1
        if self._steps < self.window:
            return []
        seconds = {name: [of_rank[place] for of_rank in self._sums] for place, name in enumerate(self.phases)}
        self._sums, self._steps = [[0.0] * len(self.phases) for _ in reports], 0
        found = self.check_window(step, seconds)
        self._has_reported = found is not None
        return [found] if found else []

    def check_window(self, step: int, seconds: dict[str, list[float]]) -> Finding | None:
        """Return a finding for a window, or None.

        Args:
            step: The last step of the window.
            seconds: Dict from phase to the phase's total duration on each rank, in seconds.
        """
        raise NotImplementedError


class Straggler(_WindowDetector):
    """Detector of ranks that delay the other ranks in the same phase of two consecutive windows.

    The detector measures only a rank's own work: waiting for data, the forward pass, and the backward pass up to the
    rank's last gradient.
    """

    name: ClassVar[str] = "straggler"
    size: ClassVar[int] = 4
    phases: ClassVar[tuple[str, ...]] = ("data", "forward", "backward", "step")

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._suspect: tuple[int, str] | None = None

    def check_window(self, step: int, seconds: dict[str, list[float]]) -> Finding | None:
        """Return a finding if the slow rank and its slow phase are the same as in the previous window."""
        found = slow_rank(seconds)
        suspect, self._suspect = self._suspect, found and found[:2]
        if found is None or suspect != found[:2]:
            return None
        rank, phase, lost = found
        message = (
            f"the other ranks wait for rank {rank}: its phase {phase!r} takes {1e3 * lost / self.window:.0f} ms longer "
            "per step than theirs"
        )
        return Finding(self.name, step, (rank,), message, "warning", phase)


def slow_rank(seconds: dict[str, list[float]]) -> tuple[int, str, float] | None:
    """Return the straggler, its slow phase and the lost seconds, or None if there is no straggler.

    In `runs.summaries.straggler`, the backward time includes waits for other ranks. In `seconds`, the backward time
    covers only the rank's own work, so the forward and backward times are summed.
    """
    own = [sum(each) for each in zip(seconds["forward"], seconds["backward"], strict=True)]
    rest = [whole - data for whole, data in zip(seconds["step"], seconds["data"], strict=True)]
    found = straggler({"data": seconds["data"], "forward": own, "grads": rest})
    if found is None:
        return None
    rank = int(found["rank"])
    above = {name: each[rank] - min(each) for name, each in seconds.items() if name in {"forward", "backward"}}
    phase = "data" if found["phase"] == "data" else max(above, key=above.__getitem__)
    return rank, phase, float(found["seconds"])


class DataStarvation(_WindowDetector):
    """Detector of ranks that spend more than the fraction `limit` of their time waiting for data.

    A wait is the time until a `DataLoader` returns the next batch, or the duration of the "data" phase.
    """

    name: ClassVar[str] = "starvation"
    size: ClassVar[int] = 2
    phases: ClassVar[tuple[str, ...]] = ("data", "step")

    def __init__(self, limit: float = 0.25, window: int = 20) -> None:
        """Store the arguments.

        Args:
            limit: The maximum fraction of a rank's time that may be spent waiting for data.
            window: The number of steps in a window.

        Raises:
            ValueError: If `limit` is not between 0 and 1, or if `window` is below 1.
        """
        super().__init__(window)
        if not 0 < limit < 1:
            raise ValueError(f"'limit' must be between 0 and 1, got {limit}")
        self.limit = limit

    def check_window(self, step: int, seconds: dict[str, list[float]]) -> Finding | None:
        """Return a finding if ranks spent too much time waiting for data."""
        shares = [data / whole if whole else 0.0 for data, whole in zip(*seconds.values(), strict=True)]
        ranks = tuple(
            rank
            for rank, (share, waited) in enumerate(zip(shares, seconds["data"], strict=True))
            if share > self.limit and waited > self.window * _MIN_WAIT
        )
        if not ranks:
            return None
        description = ", ".join(f"{shares[rank]:.0%} of the time on rank {rank}" for rank in ranks)
        message = (
            f"{named_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for data: {description}. Prefetch with "
            "workers (num_workers=2, persistent_workers=True), or make each sample cheaper to read"
        )
        return Finding(self.name, step, ranks, message, "warning", "data")
