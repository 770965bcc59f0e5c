"""Exercises on local SGD, reporting problems in an average, and a delayed outer step, for notebook 19_talking_less."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

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
    """Return the mean weights, each rank's weights before the last average, and the weights before the last round."""
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
            f"After round {number + 1} ({_ROUND} steps per round), the weight on rank {world.rank} of {world.size} "
            f"must be the mean {numbers(right)}, got {numbers(got)}: {found}."
        )


def _test_round(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."
    on_ranks(_run_round, _RANKS, answer, stuck=stuck, timeout=15)
    return "Two rounds on three ranks match three replicas in one process, each with its own momentum."


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
        "local_round(model, optimizer, batches): for each (x, y) in batches, take one optimizer step with the loss "
        "nn.functional.mse_loss(model(x), y), without communication. Then set the weights on every rank to the mean "
        "of all ranks' weights. Every rank has the same number of batches."
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
        "Write the loop as for one process: zero_grad, forward, backward, step. The loop contains no collectives.",
        "After the loop, divide each parameter by dist.get_world_size(), then sum it with dist.all_reduce.",
        "Change parameters in place inside torch.no_grad(). The optimizer keeps its momentum from round to round.",
    ),
)

# --------------------------------------------------------------------------------------- 2. one all-reduce that reports

_BAD: list[set[int]] = [set(), {2}, {0, 1}, {0, 1, 2}]  # ranks whose gradient was not finite


def _run_report(world: World, answer: Answer) -> None:
    for bad in _BAD:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        own = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        of_ranks = []
        for rank in range(world.size):
            torch.manual_seed(rank)
            other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            of_ranks.append(nn.utils.parameters_to_vector(other.parameters()).detach())
        with _recorded(lambda: 0) as calls:
            result = answer(model, world.rank not in bad)
        whose = f"The gradients on ranks {sorted(bad)} are not finite" if bad else "All gradients are finite"
        case = f"{whose}. On rank {world.rank},"
        expect(len(calls) == 1, f"{case} the function must call dist.all_reduce once, got {len(calls)} calls.")
        got = nn.utils.parameters_to_vector(model.parameters()).detach()
        found = sorted(int(each) for each in result) if isinstance(result, (list, tuple, set)) else result
        expect(found == sorted(bad), f"{case} the result must be {sorted(bad)}, got {result!r}.")
        right, what = (own, "unchanged") if bad else (torch.stack(of_ranks).mean(0), "the mean over all ranks")
        expect(
            torch.allclose(got, right, atol=1e-6),
            f"{case} the weights must be {what}, starting with {numbers(right[:3])}, got {numbers(got[:3])}.",
        )


class _Recorded:
    """An asynchronous all-reduce handle that records the time of the first `wait`."""

    def __init__(self, work: Any, call: dict[str, Any], now: Callable[[], int]) -> None:
        self.work, self.call, self.now = work, call, now

    def wait(self, *timeout: Any) -> Any:
        self.call.setdefault("waited", self.now())
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def _recorded(now: Callable[[], int]) -> Iterator[list[dict[str, Any]]]:
    """Record `now()` at the start of each all-reduce inside the context, and at its first `wait`."""
    calls: list[dict[str, Any]] = []
    real = dist.all_reduce

    def all_reduce(*args: Any, **named: Any) -> Any:
        calls.append({"started": now()})
        work = real(*args, **named)
        if work is None:
            calls[-1]["waited"] = now()
            return None
        return _Recorded(work, calls[-1], now)

    with patch.object(dist, "all_reduce", all_reduce):
        yield calls


