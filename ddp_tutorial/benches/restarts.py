"""Kill ranks of small runs under torchrun, and check that each run is bitwise identical to an uninterrupted run.

In each attempt except the last, a rank is killed with SIGKILL at a random point (see attempts.py). Then torchrun
terminates the other rank and restarts both ranks, which resume with `resume: auto`. No process may remain after a run.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_tutorial.benches.attempts import (
    RANKS,
    TIME_LIMIT,
    FailureInjector,
    PlannedFailure,
    config_of,
    leftovers,
    outcome,
)
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import observe_disk
from ddp_tutorial.phases import observe
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.process_tags import TORCHRUN, kill_torchrun
from ddp_tutorial.processes.starting import run
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World

KILLS = 5  # the maximum number of kills per run
POINTS = 200  # a kill happens at one of a rank's first 200 points in an attempt


def measure_restarts(kills: int, seed: int = 0, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Kill ranks at least `kills` times, in a temporary folder.

    Args:
        kills: The minimum number of kills.
        seed: The seed of the random choices.
        report: A function to call with a line of text after each finished run.

    Returns:
        The report. `in_saving` counts the kills during a save. `attempts` counts all attempts, including the
        uninterrupted run. `rejoined` counts the kills after which all ranks joined the next attempt. `seconds` is the
        median time from a kill until all ranks of the next attempt have joined. `bit_equal` is true if the weights,
        losses and gradient norms of every run are identical to those of the uninterrupted run. `leftover_processes` is
        the number of processes still running after the runs.
    """
    rng, before, counted = random.Random(seed), Path.cwd(), {"kills": 0, "in_saving": 0, "attempts": 1, "rejoined": 0}
    runs, leftover_processes, seconds, bit_equal = 0, 0, list[float](), True
    with tempfile.TemporaryDirectory(prefix="restarts-") as name:
        launch(_train_uninterrupted, RANKS, name, device="cpu", threads=1, echo=False)
        os.chdir(name)
        try:
            expected = outcome("uninterrupted")
            while counted["kills"] < kills or not runs:
                planned_kills = [(rng.randrange(RANKS), rng.randrange(1, POINTS)) for _ in range(min(KILLS, kills))]
                notes = torchrun(f"run{runs}", planned_kills)
                hits = {int(note.parent.name): json.loads(note.read_text()) for note in notes.glob("*/hit.*")}
                up = {attempt: _all_up(notes / str(attempt)) for attempt in range(len(planned_kills) + 1)}
                counted["kills"] += len(hits)
                counted["in_saving"] += sum(hit["in_saving"] for hit in hits.values())
                counted["attempts"] += sum((notes / str(attempt)).is_dir() for attempt in up)
                again = [(_time_of(notes / str(attempt)), up.get(attempt + 1)) for attempt in hits]
                counted["rejoined"] += sum(rejoined_at is not None for _, rejoined_at in again)
                seconds += [rejoined_at - killed for killed, rejoined_at in again if rejoined_at is not None]
                bit_equal = bit_equal and outcome(f"run{runs}") == expected
                leftover_processes += leftovers(Path.cwd())
                runs += 1
                progress = f"{counted['kills']} kills; {runs} runs finished, bitwise identical: {bit_equal}"
                report(f"{progress}, processes still running: {leftover_processes}")
        finally:
            os.chdir(before)
    median = round(statistics.median(seconds), 2) if seconds else None
    return {
        "bench": "restarts",
        "environment": describe_environment(),
        **counted,
        "runs": runs,
        "seconds": median,
        "bit_equal": bit_equal,
        "leftover_processes": leftover_processes,
    }


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether all runs are bitwise identical to the uninterrupted run, and no process is left running."""
    return bool(result["bit_equal"]) and not result["leftover_processes"]


def describe(result: Mapping[str, Any]) -> str:
    """Return a report as text."""
    names = ("kills", "in_saving", "attempts", "runs", "bit_equal", "leftover_processes")
    return ", ".join(f"{name} = {result[name]}" for name in names) + f", median restart time {result['seconds']} s"


def torchrun(name: str, planned_kills: Sequence[tuple[int, int]]) -> Path:
    """Launch a training run with torchrun, which restarts the run after each kill.

    Args:
        name: The name of the run.
        planned_kills: For each attempt, the rank to kill, and the index of the point at which to kill the rank.

    Returns:
        The folder that contains the records of all attempts.

    Raises:
        RuntimeError: If the run does not finish.
    """
    notes = Path(f"notes-{name}").resolve()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [f"--max-restarts={len(planned_kills)}", "-m", __name__, name, str(notes), json.dumps(planned_kills)]
    with open(f"{name}.log", "w+") as log:
        agent = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1", TORCHRUN: str(notes)},
            start_new_session=True,
        )
        try:
            agent.wait(TIME_LIMIT * (len(planned_kills) + 1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_torchrun(agent, str(notes))
        if agent.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"{name} exited with code {agent.returncode}: {log.read()[-4000:]}")
    return notes


def _all_up(notes: Path) -> float | None:
    """Return the time at which the last rank of an attempt joined, or None if a rank never joined."""
    rejoined_at = [float(note.read_text()) for note in notes.glob("up.*")]
    return max(rejoined_at) if len(rejoined_at) == RANKS else None


def _time_of(notes: Path) -> float:
    return min(note.stat().st_mtime for note in notes.glob("hit.*"))


def _train_uninterrupted(world: World, folder: str) -> None:
    os.chdir(folder)
    train(world, config_of("uninterrupted"))


def _run_rank(world: World, name: str, notes: Path, failure: PlannedFailure | None) -> None:
    injector = FailureInjector(world.rank, notes, failure)
    injector.note(f"up.{world.rank}", str(time.time()))
    with observe(injector.at_edge), observe_disk(injector.at_operation):
        train(world, config_of(name))


def _main(name: str, notes: str, planned_kills: str) -> None:
    """Run one rank of a training run launched by torchrun."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kills_by_attempt = json.loads(planned_kills)
    failure = None
    if attempt < len(kills_by_attempt) and kills_by_attempt[attempt][0] == rank:
        failure = PlannedFailure("", kills_by_attempt[attempt][1])
    here = Path(notes) / str(attempt)
    here.mkdir(parents=True, exist_ok=True)
    run(_run_rank, name, here, failure, device="cpu")


if __name__ == "__main__":
    _main(*sys.argv[1:])
