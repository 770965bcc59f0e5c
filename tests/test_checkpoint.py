"""A checkpoint can be trusted: complete or absent, equal on the ranks that share it, and verified before use."""

import errno
import math
import os
import pickle
import random
import re
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ddp_tutorial.checkpoint.checkpointer import Checkpointer
from ddp_tutorial.checkpoint.comparison import compare
from ddp_tutorial.checkpoint.components import Component, FunctionState, RandomState, StoredTensor
from ddp_tutorial.checkpoint.consistency import named_leaves
from ddp_tutorial.checkpoint.manifest import (
    CHECKPOINTS,
    CheckpointError,
    Manifest,
    checkpoint_name,
    latest,
    list_checkpoints,
    read_manifest,
    verify,
)
from ddp_tutorial.checkpoint.resuming import find_resume_point, latest_valid
from ddp_tutorial.checkpoint.storage import load_shards, read_state, stored, write_shards
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.config import ConfigError, named_ranks
from ddp_tutorial.files import observe_disk
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.world import World
from disk import Point, failing, noting
from ranks import error_of

TWO = checkpoint_name(2)


def model_of(seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = GPT(layers=1, heads=2, width=16, context=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def step(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def components(seed: int = 0) -> dict[str, Component]:
    model, optimizer = model_of(seed)
    step(model, optimizer)
    return {"model": Component(model), "optimizer": Component(optimizer)}


def value(state: Mapping[str, Any], shared: str = "replicated", span: int = 1) -> tuple[Component, dict[str, Any]]:
    """Return a component of plain values, and the values that it loads."""
    given: dict[str, Any] = {}
    return Component(FunctionState(lambda: dict(state), given.update), shared, span), given  # type: ignore[arg-type]


def values_of(parts: Mapping[str, Component]) -> dict[str, Any]:
    return {
        where: found.clone() if torch.is_tensor(found) else found
        for name, part in parts.items()
        for where, found in named_leaves(name, dict(part.stateful.state_dict()))
    }


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(x, b[name]) if torch.is_tensor(x) else x == b[name] for name, x in a.items()
    )


# ---------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("background", [False, True])
def test_loading_restores_the_saved_state_bitwise(background: bool, tmp_path: Path) -> None:
    parts, others = components(), components(1)
    checkpointer = Checkpointer(tmp_path, parts, World(), background=background)
    checkpointer.save(7, {"eval_loss": 0.5})
    saved = values_of(parts)
    if background:  # training continues in the meantime
        step(parts["model"].stateful, parts["optimizer"].stateful)  # type: ignore[arg-type]
    checkpointer.finish()
    assert not same(values_of(others), saved)
    folder = latest(tmp_path)
    assert folder is not None
    manifest = Checkpointer(tmp_path, others, World()).load(folder)
    assert same(values_of(others), saved)
    assert (manifest.step, manifest.metrics, manifest.world_size) == (7, {"eval_loss": 0.5}, 1)
    assert others["model"].stateful.head.weight is others["model"].stateful.tokens.weight  # type: ignore[attr-defined]
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        assert ("head.weight" in file.keys()) != ("tokens.weight" in file.keys())  # noqa: SIM118, tied: stored once
    assert verify(folder) == []
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(7)]


def test_the_thread_of_a_background_save_does_not_delay_the_exit(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, components(), World(), background=True)
    threads: list[threading.Thread] = []
    with observe_disk(lambda operation, path: threads.append(threading.current_thread())):
        checkpointer.save(1)
        checkpointer.finish()
    [writer] = {thread for thread in threads if thread.name == "checkpoint"}
    assert writer.daemon


def test_weights_are_safetensors_and_no_file_is_an_executable_pickle(tmp_path: Path) -> None:
    Checkpointer(tmp_path, components(), World()).save(1)
    folder = tmp_path / checkpoint_name(1)
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "model.safetensors", "optimizer.pt"}
    torch.load(folder / "optimizer.pt", weights_only=True)


