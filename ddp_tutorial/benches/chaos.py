"""Inject failures into small runs, and check that each run is bitwise identical to an uninterrupted run.

In most attempts, one or both ranks are killed with SIGKILL, or a disk operation fails. The run is then restarted with
`resume: auto` until it finishes. Each known failure point (see attempts.py), including points in saving and resuming,
is used once before any point is repeated. Some kills happen at random points instead.

Before some attempts, the benchmark damages the newest checkpoint. Some attempts start the ranks on two simulated nodes
without a shared folder, and the ranks must reject such attempts. Other runs use a disk of a few megabytes that fills up
during an attempt.

After each attempt, the newest valid checkpoint must not be older than the newest published checkpoint, and all
processes of the attempt must have exited.
"""

import hashlib
import multiprocessing
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ddp_tutorial.benches.attempts import (
    PHASE_BOUNDARIES,
    RANKS,
    Attempt,
    How,
    PlannedFailure,
    Points,
    config_of,
    newest_valid,
    outcome,
    ranks_served,
    run_attempt,
)
from ddp_tutorial.benches.small_disk import empty, mount_small_disk
from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, latest, list_checkpoints, verify
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import RUNS
from ddp_tutorial.training.config import TaskConfig

MAX_ATTEMPTS = 100  # per run
DISK_BYTES = 4 << 20  # size of the small disk, enough for a run with its checkpoints
ROOM = 64 << 10  # the maximum number of free bytes on a full disk, so that a write can fail midway
FAULTS: dict[How, float] = {"kill": 0.75, "fail": 0.25}  # probabilities if the disk does not fill up

# The locations of the run's files on two nodes that do not share a folder.
NODES = ["all files on the second", "all files on the first", "a copy on the second", "no files"]


