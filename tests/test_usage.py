"""Memory and time of each rank, rank logs, and stopping for lack of improvement."""

import errno
import gzip
import json
import logging
import math
import os
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_tutorial import phases
from ddp_tutorial.commands.logs import logs
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.runs import usage
from ddp_tutorial.runs.folder import RunFolder, load_run
from ddp_tutorial.runs.rank_logs import LOG, record_failure
from ddp_tutorial.runs.summaries import straggler
from ddp_tutorial.runs.usage import imbalance
from ddp_tutorial.training.config import EarlyStoppingConfig, ModelConfig, ProfileConfig, TaskConfig, TrainConfig
from ddp_tutorial.training.evaluation_tracker import EvaluationTracker
from ddp_tutorial.training.export import evaluate
from ddp_tutorial.training.stopping import best_step, stopping_rule, without_progress
from ddp_tutorial.training.tasks import make_trainer, train
from ddp_tutorial.training.trainer import TrainResult
from ddp_tutorial.training.weights import load_weights
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")

QUICK = TaskConfig(
    corpus="stories",
    model=ModelConfig(layers=1, heads=2, width=32, context=32),
    steps=6,
    batch_size=8,
    warmup_steps=2,
    log_every=2,
    eval_every=2,
    eval_samples=8,
)


def config_of(**changed: object) -> TaskConfig:
    return TaskConfig.model_validate(QUICK.model_dump() | changed)


# ----------------------------------------------------------------------------------------------- lack of progress


def test_evaluations_without_improvement_are_counted_from_the_best() -> None:
    losses = {10: 3.0, 20: 2.0, 30: 2.5, 40: 1.9, 50: 2.0, 60: 1.95}
    assert [without_progress(dict(list(losses.items())[:n])) for n in range(7)] == [0, 0, 0, 1, 0, 1, 2]
    # lower by 0.1 is not lower by more than 0.2, measured from the last one that counted: 2.0
    assert without_progress(losses, minimum_delta=0.2) == 4
    assert without_progress(losses, minimum_delta=0.2, grace_steps=40) == 2
    assert best_step(losses) == 40


def test_a_non_finite_loss_is_not_an_improvement() -> None:
    assert without_progress({1: 2.0, 2: math.nan, 3: math.inf}) == 2
    assert best_step({1: math.nan, 2: 5.0, 3: math.inf}) == 2
    assert best_step({1: math.nan}) is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_the_count_is_the_distance_to_the_first_best(values: list[float]) -> None:
    losses = dict(enumerate(values))
    best = best_step(losses)
    assert best == values.index(min(values))
    assert without_progress(losses) == len(values) - 1 - values.index(min(values))


def test_all_ranks_stop_at_the_same_step_when_the_loss_stops_falling() -> None:
    # no evaluation is 100 lower: the first is the best, followed by two others
    stopping = EarlyStoppingConfig(patience=2, minimum_delta=100.0).model_dump()
    config = config_of(early_stopping=stopping, steps=50, name="early", best_model=True)
    results = launch(train, 2, config, device="cpu", echo=False)
    assert [sorted(result.eval_losses) for result in results] == [[2, 4, 6]] * 2
    assert {len(result.losses) for result in results} == {6}
    assert {result.stopped_at for result in results} == {None}
    told = load_run("runs/early").result
    assert told is not None
    assert (told["status"], told["step"]) == ("finished", 6)
    losses = results[0].eval_losses
    assert told["metrics"]["best_step"] == min(losses, key=losses.__getitem__)
    assert told["reason"] == f"no improvement since step {told['metrics']['best_step']}"


def test_evaluations_in_the_grace_steps_are_not_counted() -> None:
    stopping = EarlyStoppingConfig(patience=1, minimum_delta=100.0, grace_steps=7).model_dump()
    result = train(World(), config_of(early_stopping=stopping, steps=50))
    assert sorted(result.eval_losses) == [2, 4, 6, 8]


def test_a_resumed_run_stalls_at_the_step_where_the_uninterrupted_one_does() -> None:
    stopping = EarlyStoppingConfig(patience=3, minimum_delta=100.0).model_dump()
    saving = {"checkpoint": {"every": 2, "keep_last": 10}, "early_stopping": stopping, "steps": 50}
    whole = train(World(), config_of(name="whole", **saving))
    again = train(World(), config_of(name="again", resume="runs/whole/checkpoints/step_00000004", **saving))
    assert sorted(whole.eval_losses) == sorted(again.eval_losses) == [2, 4, 6, 8]
    assert whole.weights == again.weights


# ------------------------------------------------------------------------------------------------- the best model


