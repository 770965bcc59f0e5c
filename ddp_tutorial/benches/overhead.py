"""The Trainer, with its logging, clipping and schedule, against a loop over torch's DDP written by hand."""

import tempfile
from collections.abc import Callable
from contextlib import chdir
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.experiments.arms import by_repeat, take_turns
from ddp_tutorial.phases import observe
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.corpus import load_corpus
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.training.optimization import groups_of, make_scheduler
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World

# Name -> (model, samples a rank and step, steps a repeat). The steps make a repeat last about a second or two.
_SIZES = {
    "tiny": (ModelConfig(layers=1, heads=1, width=16, context=64), 8, 200),
    "small": (ModelConfig(layers=2, heads=4, width=64, context=64), 8, 100),
    "large": (ModelConfig(layers=4, heads=4, width=128, context=64), 8, 40),
}


def measure(repeats: int) -> dict[str, Any]:
    """Tokens per second of both, two ranks with one thread each, for three sizes of model."""
    samples: Samples = {}
    for size, (model, per_rank, steps) in _SIZES.items():
        total_steps = steps * (repeats + 1)
        config = TaskConfig(model=model, batch_size=2 * per_rank, steps=total_steps, eval_every=total_steps)
        rates = launch(_alternate, 2, config, repeats, steps, device="cpu", threads=1, echo=False)[0]
        samples |= {f"{arm}_{size}": values for arm, values in rates.items()}
    ratios = {f"trainer_vs_bare_{size}": (f"trainer_{size}", f"bare_{size}") for size in _SIZES}
    return report("overhead", samples, "tokens/s", ratios)


def _alternate(world: World, config: TaskConfig, repeats: int, steps: int) -> Samples:
    """Tokens per second of both in each repeat, after one that is not counted.

    The two take turns every `log_every` steps, which is how long the Trainer needs to do each of its chores once:
    whatever slows the machine down for a second falls on both. A repeat counts with the median of its turns.
    """
    tokens = config.batch_size * config.model.context
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # the Trainer's log goes there
        trainer = make_trainer(config, world)
        arms: dict[str, Callable[[], object]] = {"trainer": trainer.step, "bare": _bare_loop(world, config)}
        with observe(trainer.record.watch):
            turns = take_turns(world, arms, config.log_every, repeats * steps // config.log_every)
        trainer.log.close()
    return {name: [tokens / seconds for seconds in by_repeat(turns[name], repeats)] for name in arms}


def _bare_loop(world: World, config: TaskConfig) -> Callable[[], object]:
    """One step of what one writes with torch alone: no log, no phases, the loss not reduced over ranks."""
    torch.manual_seed(config.seed)
    context, per_rank = config.model.context, config.batch_size // world.size
    tokens = load_corpus(config.corpus).train
    model = GPT(**config.model.model_dump())
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rate = config.peak_learning_rate
    optimizer = torch.optim.AdamW(groups_of(model, config), lr=rate, betas=(0.9, 0.95), fused=True)
    scheduler = make_scheduler(optimizer, config)
    order = torch.randperm((len(tokens) - 1) // context)[world.rank :: world.size]
    window = torch.arange(context + 1)
    cursor = 0

    def step() -> None:
        nonlocal cursor
        batch = tokens[order[cursor : cursor + per_rank, None] * context + window].long()
        cursor += per_rank
        loss = F.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return step
