"""Train any model on any data with any loss, on any number of ranks. `Trainer.train` runs the training loop.

def loss(model, batch):                        # returns a sum and a count
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

def main(world):
    source = make_source(dataset, 64, world)   # 64 samples per step, over all ranks
    return Trainer(nn.Linear(8, 1), source, loss, world, TrainConfig(steps=300)).train()

launch(main, 2)
"""

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import LOSS, Loss
from ddp_tutorial.checkpoint.checkpointer import Checkpointer
from ddp_tutorial.checkpoint.components import Component, FunctionState, RandomState, Shared, require_unsharded
from ddp_tutorial.checkpoint.manifest import checkpoint_name, step_of
from ddp_tutorial.checkpoint.resuming import ResumePoint, find_resume_point
from ddp_tutorial.collectives import any_rank, assert_same, decide_on_rank_zero, digest, from_rank_zero
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import RUNS, without_nan, write_json
from ddp_tutorial.intervals import is_due, steps_between
from ddp_tutorial.local_sgd.config import OPTIONS as LOCAL
from ddp_tutorial.phases import phase
from ddp_tutorial.processes.rank import progress
from ddp_tutorial.rng import reseed
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.runs.rank_logs import LOG
from ddp_tutorial.runs.record import RunRecord, open_folder, require_rank_zeros
from ddp_tutorial.sharding.samples import Data, as_samples
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.sharding.sources import require_same_samples
from ddp_tutorial.training.callbacks import Callback, call_on_all_ranks, check_callbacks
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.cuts import with_measured_cuts
from ddp_tutorial.training.evaluation import evaluate
from ddp_tutorial.training.evaluation_tracker import EvaluationTracker
from ddp_tutorial.training.metrics import MakeMetric, check_metrics
from ddp_tutorial.training.optimization import (
    OptimizerLike,
    OptimizerOptions,
    SchedulerLike,
    config_for,
    update_settings,
)
from ddp_tutorial.training.profiling import StepProfiler
from ddp_tutorial.training.step import make_train_step
from ddp_tutorial.training.stopping import StopDecision, StopRequests, stopping_rule
from ddp_tutorial.training.weights import save_model
from ddp_tutorial.world import World

