"""`strategy: pipeline` through the trainer: the losses of one process, the same bits resumed, and refusals."""

from pathlib import Path
from typing import Any

import pytest

from ddp_tutorial.checkpoint.manifest import name_of
from ddp_tutorial.config import ConfigError
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.tasks import check_start, launch_training

pytestmark = pytest.mark.usefixtures("workdir")

BASE: dict[str, Any] = {
    "corpus": "stories:300",
    "model": ModelConfig(layers=3, heads=2, width=16, context=16),
    "device": "cpu",
    "steps": 4,
    "batch_size": 8,
    "warmup_steps": 2,
    "eval_every": 2,
    "eval_samples": 6,
    "clip": 0.3,  # of the norm over all stages: shortens the first gradients
}


def config_of(**values: Any) -> TaskConfig:
    return TaskConfig.model_validate(BASE | values)


@pytest.mark.timeout(240)
def test_training_has_the_losses_of_one_process_on_one_pipeline_and_on_two() -> None:
    one = launch_training(config_of(nprocs=1, name="one"), echo=False)
    for name, nprocs, pipeline in [
        ("1f1b", 2, {"micro_batches": 4}),
        ("mesh", 4, {"micro_batches": 2, "schedule": "gpipe", "cuts": ["blocks.1"]}),
    ]:
        mesh = {"replicate": nprocs // 2, "pipeline": 2}
        config = config_of(nprocs=nprocs, name=name, strategy="pipeline", mesh=mesh, pipeline=pipeline)
        result = launch_training(config, echo=False)
        assert result.losses == pytest.approx(one.losses, abs=1e-4), name
        assert result.evaluations[4]["loss"] == pytest.approx(one.evaluations[4]["loss"], abs=1e-4), name


@pytest.mark.timeout(240)
def test_a_resumed_pipeline_ends_with_the_same_bits() -> None:
    values = {
        "strategy": "pipeline",
        "pipeline": {"micro_batches": 4, "schedule": "interleaved", "per_rank": 2},
        "model": ModelConfig(layers=3, heads=2, width=16, context=16, dropout=0.1),
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    whole = launch_training(config_of(name="whole", **values), echo=False)
    at = Path("runs/whole/checkpoints") / name_of(2)
    resumed = launch_training(config_of(name="resumed", resume=str(at), **values), echo=False)
    assert resumed.losses == whole.losses
    assert resumed.weights == whole.weights


@pytest.mark.parametrize(
    ("values", "ranks", "said"),
    [
        ({"mesh": {"pipeline": 2}}, 3, "the world has 3 ranks, and a mesh of pipeline 2 has a whole multiple of 2"),
        ({"mesh": {"replicate": 2, "pipeline": 2}}, 2, "has 2 ranks, and a mesh of replicate 2 x pipeline 2 has 4"),
        ({"pipeline": {"micro_batches": 3}}, 4, "as many micro-batches as ranks, 4"),
        ({"pipeline": {"micro_batches": 7}}, 7, "7 stages, and only 6 modules"),
        ({"pipeline": {"cuts": ["block.1"]}}, 2, "no module of the chain is called 'block.1'"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_ranks_start(values: dict, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check_start(config_of(strategy="pipeline", **values), ranks)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "pipeline", "accumulation": 2}, "which has 'pipeline.micro_batches'"),
        (
            {"strategy": "ddp", "pipeline": {"per_rank": 4}},
            "'pipeline.per_rank' is an option of strategy pipeline, not of ddp",
        ),
        ({"strategy": "zero3", "mesh": {"pipeline": 2}}, "'mesh.pipeline' is an option of strategy pipeline, not of"),
        (
            {"strategy": "ddp", "mesh": {"replicate": 2}},
            "'mesh.replicate' is an option of strategies zero1, zero2, zero3 and fsdp, and pipeline, not of ddp",
        ),
        (
            {"strategy": "pipeline", "mesh": {"pipeline": 4}, "pipeline": {"micro_batches": 3}},
            "as many micro-batches as ranks",
        ),
    ],
)
def test_options_that_a_strategy_does_not_have_are_refused(values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_of(**values)
