"""An interrupted and resumed run is bitwise identical to an uninterrupted run, with the trainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from commands import call
from ddp_tutorial.checkpoint.consistency import named_leaves
from ddp_tutorial.checkpoint.manifest import checkpoint_name, list_checkpoints, read_manifest
from ddp_tutorial.collectives import all_reduce_sum, digest
from ddp_tutorial.commands.training import _summary_line
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import locked, observe_disk, replaced_path
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.processes.signals import EXIT_CODE, StoppedError, exit_code, stopped_by_signals
from ddp_tutorial.runs.folder import RunFolder, request_stop
from ddp_tutorial.runs.summaries import find_runs, state_of
from ddp_tutorial.training import stopping
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.stopping import StopRequests
from ddp_tutorial.training.tasks import make_trainer, train
from ddp_tutorial.world import World
from ranks import TORCHRUN, wait_until

pytestmark = pytest.mark.usefixtures("workdir")

STEPS = 6
BASE: dict[str, Any] = {
    "corpus": "stories:300",
    "model": ModelConfig(layers=1, heads=2, width=16, context=16, dropout=0.1),
    "device": "cpu",
    "steps": STEPS,
    "batch_size": 6,
    "warmup_steps": 2,
    "log_every": 2,
    "eval_every": 3,
    "eval_samples": 6,
    "checkpoint": {"every": 1, "keep_last": 100},
}
FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and float16": {
        "accumulation": 2,
        "precision": {"dtype": "fp16", "initial_scale": 2.0**24, "growth_interval": 2},
    },
    "dispatched": {"source": {"kind": "dispatched"}},
    "streamed": {"source": {"kind": "streamed", "shuffle_buffer": 20}},
    "fast stream": {"source": {"kind": "fast_stream", "window": 32}},
    "workers": {"source": {"workers": 1}},
    "bucket and sgd": {
        "ddp": {"variant": "bucket", "bucket_cap_mb": 0.01},
        "optimizer": "sgd",
        "schedule": "linear",
    },
    "what is left out arrives later": {"ddp": {"variant": "bucket", "hook": "powersgd", "bucket_cap_mb": 0.01}},
    "invariant": {"strategy": "invariant", "micro_batches": 4, "batch_size": 8},
    "recomputed, in the background": {
        "model": BASE["model"].model_copy(update={"recompute": True}),
        "checkpoint": {"every": 1, "keep_last": 100, "background": True},
    },
}


def config_of(flavour: str = "plain", **values: Any) -> TaskConfig:
    return TaskConfig.model_validate(BASE | FLAVOURS[flavour] | values)


VARYING = {"seconds", "tokens_per_second", "elapsed", "ranks"}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the fields that must be equal in each step: all except times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in VARYING} for line in lines]


def outcome(config: TaskConfig, world: World) -> dict[str, Any]:
    trainer = make_trainer(config, world)
    result = trainer.train()
    state = {
        where: value
        for where, value in named_leaves(
            "", {name: part.stateful.state_dict() for name, part in trainer.components().items()}
        )
        if isinstance(value, torch.Tensor)
    }
    return {
        "weights": result.weights,
        "losses": result.losses,
        "eval": result.eval_losses,
        "state": digest(state),  # the optimizer's state, and random numbers
        "rows": rows_of(result.run),
    }


def all_flavours(world: World, flavours: list[str], steps: list[int]) -> dict[tuple[str, int], Any]:
    """Run from the checkpoint of each step in a copy of the run's folder, or without interruption from step 0."""
    found = {}
    for flavour, step in product(flavours, steps):
        name = flavour.replace(" ", "-").replace(",", "")
        if step == 0:
            found[flavour, step] = outcome(config_of(flavour, name=name), world)
            continue
        again = f"{name}-{step}"
        if world.is_main:
            shutil.copytree(Path("runs") / name, Path("runs") / again)
            for later in range(step + 1, STEPS + 1):
                shutil.rmtree(Path("runs") / again / "checkpoints" / checkpoint_name(later))
        found[flavour, step] = outcome(config_of(flavour, name=again, resume="auto"), world)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@cache
def lives(folder: Path, size: int, flavours: tuple[str, ...], *steps: int) -> list[dict[tuple[str, int], Any]]:
    """Return the outcome of each flavour, from step 0 and in new processes from the given steps, on each rank."""
    there = folder / str(size)
    there.mkdir()
    with chdir(there):
        whole, resumed = (
            launch(all_flavours, size, list(flavours), from_steps, device="cpu", threads=1, echo=False, timeout=500)
            for from_steps in ([0], list(steps))
        )
    return [before | after for before, after in zip(whole, resumed, strict=True)]