class _Named(NamedTuple):
    number: int
    text: str


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([{"path": Path("x")}], "config['bad'][0]['path'] is of type PosixPath"),
        (defaultdict(list), "config['bad'] is of type defaultdict"),
        ([_Named(3, "x")], "config['bad'][0] is of type _Named"),
        ({np.int64(1): 2}, "a key of config['bad'] is of type int64"),
        (np.str_("x"), "config['bad'] is of type str_"),
    ],
)
def test_state_that_could_not_be_loaded_safely_is_rejected_when_saved(bad: Any, told: str, tmp_path: Path) -> None:
    part, _ = value({"good": 1, "bad": bad})
    with pytest.raises(CheckpointError, match=re.escape(f"{told}, which cannot be loaded")):
        Checkpointer(tmp_path, {"config": part}, World()).save(1)
    assert not list(tmp_path.iterdir())


def test_a_learning_rate_computed_with_numpy_is_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer = model_of()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: np.cos(number / 10))
    step(model, optimizer)
    schedule.step()
    assert type(rate := optimizer.param_groups[0]["lr"]) is np.float64
    parts = {"optimizer": Component(optimizer), "schedule": Component(schedule), "signal": value({"it": SIGTERM})[0]}
    Checkpointer(tmp_path, parts, World()).save(1)
    optimizer.param_groups[0]["lr"] = 0.0
    Checkpointer(tmp_path, parts, World()).load(tmp_path / checkpoint_name(1))
    assert optimizer.param_groups[0]["lr"] == rate
    assert stored(tmp_path / checkpoint_name(1), "signal") == {"it": 15}


OVERLAPPING = torch.arange(4.0)


@pytest.mark.parametrize(
    "state",
    [
        {0: torch.ones(2), 1: torch.zeros(3)},
        {"whole": OVERLAPPING, "part": OVERLAPPING[1:3]},
        {"it": torch.ones(2, dtype=torch.complex128)},
        {"it": torch.eye(3).to_sparse()},
    ],
    ids=["names are integers", "overlapping", "complex128", "sparse"],
)
def test_tensors_that_safetensors_rejects_are_saved_and_loaded(state: dict[Any, torch.Tensor], tmp_path: Path) -> None:
    part, loaded = value(state)
    Checkpointer(tmp_path, {"part": part}, World()).save(1)
    Checkpointer(tmp_path, {"part": part}, World()).load(tmp_path / checkpoint_name(1))
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name].to_dense(), tensor.to_dense()) for name, tensor in state.items())


def test_an_unreadable_file_is_named_even_if_the_error_has_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise EOFError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: EOFError$"):
        read_state(tmp_path / "x.pt")


def test_settings_with_numbers_as_names_leave_a_valid_checkpoint(tmp_path: Path) -> None:
    settings = {"rates": {9: 0.1, 10: 0.2}}  # as text, 10 sorts before 9
    Checkpointer(tmp_path, {"part": value({"x": 1})[0]}, World(), config=settings).save(1)
    assert verify(tmp_path / checkpoint_name(1)) == []
    assert read_manifest(tmp_path / checkpoint_name(1)).config == {"rates": {"9": 0.1, "10": 0.2}}


def test_a_component_shared_in_an_unknown_way_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"shared must be one of replicated, .*, sharded, got 'replicate'"):
        value({"x": 1}, "replicate")


def test_random_numbers_resume_where_they_stopped(tmp_path: Path) -> None:
    parts = {"rng": Component(RandomState(torch.device("cpu")), "per_rank")}
    checkpointer = Checkpointer(tmp_path, parts, World())

    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(()).item()]

    drawn()
    checkpointer.save(1)
    first = drawn()
    assert drawn() != first
    checkpointer.load(tmp_path / checkpoint_name(1))
    assert drawn() == first


def test_only_the_latest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, components(), World(), keep_last=2, keep_best=1)
    for number, loss in enumerate([3.0, 1.0, 2.0, 2.7, 2.5], start=1):
        checkpointer.save(number, {"eval_loss": loss if number != 4 else None})
    checkpointer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        checkpoint_name(2),
        checkpoint_name(4),
        checkpoint_name(5),
    ]


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_non_finite_metric_is_saved_and_is_never_the_best(metric: float, tmp_path: Path) -> None:
    """JSON does not support NaN, and a diverging run must not lose its checkpoints."""
    checkpointer = Checkpointer(tmp_path, components(), World(), keep_last=1, keep_best=1)
    for number, loss in enumerate([0.5, metric, 0.7], start=1):
        checkpointer.save(number, {"eval_loss": loss})
    checkpointer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(1), checkpoint_name(3)]
    checkpointer.save(4, {"eval_loss": metric})
    assert read_manifest(tmp_path / checkpoint_name(4)).metrics == {"eval_loss": None}
    checkpointer.close()


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    parts = components()
    checkpointer = Checkpointer(tmp_path, parts, World())
    checkpointer.save(1)
    step(parts["model"].stateful, parts["optimizer"].stateful)  # type: ignore[arg-type]
    checkpointer.save(1)
    saved = values_of(parts)
    others = components(1)
    Checkpointer(tmp_path, others, World()).load(tmp_path / checkpoint_name(1))
    assert same(values_of(others), saved)


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_00000003.17.5.part").mkdir()
    Checkpointer(tmp_path, components(), World()).recover()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ damage


