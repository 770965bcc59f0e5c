"""Kill ranks at random, again and again, and compare the finished runs with one that was not disturbed, bit for bit.

A run is started, one of its ranks (or all) is killed by SIGKILL at a random edge of a phase, half of the time one of
saving, and it is started again with `resume: auto`, until it finishes. Then the next run is started.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, in the server; DDP would import it in every rank

from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, latest
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import RUNS
from ddp_tutorial.phases import Edge, observe
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World, process_group

RANKS = 2
EDGES = 160  # a rank is killed at one of its first edges of phases, out of so many,
SAVING_EDGES = 80  # or at one of its first edges of saving, out of so many
TIME_LIMIT = 60.0  # seconds for one attempt at a run


def config_of(name: str, background: bool = False) -> TaskConfig:
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
            "checkpoint": {"every": 2, "keep_last": 2, "background": background},
            "resume": "auto",
        }
    )


def measure_chaos(kills: int, seed: int = 0, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Kill `kills` times, in a temporary folder, and call `tell` with a line after each finished run.

    `resumed` counts the attempts that began at a checkpoint, `in_saving` the kills inside of saving. `bit_equal` says
    whether the weights, losses and norms of every finished run are those of an undisturbed one.
    """
    rng = random.Random(seed)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        os.chdir(folder)
        try:
            _attempt(config_of("undisturbed"), {})
            wanted = _outcome("undisturbed")
            found = {"kills": 0, "resumed": 0, "in_saving": 0, "runs": 0, "bit_equal": True}
            while found["kills"] < kills:
                name = f"run{found['runs']}"
                config = config_of(name, background=bool(found["runs"] % 2))
                while _outcome(name) is None:
                    found["resumed"] += latest(RUNS / name / CHECKPOINTS) is not None
                    victims = range(RANKS) if rng.random() < 0.2 else [rng.randrange(RANKS)]
                    kind, edges = rng.choice([("save", SAVING_EDGES), ("", EDGES)])
                    kill_at = kind, rng.randrange(1, edges)
                    killed_in = _attempt(config, dict.fromkeys(victims, kill_at) if found["kills"] < kills else {})
                    found["kills"] += killed_in is not None
                    found["in_saving"] += killed_in is not None and killed_in.startswith("save")
                found["runs"] += 1
                found["bit_equal"] = found["bit_equal"] and _outcome(name) == wanted
                tell(f"{found['kills']} kills, {found['runs']} runs finished, bit-equal: {found['bit_equal']}")
        finally:
            os.chdir(before)
    return {"bench": "chaos", "environment": describe_environment(), **found}


KillPoint = tuple[str, int]  # which phases by the beginning of their names, and at which of their edges to kill


def _attempt(config: TaskConfig, victims: dict[int, KillPoint]) -> str | None:
    """Start or resume a run, until it finishes or its `victims` are killed. Returns the phase of the kill."""
    context = multiprocessing.get_context("forkserver")  # its server imports torch once, for all processes
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory(prefix="meet-") as folder:
        meet = f"file://{folder}/store"
        notes = [Path(folder) / f"killed{rank}" for rank in range(RANKS)]
        ranks = [
            context.Process(target=_rank, args=(rank, Path.cwd(), meet, config, victims.get(rank), notes[rank]))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + TIME_LIMIT
        while any(rank.is_alive() for rank in ranks):
            failed = any(rank.exitcode for rank in ranks)
            if failed:  # the others wait for it: end them, as a launcher would
                time.sleep(0.05)
            if failed or time.monotonic() > deadline:
                for rank in ranks:
                    rank.kill()
            time.sleep(0.01)
        for rank in ranks:
            rank.join()
        killed = [note.read_text() for note in notes if note.exists()]
        codes = [rank.exitcode for rank in ranks]
        if not killed and any(codes):
            raise RuntimeError(f"no rank was killed on purpose, but ranks ended with {codes}; see {config.name}")
        return killed[0] if killed else None


def _rank(rank: int, folder: Path, meet: str, config: TaskConfig, kill_at: KillPoint | None, note: Path) -> None:
    os.chdir(folder)
    log = open(f"rank_{rank}.log", "w")  # noqa: SIM115, it stays open as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    kind, left = kill_at or ("", sys.maxsize)

    def kill(edge: Edge) -> None:
        nonlocal left
        left -= edge.name.startswith(kind)
        if left == 0:
            note.write_text(edge.name)
            os.kill(os.getpid(), signal.SIGKILL)

    world = World(rank, RANKS, rank, RANKS, init_method=meet)
    with observe(kill), process_group(world):
        train(world, config)
    os._exit(0)  # see rank._end_without_finalising


def _outcome(name: str) -> tuple[Any, ...] | None:
    """What has to be the same for two runs: weights, and values of each step. None for a run that has not finished."""
    run = RUNS / name
    if not (run / "result.json").is_file():
        return None
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "loss_scale", "eval_loss")
    return metrics["weights"], [[row.get(key) for key in keys] for row in rows]