SomeTrainConfig = TypeVar("SomeTrainConfig", bound=TrainConfig)


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. Each rank measures its own `rate`. All other fields are the same on every rank."""

    run: Any  # the run folder, a Path
    losses: list[float]  # per step, the mean over all ranks; within a round of local SGD, rank 0's loss
    evaluations: dict[int, dict[str, float]]  # step -> name -> mean loss or metric on the validation samples
    rate: float  # the elements of the loss (samples or tokens) per second
    weights: str  # a digest of all weights, to check whether runs are bitwise identical
    stopped_at: int | None = None  # the step after which a signal or a request stopped the run early
    by_signal: bool = False  # whether a signal stopped the run, as on a cluster
    epoch: float | None = None  # passes over the data, if the number of samples is known
    test: dict[str, float] = field(default_factory=dict)  # mean loss and metrics on the test samples, if there are any

    @property
    def eval_losses(self) -> dict[int, float]:
        """Validation losses by step."""
        return {step: means[LOSS] for step, means in self.evaluations.items()}


class Trainer:
    """One training run, from the perspective of one rank. All methods are collective.

    `loss(model, batch)` returns a sum and a count, and optionally metrics (see `accumulation.loss`).

    Args:
        model: The model, on the CPU or on this rank's device.
        source: The source of micro-batches.
        loss: The loss function.
        world: The ranks.
        config: The settings of the run.
        validation_data: A dataset to evaluate on.
        test_data: A dataset whose samples are all evaluated once, after the last step.
        optimizer: An optimizer, or a function that takes the model and returns an optimizer. By default, `config`
            specifies the optimizer. If `optimizer` is passed, the schedule and clipping of `config` apply only if
            `config` sets them explicitly.
        scheduler: A learning-rate scheduler, or a function that takes the optimizer and returns a scheduler. By
            default, `config` specifies the scheduler.
        callbacks: Objects whose methods every rank calls after each step, evaluation and checkpoint, and after the run.
        metrics: Metrics for evaluations, by name. Each value is a class or a function that constructs a `Metric`.
        unit: The unit of the loss's count in the log, such as "tokens".

    Raises:
        ConfigError: If the arguments are inconsistent, or invalid for this world.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        loss: Loss,
        world: World,
        config: TrainConfig | None = None,
        *,
        validation_data: Any = None,
        test_data: Any = None,
        optimizer: OptimizerLike | None = None,
        scheduler: SchedulerLike | None = None,
        callbacks: Sequence[Callback] = (),
        metrics: Mapping[str, MakeMetric] | None = None,
        unit: str = "samples",
    ) -> None:
        """Build the training step, and create the run folder."""
        config = config or TrainConfig()
        rule = stopping_rule(config)
        needs_evaluations = config.best_model or config.early_stopping.is_enabled or config.target_loss is not None
        if needs_evaluations and validation_data is None:
            raise ConfigError(
                "'best_model', 'early_stopping' and 'target_loss' require validation data; pass validation_data to "
                "Trainer"
            )
        if metrics and validation_data is None:
            raise ConfigError("'metrics' requires validation data; pass validation_data to Trainer")
        if config.run_test and test_data is None:
            raise ConfigError("'run_test' requires test samples; pass test_data to Trainer, or set run_test=null")
        self.shows_epochs = config.num_epochs is not None
        config = config_for(optimizer, with_steps(config, source.steps_per_epoch))
        config = with_measured_cuts(config, model, source, loss, world)
        self.eval_every = steps_between("eval_every", config.eval_every, source.steps_per_epoch)
        self.save_every = steps_between("checkpoint.every", config.checkpoint.every, source.steps_per_epoch)
        self.threads = torch.get_num_threads()  # restored by `train`; strategy invariant uses one thread
        self.train_step = make_train_step(model, source, loss, world, config, optimizer=optimizer, scheduler=scheduler)
        self.options = OptimizerOptions.of(self.train_step.optimizer, self.train_step.scheduler)
        self.model, self.loss, self.world, self.config = self.train_step.model, loss, world, config
        self.validation_data = evaluation_samples(validation_data, world, "validation samples")
        self.test_data = evaluation_samples(None if config.run_test is False else test_data, world, "test samples")
        reseed(config.seed, world.rank, device=world.device)  # different on every rank, for dropout
        self.callbacks, self.metrics = check_callbacks(world, callbacks), check_metrics(world, metrics)
        self.settings = config.model_dump(mode="json")
        options = config.checkpoint
        if not options.shared:  # before the folder is created, reject components that rank 0 cannot save for all ranks
            require_unsharded(world, self.step_components())
            if config.resume == "auto":
                require_rank_zeros(world, config.name)
        # Do this before the folder is created. A run that resumes in its own folder does this after locking the folder.
        self.start = ResumePoint() if config.resume == "auto" else self.find_resume_point()
        self.run = open_folder(
            world,
            config.name,
            config.label,
            resuming=config.resume == "auto",
            shared=bool(options.every) and options.shared,
            private=config.private,
        )
        self.record = RunRecord(
            world,
            self.run,
            self.settings,
            unit=unit,
            events=config.tensorboard,
            memory_limit_mb=config.memory_limit_mb,
            gpu_memory_limit_mb=config.gpu_memory_limit_mb,
        )
        self.log, self.best = self.record.log, EvaluationTracker(world, self.run, config, rule)
        first, last = config.profile.first_step, config.profile.first_step + config.profile.steps - 1
        last, link = min(last, config.steps), self.train_step.strategy.link
        self.profiler = StepProfiler(world, self.run, first, last, link, config.profile.recorded)
        self.stopping = StopRequests(world, self.run)
        self.requested: StopDecision = ""
        self.is_finished = False
        self.checkpoints = Checkpointer(
            self.run.checkpoints,
            self.components(),
            world,
            config=self.settings,
            check=options.check,
            background=options.background,
            keep_last=options.keep_last,
            shared=options.shared,
        )

    @property
    def step_count(self) -> int:
        """The number of completed steps."""
        return self.train_step.number

    def train(self) -> TrainResult:
        """Run all remaining steps and return the result.

        Raises:
            ConfigError: If an earlier call has returned a result.
        """
        if self.is_finished:
            raise ConfigError(
                f"this Trainer has already finished its run at step {self.step_count}. To train again, create a new "
                "Trainer. To train longer, increase 'steps', and set resume=auto and resume_allow=[steps]"
            )
        with ExitStack() as afterwards, self.record.exclusive():
            afterwards.callback(torch.set_num_threads, self.threads)
            if self.world.size == 1:  # a notebook keeps the exception, and with it the source and its workers
                afterwards.callback(self.train_step.close)
            if self.config.resume == "auto":
                self.start = self.find_resume_point()  # this may raise, so no file changes earlier
            with self.record, self.stopping.handle_signals(), self.profiler:
                self.log_start()
                self.resume()
                while not self.is_done():
                    self.step()
                    if self.validation_data is not None and self.is_due(self.eval_every):
                        self.evaluate()
                    if self.is_due(self.save_every):
                        self.save()
                with phase("result"):  # if an observer raises, there is no result
                    result = self.finish()
        self.is_finished = True
        return result

    def is_done(self) -> bool:
        """Return whether the run has reached its last step, met a stopping criterion, or received a stop request."""
        return self.step_count >= self.config.steps or self.best.is_over or bool(self.requested)

    def is_due(self, every: float) -> bool:
        """Return whether the current step is a multiple of `every` or the last step. `every=0` disables the action."""
        is_last = self.step_count == self.config.steps or self.best.is_over
        return bool(every) and (is_last or is_due(self.step_count, every))

    def step(self) -> None:
        """Run one optimizer step and log it."""
        self.profiler.before(self.step_count + 1)
        done = self.train_step(self.stopping.local_stop_flags())
        seconds = self.record.record_step(self.step_count)
        scale = self.train_step.precision.loss_scale
        others = {"loss_scale": scale} | self.epoch()
        self.log.add(self.step_count, done.means, done.count, done.grad_norm, done.learning_rate, seconds, **others)
        if self.is_due(self.config.log_every):
            self.log.flush()
            self.record.usage.watch_memory()
            LOG.debug("step %d: %s", self.step_count, format_values(done.means))
            shown = self.epoch() if self.shows_epochs else {}
            progress(self.step_count, self.config.steps, **shown, **self.log.latest)
        if self.world.device.type == "cuda" and is_due(self.step_count, self.config.empty_cache_every):
            torch.cuda.empty_cache()
        self.profiler.after(self.step_count)
        self.checkpoints.poll()
        self.requested = self.stopping.decide(done.stop_flags)
        self.call_back(lambda callback: callback.on_step(self, done))

    def call_back(self, method: Callable[[Callback], None]) -> None:
        """Call `method` with each callback. If one rank raises an exception, all ranks do. Collective."""
        if not self.callbacks:  # this is called in every step
            return
        with phase("callbacks"), self.log.paused():
            call_on_all_ranks(self.world, self.callbacks, method)

    def epoch(self) -> dict[str, float]:
        """Return a dict that maps "epoch" to the number of passes over the data, or {} if that number is unknown."""
        per_epoch = self.train_step.source.steps_per_epoch
        return {"epoch": round(self.step_count / per_epoch, 4)} if per_epoch else {}

    def log_start(self) -> None:
        """Log the world, the dataset sizes, and the config's remarks."""
        LOG.debug("%s, %d threads, process %d", self.world, torch.get_num_threads(), os.getpid())
        source, data = self.train_step.source, self.validation_data
        per_epoch = "an unknown number of" if source.steps_per_epoch is None else f"{source.steps_per_epoch:g}"
        LOG.debug("training data: %s steps per epoch, %d samples per step", per_epoch, source.batch_size)
        LOG.debug("validation data: %d samples", 0 if data is None else len(data))
        for remark in self.config.remarks:
            LOG.info(remark)

    def find_resume_point(self) -> ResumePoint:
        """Return the point to resume from, without changing files. Raise `ConfigError` if the run cannot resume."""
        config = self.config
        run, shared = RUNS / config.name, config.checkpoint.shared
        return find_resume_point(self.world, run, config.resume, self.settings, config.resume_allow, shared=shared)

    def resume(self) -> None:
        """Resume from the checkpoint that `find_resume_point` returned, or start without a checkpoint."""
        is_found = self.config.resume == "auto"  # the run folder may belong to a run that was killed
        for problem in self.start.skipped if self.world.is_main else ():
            LOG.info("skipped checkpoint: %s", problem)
        if is_found:
            self.checkpoints.recover()
            if self.start.checkpoint is not None:  # `recover` may have renamed it
                renamed = self.start.checkpoint.with_name(checkpoint_name(step_of(self.start.checkpoint)))
                self.start = replace(self.start, checkpoint=renamed)
        if self.start.checkpoint is not None:
            self.train_step.warm_up()
            self.checkpoints.load(self.start.checkpoint, self.config.resume_without)
            self.best.copy_best(RunFolder(self.start.checkpoint.resolve().parent.parent))
            if update_settings(self.start.settings) != update_settings(self.settings):  # `resume_allow` permits it
                self.options.restore(self.train_step.optimizer, self.train_step.scheduler)
            excluded = f", without {', '.join(self.config.resume_without)}" if self.config.resume_without else ""
            LOG.info("resuming after step %d, from %s%s", self.start.step, self.start.checkpoint, excluded)
        elif is_found and not self.step_count:
            self.log.rewind(0, [], 0)
        if self.is_done():  # a finished run's command was rerun, or the first attempt to write the result failed
            if self.world.is_main and self.start.checkpoint is not None:
                LOG.warning(
                    "nothing was trained: resume=%s found a run that finished at step %d, so changes to the code "
                    "had no effect. To train again, use a different 'name' or resume=never; to train longer, set a "
                    "larger 'steps' and resume_allow=[steps]",
                    *(self.config.resume, self.step_count),
                )
            return
        self.record.reopen()
        if is_found and self.world.is_main:
            write_json(self.run.config, self.settings)

    def step_components(self) -> dict[str, Component]:
        """Return the checkpoint components of the training step."""
        parts = self.train_step.checkpoint_components()
        return {name: Component(part, cast("Shared", shared)) for name, (part, shared) in parts.items()}

    def components(self) -> dict[str, Component]:
        """Return the checkpoint components, which contain all state that is required to resume bitwise identically."""
        return self.step_components() | {
            "progress": Component(FunctionState(self.progress, self.set_progress)),
            "rng": Component(RandomState(self.world.device, self.reseed), "per_rank"),
        }

    def reseed(self, step: int) -> None:
        """Seed this rank's generators for a new world size, from the run's seed, the rank and `step`."""
        reseed(self.config.seed, self.world.rank, step, device=self.world.device)

    def progress(self) -> dict[str, Any]:
        """Return the progress of the run as plain values and tensors."""
        return {
            "step": self.step_count,
            "count": self.log.count,
            **({"left_out": self.train_step.left_out} if self.train_step.left_out else {}),
            "evaluations": {step: dict(means) for step, means in self.best.evaluations.items()},
            "losses": torch.tensor(self.log.losses, dtype=torch.float64),
        }

    def set_progress(self, state: dict[str, Any]) -> None:
        """Restore the progress of the run, and rewind its evaluations and its log."""
        self.train_step.number = self.record.step = state["step"]
        self.train_step.left_out = state.get("left_out", 0)
        self.best.rewind(state["step"], state["evaluations"])
        self.log.rewind(state["step"], state["losses"].tolist(), state["count"])

    def save(self) -> None:
        """Save a checkpoint of the current step, and sync the log up to this step."""
        self.train_step.strategy.sync_buffers()
        self.log.sync()
        self.share_losses()
        with phase("save"), self.log.paused():
            means = self.best.evaluations.get(self.step_count, {})
            metrics = {f"eval_{name}": value for name, value in means.items()} | {"loss": self.log.losses[-1]}
            self.checkpoints.save(self.step_count, metrics)
        self.best.record_checkpoint()
        self.call_back(lambda callback: callback.on_save(self, self.step_count))

    def share_losses(self) -> None:
        """In local SGD, broadcast rank 0's losses, because each rank stores only its own losses. Collective."""
        if self.config.strategy in LOCAL:
            self.log.losses, self.log.count = from_rank_zero(self.world, (self.log.losses, self.log.count))

    def evaluate(self) -> dict[str, float]:
        """Evaluate the first `eval_samples` validation samples, log the mean loss and metrics, and return them."""
        assert self.validation_data is not None, "the trainer has no validation data"
        self.log.flush()
        with phase("evaluate"), self.log.paused():
            self.train_step.strategy.sync_buffers()
            means = self.means_on(self.validation_data, self.config.eval_samples or len(self.validation_data))
            used = self.record.usage.gather()
            # The values are the same on all ranks. The ranks agree on the decision anyway. If only one rank left the
            # loop, the other ranks would wait forever.
            with (
                self.train_step.strategy.full_parameters()
                if self.config.best_model
                else nullcontext(self.model) as model
            ):
                reason = self.best.add(self.step_count, means, model)
            self.best.is_over = any_rank(self.world, bool(reason))
        self.log.write(
            {
                "step": self.step_count,
                **self.epoch(),
                **{f"eval_{name}": value for name, value in means.items()},
                "elapsed": self.log.elapsed(),
                "seconds": self.record.watch.take(),
                "ranks": used,
            }
        )
        LOG.debug("step %d: validation %s", self.step_count, format_values(means))
        self.call_back(lambda callback: callback.on_evaluate(self, self.step_count, dict(means)))
        return means

    def means_on(self, data: Data, samples: int) -> dict[str, float]:
        """Return the mean loss and metrics on the first `samples` samples of `data`."""
        # A forward pass gets at most the samples of a micro-batch, so evaluation needs no more memory than training.
        micro_batches = self.world.size * self.train_step.strategy.micro_batches_per_rank
        size = self.config.per_device_eval_batch_size or max(1, self.train_step.source.batch_size // micro_batches)
        with torch.compiler.set_stance("force_eager"), self.train_step.strategy.evaluation_weights():
            return evaluate(
                self.world, self.model, self.loss, data, samples, size, self.train_step.precision, self.metrics
            )

    def test(self) -> dict[str, float]:
        """Return the mean loss and metrics over all test samples.

        The result is empty if there are no test samples, or if the run was stopped.
        """
        if self.test_data is None or self.requested:
            return {}
        means = self.means_on(self.test_data, len(self.test_data))
        LOG.info("step %d: test %s", self.step_count, format_values(means))
        return means

    def finish(self) -> TrainResult:
        """Check that all ranks hold the same weights, then write the model and the result on rank 0, in this order.

        Collective. No rank returns before rank 0 has written the files. If rank 0 cannot write the files, all ranks
        raise rank 0's error.
        """
        self.stopping.close()
        self.train_step.strategy.sync_buffers()
        self.share_losses()
        has_just_saved = self.is_due(self.save_every)
        if self.requested in {"save", "signal"} and not has_just_saved:
            self.save()
        test = self.test()
        with self.train_step.strategy.full_parameters() as model:
            weights = model.state_dict()
            assert_same(self.world, weights, "weight")
            self.checkpoints.finish()
            self.checkpoints.close()
            self.train_step.close()
            self.log.close()
            result = TrainResult(
                run=self.run.path,
                losses=self.log.losses,
                evaluations=self.best.evaluations,
                rate=statistics.median(self.log.rates[1:] or self.log.rates or [0.0]),  # the first step is a warm-up
                weights=digest(weights),
                stopped_at=self.step_count if self.step_count < self.config.steps and not self.best.is_over else None,
                by_signal=self.requested == "signal",
                epoch=self.epoch().get("epoch"),
                test=test,
            )
            used = self.record.usage.gather_totals()
            if used["straggler"]:
                LOG.debug("the other ranks waited %(seconds).1f s for rank %(rank)d, in %(phase)s", used["straggler"])

            if used["imbalance"] and self.world.is_main:
                message = "rank %(rank)d uses %(mb).0f MB of memory; the other ranks use %(others_mb).0f MB (%(kind)s)"
                LOG.info(message, used["imbalance"])

            def write() -> None:
                if not self.run.result.exists():  # the file exists if a finished run's command was rerun
                    save_model(model, self.run.model)
                    if result.stopped_at is None:  # otherwise, the run may resume from an earlier checkpoint
                        self.best.remove_superseded()
                    self.record.write_result(self.summary(result, used))

            decide_on_rank_zero(self.world, write)
        self.call_back(lambda callback: callback.on_end(self, result))
        return result

    def summary(self, result: TrainResult, used: dict[str, Any]) -> dict[str, Any]:
        """Return the content of `result.json`. `used` is the resource usage of all ranks."""
        best, last = self.best.step, result.evaluations.get(self.step_count, {})
        reason = self.best.reason_to_stop() if self.best.is_over else ""
        if result.stopped_at is not None:
            reason = "a signal" if result.by_signal else "a request"
        metrics = {"loss": result.losses[-1] if result.losses else None}
        metrics |= {f"eval_{name}": value for name, value in last.items()}
        metrics |= {f"test_{name}": value for name, value in result.test.items()}
        if best is not None:
            metrics |= {f"best_eval_{name}": value for name, value in result.evaluations[best].items()}
        return {
            "status": "finished" if result.stopped_at is None else "stopped",
            "reason": reason,
            "step": self.step_count,
            **self.epoch(),
            **({"left_out": self.train_step.left_out} if self.config.oom_skips else {}),
            "parameters": self.settings,
            "world_size": self.world.size,
            "metrics": without_nan(
                metrics
                | {
                    "best_step": best,
                    f"{self.log.unit}_per_second": round(result.rate, 1),
                    "weights": result.weights,
                }
            ),
            "ranks": used,
        }


def evaluation_samples(dataset: Any, world: World, what: str) -> Data | None:
    """Return the samples of `dataset`, or None if `dataset` is None. Collective.

    Raises:
        ConfigError: If there are no samples, or if the samples differ between ranks. The message contains `what`.
    """
    if dataset is None:
        return None
    samples = as_samples(dataset)
    require_same_samples(samples, world, what)
    if not len(samples):
        raise ConfigError(f"there are no {what}: pass a dataset with at least one sample, or None")
    return samples


def with_steps(config: SomeTrainConfig, steps_per_epoch: float | None) -> SomeTrainConfig:
    """Return `config` with `num_epochs` converted to `steps`.

    Raises:
        ConfigError: If the length of an epoch is unknown, or if `steps` contradicts `num_epochs`.
    """
    if config.num_epochs is None:
        return config
    if steps_per_epoch is None:
        raise ConfigError(
            "'num_epochs' requires data of known length, but the length of a stream is unknown; set 'steps'"
        )
    steps = max(1, math.ceil(round(config.num_epochs * steps_per_epoch, 6)))
    if "steps" in config.model_fields_set and config.steps != steps:
        raise ConfigError(
            f"'num_epochs' {config.num_epochs:g} x {steps_per_epoch:g} steps per epoch = {steps} steps, but 'steps' is "
            f"{config.steps}. Remove one of the two settings"
        )
    return config.model_copy(update={"steps": steps, "num_epochs": None})


def format_values(values: Mapping[str, float]) -> str:
    """Return metrics as text, such as "loss 0.1234, accuracy 0.9711"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
