"""Run one attempt of a small training run, and inject a failure, such as a killed rank or a full disk.

Failures are injected at named points. A point is the start or end of a phase, or a disk operation such as "fsync
optimizer.pt" (see `files.observe_disk`).
"""

import errno
import faulthandler
import json
import multiprocessing
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from ddp_tutorial.benches.small_disk import fill_up, limit_files
from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, latest, read_manifest, step_of
from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.compat import import_dynamo, stop_forkserver
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import RUNS, Operation, final_name, observe_disk
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World, process_group

RANKS = 2
PHASE_BOUNDARIES = 300  # a random kill happens at one of a rank's first 300 points
TIME_LIMIT = 300.0  # timeout of one attempt in seconds
GRACE_SECONDS = 30.0  # after a rank exits, the processes that it started must exit within this time
REFUSED = 2  # the exit code of a rank that rejected the config
# Modules that write the log and the model card. Otherwise, each rank would import them in each attempt.
_PRELOADED = [__name__, "tensorboardX", "jinja2"]

How = Literal["kill", "fail", "fill", "limit"]


import_dynamo()  # once, in the ranks' fork server; otherwise, each rank would import it


def config_of(name: str, background: bool = False, keep_last: int = 2, workers: int = 0) -> TaskConfig:
    """Return the config of a small run that uses every kind of training state.

    The run uses dropout, loss scaling, gradient accumulation, logging and evaluation.
    """
    return TaskConfig.model_validate(
        {
            "name": name,
            "corpus": "stories:200",
            "model": ModelConfig(layers=1, heads=2, width=16, context=16, dropout=0.1),
            "device": "cpu",
            "steps": 12,
            "batch_size": 8,
            "accumulation": 2,
            "warmup_steps": 3,
            "source": {"workers": workers},
            "precision": {"dtype": "fp16", "initial_scale": 1024, "growth_interval": 3},
            "log_every": 3,
            "eval_every": 4,
            "eval_samples": 8,
            "checkpoint": {"every": 2, "keep_last": keep_last, "background": background},
            "resume": "auto",
        }
    )


@dataclass(frozen=True)
class PlannedFailure:
    """A failure to inject into a rank.

    Attributes:
        point: The point at which the failure is injected. An empty string matches any point.
        nth: The failure happens when the rank reaches the point for the nth time.
        how: "kill" sends SIGKILL, and "fail" makes one disk operation fail. "fill" leaves only `free_bytes` bytes of
            the disk free. "limit" limits the size of each file to `free_bytes` bytes.
        free_bytes: The free space for "fill", or the maximum file size for "limit".
    """

    point: str
    nth: int
    how: How = "kill"
    free_bytes: int = 0


@dataclass(frozen=True)
class Attempt:
    """The result of one attempt.

    Attributes:
        point: The point of the injected failure, or None if no failure was injected.
        in_saving: Whether the failure happened while a checkpoint was being saved.
        published: The step of the newest checkpoint that was renamed to its final name.
        seen: For each rank that finished or rejected the run, the number of visits to each point.
        refused: The error message of each rank that rejected the config.
        is_well: Whether all ranks exited with code 0.
        left: The number of processes still running after the attempt.
    """

    point: str | None
    in_saving: bool
    published: int
    seen: dict[int, dict[str, int]]
    refused: dict[int, str]
    is_well: bool
    left: int


