"""A running run can be watched through its folder alone."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import IPython.display
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from ddp_tutorial.accumulation.train_step import StepResult
from ddp_tutorial.config import ConfigError, load
from ddp_tutorial.figures.watch import _drawn, watch
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.runs.summaries import read_run
from ddp_tutorial.training.callbacks import Callback
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.training.trainer import Trainer, TrainResult
from ddp_tutorial.world import World
from ranks import wait_until

WATCHED = Path("watched")  # exists once a picture has been displayed


class Shown:
    """A fake display handle of a notebook that records all pictures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pictures: list[bytes] = []
        monkeypatch.setattr(IPython.display, "display", self.display)

    def display(self, picture: IPython.display.Image, *, display_id: bool) -> "Shown":
        assert display_id
        self.update(picture)
        return self

    def update(self, picture: IPython.display.Image) -> None:
        self.pictures.append(picture.data)
        WATCHED.touch()


class WaitsForWatcher(Callback):
    """Pauses the run after step 60 until a picture has been displayed."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.step_count == 60:
            assert wait_until(WATCHED.exists, 300)


def train_while_watched(world: World, config: TaskConfig) -> TrainResult:
    trainer = make_trainer(config, world)
    trainer.callbacks.append(WaitsForWatcher())
    return trainer.train()


def a_run(folder: Path, rows: list[dict[str, object]], **config: object) -> Path:
    folder.mkdir(parents=True)
    RunFolder(folder).config.write_text(json.dumps({"steps": 10} | config))
    RunFolder(folder).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def dashboard(run: Path) -> Figure:
    return _drawn(run, *read_run(run))


ROWS = [{"step": i, "loss": 3 / i, "tokens": 8 * i, "tokens_per_second": 100.0 * i, "elapsed": i} for i in range(1, 7)]
USED = {"rss_mb": [100.0, 300.0], "seconds": {"grads": [3.0, 4.0], "forward": [1.0, 2.0], "backward": [2.0, 2.0]}}


def test_losses_rate_memory_and_phases_are_those_of_the_log(tmp_path: Path) -> None:
    rows = [*ROWS, {"step": 6, "eval_loss": 0.75, "ranks": USED}]
    figure = dashboard(a_run(tmp_path / "mine", rows))
    losses, rate, memory, phases = figure.axes
    assert list(losses.lines[0].get_ydata()) == [3 / i for i in range(1, 7)]
    assert list(losses.lines[2].get_xydata()[0]) == [6, 0.75]
    assert (rate.get_title("left"), list(rate.lines[0].get_ydata())) == (
        "tokens per second, all ranks",
        [100.0 * i for i in range(1, 7)],
    )
    assert [list(line.get_ydata()) for line in memory.lines] == [[100.0], [300.0]]
    # Without grads, which contains the other phases.
    assert [bar.get_width() for bar in phases.patches] == [1.0, 2.0, 2.0, 2.0]
    assert figure.get_suptitle() == "mine: killed, step 6 of 10, 2 ranks"
    plt.close(figure)


def test_a_run_that_just_started_is_shown_without_numbers(tmp_path: Path) -> None:
    figure = dashboard(a_run(tmp_path / "new", []))
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["no data yet"] * 4
    plt.close(figure)


def test_a_non_finite_loss_leaves_a_gap(tmp_path: Path) -> None:
    figure = dashboard(a_run(tmp_path / "odd", [*ROWS[:2], {"step": 3, "loss": None, "elapsed": 3}, ROWS[3]]))
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 4]
    plt.close(figure)


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        watch(tmp_path)


def test_a_run_in_other_processes_is_watched_until_its_end(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    config = load("tiny", TaskConfig, ["device=cpu", "name=it", "steps=120"])
    run = Path("runs/it")
    with ThreadPoolExecutor() as threads:
        training = threads.submit(launch, train_while_watched, 2, config, echo=False)
        while not RunFolder(run).metrics.exists():
            assert not training.done(), training.result()
            time.sleep(0.05)
        watch(run, every=0.5)
        assert RunFolder(run).result.exists()
    assert len(training.result()[0].losses) == 120
    assert len(set(shown.pictures)) >= 2
    before = plt.get_fignums()
    watch(run)
    assert shown.pictures[-1] == shown.pictures[-2]
    assert plt.get_fignums() == before


class Clock:
    """A clock that advances only while its user sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_watching_stops_after_the_timeout(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = Shown(monkeypatch), Clock()
    monkeypatch.setattr("ddp_tutorial.runs.summaries.is_locked", lambda folder: True)
    monkeypatch.setattr("ddp_tutorial.figures.watch.time", clock)
    watch(a_run(workdir / "endless", ROWS), seconds=5)
    assert clock.now == 105
    assert len(shown.pictures) == 6
