"""Ranks that sleep instead of computing, and really send: many of them on a machine of few cores.

A rank that sleeps needs no core, so 32 of them on two cores are as fast as each on a machine of its own, as long as the
network between them is what they wait for: give it a rate that is low for the processor, such as 10 Mbit/s. What they
send, when, and what that hides are those of a training: backward sleeps layer by layer, and each layer has its gradient
when it wakes up.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_tutorial.ddp.wrappers import DDPConfig, data_parallel
from ddp_tutorial.world import World


@dataclass(frozen=True)
class Sleeper:
    """A model that takes `fixed` seconds of a step and `per_sample` for each sample, a third of it in forward, in
    `layers` layers with `nbytes` bytes of weights, and so of gradients, together."""

    fixed: float
    per_sample: float
    nbytes: int
    layers: int = 8

    def seconds(self, samples: int) -> float:
        return self.fixed + self.per_sample * samples


class _Sleep(torch.autograd.Function):
    """The sum of the weights, after sleeping for a forward; in backward their gradient, after sleeping twice as
    long."""

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        ctx.shape, ctx.seconds = weight.shape, seconds
        return before + weight[0]

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return above[0], torch.ones(ctx.shape), None


class SleepingModel(nn.Module):
    """`Sleeper` as a module: a number of samples -> a loss (a number) to call `backward` on."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self.sleeper = sleeper
        floats = sleeper.nbytes // 4 // sleeper.layers
        self.weights = nn.ParameterList(torch.zeros(floats) for _ in range(sleeper.layers))

    def forward(self, samples: int) -> torch.Tensor:
        total = torch.zeros(())
        for weight in self.weights:
            total = _Sleep.apply(total, weight, self.sleeper.seconds(samples) / 3 / self.sleeper.layers)
        return total


def sleeping_step(sleeper: Sleeper, batch: int, team: World, ddp: DDPConfig) -> Callable[[], None]:
    """A function that takes a step of `batch` samples, over all ranks of `team`; it ends when this rank has the mean of
    their gradients. Collective."""
    model = data_parallel(SleepingModel(sleeper), team, ddp)

    def step() -> None:
        model(math.ceil(batch / team.size)).backward()
        model.finish()
        model.module.zero_grad()

    return step
