"""Train a small GPT on any number of ranks. The loop, `Trainer.train` and `advance`, is meant to be read on one screen.

    config = TrainConfig(steps=100)
    results = launch(train, 2, config)      # two processes; or launch(train, 1, config), the same run on one

One process and N ranks do the same work: `batch_size` counts the samples of a step over all ranks.
"""

import math
import re
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator

from ddp_tutorial.accumulation import Batch, blame, next_token, split
from ddp_tutorial.checkpoint import Check, Checkpointer, Component, RandomState, StateOf
from ddp_tutorial.collectives import assert_same, digest, from_rank_zero, rank_zero_first
from ddp_tutorial.config import Config, ConfigError
from ddp_tutorial.corpus import load_corpus
from ddp_tutorial.data import Windows
from ddp_tutorial.ddp import DDPConfig
from ddp_tutorial.dice import reseed, seed_of
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import RUNS, directory_written_atomically, new_directory, write_json
from ddp_tutorial.invariant import InvariantStrategy
from ddp_tutorial.launcher import launch
from ddp_tutorial.manifest import CHECKPOINTS
from ddp_tutorial.metrics import Mean, StepLog, mean_over_ranks, without_nan
from ddp_tutorial.model import GPT, loss_sum
from ddp_tutorial.phases import Stopwatch, observe, phase
from ddp_tutorial.precision import NotFiniteError, Precision, PrecisionConfig
from ddp_tutorial.rank import progress
from ddp_tutorial.resuming import claimed_by_rank_zero, find_checkpoint
from ddp_tutorial.sharded import Share, to_device
from ddp_tutorial.sharding import deal
from ddp_tutorial.sources import SourceConfig, make_source
from ddp_tutorial.stopping import SIGNALS, Stopping, Wish
from ddp_tutorial.strategy import DDPStrategy, Strategy
from ddp_tutorial.world import World, require_group


class ModelConfig(Config):
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(128, ge=1)
    context: int = Field(128, ge=1, description="tokens that the model sees at once")
    dropout: float = Field(0.0, ge=0, lt=1)
    recompute: bool = Field(False, description="activations of a block in backward, instead of keeping them")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"'model.width' {self.width} should be a multiple of 'model.heads' {self.heads}")
        return self


class CheckpointConfig(Config):
    """When the state of a run is saved, and what is kept."""

    every: int = Field(0, ge=0, description="steps between saves, with one at the end; 0 for none")
    keep_last: int = Field(2, ge=1)
    keep_best: int = Field(0, ge=0, description="by the metric `best`, besides the last ones")
    best: str = "eval_loss"
    best_is: Literal["min", "max"] = "min"
    check: Check = Field("tensor", description="that ranks are equal before it is written; none, quick, tensor, full")
    background: bool = Field(False, description="training waits for a copy in memory only, not for the disk")


