"""A dry run describes the run, and the run agrees."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call
from ddp_tutorial.accumulation.memory import count_saved_bytes
from ddp_tutorial.config import ConfigError, check, flat, layers, load, merged
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training import tasks
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.gpt import GPT, loss_sum
from ddp_tutorial.training.optimization import make_optimizer
from ddp_tutorial.training.plan import as_text, format_bytes, memory, plan, settings
from ddp_tutorial.training.tasks import launch_training, train
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")


def planned(source: str, *overrides: str, **environ: str):  # type: ignore[no-untyped-def]
    return plan(load(source, TaskConfig, overrides), layers(source, overrides), environ)


def test_every_setting_is_listed_with_its_last_origin() -> None:
    Path("mine.yaml").write_text("extends: tiny\nsteps: 30\nmodel: {layers: 2}\n")
    overrides = ["seed=7", "model.heads=4"]
    found = settings(load("mine.yaml", TaskConfig, overrides), layers("mine.yaml", overrides))
    assert found["steps"] == {"value": 30, "from": "mine.yaml"}
    assert found["model.layers"] == {"value": 2, "from": "mine.yaml"}
    assert found["model.width"] == {"value": 32, "from": "tiny.yaml"}
    assert found["model.heads"] == {"value": 4, "from": "command line"}
    assert found["seed"] == {"value": 7, "from": "command line"}
    assert found["clip"] == {"value": 1.0, "from": "base.yaml"}
    assert found["source.window"] == {"value": 65536, "from": "base.yaml"}
    assert found["name"] == {"value": "", "from": "default"}


@pytest.mark.parametrize("source", ["2proc", "invariant", "grad_accum", "checkpoint_resume"])
def test_the_listed_values_are_the_config(source: str) -> None:
    config = load(source, TaskConfig)
    told = {name: each["value"] for name, each in settings(config, layers(source)).items()}
    assert told == flat(config.model_dump(mode="json"))
    assert check(TaskConfig, merged(layers(source)), origin="layers") == config


def test_the_plan_agrees_with_the_run() -> None:
    overrides = ("name=mine", "accumulation=2", "steps=5", "eval_every=2", "checkpoint.every=2")
    found = planned("tiny", *overrides)
    result = launch_training(load("tiny", TaskConfig, overrides), echo=False)
    told = json.loads((result.run / "result.json").read_text())
    assert found["directory"] == str(result.run)
    assert (found["world"]["ranks"], found["world"]["backend"]) == (told["world_size"], "gloo")
    rows = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert found["work"]["steps"] == len([row for row in rows if "loss" in row])
    assert found["work"]["evaluations"] == len([row for row in rows if "eval_loss" in row]) == 3
    assert found["work"]["tokens"] == max(row.get("tokens", 0) for row in rows)
    assert found["batch"]["samples_per_micro_batch"] == 2  # 8 samples, 2 ranks, 2 micro-batches
    assert found["memory_per_rank"]["parameters"] == sum(p.numel() for p in GPT(1, 2, 32, 32).parameters())


def test_the_plan_opens_the_samples_once_and_names_the_decisive_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    read = tasks.samples_of
    monkeypatch.setattr(tasks, "samples_of", lambda *arguments: opened.append(1) or read(*arguments))
    found = planned("tiny", "num_epochs=2", "per_device_train_batch_size=3", "eval_every=epoch", "device=cpu")
    assert len(opened) == 1
    assert found["settings"]["num_epochs"] == {"value": 2, "from": "command line"}
    assert found["settings"]["steps"] == {"value": found["work"]["steps"], "from": "num_epochs"}
    assert found["settings"]["batch_size"] == {"value": 6, "from": "per_device_train_batch_size"}
    assert found["work"]["evaluations"] == 2


def test_under_torchrun_the_plan_describes_the_existing_world() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    found = planned("2proc", "device=cpu", **environ)
    assert found["world"] == {"ranks": 4, "device": "cpu", "backend": "gloo", "started_by": "torchrun or Slurm"}
    assert found["batch"]["samples_per_micro_batch"] == 4


def test_one_process_has_no_backend() -> None:
    assert planned("single_process", "device=cpu")["world"]["backend"] == "none"


@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_estimate_is_close_to_what_autograd_keeps(recompute: bool) -> None:
    config = TaskConfig(model=ModelConfig(layers=3, heads=2, width=64, context=64, recompute=recompute))
    model = GPT(**config.model.size)
    tokens = torch.randint(256, (8, 64))
    with count_saved_bytes(model) as kept:
        loss_sum(model(tokens), tokens)
    assert 0.9 * kept.nbytes < memory(config, samples=8)["activations"] < 1.6 * kept.nbytes


def test_the_memory_of_an_optimizer_is_its_state() -> None:
    for name, kept in (("adamw", 8), ("sgd", 4)):
        config = TaskConfig(model=ModelConfig(layers=1, heads=2, width=32, context=32), optimizer=name)
        model = GPT(**config.model.size)
        optimizer = make_optimizer(model, config)
        model(torch.randint(256, (2, 8))).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["state"].values()
        found = sum(t.nbytes for each in state for t in each.values() if torch.is_tensor(t) and t.dim() > 0)
        estimate = memory(config, samples=2)
        assert estimate["optimizer"] == kept * estimate["parameters"] == found


def test_a_missing_device_is_rejected_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="requires one GPU for each of the 4 ranks on this machine"):
        planned("4gpu")


REFUSED = [
    ("batch_size=2",),
    ("source.kind=streamed", "source.streams=2"),
    ("strategy=invariant",),
    ("corpus=stories:2", "batch_size=1000"),
    ("corpus=json:gone",),
    ("resume=runs/gone",),
]


def refusals(world: World) -> list[str]:
    configs = [load("tiny", TaskConfig, ["nprocs=3", "device=cpu", *each]) for each in REFUSED]
    return [error_of(lambda config=config: train(world, config)) for config in configs]  # type: ignore[misc]


def test_the_plan_and_the_run_reject_a_config_in_the_same_words() -> None:
    planning = [error_of(lambda each=each: planned("tiny", "nprocs=3", "device=cpu", *each)) for each in REFUSED]
    assert all(told.startswith("ConfigError: ") for told in planning)
    assert not list(Path().iterdir())
    assert launch(refusals, 3, device="cpu", echo=False)[0] == planning


def test_a_model_that_exceeds_the_memory_causes_a_readable_warning() -> None:
    found = planned("tiny", "model.width=10000000", "device=cpu")
    warning = as_text(found).splitlines()[-1]
    assert warning.startswith(
        f"warning  this machine has {format_bytes(found['memory_here']['there'])}, and its 2 ranks "
    )
    assert re.search(r"would need about [\d.,]+ PB: use a smaller model", warning)
    assert "warning" not in as_text(planned("tiny", "device=cpu"))


def test_a_loss_that_requires_values_is_reported_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: Any, batch: Any) -> Any:
        total = model(batch["tokens"][:, :-1]).sum()
        return total, 1, {"logit": (total.item(), 1)}

    monkeypatch.setattr("ddp_tutorial.training.plan.loss_of", lambda config: loss)
    for strategy in ("ddp", "pipeline"):
        with pytest.raises(ConfigError, match=r"called on meta tensors\). Return metrics as tensors, without item\(\)"):
            planned("tiny", "device=cpu", "model.layers=2", f"strategy={strategy}")

    def loss_of_distinct_tokens(model: Any, batch: Any) -> Any:
        return model(batch["tokens"][:, :-1]).sum(), len(batch["tokens"].unique())

    monkeypatch.setattr("ddp_tutorial.training.plan.loss_of", lambda config: loss_of_distinct_tokens)
    with pytest.raises(ConfigError, match="no fake impl or Meta kernel"):
        planned("tiny", "device=cpu")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (19_400_000, "19.4 MB"),
        (999_960, "1.0 MB"),
        (2.5e18, "2,500.0 PB"),
    ],
)
def test_bytes_are_formatted_readably(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_dry_run_is_readable_and_writes_nothing() -> None:
    arguments = ["train", "grad_accum", "steps=7", "device=cpu", "--dry-run"]
    command = [sys.executable, "-m", "ddp_tutorial", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert list(Path().iterdir()) == []
    lines = done.stdout.splitlines()
    assert any(line.startswith("steps: 7 ") and line.endswith("# command line") for line in lines)
    assert any(line.startswith("accumulation: 4 ") and line.endswith("# grad_accum.yaml") for line in lines)
    assert "batch    64 samples, 8,192 tokens; on each rank 4 micro-batches of 8 samples" in lines
    assert "world    2 ranks on cpu, gloo, started by train, on this machine" in lines
    as_json = call(*arguments, "--json")
    found = json.loads(as_json.stdout)
    assert found["settings"]["steps"] == {"value": 7, "from": "command line"}
    assert as_text(found) == done.stdout.rstrip("\n")