def _test_report(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must call the same all-reduce, regardless of `finite`."
    on_ranks(_run_report, _RANKS, answer, stuck=stuck, timeout=15)
    return "The ranks send the flags with the weights, so a round requires no additional communication."


def _average_or_report(model: nn.Module, finite: bool) -> list[int]:
    size, parameters = dist.get_world_size(), list(model.parameters())
    flags = torch.zeros(size)
    flags[dist.get_rank()] = not finite
    message = torch.cat([flags, *(p.detach().flatten() / size for p in parameters)])
    dist.all_reduce(message)
    bad = message[:size].nonzero().flatten().tolist()
    if not bad:
        with torch.no_grad():
            nn.utils.vector_to_parameters(message[size:], parameters)
    return bad


def _averages_anyway(model: nn.Module, finite: bool) -> list[int]:
    size, parameters = dist.get_world_size(), list(model.parameters())
    flags = torch.zeros(size)
    flags[dist.get_rank()] = not finite
    message = torch.cat([flags, *(p.detach().flatten() / size for p in parameters)])
    dist.all_reduce(message)
    nn.utils.vector_to_parameters(message[size:], parameters)
    return list(message[:size].nonzero().flatten().tolist())


def _asks_first(model: nn.Module, finite: bool) -> list[int]:
    flags = torch.zeros(dist.get_world_size())
    flags[dist.get_rank()] = not finite
    dist.all_reduce(flags)
    bad = list(flags.nonzero().flatten().tolist())
    if not bad:
        for parameter in model.parameters():
            parameter.data /= dist.get_world_size()
            dist.all_reduce(parameter.data)
    return bad


def _knows_only_its_own(model: nn.Module, finite: bool) -> list[int]:
    size, parameters = dist.get_world_size(), list(model.parameters())
    message = torch.cat([p.detach().flatten() / size for p in parameters])
    dist.all_reduce(message)
    if finite:
        nn.utils.vector_to_parameters(message, parameters)
        return []
    return [dist.get_rank()]


def _counts_ranks(model: nn.Module, finite: bool) -> list[int]:
    size, parameters = dist.get_world_size(), list(model.parameters())
    message = torch.cat([torch.tensor([float(not finite)]), *(p.detach().flatten() / size for p in parameters)])
    dist.all_reduce(message)
    if message[0]:
        return list(range(int(message[0])))
    nn.utils.vector_to_parameters(message[1:], parameters)
    return []


def _skips_the_all_reduce(model: nn.Module, finite: bool) -> list[int]:
    return _average_or_report(model, finite) if finite else [dist.get_rank()]


average_or_report = Exercise(
    task=(
        "average_or_report(model, finite): set the weights to the mean over all ranks, with one dist.all_reduce. "
        "`finite` is false on a rank whose gradient was not finite in this round. If `finite` is false on any rank, "
        "leave the weights unchanged on all ranks. On every rank, return the list of the ranks with a false "
        "`finite`."
    ),
    test=_test_report,
    solution=_average_or_report,
    wrong={
        "averages although a gradient was not finite": _averages_anyway,
        "exchanges the flags in an additional all-reduce": _asks_first,
        "knows only its own flag": _knows_only_its_own,
        "counts the ranks instead of naming them": _counts_ranks,
        "leaves the other ranks waiting": _skips_the_all_reduce,
    },
    hints=(
        "An all-reduce sums any vector, which need not contain only weights.",
        "Reserve one element per rank. Start with zeros, and set this rank's element to one if its gradient is "
        "not finite.",
        "Concatenate this vector with all weights, divided by the number of ranks. Reduce the result, and split it.",
    ),
)

# --------------------------------------------------------------------------------- 3. DiLoCo with a delayed outer step

_RATE, _MOMENTUM = 0.7, 0.9
_DELAYS = [(3, 0), (3, 1), (4, 3)]  # steps per round, and delay in steps


class _Counting(torch.optim.SGD):
    """An SGD optimizer that counts its steps."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def _delayed_setup(rank: int, length: int, delay: int) -> tuple[nn.Linear, _Counting, list[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    draw = torch.Generator().manual_seed(rank)
    count = 3 * length + delay
    batches = [(torch.randn(4, 2, generator=draw), torch.randn(4, 1, generator=draw)) for _ in range(count)]
    return model, _Counting(model.parameters(), lr=0.1, momentum=0.9), batches


def _delayed_reference(length: int, delay: int) -> list[torch.Tensor]:
    """Simulate all ranks in one process, and return each rank's final weights."""
    ranks = [_delayed_setup(rank, length, delay) for rank in range(_RANKS)]

    def weights() -> torch.Tensor:
        vectors = [nn.utils.parameters_to_vector(model.parameters()).detach() for model, _, _ in ranks]
        return torch.stack(vectors)

    start = weights()[0]
    velocity, sent = torch.zeros_like(start), weights()
    for step in range(1, len(ranks[0][2]) + 1):
        for model, optimizer, batches in ranks:
            x, y = batches[step - 1]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if step % length == 0:
            sent = weights()
        if step > delay and (step - delay) % length == 0:
            difference = start - sent.mean(0)
            velocity = _MOMENTUM * velocity + difference
            start = start - _RATE * (difference + _MOMENTUM * velocity)
            for (model, _, _), since in zip(ranks, weights() - sent, strict=True):
                nn.utils.vector_to_parameters(start + since, model.parameters())
    return list(weights())


def _run_delayed(world: World, answer: Answer) -> None:
    for length, delay in _DELAYS:
        model, optimizer, batches = _delayed_setup(world.rank, length, delay)
        with _recorded(lambda: optimizer.steps) as calls:  # noqa: B023
            answer(model, optimizer, batches, length, delay, _RATE, _MOMENTUM)
        case = f"With rounds of {length} steps and a delay of {delay}, on rank {world.rank},"
        expect(
            optimizer.steps == len(batches),
            f"{case} the optimizer must take {len(batches)} steps, got {optimizer.steps}.",
        )
        started = sorted({call["started"] for call in calls})
        ends = [length, 2 * length, 3 * length]
        expect(started == ends, f"{case} all-reduces must start after steps {ends}, got {started}.")
        for call in calls:
            begin, end = call["started"], call.get("waited")
            expect(
                end == begin + delay,
                f"{case} wait() must be called after step {begin + delay} for the all-reduce that starts after step "
                f"{begin}, got {end if end is not None else 'no call'}.",
            )
        right = _delayed_reference(length, delay)[world.rank]
        got = nn.utils.parameters_to_vector(model.parameters()).detach()
        expect(
            torch.allclose(got, right, atol=1e-5),
            f"{case} the final weights must be {numbers(right, 4)}, got {numbers(got, 4)}.",
        )


def _test_delayed(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must start the same all-reduces."
    on_ranks(_run_delayed, _RANKS, answer, stuck=stuck, timeout=30)
    return "The all-reduces overlap with the next steps, and a delay of 0 is equivalent to DiLoCo."


def _delayed_diloco(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    length: int,
    delay: int,
    learning_rate: float,
    momentum: float,
) -> None:
    def weights() -> torch.Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    start = weights()
    velocity, sent, mean, work = torch.zeros_like(start), start, start, None
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step % length == 0:
            sent = weights()
            mean = sent / dist.get_world_size()
            work = dist.all_reduce(mean, async_op=True)
        if work is not None and (step - delay) % length == 0:
            work.wait()
            difference = start - mean
            velocity = momentum * velocity + difference
            start = start - learning_rate * (difference + momentum * velocity)
            nn.utils.vector_to_parameters(start + weights() - sent, model.parameters())
            work = None


def _variant(
    *, waits: bool = False, drops: bool = False, late: bool = False, mean: bool = False, plain: bool = False
) -> Answer:
    """Return an answer with one mistake."""

    def answer(
        model: nn.Module, optimizer: Any, batches: Any, length: int, delay: int, learning_rate: float, momentum: float
    ) -> None:
        def weights() -> torch.Tensor:
            return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

        start = weights()
        velocity, sent, total, work = torch.zeros_like(start), start, start, None
        for step, (x, y) in enumerate(batches, 1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step % length == 0:
                sent = weights()
                total = sent.clone() if mean else sent / dist.get_world_size()
                work = dist.all_reduce(total, async_op=True)
                if waits and work is not None:
                    work.wait()
            if work is not None and (step - delay) % length == 0:
                work.wait()
                difference = (weights() if late else start) - total
                velocity = momentum * velocity + difference
                direction = velocity if plain else difference + momentum * velocity
                start = start - learning_rate * direction
                nn.utils.vector_to_parameters(start if drops else start + weights() - sent, model.parameters())
                work = None

    return answer


delayed_diloco = Exercise(
    task=(
        "delayed_diloco(model, optimizer, batches, length, delay, learning_rate, momentum): implement DiLoCo so "
        "that each round's all-reduce overlaps with the first `delay` steps of the next round."
    ),
    test=_test_delayed,
    solution=_delayed_diloco,
    wrong={
        "waits for the all-reduce at once": _variant(waits=True),
        "drops the steps taken during the all-reduce": _variant(drops=True),
        "measures the round from the current weights": _variant(late=True),
        "sums the weights instead of averaging them": _variant(mean=True),
        "uses plain momentum": _variant(plain=True),
    },
    hints=(
        "dist.all_reduce(tensor, async_op=True) returns a handle. The tensor must not change before handle.wait().",
        "Keep three vectors: the weights at the start of the round, the weights at its end, which are averaged, "
        "and the velocity.",
        "After the outer step, the model's weights are the new start plus (current weights - weights at the end of the "
        "round).",
    ),
)
