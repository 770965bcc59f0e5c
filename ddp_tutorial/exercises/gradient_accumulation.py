"""The exercises of 08_gradient_accumulation: communicate once a step, end an epoch, add up to the same bits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# --------------------------------------------------------------------------------------------------------- 1. talk once

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


def _talk_once(model: "Any", batches: "Sequence[torch.Tensor]", loss_of: "Loss") -> None:
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

# ----------------------------------------------------------------------------------------------- 2. where an epoch ends

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


def _steps_of(items: "Items", k: int) -> "Steps":
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

# ----------------------------------------------------------------------------------------------------- 3. the same bits

Parts = Sequence[torch.Tensor]


def _test_add_up(answer: Answer) -> str:
    for count in (1, 2, 4, 8):
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            parts = [torch.randn(1000, generator=generator) * 10.0 ** (number % 3) for number in range(count)]
            given = [part.clone() for part in parts]
            at_once = answer(list(given))
            expect(isinstance(at_once, torch.Tensor), f"Return a tensor, the sum; {type(at_once).__name__} came back.")
            changed = any(not torch.equal(a, b) for a, b in zip(parts, given, strict=True))
            expect(not changed, "The parts that you were given have changed. Add up into new tensors.")
            expect(at_once.dtype == torch.float32, f"The parts are float32; your sum is {at_once.dtype}.")
            exact = torch.stack(parts).double().sum(0)
            scale = torch.stack(parts).double().abs().sum(0)
            off = float(((at_once - exact).abs() / scale).max())
            expect(off < 1e-5, f"The sum of {count} parts is wrong by up to {off:.2g} of what is added up.")
            for size in (size for size in (2, 4, 8) if size <= count):
                of_ranks = [answer(given[rank::size]) for rank in range(size)]
                differ = int((answer(of_ranks) != at_once).sum())
                expect(
                    not differ,
                    f"{count} parts on {size} ranks: {differ} of 1000 numbers have other bits than from all parts at "
                    f"once. Rank 0 adds up parts {list(range(count))[::size]}: are these added up first in any case?",
                )
    return "1, 2, 4 or 8 ranks: every number has the same bits."


def _add_up(parts: "Parts") -> torch.Tensor:
    parts = list(parts)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[place] + parts[place + half] for place in range(half)]
    return parts[0]


def _from_the_left(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).new_tensor(0.0) + sum(parts)


def _neighbours(parts: Parts) -> torch.Tensor:
    parts = list(parts)
    while len(parts) > 1:
        parts = [parts[place] + parts[place + 1] for place in range(0, len(parts), 2)]
    return parts[0]


def _rounded_double(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).double().sum(0).float()


def _double(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).double().sum(0)


def _smallest_first(parts: Parts) -> torch.Tensor:
    ordered = torch.stack([*parts]).abs().argsort(0)
    return _from_the_left([*torch.stack([*parts]).gather(0, ordered)])


def _in_place(parts: Parts) -> torch.Tensor:
    half = len(parts) // 2
    for place in range(half):
        parts[place].add_(parts[place + half])
    return _in_place(parts[:half]) if half else parts[0]


def _mean(parts: Parts) -> torch.Tensor:
    return _add_up(parts) / len(parts)


add_up = Exercise(
    task=(
        "add_up(parts): return the sum of 1, 2, 4 or 8 tensors, in an order such that adding up parts[rank::W] for "
        "each of W ranks, and then those W sums, gives the same bits."
    ),
    test=_test_add_up,
    solution=_add_up,
    wrong={
        "from left to right": _from_the_left,
        "neighbours first": _neighbours,
        "in double precision, rounded at the end": _rounded_double,
        "in double precision, returned as such": _double,
        "the smallest first": _smallest_first,
        "in place, in what was given": _in_place,
        "the mean": _mean,
    },
    hints=(
        "Which parts does one of two ranks have: neighbours, or every second one? Those must be added up first.",
        "With 4 parts: 0 + 2 and 1 + 3 first, then the two sums. With 2 ranks, the last addition is between them.",
        "Add the second half of the list to the first half, place by place; and again, until one is left.",
    ),
)
