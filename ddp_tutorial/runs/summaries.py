"""Which runs are there, how did each end, and what did it come to? Reads what runs have written, and imports no torch.

    for folder in find_runs():
        print(folder, state_of(folder), summarise(folder).loss)

A log may have lost its last line, and an older run has fewer numbers in it: what is not there is None or empty.
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

# A folder that runs share; there are no runs in it.
_SHARED = RUNS / "cache"

# Phases inside `grads`; other phases with parts of their own name these "save: write".
_IN_GRADS = ("forward", "backward", "finish")
# Phases in which a rank works by itself. In backward and finish the quick ones wait for the slow.
_OWN_WORK = ("data", "forward")
# A rank is called slow when its own work takes this many times what it takes the others,
_SLOW = 1.5
# and when that costs at least this part of the time that was measured.
_WORTH_TELLING = 0.05

# Above it, a number is not one that a run has measured, and too large for a float.
_LARGEST = 1e300

Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------- which runs are there


def find_runs(folder: Path = RUNS) -> list[Path]:
    """The folders of all runs below a folder, at any depth; the one that began last is last."""
    return sorted(_runs_below(folder), key=lambda folder: (RunFolder(folder).config.stat().st_mtime_ns, folder))


def _runs_below(folder: Path) -> Iterator[Path]:
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not there, or not ours to read
        return
    is_run = _is_run(folder)
    if is_run:
        yield folder
    for path in inside:
        if not path.name.startswith(".") and path != _SHARED and not (is_run and path.name in INSIDE):
            yield from _runs_below(path)


def _is_run(folder: Path) -> bool:
    """Is it the folder of a run? An exported model has a config.json as well, but no `steps` in it."""
    return "steps" in (read_object(RunFolder(folder).config) or {})


def find_run(name: str) -> Path:
    """The folder of a run, given as a path or as a name below runs/. Raises `ConfigError` where there is none."""
    for folder in (Path(name), RUNS / name):
        if _is_run(folder):
            return folder
    for folder in (Path(name), RUNS / name):
        if folder.is_dir() and (below := find_runs(folder)):
            raise ConfigError(f"{name!r} is no run, but the folder of some: {', '.join(map(str, below[-5:]))}")
    known = [str(folder.relative_to(RUNS)) for folder in find_runs()]
    if not known:
        raise ConfigError(f"no run is called {name!r}: there are no runs below {RUNS}/")
    close = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(f"no run is called {name!r}.{did_you_mean(name, known if close else known[-5:])}")


def state_of(folder: Path) -> RunState:
    """How a run is, or how it has ended. One that left no word of its own has been killed."""
    if is_locked(folder):
        return "running"
    result = read_object(RunFolder(folder).result)
    if result is not None:
        return "stopped" if result.get("status") == "stopped" else "finished"
    if RunFolder(folder).failure.is_file():
        return "failed"
    return "running" if is_locked(folder) else "killed"  # it may have gone on meanwhile, which takes such words away


# ---------------------------------------------------------------------------------------------------- numbers of a log


def finite_number(row: Mapping[str, Any], key: str) -> float | None:
    """A number in a row; None where there is none, or what is there is not finite."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST < value < _LARGEST else None  # not so for NaN


def metric(row: Row, name: str) -> float | None:
    """The same for a metric of `metrics_of`: "loss", or "seconds.data" for one inside."""
    group, _, key = name.rpartition(".")
    return finite_number(_mapping(row, group) if group else row, key)


