"""Every config of the package loads, trains, is a papermill parameter file, and matches its description."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from ddp_tutorial.config import CONFIGS, ConfigError, check, config_names, flat, load, parse_yaml
from ddp_tutorial.experiments.execute import read_parameters
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import launch_training, train
from ddp_tutorial.training.trainer import TrainResult
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")

# Small settings, so that each config takes a second.
LITTLE = [
    *("device=cpu", "corpus=stories", "model.layers=1", "model.heads=2", "model.width=16", "model.context=16"),
    *("batch_size=16", "steps=2", "warmup_steps=1", "eval_samples=4", "checkpoint.every=0", "resume=never"),
]
ASKED_FOR = {
    *("single_process", "2proc", "4proc", "2gpu", "4gpu", "4cpu", "grad_accum", "mixed_precision", "invariant"),
    *("sharded_dataset", "dispatched_dataset", "iterable_dataset", "sharded_iterable_dataset", "sharded_fast_dataset"),
    *("checkpoint_train", "checkpoint_resume", "early_stopping"),
}
RANKS = {name: load(name, TaskConfig).nprocs for name in config_names()}


def test_the_documented_configs_exist() -> None:
    assert set(config_names()) >= ASKED_FOR
    assert RANKS["single_process"] == RANKS["iterable_dataset"] == 1
    assert RANKS["4proc"] == RANKS["4cpu"] == RANKS["4gpu"] == 4
    assert RANKS["sharded_dataset"] == RANKS["2gpu"] == 2


@pytest.mark.parametrize("name", sorted(set(config_names()) - {"base"}))
def test_a_config_is_short_and_starts_with_a_description(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert any(line.startswith("extends: ") for line in lines)
    assert len(lines) <= 12


@pytest.mark.parametrize("name", config_names())
def test_a_config_is_a_papermill_parameter_file(name: str) -> None:
    """papermill sets every key of the file as a variable of the notebook."""
    injected = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert read_parameters(TaskConfig, injected) == load(name, TaskConfig)


def test_a_notebook_parameter_out_of_range_is_reported_as_a_parameter() -> None:
    """test_notebooks.py tests how papermill handles such an error."""
    with pytest.raises(ConfigError, match="parameters: 'nprocs' must be greater than or equal to 1, got 0"):
        read_parameters(TaskConfig, {"nprocs": 0})


def _train_all(world: World, configs: dict[str, TaskConfig]) -> dict[str, TrainResult]:
    return {name: train(world, config) for name, config in configs.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_config_trains(size: int) -> None:
    configs = {
        name: load(name, TaskConfig, [*LITTLE, f"name={name}"]) for name, ranks in RANKS.items() if ranks == size
    }
    assert configs
    for results in launch(_train_all, size, configs, device="cpu", echo=False, threads=1):
        assert {name: len(result.losses) for name, result in results.items()} == dict.fromkeys(configs, 2)
        assert all(0 < loss < 10 for result in results.values() for loss in result.losses)
    for name in configs:
        assert json.loads(Path(f"runs/{name}/result.json").read_text())["world_size"] == size


def test_the_four_kinds_of_sources_differ() -> None:
    kinds = {name: load(name, TaskConfig).source.kind for name in config_names() if name.endswith("_dataset")}
    assert kinds == {
        "sharded_dataset": "sharded",
        "dispatched_dataset": "dispatched",
        "iterable_dataset": "streamed",
        "sharded_iterable_dataset": "streamed",
        "sharded_fast_dataset": "fast_stream",
    }


def test_two_halves_with_checkpoints_give_the_weights_of_one_run() -> None:
    little = [*LITTLE[:-4], "eval_samples=4", "warmup_steps=2", "schedule_steps=8", "checkpoint.every=2"]
    first = launch_training(load("checkpoint_train", TaskConfig, [*little, "steps=4"]), echo=False)
    second = launch_training(load("checkpoint_resume", TaskConfig, [*little, "steps=8"]), echo=False)
    assert first.run == second.run == Path("runs/checkpoint")
    assert len(second.losses) == 8
    assert second.losses[:4] == first.losses
    whole = launch_training(load("checkpoint_train", TaskConfig, [*little, "steps=8", "name=whole"]), echo=False)
    assert whole.weights == second.weights
    assert whole.losses == second.losses


def test_early_stopping_is_enabled_and_keeps_the_best_model() -> None:
    config = load("early_stopping", TaskConfig)
    assert config.early_stopping.patience > 0
    assert config.best_model
    assert config.steps > config.early_stopping.grace_steps


@pytest.mark.parametrize("name", ["2gpu", "4gpu"])
def test_a_gpu_config_is_rejected_on_a_machine_without_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device='cuda' requires one GPU for each"):
        launch_training(load(name, TaskConfig), echo=False)
    assert not Path("runs").exists()


def test_base_lists_every_setting_with_its_default() -> None:
    base = flat(yaml.safe_load((CONFIGS / "base.yaml").read_text()))
    defaults = TaskConfig()
    settings = flat(defaults.model_dump(mode="json") | {"slurm": defaults.slurm.model_dump(mode="json")})
    assert settings.keys() - base.keys() == {"name"}, "the name belongs to one run"
    assert check(TaskConfig, parse_yaml((CONFIGS / "base.yaml").read_text(), "base.yaml"), "base.yaml") == defaults
