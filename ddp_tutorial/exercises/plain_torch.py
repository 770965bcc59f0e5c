"""The exercises of 06_plain_torch: where a run goes on, and one step written with torch's own DDP."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.exercises import Answer, Exercise, expect, numbers, on_ranks
from ddp_tutorial.world import World

# ----------------------------------------------------------------------------------------------- 1. where to go on


def _loader() -> Any:
    """Rank 1 of 2, 24 samples, 4 batches an epoch."""
    samples = range(24)
    return DataLoader(samples, 3, sampler=DistributedSampler(samples, 2, 1, seed=3))  # type: ignore[arg-type]


def _all_batches(epochs: int) -> list[list[list[int]]]:
    loader, found = _loader(), []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


def _test_position(answer: Answer) -> str:
    epochs = _all_batches(3)
    for step in (0, 1, 3, 4, 6, 8, 11):
        epoch, taken = divmod(step, 4)
        got = [batch.tolist() for batch in islice(answer(_loader(), step), 13)]
        left = epochs[epoch][taken:]
        said = f"4 batches an epoch, {step} steps made: left are {left}, and you gave {got}."
        found = [number for number, batches in enumerate(epochs) if got and got[-1] in batches]
        expect(not found or epoch in found, f"{said} They are of epoch {max(found, default=0)}, it is {epoch}.")
        expect(got == left or len(got) == len(left), f"{said} Of this epoch, {taken} have been taken.")
        expect(got == left, said)
    return "A run that goes on after any step sees what the uninterrupted one would have seen."


def _position(loader: Any, step: int) -> Iterator[Any]:
    epoch, taken = divmod(step, len(loader))
    loader.sampler.set_epoch(epoch)
    return islice(loader, taken, None)


def _position_without_epoch(loader: Any, step: int) -> Iterator[Any]:
    return islice(loader, step % len(loader), None)


def _position_from_the_start(loader: Any, step: int) -> Iterator[Any]:
    loader.sampler.set_epoch(step // len(loader))
    return iter(loader)


def _position_by_step(loader: Any, step: int) -> Iterator[Any]:
    loader.sampler.set_epoch(step)
    return islice(loader, step % len(loader), None)


def _position_one_too_far(loader: Any, step: int) -> Iterator[Any]:
    epoch, taken = divmod(step, len(loader))
    loader.sampler.set_epoch(epoch)
    return islice(loader, taken + 1, None)


position = Exercise(
    task="position(loader, step): an iterator over the batches that are left of the epoch after `step` steps.",
    test=_test_position,
    solution=_position,
    wrong={
        "forgets set_epoch": _position_without_epoch,
        "begins the epoch anew": _position_from_the_start,
        "takes the step for the epoch": _position_by_step,
        "leaves one batch out": _position_one_too_far,
    },
    hints=(
        "len(loader) is how many batches an epoch has.",
        "loader.sampler is the DistributedSampler; it has to know the epoch before the loader is iterated over.",
        "itertools.islice(loader, n, None) leaves out the first n.",
    ),
)

# ---------------------------------------------------------------------------------- 2. a step of batches that differ


def _batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two micro-batches: of 4 and 1 samples on rank 0, of 2 and 5 on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ((4, 1), (2, 5))[rank]
    return [(torch.randn(n, 3, generator=generator), 4 * torch.randn(n, 1, generator=generator)) for n in sizes]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _expected() -> tuple[float, torch.Tensor]:
    """One process, all samples at once."""
    model = _model()
    pairs = [pair for rank in range(2) for pair in _batches(rank)]
    inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
    (loss := F.mse_loss(model(inputs), targets)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    _sgd(model).step()
    return loss.item(), nn.utils.parameters_to_vector(model.parameters()).detach()


def _counted(times: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own all-reduce, and a count of how often DDP asks for it."""
    times.append(1)
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


