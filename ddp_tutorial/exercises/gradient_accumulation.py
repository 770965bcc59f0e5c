"""The exercises of 08_gradient_accumulation: weight a rank's loss, communicate once a step, end an epoch."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import total
from ddp_tutorial.ddp.variants import DDPConfig, LinkConfig, data_parallel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------- 1. what a rank's loss is

_TOKENS = ([3, 3, 3], [5, 1, 3], [7, 2, 0])  # on each of 3 ranks: equal, unequal, and none on one of them


def _values(rank: int, tokens: int) -> torch.Tensor:
    """The derivative of each token's loss with respect to the model's only weight."""
    return torch.arange(1.0, tokens + 1) * (1 + rank)


def _run_rank_loss(world: World, answer: Answer) -> list[tuple[str, float]]:
    """For each case what is wrong with the returned loss ("" if nothing), and its gradient averaged over the ranks."""
    found = []
    for counts in _TOKENS:
        weight = nn.Parameter(torch.tensor(2.0))
        loss = answer(world, (_values(world.rank, counts[world.rank]) * weight).sum(), counts[world.rank])
        problem = ""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            problem = f"{type(loss).__name__} {loss!r}"
        elif not loss.requires_grad:
            problem = "a number that does not depend on the weights any more"
        else:
            loss.sum().backward()
        gradient = torch.zeros(()) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        found.append((problem, float(gradient / world.size)))
    return found


def _test_rank_loss(answer: Answer) -> str:
    stuck = "Some rank waits for ever. Every rank must enter the same collectives, a rank without tokens, too."
    ranks = on_ranks(_run_rank_loss, 3, answer, stuck=stuck, timeout=60)
    for number, counts in enumerate(_TOKENS):
        values = torch.cat([_values(rank, count) for rank, count in enumerate(counts)])
        right = float(values.mean())
        for rank, found in enumerate(ranks):
            problem, got = found[number]
            expect(
                not problem, f"Return the loss to call backward on, a tensor of one number; rank {rank} has {problem}."
            )
            means = [float(_values(rank, count).mean()) for rank, count in enumerate(counts)]
            known = {
                float(values.sum()): "the sum over all tokens, not their mean",
                float(values.mean()) / 3: "a third of it: DDP divides by the 3 ranks once more",
                sum(means) / 3: "the mean of the ranks' means, where a token on a rank with few counts for more",
            }
            why = next((words for value, words in known.items() if abs(value - got) < 1e-4), "something else")
            if math.isnan(got):
                why = "not a number: the mean of a rank without tokens is 0 / 0"
            expect(
                abs(right - got) < 1e-4,
                f"With {counts} tokens on the ranks, the gradient of the mean over all tokens is {right:.4f}; after "
                f"the average over ranks yours is {got:.4f}: {why}.",
            )
    return "After the average over ranks, the gradient is that of the mean over all tokens, on ragged ranks, too."


def _rank_loss(world: World, loss_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    everywhere = total(world, torch.tensor(float(tokens)))
    return loss_sum * world.size / everywhere


def _own_mean(world: World, loss_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    return loss_sum / tokens


def _careful_own_mean(world: World, loss_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    return loss_sum / max(1, tokens)


def _forgets_the_average(world: World, loss_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    return loss_sum / total(world, torch.tensor(float(tokens)))


def _sum(world: World, loss_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    return loss_sum * world.size


def _total_of_losses(world: World, loss_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    return total(world, loss_sum) / total(world, torch.tensor(float(tokens)))


rank_loss = Exercise(
    task=(
        "rank_loss(world, loss_sum, tokens): the loss to call backward on, such that DDP's average over the ranks is "
        "the gradient of the mean over all tokens of all ranks."
    ),
    test=_test_rank_loss,
    solution=_rank_loss,
    wrong={
        "the rank's own mean": _own_mean,
        "the rank's own mean, without 0 / 0": _careful_own_mean,
        "forgets that DDP averages": _forgets_the_average,
        "the sum": _sum,
        "adds up the losses, which cuts them off from the weights": _total_of_losses,
    },
    hints=(
        "Which number should every token be divided by, whichever rank it is on? It takes one total() to know.",
        "total(world, torch.tensor(float(tokens))) is the tokens of all ranks. Leave loss_sum itself to backward.",
        "DDP averages: it divides by world.size where you wanted a sum. Multiply by world.size first.",
    ),
)

# ------------------------------------------------------------------------------------------------- 2. talk once

_KS = (1, 2, 4)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def _loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().sum()
    return loss


def _run_talk_once(world: World, answer: Answer) -> list[tuple[int, int, float, bool]]:
    """For each K: the number of all-reduces and of calls of loss_of, the gradient's largest relative error, and
    whether a backward after that synchronises again."""
    found = []
    for k in _KS:
        torch.manual_seed(0)
        link = LinkConfig(latency_ms=0, megabytes_per_second=1e6)
        model = data_parallel(nn.Linear(3, 2), world, DDPConfig(variant="torch", simulated_link=link))
        calls: list[Any] = []
        batches = [torch.full((2, 3), 1.0 + world.rank + 2 * number) for number in range(k)]

        def loss_of(model: Any, batch: torch.Tensor, calls: list[Any] = calls) -> torch.Tensor:
            calls.append(batch)
            return _loss_of(model, batch)

        sent: list[Any] = []
        assert model.link is not None
        model.link.observer = sent.append
        answer(model, batches, loss_of)
        gradients = [weight.grad for weight in model.module.parameters()]
        sent_by_answer = len(sent)
        true = nn.Linear(3, 2)
        true.load_state_dict(model.module.state_dict())
        for rank in range(world.size):
            for number in range(k):
                (_loss_of(true, torch.full((2, 3), 1.0 + rank + 2 * number)) / world.size).backward()
        off = max(
            float("inf") if gradient is None else float((gradient - weight.grad).abs().max() / weight.grad.abs().max())
            for gradient, weight in zip(gradients, true.parameters(), strict=True)
            if weight.grad is not None
        )
        model.module.zero_grad()
        _loss_of(model, batches[0]).backward()
        found.append((sent_by_answer, len(calls), off, len(sent) > sent_by_answer))
    return found


def _test_talk_once(answer: Answer) -> str:
    stuck = "Some rank waits for ever: the ranks did not start equally many all-reduces."
    for found in on_ranks(_run_talk_once, 2, answer, stuck=stuck, timeout=60):
        for k, (sent, calls, off, goes_on) in zip(_KS, found, strict=True):
            expect(calls == k, f"With {k} micro-batches, loss_of was called {calls} times.")
            expect(
                sent > 0,
                f"With {k} micro-batches, there was no all-reduce: each rank has its own gradient. The last one must "
                "not be inside no_sync().",
            )
            expect(
                sent == 1,
                f"With {k} micro-batches, there were {sent} all-reduces. torch's DDP decides in forward whether the "
                "next backward synchronises, so forward and backward of all but the last belong inside no_sync().",
            )
            expect(
                off < 1e-5,
                f"With {k} micro-batches, there was one all-reduce, but the gradient is off by {off:.0%}. What comes "
                "after the all-reduce is not in it: the last micro-batch should be the one that synchronises.",
            )
            expect(goes_on, "After your step, the model does not synchronise any more. Leave no_sync() again.")
    return "One all-reduce a step whatever K is, and the gradient is that of all micro-batches."


def _talk_once(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    with model.no_sync():
        for batch in batches[:-1]:
            loss_of(model, batch).backward()
    loss_of(model, batches[-1]).backward()


def _always(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    for batch in batches:
        loss_of(model, batch).backward()


def _backward_only(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    for batch in batches[:-1]:
        loss = loss_of(model, batch)
        with model.no_sync():
            loss.backward()
    loss_of(model, batches[-1]).backward()


def _never(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    with model.no_sync():
        for batch in batches:
            loss_of(model, batch).backward()


def _first(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    loss_of(model, batches[0]).backward()
    with model.no_sync():
        for batch in batches[1:]:
            loss_of(model, batch).backward()


def _forgets_the_others(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    loss_of(model, batches[-1]).backward()


def _switches_off_for_good(model: Any, batches: Sequence[torch.Tensor], loss_of: Loss) -> None:
    _talk_once(model, batches, loss_of)
    model.ddp.require_backward_grad_sync = False  # what no_sync() sets, and resets


talk_once = Exercise(
    task="talk_once(model, batches, loss_of): forward and backward of all micro-batches, with one all-reduce in all.",
    test=_test_talk_once,
    solution=_talk_once,
    wrong={
        "no no_sync": _always,
        "forward outside of no_sync": _backward_only,
        "the last one inside, too": _never,
        "synchronises in the first one": _first,
        "leaves out all but the last": _forgets_the_others,
        "switches synchronising off by hand, and not on again": _switches_off_for_good,
    },
    hints=(
        "`with model.no_sync():` leaves out the all-reduce. For which micro-batches should it?",
        "All but the last, batches[:-1]; and loss_of, which is the forward, belongs inside as well.",
    ),
)

# -------------------------------------------------------------------------------------------- 3. where an epoch ends

_LENGTHS = ((0, 2), (1, 1), (4, 2), (5, 2), (10, 4), (3, 4), (7, 1), (2, 16))


def _test_steps(answer: Answer) -> str:
    for count, k in _LENGTHS:
        items = [(f"batch {number}", 3 + 2 * number) for number in range(count)]
        try:
            got = [(list(batches), float(divisor)) for batches, divisor in answer(iter(items), k)]
        except (TypeError, ValueError) as error:
            raise WrongAnswerError(f"Yield pairs, (a list of micro-batches, the divisor). {error}") from None
        windows = [items[start : start + k] for start in range(0, count, k)]
        right = [([name for name, _ in window], float(sum(n for _, n in window))) for window in windows]
        case = f"A loader of {count} micro-batches, K = {k}"
        expect(all(batches for batches, _ in got), f"{case}: you have a step without a micro-batch.")
        used = [name for batches, _ in got for name in batches]
        missing = [name for name, _ in items if name not in used]
        expect(not missing, f"{case}: {', '.join(missing)} is in no step. What is left at the end is a step, too.")
        sizes = [len(batches) for batches, _ in got]
        expect(
            [batches for batches, _ in got] == [batches for batches, _ in right],
            f"{case}: the steps have {sizes} micro-batches, and should have {[len(window) for window in windows]}, in "
            "the loader's order.",
        )
        for (batches, divisor), (_, tokens) in zip(got, right, strict=True):
            expect(
                divisor == tokens,
                f"{case}: the step of {', '.join(batches)} has {tokens:g} tokens, and you divide by {divisor:g}.",
            )
    return "Every micro-batch is in one step, and each step is divided by its own tokens."


Items = Iterator[tuple[Any, int]]
Steps = Iterator[tuple[list[Any], int]]


def _steps_of(items: Items, k: int) -> Steps:
    batches: list[Any] = []
    tokens = 0
    for batch, count in items:
        batches.append(batch)
        tokens += count
        if len(batches) == k:
            yield batches, tokens
            batches, tokens = [], 0
    if batches:
        yield batches, tokens


def _leaves_the_rest(items: Items, k: int) -> Steps:
    yield from (step for step in _steps_of(items, k) if len(step[0]) == k)


def _steps_at_zero(items: Items, k: int) -> Steps:
    batches: list[Any] = []
    tokens = 0
    for index, (batch, count) in enumerate(items):
        batches.append(batch)
        tokens += count
        if index % k == 0:
            yield batches, tokens
            batches, tokens = [], 0
    if batches:
        yield batches, tokens


def _divides_by_k(items: Items, k: int) -> Steps:
    for batches, _ in _steps_of(items, k):
        yield batches, k


def _an_empty_step(items: Items, k: int) -> Steps:
    size = k
    for batches, tokens in _steps_of(items, k):
        yield batches, tokens
        size = len(batches)
    if size == k:
        yield [], 0


def _divisor_grows(items: Items, k: int) -> Steps:
    tokens = 0
    for batches, count in _steps_of(items, k):
        tokens += count
        yield batches, tokens


steps_of = Exercise(
    task=(
        "steps_of(items, k): from pairs (micro-batch, tokens), yield for each optimiser step the list of its k "
        "micro-batches and the tokens in it; the last step may have fewer."
    ),
    test=_test_steps,
    solution=_steps_of,
    wrong={
        "leaves the rest for the next epoch": _leaves_the_rest,
        "steps at index 0": _steps_at_zero,
        "divides by k": _divides_by_k,
        "an empty step, where k divides": _an_empty_step,
        "the divisor is never reset": _divisor_grows,
    },
    hints=(
        "Collect into a list, and count its tokens. When it has k, yield both, and reset both.",
        "After the loop the list may hold something: yield that too, but not if it is empty.",
    ),
)
