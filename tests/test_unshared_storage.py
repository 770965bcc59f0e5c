"""Nodes without a shared folder, simulated by ranks with separate working directories."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ddp_tutorial.checkpoint.checkpointer import Checkpointer
from ddp_tutorial.checkpoint.components import Component, FunctionState
from ddp_tutorial.checkpoint.config import CheckpointConfig
from ddp_tutorial.checkpoint.manifest import MANIFEST, checkpoint_name, list_checkpoints
from ddp_tutorial.checkpoint.resuming import find_resume_point
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.local_sgd.config import LocalConfig
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.samples import ArrowShards, TokenBlocks, write_arrow
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import ModelConfig, TaskConfig, TrainConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

TASK = TaskConfig.model_validate(
    {
        "name": "mine",
        "corpus": "text:notes.txt",
        "model": ModelConfig(layers=1, heads=2, width=16, context=16),
        "device": "cpu",
        "steps": 2,
        "batch_size": 4,
        "eval_samples": 2,
    }
)


SAVING = TASK.model_copy(update={"corpus": "stories:40", "checkpoint": CheckpointConfig(every=1)})


def components(world: World) -> dict[str, Component]:
    """Return one component that rank 0 writes for all ranks, and one of which each rank writes its own state."""
    return {
        "model": Component(nn.Linear(2, 1)),
        "rng": Component(FunctionState(lambda: {"rank": world.rank}, lambda state: None), "per_rank"),
    }


def saved(world: World, folder: Path) -> None:
    torch.manual_seed(0)
    Checkpointer(folder, components(world), world, config={"steps": 1}).save(1)


def on_nodes(world: World) -> dict[str, Any]:
    """Return each rank's errors, first in one folder and then in separate folders."""
    saved(world, Path("shared/checkpoints"))
    all_gather(world, None)
    here = Path.cwd()
    os.chdir(f"node{world.rank}")
    told: dict[str, Any] = {"save": error_of(lambda: saved(world, Path("checkpoints")))}
    told["left by it"] = sorted(str(path) for path in Path("checkpoints").rglob("*"))
    if world.is_main:
        shutil.copytree(here / "shared", "mine")
    for name, resume in [("path", "mine"), ("checkpoint", f"mine/checkpoints/{checkpoint_name(1)}"), ("auto", "auto")]:
        told[name] = error_of(lambda resume=resume: find_resume_point(world, Path("mine"), resume, {"steps": 1}))  # type: ignore[misc]
    told["gone"] = error_of(lambda: find_resume_point(world, Path("gone"), "gone", {}))
    told |= {f"data: {name}": error_of(lambda make=make: make(world)) for name, make in SOURCES.items()}  # type: ignore[misc]
    told["validation"] = error_of(lambda: validation(world))
    told["task"] = error_of(lambda: train(world, TASK))
    told["checkpoints"] = error_of(lambda: train(world, SAVING))
    told["runs"] = Path("runs").exists()
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.json").write_text("{}")
    again = SAVING.model_copy(update={"resume": "auto"})
    told["one each"] = error_of(lambda: train(world, again))
    told["left in them"] = sorted(str(path) for path in Path("runs").rglob("*"))
    return told


def tensors(world: World) -> TensorDataset:
    rows = torch.arange(1000.0)[:, None].clone()
    rows[500] += world.rank  # one of a thousand numbers
    return TensorDataset(rows)


def arrow_files(world: World) -> ArrowShards:
    path = Path("rows.arrow")
    write_arrow(path, {"x": torch.arange(1000).numpy() + world.rank})
    return ArrowShards([path])


SOURCES = {
    "tokens": lambda world: make_source(TokenBlocks(torch.arange(64) + world.rank, 8), 4, world),
    "tensors": lambda world: make_source(tensors(world), 4, world),
    "arrow": lambda world: make_source(arrow_files(world), 4, world),
    "a list": lambda world: make_source([world.rank] * 10, 4, world),  # rows may be random, so only their number counts
}


