"""A run's folder: the names of all files in it, and how it is read back. Never imports torch, so that commands about
logs start at once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ddp_tutorial.checkpoint.manifest import CHECKPOINTS
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import new_directory, write_atomically

PER_SECOND = "_per_second"  # after what the loss counts, in the name of a rate: tokens_per_second
StopRequest = Literal["stop", "save"]  # stop after the step that is at work; the second, with a checkpoint


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and where everything in it is. Nothing has to be there yet."""

    path: Path
    mode: int = 0o700  # its permissions when it is created, from which the umask may take some away

    def create(self) -> bool:
        """Create the folder if it does not exist, and return whether it is new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(self.mode)
        except FileExistsError:
            if not self.path.is_dir():
                raise
            return False
        return True

    def create_numbered(self) -> "RunFolder":
        """Create the folder, or one with the next free number if it exists, and return it."""
        return replace(self, path=new_directory(self.path.parent, self.path.name, self.mode))

    @property
    def config(self) -> Path:
        """All settings, as JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """The numbers of every step and evaluation, as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        """What the run came to; written last."""
        return self.path / "result.json"

    @property
    def failure(self) -> Path:
        """Which rank failed first, after which step and how; see rank_logs.py."""
        return self.path / "failed.json"

    @property
    def stop_request(self) -> Path:
        """There while somebody wants the run to stop; it says "stop" or "save"."""
        return self.path / "stop"

    @property
    def model(self) -> Path:
        """The model that the run has ended with, as a folder or, of models that do not say how, as one file."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """The weights of the best evaluation so far, in one folder called by its step."""
        return self.path / "best"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def profile(self) -> Path:
        """Traces of the steps that were profiled, and their timeline."""
        return self.path / "profile"

    @property
    def timeline(self) -> Path:
        """The profiled steps of all ranks on one clock: see `ddp.timeline.Timeline`."""
        return self.profile / "timeline.json"

    def rank_log(self, rank: int) -> Path:
        """What one rank has to say."""
        return self.path / f"rank_{rank}.log"

    def exists(self) -> bool:
        """Is it the folder of a run?"""
        return self.config.is_file()


# Folders that a run makes in its own.
INSIDE = {RunFolder(Path()).model.name, RunFolder(Path()).best.name, RunFolder(Path()).profile.name, CHECKPOINTS}


@dataclass(frozen=True)
class Run:
    """A run's folder, read: its config, its steps in order, and its result if it finished."""

    path: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    result: dict[str, Any] | None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was written: "loss", "eval_loss", "grad_norm", ..."""
        rows = [row for row in self.steps if row.get(key) is not None]
        return [row["step"] for row in rows], [row[key] for row in rows]


def folder_of(path: str | Path) -> RunFolder:
    """The folder of a run. Raises `ConfigError` if it is not one."""
    folder = RunFolder(Path(path))
    if not folder.exists():
        raise ConfigError(f"{str(path)!r} is not the folder of a run: there is no config.json in it")
    return folder


def request_stop(path: str | Path, request: StopRequest) -> None:
    """Ask a run to stop after its step, with or without a checkpoint. Raises `ConfigError` if it is none."""
    write_atomically(folder_of(path).stop_request, request.encode())


def load_run(path: str | Path) -> Run:
    """Read a run's folder. Raises `ConfigError` if it is not one."""
    folder = folder_of(path)
    config = read_object(folder.config)
    if config is None:
        raise ConfigError(f"{str(path)!r} is not the folder of a run: its config.json is not a JSON object")
    return Run(folder.path, config, read_lines(folder.metrics), read_object(folder.result))


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file, or something else in it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of JSON lines. A last line cut short, or a line of something else, is passed over."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def format_loss(loss: float | None) -> str:
    """A loss for people; in a log, None stands for infinity or NaN."""
    return "diverged" if loss is None else f"{loss:.3f}"


def smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Each value averaged with the `window - 1` before it, to see the trend in a noisy curve."""
    return [sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i in range(len(values))]
