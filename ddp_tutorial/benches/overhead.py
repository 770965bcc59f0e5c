"""Compare the Trainer, including logging, clipping and a schedule, with a hand-written loop that uses PyTorch's DDP.

Arms:
    default: The Trainer with its default settings. Gloo all-reduces the gradients, as in the bare loop.
    shared_memory: The Trainer with `ddp.shared_memory`, for two ranks on one host.
    bare: The hand-written loop.
    bare_without_loss: The hand-written loop without loss reporting. This arm does less work than the other arms,
        and serves as a reference.

Every arm except `bare_without_loss` reports the global mean loss of every step, which requires one small all-reduce.
"""

import math
import tempfile
from collections.abc import Callable
from contextlib import chdir
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.experiments.arms import medians, run_interleaved
from ddp_tutorial.phases import observe
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.corpus import load_corpus
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.training.optimization import make_scheduler, parameter_groups
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World

# Name -> (model, samples per rank per step, steps per repeat). A turn of all arms takes one to two seconds.
_SIZES = {
    "tiny": (ModelConfig(layers=1, heads=1, width=16, context=64), 8, 200),
    "small": (ModelConfig(layers=2, heads=4, width=64, context=64), 8, 100),
    "large": (ModelConfig(layers=4, heads=4, width=128, context=64), 8, 40),
}
_ARMS = ("default", "shared_memory", "bare", "bare_without_loss")
_NOTE = "Every arm except bare_without_loss reports the global mean loss of every step."


def measure(repeats: int) -> dict[str, Any]:
    """Measure each arm's tokens per second on two single-threaded ranks, for three model sizes.

    Each repeat starts new ranks, because the memory layout of a process affects its speed by several percent.
    """
    samples: Samples = {f"{arm}_{size}": [] for size in _SIZES for arm in _ARMS}
    for _ in range(repeats):
        for size, (model, per_rank, steps) in _SIZES.items():
            config = TaskConfig(model=model, batch_size=2 * per_rank, steps=2 * steps, eval_every=2 * steps)
            for arm, rate in launch(_alternate, 2, config, steps, device="cpu", threads=1, echo=False)[0].items():
                samples[f"{arm}_{size}"].append(rate)
    ratios = {
        f"{arm}_vs_bare_{size}": (f"{arm}_{size}", f"bare_{size}")
        for arm in ("default", "shared_memory")
        for size in _SIZES
    }
    return report("overhead", samples, "tokens/s", ratios) | {"note": _NOTE}


def _alternate(world: World, config: TaskConfig, steps: int) -> dict[str, float]:
    """Return each arm's tokens per second, computed from the arm's median step time. Collective.

    A turn contains `log_every` steps, so the Trainer writes its log once per turn. The turns of the arms alternate, so
    that background load affects all arms equally.
    """
    tokens = config.batch_size * config.model.context
    in_memory = config.model_copy(update={"ddp": DDPConfig(shared_memory=True)})
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # for the Trainers' logs
        trainers = {"default": make_trainer(config, world), "shared_memory": make_trainer(in_memory, world)}
        arms: dict[str, Callable[[], object]] = {
            **{name: _observed(trainer) for name, trainer in trainers.items()},
            "bare": reporting(world, bare_loop(world, config)),
            "bare_without_loss": bare_loop(world, config),
        }
        for trainer in trainers.values():
            trainer.log.open()  # as `train` does
        turns = run_interleaved(world, arms, config.log_every, steps // config.log_every)
        for trainer in trainers.values():
            trainer.log.close()
    return {name: tokens / median["step"] for name, median in medians(turns).items()}


def _observed(trainer: Trainer) -> Callable[[], None]:
    """Return a function that runs a step of `trainer` and times the step's phases, as `train` does."""

    def step() -> None:
        with observe(trainer.record.watch):
            trainer.step()

    return step


def reporting(world: World, step: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a function that runs `step` and also records the mean of the ranks' losses."""
    losses: list[float] = []

    def step_and_report() -> None:
        loss = step()
        dist.all_reduce(loss)
        losses.append(loss.item() / world.size)

    return step_and_report


def bare_loop(world: World, config: TaskConfig, *, compiled: bool = False) -> Callable[[], torch.Tensor]:
    """Return a plain torch step function, which returns this rank's loss and neither logs nor records phases.

    If `compiled` is true, DDP wraps the model first, and `torch.compile` then compiles the wrapper.
    """
    torch.manual_seed(config.seed)
    context, per_rank = config.model.context, config.batch_size // world.size
    tokens = load_corpus(config.corpus).train
    model = GPT(**config.model.size)
    ddp: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp = torch.compile(ddp) if compiled else ddp
    rate = config.peak_learning_rate
    optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=rate, betas=(0.9, 0.95), fused=True)
    scheduler = make_scheduler(optimizer, config)
    order = torch.randperm((len(tokens) - 1) // context)[world.rank :: world.size]
    window = torch.arange(context + 1)
    cursor = 0

    def step() -> torch.Tensor:
        nonlocal cursor
        batch = tokens[order[cursor : cursor + per_rank, None] * context + window].long()
        cursor += per_rank
        loss = F.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    return step
