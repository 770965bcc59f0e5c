"""Kill ranks and fail disks, again and again; each finished run must have the bits of one that was not disturbed.

A run is started, and at some point of this life one of its ranks (or all) is killed by SIGKILL, or its disk fails once.
Then the same command is said again, which goes on with `resume: auto`, until the run finishes; then the next run is
started. Points have names: the edges of phases, and the operations on the disk (`files.observe_disk`), such as "fsync
optimizer.pt". Each is taken in turn, those of saving and of resuming among them; now and then chance decides. Between
two lives, the newest checkpoint may be damaged.

After each life, the newest valid checkpoint must not be older than the newest one that had got its name.
"""

import errno
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo  # once, in the server; DDP would import it in every rank

from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, folders, latest, read_manifest, verify
from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import RUNS, Operation, finished_name, observe_disk
from ddp_tutorial.phases import Edge, observe
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World, process_group

RANKS = 2
EDGES = 300  # by chance, a rank is killed at one of its first points, out of so many
LIVES = 100  # a run that has not finished after so many does not finish
TIME_LIMIT = 120.0  # seconds for one life of a run


def config_of(name: str, background: bool = False, keep_last: int = 2) -> TaskConfig:
    """A small run with all kinds of state: dropout, float16's scale, accumulation, a log, a held-out loss."""
    return TaskConfig.model_validate(
        {
            "name": name,
            "corpus": "stories",
            "model": ModelConfig(layers=1, heads=2, width=16, context=16, dropout=0.1),
            "device": "cpu",
            "steps": 12,
            "batch_size": 8,
            "accumulation": 2,
            "warmup_steps": 3,
            "precision": {"dtype": "fp16", "initial_scale": 1024, "growth_interval": 3},
            "log_every": 3,
            "eval_every": 4,
            "eval_samples": 8,
            "checkpoint": {"every": 2, "keep_last": keep_last, "background": background},
            "resume": "auto",
        }
    )


