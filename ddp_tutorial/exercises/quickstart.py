"""Exercises of 00_quickstart: the arithmetic that makes two ranks compute the same as one process."""

from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.exercises import Answer, Exercise, expect
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------- 1. split the samples


def _test_deal(answer: Answer) -> str:
    for samples, size in ((8, 2), (7, 2), (10, 3), (3, 4), (0, 2), (1, 1)):
        indices = list(range(100, 100 + samples))
        parts = [[int(i) for i in answer(indices, rank, size)] for rank in range(size)]
        dealt = sorted(index for part in parts for index in part)
        case = f"For {samples} samples and {size} ranks you returned {parts}"
        expect(len(dealt) == len(set(dealt)), f"{case}: two ranks have the same sample, which counts twice.")
        expect(dealt == indices, f"{case}: not every sample is assigned to a rank.")
        lengths = [len(part) for part in parts]
        expect(max(lengths) - min(lengths) <= 1, f"{case}: one rank has much more work, and the others wait for it.")
    return "Every sample is assigned to exactly one rank, and the ranks' sample counts differ by at most one."


def _deal(indices: list[int], rank: int, size: int) -> list[int]:
    return indices[rank::size]


def _deal_floor(indices: list[int], rank: int, size: int) -> list[int]:
    share = len(indices) // size
    return indices[rank * share : (rank + 1) * share]


def _deal_all(indices: list[int], rank: int, size: int) -> list[int]:
    return indices


def _deal_padded(indices: list[int], rank: int, size: int) -> list[int]:
    padded = indices + indices[: -len(indices) % size]
    return padded[rank::size]


def _deal_rest_to_last(indices: list[int], rank: int, size: int) -> list[int]:
    share = len(indices) // size
    return indices[rank * share :] if rank == size - 1 else indices[rank * share : (rank + 1) * share]


deal_samples = Exercise(
    task="deal(indices, rank, size): return the indices that this rank should process.",
    test=_test_deal,
    solution=_deal,
    wrong={
        "drops the remainder": _deal_floor,
        "gives every sample to every rank": _deal_all,
        "pads with copies": _deal_padded,
        "gives the remainder to the last rank": _deal_rest_to_last,
    },
    hints=(
        "Think of dealing cards: one card to each player, then start again with the first player.",
        "A Python slice has three parts: start, stop and step.",
    ),
)

# ---------------------------------------------------------------------------------------- 2. the mean loss of all ranks


def _uneven_loss(world: World, answer: Answer) -> tuple[float, float]:
    """Give rank r 2 r + 1 tokens, each with loss r + 1, so that ranks with more tokens have higher losses."""
    count = 2 * world.rank + 1
    loss_sum = torch.tensor(float(count * (world.rank + 1)))
    true = all_reduce_sum(world, torch.stack([loss_sum, torch.tensor(float(count))]))
    return float(answer(world, loss_sum, count)), float(true[0] / true[1])


def _test_mean_loss(answer: Answer) -> str:
    results = launch(_uneven_loss, 2, answer, device="cpu", timeout=20)
    for rank, (got, true) in enumerate(results):
        expect(
            abs(got - true) < 1e-6,
            f"Rank 0 has 1 token with loss 1, and rank 1 has 3 tokens with loss 2 each. The mean over the 4 tokens "
            f"must be {true:.4f}, got {got:.4f} on rank {rank}.",
        )
    return f"Both ranks return {results[0][0]:.4f}, the mean over all tokens."


def _mean_loss(world: World, loss_sum: torch.Tensor, count: int) -> float:
    both = all_reduce_sum(
        world, torch.stack([loss_sum, torch.tensor(float(count))])
    )  # loss sum and token count over all ranks
    return float(both[0] / both[1])


def _mean_of_means(world: World, loss_sum: torch.Tensor, count: int) -> float:
    mean = loss_sum / count
    dist.all_reduce(mean)
    return float(mean / world.size)


