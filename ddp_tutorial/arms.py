"""The same training steps taken in several ways, in the same ranks, in turn: what is compared by experiments.

    def compare(world, config):
        arms = {kind: Arm(config_with(kind), world) for kind in kinds}
        return take_turns(world, arms, steps=10, repeats=5)

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

from ddp_tutorial.accumulation import next_token, split
from ddp_tutorial.collectives import rank_zero_first
from ddp_tutorial.config import ConfigError
from ddp_tutorial.corpus import load_corpus
from ddp_tutorial.data import Windows
from ddp_tutorial.model import GPT
from ddp_tutorial.phases import Stopwatch, observe, phase
from ddp_tutorial.precision import Precision
from ddp_tutorial.sources import make_source
from ddp_tutorial.strategy import DDPStrategy
from ddp_tutorial.train_config import TrainConfig
from ddp_tutorial.trainer import make_optimizer
from ddp_tutorial.world import World

Name = TypeVar("Name", bound=Hashable)
Turn = dict[str, float]

# What the phases of a step are called where they are told apart. Whatever is left of a step is "other".
PARTS = {"data": ["data"], "compute": ["forward", "backward", "update"], "sync": ["finish"]}


class Arm:
    """A model, its source and its optimiser, as `config` says, and one optimiser step of them at each call. Collective,
    unless `world` has one rank only. `threads` are torch's during a step. Raises `ConfigError` for fewer samples in a
    step than ranks.

    With `ddp.variant` torch, waiting for other ranks is a part of backward, and so of "compute".
    """

    def __init__(self, config: TrainConfig, world: World, threads: int = 1) -> None:
        self.config, self.world, self.threads = config, world, threads
        if config.batch_size < world.size:
            raise ConfigError(f"'batch_size' {config.batch_size} gives some of the {world.size} ranks nothing to do")
        with rank_zero_first(world):
            corpus = load_corpus(config.corpus)
        windows = Windows(corpus.train, config.model.context)
        self.source = make_source(config.source, windows, config.batch_size, config.seed, world)
        torch.manual_seed(config.seed)
        self.model = GPT(**config.model.model_dump()).to(world.device)
        self.precision = Precision(config.precision, world)
        self.strategy = DDPStrategy(self.model, world, config.ddp, self.precision)
        self.optimizer = make_optimizer(self.model, config)

    def __call__(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with phase("data"):
            batches = [next_token(part) for part in split(next(self.source), self.config.accumulation, self.world)]
        loss = self.strategy.backward(batches)
        with phase("update"):
            self.precision.update(self.optimizer, self.config.clip, loss.sum)

    def close(self) -> None:
        """Leave nothing behind that reads ahead."""
        self.source.close()


def idle() -> None:
    """The step of a rank that has no part in an arm: it waits for the others at the end of their turn."""


def take_turns(
    world: World, arms: Mapping[Name, Callable[[], object]], steps: int, repeats: int
) -> dict[Name, list[Turn]]:
    """Turns of `steps` steps, `repeats` of them for each arm, forwards and backwards through the arms. Collective.

    Of each turn, the seconds of a step, and how this rank spent them. A first turn of each is not counted: files are
    opened there, and memory is allocated.
    """
    turns: dict[Name, list[Turn]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name in list(arms)[:: -1 if repeat % 2 else 1]:
            turn = _turn(world, arms[name], steps)
            if repeat:
                turns[name].append(turn)
    return turns


def _turn(world: World, arm: Callable[[], object], steps: int) -> Turn:
    with observe(Stopwatch()) as watch:
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
        dist.barrier()


def medians(turns: Mapping[Name, Sequence[Turn]]) -> dict[Name, Turn]:
    """Of each arm, the medians of its turns, part by part; so their sum is about a step, not exactly."""
    return {
        name: {part: statistics.median(turn[part] for turn in each) for part in each[0]} for name, each in turns.items()
    }
