"""One life of a small run, and what is done to it: a rank is killed, or its disk fails once, or is full from then on.

Points have names: the edges of phases, and the operations on the disk (`files.observe_disk`), such as "fsync
optimizer.pt". An accident happens to a rank when it comes to a point.
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
from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, latest, read_manifest
from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.compat import import_dynamo, stop_forkserver
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import RUNS, Operation, final_name, observe_disk
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World, process_group

RANKS = 2
PHASE_BOUNDARIES = 300  # by chance, a rank is killed at one of its first points, out of so many
TIME_LIMIT = 120.0  # seconds for one life of a run
GOING = 5.0  # seconds in which what a rank has started has to follow it
REFUSED = 2  # the exit code of a rank that has refused to run
# What ranks would otherwise import in each life, for the log and for the model's card.
_PRELOADED = [__name__, "tensorboardX", "jinja2"]

How = Literal["kill", "fail", "fill", "limit"]


import_dynamo()  # once, in the server of the ranks: otherwise each rank would import it


def config_of(name: str, background: bool = False, keep_last: int = 2, workers: int = 0) -> TaskConfig:
    """A small run with all kinds of state: dropout, float16's scale, accumulation, a log, a held-out loss."""
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
    """What happens to a rank: at the `nth` time that it is at `point`, or at any point for an empty one.

    "kill" is SIGKILL, "fail" an error of this one operation. With "fill" the disk is full from then on but for `room`
    bytes, and with "limit" no file may be longer than that.
    """

    point: str
    nth: int
    how: How = "kill"
    room: int = 0


@dataclass(frozen=True)
class Attempt:
    """What came of one life: at which point something was done to a rank, and whether that was inside of saving; the
    step of the newest checkpoint that had got its name; how often each rank, if it lived to its end, was at each point;
    what each rank said that refused to run; whether all ended well; and how many processes were left behind."""

    point: str | None
    in_saving: bool
    published: int
    seen: dict[int, dict[str, int]]
    refused: dict[int, str]
    is_well: bool
    left: int


