"""Stop a run early, after the same step on all ranks, because of a signal, a request, or a lack of progress."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

from ddp_tutorial.processes.signals import SIGNALS, handling
from ddp_tutorial.runs.folder import RunFolder, StopRequest
from ddp_tutorial.training.config import Mode, TrainConfig
from ddp_tutorial.training.imported import import_callable
from ddp_tutorial.world import World

# "stop": stop. "save": save a checkpoint and stop. "signal": like "save", after a signal. "": continue.
StopDecision = StopRequest | Literal["signal", ""]
StoppingRule = Callable[[Mapping[int, float]], bool]
_STOP, _SAVE, _SIGNAL = 1, 2, 4  # only rank 0 sends 1 or 2, so a sum of at least 4 contains a signal
CHECK_EVERY = 0.01  # seconds between checks for a request; a check takes about 30 microseconds


class StopRequests:
    """The stop requests of all ranks. All ranks act on a request after the same step.

    In every step, each rank sends a stop flag. The flags are summed in the all-reduce of the loss (see
    `accumulation.loss.StepLoss.reduce`), so no additional all-reduce is required. In local SGD, the ranks agree in the
    last step of a round, so a run can stop only at the end of a round.
    """

    def __init__(self, world: World, run: RunFolder) -> None:
        """Start without a request. `run` is the run folder, which rank 0 checks for a stop request."""
        self.world, self.request = world, run.stop_request
        self.signalled = False
        self._asked = -math.inf

    def handle_signals(self) -> AbstractContextManager[None]:
        """Return a context manager in which a signal causes the run to save a checkpoint and stop."""
        return handling(SIGNALS, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = True

    def local_stop_flags(self) -> float:
        """Return this rank's stop flag. The flags are summed over all ranks.

        Returns:
            4 if this rank has received a signal. Otherwise, rank 0 returns 1 if the run folder contains a request to
            stop, and 2 if it contains a request to save and stop. In all other cases, the flag is 0.
        """
        if self.signalled:
            return _SIGNAL
        if not self.world.is_main or time.monotonic() - self._asked < CHECK_EVERY:
            return 0
        self._asked = time.monotonic()
        if not self.request.exists():
            return 0
        return _SAVE if self.request.read_text().strip() == "save" else _STOP

    def decide(self, stop_flags: float) -> StopDecision:
        """Return the decision of all ranks, based on the sum of their stop flags.

        A signal takes precedence over a request, because a run that received a signal must be resumable.
        """
        return "signal" if stop_flags >= _SIGNAL else "save" if stop_flags >= _SAVE else "stop" if stop_flags else ""

    def close(self) -> None:
        """Remove the stop request from the run folder after the run has stopped."""
        if self.world.is_main:
            self.request.unlink(missing_ok=True)


def stopping_rule(config: TrainConfig) -> StoppingRule:
    """Return a function that decides whether the run stops early, based on the values of `best.metric` by step.

    Raises:
        ConfigError: If `early_stopping.rule` cannot be imported, or does not accept its arguments.
    """
    options = config.early_stopping
    if options.rule is not None:
        return import_callable("early_stopping.rule", options.rule)

    def has_stalled(values: Mapping[int, float]) -> bool:
        stalled = without_progress(values, options.minimum_delta, options.grace_steps, config.best.mode)
        return 0 < options.patience <= stalled

    return has_stalled


def without_progress(
    values: Mapping[int, float], minimum_delta: float = 0.0, grace_steps: int = 0, mode: Mode = "min"
) -> int:
    """Return the number of consecutive evaluations, up to the latest, that did not improve on the best earlier value.

    The result depends only on `values`, so a resumed run makes the same decisions as an uninterrupted run.

    Args:
        values: The value of the metric by step.
        minimum_delta: The amount that an improvement must exceed. A NaN value is never an improvement.
        grace_steps: The number of initial steps whose evaluations are not counted but may be the best.
        mode: "min" if lower values are better, or "max" if higher values are better.
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
    """Return the first step with the best value for `mode`, or None if no value is finite."""
    sign = 1 if mode == "min" else -1
    finite = [step for step in sorted(values) if math.isfinite(values[step])]
    return min(finite, key=lambda step: sign * values[step], default=None)