@pytest.mark.parametrize("step", range(1, STEPS))
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_run_resumed_after_any_step_is_bitwise_identical(flavour: str, step: int, folder: Path) -> None:
    for found in lives(folder, 2, tuple(FLAVOURS), *range(1, STEPS)):
        assert found[flavour, step] == found[flavour, 0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("flavour", ["plain", "bucket and sgd"])
def test_a_run_of_any_world_size_resumes_bitwise_identically(flavour: str, size: int, folder: Path) -> None:
    """On three ranks, sums depend on the buckets, which DDP rebuilds after its first step."""
    for found in lives(folder, size, ("plain", "bucket and sgd"), 3):
        assert found[flavour, 3] == found[flavour, 0]


def test_float16_overflowed_during_the_run(folder: Path) -> None:
    found = lives(folder, 2, tuple(FLAVOURS), *range(1, STEPS))[0]
    scales = [row["loss_scale"] for row in found["accumulation and float16", 0]["rows"] if "loss_scale" in row]
    assert min(scales) < 2.0**24


def test_2_ranks_then_3_then_1_resume_with_the_same_samples() -> None:
    smooth = {"model": BASE["model"].model_copy(update={"dropout": 0.0}), "batch_size": 12}
    whole = train(World(), config_of(name="whole", **smooth))
    moved = config_of(name="moved", resume="auto", **smooth)
    for size, until in ((2, 2), (3, 4)):
        for result in launch(stop_at, size, until, moved, device="cpu", echo=False):
            assert result.losses == pytest.approx(whole.losses[:until], rel=1e-4)
    result = train(World(), moved)
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    assert result.eval_losses[STEPS] == pytest.approx(whole.eval_losses[STEPS], rel=1e-4)
    assert [row["step"] for row in rows_of(Path("runs/moved")) if "loss" in row] == list(range(1, STEPS + 1))


def test_a_new_rank_does_not_get_the_random_numbers_of_rank_0() -> None:
    train(World(), config_of(name="alone"))
    ranks = launch(
        random_state_of, 2, config_of(name="two", resume="runs/alone", steps=STEPS), device="cpu", echo=False
    )
    assert ranks[0] != ranks[1]


def random_state_of(world: World, config: TaskConfig) -> str:
    trainer = make_trainer(config, world)
    trainer.resume()
    trainer.log.close_file()
    return digest({"torch": torch.get_rng_state()})


def stop_at(world: World, step: int, config: TaskConfig) -> Any:
    """Train, with a request to save and stop at a step."""
    trainer = make_trainer(config, world)
    answer = trainer.stopping.decide
    trainer.stopping.decide = lambda votes: "save" if trainer.step_count == step else answer(votes)  # type: ignore[method-assign]
    return trainer.train()


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_different_setting_is_reported_and_can_be_allowed_by_name() -> None:
    train(World(), config_of(name="first"))
    different = config_of(name="second", resume="runs/first", learning_rate=0.01, weight_decay=0.5, nprocs=1)
    with pytest.raises(ConfigError) as error:
        train(World(), different)
    assert (
        "learning_rate was 0.003, is now 0.01; weight_decay was 0.1, is now 0.5. Use the same settings, or allow the "
        "changes with " in str(error.value)
    )
    assert "resume_allow=[learning_rate, weight_decay]" in str(error.value)
    allowed = different.model_copy(update={"resume_allow": ("learning_rate", "weight_decay"), "name": "third"})
    assert len(train(World(), allowed).losses) == STEPS


def test_a_component_can_be_excluded_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    train(World(), config_of(name="first"))
    start = f"runs/first/checkpoints/{checkpoint_name(3)}"
    exact = train(World(), config_of(name="exact", resume=start))
    without = train(World(), config_of(name="without", resume=start, resume_without=("optimizer",)))
    assert f"resuming after step 3, from {start}, without optimizer" in capsys.readouterr().err
    assert without.losses[:4] == exact.losses[:4], "the loss of step 4 is from before its update"
    assert without.losses[4:] != exact.losses[4:]


def test_an_impossible_resume_is_rejected_at_the_start() -> None:
    with pytest.raises(ValueError, match="'resume' must not be auto for a run without a name; set name=NAME"):
        config_of(resume="auto")


def test_a_path_without_a_checkpoint_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="the path of a checkpoint or a run with a valid checkpoint, got runs/nothing"
    ):
        train(World(), config_of(resume="runs/nothing"))