class Points:
    """The points that runs of one kind come to: seen by lives that end well, then taken in turn, in random order."""

    def __init__(self, rng: random.Random, known: Mapping[tuple[int, str], int] | None = None) -> None:
        self.random = rng
        self.known = dict(known or {})  # a rank and a point -> how often it comes there
        self.waiting: dict[How, deque[tuple[int, str]]] = {}

    def learn(self, life: Attempt) -> None:
        """Note the points that a life has come to and none before it, as those of resuming in the first life that
        resumes."""
        seen = {(rank, point): count for rank, points in life.seen.items() for point, count in points.items()}
        new = [each for each in seen if each not in self.known]
        self.known |= {each: seen[each] for each in new}
        for how, waiting in self.waiting.items():
            waiting.extend(self._shuffled(how, new))

    def next(self, how: How) -> tuple[int, str, int]:
        """A rank, a point, and the how many-th time there; any point at all as long as none is known."""
        waiting = self.waiting.setdefault(how, deque())
        if not waiting:
            waiting.extend(self._shuffled(how, self.known))
        if not waiting:
            return self.random.randrange(RANKS), "", self.random.randrange(1, PHASE_BOUNDARIES)
        rank, point = waiting.popleft()
        return rank, point, self.random.randint(1, min(self.known[rank, point], 2))

    def put_back(self, how: How, rank: int, point: str) -> None:
        """The rank did not come there, as it has not resumed, say: another time."""
        self.waiting[how].append((rank, point))

    def _shuffled(self, how: How, points: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """A rank can be killed anywhere; what happens to a disk happens at an operation on it."""
        fitting = [(rank, point) for rank, point in points if how == "kill" or point[0] not in "+-"]
        return self.random.sample(fitting, len(fitting))


@contextmanager
def ranks_served() -> Iterator[None]:
    """Inside, ranks are forked from one process with what they need imported; it works in the current folder. When the
    block ends, so does the process: a notebook's kernel, say, lives on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    try:
        yield
    finally:
        stop_forkserver()


def run_attempt(
    config: TaskConfig,
    accidents: Mapping[int, PlannedFailure] | None = None,
    where: Sequence[Path] = (),
    start: Literal["forkserver", "fork"] = "forkserver",
) -> Attempt:
    """Start or resume a run, until it finishes, or does not because of an accident, or refuses.

    `where` has each rank's working directory, if they are not the current one: nodes that share no folder. Raises
    `RuntimeError` where ranks hang, and where they fail though nothing was done to them.
    """
    context: Any = multiprocessing.get_context(start)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="meet-") as name:
        notes = Path(name)
        ranks = [
            context.Process(
                target=_rank, args=(rank, where or [here] * RANKS, notes, config, (accidents or {}).get(rank))
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        deadline, late = time.monotonic() + TIME_LIMIT, False
        while any(rank.is_alive() for rank in ranks):
            # The others wait for one that has failed: end them, as a launcher would. Those that refuse all end.
            failed = any(rank.exitcode not in {None, 0, REFUSED} for rank in ranks)
            if failed:
                time.sleep(0.05)
            late = time.monotonic() > deadline
            if failed or late:
                for rank in ranks:
                    rank.kill()
            time.sleep(0.01)
        for rank in ranks:
            rank.join()
        codes = [rank.exitcode for rank in ranks]
        hits = [json.loads(note.read_text()) for note in notes.glob("hit.*")]
        refused = {int(note.suffix[1:]): note.read_text() for note in notes.glob("refused.*")}
        said = "\n".join([*refused.values(), *_last_words(notes)])
        if late:
            raise RuntimeError(f"{config.name} hangs after {hits or 'nothing'}, {codes}: {said}")
        if not hits and not where and any(codes):
            raise RuntimeError(f"nothing was done to {config.name}, but it ended with {codes}: {said}")
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


def _last_words(notes: Path) -> list[str]:
    return [path.read_text(errors="replace")[-2000:] for path in sorted(notes.glob("rank_*.log"))]


def leftovers(folder: Path) -> int:
    """How many other processes work in `folder`. What ranks have started has some seconds to notice their end."""
    deadline = time.monotonic() + GOING
    while True:
        left = [process for process in psutil.process_iter() if _works_in(process, folder)]
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.1)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder)
    return False  # it is gone, or somebody else's


def newest_valid(checkpoints: Path) -> int:
    """The step of the newest checkpoint that is as it was written; 0 where there is none."""
    found, _ = latest_valid(World(), checkpoints)
    return read_manifest(found).step if found else 0


def outcome(name: str) -> tuple[Any, ...] | None:
    """What has to be the same for two runs: weights, and values of each step. None for a run that has not finished."""
    run = RUNS / name
    if not (run / "result.json").is_file():
        return None
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "loss_scale", "eval_loss")
    return metrics["weights"], [[row.get(key) for key in keys] for row in rows]


def _rank(rank: int, where: Sequence[Path], notes: Path, config: TaskConfig, accident: PlannedFailure | None) -> None:
    os.chdir(where[rank])
    log = open(notes / f"rank_{rank}.log", "w")  # noqa: SIM115, it stays open as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * TIME_LIMIT)  # for whoever wants to know where it hangs
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for those that read ahead: a server would import torch
    fate = FailureInjector(rank, notes, accident)
    on_node = (rank, RANKS) if where[0] == where[1] else (0, 1)
    world = World(rank, RANKS, *on_node, init_method=f"file://{notes}/store")
    try:
        with observe(fate.at_edge), observe_disk(fate.at_operation), process_group(world):
            train(world, config)
    except ConfigError as error:
        fate.note(f"refused.{rank}", str(error))
        fate.end(REFUSED)  # while the error holds on to DDP, which without its group can hang where it is freed
    fate.end(0)


class FailureInjector:
    """Counts the points that a rank comes to, and lets its accident happen."""

    def __init__(self, rank: int, notes: Path, accident: PlannedFailure | None) -> None:
        self.rank, self.notes, self.accident = rank, notes, accident
        self.seen: Counter[str] = Counter()
        self.left = accident.nth if accident is not None else 0
        self.inside: Counter[str] = Counter()  # phases
        self.lock = threading.Lock()  # checkpoints are written and removed in threads

    def at_edge(self, edge: PhaseEvent) -> None:
        with self.lock:
            self.inside[edge.name] += 1 if edge.entered else -1
        self._at(f"{'+' if edge.entered else '-'}{edge.name}")

    def at_operation(self, operation: Operation, path: Path) -> None:
        if operation == "fsync" and path.name == CHECKPOINTS and (newest := latest(path)):  # it has its name
            self.note("published", re.sub(r"\D", "", newest.name))
        self._at(f"{operation} {_kind_of(path)}")

    def _at(self, point: str) -> None:
        with self.lock:
            self.seen[point] += 1
            self.left -= self.accident is not None and self.accident.point in ("", point)
            hit = self.accident is not None and self.left == 0
            if hit:
                self.left -= 1
        if hit:
            self._happen(point)

    def _happen(self, point: str) -> None:
        assert self.accident is not None
        in_saving = any(count > 0 and name.startswith("save") for name, count in self.inside.items())
        self.note(f"hit.{self.rank}", json.dumps({"point": point, "in_saving": in_saving}))
        if self.accident.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.accident.how == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif self.accident.how == "fill":
            fill_up(Path.cwd(), self.accident.room)
        else:
            limit_files(self.accident.room)

    def end(self, code: int) -> None:
        """End this rank with exit `code`, without Python's own shutdown; see `rank._end_without_finalising`."""
        self.note(f"seen.{self.rank}", json.dumps(self.seen))
        os._exit(code)

    def note(self, name: str, text: str) -> None:
        aside = self.notes / f"{self.rank}.{name}"  # a kill leaves all of a note or nothing
        aside.write_text(text)
        aside.rename(self.notes / name)


def _kind_of(path: Path) -> str:
    """A file's name without what differs from step to step and from one time to the next."""
    return re.sub(r"step_\d+", "step", final_name(path))