class Points:
    """The points that one kind of run reaches, in random order.

    Ranks that finish or reject a run record their points. Every point is used once before any point is repeated.
    """

    def __init__(self, rng: random.Random, known: Mapping[tuple[int, str], int] | None = None) -> None:
        """Store `known`, which maps each pair (rank, point) to the number of visits."""
        self.random = rng
        self.known = dict(known or {})  # (rank, point) -> number of visits
        self.waiting: dict[How, deque[tuple[int, str]]] = {}

    def learn(self, life: Attempt) -> None:
        """Record the points that no earlier attempt reached, such as points that only a resumed run reaches."""
        seen = {(rank, point): count for rank, points in life.seen.items() for point, count in points.items()}
        new = [each for each in seen if each not in self.known]
        self.known |= {each: seen[each] for each in new}
        for how, waiting in self.waiting.items():
            waiting.extend(self._shuffled(how, new))

    def next(self, how: How) -> tuple[int, str, int]:
        """Return the rank and the point at which to inject the failure, and the visit number, counted from 1.

        If no points are known yet, the returned point is an empty string, which matches any point.
        """
        waiting = self.waiting.setdefault(how, deque())
        if not waiting:
            waiting.extend(self._shuffled(how, self.known))
        if not waiting:
            return self.random.randrange(RANKS), "", self.random.randrange(1, PHASE_BOUNDARIES)
        rank, point = waiting.popleft()
        return rank, point, self.random.randint(1, min(self.known[rank, point], 2))

    def put_back(self, how: How, rank: int, point: str) -> None:
        """Requeue a point that the rank did not reach, for example because the rank did not resume."""
        self.waiting[how].append((rank, point))

    def _shuffled(self, how: How, points: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return the points at which the failure can occur, in random order.

        A rank can be killed at any point. Disk failures happen only at disk operations.
        """
        fitting = [(rank, point) for rank, point in points if how == "kill" or point[0] not in "+-"]
        return self.random.sample(fitting, len(fitting))


@contextmanager
def ranks_served() -> Iterator[None]:
    """Inside the context, fork all ranks from one server process that has already imported the required modules.

    The server runs in the current directory, and is stopped at the end of the block. Otherwise, the server would run
    until its parent process, such as a notebook kernel, exits.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    try:
        yield
    finally:
        stop_forkserver()


def run_attempt(
    config: TaskConfig,
    failures: Mapping[int, PlannedFailure] | None = None,
    where: Sequence[Path] = (),
    start: Literal["forkserver", "fork"] = "forkserver",
) -> Attempt:
    """Start or resume a run, and wait until it finishes, is rejected, or fails because of an injected failure.

    Args:
        config: The config of the run.
        failures: Dict that maps a rank to the failure to inject into that rank.
        where: Each rank's working directory, to simulate nodes without a shared folder. Defaults to the current folder.
        start: The multiprocessing start method.

    Raises:
        RuntimeError: If the ranks hang, or fail without an injected failure.
    """
    context: Any = multiprocessing.get_context(start)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="meet-") as name:
        notes = Path(name)
        ranks = [
            context.Process(
                target=_rank, args=(rank, where or [here] * RANKS, notes, config, (failures or {}).get(rank))
            )
            for rank in range(RANKS)
        ]
        deadline, late, failed = time.monotonic() + TIME_LIMIT, False, False
        try:
            for rank in ranks:
                rank.start()
            while any(rank.is_alive() for rank in ranks) and not (failed or late):
                time.sleep(0.01)
                failed = any(rank.exitcode not in {None, 0, REFUSED} for rank in ranks)
                late = time.monotonic() > deadline
            if failed:
                time.sleep(0.05)
        finally:
            # Kill the ranks that wait for a failed rank, as a launcher would. Ranks that reject a config exit anyway.
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                    rank.join()
        codes = [rank.exitcode for rank in ranks]
        hits = [json.loads(note.read_text()) for note in notes.glob("hit.*")]
        refused = {int(note.suffix[1:]): note.read_text() for note in notes.glob("refused.*")}
        logs = [path.read_text(errors="replace")[-2000:] for path in sorted(notes.glob("rank_*.log"))]
        output = "\n".join([*refused.values(), *logs])
        if late:
            raise RuntimeError(
                f"{config.name} timed out after {TIME_LIMIT:g} s. Injected failures: {hits or 'none'}. "
                f"Exit codes: {codes}. Output: {output}"
            )
        if not hits and not where and any(codes):
            raise RuntimeError(f"{config.name} exited with codes {codes} without an injected failure: {output}")
        published = notes / "published"
        return Attempt(
            point=hits[0]["point"] if hits else None,
            in_saving=any(hit["in_saving"] for hit in hits),
            published=int(published.read_text()) if published.exists() else 0,
            seen={int(note.suffix[1:]): json.loads(note.read_text()) for note in notes.glob("seen.*")},
            refused=refused,
            is_well=not any(codes),
            left=leftovers(here),
        )


