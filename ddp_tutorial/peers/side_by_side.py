"""Run the trainers one after another on the same ranks, and compare their weights and step times.

outcomes = launch(train_with, 2, ["plain", "ours"], gpt(steps=40))[0]      # name -> Outcome
"""

import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from ddp_tutorial.peers.work import Batch, Work
from ddp_tutorial.world import World

NAMES = ["plain", "ours", "accelerate", "fabric", "lightning", "huggingface"]
_WARM = 10  # untimed warm-up steps, which rebuild buckets and allocate memory


@dataclass(frozen=True)
class Outcome:
    """The result of training with one trainer.

    Attributes:
        weights: The final weights.
        seconds: The mean step time in seconds, including the trainer's work between steps.
        losses: The loss that the trainer reports for each step, averaged over all ranks.
        seen: This rank's sample indices in each step. Only `resume_with` records these indices.
    """

    weights: dict[str, torch.Tensor]
    seconds: float
    losses: list[float] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)


def train_with(world: World, names: Sequence[str], work: Work) -> dict[str, Outcome]:
    """Train with each trainer, and return the outcomes by name. Collective.

    At least two ranks are required. The trainers write to a temporary folder.
    """
    outcomes = {}
    for name in names:
        with _shared_folder(world):
            outcomes[name] = _train(world, name, work)
    return outcomes


def resume_with(world: World, names: Sequence[str], work: Work, after: int) -> dict[str, tuple[Outcome, Outcome]]:
    """Run each trainer with and without an interruption. Collective.

    Each trainer runs three times. The first run is not interrupted. The second run writes a checkpoint after step
    `after` and is killed in the next step. The third run resumes from the checkpoint. Like a restarted script, the
    third run starts with a new model and newly seeded random number generators. At least two ranks are required.

    Returns:
        The outcomes of the first and third runs, by trainer. The third run's `seen` starts with step `after` + 1.

    Raises:
        AssertionError: If a trainer does not resume after step `after`, for example because it starts over.
    """
    outcomes = {}
    for name in names:
        with _shared_folder(world):
            uninterrupted = _train_watched(world, name, work)
        with _shared_folder(world):
            saving = replace(work, save_after=after)
            with suppress(_KilledError):
                _train_watched(world, name, saving, killed_after=after)
                raise AssertionError(f"{name} was not killed after step {after}")
            resumed = _train_watched(world, name, replace(saving, resume=True))
        if len(resumed.seen) != work.steps - after:
            raise AssertionError(f"{name} did not resume after step {after}: it took {len(resumed.seen)} steps")
        outcomes[name] = uninterrupted, resumed
    return outcomes


class _KilledError(Exception):
    """Raised to simulate a power failure, after which nothing is saved."""


class _Numbered(Dataset[Batch]):
    """A dataset that adds the sample index to each sample."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        return {**self.samples[index], "number": torch.tensor(index)}


def _train_watched(world: World, name: str, work: Work, killed_after: int | None = None) -> Outcome:
    """Train, and record the sample indices in each step. Raise `_KilledError` in the step after step `killed_after`.

    Only the last batch before each optimizer step is recorded. This package also computes losses before the first step,
    to check the loss function and to warm up DDP.
    """
    steps, seen = 0, list[list[int]]()

    def finish_step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    def loss(model: Any, batch: Batch) -> tuple[Tensor, Any]:
        if steps == killed_after:
            raise _KilledError
        seen[steps:] = [batch["number"].tolist()]
        return work.loss(model, batch)

    hook = register_optimizer_step_post_hook(finish_step)
    try:
        return replace(_train(world, name, replace(work, samples=_Numbered(work.samples), loss=loss)), seen=seen)
    finally:
        hook.remove()


@contextmanager
def _shared_folder(world: World) -> Iterator[None]:
    """Change to a temporary working directory that all ranks share. Collective."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        with chdir(folder[0]):
            yield
        dist.barrier()  # rank 0 removes the folder after all ranks have left it


def _train(world: World, name: str, work: Work) -> Outcome:
    train: Callable[[World, Work], nn.Module] = importlib.import_module(f"ddp_tutorial.peers.{name}").train
    calls: list[float] = []
    losses: list[float] = []

    def timed() -> nn.Module:
        model = work.model()
        model.register_forward_pre_hook(lambda *_: calls.append(time.perf_counter()))
        return model

    gc.freeze()  # some trainers collect garbage at the end, which takes seconds if many objects exist
    dist.barrier()  # start at the same time on all ranks
    model = train(world, replace(work, model=timed, report=losses.append))
    calls = calls[-work.steps :]
    warm = min(_WARM, len(calls) // 2)
    seconds = (calls[-1] - calls[warm]) / max(1, len(calls) - 1 - warm)
    return Outcome({key: value.detach().clone() for key, value in model.state_dict().items()}, seconds, losses)
