"""Several ways to take the same step, in the same ranks, in turn: what experiments and benchmarks compare.

    def compare(world, config):
        arms = {kind: Arm(make_step(config_with(kind), world)) for kind in kinds}
        return run_interleaved(world, arms, steps=10, turns=5)

    turns = launch(compare, 2, config)[0]     # name -> a list of turns, each {"step": s, "data": s, "compute": s, ...}

Taking turns, whatever else the machine does falls on all arms. The steps are those of the trainer, without logs,
evaluation and checkpoints.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_tutorial.phases import Stopwatch, observe
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.step import TrainStep
from ddp_tutorial.training.tasks import model_of, source_of, task_of
from ddp_tutorial.world import World

Name = TypeVar("Name", bound=Hashable)
Turn = dict[str, float]

# What the phases of a step are called where they are told apart. Whatever is left of a step is "other".
PARTS = {"data": ["data"], "compute": ["forward", "backward", "update"], "sync": ["finish"]}


class Arm:
    """A `TrainStep`, taken with `threads` of torch's threads at each call.

    With `ddp.variant` torch, waiting for other ranks is a part of backward, and so of "compute".
    """

    def __init__(self, step: TrainStep, threads: int = 1) -> None:
        self.step, self.threads = step, threads

    def __call__(self) -> None:
        if torch.get_num_threads() != self.threads:  # another arm may have had more
            torch.set_num_threads(self.threads)
        self.step()

    def close(self) -> None:
        """Leave nothing behind that reads ahead."""
        self.step.close()


def make_step(config: TaskConfig, world: World) -> TrainStep:
    """A step of the task that `config` names. Collective. Raises `ConfigError` for fewer samples in it than ranks."""
    return TrainStep(model_of(config), source_of(config, world), task_of(config).loss, world, config)


def idle() -> None:
    """The step of a rank that has no part in an arm: it waits for the others at the end of their turn, asleep."""


def run_interleaved(
    world: World, arms: Mapping[Name, Callable[[], object]], steps: int, turns: int
) -> dict[Name, list[Turn]]:
    """Turns of `steps` steps, `turns` of them for each arm, forwards and backwards through the arms. Collective.

    Of each turn, the seconds of a step until all ranks are done, and how this rank spent them. A first turn of each arm
    is not counted: files are opened there, memory is allocated, and buckets are cut anew.
    """
    taken: dict[Name, list[Turn]] = {name: [] for name in arms}
    for number in range(turns + 1):
        for name in list(arms)[:: -1 if number % 2 else 1]:
            turn = _turn(world, arms[name], steps)
            if number:
                taken[name].append(turn)
    return taken


def _turn(world: World, arm: Callable[[], object], steps: int) -> Turn:
    with observe(Stopwatch(world.device)) as watch:
        _meet(world)
        start = time.perf_counter()
        for _ in range(steps):
            arm()
        _meet(world)
        seconds = (time.perf_counter() - start) / steps
    spent = watch.take()
    parts = {part: sum(spent.get(name, 0.0) for name in names) / steps for part, names in PARTS.items()}
    return {"step": seconds, **parts, "other": max(0.0, seconds - sum(parts.values()))}


def _meet(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    if world.size > 1:
        dist.barrier()  # gloo's sleeps, and leaves the cores to those who work


def medians(turns: Mapping[Name, Sequence[Turn]]) -> dict[Name, Turn]:
    """Of each arm, the medians of its turns, part by part; so their sum is about a step, not exactly."""
    return {
        name: {part: statistics.median(turn[part] for turn in each) for part in each[0]} for name, each in turns.items()
    }


def by_repeat(turns: Sequence[Turn], repeats: int, part: str = "step") -> list[float]:
    """The turns of an arm in `repeats` runs of equal length, one after another: of each, the median of one part."""
    length = len(turns) // repeats
    return [statistics.median(turn[part] for turn in turns[i * length : (i + 1) * length]) for i in range(repeats)]
