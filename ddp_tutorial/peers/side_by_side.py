"""The trainers in the same ranks, one after another: what weights each comes to, and how long a step takes it.

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
from torch.utils.data import Dataset

from ddp_tutorial.peers.work import Batch, Work
from ddp_tutorial.world import World

NAMES = ["plain", "ours", "accelerate", "fabric", "lightning", "huggingface"]
_WARM = 10  # steps that are not timed: buckets are cut anew, memory is allocated


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, torch.Tensor]  # in the end
    seconds: float  # a step, on average; forward and backward, update, and all that the trainer does between
    seen: list[list[int]] = field(default_factory=list)  # `resume_with` only: this rank's samples in each step

    def distance(self, other: "Outcome") -> float:
        """The largest difference of two weights; 0.0 is bit-equal."""
        return max(float((self.weights[name] - each).abs().max()) for name, each in other.weights.items())


def train_with(world: World, names: Sequence[str], work: Work) -> dict[str, Outcome]:
    """Train with each. Collective, on two ranks or more. What a trainer writes goes to a folder that is removed."""
    outcomes = {}
    for name in names:
        with _shared_folder(world):
            outcomes[name] = _train(world, name, work)
    return outcomes


def resume_with(world: World, names: Sequence[str], work: Work, after: int) -> dict[str, tuple[Outcome, Outcome]]:
    """Train with each three times: undisturbed; with a checkpoint after step `after`, killed in the step after it; and
    from that checkpoint to the end. Returns the outcome of the first and of the last, whose `seen` begins after step
    `after`. Collective, on two ranks or more.

    The last run begins as a script does that is started again: a new model, with the random numbers of its seed.
    """
    outcomes = {}
    for name in names:
        whole = _Watch()
        with _shared_folder(world):
            undisturbed = _train(world, name, whole.watching(work))
        with _shared_folder(world):
            saving, rest = replace(work, save_after=after), _Watch()
            with suppress(_KilledError):
                _train(world, name, _Watch(killed_after=after).watching(saving))
                raise AssertionError(f"{name} should have been killed after step {after}")
            resumed = _train(world, name, rest.watching(replace(saving, resume=True)))
        # What ours does before the first step, to have what an optimizer has after one, is not counted.
        undisturbed = replace(undisturbed, seen=whole.seen[-work.steps :])
        outcomes[name] = undisturbed, replace(resumed, seen=rest.seen[after - work.steps :])
    return outcomes


class _KilledError(Exception):
    """Stands for a power cut: nothing is saved after it."""


class _Numbered(Dataset[Batch]):
    """The samples, and which is which."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        return {**self.samples[index], "number": torch.tensor(index)}


class _Watch:
    """Notes the samples of each step, and raises in the step after `killed_after`."""

    def __init__(self, killed_after: int | None = None) -> None:
        self.killed_after = killed_after
        self.seen: list[list[int]] = []

    def watching(self, work: Work) -> Work:
        def loss(model: Any, batch: Batch) -> tuple[Tensor, Any]:
            if len(self.seen) == self.killed_after:
                raise _KilledError
            self.seen.append(batch["number"].tolist())
            return work.loss(model, batch)

        return replace(work, samples=_Numbered(work.samples), loss=loss)


@contextmanager
def _shared_folder(world: World) -> Iterator[None]:
    """A working directory for all ranks, which is removed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        with chdir(folder[0]):
            yield
        dist.barrier()  # rank 0 removes it when nobody is in it


def _train(world: World, name: str, work: Work) -> Outcome:
    train: Callable[[World, Work], nn.Module] = importlib.import_module(f"ddp_tutorial.peers.{name}").train
    calls: list[float] = []

    def timed() -> nn.Module:
        model = work.model()
        model.register_forward_pre_hook(lambda *_: calls.append(time.perf_counter()))
        return model

    gc.freeze()  # some collect garbage at the end: what was there before is not to be searched, for seconds
    dist.barrier()  # all begin together
    model = train(world, replace(work, model=timed))
    calls = calls[-work.steps :]
    warm = min(_WARM, len(calls) // 2)
    seconds = (calls[-1] - calls[warm]) / max(1, len(calls) - 1 - warm)
    return Outcome({key: value.detach().clone() for key, value in model.state_dict().items()}, seconds)