def test_the_best_model_has_the_lowest_validation_loss() -> None:
    # a learning rate that soon diverges
    result = train(World(), config_of(name="best", best_model=True, steps=12, learning_rate=0.3, warmup_steps=6))
    best = best_step(result.eval_losses)
    assert best is not None
    assert best < 12
    assert [path.name for path in (result.run / "best").iterdir()] == [f"step_{best:08d}"]
    assert evaluate(result.run, best=True)["eval_loss"] == pytest.approx(result.eval_losses[best], rel=1e-6)
    assert evaluate(result.run)["eval_loss"] == pytest.approx(result.eval_losses[12], rel=1e-6)


def test_a_run_that_rewinds_forgets_a_later_best_model() -> None:
    saving = {"checkpoint": {"every": 2, "keep_last": 10}, "best_model": True, "name": "back", "steps": 6}
    first = train(World(), config_of(**saving))
    assert best_step(first.eval_losses) == 6
    for later in ("step_00000004", "step_00000006"):
        folder = first.run / "checkpoints" / later
        (folder / "manifest.json").write_text("{}")
    again = train(World(), config_of(**saving, resume="auto"))
    assert again.weights == first.weights
    assert [path.name for path in (first.run / "best").iterdir()] == ["step_00000006"]


def test_a_run_that_continues_another_run_keeps_its_best_model() -> None:
    saving = {"checkpoint": {"every": 6}, "best_model": True, "learning_rate": 0.3, "warmup_steps": 6}
    first = train(World(), config_of(**saving, name="first", steps=12))
    best = best_step(first.eval_losses)
    longer = {"name": "longer", "steps": 13, "resume": "runs/first", "resume_allow": ["steps"]}
    result = train(World(), config_of(**saving, **longer))
    assert best == best_step(result.eval_losses)
    assert evaluate(result.run, best=True) == evaluate(first.run, best=True)


class KilledError(BaseException):
    """Abort an attempt like a signal: nothing is recorded or cleaned up."""


def test_a_run_whose_repeated_steps_are_worse_keeps_its_best_model() -> None:
    saving = {"checkpoint": {"every": 4}, "best_model": True, "name": "worse", "resume": "auto", "steps": 8}
    best, evaluations = Path("runs/worse/best"), 0

    def kill_after_step_6(event: PhaseEvent) -> None:
        nonlocal evaluations
        evaluations += event == ("evaluate", False, event.time)
        if evaluations == 3:
            raise KilledError

    with pytest.raises(KilledError), observe(kill_after_step_6):
        train(World(), config_of(**saving))
    assert sorted(path.name for path in best.iterdir()) == ["step_00000004", "step_00000006"]
    worse = train(World(), config_of(**saving, learning_rate=30.0, resume_allow=["learning_rate"]))
    assert best_step(worse.eval_losses) == 4
    assert [path.name for path in best.iterdir()] == ["step_00000004"]
    assert evaluate(worse.run, best=True)["eval_loss"] == pytest.approx(worse.eval_losses[4], rel=1e-6)


def test_a_best_model_left_by_a_killed_run_is_replaced() -> None:
    run, model = RunFolder(Path("runs/left")), nn.Linear(2, 1)
    (run.best / "step_00000002").mkdir(parents=True)  # from an attempt that ended before its first checkpoint
    (run.best / "step_00000001").mkdir()
    best = EvaluationTracker(World(), run, TrainConfig(best_model=True), stopping_rule(TrainConfig()))
    best.add(2, {"loss": 1.0}, model)
    assert best.saved_steps() == [2]
    fresh = nn.Linear(2, 1)
    load_weights(fresh, run.best / "step_00000002")
    assert torch.equal(fresh.weight, model.weight)


# ----------------------------------------------------------------------------------------------------- stragglers


def test_the_straggler_is_the_rank_with_the_longest_own_work() -> None:
    even = {"data": [0.1, 0.1], "forward": [1.0, 1.1], "backward": [2.0, 2.0], "grads": [3.0, 3.1]}
    assert straggler(even) is None
    slow = even | {"forward": [1.0, 3.0], "backward": [4.0, 2.0]}  # the fast rank waits in backward
    assert straggler(slow) == {"rank": 1, "phase": "forward", "times": 3.0, "seconds": 2.0}


def test_a_slow_rank_with_a_negligible_cost_is_not_reported() -> None:
    assert straggler({"data": [0.001, 0.004], "grads": [3.0, 3.0]}) is None
    assert straggler({"data": [1.0], "forward": [2.0]}) is None
    assert straggler({}) is None