class TrainConfig(Config):
    """Everything that decides what a run does. Same config, same world size, same machine: same bits."""

    name: str = Field("", description="folder below runs/; by default made from corpus and time")
    corpus: str = "python"
    model: ModelConfig = ModelConfig()
    seed: int = Field(0, ge=0, lt=2**31)

    nprocs: int = Field(2, ge=1, description="ranks to start on this machine; torchrun and Slurm have their own say")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    strategy: Literal["ddp", "invariant"] = "ddp"
    ddp: DDPConfig = DDPConfig()
    micro_batches: int = Field(4, ge=1, description="strategy invariant only: of a step, over all ranks")
    accumulation: int = Field(1, ge=1, description="strategy ddp only: micro-batches of a step, on each rank")
    source: SourceConfig = SourceConfig()
    precision: PrecisionConfig = PrecisionConfig()

    steps: int = Field(200, ge=1)
    batch_size: int = Field(16, ge=1, description="samples in one optimiser step, over all ranks")
    learning_rate: float = Field(3e-3, gt=0, description="the highest; of a batch of `learning_rate_batch`, if scaled")
    learning_rate_rule: Literal["fixed", "linear", "sqrt"] = Field("fixed", description="how it grows with batch_size")
    learning_rate_batch: int = Field(16, ge=1, description="batch_size that learning_rate was chosen for")
    warmup_steps: int = Field(20, ge=0, description="steps in which the learning rate rises from zero")
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="at the last step, as a part of the highest")
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")

    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: str = Field("never", description="never; auto: from the run's own last checkpoint; or the path of one")
    resume_allow: tuple[str, ...] = Field(
        (), strict=False, description="settings that may differ from the checkpoint's"
    )
    resume_without: tuple[str, ...] = Field((), strict=False, description="components to begin anew, such as optimizer")

    log_every: int = Field(10, ge=1, description="steps between writes to the log, which holds every step")
    eval_every: int = Field(50, ge=1)
    eval_samples: int = Field(256, ge=1, description="held-out samples in one evaluation, over all ranks")

    @model_validator(mode="after")
    def _options_belong_to_the_strategy(self) -> "TrainConfig":
        if self.strategy == "invariant" and self.source.kind == "streamed":
            raise ValueError("'strategy' invariant needs samples by number: use another 'source.kind' than streamed")
        if self.strategy == "invariant" and self.accumulation != 1:
            raise ValueError("'accumulation' is of strategy ddp; invariant has 'micro_batches', over all ranks")
        return self

    @model_validator(mode="after")
    def _can_be_resumed(self) -> "TrainConfig":
        if self.resume == "auto" and not self.name:
            raise ValueError("'resume' auto goes on with the run of the same 'name': give it one")
        if self.checkpoint.every and self.ddp.hook == "powersgd":
            raise ValueError("'ddp.hook' powersgd keeps what it has left out in memory, and no checkpoint has it")
        return self

    @field_validator("name")
    @classmethod
    def _stays_below_runs(cls, name: str) -> str:
        if not re.fullmatch(r"([\w][\w.-]*(/[\w][\w.-]*)*)?", name):
            raise ValueError(
                f"'name' {name!r} should be a folder below runs/, of letters, digits, '-', '_', '.' and '/'"
            )
        return name


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
        if world.is_main and config.learning_rate_rule != "fixed":
            print(
                f"learning rate {highest_learning_rate(config):g}: {config.learning_rate:g}, scaled from batch_size "
                f"{config.learning_rate_batch} to {config.batch_size} by the rule {config.learning_rate_rule!r}"
            )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor(config))
        self.watch = Stopwatch()
        self.step = 0
        self.eval_losses: dict[int, float] = {}
        self.run = _open_run(world, config)
        tokens = config.batch_size * config.model.context
        self.log = StepLog(world, self.run / "metrics.jsonl", tokens)
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
            stack.enter_context(observe(self.watch))
            stack.enter_context(self.stopping.listening())
            self.resume()
            while self.step < self.config.steps and not wish:
                self.advance()
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
        rate = float(self.scheduler.get_last_lr()[0])
        self.log.add(self.step, loss, norm, rate, self.watch.take(), loss_scale=self.precision.loss_scale)
        if made:  # else the rate would move on, and the weights have not
            self.scheduler.step()
        if self.due(self.config.log_every):
            self.log.flush()
            progress(self.step, self.config.steps, **self.log.latest)
        if self.due(self.config.eval_every):
            self.evaluate()
        self.checkpoints.poll()
        if self.config.checkpoint.every and self.due(self.config.checkpoint.every):
            self.save()

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
        if self.world.is_main:
            left_out = f", without {', '.join(self.config.resume_without)}" if self.config.resume_without else ""
            print(f"going on after step {manifest.step}, from {folder}{left_out}")

    def warm_up(self) -> None:
        """One backward of nothing in particular. After the first one of a process, DDP cuts its buckets anew, in the
        order in which gradients came; and in other buckets, three ranks or more add up in another order."""
        tokens = torch.zeros(1, self.config.model.context + 1, dtype=torch.int64, device=self.world.device)
        batches = [next_token(Share({"tokens": tokens}, 1, self.world.size)) for _ in range(self.parts)]
        self.strategy.backward(batches)
        self.optimizer.zero_grad()

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

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

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the first `eval_samples` held-out samples, each seen by exactly one rank."""
        self.log.settle()
        with phase("evaluate"), self.log.paused():
            self.model.eval()
            count = min(self.config.eval_samples, len(self.held_out))
            mine = deal(np.arange(count), self.world.rank, self.world.size)
            loss = Mean(torch.zeros((), device=self.world.device), 0)
            size = max(1, self.config.batch_size // self.world.size)
            for start in range(0, len(mine), size):
                indices = mine[start : start + size]
                samples = to_device(self.held_out.fetch(indices), self.world.device)
                batch = next_token(Share(samples, len(indices), count))
                with self.precision.autocast():
                    loss += Mean(loss_sum(self.model(batch.inputs), batch.targets), batch.tokens)
            self.model.train()
            [value] = mean_over_ranks(self.world, [loss])
        self.eval_losses[self.step] = value
        self.log.write({"step": self.step, "eval_loss": value, "seconds": self.watch.take()})
        return value

    def finish(self) -> TrainResult:
        """Check that the ranks ended up with the same weights; rank 0 writes the model, and the result last."""
        weights = self.model.state_dict()
        assert_same(self.world, weights, "weight")
        self.checkpoints.finish()
        self.checkpoints.close()
        self.source.close()
        self.log.close()
        result = TrainResult(
            run=self.run,
            losses=self.log.losses,
            eval_losses=self.eval_losses,
            tokens_per_second=statistics.median(self.log.rates[1:] or self.log.rates or [0.0]),  # the first warms up
            weights=digest(weights),
            stopped_at=self.step if self.step < self.config.steps else None,
        )
        if self.world.is_main:
            shutil.rmtree(self.run / "model", ignore_errors=True)  # of before it was resumed
            with directory_written_atomically(self.run / "model") as folder:
                self.model.save_pretrained(folder)
            write_json(self.run / "result.json", self.summary(result))
        return result

    def summary(self, result: TrainResult) -> dict[str, Any]:
        """What `result.json` says."""
        return {
            "schema": 1,
            "status": "finished" if result.stopped_at is None else "stopped",
            "step": self.step,
            "parameters": self.config.model_dump(),
            "world_size": self.world.size,
            "environment": describe_environment(),
            "metrics": without_nan(
                {
                    "loss": result.losses[-1],
                    "eval_loss": self.eval_losses.get(self.step),
                    "tokens_per_second": round(result.tokens_per_second, 1),
                    "weights": result.weights,
                }
            ),
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


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019). Decay is for matrices; norms and biases are left to themselves."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=highest_learning_rate(config), betas=(0.9, 0.95), fused=True)


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
    """A line up over the warm-up, then a cosine down to `final_lr_fraction` at the last step."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
        low = config.final_lr_fraction
        return low + (1 - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2

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
