"""Train a small GPT on any number of ranks. The loop, `Trainer.train` and `advance`, is meant to be read on one screen.

    config = TrainConfig(steps=100)
    results = launch(train, 2, config)      # two processes; or launch(train, 1, config), the same run on one

One process and N ranks do the same work: `batch_size` counts the samples of a step over all ranks.
"""

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.accumulation import Batch, blame, next_token, split
from ddp_tutorial.checkpoint import Checkpointer, Component, RandomState, StateOf
from ddp_tutorial.collectives import any_rank, assert_same, digest, from_rank_zero, rank_zero_first
from ddp_tutorial.config import ConfigError
from ddp_tutorial.console import describe
from ddp_tutorial.corpus import load_corpus
from ddp_tutorial.data import Windows
from ddp_tutorial.dice import reseed, seed_of
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.evaluation import held_out_loss
from ddp_tutorial.files import RUNS, directory_written_atomically, new_directory, write_json
from ddp_tutorial.invariant import InvariantStrategy
from ddp_tutorial.launcher import launch
from ddp_tutorial.manifest import CHECKPOINTS
from ddp_tutorial.metrics import Mean, StepLog, without_nan
from ddp_tutorial.model import GPT
from ddp_tutorial.phases import Stopwatch, observe, phase
from ddp_tutorial.precision import NotFiniteError, Precision
from ddp_tutorial.profiling import StepProfiler
from ddp_tutorial.rank import progress
from ddp_tutorial.rank_logs import LOG, failure_noted, rank_log
from ddp_tutorial.resuming import claimed_by_rank_zero, find_checkpoint
from ddp_tutorial.runs import BEST, FAILURE
from ddp_tutorial.sharded import Share
from ddp_tutorial.sources import make_source
from ddp_tutorial.stopping import SIGNALS, Stopping, Wish, best_step, without_progress
from ddp_tutorial.strategy import DDPStrategy, Strategy
from ddp_tutorial.train_config import TrainConfig
from ddp_tutorial.usage import Usage
from ddp_tutorial.world import World, require_group


@dataclass(frozen=True)
class TrainResult:
    """What a run came to; the same on every rank, but for the rate, which each has measured for itself.

    Losses are in nats per token, which here is a byte.
    """

    run: Path
    losses: list[float]
    eval_losses: dict[int, float]
    tokens_per_second: float
    weights: str  # a digest of all weights, to compare runs bit for bit
    stopped_at: int | None = None  # the step, if somebody had it stopped before the last one


