"""Who holds up the others, and who waits for data?"""

from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program, named
from ddp_tutorial.debug.instrumentation import Observable, StepObservation
from ddp_tutorial.runs.summaries import straggler

# The first steps open files and allocate memory.
_WARM_UP = 2
# Waiting for less than this in a step is not worth a word.
_WORTH_TELLING = 0.005


class _OverAWindow(Detector):
    """Adds up the seconds of all ranks by phase, and asks once in `window` steps what they come to."""

    observes: ClassVar[frozenset[Observable]] = frozenset({"seconds"})
    phases: ClassVar[tuple[str, ...]]

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window={window}: should be 1 step or more")
        self.window = window

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._from = program.step + _WARM_UP
        self._steps = 0
        self._sums = [[0.0] * len(self.phases) for _ in range(program.world.size)]
        self._has_told = False

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        return [observation.seconds.get(name, 0.0) for name in self.phases]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        if self._has_told or step < self._from:
            return []
        self._sums = [[a + b for a, b in zip(*each, strict=True)] for each in zip(self._sums, reports, strict=True)]
        self._steps += 1
        if self._steps < self.window:
            return []
        seconds = {name: [of_rank[place] for of_rank in self._sums] for place, name in enumerate(self.phases)}
        self._sums, self._steps = [[0.0] * len(self.phases) for _ in reports], 0
        found = self.check_window(step, seconds)
        self._has_told = found is not None
        return [found] if found else []

    def check_window(self, step: int, seconds: dict[str, list[float]]) -> Finding | None:
        """What the seconds of a window come to: of each phase, those of each rank."""
        raise NotImplementedError


class Straggler(_OverAWindow):
    """The rank that the others wait for, and the phase in which it takes longer, in two windows in a row.

    Measured is what a rank does by itself: waiting for data, forward, and backward until its own last gradient.
    """

    name: ClassVar[str] = "straggler"
    size: ClassVar[int] = 4
    phases: ClassVar[tuple[str, ...]] = ("data", "forward", "backward", "step")

    def __init__(self, window: int = 10) -> None:
        super().__init__(window)

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._suspect: tuple[int, str] | None = None

    def check_window(self, step: int, seconds: dict[str, list[float]]) -> Finding | None:
        found = slow_rank(seconds)
        suspect, self._suspect = self._suspect, found and found[:2]
        if found is None or suspect != found[:2]:
            return None
        rank, phase, lost = found
        message = (
            f"the others wait for rank {rank}: in {phase} it takes {1e3 * lost / self.window:.0f} ms a step longer "
            "than they do"
        )
        return Finding(self.name, step, (rank,), message, "warning", phase)


def slow_rank(seconds: dict[str, list[float]]) -> tuple[int, str, float] | None:
    """Rank, phase and seconds lost, as `runs.summaries` judges, for whom backward is where ranks wait for one another;
    here it is a rank's own part of it, so it counts with forward."""
    own = [sum(each) for each in zip(seconds["forward"], seconds["backward"], strict=True)]
    rest = [whole - data for whole, data in zip(seconds["step"], seconds["data"], strict=True)]
    found = straggler({"data": seconds["data"], "forward": own, "grads": rest})
    if found is None:
        return None
    rank = int(found["rank"])
    above = {name: each[rank] - min(each) for name, each in seconds.items() if name in {"forward", "backward"}}
    phase = "data" if found["phase"] == "data" else max(above, key=above.__getitem__)
    return rank, phase, float(found["seconds"])


class DataStarvation(_OverAWindow):
    """A rank that spends more than `limit` of its time in waiting for data: for the next batch of a `DataLoader`, or
    in the phase "data"."""

    name: ClassVar[str] = "starvation"
    size: ClassVar[int] = 2
    phases: ClassVar[tuple[str, ...]] = ("data", "step")

    def __init__(self, limit: float = 0.25, window: int = 20) -> None:
        super().__init__(window)
        if not 0 < limit < 1:
            raise ValueError(f"limit={limit}: should be a share between 0 and 1")
        self.limit = limit

    def check_window(self, step: int, seconds: dict[str, list[float]]) -> Finding | None:
        shares = [data / whole if whole else 0.0 for data, whole in zip(*seconds.values(), strict=True)]
        ranks = tuple(
            rank
            for rank, (share, waited) in enumerate(zip(shares, seconds["data"], strict=True))
            if share > self.limit and waited > self.window * _WORTH_TELLING
        )
        if not ranks:
            return None
        told = ", ".join(f"{shares[rank]:.0%} of the time on rank {rank}" for rank in ranks)
        message = (
            f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for data: {told}. Let workers read ahead "
            "(num_workers=2 or more, persistent_workers=True), or make each sample cheaper to read"
        )
        return Finding(self.name, step, ranks, message, "warning", "data")
