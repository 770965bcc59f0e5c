"""The evaluations of a run: which was the best, when does it get no better, and the weights of the best."""

import shutil
from collections.abc import Mapping

from torch import nn

from ddp_tutorial.checkpoint.manifest import checkpoint_name
from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.stopping import best_step, without_progress
from ddp_tutorial.training.weights import save_model
from ddp_tutorial.world import World


class EvaluationTracker:
    """Every evaluation of a run, and what follows from them, as `config.best` and `config.early_stopping` say.

    All of it is a function of the evaluations, which are in the checkpoint: a resumed run decides as the uninterrupted
    one. With `config.best_model`, rank 0 keeps the weights of the best in the run's folder.
    """

    def __init__(self, world: World, run: RunFolder, config: TrainConfig) -> None:
        self.world, self.run, self.config = world, run, config
        self.evaluations: dict[int, dict[str, float]] = {}  # step -> name -> mean
        self.is_stalled = False

    @property
    def values(self) -> dict[int, float]:
        """Step -> the value of `best.metric` there. Raises `ConfigError` for a metric that is not evaluated."""
        name = self.config.best.metric
        for means in self.evaluations.values():
            if name not in means:
                raise ConfigError(f"'best.metric' {name!r} is not evaluated.{did_you_mean(name, sorted(means))}")
        return {step: means[name] for step, means in self.evaluations.items()}

    @property
    def step(self) -> int | None:
        """The step of the best evaluation; None where there is none with a finite value."""
        return best_step(self.values, self.config.best.mode)

    def add(self, step: int, means: Mapping[str, float], model: nn.Module) -> bool:
        """One more evaluation. Keeps `model` if it is the best. Returns whether the run has stopped to get better."""
        self.evaluations[step] = dict(means)
        best = self.step  # on every rank: what is wrong with the metric is raised on all
        if self.config.best_model and self.world.is_main and best == step:
            save_model(model, self.run.best / checkpoint_name(step))
            for old in (kept for kept in self.saved_steps() if kept != step):
                shutil.rmtree(self.run.best / checkpoint_name(old))
        return self.has_stalled()

    def has_stalled(self) -> bool:
        """Have there been as many evaluations without progress as `early_stopping` has patience?"""
        options = self.config.early_stopping
        if not options.patience:
            return False
        values = self.values
        stalled = without_progress(values, options.minimum_delta, options.grace_steps, self.config.best.mode)
        return stalled >= options.patience

    def saved_steps(self) -> list[int]:
        """The steps whose weights are in the run's folder: one, or none."""
        return sorted(int(folder.name.removeprefix("step_")) for folder in self.run.best.glob("step_*"))

    def rewind(self, step: int, evaluations: Mapping[int, Mapping[str, float]]) -> None:
        """Go back to `step`, with the `evaluations` up to it; weights of a later best are removed from the run's
        folder."""
        self.evaluations = {each: dict(means) for each, means in evaluations.items()}
        self.is_stalled = self.has_stalled()
        if self.world.is_main:
            for later in (each for each in self.saved_steps() if each > step):
                shutil.rmtree(self.run.best / checkpoint_name(later))