def _local_mean(world: World, loss_sum: torch.Tensor, count: int) -> float:
    return float(loss_sum / count)


def _sum_over_local_count(world: World, loss_sum: torch.Tensor, count: int) -> float:
    summed = loss_sum.clone()
    dist.all_reduce(summed)
    return float(summed / (count * world.size))


def _on_rank_zero_only(world: World, loss_sum: torch.Tensor, count: int) -> float:
    both = torch.stack([loss_sum, torch.tensor(float(count))])
    dist.reduce(both, dst=0)
    return float(both[0] / both[1]) if world.rank == 0 else 0.0


mean_loss = Exercise(
    task="mean_loss(world, loss_sum, count): return the mean loss over the tokens of all ranks, on every rank.",
    test=_test_mean_loss,
    solution=_mean_loss,
    wrong={
        "takes the mean of means": _mean_of_means,
        "returns the rank's own loss": _local_mean,
        "assumes equal counts": _sum_over_local_count,
        "returns the mean on rank 0 only": _on_rank_zero_only,
    },
    hints=(
        "A mean of means gives too much weight to the tokens of a rank that has few tokens.",
        "Loss sums can be summed over ranks, and so can counts. Divide once, at the end.",
        "Put both numbers into one tensor and call all_reduce_sum(world, tensor): it returns the sum over all ranks, "
        "on every rank.",
    ),
)

# --------------------------------------------------------------------------- 3. the loss to call backward on, under DDP


def _test_scaled_loss(answer: Answer) -> str:
    # One weight w = 1. The loss of a token x is w * x, so the gradient of a sum of losses is the sum of the tokens.
    for tokens in ([[1.0, 2.0], [3.0, 4.0]], [[5.0], [1.0, 2.0, 3.0]], [[1.0], [2.0], [6.0, 3.0]]):
        size, world_tokens = len(tokens), sum(map(len, tokens))
        gradients = []
        for mine in tokens:
            weight = torch.ones((), requires_grad=True)
            loss: Any = answer((weight * torch.tensor(mine)).sum(), world_tokens, size)
            gradients.append(float(torch.autograd.grad(loss, weight)[0]))
        averaged, true = sum(gradients) / size, sum(map(sum, tokens)) / world_tokens
        expect(
            abs(averaged - true) < 1e-6,
            f"With tokens {tokens} on the ranks, DDP averages your gradients {gradients} to {averaged:.4f}. One "
            f"process with all {world_tokens} tokens computes {true:.4f}.",
        )
    return "The averaged gradient equals that of one process with all tokens, however the ranks split the tokens."


def _scaled_loss(loss_sum: torch.Tensor, world_tokens: int, size: int) -> torch.Tensor:
    return loss_sum * size / world_tokens


def _forgets_the_average(loss_sum: torch.Tensor, world_tokens: int, size: int) -> torch.Tensor:
    return loss_sum / world_tokens


def _not_scaled(loss_sum: torch.Tensor, world_tokens: int, size: int) -> torch.Tensor:
    return loss_sum


def _averages_twice(loss_sum: torch.Tensor, world_tokens: int, size: int) -> torch.Tensor:
    return loss_sum / (world_tokens * size)


scaled_loss = Exercise(
    task="scaled_loss(loss_sum, world_tokens, size): return what to call .backward() on, knowing that DDP averages.",
    test=_test_scaled_loss,
    solution=_scaled_loss,
    wrong={
        "forgets that DDP divides by the number of ranks": _forgets_the_average,
        "does not divide the sum": _not_scaled,
        "divides by the number of ranks a second time": _averages_twice,
    },
    hints=(
        "Write down what you want: (sum of rank 0 + sum of rank 1 + ...) / world_tokens.",
        "Write down what you get: (gradient of rank 0 + gradient of rank 1 + ...) / size. Make the two equal.",
    ),
)
