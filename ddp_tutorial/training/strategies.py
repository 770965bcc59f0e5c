"""Build the strategy that a config specifies."""

from torch import nn

from ddp_tutorial.accumulation.accelerate_strategy import AccelerateStrategy
from ddp_tutorial.accumulation.invariant import InvariantStrategy, require_even_shares
from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.accumulation.strategy import Strategy
from ddp_tutorial.ddp.wrappers import make_link
from ddp_tutorial.local_sgd.config import OPTIONS as LOCAL
from ddp_tutorial.local_sgd.strategies import DiLoCo, LocalSGD, PostLocalSGD
from ddp_tutorial.mesh import Mesh, make_mesh
from ddp_tutorial.pipeline.config import PipelineConfig
from ddp_tutorial.pipeline.parallel import require_even_micro_batches
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.world import World


def make_strategy(
    config: TrainConfig, model: nn.Module, world: World, loss: Loss, precision: Precision | None = None
) -> Strategy:
    """Return the strategy that `config` describes. Collective."""
    precision = precision or Precision(config.precision, world)
    match config.strategy:
        case "invariant":
            return InvariantStrategy(model, world, loss, config.micro_batches, config.seed, precision=precision)
        case "pipeline":
            # The import takes half a second, because of DTensor.
            from ddp_tutorial.pipeline.strategy import PipelineStrategy

            stages = pipeline_of(config, world.size)
            return PipelineStrategy(model, world, loss, stages, config.seed, precision, config.accumulation)
        case "local_sgd" | "post_local_sgd" | "diloco" as name:
            kind = {"local_sgd": LocalSGD, "post_local_sgd": PostLocalSGD, "diloco": DiLoCo}[name]
            link = make_link(config.ddp, world)
            return kind(model, world, loss, config.local, link, accumulation=config.accumulation, precision=precision)
        case "zero2":
            from ddp_tutorial.zero.strategies import Zero2Strategy

            return Zero2Strategy(model, world, loss, config.accumulation, precision, mesh_of(config, world.size))
        case "zero3":
            from ddp_tutorial.zero.strategies import Zero3Strategy

            return Zero3Strategy(model, world, loss, config.accumulation, precision, mesh_of(config, world.size))
        case "fsdp":
            from ddp_tutorial.zero.fsdp import FSDPStrategy

            return FSDPStrategy(model, world, loss, config.accumulation, precision, mesh_of(config, world.size))
        case "zero1":
            from ddp_tutorial.zero.strategies import Zero1Strategy

            return Zero1Strategy(
                model,
                world,
                loss,
                config.ddp,
                accumulation=config.accumulation,
                precision=precision,
                mesh=mesh_of(config, world.size),
                compilation=config.compile,
            )
        case "accelerate":
            return AccelerateStrategy(
                model, world, loss, config.ddp, accumulation=config.accumulation, precision=precision
            )
        case "ddp":
            return DDPStrategy(
                model,
                world,
                loss,
                config.ddp,
                accumulation=config.accumulation,
                precision=precision,
                agree_on_memory=config.oom_skips > 0,
                compilation=config.compile,
            )


def mesh_of(config: TrainConfig, world_size: int) -> Mesh:
    """Return the number of model replicas and the number of ranks per replica, for `world_size` ranks.

    Raises:
        ConfigError: If the config's mesh does not fit the world size.
    """
    if config.strategy in {"ddp", "invariant", "accelerate", *LOCAL}:
        return Mesh(world_size, 1)
    return make_mesh(config.mesh, world_size, "pipeline" if config.strategy == "pipeline" else "shard")


def pipeline_of(config: TrainConfig, world_size: int) -> PipelineConfig:
    """Return the pipeline's config. Raise `ConfigError` if the pipeline does not fit `world_size` ranks."""
    return config.pipeline.on(mesh_of(config, world_size).span)


def micro_batches_per_rank(config: TrainConfig, world_size: int) -> int:
    """Return the number of micro-batches per step on each rank, without building a model.

    Raises:
        ConfigError: If the micro-batches cannot be distributed evenly among the ranks.
    """
    if config.strategy == "pipeline":
        return config.accumulation * require_even_micro_batches(pipeline_of(config, world_size))
    if config.strategy != "invariant":
        return config.accumulation
    require_even_shares(config.micro_batches, world_size)
    return config.micro_batches // world_size