def measure_chaos(
    kills: int,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
    *,
    fills: int | None = None,
    two_nodes: int | None = None,
    mount: Callable[[Path, int], str] = mount_small_disk,
) -> dict[str, Any]:
    """In a temporary folder, kill ranks in `kills` attempts, and inject other failures in additional attempts.

    About one disk operation fails for every three kills.

    Args:
        kills: The number of attempts in which ranks are killed.
        seed: The seed of the random choices.
        report: A function to call with a line of text after each finished run.
        fills: The number of attempts in which the disk fills up. Defaults to a quarter of `kills`.
        two_nodes: The number of attempts on two nodes without a shared folder. Defaults to an eighth of `kills`.
        mount: The function that mounts the small disk.

    Returns:
        The report. `attempts` counts the attempts by kind; "no failure" means that no failure was injected. `points`
        counts the distinct (point, failure) pairs. `in_saving` counts the kills during a save, `resumed` counts the
        attempts that started from a checkpoint, and `damaged` counts the damaged checkpoints. `full_disk` contains the
        limit (disk or file size), how many attempts failed at the limit, and the reason if no disk was filled.

        `bit_equal` is true if the weights, losses and gradient norms of every finished run are identical to those of
        the uninterrupted run. `lost` counts the attempts after which the newest valid checkpoint was too old.
        `not_rejected` counts the two-node attempts that a rank did not reject, that started the first step, or that
        changed a file. `leftover_processes` is the number of processes still running after the attempts.

    Raises:
        RuntimeError: If a run does not finish.
    """
    fills, two_nodes = kills // 4 if fills is None else fills, kills // 8 if two_nodes is None else two_nodes
    before = Path.cwd()
    with ranks_served(), tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name).resolve()
        shared, small = folder / "shared", folder / "small"
        shared.mkdir()
        small.mkdir()
        os.chdir(shared)
        try:
            first = run_attempt(config_of("uninterrupted"))
            expected = outcome("uninterrupted")
            chaos = _Chaos(random.Random(seed), expected, FAULTS)
            chaos.points[False].learn(first)
            while chaos.tally.attempts["kill"] < kills or chaos.tally.attempts["two nodes"] < two_nodes:
                chaos.run(kills, two_nodes)
                report(chaos.tally.line())
            why_not = ""
            if fills:
                known = {background: points.known for background, points in chaos.points.items()}
                with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as other:
                    tally, why_not = other.submit(_on_a_full_disk, mount, small, seed, expected, known, fills).result()
                chaos.tally.add(tally)
                report(chaos.tally.line())
        finally:
            os.chdir(before)
    return {"bench": "chaos", "environment": describe_environment(), **chaos.tally.summary(why_not)}


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether a report meets all requirements of the benchmark."""
    return bool(result["bit_equal"]) and not (result["lost"] or result["not_rejected"] or result["leftover_processes"])


def describe(result: Mapping[str, Any]) -> str:
    """Return a report as text."""
    full = result["full_disk"]
    return "\n".join(
        [
            "attempts: " + ", ".join(f"{count} {kind}" for kind, count in result["attempts"].items()),
            f"full disk: {full['by']}, {full['ended']} attempts failed because of it",
            *([full["not_possible"]] if full["not_possible"] else []),
            ", ".join(f"{key} = {result[key]}" for key in ("bit_equal", "lost", "not_rejected", "leftover_processes")),
        ]
    )


def _on_a_full_disk(
    mount: Callable[[Path, int], str],
    folder: Path,
    seed: int,
    expected: Any,
    known: Mapping[bool, Mapping[tuple[int, str], int]],
    fills: int,
) -> tuple["_Tally", str]:
    """Run attempts in a single-threaded process, on a disk that fills up.

    Only a single-threaded process can mount the small disk. The ranks are forked, so that they inherit the mount.

    Returns:
        The tally, and the reason why no real disk could be filled, or an empty string if a disk was filled.
    """
    why_not = mount(folder, DISK_BYTES)
    os.chdir(folder)
    chaos = _Chaos(random.Random(seed), expected, {"limit": 1.0} if why_not else {"fill": 1.0}, "fork")
    for background, points in known.items():
        chaos.points[background].known |= points
    while sum(chaos.tally.attempts[how] for how in chaos.faults) < fills:
        chaos.run(fills)
        shutil.rmtree(RUNS)
    return chaos.tally, why_not


@dataclass
class _Tally:
    """Counts of the injected failures and their results."""

    attempts: Counter[str] = field(default_factory=Counter)
    points_used: set[tuple[str, str]] = field(default_factory=set)  # (point, kind of the failure injected there)
    damaged: int = 0
    in_saving: int = 0
    resumed: int = 0
    runs: int = 0
    ended_full: int = 0
    bit_equal: bool = True
    lost: int = 0
    not_rejected: int = 0
    leftover_processes: int = 0

    def add(self, other: "_Tally") -> None:
        self.attempts += other.attempts
        self.points_used |= other.points_used
        self.bit_equal = self.bit_equal and other.bit_equal
        for name in (
            "damaged",
            "in_saving",
            "resumed",
            "runs",
            "ended_full",
            "lost",
            "not_rejected",
            "leftover_processes",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def line(self) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in self.attempts.items())
        return (
            f"attempts: {done}; {self.runs} runs finished, bitwise identical: {self.bit_equal}, lost: {self.lost}, "
            f"not rejected: {self.not_rejected}; processes still running: {self.leftover_processes}"
        )

    def summary(self, why_not: str) -> dict[str, Any]:
        by = "a file size limit" if why_not else f"a {DISK_BYTES >> 20} MB tmpfs"
        return {
            "kills": self.attempts["kill"],
            "failures": self.attempts["fail"],
            "attempts": dict(self.attempts),
            "damaged": self.damaged,
            "points": len(self.points_used),
            "in_saving": self.in_saving,
            "resumed": self.resumed,
            "runs": self.runs,
            "full_disk": {
                "by": by,
                "ended": self.ended_full,
                "not_possible": f"a full disk was not tested: {why_not}" if why_not else None,
            },
            "bit_equal": self.bit_equal,
            "lost": self.lost,
            "not_rejected": self.not_rejected,
            "leftover_processes": self.leftover_processes,
        }


class _Chaos:
    """A series of training runs in the working directory, with injected failures."""

    def __init__(
        self,
        rng: random.Random,
        expected: Any,
        faults: Mapping[How, float],
        start: Literal["forkserver", "fork"] = "forkserver",
    ) -> None:
        self.random, self.expected, self.faults, self.start = rng, expected, faults, start
        self.tally = _Tally()
        self.points = {background: Points(rng) for background in (False, True)}

    def run(self, limit: int, two_nodes: int = 0) -> None:
        """Run one training run to completion, with up to `MAX_ATTEMPTS` attempts.

        The benchmark stops injecting failures after `limit` attempts in which a rank was killed or the disk was full.
        In addition, there are `two_nodes` attempts on two simulated nodes, distributed evenly among the other attempts.
        """
        runs, counted = self.tally.runs, next(iter(self.faults))
        name, oldest_allowed = f"run{runs}", 0
        config = config_of(name, bool(runs % 2), keep_last=1 + runs // 2 % 2, workers=int(runs % 3 == 2))
        checkpoints = RUNS / name / CHECKPOINTS
        for _ in range(MAX_ATTEMPTS):
            done = self.tally.attempts[counted]
            if self.tally.attempts["two nodes"] < min(two_nodes, two_nodes * (done + 1) // max(1, limit)):
                self._two_nodes(config)
            self.tally.resumed += latest(checkpoints) is not None
            attempt = self._attempt(config) if done < limit else self._without_failure(config)
            empty(Path.cwd())
            self.points[config.checkpoint.background].learn(attempt)
            newest = newest_valid(checkpoints)
            self.tally.lost += newest < max(oldest_allowed, attempt.published)
            self.tally.leftover_processes += attempt.left
            if (end := outcome(name)) is not None:
                self.tally.runs += 1
                self.tally.bit_equal = self.tally.bit_equal and end == self.expected
                return
            oldest_allowed = newest if self.random.random() > 0.1 else self._damage(checkpoints)
        raise RuntimeError(f"{name} did not finish in {MAX_ATTEMPTS} attempts")

    def _without_failure(self, config: TaskConfig) -> Attempt:
        self.tally.attempts["no failure"] += 1
        return run_attempt(config, start=self.start)

    def _attempt(self, config: TaskConfig) -> Attempt:
        """Run one attempt with an injected failure."""
        [how] = self.random.choices(list(self.faults), list(self.faults.values()))
        points = self.points[config.checkpoint.background]
        rank, point, nth = points.next(how)
        if how == "kill" and self.random.random() < 0.2:
            point, nth = "", self.random.randrange(1, PHASE_BOUNDARIES)
        both = how in {"kill", "fail"} and self.random.random() < 0.2
        failure = PlannedFailure(point, nth, how, free_bytes=self.random.randrange(ROOM))
        attempt = run_attempt(config, dict.fromkeys(range(RANKS) if both else [rank], failure), start=self.start)
        self.tally.attempts[how if attempt.point is not None else "no failure"] += 1
        if attempt.point is not None:
            self.tally.points_used.add((attempt.point, how))
            self.tally.in_saving += how == "kill" and attempt.in_saving
            self.tally.ended_full += how in {"fill", "limit"} and not attempt.is_well
        elif point:
            points.put_back(how, rank, point)
        return attempt

    def _two_nodes(self, config: TaskConfig) -> None:
        """Attempt a run on two nodes without a shared folder; each rank must reject the run without changing a file."""
        nodes = NODES[self.tally.attempts["two nodes"] % len(NODES)]
        self.tally.attempts["two nodes"] += 1
        self.tally.attempts[f"two nodes: {nodes}"] += 1
        here = Path.cwd()
        with tempfile.TemporaryDirectory(prefix="node-", dir=here) as one, tempfile.TemporaryDirectory(dir=here) as two:
            first, second = Path(one), Path(two)
            if nodes == "a copy on the second" and RUNS.exists():
                shutil.copytree(RUNS, second / RUNS)
            where = {
                "no files": [first, second],
                "all files on the first": [here, second],
                "all files on the second": [first, here],
                "a copy on the second": [here, second],
            }[nodes]
            before = _contents(here)
            attempt = run_attempt(config, where=where)
            is_refused = len(attempt.refused) == RANKS and not any("+forward" in seen for seen in attempt.seen.values())
            self.tally.not_rejected += not is_refused or _contents(here) != before
            self.tally.leftover_processes += attempt.left

    def _damage(self, checkpoints: Path) -> int:
        """Truncate a file of the newest valid checkpoint if there is an older valid checkpoint.

        Return the step of the newest checkpoint that is valid afterward.
        """
        *others, newest = [None, *(path for path in list_checkpoints(checkpoints) if not verify(path))]
        if newest is not None and any(others):
            os.truncate(newest / "optimizer.pt", 1)
            self.tally.damaged += 1
        return newest_valid(checkpoints)


def _contents(folder: Path) -> dict[Path, str]:
    """Return a digest of each file under `folder`; folders have an empty digest."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in folder.rglob("*")}
