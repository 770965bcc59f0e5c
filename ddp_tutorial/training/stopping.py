"""Stop early, all ranks at the same step: on a signal, because somebody has asked for it, or for lack of progress."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal

from ddp_tutorial.processes.signals import SIGNALS, handling
from ddp_tutorial.runs.folder import RunFolder, StopRequest
from ddp_tutorial.training.config import Mode
from ddp_tutorial.world import World

# What all ranks do: stop; save and stop, as somebody has asked; the same, as a signal has told some rank; go on.
StopDecision = StopRequest | Literal["signal", ""]
_STOP, _SAVE, _SIGNAL = 1, 2, 4  # each more than what is below it can come to
CHECK_EVERY = 0.01  # seconds: to look for a request takes a hundredth of a step of 3 ms


class StopRequests:
    """What some rank was asked to do, agreed by all ranks at the end of the same step.

    Each rank has a vote in every step. The votes are added up with the loss (see `accumulation.loss.StepLoss.reduce`),
    so that asking all ranks costs no all-reduce of its own.
    """

    def __init__(self, world: World, run: RunFolder) -> None:
        self.world, self.request = world, run.stop_request
        self.signalled = False
        self._asked = -math.inf

    def handle_signals(self) -> AbstractContextManager[None]:
        """Inside, a signal asks to save and stop."""
        return handling(SIGNALS, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = True

    def local_stop_flags(self) -> float:
        """This rank's vote, a number that is added up over the ranks. Rank 0 alone reads the request in the run's
        folder: 1 to stop, 2 to save first. A signal may come to any rank."""
        if self.signalled:
            return _SIGNAL
        if not self.world.is_main or time.monotonic() - self._asked < CHECK_EVERY:
            return 0
        self._asked = time.monotonic()
        if not self.request.exists():
            return 0
        return _SAVE if self.request.read_text().strip() == "save" else _STOP

    def decide(self, stop_flags: float) -> StopDecision:
        """What all ranks do, from the sum of their votes. A signal counts more than a request: after it the run is to
        go on."""
        return "signal" if stop_flags >= _SIGNAL else "save" if stop_flags >= _SAVE else "stop" if stop_flags else ""

    def close(self) -> None:
        """Remove the request to stop from the run's folder: it has been met, or the run has ended."""
        if self.world.is_main:
            self.request.unlink(missing_ok=True)


def without_progress(
    values: Mapping[int, float], minimum_delta: float = 0.0, grace_steps: int = 0, mode: Mode = "min"
) -> int:
    """Evaluations in a row that were not better than the best before them, up to the last. `values` are by step.

    Better means lower (with mode max: higher) by more than `minimum_delta`; a NaN never is. Evaluations of the first
    `grace_steps` steps may be the best, but are not held against the run. All there is to know is in the values, so a
    resumed run decides as the uninterrupted one.
    """
    sign = 1 if mode == "min" else -1
    best, count = math.inf, 0
    for step in sorted(values):
        if sign * values[step] < best - minimum_delta:
            best, count = sign * values[step], 0
        elif step > grace_steps:
            count += 1
    return count


def best_step(values: Mapping[int, float], mode: Mode = "min") -> int | None:
    """The step with the lowest (with mode max: highest) value, the first of equals; None where no value is finite."""
    sign = 1 if mode == "min" else -1
    finite = [step for step in sorted(values) if math.isfinite(values[step])]
    return min(finite, key=lambda step: sign * values[step], default=None)
