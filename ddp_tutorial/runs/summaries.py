"""Find, summarize and compare runs, based on the files in their folders. This module does not import torch.

    for folder in find_runs():
        print(folder, state_of(folder), summarize(folder).loss)

The last line of a log may be missing, and older logs contain fewer metrics. Missing values are None or empty.
"""

import difflib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from ddp_tutorial.checkpoint.manifest import list_checkpoints
from ddp_tutorial.config import ConfigError, did_you_mean, flat
from ddp_tutorial.files import RUNS, is_locked
from ddp_tutorial.runs.folder import INSIDE, PER_SECOND, Run, RunFolder, load_run, read_object

RunState = Literal["running", "finished", "stopped", "failed", "killed"]

# A folder that all runs share, and that contains no runs.
_SHARED = RUNS / "cache"

# Phases inside `grads`. Parts of other phases have names such as "save: write".
_IN_GRADS = ("forward", "backward", "finish")
# Phases in which a rank works by itself. In backward and finish, fast ranks wait for slow ranks.
_OWN_WORK = ("data", "forward")
# A rank is a straggler if its own work takes more than _SLOW times the median of the other ranks, and if the difference
# is more than the fraction _SIGNIFICANT of the measured time.
_SLOW = 1.5
_SIGNIFICANT = 0.05

# Larger numbers cannot be measurements, and may not fit into a float.
_LARGEST = 1e300

Row = dict[str, Any]


# --------------------------------------------------------------------------------------------------------- finding runs


def find_runs(folder: Path = RUNS) -> list[Path]:
    """Return the folders of all runs under a folder, at any depth, sorted by start time."""
    return sorted(_runs_below(folder), key=lambda folder: (RunFolder(folder).config.stat().st_mtime_ns, folder))


def _runs_below(folder: Path) -> Iterator[Path]:
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # does not exist, or is not readable
        return
    is_run = _is_run(folder)
    if is_run:
        yield folder
    for path in inside:
        if not path.name.startswith(".") and path != _SHARED and not (is_run and path.name in INSIDE):
            yield from _runs_below(path)


def _is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder. The config.json of an exported model lacks `steps`."""
    return "steps" in (read_object(RunFolder(folder).config) or {})


def find_run(name: str) -> Path:
    """Return the folder of the run that `name` specifies, as a path or as a folder name under runs/.

    Raises:
        ConfigError: If there is no such run.
    """
    for folder in (Path(name), RUNS / name):
        if _is_run(folder):
            return folder
    for folder in (Path(name), RUNS / name):
        if folder.is_dir() and (below := find_runs(folder)):
            raise ConfigError(
                f"{name!r} is not a run, but a folder that contains runs: {', '.join(map(str, below[-5:]))}"
            )
    known = [str(folder.relative_to(RUNS)) for folder in find_runs()]
    if not known:
        raise ConfigError(f"there is no run named {name!r}: {RUNS}/ contains no runs")
    close = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(f"there is no run named {name!r}.{did_you_mean(name, known if close else known[-5:])}")


def state_of(folder: Path) -> RunState:
    """Return the state of a run.

    A run counts as killed if it is not running and has written neither a result nor a failure record.
    """
    if is_locked(folder):
        return "running"
    result = read_object(RunFolder(folder).result)
    if result is not None:
        return "stopped" if result.get("status") == "stopped" else "finished"
    if RunFolder(folder).failure.is_file():
        return "failed"
    # The run may have resumed in the meantime, which removes these files.
    return "running" if is_locked(folder) else "killed"


# ----------------------------------------------------------------------------------------------------- values in a log


def finite_number(row: Mapping[str, Any], key: str) -> float | None:
    """Return the finite number stored under `key`, or None if there is no such number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST < value < _LARGEST else None  # false for NaN


def metric(row: Row, name: str) -> float | None:
    """Return the value of a metric, such as "loss" or "seconds.data", or None if there is no finite number."""
    group, _, key = name.rpartition(".")
    return finite_number(_mapping(row, group) if group else row, key)


