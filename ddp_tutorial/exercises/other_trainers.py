"""Exercises on ragged batches, resuming a data loader, and RNG states, for notebook 16_other_trainers."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.world import World

_STUCK = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."

# ------------------------------------------------------------------------------------------------------- 1. a fair loss

_COUNTS = [(5, 5), (7, 2), (1, 9)]  # tokens on rank 0 and on rank 1


def _test_fair(answer: Answer) -> str:
    found = on_ranks(_fair_on_rank, 2, answer, stuck=_STUCK, timeout=30)[0]
    for (first, second), (got, right) in zip(_COUNTS, found, strict=True):
        expect(
            torch.allclose(got, right, rtol=1e-4, atol=1e-6),
            f"With {first} tokens on rank 0 and {second} on rank 1, the gradient under DDP must be "
            f"{numbers(right, 4)}, as in one process with all {first + second} tokens, got {numbers(got, 4)}.",
        )
    return "The gradient is the same as in one process, for any split of the tokens."


def _fair_on_rank(world: World, answer: Answer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [_two_gradients(world, answer, counts) for counts in _COUNTS]


def _two_gradients(world: World, answer: Answer, counts: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient computed with DDP, and the gradient computed in one process."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1, bias=False), torch.randn(sum(counts), 3) + torch.arange(sum(counts))[:, None]
    one = copy.deepcopy(model)
    one(x).sum().div(len(x)).backward()
    own = x.split(list(counts))[world.rank]
    ddp = DistributedDataParallel(model)  # kept in a variable: otherwise DDP is freed before backward
    loss = answer(ddp(own).sum(), torch.tensor(len(own)))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise WrongAnswerError(f"The loss must be a one-element tensor that requires grad, got {loss!r}.")
    loss.backward()
    gradients = model.weight.grad, one.weight.grad
    assert gradients[0] is not None
    assert gradients[1] is not None
    return gradients[0][0], gradients[1][0]


def _fair_loss(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    everywhere = count.clone()
    dist.all_reduce(everywhere)  # number of tokens on all ranks
    return total * dist.get_world_size() / everywhere  # DDP divides by the world size


def _mean_of_means(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return total / count


def _forgets_ddps_mean(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    everywhere = count.clone()
    dist.all_reduce(everywhere)
    return total / everywhere


def _by_the_largest(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    largest = count.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return total / largest


fair_loss = Exercise(
    task=(
        "fair_loss(total, count): `total` is the sum of the losses of this rank's tokens, and the tensor `count` is "
        "the number of these tokens. Return a loss for which DDP's mean gradient equals the gradient of one process "
        "with the tokens of all ranks."
    ),
    test=_test_fair,
    solution=_fair_loss,
    wrong={
        "takes the mean over its own tokens": _mean_of_means,
        "forgets that DDP divides by the world size": _forgets_ddps_mean,
        "divides by the largest count of a rank": _by_the_largest,
    },
    hints=(
        "One process divides the loss sum by the number of tokens. What does DDP do with the ranks' gradients?",
        "Sum the counts of all ranks with dist.all_reduce on a copy, because all_reduce overwrites its argument.",
        "DDP divides by the number of ranks. To undo this division, multiply the loss by dist.get_world_size().",
    ),
)

# ------------------------------------------------------------------------------------------ 2. the position in the data

_SAMPLES, _PER_RANK, _STEPS = 24, 3, 11  # on two ranks, an epoch has four steps
_ASK_FOR = 40  # maximum number of batches read from an answer


def _test_place(answer: Answer) -> str:
    whole = on_ranks(_batches_on_rank, 2, answer, list(range(_STEPS)), stuck=_STUCK, timeout=30)
    for rank, of_rank in enumerate(whole):
        right = [list(batch) for batch in islice(_right_order(rank), _STEPS + 4)]
        for step, got in enumerate(of_rank):
            expect(
                got == right[step : step + 4],
                f"When rank {rank} resumes after step {step} (an epoch has 4 steps), the next batches must be "
                f"{right[step : step + 4]}, got {got}.",
            )
    return f"After each of {_STEPS} steps, both ranks resume with the same batches as in an uninterrupted run."


def _sampler(rank: int) -> DistributedSampler[int]:
    return DistributedSampler(range(_SAMPLES), 2, rank, shuffle=True)  # type: ignore[arg-type]


def _batches_on_rank(world: World, answer: Answer, steps: list[int]) -> list[list[list[int]]]:
    return [[list(batch) for batch in islice(answer(_sampler(world.rank), _PER_RANK, step), 4)] for step in steps]


def _right_order(rank: int) -> Iterator[list[int]]:
    return _batches_from(_sampler(rank), _PER_RANK, 0)


def _batches_from(sampler: Any, per_rank: int, step: int) -> Iterator[list[int]]:
    in_epoch = len(sampler) // per_rank
    while True:
        sampler.set_epoch(step // in_epoch)
        numbers = list(sampler)
        for first in range(step % in_epoch * per_rank, in_epoch * per_rank, per_rank):
            yield numbers[first : first + per_rank]
            step += 1


def _begins_the_epoch_again(sampler: Any, per_rank: int, step: int) -> Iterator[list[int]]:
    in_epoch = len(sampler) // per_rank
    return _batches_from(sampler, per_rank, step // in_epoch * in_epoch)


def _counts_epochs_since_the_start(sampler: Any, per_rank: int, step: int) -> Iterator[list[int]]:
    in_epoch = len(sampler) // per_rank
    return _batches_from(sampler, per_rank, step % in_epoch)


def _skips_in_each_epoch(sampler: Any, per_rank: int, step: int) -> Iterator[list[int]]:
    in_epoch = len(sampler) // per_rank
    epoch, done = divmod(step, in_epoch)
    for each in range(epoch, epoch + _ASK_FOR):
        sampler.set_epoch(each)
        numbers = list(sampler)[done * per_rank :]
        yield from (numbers[first : first + per_rank] for first in range(0, len(numbers), per_rank))


def _never_sets_the_epoch(sampler: Any, per_rank: int, step: int) -> Iterator[list[int]]:
    numbers = list(sampler)
    for each in range(step, step + _ASK_FOR):
        first = each * per_rank % len(numbers)
        yield numbers[first : first + per_rank]


batches_from = Exercise(
    task=(
        "batches_from(sampler, per_rank, step): yield batches (lists of sample indices) for a rank that resumes "
        "after `step` steps. Continue with the following epochs, forever. `sampler` is a DistributedSampler. An "
        "epoch consists of exactly len(sampler) // per_rank steps."
    ),
    test=_test_place,
    solution=_batches_from,
    wrong={
        "starts the epoch over": _begins_the_epoch_again,
        "counts epochs since the last restart": _counts_epochs_since_the_start,
        "skips batches in each epoch": _skips_in_each_epoch,
        "never calls set_epoch": _never_sets_the_epoch,
    },
    hints=(
        "The step determines the epoch and the number of completed batches in that epoch.",
        "Call sampler.set_epoch(epoch) before list(sampler), because the order depends only on the seed and the epoch.",
        "Skip the completed batches only in the first epoch that you yield.",
    ),
)

# ------------------------------------------------------------------------------------------------ 3. the random numbers


def _test_random(answer: Answer) -> str:
    ranks = on_ranks(_random_on_rank, 2, answer, stuck=_STUCK, timeout=30)
    for rank, (right, got) in enumerate(ranks):
        case = f"After the resume, rank {rank} must draw {numbers(right, 4)}, got {numbers(got, 4)}"
        other = numbers(ranks[1 - rank][0], 4)
        expect(
            torch.equal(right, got),
            f"{case}." + (f" These are rank {1 - rank}'s numbers." * (numbers(got, 4) == other)),
        )
    return "Each rank continues its own random sequence."


def _random_on_rank(world: World, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + world.rank)  # dropout must differ between ranks
    torch.rand(7 + world.rank)
    keep = answer(world)
    saved: list[Any] = [keep.state_dict()]
    dist.broadcast_object_list(saved)  # rank 0 writes the only checkpoint, and all ranks read it
    right = torch.rand(3)
    torch.manual_seed(0)  # after a restart
    answer(world).load_state_dict(saved[0])
    return right, torch.rand(3)


class _RandomNumbers:
    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size

    def state_dict(self) -> dict[str, Any]:
        states = [None] * self.size
        dist.all_gather_object(states, torch.get_rng_state())
        return {"torch": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"][self.rank])


class _OwnStateOnly(_RandomNumbers):
    def state_dict(self) -> dict[str, Any]:
        return {"torch": [torch.get_rng_state()] * self.size}


class _SeedsAgain(_RandomNumbers):
    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.initial_seed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.manual_seed(state["torch"] + self.rank)


class _LoadsRankZeros(_RandomNumbers):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"][0])


random_numbers = Exercise(
    task=(
        "Write a class RandomNumbers(world) with state_dict() and load_state_dict(state), so that each rank "
        "continues its own torch random sequence after a resume. All ranks call both methods. Rank 0 saves the dict "
        "that its state_dict() returns, and all ranks load this dict."
    ),
    test=_test_random,
    solution=_RandomNumbers,
    wrong={
        "saves the state of rank 0 only": _OwnStateOnly,
        "saves the seed": _SeedsAgain,
        "loads the state of rank 0 on all ranks": _LoadsRankZeros,
    },
    hints=(
        "torch.get_rng_state() and torch.set_rng_state(state) affect this rank only. Rank 0's file must contain "
        "the states of all ranks.",
        "All ranks call state_dict, so it can use a collective such as dist.all_gather_object(states, mine).",
        "Save a list with one state per rank. In load_state_dict, each rank loads the entry at index world.rank.",
    ),
)
