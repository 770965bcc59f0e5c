"""Create random text, and GPT training steps on this text, for several benchmarks."""

from typing import Any

import torch

from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.sharding.samples import TokenBlocks
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import ModelConfig, TrainConfig
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.training.optimization import OptimizerLike
from ddp_tutorial.training.step import make_train_step
from ddp_tutorial.world import World

CONTEXT = 64  # tokens per sample
LARGE = ModelConfig(layers=6, heads=4, width=256, context=CONTEXT)  # about 5 million parameters
SMALL = ModelConfig(layers=4, heads=4, width=128, context=CONTEXT)  # about 0.8 million


def random_text(samples: int) -> TokenBlocks:
    """Return samples of random bytes; the contents do not affect the speed."""
    generator = torch.Generator().manual_seed(0)
    return TokenBlocks(torch.randint(256, (samples * CONTEXT + 1,), dtype=torch.uint8, generator=generator), CONTEXT)


def gpt_step(
    source: Source,
    team: World,
    model: ModelConfig = SMALL,
    *,
    optimizer: OptimizerLike | None = None,
    **settings: Any,
) -> TrainStep:
    """Return a training step of a GPT on the samples of `source`.

    The gradients are averaged over `team`, which may differ from the world that shards the samples. If the team is a
    single rank, the rank trains on its shard like an independent process. `settings` are settings of `TrainConfig`.
    """
    torch.manual_seed(0)
    config = TrainConfig(**{"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant", "clip": 1.0, **settings})
    return make_train_step(GPT(**model.size), source, next_token_loss, team, config, optimizer=optimizer)


def random_step(world: World, samples_per_rank: int, model: ModelConfig = LARGE, **settings: Any) -> TrainStep:
    """Return a training step of a GPT on random text with `samples_per_rank` samples per step on each rank."""
    batch = samples_per_rank * world.size
    return gpt_step(make_source(random_text(64 * batch), batch, world), world, model, **settings)