def test_auto_starts_or_resumes_depending_on_the_folder() -> None:
    config = config_of(name="mine", resume="auto")
    first = train(World(), config)
    again = train(World(), config)
    assert first.run == again.run == Path("runs/mine")
    assert again.losses == first.losses
    assert len(rows_of(first.run)) == STEPS + 2


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(name="mine", resume="auto")
    first = train(World(), config)
    for step in (STEPS, STEPS - 1):
        (first.run / "checkpoints" / checkpoint_name(step) / "optimizer.pt").write_bytes(b"")
    assert train(World(), config).weights == first.weights
    said = capsys.readouterr().err
    assert said.count("skipped checkpoint: ") == 2
    assert f"{checkpoint_name(STEPS)}/optimizer.pt must have " in said
    assert f"resuming after step {STEPS - 2}" in said


def test_a_run_resumes_from_a_checkpoint_whose_replacement_was_interrupted() -> None:
    config = config_of(name="replaced", resume="auto")
    weights = train(World(), config).weights
    last = RunFolder(Path("runs/replaced")).checkpoints / checkpoint_name(STEPS)
    last.rename(replaced_path(last))  # as after a kill between the two renames
    assert train(World(), config).weights == weights
    assert list_checkpoints(last.parent)[-1] == last


def test_two_runs_in_one_folder_are_rejected() -> None:
    config = config_of(name="mine", resume="auto")
    train(World(), config)
    before = rows_of(Path("runs/mine"))
    other = config.model_copy(update={"learning_rate": 0.5})
    part = Path("runs/mine/checkpoints/.step_00000009.1.2.part")
    part.mkdir()
    with (
        locked(Path("runs/mine")),
        pytest.raises(RankError, match="raised FolderInUseError: runs/mine is in use by another"),
    ):
        launch(train, 2, other, device="cpu", echo=False)
    assert rows_of(Path("runs/mine")) == before
    assert json.loads(Path("runs/mine/config.json").read_text())["learning_rate"] == 0.003
    assert part.exists(), "it may be what the other run is writing"


def test_a_run_that_just_started_is_seen_as_running() -> None:
    trainer = make_trainer(config_of(name="mine"), World())
    assert find_runs() == []
    states = set()
    with observe_disk(lambda operation, path: states.update(state_of(each) for each in find_runs())):
        trainer.train()
    assert states == {"running"}
    assert state_of(Path("runs/mine")) == "finished"


def test_the_manifest_describes_the_run_and_its_metrics() -> None:
    train(World(), config_of(name="mine", checkpoint={"every": 4, "keep_last": 5}))
    found = list_checkpoints(Path("runs/mine/checkpoints"))
    assert [path.name for path in found] == [checkpoint_name(4), checkpoint_name(6)], "and at the end"
    manifest = read_manifest(found[-1])
    assert manifest.config["learning_rate"] == 0.003
    assert set(manifest.metrics) == {"loss", "eval_loss"}
    assert set(manifest.components) == {"model", "optimizer", "scheduler", "source", "strategy", "progress", "rng"}


# --------------------------------------------------------------------------------------------------------- stopping


def requests(world: World) -> list[list[str]]:
    found = []
    for number, who in enumerate([None, 0, 1]):
        run = RunFolder(Path(f"stop{number}"))
        run.path.mkdir(exist_ok=True)
        stopping, seen = StopRequests(world, run), []
        for step in range(3):
            stopping.signalled = world.rank == who and step == 1
            votes = float(all_reduce_sum(world, torch.tensor(float(stopping.local_stop_flags()))))
            seen.append(stopping.decide(votes))
        found.append(seen)
    return found


def test_a_request_to_one_rank_stops_all_ranks_after_the_same_step() -> None:
    assert launch(requests, 2, device="cpu", echo=False) == [[["", "", ""], ["", "signal", ""], ["", "signal", ""]]] * 2
    assert requests(World())[:2] == [["", "", ""], ["", "signal", ""]]


@pytest.fixture
def asks_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "CHECK_EVERY", 0)


@pytest.mark.usefixtures("asks_in_each_step")
def test_a_signal_takes_precedence_over_a_request_to_rank_0(workdir: Path) -> None:
    ranks = [StopRequests(World(rank, 8, rank, 8), RunFolder(workdir)) for rank in range(8)]

    def answer() -> str:
        (found,) = {rank.decide(sum(each.local_stop_flags() for each in ranks)) for rank in ranks}
        return found

    assert answer() == ""
    for asked in ("stop", "save"):
        ranks[0].request.write_text(asked)
        assert answer() == asked
    for rank in reversed(ranks):
        rank.signalled = True
        assert answer() == "signal"