class Trainer:
    """One training run, seen by one rank. Raises `ConfigError` where the config does not fit the data or the world."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        require_group(world)
        if config.batch_size < world.size:
            raise ConfigError(f"'batch_size' {config.batch_size} gives some of the {world.size} ranks nothing to do")
        self.config, self.world = config, world
        with rank_zero_first(world):
            corpus = load_corpus(config.corpus)
        text, self.held_out = (Windows(tokens, config.model.context) for tokens in (corpus.train, corpus.valid))
        for windows, needed in ((text, config.batch_size), (self.held_out, 1)):
            if len(windows) < needed:
                raise ConfigError(
                    f"corpus {config.corpus!r} has {len(text)} samples of {config.model.context} tokens to learn from, "
                    f"and {len(self.held_out)} held out: too few for one batch of {config.batch_size} and one to "
                    "evaluate. Use more text, a smaller batch_size or a smaller model.context."
                )
        self.source = make_source(config.source, text, config.batch_size, config.seed, world)

        torch.manual_seed(config.seed)  # the same on every rank: so are the weights
        self.model = GPT(**config.model.model_dump()).to(world.device)
        assert_same(world, self.model.state_dict(), "weight")
        torch.manual_seed(seed_of(config.seed, world.rank))  # different on every rank: so is dropout

        self.precision = Precision(config.precision, world)
        self.strategy: Strategy
        if config.strategy == "invariant":
            self.strategy = InvariantStrategy(
                self.model, world, config.micro_batches, config.seed, precision=self.precision
            )
            self.parts = self.strategy.per_rank
        else:
            self.strategy = DDPStrategy(self.model, world, config.ddp, self.precision)
            self.parts = config.accumulation
        self.optimizer = make_optimizer(self.model, config)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor(config))
        self.watch = Stopwatch()
        self.step = 0
        self.eval_losses: dict[int, float] = {}
        self.stalled = False
        self.run = _open_run(world, config)
        tokens = config.batch_size * config.model.context
        self.log = StepLog(world, self.run / "metrics.jsonl", tokens, events=config.tensorboard)
        self.usage = Usage(world, config.memory_limit_mb)
        first, last = config.profile.first_step, config.profile.first_step + config.profile.steps - 1
        self.profiler = StepProfiler(world, self.run, first, min(last, config.steps), self.strategy.link)
        self.stopping = Stopping(world, self.run)
        options = config.checkpoint
        self.checkpoints = Checkpointer(
            self.run / CHECKPOINTS,
            self.components(),
            world,
            config=config.model_dump(mode="json"),
            check=options.check,
            background=options.background,
            keep_last=options.keep_last,
            keep_best=options.keep_best,
            metric=options.best,
            mode=options.best_is,
        )

    def train(self) -> TrainResult:
        """All steps, then the result. Collective, as everything below: each rank does the same at the same step."""
        wish: Wish = ""
        with ExitStack() as stack:
            stack.callback(self.log.close_file)  # also when a step fails
            stack.enter_context(claimed_by_rank_zero(self.world, self.run))
            stack.enter_context(rank_log(self.world, self.run))
            stack.enter_context(failure_noted(self.world, self.run, lambda: self.step))
            stack.enter_context(observe(self.watch))
            stack.enter_context(self.stopping.listening())
            stack.callback(self.profiler.close)
            self.begin()
            self.resume()
            while self.step < self.config.steps and not self.stalled and not wish:
                self.profiler.before(self.step + 1)
                self.advance()
                self.profiler.after(self.step)
                wish = self.stopping.wish()
            self.stopping.close()
            if wish == "save":
                self.save()
            return self.finish()

    def advance(self) -> None:
        """One optimiser step, and what is due after it."""
        with phase("data"):
            batches = [next_token(part) for part in split(next(self.source), self.parts, self.world)]
        with phase("grads"):
            loss = self.strategy.backward(batches)
        with phase("update"):
            norm, made = self.update(loss, batches)
        self.step += 1
        rate, seconds = float(self.scheduler.get_last_lr()[0]), self.watch.take()
        self.log.add(self.step, loss, norm, rate, seconds, loss_scale=self.precision.loss_scale)
        self.usage.add(seconds)
        if made:  # else the rate would move on, and the weights have not
            self.scheduler.step()
        if self.due(self.config.log_every):
            self.log.flush()
            self.usage.watch_memory()
            if self.log.latest:
                LOG.debug("step %d: %s", self.step, describe(self.log.latest))
            progress(self.step, self.config.steps, **self.log.latest)
        if self.due(self.config.eval_every):
            self.evaluate()
        self.checkpoints.poll()
        if self.config.checkpoint.every and self.due(self.config.checkpoint.every):
            self.save()

    def begin(self) -> None:
        """Say what is about to happen; forget how an earlier attempt has ended."""
        config = self.config
        LOG.debug("%s, %d threads, process %d", self.world, torch.get_num_threads(), os.getpid())
        if config.learning_rate_rule != "fixed":
            LOG.info(
                "learning rate %g: %g, scaled from batch_size %d to %d by the rule %r",
                highest_learning_rate(config),
                config.learning_rate,
                config.learning_rate_batch,
                config.batch_size,
                config.learning_rate_rule,
            )
        if self.world.is_main:
            for ending in (FAILURE, "result.json"):
                (self.run / ending).unlink(missing_ok=True)

    def components(self) -> dict[str, Component]:
        """All that a run needs to go on as if nothing had happened, and who has the same of it."""
        parts = {
            "model": Component(self.model),
            "optimizer": Component(self.optimizer),
            "scheduler": Component(self.scheduler),
            "source": Component(StateOf(self.source.state, self.source.restore)),
            "progress": Component(StateOf(self.progress, self.set_progress)),
            "rng": Component(RandomState(self.world.device, self.reseed), "per_rank"),
        }
        if self.precision.scale:
            parts["precision"] = Component(self.precision)
        if isinstance(self.strategy, InvariantStrategy):
            parts["strategy"] = Component(self.strategy)
        return parts

    def reseed(self, step: int) -> None:
        """Random numbers of this rank's own, for a world of another size that goes on after `step`."""
        reseed(self.config.seed, self.world.rank, step)

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "eval_losses": dict(self.eval_losses),
            "losses": torch.tensor(self.log.losses, dtype=torch.float64),
        }

    def set_progress(self, state: dict[str, Any]) -> None:
        self.step, self.eval_losses = state["step"], dict(state["eval_losses"])
        self.stalled = self.is_stalled()
        self.drop_best(after=self.step)
        self.log.go_back(self.step, state["losses"].tolist())

    def save(self) -> None:
        """A checkpoint of this step, with the log up to it."""
        self.log.sync()
        with phase("save"), self.log.paused():
            self.checkpoints.save(
                self.step, {"eval_loss": self.eval_losses.get(self.step), "loss": self.log.losses[-1]}
            )

    def resume(self) -> None:
        """Go on from where the config says; without a checkpoint there, from the beginning."""
        is_found = self.config.resume == "auto"  # the folder: it may be that of a run which was killed
        if is_found:
            self.checkpoints.clear_up()
            if self.world.is_main:
                write_json(self.run / "config.json", self.config.model_dump())
        config = self.config.model_dump(mode="json")
        folder = find_checkpoint(self.world, self.run, self.config.resume, config, self.config.resume_allow)
        if folder is None:
            if is_found:
                self.log.go_back(0, [])
            return
        self.warm_up()
        manifest = self.checkpoints.load(folder, self.config.resume_without)
        left_out = f", without {', '.join(self.config.resume_without)}" if self.config.resume_without else ""
        LOG.info("going on after step %d, from %s%s", manifest.step, folder, left_out)

    def warm_up(self) -> None:
        """One backward of nothing in particular. After the first one of a process, DDP cuts its buckets anew, in the
        order in which gradients came; and in other buckets, three ranks or more add up in another order."""
        tokens = torch.zeros(1, self.config.model.context + 1, dtype=torch.int64, device=self.world.device)
        batches = [next_token(Share({"tokens": tokens}, 1, self.world.size)) for _ in range(self.parts)]
        self.strategy.backward(batches)
        self.optimizer.zero_grad()

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps or self.stalled

    def update(self, loss: Mean, batches: list[Batch]) -> tuple[torch.Tensor, bool]:
        """Clip by the norm over all parameters, step, zero. Returns the norm before clipping, and whether the weights
        have moved; both are the same on all ranks.

        A step whose gradient is not finite is left out where the scale of float16 can be the reason. Else it is a bug,
        and raises `NotFiniteError` on all ranks, before it has reached the weights.
        """
        norm, made, scale_may_help = self.precision.update(self.optimizer, self.config.clip, loss.sum)
        if not (made or scale_may_help):
            where = blame(self.world, self.model, batches, self.precision)
            raise NotFiniteError(f"step {self.step + 1}: the gradient is not finite. {where[0].upper()}{where[1:]}.")
        return norm, made

    def evaluate(self) -> float:
        """Mean loss over the first `eval_samples` held-out samples, each seen by exactly one rank."""
        self.log.settle()
        with phase("evaluate"), self.log.paused():
            size = max(1, self.config.batch_size // self.world.size)
            value = held_out_loss(self.world, self.model, self.held_out, self.config.eval_samples, size, self.precision)
            used = self.usage.of_ranks()
            self.eval_losses[self.step] = value
            # The value is the same on all ranks. But whoever leaves the loop alone makes the others wait for ever.
            self.stalled = any_rank(self.world, self.is_stalled())
            self.keep_best()
        seconds = self.watch.take()
        self.log.write(
            {
                "step": self.step,
                "eval_loss": value,
                "elapsed": self.log.elapsed(),
                "seconds": seconds,
                "ranks": used,
            }
        )
        LOG.debug("step %d: held out %.4f", self.step, value)
        return value

    def is_stalled(self) -> bool:
        """Has the held-out loss stopped to fall, as `early_stopping` defines it?"""
        options = self.config.early_stopping
        if not options.patience:
            return False
        return without_progress(self.eval_losses, options.minimum_delta, options.grace_steps) >= options.patience

    def keep_best(self) -> None:
        """The weights of the step with the lowest held-out loss so far, if it is this one, take the place of others."""
        if self.config.best_model and self.world.is_main and best_step(self.eval_losses) == self.step:
            before = list((self.run / BEST).glob("step_*"))
            with directory_written_atomically(self.run / BEST / f"step_{self.step:08d}") as folder:
                self.model.save_pretrained(folder)
            for old in before:
                shutil.rmtree(old)

    def drop_best(self, after: int) -> None:
        """A run that goes back to step `after` has not found yet what it found later."""
        if self.world.is_main:
            for folder in (self.run / BEST).glob("step_*"):
                if int(folder.name.removeprefix("step_")) > after:
                    shutil.rmtree(folder)

    def finish(self) -> TrainResult:
        """Check that the ranks ended up with the same weights; rank 0 writes the model, and the result last."""
        weights = self.model.state_dict()
        assert_same(self.world, weights, "weight")
        self.checkpoints.finish()
        self.checkpoints.close()
        self.source.close()
        self.log.close()
        used = self.usage.of_ranks_in_all()
        if used["straggler"]:
            LOG.debug("the others waited for rank %(rank)d, in %(phase)s: %(seconds).1f s", used["straggler"])
        result = TrainResult(
            run=self.run,
            losses=self.log.losses,
            eval_losses=self.eval_losses,
            tokens_per_second=statistics.median(self.log.rates[1:] or self.log.rates or [0.0]),  # the first warms up
            weights=digest(weights),
            stopped_at=self.step if self.step < self.config.steps and not self.stalled else None,
        )
        if self.world.is_main:
            shutil.rmtree(self.run / "model", ignore_errors=True)  # of before it was resumed
            with directory_written_atomically(self.run / "model") as folder:
                self.model.save_pretrained(folder)
            write_json(self.run / "result.json", self.summary(result, used))
        return result

    def summary(self, result: TrainResult, used: dict[str, Any]) -> dict[str, Any]:
        """What `result.json` says; `used` is of all ranks."""
        best = best_step(self.eval_losses)
        return {
            "schema": 1,
            "status": "finished" if result.stopped_at is None else "stopped",
            "reason": f"no better since step {best}" if self.stalled else "",
            "step": self.step,
            "parameters": self.config.model_dump(),
            "world_size": self.world.size,
            "environment": describe_environment(),
            "metrics": without_nan(
                {
                    "loss": result.losses[-1],
                    "eval_loss": self.eval_losses.get(self.step),
                    "best_eval_loss": None if best is None else self.eval_losses[best],
                    "best_step": best,
                    "tokens_per_second": round(result.tokens_per_second, 1),
                    "weights": result.weights,
                }
            ),
            "ranks": used,
        }


def train(world: World, config: TrainConfig) -> TrainResult:
    """The function to launch: `launch(train, config.nprocs, config)`."""
    return Trainer(config, world).train()


def launch_training(config: TrainConfig, **options: Any) -> TrainResult:
    """Train on `config.nprocs` ranks of this machine and return rank 0's result, which is that of all.

    `options` go to `launch`. There is no time limit unless one is given: training may take as long as it takes.
    """
    defaults = {"timeout": None, "pass_on": SIGNALS}
    results = launch(train, config.nprocs, config, device=config.device, **(defaults | options))
    return results[0]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True),  # Loshchilov & Hutter, 2019
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
}