def validation(world: World) -> None:
    source = make_source(TensorDataset(torch.zeros(8, 1)), 4, world)
    loss = lambda model, batch: (F.mse_loss(model(batch[0]), batch[0], reduction="sum"), len(batch[0]))  # noqa: E731
    Trainer(nn.Linear(1, 1), source, loss, world, TrainConfig(name="mine"), validation_data=tensors(world))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nodes")
    for rank in range(2):
        (folder / f"node{rank}").mkdir()
        (folder / f"node{rank}" / "notes.txt").write_text("abcdefgh" * 400 + f"{rank}" + "ijklmnop" * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return launch(on_nodes, 2, device="cpu", echo=False, timeout=300)


def test_a_save_that_rank_0_does_not_see_is_reported_on_all_ranks(told: Any) -> None:
    for each in told:
        assert "CheckpointError: rank 0 cannot read rng.rank_1.pt, which rank 1 wrote" in each["save"]
        assert "on a disk that all nodes share" in each["save"]
        assert each["left by it"] == []


@pytest.mark.parametrize("resume", ["path", "checkpoint", "auto"])
def test_a_checkpoint_that_only_rank_0_sees_is_rejected_on_all_ranks(resume: str, told: Any) -> None:
    for each in told:
        assert each[resume].startswith(
            "ConfigError: rank 0 would resume from mine/checkpoints/step_00000001, which does not exist on"
        )
        assert "on a disk that all nodes share" in each[resume]


def test_a_missing_checkpoint_is_reported_on_all_ranks(told: Any) -> None:
    assert {each["gone"] for each in told} == {
        "ConfigError: 'resume' must be 'auto', 'never', or the path of a checkpoint or a run with a valid checkpoint, "
        "got gone"
    }


@pytest.mark.parametrize("data", ["tokens", "tensors", "arrow"])
def test_ranks_with_different_data_are_rejected(data: str, told: Any) -> None:
    for each in told:
        assert each[f"data: {data}"].startswith(
            "ConfigError: rank 1 has the same number of training samples as rank 0, but"
        )


def test_rows_that_may_be_random_are_only_counted(told: Any) -> None:
    assert {each["data: a list"] for each in told} == {"no error"}


def test_different_validation_data_are_rejected_before_a_folder_exists(told: Any) -> None:
    for each in told:
        assert each["validation"].startswith(
            "ConfigError: rank 1 has the same number of validation samples as rank 0, but"
        )
        assert each["task"].startswith("ConfigError: rank 1 has the same number of training samples as rank 0, but")
        assert not each["runs"]


def test_a_run_that_cannot_save_is_rejected_before_its_first_step(told: Any) -> None:
    for each in told:
        assert each["checkpoints"].startswith(
            "ConfigError: all ranks must share the checkpoint folder runs/mine, but rank 1 cannot access "
            "rank 0's folder. "
        )
        assert not each["runs"]


def test_it_is_also_rejected_if_each_node_has_a_folder_of_that_name(told: Any) -> None:
    for each in told:
        assert each["one each"].startswith(
            "ConfigError: all ranks must share the checkpoint folder runs/mine, but rank 1 cannot access "
            "rank 0's folder. "
        )
        assert each["left in them"] == ["runs/mine", "runs/mine/config.json"]


def test_auto_does_not_start_over_if_all_checkpoints_are_invalid() -> None:
    saved(World(), Path("mine/checkpoints"))
    saved_again = Checkpointer(Path("mine/checkpoints"), components(World()), World(), config={"steps": 1})
    saved_again.save(2)
    for folder in list_checkpoints(Path("mine/checkpoints")):
        (folder / "model.safetensors").write_bytes(b"")
    told = error_of(lambda: find_resume_point(World(), Path("mine"), "auto", {"steps": 1}))
    assert told.startswith("ConfigError: none of the 2 checkpoints in mine/checkpoints can be read: ")
    assert "step_00000001/model.safetensors must have " in told
    assert "step_00000002/model.safetensors must have " in told
    assert told.endswith("To start over, use a different run name, or move mine/checkpoints.")


# ------------------------------------------------------------------------------------- rank 0 keeps them for all

KEPT = TASK.model_copy(
    update={
        "corpus": "stories:40",
        "checkpoint": CheckpointConfig(every=1, shared=False),
        "schedule_steps": 4,
        "resume": "auto",
        "resume_allow": ["steps"],
        "tensorboard": False,
    }
)
BEHIND = CheckpointConfig(every=1, shared=False, background=True)
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    # within its rounds, each rank has its own model and optimizer
    "local_sgd": {"strategy": "local_sgd", "local": LocalConfig(round=2), "checkpoint": BEHIND},
}