def test_short_steps_check_for_a_request_only_occasionally(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "CHECK_EVERY", 60)
    rank = StopRequests(World(), RunFolder(workdir))
    assert rank.local_stop_flags() == 0
    rank.request.write_text("stop")
    assert rank.local_stop_flags() == 0
    rank.signalled = True
    assert rank.decide(rank.local_stop_flags()) == "signal", "which costs nothing to see"
    rank.signalled = False
    monkeypatch.setattr(stopping, "CHECK_EVERY", 0)
    assert rank.decide(rank.local_stop_flags()) == "stop"


@pytest.mark.usefixtures("asks_in_each_step")
def test_a_request_is_never_partially_written(workdir: Path) -> None:
    (workdir / "config.json").write_text("{}")
    rank, asked = StopRequests(World(), RunFolder(workdir)), []
    with observe_disk(lambda *_: asked.append(rank.decide(rank.local_stop_flags()))):
        request_stop(workdir, "save")
    asked.append(rank.decide(rank.local_stop_flags()))
    assert len(asked) > 2, "a reader looked in between"
    assert set(asked) == {"", "save"}


def asking(run: RunFolder, request: Any) -> AbstractContextManager[None]:
    """Request a stop during the first step, so that the second step is the last."""
    asked: list[bool] = []

    def ask(_: PhaseEvent) -> None:
        if not asked and run.exists():
            asked.append(True)
            request_stop(run.path, request)

    return observe(ask)


@pytest.mark.usefixtures("asks_in_each_step")
@pytest.mark.parametrize("request_", ["save", "stop"])
def test_a_request_stops_a_run_with_or_without_a_checkpoint(request_: Any) -> None:
    config = config_of(name="mine", resume="auto", checkpoint={"every": 100})
    trainer = make_trainer(config, World())
    with asking(trainer.run, request_):
        result = trainer.train()
    assert result.stopped_at == 2
    assert not trainer.run.stop_request.exists()
    told = json.loads(trainer.run.result.read_text())
    assert (told["status"], told["reason"], result.by_signal) == ("stopped", "a request", False)
    assert [path.name for path in list_checkpoints(trainer.run.checkpoints)] == (
        [checkpoint_name(2)] if request_ == "save" else []
    )
    whole = train(World(), config_of(name="whole"))
    again = train(World(), config)
    assert again.weights == whole.weights
    assert again.stopped_at is None


@pytest.mark.usefixtures("asks_in_each_step")
def test_a_requested_save_does_not_repeat_a_scheduled_save() -> None:
    trainer = make_trainer(config_of(name="mine", checkpoint={"every": 1}), World())
    saved: list[str] = []
    note = observe(lambda edge: saved.append(edge.name) if edge.entered and edge.name == "save: rename" else None)
    with note, asking(trainer.run, "save"):
        assert trainer.train().stopped_at == 2
    assert len(saved) == 2


RUN = Path("runs/mine")
ENDLESS_STEPS = 100_000
ENDLESS = [
    "name=mine",
    "resume=auto",
    f"steps={ENDLESS_STEPS}",
    f"checkpoint.every={ENDLESS_STEPS}",
    f"eval_every={ENDLESS_STEPS}",
]
ENDLESS += ["log_every=5"]