def _with_rank_one_slow(world: World, config: TaskConfig) -> TrainResult:
    """Train with a simulated clock of the phases, so that a busy machine slows down no rank."""
    trainer, now = make_trainer(config, world), 0.0

    def advance(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    trainer.model.register_forward_pre_hook(lambda module, inputs: advance(0.2 * world.rank) and None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: advance(0.001)))
        return trainer.train()


def test_a_run_records_its_straggler_and_the_memory_of_each_rank() -> None:
    launch(_with_rank_one_slow, 2, config_of(name="slow", eval_every=6), device="cpu", echo=False)
    run = load_run("runs/slow")
    assert run.result is not None
    used = run.result["ranks"]
    assert (used["straggler"]["rank"], used["straggler"]["phase"]) == (1, "forward")
    assert used["straggler"]["seconds"] > 0.5
    assert all(mb > 50 for mb in used["rss_mb"])
    assert {len(each) for each in used["seconds"].values()} == {2}
    [evaluation] = [row for row in run.steps if "eval_loss" in row]
    assert evaluation["ranks"]["seconds"]["forward"][1] > 6 * 0.2
    assert re.search(
        r"the other ranks waited \d+\.\d s for rank 1, in forward", Path("runs/slow/rank_0.log").read_text()
    )


def test_a_rank_with_much_higher_memory_use_is_reported() -> None:
    assert imbalance({"rss_mb": [500.0, 510.0, 700.0]}) == {
        "rank": 2,
        "kind": "rss_mb",
        "mb": 700.0,
        "others_mb": 505.0,
    }
    assert imbalance({"rss_mb": [500.0, 590.0], "cuda_mb": [9000.0, 4000.0]}) == {
        "rank": 0,
        "kind": "cuda_mb",
        "mb": 9000.0,
        "others_mb": 4000.0,
    }
    assert imbalance({"rss_mb": [500.0, 590.0]}) is None
    assert imbalance({"rss_mb": [5000.0, 5500.0]}) is None
    assert imbalance({"rss_mb": [500.0]}) is None


def test_gpu_memory_is_recorded_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "gpu_memory", lambda device: {"cuda_mb": 700.0, "cuda_reserved_mb": 900.0})
    result = train(World(), config_of(name="gpu", gpu_memory_limit_mb=800.0, memory_limit_mb=1e6, empty_cache_every=2))
    used = json.loads((result.run / "result.json").read_text())["ranks"]
    assert (used["cuda_mb"], used["cuda_reserved_mb"], used["imbalance"]) == ([700.0], [900.0], None)
    log = (result.run / "rank_0.log").read_text()
    assert log.count("rank 0 uses 900 MB of GPU memory, more than gpu_memory_limit_mb=800") == 1
    assert "memory_limit_mb=1e" not in log


def _with_much_memory_on_rank_one(world: World, config: TaskConfig) -> None:
    trainer = make_trainer(config, world)
    kept = torch.ones(60_000_000 * world.rank)  # 240 MB
    trainer.train()
    assert len(kept) == 60_000_000 * world.rank


# ------------------------------------------------------------------------------------------- what each rank says