def rows_of(run: Run) -> list[Row]:
    """The rows of its log that belong to a step, in order."""
    return [row for row in run.steps if isinstance(finite_number(row, "step"), int)]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The metrics that a log has values of: those of its steps, then "seconds.data" and the other phases."""
    names = dict.fromkeys(key for row in rows for key in row if finite_number(row, key) is not None)
    phases = dict.fromkeys(name for row in rows for name in _mapping(row, "seconds") if ": " not in name)
    return [
        *(key for key in names if key not in {"step", unit_of(rows), "elapsed"}),
        *(f"seconds.{name}" for name in phases),
    ]


def elapsed_seconds(rows: Sequence[Row]) -> list[float]:
    """For each row, the seconds since the run began: as it was measured, or, in the log of an older version, as its
    phases add up. It goes on where the run was resumed, whose process counts anew."""
    times: list[float] = []
    now = offset = before = 0.0
    for row in rows:
        elapsed = finite_number(row, "elapsed")
        if elapsed is None:
            now += sum(phases_of([row])[0].values())
            before = now - offset
        else:
            if elapsed < before / 2:  # another process, which counts from zero
                offset = now
            now, before = max(now, offset + elapsed), elapsed
        times.append(now)
    return times


def phases_of(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of rank 0 by phase, over all rows, the longest first: of the outer phases, and of those in `grads`."""
    outer: defaultdict[str, float] = defaultdict(float)
    in_grads: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        seconds = _mapping(row, "seconds")
        for name in seconds:
            if ": " not in name:
                sums = outer if _is_outer(name, seconds) else in_grads
                sums[name] += finite_number(seconds, name) or 0.0
    return _longest_first(outer), _longest_first(in_grads)


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _is_outer(name: str, seconds: Mapping[str, Any]) -> bool:
    """A phase that is not part of another."""
    return ": " not in name and not (name in _IN_GRADS and "grads" in seconds)


