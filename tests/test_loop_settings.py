"""The model that a loss function receives, and the evaluation on test samples."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from commands import call
from ddp_tutorial.commands.slurm_script import slurm_script
from ddp_tutorial.config import ConfigError
from ddp_tutorial.intervals import is_due, times_due
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.trainer import Trainer, with_steps
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

STRATEGIES: dict[str, dict[str, Any]] = {
    "torch": {},
    "bucket": {"ddp": {"variant": "bucket"}, "accumulation": 2},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp": {"strategy": "fsdp"},
    "invariant": {"strategy": "invariant"},
    "local_sgd": {"strategy": "local_sgd", "local": {"round": 1}},
    "accelerate": {"strategy": "accelerate"},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(3, 4), nn.Linear(4, 1), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self(x)


def data_of(samples: int) -> TensorDataset:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def trainer_of(world: World, model: nn.Module, loss: Any = loss, test: int = 0, **settings: Any) -> Trainer:
    config = TrainConfig.model_validate({"steps": 2, "warmup_steps": 0} | settings)
    source, test_data = make_source(data_of(16), 8, world), data_of(test) if test else None
    return Trainer(model, source, loss, world, config, validation_data=data_of(6), test_data=test_data)


def models_seen(world: World) -> dict[str, set[tuple[bool, bool, bool]]]:
    """Return for each strategy: whether the model trains, has the user's class, and has the parameters' names."""
    found: dict[str, set[tuple[bool, bool, bool]]] = {}
    for name, settings in STRATEGIES.items():
        torch.manual_seed(0)
        seen = found[name] = set()

        def encoded_loss(model: Any, batch: Any, seen: set[tuple[bool, bool, bool]] = seen) -> Any:
            names = [each for each, _ in model.named_parameters()]
            seen.add((model.training, isinstance(model, Model), names[0] == "body.weight"))
            return F.mse_loss(model.encode(batch[0]), batch[1], reduction="sum"), len(batch[0])

        trainer_of(world, Model(), encoded_loss, **settings).train()
    return found


def modules_seen_in_a_pipeline(world: World) -> set[bool]:
    seen = set()

    def checked_loss(model: Any, batch: Any) -> Any:
        seen.add(isinstance(model, nn.Module) and isinstance(model.training, bool))
        return loss(model, batch)

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    trainer_of(world, model, checked_loss, strategy="pipeline", pipeline={"micro_batches": 2, "cuts": ["1"]}).train()
    return seen


def on_two_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"models": models_seen(world), "pipeline": modules_seen_in_a_pipeline(world)}
    for name, settings in {"tested": {}, "skipped": {"run_test": False}}.items():
        torch.manual_seed(0)
        found[name] = trainer_of(world, Model(), test=7, name=name, **settings).train().test
    found["without data"] = error_of(lambda: trainer_of(world, Model(), run_test=True))
    return found


def test_test_samples_are_evaluated_once_with_the_users_module() -> None:
    ranks = launch(on_two_ranks, 2, device="cpu", echo=False)
    for found in ranks:
        for name, seen in found["models"].items():
            assert {of_class for _, of_class, _ in seen} == {True}, name
            assert {training for training, _, _ in seen} == {True, False}, name
            assert name == "zero3" or {named for _, _, named in seen} == {True}, name
        assert found["pipeline"] == {True}
        assert found["tested"].keys() == {"loss"}
        assert found["tested"] == ranks[0]["tested"]
        assert found["skipped"] == {}
        assert "'run_test' requires test samples; pass test_data to Trainer" in found["without data"]
    summary = json.loads(Path("runs/tested/result.json").read_text())
    assert summary["metrics"]["test_loss"] == ranks[0]["tested"]["loss"]
    assert summary["epoch"] == 1
    assert "test_loss" not in json.loads(Path("runs/skipped/result.json").read_text())["metrics"]


def test_a_round_is_compared_with_the_steps_of_the_epochs() -> None:
    settings = {"strategy": "local_sgd", "local": {"round": 300}, "num_epochs": 1}
    config = TrainConfig.model_validate(settings)
    assert with_steps(config, 400.0).steps == 400
    with pytest.raises(ConfigError, match=r"'local\.round' must be at most 'steps' \(250\)"):
        with_steps(config, 250.0)


def test_a_batch_script_contains_the_global_batch_size() -> None:
    script = slurm_script("tiny", ["per_device_train_batch_size=3", "nprocs=2"])
    assert "; 6 samples in an optimizer step" in script


def test_the_test_loss_is_the_mean_over_all_test_samples() -> None:
    torch.manual_seed(0)
    model, data = Model(), data_of(7)
    result = trainer_of(World(), model, test=7, eval_samples=2).train()
    x, y = data.tensors
    assert result.test["loss"] == pytest.approx(F.mse_loss(model(x), y).item())


def test_an_empty_dataset_is_rejected_before_the_run_starts() -> None:
    source = make_source(data_of(8), 4, World())
    for name, what in (("validation_data", "validation samples"), ("test_data", "test samples")):
        with pytest.raises(ConfigError, match=f"there are no {what}: pass a dataset with at least one sample"):
            Trainer(Model(), source, loss, World(), **{name: data_of(0)})
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------------- intervals


def test_evaluations_and_checkpoints_end_epochs() -> None:
    each = trainer_of(World(), Model(), steps=7, eval_every="epoch", checkpoint={"every": "2 epochs", "keep_last": 9})
    assert list(each.train().evaluations) == [2, 4, 6, 7]
    assert [path.name for path in sorted(each.run.checkpoints.glob("step_*"))] == ["step_00000004", "step_00000007"]
    half = trainer_of(World(), Model(), steps=3, eval_every="0.5 epochs")
    assert list(half.train().evaluations) == [1, 2, 3]


@pytest.mark.parametrize(("every", "due"), [(2, [2, 4, 6]), (4.5, [5, 9]), (20 / 3, [7]), (0.5, list(range(1, 11)))])
def test_a_fractional_interval_ends_in_the_step_that_contains_it(every: float, due: list[int]) -> None:
    steps = 6 if every == 2 else 10
    assert [step for step in range(1, steps + 1) if is_due(step, every)] == due
    assert times_due(steps, every) == len({*due, steps})
    assert not is_due(steps, 0)
    assert times_due(steps, 0) == 0


def test_the_end_of_each_epoch_is_found_however_the_fractions_are_rounded() -> None:
    for samples in range(3, 60):
        for batch in range(1, samples):
            ends = [step for step in range(1, 300) if is_due(step, samples / batch)]
            assert ends == sorted({math.ceil(k * samples / batch) for k in range(1, 300)} & set(range(1, 300)))


WRONG_INTERVALS = ["eval_every=0", "eval_every=epochs", "eval_every=0 epochs", "checkpoint.every=-1", "eval_every=true"]


def test_an_invalid_interval_is_rejected_in_one_line() -> None:
    for wrong in WRONG_INTERVALS:
        done = call("train", "tiny", wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), wrong
        assert "must be a number of steps (at least" in done.stderr, wrong
    stream = call("train", "tiny", "source.kind=streamed", "eval_every=epoch", "--dry-run")
    assert "for a stream, 'eval_every' must be a number of steps, got 'epoch'" in stream.stderr
    assert stream.returncode == 2
    assert not Path("runs").exists()