def test_every_rank_has_a_log_and_the_console_shows_important_messages(capfd: pytest.CaptureFixture[str]) -> None:
    launch(train, 2, config_of(name="mine", memory_limit_mb=1.0, learning_rate_rule="sqrt"), device="cpu")
    shown = capfd.readouterr().out
    assert "; the other ranks use " not in shown
    launch(_with_much_memory_on_rank_one, 2, config_of(name="uneven"), device="cpu")
    assert re.search(r"rank 1 uses \d+ MB of memory; the other ranks use \d+ MB \(rss_mb\)", capfd.readouterr().out)
    logs = [Path(f"runs/mine/rank_{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert f"rank {rank} of 2 on cpu, gloo" in log
        assert "step 6: validation loss" in log
        assert log.count(f"rank {rank} uses ") == 1, "warned once, not at every look"
        assert f"[rank {rank}] rank {rank} uses " in shown
    assert "more than memory_limit_mb=1" in logs[1]
    assert shown.count("learning rate 0.00212132: 0.003, scaled from batch_size 16 to 8") == 1
    assert "validation loss" not in shown, "details are for the file"


def test_the_logger_is_restored() -> None:
    before = LOG.level, LOG.propagate, list(LOG.handlers), list(logging.getLogger("py.warnings").handlers)
    train(World(), QUICK)
    assert (LOG.level, LOG.propagate, list(LOG.handlers), list(logging.getLogger("py.warnings").handlers)) == before


def _failing(world: World, config: TaskConfig) -> TrainResult:
    def fail(edge: PhaseEvent) -> None:
        failing.append(edge.entered and edge.name == "update")
        if world.rank == 1 and sum(failing) == 3:
            raise ValueError("the third update, on rank 1")

    failing: list[bool] = []
    with observe(fail):
        return train(world, config)


def test_the_first_failure_is_recorded_and_each_rank_logs_its_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 raised ValueError: the third update"):
        launch(_failing, 2, config_of(name="bad"), device="cpu", echo=False)
    note = json.loads(Path("runs/bad/failed.json").read_text())
    assert note == {"rank": 1, "step": 2, "error": "ValueError: the third update, on rank 1"}
    log = Path("runs/bad/rank_1.log").read_text()
    assert "ERROR   failed after step 2" in log
    assert "ValueError: the third update, on rank 1" in log
    assert not Path("runs/bad/result.json").exists()


def test_a_failure_is_recorded_on_a_file_system_without_hard_links(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", reject)
    run = RunFolder(workdir)
    for step in (3, 4):
        with pytest.raises(ValueError, match="wrong"), record_failure(World(), run, lambda step=step: step):
            raise ValueError("wrong")
    assert json.loads(run.failure.read_text()) == {"rank": 0, "step": 3, "error": "ValueError: wrong"}
    assert list(workdir.iterdir()) == [run.failure]


def test_a_resumed_run_no_longer_counts_as_failed() -> None:
    with pytest.raises(RankError):
        launch(_failing, 2, config_of(name="bad", checkpoint={"every": 2}), device="cpu", echo=False)
    launch(train, 2, config_of(name="bad", checkpoint={"every": 2}, resume="auto"), device="cpu", echo=False)
    assert not Path("runs/bad/failed.json").exists()
    run = load_run("runs/bad")
    assert run.result is not None
    elapsed = [row["elapsed"] for row in run.steps]
    assert elapsed == sorted(elapsed)


# ------------------------------------------------------------------------------------------ TensorBoard, profiler


def events_of(folder: Path) -> list[tuple[str, int, float]]:
    """Return tag, step and value of the scalars, in file order.

    A record has a length, a checksum, a protobuf and a checksum.
    """
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            [length] = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_gets_the_numbers_of_the_log() -> None:
    result = train(World(), config_of(name="events"))
    found = events_of(result.run)
    losses = {step: value for tag, step, value in found if tag == "loss"}
    # a point for each flush, which comes after every second step here
    assert losses == {step: pytest.approx(result.losses[step - 1], rel=1e-6) for step in (2, 4, 6)}
    evals = {step: value for tag, step, value in found if tag == "eval_loss"}
    assert evals == pytest.approx(result.eval_losses, rel=1e-6)
    assert {"learning_rate", "grad_norm", "tokens_per_second"} <= {tag for tag, _, _ in found}


def test_tensorboard_can_be_disabled() -> None:
    assert not list(train(World(), config_of(tensorboard=False)).run.glob("events*"))


def test_profiled_steps_leave_a_trace_of_each_rank_and_their_timeline() -> None:
    profile = ProfileConfig(first_step=3, steps=2, record_shapes=True, with_stack=True).model_dump()
    launch(train, 2, config_of(name="profiled", profile=profile), device="cpu", echo=False)
    folder = Path("runs/profiled/profile")
    names = {path.name for path in folder.iterdir()}
    assert names == {"rank_0.json.gz", "rank_1.json.gz", "timeline.json"}
    trace = gzip.decompress((folder / "rank_1.json.gz").read_bytes())
    assert b'"Input Dims"' in trace
    assert b'"Call stack"' in trace or b"python_function" in trace
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    for rank in range(2):
        spans = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == rank]
        assert spans.count("forward") == spans.count("update") == 2
        assert any(name.startswith("bucket ") for name in spans), "the all-reduces of torch's DDP"
    done = CliRunner().invoke(logs, ["timeline", "profiled"])
    assert done.output == f"{folder / 'timeline.png'}\n"
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_that_the_run_does_not_reach_is_omitted() -> None:
    result = train(World(), config_of(profile={"first_step": 7, "steps": 3}))
    assert not (result.run / "profile").exists()


def test_log_lines_in_a_notebook_do_not_look_like_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(learning_rate_rule="sqrt", tensorboard=False)
    train(World(), config)
    told = capsys.readouterr()
    assert (told.out, told.err.startswith("learning rate ")) == ("", True)
    monkeypatch.setattr("ddp_tutorial.runs.rank_logs.in_notebook", lambda: True)
    train(World(), config)
    told = capsys.readouterr()
    assert (told.err, told.out.startswith("learning rate ")) == ("", True)