def started(*command: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process in its own process group, so that a signal can be sent to the whole group."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **options)


def wait_while_running(running: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, unless the process exits before."""
    wait_until(lambda: condition() or running.poll() is not None, seconds=300)


def has_logged(run: Path) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def stopped_in_this_process(stop: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Return the output of a run that `stop` stops from a thread, and its exit code."""
    thread = threading.Thread(target=lambda: wait_until(lambda: has_logged(RUN), seconds=300) and stop())
    thread.start()
    with stopped_by_signals():  # a signal that arrives too late does not kill this process
        try:
            return call("train", "tiny", *ENDLESS)
        finally:
            thread.join()


def stopped_by_a_cluster() -> subprocess.CompletedProcess[str]:
    """Send SIGTERM to all processes of the job, including data loading workers, as a cluster does."""
    running = started(sys.executable, "-m", "ddp_tutorial", "train", "tiny", *ENDLESS, "source.workers=1")
    wait_while_running(running, lambda: has_logged(RUN))
    os.killpg(running.pid, signal.SIGTERM)
    out, err = running.communicate(timeout=300)
    return subprocess.CompletedProcess((), running.returncode, out, err)


def stop_on_the_command_line() -> None:
    command = [sys.executable, "-m", "ddp_tutorial", "stop", str(RUN), "--save"]
    subprocess.run(command, check=True, capture_output=True)


STOPPED: dict[str, Callable[[], subprocess.CompletedProcess[str]]] = {
    "SIGTERM": stopped_by_a_cluster,
    "SIGUSR1": lambda: stopped_in_this_process(lambda: os.kill(os.getpid(), signal.SIGUSR1)),
    "stop": lambda: stopped_in_this_process(stop_on_the_command_line),
}


@pytest.mark.parametrize("how", STOPPED)
def test_a_signaled_run_saves_and_resumes_with_the_same_command(how: str) -> None:
    done = STOPPED[how]()
    assert done.returncode == EXIT_CODE, done.stderr
    [saved] = list_checkpoints(RUN / "checkpoints")
    step = read_manifest(saved).step
    assert f"stopped after step {step} of {ENDLESS_STEPS}: runs/mine" in done.stdout
    workers = f"source.workers={int(how == 'SIGTERM')}"
    code, text = told("train", "tiny", *ENDLESS, workers, f"steps={step + 1}", "resume_allow=[steps]")
    assert code == 0, text
    assert f"resuming after step {step}, from " in text


def ranks_are_starting(parent: int) -> bool:
    """Return whether two of its processes are importing torch, too early to handle a signal."""
    return sum("spawn_main" in " ".join(process.cmdline()) for process in psutil.Process(parent).children()) == 2


@pytest.mark.parametrize("what", ["torch is imported", "ranks start"])
def test_a_signal_during_startup_stops_the_run_without_a_failure(what: str) -> None:
    running = started(sys.executable, "-m", "ddp_tutorial", "train", "tiny", *ENDLESS)
    if what == "torch is imported":
        wait_while_running(running, lambda: "libtorch" in Path(f"/proc/{running.pid}/maps").read_text())
    else:
        wait_while_running(running, lambda: ranks_are_starting(running.pid))
    os.killpg(running.pid, signal.SIGTERM)
    _, err = running.communicate(timeout=300)
    assert running.returncode == EXIT_CODE, err
    assert err.endswith("stopped by SIGTERM before there was anything to save\n")
    assert not list(Path("runs").glob("*/checkpoints/*"))


def test_a_signal_is_not_swallowed_by_broad_exception_handlers() -> None:
    """torch has many such handlers in code that runs at import."""

    @stopped_by_signals()
    def signalled() -> None:
        with suppress(Exception):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        signalled()


def test_a_signal_that_arrives_inside_a_finalizer_is_not_lost() -> None:
    """Python ignores exceptions in finalizers, and in callbacks that the import system registers for each module."""

    class Signals:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    @stopped_by_signals()
    def signalled() -> None:
        Signals()
        wait_until(lambda: False, seconds=60)

    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        signalled()


@pytest.mark.parametrize(
    ("environ", "by_signal", "code"),
    [
        ({}, True, EXIT_CODE),
        ({}, False, EXIT_CODE),
        ({"TORCHELASTIC_RUN_ID": "7"}, True, 0),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True, EXIT_CODE),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, False, 0),
        ({"SLURM_JOB_ID": "7"}, False, EXIT_CODE),
    ],
)
def test_the_exit_code_requeues_a_run_only_if_a_cluster_stopped_it(
    environ: dict[str, str], by_signal: bool, code: int
) -> None:
    assert exit_code(environ, by_signal=by_signal) == code


def test_torchrun_does_not_restart_a_run_that_was_asked_to_stop() -> None:
    restarting = [*TORCHRUN, "--max-restarts", "1"]
    running = started(*restarting, "-m", "ddp_tutorial", "train", "tiny", *ENDLESS, OMP_NUM_THREADS="1")
    wait_while_running(running, lambda: has_logged(RUN))
    request_stop(RUN, "save")
    wait_while_running(running, (RUN / "result.json").exists)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    result = json.loads((RUN / "result.json").read_text())
    assert result["status"] == "stopped"
    assert [read_manifest(saved).step for saved in list_checkpoints(RUN / "checkpoints")] == [result["step"]]
    assert out.count("stopped after step") == 1
    assert "restart" not in err