# The newest checkpoint on the disk of each rank. A checkpoint that is being replaced has the suffix `.old`.
NEWEST = {
    "many": (checkpoint_name(99_999_999), checkpoint_name(100_000_000)),
    "replaced": (checkpoint_name(10), f".{checkpoint_name(20)}.old"),
    "first": (f".{checkpoint_name(20)}.old", checkpoint_name(10)),
}


def life(world: World, name: str, steps: int, **other: Any) -> str:
    return train(world, KEPT.model_copy(update={"name": name, "steps": steps, **other})).weights


def contents() -> set[str]:
    return {str(path) for path in Path("runs").rglob("*")}


def kept(world: World) -> dict[str, Any]:
    """Return each rank's errors in a separate folder, before and after the ranks swap folders."""
    os.chdir(f"node{world.rank}")
    told: dict[str, Any] = {}
    for name, other in KINDS.items():
        life(world, name, 3, **other)
        told[f"{name}: checkpoints"] = Path("runs", name, "checkpoints").exists()
        told[f"{name}: went on"] = life(world, name, 4, **other)
    life(world, "on_one", 2)
    before = contents()
    told["pieces"] = error_of(lambda: life(world, "pieces", 2, strategy="zero1"))
    if world.rank == 1:
        shutil.copytree("../node0/runs/ddp/checkpoints", "later/checkpoints")
    told["later"] = error_of(lambda: find_resume_point(world, Path("later"), "auto", {}, shared=False))
    for name, of_ranks in NEWEST.items():
        checkpoint = Path(name, "checkpoints", of_ranks[world.rank])
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST).write_text("{}")
        told[name] = error_of(lambda name=name: find_resume_point(world, Path(name), "auto", {}, shared=False))  # type: ignore[misc]
    told["shared"] = error_of(lambda: life(world, "ddp", 4, checkpoint=CheckpointConfig(every=1)))
    told["changed"] = contents() ^ before
    os.chdir(f"../node{1 - world.rank}")
    all_gather(world, None)
    before = contents()
    told["places"] = error_of(lambda: life(world, "ddp", 4))
    told["changed there"] = contents() ^ before
    return told


def uninterrupted(world: World) -> dict[str, str]:
    os.chdir("node0")
    whole = {name: life(world, f"{name}-whole", 4, **other) for name, other in KINDS.items()}
    return whole | {"on_one": life(world, "on_one", 4, checkpoint=CheckpointConfig(every=1))}


def test_rank_0_saves_for_nodes_without_a_shared_folder_and_runs_resume(
    workdir: Path,
) -> None:
    for rank in range(2):
        (workdir / f"node{rank}").mkdir()
    told = launch(kept, 2, device="cpu", echo=False, timeout=300)
    whole = launch(uninterrupted, 2, device="cpu", echo=False, timeout=300)[0]
    assert whole["on_one"] == whole["ddp"]
    for rank, each in enumerate(told):
        for name in KINDS:
            assert each[f"{name}: went on"] == whole[name], name
            assert each[f"{name}: checkpoints"] == (rank == 0)
        assert each["pieces"].startswith("ConfigError: 'checkpoint.shared' must be true, because 'optimizer' is")
        assert each["later"].startswith("ConfigError: rank 1 found step_00000004 of later on its disk, but rank 0 ")
        found = "ConfigError: rank 1 found {1} of {name} on its disk, but rank 0 found {0}. "
        assert each["many"].startswith(found.format(*NEWEST["many"], name="many"))
        assert each["replaced"].startswith(found.format(*map(checkpoint_name, (10, 20)), name="replaced"))
        assert each["first"].startswith("ConfigError: none of the 1 checkpoints in first/checkpoints can be read: ")
        assert each["shared"].startswith(
            "ConfigError: all ranks must share the checkpoint folder runs/ddp, but rank 1 cannot access "
            "rank 0's folder. "
        )
        assert each["places"].startswith("ConfigError: runs/ddp contains logs from other ranks, but not from rank 0. ")
        assert (each["changed"], each["changed there"]) == (set(), set()), "a refused command changes nothing"
    assert not list(workdir.glob("node1/runs/*/checkpoints"))
    files = {path.name for path in (workdir / "node0/runs/ddp/checkpoints" / checkpoint_name(4)).iterdir()}
    assert {"rng.rank_0.pt", "rng.rank_1.pt"} <= files