def leftovers(folder: Path) -> int:
    """Return the number of other processes whose working directory is in `folder`.

    Processes that exit within `GRACE_SECONDS` are not counted.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        left = [process for process in psutil.process_iter() if _works_in(process, folder)]
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.1)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder)
    return False  # the process has exited or belongs to a different user


def newest_valid(checkpoints: Path) -> int:
    """Return the step of the newest valid checkpoint, or 0 if there is none."""
    newest, _ = latest_valid(World(), checkpoints)
    return read_manifest(newest).step if newest else 0


def outcome(name: str) -> tuple[Any, ...] | None:
    """Return a run's weight digest and per-step metrics, or None if the run has not finished.

    The digest and the metrics must be identical in all runs.
    """
    run = RUNS / name
    if not (run / "result.json").is_file():
        return None
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "loss_scale", "eval_loss")
    return metrics["weights"], [[row.get(key) for key in keys] for row in rows]


def _rank(rank: int, where: Sequence[Path], notes: Path, config: TaskConfig, failure: PlannedFailure | None) -> None:
    os.chdir(where[rank])
    log = open(notes / f"rank_{rank}.log", "w")  # noqa: SIM115, open until the process exits
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * TIME_LIMIT)  # shows the line at which a rank hangs
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for data loader workers; a fork server would import torch
    injector = FailureInjector(rank, notes, failure)
    on_node = (rank, RANKS) if where[0] == where[1] else (0, 1)
    world = World(rank, RANKS, *on_node, init_method=f"file://{notes}/store")
    try:
        with observe(injector.at_edge), observe_disk(injector.at_operation), process_group(world):
            train(world, config)
    except ConfigError as error:
        injector.note(f"refused.{rank}", str(error))
        injector.end(REFUSED)  # while the error still references DDP; freeing DDP without its process group can hang
    injector.end(0)


class FailureInjector:
    """An observer that counts a rank's visits to each point, and injects the planned failure."""

    def __init__(self, rank: int, notes: Path, failure: PlannedFailure | None) -> None:
        """Store the rank, the folder to which the injector writes its records, and the failure to inject."""
        self.rank, self.notes, self.failure = rank, notes, failure
        self.seen: Counter[str] = Counter()
        self.left = failure.nth if failure is not None else 0
        self.inside: Counter[str] = Counter()  # for each phase, entries minus exits
        self.lock = threading.Lock()  # checkpoints are written and removed in threads

    def at_edge(self, edge: PhaseEvent) -> None:
        """Handle the start or end of a phase."""
        with self.lock:
            self.inside[edge.name] += 1 if edge.entered else -1
        self._at(f"{'+' if edge.entered else '-'}{edge.name}")

    def at_operation(self, operation: Operation, path: Path) -> None:
        """Handle a disk operation, and record the step of a checkpoint that was just published."""
        if operation == "fsync" and path.name == CHECKPOINTS and (newest := latest(path)):  # published
            self.note("published", str(step_of(newest)))
        self._at(f"{operation} {_kind_of(path)}")

    def _at(self, point: str) -> None:
        with self.lock:
            self.seen[point] += 1
            self.left -= self.failure is not None and self.failure.point in ("", point)
            hit = self.failure is not None and self.left == 0
            if hit:
                self.left -= 1
        if hit:
            self._happen(point)

    def _happen(self, point: str) -> None:
        assert self.failure is not None
        with self.lock:
            in_saving = any(count > 0 and name.startswith("save") for name, count in self.inside.items())
        self.note(f"hit.{self.rank}", json.dumps({"point": point, "in_saving": in_saving}))
        if self.failure.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.failure.how == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif self.failure.how == "fill":
            fill_up(Path.cwd(), self.failure.free_bytes)
        else:
            limit_files(self.failure.free_bytes)

    def end(self, code: int) -> None:
        """Write the visit counts, and exit this rank without finalizing Python; see `rank._exit_without_finalizing`."""
        self.note(f"seen.{self.rank}", json.dumps(self.seen))
        os._exit(code)

    def note(self, name: str, text: str) -> None:
        """Write a record atomically, so that a killed rank leaves either the complete record or no record."""
        aside = self.notes / f"{self.rank}.{name}"
        aside.write_text(text)
        aside.rename(self.notes / name)


def _kind_of(path: Path) -> str:
    """Return a file's name without the parts that vary between steps and attempts."""
    return re.sub(r"step_\d+", "step", final_name(path))
