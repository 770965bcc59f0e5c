"""What several benchmarks share: taking turns, random text, and two kinds of training steps."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from ddp_tutorial.accumulation import next_token
from ddp_tutorial.benches import Samples
from ddp_tutorial.data import Windows
from ddp_tutorial.ddp import DataParallel, DDPConfig, data_parallel
from ddp_tutorial.model import GPT, loss_sum
from ddp_tutorial.phases import Stopwatch, observe, phase
from ddp_tutorial.sharded import Source
from ddp_tutorial.strategy import DDPStrategy
from ddp_tutorial.world import World

CONTEXT, SAMPLES = 64, 8  # tokens of a sample, samples of a rank


def timed(step: Callable[[], object], times: int) -> float:
    """Seconds until all ranks have done `times` steps, from when all were ready. A rank that has nothing to do calls
    with `rest`: gloo's barrier sleeps, and leaves the cores to those who work. Collective."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        step()
    dist.barrier()
    return time.perf_counter() - start


def rest() -> None:
    """The step of a rank that has no part in an arm."""


def take_turns(arms: Mapping[str, Callable[[], object]], turns: int, steps: int) -> Samples:
    """Of each arm, the seconds of `steps` steps in each of `turns` turns; who goes first alternates. All arms live in
    the same ranks, so whatever slows the machine down falls on all. Collective."""
    seconds: Samples = {name: [] for name in arms}
    for turn in range(turns):
        for name in sorted(arms, reverse=bool(turn % 2)):
            seconds[name].append(timed(arms[name], steps))
    return seconds


def random_text(samples: int) -> Windows:
    """Random bytes, cut into samples: what they say does not matter here."""
    generator = torch.Generator().manual_seed(0)
    return Windows(torch.randint(256, (samples * CONTEXT + 1,), dtype=torch.uint8, generator=generator), CONTEXT)


class Step:
    """A model of about 5 million parameters, an optimiser, and one step of them each time it is called. The tokens
    differ from rank to rank."""

    def __init__(self, world: World, config: DDPConfig) -> None:
        torch.manual_seed(0)
        self.module = GPT(layers=6, heads=4, width=256, context=CONTEXT)
        self.model: DataParallel = data_parallel(self.module, world, config)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(world.rank)
        self.tokens = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)

    def loss(self) -> torch.Tensor:
        """The mean loss on this rank's tokens."""
        return loss_sum(self.model(self.tokens[:, :-1]), self.tokens[:, 1:]) / (SAMPLES * CONTEXT)

    def __call__(self) -> None:
        with phase("forward"):
            loss = self.loss()
        with phase("backward"):
            loss.backward()
        with phase("finish"):
            self.model.finish()
        with phase("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()


class Training:
    """A model of about 0.8 million parameters, and optimiser steps of it on what `source` gives.

    The gradients are averaged over `team`. It need not be the world that shares out the samples: alone in its team, a
    rank trains on its share as an independent process would. `watch` knows the seconds of the phases: data, forward,
    backward, finish (waiting for the others), update.
    """

    def __init__(self, source: Source, team: World, config: DDPConfig | None = None, threads: int = 1) -> None:
        torch.manual_seed(0)
        self.source, self.team, self.threads = source, team, threads
        self.module = GPT(layers=4, heads=4, width=128, context=CONTEXT)
        self.strategy = DDPStrategy(self.module, team, config or DDPConfig(variant="bucket"))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)
        self.watch = Stopwatch()
        self.steps = self.samples = 0  # of this rank

    def __call__(self) -> None:
        torch.set_num_threads(self.threads)  # another arm may have had more
        with observe(self.watch):
            with phase("data"):
                share = next(self.source)
                if self.team.size == 1:  # the mean is one over its own samples
                    share = replace(share, world_count=share.count)
                batch = next_token(share)
            self.strategy.backward([batch])
            with phase("update"):
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.steps += 1
        self.samples += share.count
