"""Track a run's evaluations to keep the best weights and to detect a lack of progress."""

import shutil
from collections.abc import Collection, Mapping

from torch import nn

from ddp_tutorial.accumulation.loss import LOSS
from ddp_tutorial.checkpoint.manifest import checkpoint_name
from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.files import directory_replaced_atomically
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.stopping import StoppingRule, best_step
from ddp_tutorial.training.weights import save_model
from ddp_tutorial.world import World


class EvaluationTracker:
    """A run's evaluations, and the decisions based on `config.best`, `config.target_loss` and `config.early_stopping`.

    The decisions depend only on the evaluations, which are part of the checkpoint. Therefore, a resumed run makes the
    same decisions as an uninterrupted run. With `config.best_model`, rank 0 keeps the weights of the best evaluation in
    the run folder. Until the run finishes, rank 0 also keeps the weights of the evaluations that were the best at the
    last two checkpoints.
    """

    def __init__(self, world: World, run: RunFolder, config: TrainConfig, rule: StoppingRule) -> None:
        """Start without evaluations. `rule` decides whether the run stops early; see `stopping.stopping_rule`."""
        self.world, self.run, self.config, self.rule = world, run, config, rule
        self.evaluations: dict[int, dict[str, float]] = {}  # step -> name -> mean
        self.is_over = False  # on all ranks; see `reason_to_stop`
        self._at_checkpoints: list[int | None] = []  # the best step at each of the last two checkpoints

    @property
    def values(self) -> dict[int, float]:
        """The value of `best.metric` at each evaluated step. Raises `ConfigError` if this metric is not evaluated."""
        name = self.config.best.metric
        for means in self.evaluations.values():
            if name not in means:
                raise ConfigError(
                    f"'best.metric' must be the name of an evaluated metric, got {name!r}."
                    f"{did_you_mean(name, sorted(means))}"
                )
        return {step: means[name] for step, means in self.evaluations.items()}

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, or None if no evaluation has a finite value."""
        return best_step(self.values, self.config.best.mode)

    def add(self, step: int, means: Mapping[str, float], model: nn.Module) -> str:
        """Add an evaluation, save `model` if the value is the best so far, and return the reason to stop, or ""."""
        self.evaluations[step] = dict(means)
        best = self.step  # computed on every rank, so that all ranks raise an error if the metric is wrong
        if self.config.best_model and self.world.is_main and best == step:
            save_model(model, self.run.best / checkpoint_name(step))
            self.remove_saved(excluded=[step, *self._at_checkpoints])
        return self.reason_to_stop()

    def reason_to_stop(self) -> str:
        """Return the reason to stop the run before its last step, or "" if there is none."""
        target = self.config.target_loss
        reached = [step for step, means in self.evaluations.items() if target is not None and means[LOSS] <= target]
        if reached:
            return f"the validation loss reached target_loss={target:g} at step {reached[0]}"
        options = self.config.early_stopping
        if not (self.evaluations and options.is_enabled and self.rule(self.values)):
            return ""
        return "early_stopping.rule returned true" if options.rule else f"no improvement since step {self.step}"

    def saved_steps(self) -> list[int]:
        """Return the steps whose weights are saved in the run folder, in ascending order."""
        return sorted(int(folder.name.removeprefix("step_")) for folder in self.run.best.glob("step_*"))

    def remove_saved(self, excluded: Collection[int | None]) -> None:
        """On rank 0, delete the saved weights of every step that is not in `excluded`."""
        if self.world.is_main:
            for step in self.saved_steps():
                if step not in excluded:
                    shutil.rmtree(self.run.best / checkpoint_name(step))

    def record_checkpoint(self) -> None:
        """Record that a checkpoint contains the evaluations so far.

        The weights of the best evaluation so far are kept until two later checkpoints have been saved. Until then, a
        killed run may resume from this checkpoint, and its repeated evaluations may be worse than before.
        """
        if self.config.best_model:
            self._at_checkpoints = [*self._at_checkpoints[-1:], self.step]

    def remove_superseded(self) -> None:
        """If the weights of the best evaluation are saved, remove all other weights on rank 0."""
        if self.config.best_model and self.step in self.saved_steps():
            self.remove_saved(excluded=[self.step])

    def rewind(self, step: int, evaluations: Mapping[int, Mapping[str, float]]) -> None:
        """Restore the `evaluations` up to `step`. Rank 0 removes the weights of later steps from the run folder."""
        self.evaluations = {each: dict(means) for each, means in evaluations.items()}
        self.is_over = bool(self.reason_to_stop())
        self.remove_saved(excluded=[each for each in self.saved_steps() if each <= step])
        self.record_checkpoint()

    def copy_best(self, other: RunFolder) -> None:
        """On rank 0, copy the weights of the best evaluation from the run `other`, if `other` still contains them."""
        if not (self.config.best_model and self.world.is_main and self.step is not None):
            return
        kept, own = (folder.best / checkpoint_name(self.step) for folder in (other, self.run))
        if kept.is_dir() and not own.exists():
            with directory_replaced_atomically(own) as aside:
                shutil.copytree(kept, aside, dirs_exist_ok=True)