def bomb() -> Any:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, ("exploded",)

    return Bomb()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2), "must have .* bytes|is damaged"),
    "one bit": (
        lambda path: path.write_bytes((data := path.read_bytes())[:50] + bytes([data[50] ^ 1]) + data[51:]),
        "is damaged",
    ),
    "missing": (lambda path: path.unlink(), "is missing|is not a checkpoint"),
    "a pickle that executes": (lambda path: path.write_bytes(pickle.dumps(bomb())), "must have .* bytes|is damaged"),
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(
    damage: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer(tmp_path, components(), World())
    checkpointer.save(1)
    checkpointer.save(2)
    spoil, told = DAMAGE[damage]
    spoil(tmp_path / checkpoint_name(2) / file)
    others = components(1)
    before = values_of(others)
    with pytest.raises(CheckpointError, match=told) as error:
        Checkpointer(tmp_path, others, World()).load(tmp_path / checkpoint_name(2))
    assert file in str(error.value)
    assert same(values_of(others), before)
    found, problems = latest_valid(World(), tmp_path)
    assert found == tmp_path / checkpoint_name(1)
    assert (file == "manifest.json" and damage == "missing") or len(problems) == 1
    assert not Path("exploded").exists()


def test_a_pickle_with_a_valid_checksum_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    part, given = value({"x": 1})
    folder = tmp_path / checkpoint_name(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda state, path: path.write_bytes(pickle.dumps(bomb())))
        Checkpointer(tmp_path, {"part": part}, World()).save(1)
    assert verify(folder) == []
    with pytest.raises(CheckpointError, match=r"part\.pt cannot be read"):
        Checkpointer(tmp_path, {"part": part}, World()).load(folder)
    assert not given
    assert not Path("exploded").exists()


SAVING: list[Point] = [
    ("write", TWO),
    *((operation, file) for file in ("model.safetensors", "optimizer.pt") for operation in ("write", "fsync", "read")),
    *((operation, "manifest.json") for operation in ("write", "fsync", "rename")),
    ("fsync", TWO),
    ("rename", TWO),
]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("at", SAVING, ids=" ".join)
def test_a_failing_disk_leaves_only_the_earlier_checkpoints(at: Point, number: int, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, components(), World())
    checkpointer.save(1)
    with observe_disk(failing(at, number)), pytest.raises(CheckpointError, match=os.strerror(number)):
        checkpointer.save(2)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)]
    assert verify(tmp_path / checkpoint_name(1)) == []
    checkpointer.save(2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(1), checkpoint_name(2)]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit each file to `size` bytes: a write fails for real, after some have succeeded."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kilobytes", [1, 30, 60])
def test_a_disk_that_becomes_full_midway_leaves_the_earlier_checkpoints(kilobytes: int, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, components(), World())
    checkpointer.save(1)
    sizes = sorted(path.stat().st_size for path in (tmp_path / checkpoint_name(1)).glob("[mo]*[st]"))
    assert sizes[0] > 30_000, sizes
    assert sizes[-1] > 60_000, sizes
    with full_disk(1000 * kilobytes), pytest.raises(CheckpointError):
        checkpointer.save(2)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)]
    assert verify(tmp_path / checkpoint_name(1)) == []


def test_a_save_fails_if_its_name_may_not_have_reached_the_disk(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path, components(), World(), keep_last=1)
    checkpointer.save(1)
    with observe_disk(failing(("fsync", tmp_path.name), errno.EIO)), pytest.raises(CheckpointError):
        checkpointer.save(2)
    assert [verify(path) for path in list_checkpoints(tmp_path)] == [[], []]


