"""Run your own code at fixed points of a training run. Subclass `Callback`, and pass instances to `Trainer`."""

from collections.abc import Callable, Sequence
from typing import Any

from ddp_tutorial.accumulation.train_step import StepResult
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.config import ConfigError, FailedError
from ddp_tutorial.world import World


class Callback:
    """Base class for callbacks. A subclass overrides the methods that it needs.

    Every rank calls each method with the same arguments, so a method may use collectives. To act on one rank only,
    check `trainer.world.is_main`. If a method raises an exception on any rank, all ranks raise an exception.
    """

    def on_step(self, trainer: Any, result: StepResult) -> None:
        """Handle the end of an optimizer step. `trainer.step_count` is the number of completed steps."""

    def on_evaluate(self, trainer: Any, step: int, means: dict[str, float]) -> None:
        """Handle the end of an evaluation. `means` contains the validation loss (as `loss`) and the metrics."""

    def on_save(self, trainer: Any, step: int) -> None:
        """Handle a new checkpoint. With `checkpoint.background`, a thread may still be writing the checkpoint."""

    def on_end(self, trainer: Any, result: Any) -> None:
        """Handle the end of the run. `result` is the `TrainResult`. The model and `result.json` are already on disk."""


class CallbackError(FailedError):
    """Raised on each rank whose callbacks succeeded if a callback raised an exception on a different rank."""


def check_callbacks(world: World, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks as a list. Collective.

    Raises:
        ConfigError: If an element is not a `Callback`, or if the callbacks differ between ranks.
    """
    callbacks, problem = list(callbacks), ""
    for each in callbacks:
        if not isinstance(each, Callback):
            kind = each.__name__ if isinstance(each, type) else type(each).__name__
            fix = f"pass an instance, such as {kind}()" if isinstance(each, type) else "subclass ddp_tutorial.Callback"
            problem = f"'callbacks' must contain objects of type Callback, got {kind}: {fix}"
    advice = ": pass the same callbacks on all ranks, and test trainer.world.is_main in callbacks that act on one rank"
    require_same_names(world, "callbacks", [type(each).__name__ for each in callbacks], problem, advice)
    return callbacks


def require_same_names(world: World, what: str, names: list[str], problem: str, advice: str = "") -> None:
    """Raise `ConfigError` on all ranks if any rank passes a `problem` or if the `names` of ranks differ. Collective."""
    of_ranks = all_gather(world, (problem, names))
    for rank, (found, theirs) in enumerate(of_ranks):
        if found:
            raise ConfigError(found)
        if theirs != of_ranks[0][1]:
            raise ConfigError(
                f"'{what}' must be the same on all ranks, got {of_ranks[0][1]} on rank 0 and {theirs} on rank {rank}"
                + advice
            )


def call_on_all_ranks(world: World, callbacks: Sequence[Callback], method: Callable[[Callback], None]) -> None:
    """Call `method` with each callback. Collective.

    Raises:
        Exception: The exception that a callback raised on this rank.
        CallbackError: If callbacks raised exceptions on other ranks, but not on this rank.
    """
    raised: Exception | None = None
    try:
        for callback in callbacks:
            method(callback)
    except Exception as error:
        raised = error
    problems = all_gather(world, f"{type(raised).__name__}: {raised}" if raised else "")
    if raised is not None:
        raise raised
    for rank, problem in enumerate(problems):
        if problem:
            raise CallbackError(f"a callback raised an exception on rank {rank}: {problem}")
