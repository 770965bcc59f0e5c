"""`strategy: pipeline` through the trainer: the losses of one process, the same bits resumed, and refusals."""

import gc
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_tutorial.checkpoint.manifest import checkpoint_name
from ddp_tutorial.collectives import digest
from ddp_tutorial.config import ConfigError
from ddp_tutorial.pipeline import timing
from ddp_tutorial.pipeline.config import PipelineConfig
from ddp_tutorial.pipeline.parallel import Pipeline, require_cuts
from ddp_tutorial.pipeline.stages import even_splits, splits_of
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.config import SourceConfig
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import ModelConfig, TaskConfig, TrainConfig
from ddp_tutorial.training.export import load
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.training.plan import plan
from ddp_tutorial.training.tasks import check_start, launch_training, make_trainer
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World
from ranks import error_of

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


def test_one_and_two_pipelines_have_the_losses_of_one_process() -> None:
    one = launch_training(config_of(nprocs=1, name="one"), echo=False)
    for name, nprocs, accumulation, pipeline in [
        ("1f1b", 2, 1, {"micro_batches": 4}),
        ("mesh", 4, 2, {"micro_batches": 2, "schedule": "gpipe", "cuts": ["blocks.1"]}),
    ]:
        mesh = {"replicate": nprocs // 2, "pipeline": 2}
        config = config_of(
            nprocs=nprocs, name=name, strategy="pipeline", mesh=mesh, pipeline=pipeline, accumulation=accumulation
        )
        result = launch_training(config, echo=False)
        assert result.losses == pytest.approx(one.losses, abs=1e-4), name
        assert result.evaluations[4]["loss"] == pytest.approx(one.evaluations[4]["loss"], abs=1e-4), name


def test_a_resumed_pipeline_is_bitwise_identical() -> None:
    values = {
        "strategy": "pipeline",
        "pipeline": {"micro_batches": 2, "schedule": "interleaved", "per_rank": 2},
        "accumulation": 2,
        "model": ModelConfig(layers=3, heads=2, width=16, context=16, dropout=0.1),
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    whole = launch_training(config_of(name="whole", **values), echo=False)
    at = Path("runs/whole/checkpoints") / checkpoint_name(2)
    resumed = launch_training(config_of(name="resumed", resume=str(at), **values), echo=False)
    assert resumed.losses == whole.losses
    assert resumed.weights == whole.weights
    alone = config_of(name="alone", nprocs=1, resume=str(at), **values, resume_allow=["pipeline"])
    assert launch_training(alone, echo=False).losses[:2] == whole.losses[:2]  # each part is read by its current owner
    shutil.rmtree("runs/whole/model")  # as if the run had not finished
    assert digest(load("runs/whole").state_dict()) == whole.weights


class Slow(torch.nn.Linear):
    """A layer that takes ten milliseconds more than its parameters suggest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(x)


def uneven() -> torch.nn.Sequential:
    """Return a model with most parameters in the first two modules, and most time in the next two."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 4), Slow(4, 4), Slow(4, 4), torch.nn.Tanh())


def with_measured_cuts(world: World, kind: str, name: str, **settings: Any) -> tuple[list[float], list[str]]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    source = make_source(TensorDataset(x, x.sin()), 8, world, config=SourceConfig.model_validate({"kind": kind}))
    values = {"strategy": "pipeline", "pipeline": {"micro_batches": 2, "split": "measured"}, "name": name, "steps": 4}
    config = TrainConfig.model_validate(values | {"warmup_steps": 0, "checkpoint": {"every": 2}} | settings)

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    trainer = Trainer(uneven(), source, loss, world, config)
    return trainer.train().losses, trainer.settings["pipeline"]["cuts"]


def measured_and_resumed(world: World) -> list[tuple[list[float], list[str]]]:
    """Return the losses and cuts of whole runs, of a run with fixed cuts, and of a run that must not measure again."""
    runs = [with_measured_cuts(world, kind, kind) for kind in ("sharded", "dispatched")]
    fixed = {"micro_batches": 2, "cuts": ["1"]}
    runs.append(with_measured_cuts(world, "sharded", "fixed", pipeline=fixed))
    at = f"runs/sharded/checkpoints/{checkpoint_name(2)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "module_seconds", lambda *_: pytest.fail("measured again"))
        return [*runs, with_measured_cuts(world, "sharded", "resumed", resume=at)]


def test_measured_cuts_are_agreed_and_recorded_and_a_resumed_run_uses_them() -> None:
    for runs in launch(measured_and_resumed, 2, device="cpu", threads=1, echo=False, timeout=300):
        sharded, dispatched, fixed, resumed = runs
        assert sharded[1] == dispatched[1] == resumed[1] == ["3"]
        assert even_splits(uneven(), 2) == fixed[1] == ["1"]
        assert sharded[0] == resumed[0] == pytest.approx(fixed[0], abs=1e-6)
        assert dispatched[0] == pytest.approx(fixed[0], abs=1e-6)


def test_the_same_measurement_has_the_same_cuts() -> None:
    seconds = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    assert splits_of(seconds, 2) == ["d"]
    assert splits_of(seconds, 3) == ["c", "d"]
    config = PipelineConfig(micro_batches=2, split="measured")
    assert "requires a Trainer" in error_of(lambda: require_cuts(config))


def held(world: World, values: dict[str, Any]) -> dict[str, Any]:
    """What a rank has of the model and of the optimizer's state: when it is built, in evaluation, and in the end."""
    trainer = make_trainer(config_of(strategy="pipeline", **values), world)
    model, pipeline = trainer.model, trainer.train_step.strategy.pipeline  # type: ignore[attr-defined]
    seen: list[int] = []

    def elements(*_: Any) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: None if model.training else seen.append(elements()))
    built = elements()
    trainer.train()
    state = trainer.train_step.optimizer.state.values()
    return {
        "built": built,
        "evaluating": seen,
        "ended": elements(),
        "memory": sum(p.untyped_storage().nbytes() for p in model.parameters()) // 4,
        "state": sum(value.numel() for each in state for key, value in each.items() if key != "step"),
        "own": {name: parameter.numel() for name, parameter in pipeline.named.items()},
        "place": pipeline.place,
    }


def test_each_rank_keeps_weights_and_optimizer_state_of_its_stages_only() -> None:
    values = {"mesh": {"replicate": 2}, "pipeline": {"micro_batches": 2}, "checkpoint": {"every": 2}, "name": "held"}
    ranks = launch(held, 4, values, device="cpu", threads=1, echo=False, timeout=300)
    model = GPT(**BASE["model"].size)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root = sum(sizes.values()) - 3 * block
    for rank in ranks:
        own = sum(rank["own"].values())
        assert own < sum(sizes.values())
        assert rank["built"] == rank["ended"] == rank["memory"] == own
        assert rank["state"] == 2 * own
        assert rank["evaluating"]  # one block at a time, plus the parameters outside blocks
        assert max(rank["evaluating"]) <= own + root + block
    first, second = ranks[0]["own"], ranks[1]["own"]
    assert first | second == sizes
    assert set(first) & set(second) == {"tokens.weight"}  # tied: one use on each rank
    assert [rank["own"] for rank in ranks[2:]] == [first, second]
    dry = plan(config_of(strategy="pipeline", nprocs=4, **values), [])
    told = [rank["parameters"] for rank in dry["ranks_of_a_pipeline"]]
    assert told == [sum(first.values()), sum(second.values())]
    assert dry["memory_per_rank"]["weights"] == 4 * max(told)


def not_finite(world: World) -> str:
    def loss(model: Any, batch: Any) -> Any:
        total, count = next_token_loss(model, batch)
        return total * float("nan"), count

    trainer = make_trainer(config_of(strategy="pipeline", pipeline={"micro_batches": 4}), world)
    trainer.train_step.loss = trainer.train_step.strategy.pipeline.runner.loss = loss  # type: ignore[attr-defined]
    return error_of(trainer.train)


def test_a_non_finite_gradient_is_located_even_on_other_ranks() -> None:
    for told in launch(not_finite, 2, device="cpu", threads=1, echo=False, timeout=300):
        assert told.startswith("NotFiniteError: step 1: the gradient is not finite. On rank 0, the loss of micro-batch")


def left_of(world: World) -> tuple[list[str], list[str]]:
    """Which parameters are there when only the pipeline is kept, and which are its own."""
    model: Any = GPT(**BASE["model"].size)
    pipeline = Pipeline(model, world, next_token_loss, PipelineConfig(micro_batches=2))
    there = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    del model
    gc.collect()
    return [name for name, each in there.items() if each() is not None], sorted(pipeline.named)


def test_a_pipeline_without_its_model_keeps_only_its_own_stages() -> None:
    for left, own in launch(left_of, 2, device="cpu", threads=1, echo=False):
        assert sorted(left) == own


@pytest.mark.parametrize(
    ("values", "ranks", "said"),
    [
        ({"mesh": {"pipeline": 2}}, 3, "the number of ranks must be a multiple of 2 for mesh pipeline 2, got 3"),
        (
            {"mesh": {"replicate": 2, "pipeline": 2}},
            2,
            "the number of ranks must be 4 for mesh replicate 2 x pipeline 2, got 2",
        ),
        ({"pipeline": {"micro_batches": 3}}, 4, r"at least 4 micro-batches \(one per rank\), got 3"),
        ({"pipeline": {"micro_batches": 7}}, 7, "7 stages require at least 7 modules, got 6"),
        ({"pipeline": {"cuts": ["block.1"]}}, 2, "a stage must begin at a module of the model, got 'block.1'"),
    ],
)
def test_an_impossible_pipeline_is_rejected_before_ranks_start(values: dict, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check_start(config_of(strategy="pipeline", **values), ranks)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"strategy": "ddp", "pipeline": {"per_rank": 4}},
            "'pipeline.per_rank' requires strategy=pipeline, got strategy=ddp",
        ),
        ({"strategy": "zero3", "mesh": {"pipeline": 2}}, "'mesh.pipeline' requires strategy=pipeline, got strategy="),
        (
            {"strategy": "ddp", "mesh": {"replicate": 2}},
            "'mesh.replicate' requires strategy=zero1, zero2, zero3, fsdp or pipeline, got strategy=ddp",
        ),
        (
            {"strategy": "pipeline", "mesh": {"pipeline": 4}, "pipeline": {"micro_batches": 3}},
            r"at least 4 micro-batches \(one per rank\)",
        ),
    ],
)
def test_options_that_a_strategy_does_not_have_are_rejected(values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_of(**values)
