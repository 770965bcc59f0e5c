"""Define the files in a run folder, and functions that read these files.

This module does not import torch, so that commands that read logs start quickly.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_tutorial.checkpoint.manifest import CHECKPOINTS
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import write_atomically

PER_SECOND = "_per_second"  # suffix of a rate's name, after the unit of the loss's count, as in tokens_per_second
StopRequest = Literal["stop", "save"]  # stop after the current step; "save" also writes a checkpoint


@dataclass(frozen=True)
class RunFolder:
    """Paths of all files in a run's folder. The files and the folder need not exist."""

    path: Path
    mode: int = 0o700  # permissions of a new folder, before the umask is applied

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

    @property
    def config(self) -> Path:
        """The file that contains all settings, as JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """The file that contains the metrics of every step and evaluation, as JSON Lines."""
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        """The file that contains the result of the run. This file is written last."""
        return self.path / "result.json"

    @property
    def failure(self) -> Path:
        """The file that records the rank, step and error of the first failure; see rank_logs.py."""
        return self.path / "failed.json"

    @property
    def stop_request(self) -> Path:
        """The file that requests a stop, with the content "stop" or "save". The run removes the file when it stops."""
        return self.path / "stop"

    @property
    def model(self) -> Path:
        """The folder that contains the final model, in one file unless the model defines `save_pretrained`."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """The folder that contains the weights with the best evaluation so far, in a subfolder named after the step."""
        return self.path / "best"

    @property
    def checkpoints(self) -> Path:
        """The folder that contains the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def profile(self) -> Path:
        """The folder that contains the traces and the timeline of the profiled steps."""
        return self.path / "profile"

    @property
    def timeline(self) -> Path:
        """The file that contains the profiled steps of all ranks on a common clock; see `ddp.timeline.Timeline`."""
        return self.profile / "timeline.json"

    def rank_log(self, rank: int) -> Path:
        """Return the path of one rank's log."""
        return self.path / f"rank_{rank}.log"

    def exists(self) -> bool:
        """Return whether the folder exists and contains a config."""
        return self.config.is_file()


# Names of the subfolders that a run creates.
INSIDE = {RunFolder(Path()).model.name, RunFolder(Path()).best.name, RunFolder(Path()).profile.name, CHECKPOINTS}


@dataclass(frozen=True)
class Run:
    """The contents of a run folder. `steps` contains the log rows in order. `result` is None until the run finishes."""

    path: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    result: dict[str, Any] | None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of one metric, such as "loss" or "grad_norm", from the rows that contain it."""
        rows = [row for row in self.steps if row.get(key) is not None]
        return [row["step"] for row in rows], [row[key] for row in rows]


def folder_of(path: str | Path) -> RunFolder:
    """Return the run folder at `path`.

    Raises:
        ConfigError: If the path is not a run folder.
    """
    folder = RunFolder(Path(path))
    if not folder.exists():
        raise ConfigError(f"{str(path)!r} is not a run folder: it does not contain config.json")
    return folder


def request_stop(path: str | Path, request: StopRequest) -> None:
    """Request that a run stop after its current step, with or without a checkpoint.

    Raises:
        ConfigError: If the path is not a run folder.
    """
    write_atomically(folder_of(path).stop_request, request.encode())


def load_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: If the path is not a run folder.
    """
    folder = folder_of(path)
    config = read_object(folder.config)
    if config is None:
        raise ConfigError(f"{str(path)!r} is not a run folder: its config.json does not contain a JSON object")
    return Run(folder.path, config, read_lines(folder.metrics), read_object(folder.result))


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file does not exist or does not contain a JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in a JSON Lines file.

    Truncated lines and lines that are not JSON objects are skipped.
    """
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
    """Format a loss for display. None represents infinity or NaN in a log, and is formatted as "diverged"."""
    return "diverged" if loss is None else f"{loss:.3f}"


def smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Return the moving average of `values` over the last `window` values, to show the trend of a noisy curve."""
    return [sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i in range(len(values))]