# ------------------------------------------------------------------------------------------------- the command line


def told(*arguments: str) -> tuple[int, str]:
    done = call(*arguments)
    return done.returncode, done.stdout + done.stderr


def test_checkpoints_are_listed_inspected_verified_and_compared() -> None:
    train(World(), config_of(name="mine", checkpoint={"every": 3}))
    code, text = told("checkpoint", "list", "runs/mine")
    assert code == 0
    assert [line.split()[1] for line in text.splitlines()] == ["3", "6"]
    code, text = told("checkpoint", "list", "runs/mine", "--json")
    assert [row["step"] for row in json.loads(text)] == [3, 6]
    code, text = told("checkpoint", "inspect", "runs/mine")
    assert "step 6 on 1 ranks" in text
    assert "model.safetensors" in text
    code, text = told("checkpoint", "inspect", f"runs/mine/checkpoints/{checkpoint_name(3)}", "--json")
    assert json.loads(text)["step"] == 3
    assert told("checkpoint", "verify", "runs/mine")[0] == 0
    Path("mine").mkdir()  # does not hide the run with this name
    assert told("checkpoint", "list", "mine") == told("checkpoint", "list", "runs/mine")
    code, text = told(
        "checkpoint",
        "diff",
        f"runs/mine/checkpoints/{checkpoint_name(3)}",
        f"runs/mine/checkpoints/{checkpoint_name(6)}",
    )
    assert code == 1
    assert "model.safetensors['norm.weight']: 16 of 16 elements differ" in text
    assert told("checkpoint", "diff", "runs/mine", "runs/mine") == (0, "equal\n")
    (Path("runs/mine/checkpoints") / checkpoint_name(6) / "rng.pt").unlink()
    code, text = told("checkpoint", "verify", "runs/mine")
    assert code == 1
    assert f"{checkpoint_name(6)}/rng.pt is missing" in text
    code, text = told(
        "train", "tiny", f"resume=runs/mine/checkpoints/{checkpoint_name(6)}", "resume_allow=[model,corpus,steps]"
    )
    assert code == 2
    assert text.count("was ") >= 3


NO_RUNS = "error: there is no run named '/nope': runs/ contains no runs\n"


def test_a_folder_that_is_not_a_run_exits_with_code_2() -> None:
    Path("empty").mkdir()
    assert told("checkpoint", "list", "empty") == (2, "error: 'empty' does not contain a checkpoint\n")
    for command in (["list", "/nope"], ["diff", "empty", "/nope"], ["verify", "/nope"]):
        code, text = told("checkpoint", *command)
        assert code == 2
        assert text in {"error: 'empty' does not contain a checkpoint\n", NO_RUNS}
    code, text = told("stop", "empty")
    assert code == 2
    assert text.startswith("error: there is no run named 'empty'")


def test_a_run_that_is_not_running_cannot_be_stopped() -> None:
    run = RunFolder(Path("runs/mine"))
    run.create()
    run.config.write_text('{"steps": 3}')
    assert told("stop", "mine") == (
        2,
        "error: runs/mine is not running, so it cannot be stopped; its state is killed\n",
    )
    assert not run.stop_request.exists(), "a later attempt would stop after its first step"
    with locked(run.path):
        assert told("stop", "mine") == (0, "runs/mine will stop after its current step\n")
    assert run.stop_request.read_text() == "stop"


@pytest.mark.parametrize(("folder", "how"), [("mine", "auto"), ("mine-2", "runs/mine-2")])
def test_a_stopped_run_names_the_folder_from_which_it_resumes(folder: str, how: str) -> None:
    """If the name exists already, the folder's name contains a number, so `resume=auto` would find a different run."""
    Path("runs", folder, "checkpoints", checkpoint_name(2)).mkdir(parents=True)
    summary = {"status": "stopped", "step": 2, "parameters": {"name": "mine", "steps": 4}, "metrics": {}}
    assert _summary_line(Path("runs", folder), summary).endswith(f"\nto resume, rerun the command with resume={how}")


def test_listing_does_not_import_torch() -> None:
    (Path("runs/mine/checkpoints") / checkpoint_name(1)).mkdir(parents=True)
    (Path("runs/mine/checkpoints") / checkpoint_name(1) / "manifest.json").write_text("{}")
    code = "import sys; from ddp_tutorial.__main__ import cli\n"
    code += "cli(['checkpoint', 'list', 'runs/mine'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nsys.exit('torch' in sys.modules)"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "manifest.json is damaged" in done.stdout