# How much of the way down is left, after the part `done` of it.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` names. Decay is for matrices; norms and biases are left to themselves."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return OPTIMIZERS[config.optimizer](groups, lr=highest_learning_rate(config))


def highest_learning_rate(config: TrainConfig) -> float:
    """`learning_rate`, scaled to `batch_size` as `learning_rate_rule` says.

    These are rules of thumb, for k times the samples in a step. Linear: one step should go as far as k steps did (Goyal
    et al., "Accurate, large minibatch SGD", 2017; with a warm-up). Square root: the noise of the gradient falls with
    sqrt(k), and Adam divides by it (Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms",
    2022).
    """
    times = config.batch_size / config.learning_rate_batch
    return config.learning_rate * {"fixed": 1.0, "linear": times, "sqrt": math.sqrt(times)}[config.learning_rate_rule]


def learning_rate_factor(config: TrainConfig) -> Callable[[int], float]:
    """A line up over the warm-up, then as `schedule` says down to `final_lr_fraction` at the last step."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, (config.schedule_steps or config.steps) - 1 - config.warmup_steps)
        low = config.final_lr_fraction
        return low + (1 - low) * SCHEDULES[config.schedule](min(1.0, done))

    return factor


def _open_run(world: World, config: TrainConfig) -> Path:
    """One folder for the run, made by rank 0 and known to all: if each made its own, clocks would decide.

    With `resume` auto it is the folder of that name, whoever made it.
    """
    run: Path | None = None
    if world.is_main:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        kind = config.corpus.partition(":")[0]
        if config.resume == "auto":
            run = RUNS / config.name
            run.mkdir(parents=True, exist_ok=True)
        else:
            run = new_directory(RUNS, config.name or f"{stamp}-{kind}-{world.size}x")
        if not (run / "config.json").exists():  # else it may be that of a run which is going on
            write_json(run / "config.json", config.model_dump())
    return from_rank_zero(world, run)  # type: ignore[return-value]
