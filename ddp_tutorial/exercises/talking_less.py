"""Exercises of 19_talking_less: a round of local SGD, DiLoCo's outer step, and the length of a round."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.world import World

# ---------------------------------------------------------------------------------------------- 1. a round of local SGD

_RANKS, _ROUND = 3, 3


def _batches(number: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of one round on one rank."""
    draw = torch.Generator().manual_seed(10 * number + rank)
    return [(torch.randn(4, 2, generator=draw), torch.randn(4, 1, generator=draw)) for _ in range(_ROUND)]


def _model_and_optimizer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _expected(rounds: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return the reference weights: the mean, each rank's before the last average, and those before the last round."""
    pairs = [_model_and_optimizer() for _ in range(_RANKS)]
    own: list[torch.Tensor] = []
    start = torch.empty(0)
    for number in range(rounds):
        start = pairs[0][0].weight.detach().clone()
        for rank, (model, optimizer) in enumerate(pairs):
            for x, y in _batches(number, rank):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        own = [model.weight.detach().clone() for model, _ in pairs]
        for parameters in zip(*(model.parameters() for model, _ in pairs), strict=True):
            mean = torch.stack([p.detach() for p in parameters]).mean(0)
            for parameter in parameters:
                parameter.data.copy_(mean)
    return pairs[0][0].weight.detach(), own, start


def _run_round(world: World, answer: Answer) -> None:
    model, optimizer = _model_and_optimizer()
    for number in range(2):
        answer(model, optimizer, _batches(number, world.rank))
        right, own, start = _expected(number + 1)
        got = model.weight.detach()
        if torch.allclose(got, right, atol=1e-6):
            continue
        found = "this is neither the mean nor a rank's own weight"
        if torch.allclose(got, own[world.rank], atol=1e-6):
            found = "this is the rank's own weight before averaging"
        elif any(torch.allclose(got, each, atol=1e-6) for each in own):
            found = "this is a different rank's weight before averaging"
        elif torch.allclose(got, sum(own, torch.zeros_like(got)), atol=1e-6):
            found = "this is the sum over the ranks"
        elif torch.allclose(got, start, atol=1e-6):
            found = "this is the weight from the start of the round"
        raise WrongAnswerError(
            f"After round {number + 1} of {_ROUND} steps, the weight on rank {world.rank} of {world.size} must be the "
            f"mean {numbers(right)}, got {numbers(got)}: {found}."
        )


def _test_round(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."
    on_ranks(_run_round, _RANKS, answer, stuck=stuck, timeout=15)
    return "Two rounds on three ranks equal three replicas in one process, each with its own momentum."


def _local_round(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(dist.get_world_size())
            dist.all_reduce(parameter)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _never_averages(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    _steps(model, optimizer, batches)


def _adds_up(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    _steps(model, optimizer, batches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)


def _averages_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
        optimizer.step()


def _averages_each_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        _local_round(model, optimizer, [batch])


def _takes_rank_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    _steps(model, optimizer, batches)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)


def _keeps_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for parameter in model.parameters():
        parameter.data /= dist.get_world_size()
        dist.all_reduce(parameter.data)


def _begins_momentum_anew(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    _local_round(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches)


local_round = Exercise(
    task=(
        "local_round(model, optimizer, batches): for each (x, y) of batches, take one optimizer step with the loss "
        "nn.functional.mse_loss(model(x), y), without communication. Then set the weights on every rank to the mean of "
        "all ranks' weights. Every rank has the same number of batches."
    ),
    test=_test_round,
    solution=_local_round,
    wrong={
        "never averages": _never_averages,
        "sums without dividing": _adds_up,
        "averages gradients, as DDP does": _averages_gradients,
        "averages after each step": _averages_each_step,
        "gives all ranks rank 0's weights": _takes_rank_zeros,
        "does not clear the gradients": _keeps_gradients,
        "resets the momentum in each round": _begins_momentum_anew,
    },
    hints=(
        "Write the loop as for one process: zero_grad, forward, backward, step. It contains no collective.",
        "After the loop, divide each parameter by dist.get_world_size(), then sum it with dist.all_reduce.",
        "Change parameters in place inside torch.no_grad(). The optimizer keeps its momentum from round to round.",
    ),
)

# ----------------------------------------------------------------------------------------------- 2. DiLoCo's outer step


def _test_outer(answer: Answer) -> str:
    for rate, momentum in ((1.0, 0.0), (0.5, 0.0), (0.7, 0.9)):
        draw = torch.Generator().manual_seed(1)
        start, velocity = torch.randn(3, generator=draw), torch.zeros(3)
        for number in range(3):
            mean = start + torch.randn(3, generator=draw)
            right = _my_outer_step(start, mean, velocity, rate, momentum)
            given = [each.clone() for each in (start, mean, velocity)]
            got = answer(*given, rate, momentum)
            if not (isinstance(got, tuple) and len(got) == 2 and all(map(torch.is_tensor, got))):
                raise WrongAnswerError(f"The result must be two tensors (weights, velocity), got {got!r}.")
            what = f"learning rate {rate:g}, momentum {momentum:g}, round {number + 1}"
            for name, mine, should in zip(("weights", "velocity"), got, right, strict=True):
                if mine.shape == should.shape and torch.allclose(mine, should, atol=1e-5):
                    continue
                raise WrongAnswerError(
                    f"{what}: the round started at {numbers(start, 4)}, and the ranks' mean after it is "
                    f"{numbers(mean, 4)}. The {name} must be {numbers(should, 4)}, got {numbers(mine, 4)}."
                )
            start, velocity = right
    return "A learning rate of 1 without momentum gives local SGD; 0.7 with momentum 0.9 gives DiLoCo as in the paper."


def _my_outer_step(
    start: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor, learning_rate: float, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    difference = start - mean
    velocity = momentum * velocity + difference
    return start - learning_rate * (difference + momentum * velocity), velocity


def _uphill(start: Any, mean: Any, velocity: Any, learning_rate: float, momentum: float) -> Any:
    return _my_outer_step(start, 2 * start - mean, velocity, learning_rate, momentum)


def _heavy_ball(start: Any, mean: Any, velocity: Any, learning_rate: float, momentum: float) -> Any:
    velocity = momentum * velocity + start - mean
    return start - learning_rate * velocity, velocity


def _from_the_mean(start: Any, mean: Any, velocity: Any, learning_rate: float, momentum: float) -> Any:
    weights, velocity = _my_outer_step(start, mean, velocity, learning_rate, momentum)
    return weights - start + mean, velocity


def _forgets_velocity(start: Any, mean: Any, velocity: Any, learning_rate: float, momentum: float) -> Any:
    return _my_outer_step(start, mean, torch.zeros_like(start), learning_rate, momentum)


def _old_velocity(start: Any, mean: Any, velocity: Any, learning_rate: float, momentum: float) -> Any:
    difference = start - mean
    weights = start - learning_rate * (difference + momentum * velocity)
    return weights, momentum * velocity + difference


outer_step = Exercise(
    task=(
        "outer_step(start, mean, velocity, learning_rate, momentum): take DiLoCo's outer step for one tensor. A round "
        "started with the weights `start`, and `mean` is the mean of the ranks' weights after it. Return the initial "
        "weights of the next round and the new velocity: SGD with Nesterov momentum, whose gradient is start - mean."
    ),
    test=_test_outer,
    solution=_my_outer_step,
    wrong={
        "moves away from the mean": _uphill,
        "uses plain momentum": _heavy_ball,
        "steps from the mean": _from_the_mean,
        "forgets the velocity": _forgets_velocity,
        "steps before it updates the velocity": _old_velocity,
    },
    hints=(
        "First update the velocity: momentum * velocity + (start - mean).",
        "With difference = start - mean, Nesterov's step direction is difference + momentum * (new velocity).",
        "The weights are start - learning_rate * (difference + momentum * velocity).",
    ),
)

# --------------------------------------------------------------------------------------------- 3. the length of a round

# model bytes, ranks, latency in seconds, bytes per second, seconds per step, fraction of the time
_LINKS = [
    (4e6, 2, 1e-3, 1e7, 0.05, 0.1),
    (4e6, 8, 1e-3, 1e7, 0.05, 0.1),
    (4e8, 4, 5e-2, 1e8, 0.5, 0.05),
    (1e4, 16, 2e-2, 1e9, 0.01, 0.2),
    (4e6, 2, 1e-4, 1e11, 0.05, 0.5),
]


def _test_round_length(answer: Answer) -> str:
    for case in _LINKS:
        nbytes, ranks, latency, bandwidth, compute, at_most = case
        got = answer(*case)
        if isinstance(got, bool) or not isinstance(got, (int, float)) or got != int(got) or got < 1:
            raise WrongAnswerError(f"The result must be an integer number of steps of at least 1, got {got!r}.")
        right = _round_length(*case)
        talking = 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)
        part = talking / (int(got) * compute + talking)
        expect(
            int(got) == right,
            f"{nbytes / 1e6:g} MB, {ranks} ranks, {1e3 * latency:g} ms, {bandwidth / 1e6:g} MB/s: an all-reduce takes "
            f"{talking:.3g} s, a step {compute:g} s. For at most {at_most:.0%} communication, the shortest round must "
            f"have {right} steps, got {int(got)} ({part:.1%} communication).",
        )
    return "The slower the link, the longer the round. You have seen the effect on the loss."


def _round_length(nbytes: float, ranks: int, latency: float, bandwidth: float, compute: float, at_most: float) -> int:
    talking = 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)
    steps = 1
    while talking > at_most * (steps * compute + talking):
        steps += 1
    return steps


def _over_compute(nbytes: float, ranks: int, latency: float, bandwidth: float, compute: float, at_most: float) -> int:
    talking = 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)
    return max(1, math.ceil(talking / (at_most * compute)))


def _sends_once(nbytes: float, ranks: int, latency: float, bandwidth: float, compute: float, at_most: float) -> int:
    return max(1, math.ceil((latency + nbytes / bandwidth) * (1 - at_most) / (at_most * compute)))


def _no_latency(nbytes: float, ranks: int, latency: float, bandwidth: float, compute: float, at_most: float) -> int:
    return _round_length(nbytes, ranks, 0.0, bandwidth, compute, at_most)


def _one_short(nbytes: float, ranks: int, latency: float, bandwidth: float, compute: float, at_most: float) -> int:
    return max(1, _round_length(nbytes, ranks, latency, bandwidth, compute, at_most) - 1)


def _talks_in_each_step(
    nbytes: float, ranks: int, latency: float, bandwidth: float, compute: float, at_most: float
) -> int:
    return 1


round_length = Exercise(
    task=(
        "round_length(nbytes, ranks, latency, bandwidth, compute, at_most): return the smallest number of steps per "
        "round for which averaging takes at most the fraction `at_most` of the time. A ring all-reduce averages the "
        "model's `nbytes` bytes once per round, with 2 (ranks - 1) consecutive messages of nbytes / ranks bytes; "
        "`latency` is in seconds, `bandwidth` in bytes per second, and `compute` in seconds per step."
    ),
    test=_test_round_length,
    solution=_round_length,
    wrong={
        "compares with the computation time only": _over_compute,
        "sends the model once for any number of ranks": _sends_once,
        "forgets the latency": _no_latency,
        "is one step short": _one_short,
        "communicates in each step": _talks_in_each_step,
    },
    hints=(
        "An all-reduce takes 2 (ranks - 1) (latency + nbytes / ranks / bandwidth) seconds.",
        "A round of H steps takes H * compute plus one all-reduce. Which fraction of the round is the all-reduce?",
        "Try 1, 2, 3, ... until all_reduce <= at_most * (steps * compute + all_reduce).",
    ),
)