def rows_of(run: Run) -> list[Row]:
    """Return the log rows that contain a step number, in order."""
    return [row for row in run.steps if isinstance(finite_number(row, "step"), int)]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the metric names in a log: first the step metrics, then phase durations such as "seconds.data"."""
    names = dict.fromkeys(key for row in rows for key in row if finite_number(row, key) is not None)
    phases = dict.fromkeys(name for row in rows for name in _mapping(row, "seconds") if ": " not in name)
    return [
        *(key for key in names if key not in {"step", unit_of(rows), "elapsed"}),
        *(f"seconds.{name}" for name in phases),
    ]


def elapsed_seconds(rows: Sequence[Row]) -> list[float]:
    """Return, for each row, the number of seconds since the start of the run.

    In logs from older versions, the time is estimated as the sum of the phase durations. The returned times continue
    across restarts, although each process counts from zero.
    """
    times: list[float] = []
    now = offset = before = 0.0
    for row in rows:
        elapsed = finite_number(row, "elapsed")
        if elapsed is None:
            now += sum(phases_of([row])[0].values())
            before = now - offset
        else:
            if elapsed < before / 2:  # a new process, which counts from zero
                offset = now
            now, before = max(now, offset + elapsed), elapsed
        times.append(now)
    return times


def phases_of(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the total duration of each phase on rank 0 in seconds, in decreasing order.

    The first dict contains the outer phases, and the second dict contains the phases inside the phase "grads".
    """
    outer: defaultdict[str, float] = defaultdict(float)
    in_grads: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        seconds = _mapping(row, "seconds")
        for name in seconds:
            if ": " not in name:
                sums = in_grads if name in _IN_GRADS and "grads" in seconds else outer
                sums[name] += finite_number(seconds, name) or 0.0
    return _longest_first(outer), _longest_first(in_grads)


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _mapping(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def numbers_of_ranks(row: Mapping[str, Any], key: str) -> list[float]:
    """Return the list under `key` if it contains a finite number for each rank, and otherwise an empty list."""
    value = row.get(key)
    numbers = [finite_number({"it": each}, "it") for each in value] if isinstance(value, list) else []
    return [each for each in numbers if each is not None] if None not in numbers else []


# ----------------------------------------------------------------------------------------------------- summary of a run


@dataclass(frozen=True)
class Values:
    """The values of a metric over a run.

    Attributes:
        first: First value.
        last: Last value; None if it is not finite.
        best: Lowest value.
        best_step: Step of the lowest value.
    """

    first: float | None
    last: float | None
    best: float | None
    best_step: int | None


@dataclass(frozen=True)
class Failure:
    """The failure record of the first failed rank."""

    rank: int | None
    step: int | None
    error: str


@dataclass(frozen=True)
class Summary:
    """The summary of a run. Values that the run's files do not contain are None or empty."""

    path: str
    state: RunState
    step: int
    steps: int
    ranks: int
    began: float  # seconds since 1970, as in st_mtime
    seconds: float | None  # duration so far
    seconds_are: Literal["measured", "sum of phases"]
    loss: Values | None
    eval_loss: Values | None
    unit: str  # the unit of the loss's count, such as tokens or samples
    count: float | None  # total number of `unit`
    rate: float | None  # `unit` per second, median over the run
    phases: dict[str, float]  # rank 0's seconds by phase
    inside_grads: dict[str, float]
    memory_mb: dict[str, list[float]]  # peak of each rank: "rss", and "cuda" on GPUs
    straggler: dict[str, Any] | None  # see `straggler`
    failure: Failure | None
    reason: str | None  # why the run stopped, if recorded
    checkpoints: list[str]
    config: dict[str, Any]


def summarize(folder: Path) -> Summary:
    """Read a run folder, and return a summary of the run.

    Raises:
        ConfigError: If `folder` is not a run folder.
    """
    return read_run(folder)[1]


def read_run(folder: Path) -> tuple[list[Row], Summary]:
    """Return the log rows of a run and its summary.

    Raises:
        ConfigError: If `folder` is not a run folder.
    """
    state = state_of(folder)  # read before the files, so a run that exits meanwhile is reported as running
    run = load_run(folder)
    rows, result = rows_of(run), run.result if state != "running" and run.result else {}
    times, (phases, inside_grads) = elapsed_seconds(rows), phases_of(rows)
    in_ranks = [_mapping(row, "ranks") for row in rows if "ranks" in row]
    failure, unit = _failure(folder) if state == "failed" else None, unit_of(rows)
    steps = run.config["steps"] if isinstance(run.config.get("steps"), int) else 0
    summary = Summary(
        path=str(folder),
        state=state,
        step=_last_step(rows, result, failure),
        steps=steps,
        ranks=_ranks(run, result, in_ranks),
        began=RunFolder(folder).config.stat().st_mtime,
        seconds=times[-1] if times and times[-1] > 0 else None,
        seconds_are="measured" if any("elapsed" in row for row in rows) else "sum of phases",
        loss=_values(rows, "loss"),
        eval_loss=_values(rows, "eval_loss"),
        unit=unit,
        count=_count(rows, unit),
        rate=finite_number(_mapping(result, "metrics"), unit + PER_SECOND) or _median_rate(rows, unit),
        phases=phases,
        inside_grads=inside_grads,
        memory_mb=_memory([*in_ranks, _mapping(result, "ranks")]),
        straggler=straggler(seconds_of_ranks(in_ranks or [_mapping(result, "ranks")])),
        failure=failure,
        reason=str(result["reason"]) if result.get("reason") else None,
        checkpoints=[str(path) for path in list_checkpoints(RunFolder(folder).checkpoints)],
        config=run.config,
    )
    return rows, summary


def _last_step(rows: Sequence[Row], result: Mapping[str, Any], failure: Failure | None) -> int:
    """Return the last step of a run.

    The result contains the step. Without a result, the step is the later of the last logged step and the failure
    record's step. The last steps of a failed or killed run may be missing from the log.
    """
    final = finite_number(result, "step")
    if final is not None:
        return int(final)
    return max([row["step"] for row in rows] + [failure.step or 0 if failure else 0])


def unit_of(rows: Sequence[Row]) -> str:
    """Return the unit of a log's total count, based on the name of the rate. Without a rate, return "tokens"."""
    names = (key for row in rows for key in row if key.endswith(PER_SECOND))
    return next(names, f"tokens{PER_SECOND}").removesuffix(PER_SECOND)


def _count(rows: Sequence[Row], unit: str) -> float | None:
    """Return the run's total count in `unit`, or None if the count was not logged.

    A weighted sample counts as a fraction of a sample.
    """
    return max((count for row in rows if (count := finite_number(row, unit)) is not None), default=None)


def _ranks(run: Run, result: Mapping[str, Any], in_ranks: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of ranks, from the first source that contains it.

    The sources are, in this order, the result, the last evaluation, the number of rank logs, and the config. The config
    is the last source, because torchrun may have started a different number of ranks.
    """
    sizes = [len(rss) for each in in_ranks if (rss := numbers_of_ranks(each, "rss_mb"))]
    logs = len(list(run.path.glob("rank_*.log")))
    known = (
        finite_number(result, "world_size")
        or (sizes[-1] if sizes else 0)
        or logs
        or finite_number(run.config, "nprocs")
    )
    return int(known or 1)


def _values(rows: Sequence[Row], key: str) -> Values | None:
    values = [(finite_number(row, key), row["step"]) for row in rows if key in row]
    if not values:
        return None
    best, best_step = min(((value, step) for value, step in values if value is not None), default=(None, None))
    return Values(values[0][0], values[-1][0], best, best_step)


def rates_of(rows: Sequence[Row], unit: str) -> list[float]:
    """Return the rate of each interval between consecutive flushes. All steps of an interval have the same rate."""
    rates = [rate for row in rows if (rate := finite_number(row, unit + PER_SECOND)) is not None]
    return [rate for rate, _ in groupby(rates)]


def _median_rate(rows: Sequence[Row], unit: str) -> float | None:
    """Return a run's median rate without the first interval, which includes warm-up, or None if there is no rate."""
    stretches = rates_of(rows, unit)
    return statistics.median(stretches[1:] or stretches) if stretches else None


def _memory(in_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    highest: dict[str, list[float]] = {}
    for kind in ("rss", "cuda"):
        found = [values for each in in_ranks if (values := numbers_of_ranks(each, f"{kind}_mb"))]
        if found:
            alike = [values for values in found if len(values) == len(found[-1])]  # the world size may have changed
            highest[kind] = [max(of_rank) for of_rank in zip(*alike, strict=True)]
    return highest


def straggler(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Return the rank that the other ranks wait for, or None if there is no such rank.

    The time that a rank spends on its own work is compared with the median over the other ranks. `seconds` contains
    each rank's time by phase. The result is, for example, `{"rank": 1, "phase": "data", "times": 1.8, "seconds": 4.2}`.
    """
    worst: dict[str, Any] | None = None
    measured = sum(statistics.median(each) for name, each in seconds.items() if name in {"data", "grads", "update"})
    for name in _OWN_WORK:
        each = list(seconds.get(name, ()))
        if len(each) < 2:
            continue
        slowest = each.index(max(each))
        others = statistics.median(each[:slowest] + each[slowest + 1 :])
        lost = each[slowest] - others
        if each[slowest] > _SLOW * others and lost > max(_SIGNIFICANT * measured, worst["seconds"] if worst else 0.0):
            times = round(each[slowest] / others, 2) if others else None
            worst = {"rank": slowest, "phase": name, "times": times, "seconds": round(lost, 3)}
    return worst


def seconds_of_ranks(in_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return each rank's time in seconds by phase, summed over evaluations.

    Evaluations whose world size differs from the last evaluation's world size are ignored.
    """
    by_phase: defaultdict[str, list[list[float]]] = defaultdict(list)
    for each in in_ranks:
        seconds = _mapping(each, "seconds")
        for name in seconds:
            if of_ranks := numbers_of_ranks(seconds, name):
                by_phase[name].append(of_ranks)
    size = max((len(values[-1]) for values in by_phase.values()), default=0)
    return {
        name: [sum(of_rank) for of_rank in zip(*(each for each in values if len(each) == size), strict=True)]
        for name, values in by_phase.items()
        if any(len(each) == size for each in values)
    }


def _failure(folder: Path) -> Failure:
    record = read_object(RunFolder(folder).failure) or {}
    rank, step = finite_number(record, "rank"), finite_number(record, "step")
    return Failure(
        None if rank is None else int(rank),
        None if step is None else int(step),
        str(record.get("error") or "no error was recorded"),
    )


# -------------------------------------------------------------------------------------------------- comparison of runs


def differing_settings(summaries: Sequence[Summary]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs, as a dict from dotted names to lists of values.

    If an older version's config lacks a setting, the value is None and does not count as a difference. The value of
    `nprocs` is the actual number of ranks.
    """
    configs = [summary.config | {"nprocs": summary.ranks} for summary in summaries]
    names = dict.fromkeys(name for config in configs for name in flat(config))
    found: dict[str, list[Any]] = {}
    for name in names:
        values = [_setting(config, name) for config in configs]
        there = [value for value in values if value is not _ABSENT]
        if name.split(".")[0] not in _NOT_COMPARED and any(value != there[0] for value in there):
            found[name] = [None if value is _ABSENT else value for value in values]
    return found


_ABSENT = object()
_NOT_COMPARED = {"name", "resume", "resume_allow", "resume_without"}  # name of the run, and how it resumed


def _setting(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        if value is None:  # a disabled group of settings
            return None
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return _ABSENT if isinstance(value, Mapping) else value


# --------------------------------------------------------------------------------------------------- following a file


def follow(path: Path, is_over: Callable[[], bool], last: int, pause: float = 0.2) -> Iterator[str]:
    """Yield at most `last` lines from the end of a file, and then each new complete line until `is_over()` is true.

    The file need not exist yet. If the file is replaced, as when a run resumes from a checkpoint, `follow` starts over.
    `pause` is the number of seconds between consecutive reads.
    """
    file_id, position, rest = 0, 0, b""
    while True:
        over = is_over()  # checked before reading, so that all lines written so far are yielded
        data = b""
        if path.is_file():
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                begun = status.st_ino == file_id and status.st_size >= position
                file_id, position, rest = (file_id, position, rest) if begun else (status.st_ino, 0, b"")
                file.seek(position)
                data = file.read()
                position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            lines += [rest] if over and rest else []
            for line in lines if begun else lines[max(0, len(lines) - last) :]:
                yield line.decode(errors="replace")
        if over:
            return
        time.sleep(pause)
