"""Exercises of 08_gradient_accumulation: one all-reduce per step, the end of an epoch, and bitwise identical sums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------- 1. one all-reduce per step

_KS = (1, 2, 4)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def _loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().sum()
    return loss


def _run_talk_once(world: World, answer: Answer) -> list[tuple[int, int, float, bool]]:
    """Return four measurements for each K.

    These are the number of all-reduces, the number of calls of `loss_of`, the gradient's largest relative error, and
    whether a later backward pass synchronizes again.
    """
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
    stuck = "A rank waits forever: all ranks must start the same number of all-reduces."
    for found in on_ranks(_run_talk_once, 2, answer, stuck=stuck, timeout=60):
        for k, (sent, calls, off, still_syncs) in zip(_KS, found, strict=True):
            expect(calls == k, f"With {k} micro-batches, loss_of must be called {k} times, got {calls}.")
            expect(
                sent > 0,
                f"With {k} micro-batches, there was no all-reduce, so each rank has its own gradient. The last "
                "micro-batch must not be inside no_sync().",
            )
            expect(
                sent == 1,
                f"With {k} micro-batches, there must be 1 all-reduce, got {sent}. DDP decides in the forward pass "
                "whether the next backward pass synchronizes, so run both inside no_sync() for all but the last one.",
            )
            expect(
                off < 1e-5,
                f"With {k} micro-batches, there was one all-reduce, but the gradient is off by {off:.0%}. The "
                "all-reduce misses later gradients: synchronize in the last micro-batch.",
            )
            expect(still_syncs, "After your step, the model no longer synchronizes. Leave no_sync() again.")
    return "There is one all-reduce per step for every K, and the gradient is that of all micro-batches."


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
    model.ddp.require_backward_grad_sync = False  # no_sync() sets and resets this


talk_once = Exercise(
    task="talk_once(model, batches, loss_of): run forward and backward of all micro-batches with a single all-reduce.",
    test=_test_talk_once,
    solution=_talk_once,
    wrong={
        "does not use no_sync": _always,
        "runs the forward pass outside no_sync": _backward_only,
        "runs the last micro-batch inside no_sync, too": _never,
        "synchronizes in the first micro-batch": _first,
        "skips all micro-batches but the last": _forgets_the_others,
        "disables synchronization by hand, and never enables it again": _switches_off_for_good,
    },
    hints=(
        "`with model.no_sync():` skips the all-reduce. For which micro-batches should it be skipped?",
        "Use no_sync() for all micro-batches but the last, batches[:-1]. Call loss_of (the forward pass) inside, too.",
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
            raise WrongAnswerError(f"Yield pairs (list of micro-batches, divisor). {error}") from None
        windows = [items[start : start + k] for start in range(0, count, k)]
        right = [([name for name, _ in window], float(sum(n for _, n in window))) for window in windows]
        case = f"A loader of {count} micro-batches, K = {k}"
        expect(all(batches for batches, _ in got), f"{case}: a step contains no micro-batch.")
        used = [name for batches, _ in got for name in batches]
        missing = [name for name, _ in items if name not in used]
        expect(not missing, f"{case}: {', '.join(missing)} is in no step. The remainder is a step, too.")
        sizes = [len(batches) for batches, _ in got]
        expect(
            [batches for batches, _ in got] == [batches for batches, _ in right],
            f"{case}: the steps must have {[len(window) for window in windows]} micro-batches in the loader's order, "
            f"got {sizes}.",
        )
        for (batches, divisor), (_, tokens) in zip(got, right, strict=True):
            expect(
                divisor == tokens,
                f"{case}: the divisor of the step with {', '.join(batches)} must be its {tokens:g} tokens, got "
                f"{divisor:g}.",
            )
    return "Every micro-batch is in one step, and each step is divided by its own number of tokens."


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
        "steps_of(items, k): from pairs (micro-batch, tokens), yield for each optimizer step the list of its k "
        "micro-batches and their number of tokens; the last step may have fewer micro-batches."
    ),
    test=_test_steps,
    solution=_steps_of,
    wrong={
        "drops the remainder": _leaves_the_rest,
        "steps at index 0": _steps_at_zero,
        "divides by k": _divides_by_k,
        "yields an empty step if k divides the count": _an_empty_step,
        "never resets the divisor": _divisor_grows,
    },
    hints=(
        "Collect micro-batches in a list, and count their tokens. At k micro-batches, yield both and reset both.",
        "After the loop, the list may contain a remainder: yield it too, but not if it is empty.",
    ),
)

# -------------------------------------------------------------------------------------------- 3. bitwise identical sums

Parts = Sequence[torch.Tensor]


def _test_add_up(answer: Answer) -> str:
    for count in (1, 2, 4, 8):
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            parts = [torch.randn(1000, generator=generator) * 10.0 ** (number % 3) for number in range(count)]
            given = [part.clone() for part in parts]
            at_once = answer(list(given))
            expect(isinstance(at_once, torch.Tensor), f"The sum must be a tensor, got {type(at_once).__name__}.")
            changed = any(not torch.equal(a, b) for a, b in zip(parts, given, strict=True))
            expect(not changed, "Your function changed its arguments. Sum into new tensors.")
            expect(at_once.dtype == torch.float32, f"The sum must be float32, like the parts, got {at_once.dtype}.")
            exact = torch.stack(parts).double().sum(0)
            scale = torch.stack(parts).double().abs().sum(0)
            off = float(((at_once - exact).abs() / scale).max())
            expect(off < 1e-5, f"The sum of {count} parts has a relative error of up to {off:.2g}.")
            for size in (size for size in (2, 4, 8) if size <= count):
                of_ranks = [answer(given[rank::size]) for rank in range(size)]
                differ = int((answer(of_ranks) != at_once).sum())
                expect(
                    not differ,
                    f"{count} parts on {size} ranks: {differ} of 1000 numbers are not bitwise identical to the sum on "
                    f"one rank. Rank 0 sums parts {list(range(count))[::size]}: does one rank sum these first, too?",
                )
    return "The sums on 1, 2, 4 and 8 ranks are bitwise identical."


def _add_up(parts: "Parts") -> torch.Tensor:
    parts = list(parts)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[place] + parts[place + half] for place in range(half)]
    return parts[0]


def _from_the_left(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).new_tensor(0.0) + sum(parts)


def _neighbors(parts: Parts) -> torch.Tensor:
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
        "add_up(parts): return the sum of 1, 2, 4 or 8 tensors. Choose an order for which summing parts[rank::W] on "
        "each of W ranks, and then those W sums, gives a bitwise identical result."
    ),
    test=_test_add_up,
    solution=_add_up,
    wrong={
        "sums from left to right": _from_the_left,
        "sums neighbors first": _neighbors,
        "sums in double precision, and rounds at the end": _rounded_double,
        "returns a double precision sum": _double,
        "sums the smallest values first": _smallest_first,
        "sums in place, into its arguments": _in_place,
        "returns the mean": _mean,
    },
    hints=(
        "Does one of two ranks have neighboring parts, or every second part? Sum those parts first.",
        "With 4 parts, compute 0 + 2 and 1 + 3 first, then add the two sums. With 2 ranks, only the last addition "
        "crosses ranks.",
        "Add the second half of the list to the first half element by element, and repeat until one tensor is left.",
    ),
)