@pytest.mark.parametrize("background", [False, True])
def test_an_interrupted_save_is_not_published_by_the_next_save(background: bool, tmp_path: Path) -> None:
    def interrupt(operation: str, path: Path) -> None:
        if (operation, path.name) == ("write", "optimizer.pt"):
            raise KeyboardInterrupt

    checkpointer = Checkpointer(tmp_path, components(), World(), background=background)
    with observe_disk(interrupt), suppress(KeyboardInterrupt):
        checkpointer.save(1)
        checkpointer.finish()
    assert not list(tmp_path.iterdir())
    checkpointer.save(2)
    checkpointer.finish()
    assert list_checkpoints(tmp_path) == [tmp_path / checkpoint_name(2)]


def test_every_disk_operation_that_can_fail_a_save_is_known(tmp_path: Path) -> None:
    seen: list[Point] = []
    checkpointer = Checkpointer(tmp_path, components(), World())
    with observe_disk(noting(seen)):
        checkpointer.save(2)
    assert set(seen) == {*SAVING, ("fsync", tmp_path.name)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_is_completely_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def syncing(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def check(operation: str, path: Path) -> None:
        if operation == "rename" and path.name == checkpoint_name(1):
            [temporary] = tmp_path.iterdir()
            inside = [temporary, *temporary.rglob("*")]
            assert {"model.safetensors", "optimizer.pt", "shards", "manifest.json"} <= {each.name for each in inside}
            assert [each.name for each in inside if each.stat().st_ino not in synced] == []

    monkeypatch.setattr(os, "fsync", syncing)
    shards = Component(FunctionState(lambda: {"a": torch.ones(3)}, lambda _: None), "sharded")
    with observe_disk(check):
        Checkpointer(tmp_path, {**components(), "shards": shards}, World()).save(1)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(1)]
    assert list((tmp_path / checkpoint_name(1) / "shards").iterdir())
    assert tmp_path.stat().st_ino in synced


def test_components_missing_on_either_side_are_named(tmp_path: Path) -> None:
    parts = components()
    Checkpointer(tmp_path, parts, World()).save(1)
    folder = tmp_path / checkpoint_name(1)
    with pytest.raises(
        CheckpointError, match=r"does not contain 'extra'\. To resume without it, set resume_without=\[extra\]"
    ):
        Checkpointer(tmp_path, parts | {"extra": value({"x": 1})[0]}, World()).load(folder)
    model_only = Checkpointer(tmp_path, {"model": parts["model"]}, World())
    with pytest.raises(CheckpointError, match="contains 'optimizer', but this run has no such component"):
        model_only.load(folder)
    assert model_only.load(folder, exclude=["optimizer"]).step == 1
    with pytest.raises(CheckpointError, match=r"exclude must be one of model, optimizer.*, got 'optimiser'"):
        Checkpointer(tmp_path, parts, World()).load(folder, exclude=["optimiser"])
    others = components(1)
    before = values_of({"optimizer": others["optimizer"]})
    Checkpointer(tmp_path, others, World()).load(folder, exclude=["optimizer"])
    assert same(values_of({"optimizer": others["optimizer"]}), before)
    assert same(values_of({"model": others["model"]}), values_of({"model": parts["model"]}))


def test_two_checkpoints_are_compared_value_by_value(tmp_path: Path) -> None:
    parts = components()
    weight = next(parts["model"].stateful.parameters())  # type: ignore[attr-defined]
    checkpointer = Checkpointer(tmp_path, parts, World(), config={"lr": 1})
    checkpointer.save(1)
    with torch.no_grad():
        weight[0, 0] += 1
    checkpointer.config = {"lr": 2}
    checkpointer.save(2)
    found = compare(tmp_path / checkpoint_name(1), tmp_path / checkpoint_name(2))
    assert found == {
        "config lr": "1 and 2",
        "model.safetensors['head.weight']": "1 of 4096 elements differ, by at most 1",
        "model.safetensors['tokens.weight']": "1 of 4096 elements differ, by at most 1",
    }
    assert compare(tmp_path / checkpoint_name(1), tmp_path / checkpoint_name(1)) == {}


def test_sharded_state_is_compared_independently_of_the_number_of_shards(tmp_path: Path) -> None:
    for number, last in enumerate((1.0, 1.0, 2.0)):
        shards, _ = value({"a": torch.ones(3), "b": torch.tensor(last)}, "sharded")
        Checkpointer(tmp_path, {"shards": shards}, World(), keep_last=3).save(number)
    first, same_again, another = list_checkpoints(tmp_path)
    assert compare(first, same_again) == {}
    assert compare(first, another) == {"shards['b']": "1 of 1 elements differ, by at most 1"}


def test_the_imaginary_parts_of_complex_values_are_compared(tmp_path: Path) -> None:
    for number in (1, 2):
        part, _ = value({"frequencies": torch.tensor([1 + 1j, 1 + number * 1j])})
        Checkpointer(tmp_path, {"part": part}, World()).save(number)
    [told] = compare(*list_checkpoints(tmp_path)).values()
    assert told == "1 of 2 elements differ, by at most 1"


def test_equal_values_do_not_differ_even_if_they_are_nan(tmp_path: Path) -> None:
    part, _ = value({"loss": torch.tensor(float("nan")), "best": float("nan"), "zero": torch.tensor(0.0)})
    other, _ = value({"loss": torch.tensor(float("nan")), "best": float("nan"), "zero": torch.tensor(0)})
    for number, each in enumerate((part, part, other)):
        Checkpointer(tmp_path, {"part": each}, World(), keep_last=3).save(number)
    first, same_again, another = list_checkpoints(tmp_path)
    assert compare(first, same_again) == {}
    assert compare(first, another) == {"part.pt['zero']": "float32 [] and int64 []"}


# ------------------------------------------------------------------------------------------------- other settings


SETTINGS: dict[str, Any] = {
    "learning_rate": 0.1,
    "learning_rate_rule": "fixed",
    "model": {"width": 8, "layers": 1},
    "profile": {"steps": 0},
    "name": "one",
}


@pytest.mark.parametrize(
    ("changed", "allow", "refused"),
    [
        ({}, [], None),
        ({"name": "two", "profile": {"steps": 3}}, [], None),  # these settings never affect the computation
        ({"learning_rate": 0.2}, [], "learning_rate was 0.1, is now 0.2"),
        ({"learning_rate": 0.2}, ["learning_rate"], None),
        ({"learning_rate_rule": "linear"}, ["learning_rate"], "learning_rate_rule was 'fixed', is now 'linear'"),
        ({"model": {"width": 16, "layers": 1}}, ["model"], None),
        ({"model": {"width": 16, "layers": 2}}, ["model.width"], "model.layers was 1, is now 2"),
        ({"model": {"width": 16, "layers": 1}}, ["mod"], "model.width was 8, is now 16"),
    ],
)
def test_a_setting_may_differ_only_if_its_full_name_or_group_is_allowed(
    changed: dict[str, Any], allow: list[str], refused: str | None, tmp_path: Path
) -> None:
    checkpoints = tmp_path / CHECKPOINTS
    Checkpointer(checkpoints, {"part": value({"x": 1})[0]}, World(), config=SETTINGS).save(1)

    def found() -> Path | None:
        return find_resume_point(World(), tmp_path, "auto", SETTINGS | changed, allow).checkpoint

    if refused is None:
        assert found() == checkpoints / checkpoint_name(1)
        return
    with pytest.raises(ConfigError, match=f"created with different settings: {refused}. Use the same settings"):
        found()


# --------------------------------------------------------------------------------------------------- on real ranks


def shared_in_every_way(world: World, folder: Path, shared: bool = True) -> dict[str, Any]:
    patterns = {
        "replicated": value({"x": torch.tensor(1.0)}),
        "global": value({"x": torch.tensor(10 + world.rank)}, "global"),
        "per_rank": value({"x": torch.tensor(20 + world.rank)}, "per_rank"),
        "per_node": value({"x": torch.tensor(30.0)}, "per_node"),
        "per_group": value({"x": torch.tensor(40 + world.rank // 2)}, "per_group", 2),
    }
    checkpointer = Checkpointer(folder, {name: part for name, (part, _) in patterns.items()}, world, shared=shared)
    checkpointer.save(1)
    manifest = checkpointer.load(folder / checkpoint_name(1))
    return {
        "given": {name: int(given["x"]) for name, (_, given) in patterns.items()},
        "files": {name: [file.rank for file in stored.files] for name, stored in manifest.components.items()},
    }


def diverged(world: World, folder: Path) -> dict[str, str]:
    """Change one element of the optimizer's state on the last rank."""
    found = {}
    for check in ("none", "quick", "tensor", "full"):
        parts = components()
        optimizer: Any = parts["optimizer"].stateful
        if world.rank == world.size - 1:
            optimizer.state[optimizer.param_groups[0]["params"][3]]["exp_avg"].view(-1)[-1] += 1e-6
        checkpointer = Checkpointer(folder / check, parts, world, check=check)  # type: ignore[arg-type]
        found[check] = error_of(lambda checkpointer=checkpointer: checkpointer.save(1))  # type: ignore[misc]
    lr: Any = components()
    lr["optimizer"].stateful.param_groups[0]["lr"] += world.rank
    found["quick, lr"] = error_of(lambda: Checkpointer(folder / "lr", lr, world, check="quick").save(1))
    nothing, _ = value({})
    found["nothing"] = error_of(lambda: Checkpointer(folder / "empty", {"empty": nothing}, world).save(1))
    return found


def faults_of(world: World) -> list[tuple[int, Point]]:
    """Return a rank whose disk fails, and the operation that fails."""
    last = world.size - 1
    own = f"rng.rank_{last}.pt"
    return [(last, ("write", own)), (last, ("fsync", own)), (0, ("fsync", "model.safetensors")), (0, ("rename", TWO))]


def one_fails(world: World, folder: Path, background: bool) -> list[dict[str, Any]]:
    """Fail the disk of one rank, and then repair it."""
    checkpointer = Checkpointer(
        folder, components() | {"rng": Component(RandomState(world.device), "per_rank")}, world, background=background
    )
    checkpointer.save(1)
    checkpointer.finish()

    def save_and_wait() -> None:
        checkpointer.save(2)
        for _ in range(3000):  # until it fails
            checkpointer.poll()
            time.sleep(0.01)

    found = []
    for rank, at in faults_of(world):
        with observe_disk(failing(at, errno.EIO)) if rank == world.rank else nullcontext():
            told = error_of(save_and_wait)
        all_gather(world, None)
        there = {path.name: verify(path) for path in folder.iterdir()}
        all_gather(world, None)
        found.append({"at": (rank, at), "told": told, "there": there})
    checkpointer.save(2)
    checkpointer.finish()
    return [*found, {"after": [path.name for path in list_checkpoints(folder)]}]


def unreadable_on_one(world: World, folder: Path) -> str:
    checkpointer = Checkpointer(folder, components(), world)
    checkpointer.save(1)
    gone = observe_disk(failing(("read", "model.safetensors"), errno.ENOENT))
    with gone if world.rank == 1 else nullcontext():
        return error_of(lambda: checkpointer.load(folder / checkpoint_name(1)))


def everything(world: World, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"diverged": diverged(world, folder / "diverged")}
    if world.size % 2 == 0:
        found["one disk"] = shared_in_every_way(world, folder / "shared")
        found["own disks"] = shared_in_every_way(world, own := folder / f"disk of {world.rank}", shared=False)
        found["writes"] = own.exists()
    for background in (False, True):
        found["fails", background] = one_fails(world, folder / f"fails {background}", background)
    found["unreadable"] = unreadable_on_one(world, folder / "unreadable")
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return launch(everything, request.param, folder, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)  # groups of two ranks
def test_each_rank_restores_its_shared_state_and_each_group_writes_once(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for rank, found in [(rank, each[disks]) for rank, each in enumerate(ranks) for disks in ("one disk", "own disks")]:
        assert found["given"] == {
            "replicated": 1,
            "global": 10,
            "per_rank": 20 + rank,
            "per_node": 30,
            "per_group": 40 + rank // 2,
        }
        everyone = list(range(size))
        assert found["files"] == {
            "replicated": [0],
            "global": [0],
            "per_rank": everyone,
            "per_node": [0],
            "per_group": everyone[::2],
        }
    assert [each["writes"] for each in ranks] == [True] + [False] * (size - 1)


def test_one_different_element_on_one_rank_is_named_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for rank in ranks:
        told = rank["diverged"]
        assert told["none"] == told["quick"] == "no error"
        for check in ("tensor", "full"):
            assert told[check] == (
                "CheckpointError: optimizer['state'][3]['exp_avg'] is not the same on all ranks: rank "
                f"{last} differs from rank 0"
            )
        differ = f"{named_ranks(range(1, last + 1))} {'differ' if last > 1 else 'differs'}"
        assert told["quick, lr"].endswith(f"['lr'] is not the same on all ranks: {differ} from rank 0")
        assert told["nothing"] == "CheckpointError: component 'empty' contains no values to compare between ranks"


@pytest.mark.parametrize("background", [False, True])
def test_all_ranks_raise_if_one_rank_cannot_write(background: bool, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        *faults, then = rank["fails", background]
        assert len(faults) == 4
        for fault in faults:
            who, _ = fault["at"]
            assert fault["told"] == f"CheckpointError: rank {who}: OSError: [Errno 5] Input/output error", fault
            assert fault["there"] == {checkpoint_name(1): []}, fault
        assert then["after"] == [checkpoint_name(1), checkpoint_name(2)]


def test_all_ranks_raise_if_one_rank_cannot_read(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["unreadable"].startswith("CheckpointError: rank 1: ")
        assert rank["unreadable"].endswith("model.safetensors is missing")


# ----------------------------------------------------------------------------------------- another number of ranks


def save_per_rank(world: World, folder: Path) -> None:
    part, _ = value({"x": torch.tensor(world.rank)}, "per_rank")
    Checkpointer(folder, {"own": part}, world).save(1)


def load_per_rank(world: World, folder: Path) -> dict[str, Any]:
    part, given = value({"x": torch.tensor(0)}, "per_rank")
    checkpointer = Checkpointer(folder, {"own": part}, world)
    told = error_of(lambda: checkpointer.load(folder / checkpoint_name(1)))
    manifest: Manifest = checkpointer.load(folder / checkpoint_name(1), exclude=["own"])
    return {"told": told, "given": dict(given), "saved on": manifest.world_size}


def test_per_rank_state_that_cannot_be_resharded_is_named(tmp_path: Path) -> None:
    launch(save_per_rank, 2, tmp_path, device="cpu", echo=False)
    for size in (1, 3):
        check_not_given(tmp_path, size)


def check_not_given(folder: Path, size: int) -> None:
    for found in launch(load_per_rank, size, folder, device="cpu", echo=False):
        assert found["told"] == (
            f"CheckpointError: component 'own' is per_rank: its state in {folder / checkpoint_name(1)} was saved by 2 "
            f"ranks and cannot be loaded on {size} ranks. To resume without this component, set "
            "resume_without=[own], or pass exclude=['own'] to Checkpointer.load"
        )
        assert found["given"] == {}
        assert found["saved on"] == 2


class Sharded:
    """A component with two tensors of which each rank has some rows; `start` is in their first elements."""

    def __init__(self, world: World, start: float) -> None:
        mesh = init_device_mesh("cpu", (world.size,))
        whole = {"a": torch.arange(70.0).reshape(10, 7) + start, "b": torch.arange(3.0) + start}
        self.state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: tensor.full_tensor() for name, tensor in self.state.items()}


def reshard(world: World, folder: Path, step: int, start: float | None) -> dict[str, Any]:
    """Load the checkpoint of the previous world, except in the first world, and save it again."""
    shards = Sharded(world, 0.0 if start is None else start)
    checkpointer = Checkpointer(folder, {"shards": Component(shards, "sharded")}, world)
    if start is None:
        checkpointer.load(folder / checkpoint_name(step - 1))
    checkpointer.save(step)
    files = sorted(path.name for path in (folder / checkpoint_name(step) / "shards").iterdir())
    return {
        "whole": shards.whole(),
        "rows": shards.state["a"].to_local().shape[0],
        "files": files,
        "missing": error_of(lambda: load_tensor_missing_on_rank_0(world, folder / checkpoint_name(step) / "shards")),
        "full disk": error_of(lambda: save_with_full_disk_on_rank_0(checkpointer)),
    }


def load_tensor_missing_on_rank_0(world: World, folder: Path) -> None:
    names = ["a", "missing"] if world.is_main else ["a"]
    empty = FunctionState(lambda: {name: torch.zeros(10, 7) for name in names}, lambda state: None)
    load_shards(folder, empty, world)


def save_with_full_disk_on_rank_0(checkpointer: Checkpointer) -> None:
    with full_disk(100) if checkpointer.world.is_main else nullcontext():
        checkpointer.save(99)


def test_sharded_tensors_load_on_4_2_and_3_ranks_without_a_pickle(tmp_path: Path) -> None:
    expected = {"a": torch.arange(70.0).reshape(10, 7) + 5, "b": torch.arange(3.0) + 5}
    for step, (size, rows) in enumerate([(4, [3, 3, 3, 1]), (2, [5, 5]), (3, [4, 4, 2])], start=1):
        start = 5.0 if step == 1 else None
        ranks = launch(reshard, size, tmp_path, step, start, device="cpu", threads=1, echo=False, timeout=300)
        assert [found["rows"] for found in ranks] == rows
        for found in ranks:
            assert same(found["whole"], expected)
            assert len(found["files"]) == size
            assert all(name.endswith(".safetensors") for name in found["files"])
            missing = "RuntimeError: Missing key in checkpoint state_dict: missing."
            assert found["missing"] == f"CheckpointError: rank 0: {missing}"
            assert found["full disk"].startswith("CheckpointError: rank 0: ")
            assert "File too large" in found["full disk"]
        assert verify(tmp_path / checkpoint_name(step)) == []
        assert sorted(tmp_path.iterdir()) == list_checkpoints(tmp_path), "what the full disk interrupted is removed"


class EmptyAtFirst:
    """A component without tensors until it has loaded some, like an optimizer before its first step."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def empty(self, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in stored.items()}


def test_one_process_can_load_sharded_state_that_is_initially_empty(tmp_path: Path) -> None:
    saved = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(2)}
    write_shards(tmp_path, saved, World())
    loaded = EmptyAtFirst()
    load_shards(tmp_path, loaded, World())
    assert same(dict(sorted(loaded.state.items())), saved)


def save_and_load_on_rank_0(world: World, folder: Path) -> dict[str, Any]:
    """Save and load sharded state on rank 0 alone, while the process group contains several ranks."""
    saved, _ = value({"x": torch.ones(2)}, "sharded")
    empty, given = value({"x": torch.zeros(2)}, "sharded")
    if world.is_main:
        Checkpointer(folder, {"own": saved}, World()).save(1)
        Checkpointer(folder, {"own": empty}, World()).load(folder / checkpoint_name(1))
    return {name: tensor.tolist() for name, tensor in given.items()}


def test_a_world_of_one_rank_loads_sharded_state_without_the_other_ranks(tmp_path: Path) -> None:
    of_ranks = launch(save_and_load_on_rank_0, 2, tmp_path, device="cpu", threads=1, echo=False, timeout=60)
    assert of_ranks == [{"x": [1.0, 1.0]}, {}]


def test_two_ranks_without_a_group_raise(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        Checkpointer(tmp_path, components(), World(0, 2, 0, 2))


def uneven(world: World, folder: Path) -> str:
    """Simulate two machines, one of which has two of the three ranks."""
    here = replace(world, local_rank=world.rank % 2, local_size=2 if world.rank < 2 else 1)
    part = Component(FunctionState(lambda: {"x": 1}, lambda state: None), "per_node")
    Checkpointer(folder, {"part": replace(part, shared="replicated")}, here)
    return error_of(lambda: Checkpointer(folder, {"part": part}, here))


def alternating(world: World, folder: Path) -> str:
    """Simulate two machines that receive the four ranks in turn, as with `srun --distribution=cyclic`."""
    here = replace(world, local_rank=world.rank // 2, local_size=2)
    part = Component(FunctionState(lambda: {"x": 1}, lambda state: None), "per_node")
    return error_of(lambda: Checkpointer(folder, {"part": part}, here))


def test_nodes_whose_ranks_are_not_consecutive_are_rejected_on_all_ranks(tmp_path: Path) -> None:
    told = (
        "ValueError: 'part' is per_node, so the ranks of a node must be consecutive, but rank 1 has local rank 0 of 2"
    )
    for each in launch(alternating, 4, tmp_path, device="cpu", threads=1, echo=False, timeout=300):
        assert each.startswith(told)


def test_nodes_with_different_numbers_of_ranks_are_rejected_on_all_ranks(tmp_path: Path) -> None:
    told = "ValueError: 'part' is per_node, so all nodes must have the same number of ranks, got 1 and 2"
    assert launch(uneven, 3, tmp_path, device="cpu", threads=1, echo=False, timeout=300) == [told] * 3