def measure_chaos(kills: int, seed: int = 0, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Kill `kills` times, in a temporary folder, and call `tell` with a line after each finished run.

    About a third as often, the disk fails: `failures`. `points` counts the different points at which either happened,
    `in_saving` the kills inside of saving, `resumed` the lives that began at a checkpoint, `damaged` the checkpoints
    that were. `bit_equal` says whether the weights, losses and norms of every finished run are those of an undisturbed
    one, and `lost` after how many lives the newest valid checkpoint was older than it should have been. Raises
    `RuntimeError` for a run that does not end.
    """
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        os.chdir(folder)
        try:
            chaos = _Chaos(seed)
            while chaos.kills < kills:
                chaos.run(kills)
                tell(
                    f"{chaos.kills} kills, {chaos.failures} failures, {chaos.runs} runs finished, "
                    f"bit-equal: {chaos.bit_equal}, lost: {chaos.lost}"
                )
        finally:
            os.chdir(before)
    return {"bench": "chaos", "environment": describe_environment(), **chaos.found()}


How = Literal["kill", "fail"]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank: at the `nth` time that it is at `point`, or at any point for an empty one."""

    point: str
    nth: int
    how: How = "kill"


@dataclass(frozen=True)
class _Life:
    """What came of one: at which point something was done to a rank, and whether that was inside of saving; the step of
    the newest checkpoint that had got its name; and how often each rank, if it lived to its end, was at each point."""

    point: str | None
    in_saving: bool
    published: int
    seen: dict[int, dict[str, int]]


class _Points:
    """The points that runs of one kind come to: seen by lives that end well, then taken in turn, in random order."""

    def __init__(self, dice: random.Random) -> None:
        self.random = dice
        self.known: dict[tuple[int, str], int] = {}  # a rank and a point -> how often it comes there
        self.waiting: dict[How, deque[tuple[int, str]]] = {"kill": deque(), "fail": deque()}

    def learn(self, life: "_Life") -> None:
        """Those that have not been seen before, as are those of resuming until a life has resumed."""
        seen = {(rank, point): count for rank, points in life.seen.items() for point, count in points.items()}
        new = [each for each in seen if each not in self.known]
        self.known |= {each: seen[each] for each in new}
        self._wait_for(new)

    def next(self, how: How) -> tuple[int, str, int]:
        """A rank, a point, and the how many-th time there; any point at all as long as none is known."""
        if not self.waiting[how]:
            self._wait_for(self.known)
        if not self.waiting[how]:
            return self.random.randrange(RANKS), "", self.random.randrange(1, EDGES)
        rank, point = self.waiting[how].popleft()
        return rank, point, self.random.randint(1, min(self.known[rank, point], 2))

    def _wait_for(self, points: Iterable[tuple[int, str]]) -> None:
        every = list(points)
        on_disk = [(rank, point) for rank, point in every if point[0] not in "+-"]
        self.waiting["kill"].extend(self.random.sample(every, len(every)))
        self.waiting["fail"].extend(self.random.sample(on_disk, len(on_disk)))


class _Chaos:
    """All runs, and what has become of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills = self.failures = self.damaged = self.in_saving = self.resumed = self.runs = self.lost = 0
        self.bit_equal = True
        self.taken: set[tuple[str, How]] = set()
        self.points = {background: _Points(self.random) for background in (False, True)}
        self.points[False].learn(_live(config_of("undisturbed"), {}))
        self.wanted = _outcome("undisturbed")

    def run(self, kills: int) -> None:
        """One run, in as many lives as it takes; after `kills` kills nothing is done to it any more."""
        name, safe = f"run{self.runs}", 0
        config = config_of(name, background=bool(self.runs % 2), keep_last=1 + self.runs // 2 % 2)
        checkpoints = RUNS / name / CHECKPOINTS
        for _ in range(LIVES):
            self.resumed += latest(checkpoints) is not None
            life = self._life(config) if self.kills < kills else _live(config, {})
            self.points[config.checkpoint.background].learn(life)
            found = _newest_valid(checkpoints)
            self.lost += found < max(safe, life.published)
            if (outcome := _outcome(name)) is not None:
                self.runs += 1
                self.bit_equal = self.bit_equal and outcome == self.wanted
                return
            safe = found if self.random.random() > 0.1 else self._damage(checkpoints)
        raise RuntimeError(f"{name} has not finished in {LIVES} lives")

    def _life(self, config: TaskConfig) -> _Life:
        """One life of a run, with something done to it."""
        how: How = "fail" if self.random.random() < 0.25 else "kill"
        points = self.points[config.checkpoint.background]
        rank, point, nth = points.next(how)
        if how == "kill" and self.random.random() < 0.2:
            point, nth = "", self.random.randrange(1, EDGES)
        victims = range(RANKS) if self.random.random() < 0.2 else [rank]
        life = _live(config, dict.fromkeys(victims, Fault(point, nth, how)))
        if life.point is not None:
            self.taken.add((life.point, how))
            self.kills += how == "kill"
            self.failures += how == "fail"
            self.in_saving += how == "kill" and life.in_saving
        elif point:  # it did not come there, as it has not resumed, say: another time
            points.waiting[how].append((rank, point))
        return life

    def _damage(self, checkpoints: Path) -> int:
        """Cut a file of the newest valid checkpoint short, if there is another one; returns the step of the newest."""
        *others, newest = [None, *(path for path in folders(checkpoints) if not verify(path))]
        if newest is not None and any(others):
            os.truncate(newest / "optimizer.pt", 1)
            self.damaged += 1
        return _newest_valid(checkpoints)

    def found(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "failures": self.failures,
            "damaged": self.damaged,
            "points": len(self.taken),
            "in_saving": self.in_saving,
            "resumed": self.resumed,
            "runs": self.runs,
            "bit_equal": self.bit_equal,
            "lost": self.lost,
        }


def _newest_valid(checkpoints: Path) -> int:
    """The step of the newest checkpoint that is as it was written; 0 where there is none."""
    found, _ = latest_valid(World(), checkpoints)
    return read_manifest(found).step if found else 0


def _live(config: TaskConfig, faults: dict[int, Fault]) -> _Life:
    """Start or resume a run, until it finishes, or does not because of a fault. Without one, raises `RuntimeError`."""
    context = multiprocessing.get_context("forkserver")  # its server imports torch once, for all processes
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory(prefix="meet-") as name:
        folder = Path(name)
        ranks = [
            context.Process(target=_rank, args=(rank, Path.cwd(), folder, config, faults.get(rank)))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        deadline, late = time.monotonic() + TIME_LIMIT, False
        while any(rank.is_alive() for rank in ranks):
            failed = any(rank.exitcode for rank in ranks)
            if failed:  # the others wait for it: end them, as a launcher would
                time.sleep(0.05)
            late = time.monotonic() > deadline
            if failed or late:
                for rank in ranks:
                    rank.kill()
            time.sleep(0.01)
        for rank in ranks:
            rank.join()
        hits = [json.loads(note.read_text()) for note in folder.glob("hit.*")]
        if not hits and any(rank.exitcode for rank in ranks):
            codes = [rank.exitcode for rank in ranks]
            raise RuntimeError(f"nothing was done to {config.name}, but its ranks ended with {codes}")
        if late:
            raise RuntimeError(f"{config.name} hangs after {hits}")
        published = folder / "published"
        return _Life(
            point=hits[0]["point"] if hits else None,
            in_saving=any(hit["in_saving"] for hit in hits),
            published=int(published.read_text()) if published.exists() else 0,
            seen={int(note.suffix[1:]): json.loads(note.read_text()) for note in folder.glob("seen.*")},
        )


def _rank(rank: int, where: Path, notes: Path, config: TaskConfig, fault: Fault | None) -> None:
    os.chdir(where)
    log = open(f"rank_{rank}.log", "w")  # noqa: SIM115, it stays open as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    fate = _Fate(rank, notes, fault)
    world = World(rank, RANKS, rank, RANKS, init_method=f"file://{notes}/store")
    with observe(fate.at_edge), observe_disk(fate.at_operation), process_group(world):
        train(world, config)
    (notes / f"seen.{rank}").write_text(json.dumps(fate.seen))
    os._exit(0)  # see rank._end_without_finalising


class _Fate:
    """Counts the points that a rank comes to, and lets its fault happen."""

    def __init__(self, rank: int, notes: Path, fault: Fault | None) -> None:
        self.rank, self.notes, self.fault = rank, notes, fault
        self.seen: Counter[str] = Counter()
        self.left = fault.nth if fault is not None else 0
        self.inside: Counter[str] = Counter()  # phases
        self.lock = threading.Lock()  # checkpoints are written and removed in threads

    def at_edge(self, edge: Edge) -> None:
        with self.lock:
            self.inside[edge.name] += 1 if edge.entered else -1
        self._at(f"{'+' if edge.entered else '-'}{edge.name}")

    def at_operation(self, operation: Operation, path: Path) -> None:
        if operation == "fsync" and path.name == CHECKPOINTS and (newest := latest(path)):  # it has its name
            self._note("published", re.sub(r"\D", "", newest.name))
        self._at(f"{operation} {_kind_of(path)}")

    def _at(self, point: str) -> None:
        with self.lock:
            self.seen[point] += 1
            self.left -= self.fault is not None and self.fault.point in ("", point)
            hit = self.fault is not None and self.left == 0
            if hit:
                self.left -= 1
        if hit:
            self._happen(point)

    def _happen(self, point: str) -> None:
        assert self.fault is not None
        in_saving = any(count > 0 and name.startswith("save") for name, count in self.inside.items())
        self._note(f"hit.{self.rank}", json.dumps({"point": point, "in_saving": in_saving}))
        if self.fault.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _note(self, name: str, text: str) -> None:
        aside = self.notes / f"{self.rank}.{name}"  # a kill leaves all of a note or nothing
        aside.write_text(text)
        aside.rename(self.notes / name)


def _kind_of(path: Path) -> str:
    """A file's name without what differs from step to step and from one time to the next."""
    return re.sub(r"step_\d+", "step", finished_name(path))


def _outcome(name: str) -> tuple[Any, ...] | None:
    """What has to be the same for two runs: weights, and values of each step. None for a run that has not finished."""
    run = RUNS / name
    if not (run / "result.json").is_file():
        return None
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "loss_scale", "eval_loss")
    return metrics["weights"], [[row.get(key) for key in keys] for row in rows]
