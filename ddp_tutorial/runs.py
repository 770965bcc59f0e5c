"""Read back what a run has written. Never imports torch, so that commands about logs start at once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_tutorial.config import ConfigError


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


STOP_REQUEST = "stop"  # a file in the folder of a run that should stop; see stopping.py
BEST = "best"  # a folder in it: the weights of the step with the lowest held-out loss, as step_00000120/
FAILURE = "failed.json"  # who failed first, and how; see rank_logs.py


def folder_of(path: str | Path) -> Path:
    """The folder of a run. Raises `ConfigError` if it is not one."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{str(path)!r} is not the folder of a run: there is no config.json in it")
    return folder


def request_stop(path: str | Path, wish: Literal["stop", "save"]) -> None:
    """Ask a run to stop after its step, with or without a checkpoint. Raises `ConfigError` if it is none."""
    (folder_of(path) / STOP_REQUEST).write_text(wish)


def load_run(path: str | Path) -> Run:
    """Read a run's folder. Raises `ConfigError` if it is not one."""
    folder = folder_of(path)
    config = read_object(folder / "config.json")
    if config is None:
        raise ConfigError(f"{str(path)!r} is not the folder of a run: its config.json is not a JSON object")
    return Run(folder, config, read_lines(folder / "metrics.jsonl"), read_object(folder / "result.json"))


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


def shown(loss: float | None) -> str:
    """A loss for people; in a log, None is what became of infinity or NaN."""
    return "diverged" if loss is None else f"{loss:.3f}"


def smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Each value averaged with the `window - 1` before it, to see the trend in a noisy curve."""
    return [sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i in range(len(values))]
