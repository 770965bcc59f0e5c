"""Compare variants of the same training step by running them alternately in the same processes.

    def compare(world, config):
        arms = {kind: Arm(make_step(config_with(kind), world)) for kind in kinds}
        return run_interleaved(world, arms, steps=10, turns=5)

    turns = launch(compare, 2, config)[0]     # name -> a list of turns, each {"step": s, "data": s, "compute": s, ...}

The variants (arms) take turns, so that background load on the machine affects all of them equally. Each step is the
trainer's step without logging, evaluation or checkpoints.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.phases import Stopwatch, observe
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.step import make_train_step
from ddp_tutorial.training.tasks import loss_of, model_of, source_of
from ddp_tutorial.world import World

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
Turn = dict[str, float]

# The phases that make up each reported part of a step. The remaining time is reported as "other".
PARTS = {"data": ["data"], "compute": ["forward", "backward", "update"], "sync": ["finish"]}


class Arm:
    """A `TrainStep` that runs with its own number of torch threads.

    With `ddp.variant: torch`, DDP waits for other ranks inside the backward pass, so "compute" includes the waiting
    time.
    """

    def __init__(self, step: TrainStep, threads: int = 1) -> None:
        """Store the step, and the number of intra-op threads to set before each call."""
        self.step, self.threads = step, threads

    def __call__(self) -> None:
        """Run one step with `threads` torch threads."""
        if torch.get_num_threads() != self.threads:  # a different arm may have changed the number
            torch.set_num_threads(self.threads)
        self.step()

    def close(self) -> None:
        """Stop the step's background data loading."""
        self.step.close()


def make_step(config: TaskConfig, world: World) -> TrainStep:
    """Return a training step for the task that `config` specifies. Collective.

    Raises:
        ConfigError: If the dataset contains fewer samples than there are ranks.
    """
    return make_train_step(model_of(config), source_of(config, world), loss_of(config), world, config)


def idle() -> None:
    """Do nothing. A rank without work waits at the barrier while the other ranks run their arms."""


def alternate(arms: Mapping[Name, Callable[[], Value]], repeats: int) -> dict[Name, list[Value]]:
    """Call the arms alternately, and return each arm's results, one per repeat.

    The order of the arms is reversed after each round. The first round is a warm-up that is not recorded, because it
    opens files, allocates memory and rebuilds buckets.
    """
    taken: dict[Name, list[Value]] = {name: [] for name in arms}
    for number in range(repeats + 1):
        for name in list(arms)[:: -1 if number % 2 else 1]:
            value = arms[name]()
            if number:
                taken[name].append(value)
    return taken


def seconds_of(call: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds_on_rank(call: Callable[[], object]) -> float:
    """Return the time in seconds from a barrier until this rank has completed the call. Collective."""
    dist.barrier()
    return seconds_of(call)


def run_interleaved(
    world: World, arms: Mapping[Name, Callable[[], object]], steps: int, turns: int
) -> dict[Name, list[Turn]]:
    """Time the arms in alternating turns (see `alternate`). Collective.

    Args:
        world: The ranks that run the steps.
        arms: The step function of each arm, by name.
        steps: The number of steps per turn.
        turns: The number of recorded turns per arm.

    Returns:
        The turns of each arm. A turn maps "step" to the seconds per step, measured until all ranks are done. A turn
        also maps each part of the step to the seconds per step that this rank spent in that part.
    """
    return alternate({name: partial(_turn, world, arm, steps) for name, arm in arms.items()}, turns)


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
        dist.barrier()  # gloo sleeps in a barrier, so waiting ranks leave the cores to busy ranks


def medians(turns: Mapping[Name, Sequence[Turn]]) -> dict[Name, Turn]:
    """Return each arm's median time for each part of a step.

    The sum of the parts' medians only approximately equals the median step time.
    """
    return {
        name: {part: statistics.median(turn[part] for turn in each) for part in each[0]} for name, each in turns.items()
    }


def by_repeat(turns: Sequence[Turn], repeats: int, part: str = "step") -> list[float]:
    """Split an arm's turns into `repeats` equal consecutive groups, and return each group's median of `part`."""
    length = len(turns) // repeats
    return [statistics.median(turn[part] for turn in turns[i * length : (i + 1) * length]) for i in range(repeats)]
