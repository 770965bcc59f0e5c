"""Choose pipeline cuts for `pipeline.split=measured`, and record the cuts in the run's setting `pipeline.cuts`.

A resumed run uses the recorded cuts and does not repeat the measurement.
"""

from collections.abc import Sequence

from torch import nn

from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.checkpoint.resuming import find_resume_point
from ddp_tutorial.collectives import decide_on_rank_zero
from ddp_tutorial.files import RUNS
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.strategies import micro_batches_per_rank, pipeline_of
from ddp_tutorial.world import World


def is_unmeasured(config: TrainConfig, ranks: int) -> bool:
    """Return whether `config` requires cuts that have not been measured yet."""
    if config.strategy != "pipeline" or config.pipeline.split != "measured" or config.pipeline.cuts:
        return False
    return pipeline_of(config, ranks).stages > 1


def with_recorded_cuts(config: TrainConfig, world: World, ranks: int) -> TrainConfig:
    """Return `config` with the pipeline cuts that are recorded in the checkpoint from which the run resumes.

    Collective. If the recorded cuts do not match the number of stages on `ranks` ranks, return `config` unchanged.
    """
    if not is_unmeasured(config, ranks):
        return config
    allow = (*config.resume_allow, "pipeline.cuts")
    settings, shared = config.model_dump(mode="json"), config.checkpoint.shared
    start = find_resume_point(world, RUNS / config.name, config.resume, settings, allow, shared=shared)
    cuts = start.settings.get("pipeline", {}).get("cuts", ())
    return with_cuts(config, cuts) if len(cuts) == pipeline_of(config, ranks).stages - 1 else config


def with_measured_cuts(config: TrainConfig, model: nn.Module, source: Source, loss: Loss, world: World) -> TrainConfig:
    """Return `config` with the recorded cuts if the run resumes. Otherwise, rank 0 measures the cuts. Collective.

    The measurement uses rank 0's first micro-batch. The position of `source` does not change.
    """
    config = with_recorded_cuts(config, world, world.size)
    if not is_unmeasured(config, world.size):
        return config
    start = source.state_dict()
    batch = source.take(micro_batches_per_rank(config, world.size))[0].samples
    source.load_state_dict(start)
    stages, precision = pipeline_of(config, world.size).stages, Precision(config.precision, world)

    def measure() -> list[str]:
        from ddp_tutorial.pipeline.timing import measured_splits

        return measured_splits(model.to(world.device), loss, batch, stages, precision)

    return with_cuts(config, decide_on_rank_zero(world, measure))


def with_cuts(config: TrainConfig, cuts: Sequence[str]) -> TrainConfig:
    """Return a copy of `config` with the given pipeline cuts."""
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"cuts": tuple(cuts)})})
