"""Simulate many ranks on a machine with few cores.

The ranks sleep instead of computing, but their communication is real. A sleeping rank needs no core. Therefore, 32
ranks run as fast on two cores as on 32 machines if the network is the bottleneck. To make the network the bottleneck,
simulate a low bandwidth, such as 10 Mbit/s. The messages, their timing and their overlap match those of a training run.
The backward pass sleeps layer by layer, and a layer's gradient is ready when the layer's sleep ends.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.world import World


@dataclass(frozen=True)
class Sleeper:
    """The timing and size of a simulated model, whose forward pass takes half as long as its backward pass.

    Attributes:
        fixed: Time per step in seconds, regardless of the number of samples.
        per_sample: Additional time per sample in seconds.
        nbytes: Size in bytes of all layers' weights, which is also the size of the gradients.
        layers: The number of layers.
    """

    fixed: float
    per_sample: float
    nbytes: int
    layers: int = 8

    def seconds(self, samples: int) -> float:
        """Return the total duration in seconds of a forward and a backward pass on `samples` samples."""
        return self.fixed + self.per_sample * samples


class _Sleep(torch.autograd.Function):
    """A layer that sleeps in the forward pass, and twice as long in the backward pass."""

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
    """A module with the timing and size that a `Sleeper` specifies."""

    def __init__(self, sleeper: Sleeper) -> None:
        """Create the layers' weights."""
        super().__init__()
        self.sleeper = sleeper
        floats = sleeper.nbytes // 4 // sleeper.layers
        self.weights = nn.ParameterList(torch.zeros(floats) for _ in range(sleeper.layers))

    def forward(self, samples: int) -> torch.Tensor:
        """Sleep for the duration of the forward pass, and return a scalar loss."""
        total = torch.zeros(())
        for weight in self.weights:
            total = _Sleep.apply(total, weight, self.sleeper.seconds(samples) / 3 / self.sleeper.layers)
        return total


def sleeping_step(sleeper: Sleeper, batch: int, team: World, ddp: DDPConfig) -> Callable[[], None]:
    """Return a function that runs a training step on a global batch of `batch` samples. Collective.

    Each call returns after this rank has received the averaged gradients of all ranks in `team`.
    """
    model = data_parallel(SleepingModel(sleeper), team, ddp)

    def step() -> None:
        model(math.ceil(batch / team.size)).backward()
        model.finish()
        model.module.zero_grad()

    return step