def _take_ragged_step(world: World, answer: Answer) -> tuple[float, torch.Tensor, bool, int]:
    ddp, times = DistributedDataParallel(_model()), []  # type: ignore[var-annotated]
    ddp.register_comm_hook(times, _counted)
    returned = answer(ddp, _sgd(ddp), _batches(world.rank))
    clean = all(parameter.grad is None or not parameter.grad.any() for parameter in ddp.parameters())
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    return float("nan" if returned is None else returned), weights, clean, len(times)


def _test_ragged_step(answer: Answer) -> str:
    stuck = "Some rank waits for the others for ever: does each enter the same collectives, in the same order?"
    results = on_ranks(_take_ragged_step, 2, answer, stuck=stuck, timeout=30)
    loss, weights = _expected()
    for rank, (returned, found, clean, times) in enumerate(results):
        expect(torch.equal(found, results[0][1]), "The ranks have different weights: some gradient was not averaged.")
        expect(times == 1, f"DDP talked {times} times in one step: all backwards but the last belong in no_sync().")
        told = f"On rank {rank} the weights are {numbers(found, 4)}, and one process comes to {numbers(weights, 4)}"
        expect(
            torch.allclose(found, weights, atol=1e-5),
            f"{told}. All 12 samples should weigh the same, and the gradient of all be clipped, once.",
        )
        expect(clean, "The gradients are still there: the next step would add to them.")
        expect(
            abs(returned - loss) < 1e-4, f"Rank {rank} returns {returned:.4f}; the mean over all samples is {loss:.4f}."
        )
    return "As one process with all samples at once, and every rank says the same loss."


def _ragged_step(ddp: Any, optimizer: Any, batches: Any) -> float:
    total = torch.tensor([0.0, sum(len(targets) for _, targets in batches)])
    dist.all_reduce(total[1:])  # the count of all ranks, before anything is divided by it
    for number, (inputs, targets) in enumerate(batches):
        with nullcontext() if number == len(batches) - 1 else ddp.no_sync():
            loss = F.mse_loss(ddp(inputs), targets, reduction="sum")
            (loss * dist.get_world_size() / total[1]).backward()
        total[0] += loss.detach()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total[:1])
    return float(total[0] / total[1])


def _mean_of_means(ddp: Any, optimizer: Any, batches: Any) -> float:
    total = torch.zeros(1)
    for number, (inputs, targets) in enumerate(batches):
        with nullcontext() if number == len(batches) - 1 else ddp.no_sync():
            loss = F.mse_loss(ddp(inputs), targets) / len(batches)
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def _never_synchronised(ddp: Any, optimizer: Any, batches: Any) -> float:
    with ddp.no_sync():
        for inputs, targets in batches:
            (F.mse_loss(ddp(inputs), targets, reduction="sum") / 6).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return 0.0


def _always_synchronised(ddp: Any, optimizer: Any, batches: Any) -> float:
    ddp.no_sync = nullcontext
    return _ragged_step(ddp, optimizer, batches)


def _own_loss(ddp: Any, optimizer: Any, batches: Any) -> float:
    with torch.no_grad():
        own = sum(F.mse_loss(ddp.module(inputs), targets, reduction="sum").item() for inputs, targets in batches)
    _ragged_step(ddp, optimizer, batches)
    return own / sum(len(targets) for _, targets in batches)


ragged_step = Exercise(
    task="ragged_step(ddp, optimizer, batches): one step with the mean over the samples of all ranks; return it.",
    test=_test_ragged_step,
    solution=_ragged_step,
    wrong={
        "takes a mean of means": _mean_of_means,
        "never synchronises": _never_synchronised,
        "synchronises every micro-batch": _always_synchronised,
        "returns its own loss": _own_loss,
    },
    hints=(
        "The count of all ranks has to be known before the first backward: all-reduce it.",
        "DDP averages over ranks. Give it this rank's sum, times the world size, over the count of all ranks.",
        "`with nullcontext() if is_last else ddp.no_sync():` around forward and backward.",
    ),
)
