"""Rerun a command, or run a different one, in the folder of a run. A rejected command changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_tutorial.config import ConfigError
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.training.callbacks import Callback
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.export import config_of as settings_of
from ddp_tutorial.training.export import sample
from ddp_tutorial.training.tasks import make_trainer, train
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")

STEPS = 4
BASE: dict[str, Any] = {
    "name": "mine",
    "resume": "auto",
    "corpus": "stories:300",
    "model": ModelConfig(layers=1, heads=2, width=16, context=16),
    "device": "cpu",
    "steps": STEPS,
    "batch_size": 6,
    "warmup_steps": 2,
    "log_every": 2,
    "eval_every": 2,
    "eval_samples": 6,
    "checkpoint": {"every": 2, "keep_last": 100},
}


def config_of(**values: Any) -> TaskConfig:
    return TaskConfig.model_validate(BASE | values)


def tree_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the modification time of every file."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"corpus": "stories:310"},
    {"model": ModelConfig(layers=1, heads=2, width=32, context=16)},
]


def test_a_rejected_resume_leaves_every_file_of_the_run_unchanged() -> None:
    launch(train, 2, config_of(), device="cpu", echo=False)
    before = tree_of(Path("runs"))
    assert "mine/result.json" in before
    for values in OTHER_SETTINGS:
        for refused in (config_of(**values), config_of(**values, steps=STEPS + 2, resume_allow=["steps"])):
            with pytest.raises(RankError, match="created with different settings") as error:
                launch(train, 2, refused, device="cpu", echo=False)
            assert error.value.is_a(ConfigError)
            assert tree_of(Path("runs")) == before


def test_a_killed_run_resumes_after_a_different_width_was_rejected() -> None:
    train(World(), config_of(steps=2))
    for made in ("model", "result.json"):
        Path("runs/mine", made).rename(made)  # as if the run had been killed before its end
    with pytest.raises(ConfigError, match=r"model.width was 16, is now 32"):
        train(World(), config_of(model=OTHER_SETTINGS[1]["model"], steps=2))
    assert settings_of("runs/mine").model.width == 16
    assert sample("runs/mine", "Once", length=3).startswith("Once")


def test_a_rejected_path_creates_no_folder() -> None:
    train(World(), config_of())
    before = tree_of(Path("runs"))
    for values in ({"resume": "runs/gone"}, {"resume": "runs/mine", "learning_rate": 1.0}):
        with pytest.raises(ConfigError):
            train(World(), config_of(**(values | {"name": "new"})))
        assert tree_of(Path("runs")) == before
        assert not Path("runs/new").exists()


def test_rerunning_a_finished_run_keeps_and_returns_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    first = train(World(), config_of())
    before = tree_of(Path("runs"))
    assert "nothing was trained" not in capsys.readouterr().err
    again = train(World(), config_of())
    assert f"nothing was trained: resume=auto found a run that finished at step {STEPS}, " in capsys.readouterr().err
    assert (again.weights, again.losses, again.eval_losses) == (first.weights, first.losses, first.eval_losses)
    assert again.rate == pytest.approx(first.rate, rel=0.01)
    after = tree_of(Path("runs"))
    for kept in ("mine/result.json", "mine/model/model.safetensors"):
        assert after[kept][0] == before[kept][0]
    assert json.loads(after["mine/result.json"][0])["metrics"]["tokens_per_second"] > 0


class RaisesOnce(Callback):
    """Prevents the first call of `train` from returning a result."""

    has_raised = False

    def on_end(self, trainer: Any, result: Any) -> None:
        if not self.has_raised:
            self.has_raised = True
            raise ValueError("the first call")


def test_a_trainer_trains_once_and_a_second_call_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(config_of(checkpoint={"every": 0}), World())
    trainer.callbacks.append(RaisesOnce())
    with pytest.raises(ValueError, match="the first call"):
        trainer.train()
    assert len(trainer.train().losses) == STEPS
    assert "nothing was trained" not in capsys.readouterr().err
    before = tree_of(Path("runs"))
    assert b'"step": 1,' in before["mine/metrics.jsonl"][0]
    with pytest.raises(ConfigError, match=f"this Trainer has already finished its run at step {STEPS}"):
        trainer.train()
    assert tree_of(Path("runs")) == before


def test_an_unreadable_line_of_the_log_is_dropped_on_resume() -> None:
    whole = train(World(), config_of(name="whole"))
    train(World(), config_of(steps=2, schedule_steps=STEPS))
    log = Path("runs/mine/metrics.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b'{"step": 1, "lo\n', b"[]\n", b"{}\n", *lines[1:]]))
    again = train(World(), config_of(resume_allow=["steps", "schedule_steps"]))
    assert again.losses == whole.losses
    assert [row["step"] for row in map(json.loads, log.read_text().splitlines()) if "loss" in row] == [1, 2, 3, 4]


class KilledError(BaseException):
    """Abort an attempt like a signal: nothing is recorded or cleaned up."""


def train_until_it_has_evaluated(config: TaskConfig) -> None:
    """Abort an attempt in the step after its first evaluation."""
    has_evaluated = False

    def kill(edge: PhaseEvent) -> None:
        nonlocal has_evaluated
        has_evaluated = has_evaluated or edge.name == "evaluate"
        if has_evaluated and edge.name == "grads":
            raise KilledError

    with pytest.raises(KilledError), observe(kill):
        train(World(), config)


def test_a_run_killed_between_best_model_and_checkpoint_resumes() -> None:
    config = config_of(best_model=True, checkpoint={"every": 4})
    whole = train(World(), config.model_copy(update={"name": "whole"}))
    for _ in range(2):
        train_until_it_has_evaluated(config)
        assert Path("runs/mine/best/step_00000002").is_dir()
        assert not list(Path("runs/mine").glob("checkpoints/step_*"))
    assert train(World(), config).weights == whole.weights
    assert [path.name for path in Path("runs/mine/best").iterdir()] == ["step_00000004"]
