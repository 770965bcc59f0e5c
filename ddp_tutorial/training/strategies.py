"""The strategy that a config names."""

from torch import nn

from ddp_tutorial.accumulation.invariant import InvariantStrategy, require_even_shares
from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategies import DDPStrategy, Strategy
from ddp_tutorial.ddp.variants import make_link
from ddp_tutorial.local.strategies import DiLoCo, LocalSGD, PostLocalSGD
from ddp_tutorial.pipeline.strategy import PipelineStrategy, require_even_micro_batches
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.world import World


def make_strategy(
    config: TrainConfig, model: nn.Module, world: World, loss: Loss, precision: Precision | None = None
) -> Strategy:
    """The strategy that `config` names, with its settings from there. Collective."""
    precision = precision or Precision(config.precision, world)
    match config.strategy:
        case "invariant":
            return InvariantStrategy(model, world, loss, config.micro_batches, config.seed, precision=precision)
        case "pipeline":
            return PipelineStrategy(model, world, loss, config.pipeline, config.seed, precision)
        case "local_sgd" | "post_local_sgd" | "diloco" as name:
            kind = {"local_sgd": LocalSGD, "post_local_sgd": PostLocalSGD, "diloco": DiLoCo}[name]
            link = make_link(config.ddp, world)
            return kind(model, world, loss, config.local, link, accumulation=config.accumulation, precision=precision)
        case "zero2":
            from ddp_tutorial.zero.strategies import Zero2Strategy

            return Zero2Strategy(model, world, loss, config.accumulation, precision)
        case "zero3":
            from ddp_tutorial.zero.strategies import Zero3Strategy

            return Zero3Strategy(model, world, loss, config.accumulation, precision)
        case "fsdp":
            from ddp_tutorial.zero.fsdp import FSDPStrategy  # these rooms take a while to import

            return FSDPStrategy(model, world, loss, config.accumulation, precision)
        case "zero1":
            from ddp_tutorial.zero.strategies import Zero1Strategy

            return Zero1Strategy(model, world, loss, config.ddp, accumulation=config.accumulation, precision=precision)
        case "ddp":
            return DDPStrategy(
                model,
                world,
                loss,
                config.ddp,
                accumulation=config.accumulation,
                precision=precision,
                agree_on_memory=config.oom_skips > 0,
            )


def micro_batches_per_rank(config: TrainConfig, world_size: int) -> int:
    """How many micro-batches of a step each rank computes, known without a model. Raises `ConfigError` where they
    cannot be shared out."""
    if config.strategy == "pipeline":
        return require_even_micro_batches(config.pipeline)
    if config.strategy != "invariant":
        return config.accumulation
    require_even_shares(config.micro_batches, world_size)
    return config.micro_batches // world_size