def _mapping(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def numbers_of_ranks(row: Mapping[str, Any], key: str) -> list[float]:
    """A list with a number for each rank; empty if it is something else."""
    value = row.get(key)
    numbers = [finite_number({"it": each}, "it") for each in value] if isinstance(value, list) else []
    return [each for each in numbers if each is not None] if None not in numbers else []


# ------------------------------------------------------------------------------------------------------ a run, in short


@dataclass(frozen=True)
class Values:
    """The values of a metric over a run. `last` is None where the last one is not finite; `best` is the lowest, at
    `best_step`."""

    first: float | None
    last: float | None
    best: float | None
    best_step: int | None


@dataclass(frozen=True)
class Failure:
    """What the rank that failed first has left: at which step, and its error."""

    rank: int | None
    step: int | None
    error: str


@dataclass(frozen=True)
class Summary:
    """What is known of a run. None, or nothing in a list or mapping, is what its files do not say."""

    path: str
    state: RunState
    step: int
    steps: int
    ranks: int
    began: float  # seconds since 1970, as in st_mtime
    seconds: float | None  # that it has taken
    seconds_are: Literal["measured", "sum of phases"]
    loss: Values | None
    eval_loss: Values | None
    unit: str  # what the loss counts: tokens, samples
    count: float | None  # of that, in all
    rate: float | None  # of that, per second: the median over the run
    phases: dict[str, float]  # seconds of rank 0
    inside_grads: dict[str, float]
    memory_mb: dict[str, list[float]]  # "rss", and "cuda" on GPUs: the highest of each rank
    straggler: dict[str, Any] | None  # see `straggler`
    failure: Failure | None
    reason: str | None  # why it was stopped, where it says so
    checkpoints: list[str]
    config: dict[str, Any]


def summarize(folder: Path) -> Summary:
    """Read a run's folder and sum it up. Raises `ConfigError` if it is none."""
    return read_run(folder)[1]


def read_run(folder: Path) -> tuple[list[Row], Summary]:
    """The rows of its log, and what they come to. Raises `ConfigError` if it is no run."""
    state = state_of(folder)  # before its files: a run that ends meanwhile is shown as running, with all its steps
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
    """The last step that was taken: as the result says, else the later of the log's and the failure's, as the log of a
    run that failed or was killed may lack its last steps."""
    told = finite_number(result, "step")
    if told is not None:
        return int(told)
    return max([row["step"] for row in rows] + [failure.step or 0 if failure else 0])


def unit_of(rows: Sequence[Row]) -> str:
    """What the loss of a run counts, by the name of its rate: "tokens" where the log has none."""
    names = (key for row in rows for key in row if key.endswith(PER_SECOND))
    return next(names, f"tokens{PER_SECOND}").removesuffix(PER_SECOND)


def _count(rows: Sequence[Row], unit: str) -> float | None:
    """Return how many `unit` the run has counted, None without a count. Weighted samples count fractions."""
    return max((count for row in rows if (count := finite_number(row, unit)) is not None), default=None)


def _ranks(run: Run, result: Mapping[str, Any], in_ranks: Sequence[Mapping[str, Any]]) -> int:
    """How many ranks there were: as the result says, else the last evaluation, else the number of rank logs. Only where
    none of these is there, as many as the config says were to be started: torchrun may have started others."""
    told = [len(rss) for each in in_ranks if (rss := numbers_of_ranks(each, "rss_mb"))]
    logs = len(list(run.path.glob("rank_*.log")))
    known = (
        finite_number(result, "world_size") or (told[-1] if told else 0) or logs or finite_number(run.config, "nprocs")
    )
    return int(known or 1)


def _values(rows: Sequence[Row], key: str) -> Values | None:
    values = [(finite_number(row, key), row["step"]) for row in rows if key in row]
    if not values:
        return None
    best, best_step = min(((value, step) for value, step in values if value is not None), default=(None, None))
    return Values(values[0][0], values[-1][0], best, best_step)


def rates_of(rows: Sequence[Row], unit: str) -> list[float]:
    """The rate of each stretch between two writes of the log, whose steps all have the same."""
    rates = [rate for row in rows if (rate := finite_number(row, unit + PER_SECOND)) is not None]
    return [rate for rate, _ in groupby(rates)]


def _median_rate(rows: Sequence[Row], unit: str) -> float | None:
    """The median rate of a run, without its first stretch between two writes, in which things warm up; None without
    any."""
    stretches = rates_of(rows, unit)
    return statistics.median(stretches[1:] or stretches) if stretches else None


def _memory(in_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    highest: dict[str, list[float]] = {}
    for kind in ("rss", "cuda"):
        found = [values for each in in_ranks if (values := numbers_of_ranks(each, f"{kind}_mb"))]
        if found:
            alike = [values for values in found if len(values) == len(found[-1])]  # the world may have changed
            highest[kind] = [max(of_rank) for of_rank in zip(*alike, strict=True)]
    return highest


def straggler(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """The rank that the others wait for, if there is one: `{"rank": 1, "phase": "data", "times": 1.8, "seconds": 4.2}`.

    `seconds` are those of each rank, by phase. Judged by the work that a rank does by itself, against the median of the
    other ranks.
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
        if each[slowest] > _SLOW * others and lost > max(_WORTH_TELLING * measured, worst["seconds"] if worst else 0.0):
            times = round(each[slowest] / others, 2) if others else None
            worst = {"rank": slowest, "phase": name, "times": times, "seconds": round(lost, 3)}
    return worst


def seconds_of_ranks(in_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each rank by phase, added up over the evaluations of a world of one size, that of the last."""
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
    said = read_object(RunFolder(folder).failure) or {}
    rank, step = finite_number(said, "rank"), finite_number(said, "step")
    return Failure(
        None if rank is None else int(rank),
        None if step is None else int(step),
        str(said.get("error") or "it does not say why"),
    )


# ------------------------------------------------------------------------------------------------------ runs, compared


def differing_settings(summaries: Sequence[Summary]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, by their dotted names, with the value of each run.

    A setting that the config of an older version does not have yet is no difference; it is None there. `nprocs` is the
    ranks that there were.
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
_NOT_COMPARED = {"name", "resume", "resume_allow", "resume_without"}  # how a run is called, and where it went on


def _setting(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        if value is None:  # a group of settings that is switched off
            return None
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return _ABSENT if isinstance(value, Mapping) else value


# -------------------------------------------------------------------------------------------------- a file that grows


def follow(path: Path, is_over: Callable[[], bool], last: int, pause: float = 0.2) -> Iterator[str]:
    """The `last` lines of a file, then each whole line as it comes, until `is_over()`; what is left then, too.

    A file that is replaced, as a log is when its run goes on from a checkpoint, is begun again.
    """
    file_id, position, rest = 0, 0, b""
    while True:
        over = is_over()  # before reading: what was written until then is shown
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
