"""The trainers in the same ranks, one after another: what weights each comes to, and how long a step takes it.

outcomes = launch(train_with, 2, ["plain", "ours"], gpt(steps=40))[0]      # name -> Outcome
"""

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World

NAMES = ["plain", "ours", "accelerate", "fabric", "lightning", "huggingface"]
_WARM = 10  # steps that are not timed: buckets are cut anew, memory is allocated


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, torch.Tensor]  # in the end
    seconds: float  # a step, on average; forward and backward, update, and all that the trainer does between

    def distance(self, other: "Outcome") -> float:
        """The largest difference of two weights; 0.0 is bit-equal."""
        return max(float((self.weights[name] - each).abs().max()) for name, each in other.weights.items())


def train_with(world: World, names: Sequence[str], work: Work) -> dict[str, Outcome]:
    """Train with each. Collective, on two ranks or more. What a trainer writes goes to a folder that is removed."""
    return {name: _train(world, name, work) for name in names}


def _train(world: World, name: str, work: Work) -> Outcome:
    train: Callable[[World, Work], nn.Module] = importlib.import_module(f"ddp_tutorial.peers.{name}").train
    calls: list[float] = []

    def timed() -> nn.Module:
        model = work.model()
        model.register_forward_pre_hook(lambda *_: calls.append(time.perf_counter()))
        return model

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        dist.barrier()  # all begin together
        model = train(world, replace(work, model=timed))
    calls = calls[-work.steps :]
    warm = min(_WARM, work.steps // 2)
    seconds = (calls[-1] - calls[warm]) / max(1, len(calls) - 1 - warm)
    return Outcome({key: value.detach().clone() for key, value in model.state_dict().items()}, seconds)
