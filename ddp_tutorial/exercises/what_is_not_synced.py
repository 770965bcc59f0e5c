"""Exercises of 09_what_is_not_synced: normalize over all ranks, step on all ranks or on none, and use ragged data."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import all_gather, any_rank, from_rank_zero
from ddp_tutorial.exercises import Answer, Exercise, expect, numbers, on_ranks
from ddp_tutorial.world import World

_STUCK = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."

# --------------------------------------------------------------------------------------------------- 1. sync-BN, ragged

Total = Callable[[torch.Tensor], torch.Tensor]


class _Total(torch.autograd.Function):
    """Sum over ranks. The backward pass sums the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.detach().clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _Total.forward(ctx, gradients[0].contiguous())


_PARTS = {"Three ranks with 3 samples each": [3, 3, 3], "Three ranks with 2, 0 and 7 samples": [2, 0, 7]}


def _union() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of shape [9, 2], and the weight of each output in the loss."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, 9, 2, generator=generator, dtype=torch.float64)
    return x + torch.arange(9.0, dtype=torch.float64)[:, None], weights


def _outputs_and_gradients(world: World, answer: Answer) -> list[Any]:
    return [_one_split(world, answer, parts) for parts in _PARTS.values()]


def _one_split(world: World, answer: Answer, parts: list[int]) -> tuple[str, Any, Any]:
    """Return (problem, outputs, gradients) of this rank. `_check_split` checks all ranks together."""
    x, weights = (each.split(parts)[world.rank] for each in _union())
    x = x.clone().requires_grad_()
    out = answer(x, _Total.apply)
    if not isinstance(out, torch.Tensor) or out.shape != x.shape:
        found = f"shape {list(out.shape)}" if isinstance(out, torch.Tensor) else repr(out)
        return f"The result must have shape {list(x.shape)}, got {found} on rank {world.rank}.", None, None
    if not out.requires_grad:
        return "The outputs must require grad: do not detach anything from `x`.", None, None
    (out * weights).sum().backward()
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    return "", out.detach(), gradient


def _check_split(ranks: list[Any], where: str, parts: list[int]) -> None:
    problems = [problem for problem, _, _ in ranks if problem]
    expect(not problems, "".join(problems[:1]))
    outs, gradients = (torch.cat([rank[k] for rank in ranks]) for k in (1, 2))
    x, weights = _union()
    x.requires_grad_()
    right = nn.BatchNorm1d(2, affine=False).double()(x)
    (right * weights).sum().backward()
    if not torch.allclose(outs, right):
        own = torch.cat([_apart(part) for part in x.detach().split(parts)])
        reason = ""
        if torch.isnan(outs).any():
            reason = " A rank without samples has no mean, but its sums are zero."
        elif torch.allclose(outs, own):
            reason = " Each rank normalized over its own samples only."
        expect(
            False,
            f"{where}: the outputs must equal those of BatchNorm on all 9 samples. The first sample must become "
            f"{numbers(right[0], 4)}, got {numbers(outs[0], 4)}.{reason}",
        )
    assert x.grad is not None
    expect(
        torch.allclose(gradients, x.grad),
        f"{where}: the outputs are right, but the gradients of `x` are not. The gradient of the first sample must be "
        f"{numbers(x.grad[0], 4)}, got {numbers(gradients[0], 4)}. Mean and variance depend on `x` of all ranks: "
        "compute both with `total`, so that autograd records them.",
    )


def _apart(x: torch.Tensor) -> torch.Tensor:
    return nn.BatchNorm1d(2, affine=False).double()(x) if len(x) > 1 else torch.zeros_like(x)


def _test_normalise(answer: Answer) -> str:
    ranks = on_ranks(_outputs_and_gradients, 3, answer, stuck=_STUCK, timeout=20)
    for number, (where, parts) in enumerate(_PARTS.items()):
        _check_split([rank[number] for rank in ranks], where, parts)
    return "Outputs and gradients equal BatchNorm's on all samples, even if a rank has few samples or none."


def _sync_normalise(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    count = total(x.new_tensor(float(len(x))))
    center = total(x.sum(0)) / count
    variance = total((x - center).square().sum(0)) / count
    return (x - center) / (variance + eps).sqrt()


def _of_its_own(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    return _sync_normalise(x, lambda tensor: tensor, eps)


def _mean_of_means(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    ranks = total(x.new_tensor(1.0))
    center = total(x.mean(0)) / ranks
    variance = total((x - center).square().mean(0)) / ranks
    return (x - center) / (variance + eps).sqrt()


def _mean_of_variances(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    count = total(x.new_tensor(float(len(x))))
    center = total(x.sum(0)) / count
    own = x.sum(0) / max(1, len(x))
    variance = total((x - own).square().sum(0)) / count
    return (x - center) / (variance + eps).sqrt()


def _unknown_to_autograd(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    with torch.no_grad():
        count = total(x.new_tensor(float(len(x))))
        center = total(x.sum(0)) / count
        variance = total((x - center).square().sum(0)) / count
    return (x - center) / (variance + eps).sqrt()


def _own_share_of_gradients(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    return _sync_normalise(x, lambda tensor: tensor + (total(tensor.detach()) - tensor).detach(), eps)


def _bessel(x: torch.Tensor, total: Total, eps: float = 1e-5) -> torch.Tensor:
    count = total(x.new_tensor(float(len(x))))
    center = total(x.sum(0)) / count
    variance = total((x - center).square().sum(0)) / (count - 1)
    return (x - center) / (variance + eps).sqrt()


sync_normalise = Exercise(
    task=(
        "sync_normalise(x, total, eps): return x [samples, channels] normalized over the samples of all ranks. "
        "total(tensor) returns the sum over ranks, and is differentiable. Ranks may have different numbers of samples, "
        "or none."
    ),
    test=_test_normalise,
    solution=_sync_normalise,
    wrong={
        "normalizes over the rank's own samples": _of_its_own,
        "takes the mean of the ranks' means": _mean_of_means,
        "takes the mean of the ranks' variances": _mean_of_variances,
        "hides the statistics from autograd": _unknown_to_autograd,
        "ignores the other ranks in the backward pass": _own_share_of_gradients,
        "divides by the number of samples minus one": _bessel,
    },
    hints=(
        "A mean of means is right only if all ranks have the same number of samples. What can you sum over ranks?",
        "Sum sums and counts: total(x.sum(0)), and total of len(x) as a tensor. A rank without samples adds zeros.",
        "The variance needs a second `total`, of the squared differences from the mean over *all* ranks.",
    ),
)

# ------------------------------------------------------------------------------------------------- 2. agree on overflow

_CASES = {
    "all gradients are finite": {},
    "rank 0 has an infinity": {0: math.inf},
    "rank 1 has an infinity": {1: math.inf},
    "rank 1 has a NaN": {1: math.nan},
    "both ranks overflow": {0: math.inf, 1: -math.inf},
}
_SCALE = 8.0


def _one_case(world: World, answer: Answer, bad: dict[int, float]) -> dict[str, Any]:
    """Run the answer on weights of 1 with gradients 1 and 2, times the scale. `bad` replaces gradients by rank."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.25)
    for number, weight in enumerate(weights, start=1):
        weight.grad = torch.full((2,), number * _SCALE)
    if world.rank in bad and weights[1].grad is not None:
        weights[1].grad[0] = bad[world.rank]
    scale = answer(world, optimizer, weights, _SCALE)
    return {
        "scale": scale,
        "weights": torch.stack([weight.detach() for weight in weights]),
        "left": any(weight.grad is not None and bool(weight.grad.any()) for weight in weights),
    }


def _overflow_cases(world: World, answer: Answer) -> list[dict[str, Any]]:
    found = []
    for bad in _CASES.values():
        found.append(_one_case(world, answer, bad))
        all_gather(world, "here")  # a rank that skipped a collective waits here, and the check times out
    return found


def _test_step(answer: Answer) -> str:
    ranks = on_ranks(_overflow_cases, 2, answer, stuck=_STUCK, timeout=12)
    for number, (story, bad) in enumerate(_CASES.items()):
        found = [rank[number] for rank in ranks]
        want = torch.ones(2, 2) if bad else torch.tensor([[0.75, 0.75], [0.5, 0.5]])
        did = ["skipped it" if bool((each["weights"] == 1).all()) else "stepped" for each in found]
        actions = ", ".join(f"rank {rank} {each}" for rank, each in enumerate(did))
        expected = "skip the step" if bad else "take the step"
        expect(
            len(set(did)) == 1 and (did[0] == "skipped it") == bool(bad),
            f"If {story}, all ranks must {expected}, but {actions}.",
        )
        for rank, each in enumerate(found):
            expect(
                torch.allclose(each["weights"], want),
                f"If {story}, the weights of rank {rank} must become {numbers(want)}, got {numbers(each['weights'])}. "
                "The gradients are `scale` times too large.",
            )
        scales = [each["scale"] for each in found]
        next_scale = _SCALE / 2 if bad else _SCALE
        expect(
            scales == [next_scale] * 2,
            f"If {story}, all ranks must return the scale {next_scale:g} (it was {_SCALE:g}), got {scales}.",
        )
        expect(
            not any(each["left"] for each in found),
            f"If {story}, gradients are not cleared, and would be added to those of the next step.",
        )
    return "Either all ranks step or none, whichever rank has an infinity or a NaN, and all return the same scale."


def _step_together(
    world: World, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], scale: float
) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    overflow = torch.tensor(0.0 if all(bool(gradient.isfinite().all()) for gradient in gradients) else 1.0)
    dist.all_reduce(overflow, dist.ReduceOp.MAX)  # 1 on all ranks if it is 1 on any
    if not overflow:
        for gradient in gradients:
            gradient.div_(scale)
        optimizer.step()
    optimizer.zero_grad()  # after a skipped step, too
    return scale / 2 if overflow else scale


def _overflowed(parameters: Sequence[nn.Parameter]) -> bool:
    return not all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)


def _deciding(
    decide: Callable[[World, Sequence[nn.Parameter]], bool],
    *,
    unscaled: bool = True,
    zeroed: bool = True,
    own_scale: bool = False,
) -> Answer:
    """Return the solution with a different decision, or with a part left out."""

    def answer(
        world: World, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], scale: float
    ) -> float:
        own = _overflowed(parameters)
        overflow = decide(world, parameters)
        if not overflow:
            for parameter in parameters:
                if unscaled and parameter.grad is not None:
                    parameter.grad /= scale
            optimizer.step()
        if zeroed or not overflow:
            optimizer.zero_grad()
        return scale / 2 if (own if own_scale else overflow) else scale

    return answer


def _agreed(world: World, parameters: Sequence[nn.Parameter]) -> bool:
    return any_rank(world, _overflowed(parameters))


def _only_nan(world: World, parameters: Sequence[nn.Parameter]) -> bool:
    return any_rank(world, any(bool(p.grad.isnan().any()) for p in parameters if p.grad is not None))


def _asks_if_it_overflowed(world: World, parameters: Sequence[nn.Parameter]) -> bool:
    return _overflowed(parameters) and any_rank(world, True)


step_together = Exercise(
    task=(
        "step_together(world, optimizer, parameters, scale): each rank has a part of the gradients, times `scale`. "
        "Step on all ranks or on none, return the next scale (half after an overflow), and clear all gradients."
    ),
    test=_test_step,
    solution=_step_together,
    wrong={
        "lets each rank decide for itself": _deciding(lambda world, parameters: _overflowed(parameters)),
        "lets rank 0 decide for all": _deciding(
            lambda world, parameters: from_rank_zero(world, _overflowed(parameters))
        ),
        "skips only if all ranks overflow": _deciding(
            lambda world, parameters: all(all_gather(world, _overflowed(parameters)))
        ),
        "asks the others only if it has overflowed": _deciding(_asks_if_it_overflowed),
        "looks for NaN and forgets infinity": _deciding(_only_nan),
        "agrees on the step but not on the scale": _deciding(_agreed, own_scale=True),
        "forgets to divide by the scale": _deciding(_agreed, unscaled=False),
        "keeps the gradients of a skipped step": _deciding(_agreed, zeroed=False),
    },
    hints=(
        "Has this rank's part overflowed? Has any rank's part overflowed? Only the second answer decides.",
        "gradient.isfinite().all() answers the first question. For the second, every rank must enter any_rank(world, "
        "flag), or an all-reduce of 0 or 1 with dist.ReduceOp.MAX.",
        "Decide once, then step, update the scale and call zero_grad. Clear the gradients after an overflow, too.",
    ),
)

# --------------------------------------------------------------------------------------------------- 3. unequal batches

Work = Callable[[str | None], None]
AnyRank = Callable[[bool], bool]

_STREAMS = {
    "both ranks have 2 batches": [2, 2],
    "rank 0 has 3 batches and rank 1 has 1": [3, 1],
    "rank 0 has no batch and rank 1 has 2": [0, 2],
    "no rank has a batch": [0, 0],
}
_TOO_OFTEN = 10


def _one_story(world: World, answer: Answer, counts: list[int]) -> list[str | None]:
    """Return the batches this rank has processed. Raises `WrongAnswerError` on all ranks if their calls differ."""
    own = [f"batch {number} of rank {world.rank}" for number in range(counts[world.rank])]
    worked: list[str | None] = []
    taken, given = 0, f"{counts[0]} and {counts[1]}"

    def stream() -> Iterator[str]:
        nonlocal taken
        for batch in own:
            taken += 1
            yield batch

    def meet(what: str, flag: bool = False) -> bool:
        """Stand in for all collectives of the answer, so that ranks with different calls are detected."""
        gathered = all_gather(world, (what, flag))
        doing = ", while ".join(f"rank {rank} {each}" for rank, (each, _) in enumerate(gathered))
        on_a_cluster = "On a cluster, they would wait for each other forever."
        expect(len({each for each, _ in gathered}) == 1, f"With {given} batches, {doing}. {on_a_cluster}")
        return any(each for _, each in gathered)

    def work(batch: str | None) -> None:
        ahead = meet("calls work", taken > len(worked) + 2)
        expect(not ahead, "A rank reads batches ahead. A stream may be infinite: take one batch per step.")
        expect(len(worked) < _TOO_OFTEN, f"With {given} batches, you call work more than {_TOO_OFTEN} times.")
        worked.append(batch)

    answer(stream(), work, lambda flag: meet("calls any_rank", bool(flag)))
    meet("has returned")
    return worked


def _all_stories(world: World, answer: Answer) -> list[list[str | None]]:
    return [_one_story(world, answer, counts) for counts in _STREAMS.values()]


def _test_streams(answer: Answer) -> str:
    ranks = on_ranks(_all_stories, 2, answer, stuck=_STUCK, timeout=12)
    for number, (story, counts) in enumerate(_STREAMS.items()):
        for rank, found in enumerate(each[number] for each in ranks):
            want = [f"batch {k} of rank {rank}" if k < counts[rank] else None for k in range(max(counts))]
            expect(
                found == want,
                f"If {story}, rank {rank} must call work with {want or 'nothing'}, got {found or 'nothing'}.",
            )
    return "Every batch is used once, all ranks take the same number of steps, and no step is empty."


def _to_the_last_batch(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    while True:
        batch = next(batches, None)
        if not any_rank(batch is not None):
            return
        work(batch)


def _to_its_own_end(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    for batch in batches:
        work(batch)


def _to_the_first_end(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    while not any_rank((batch := next(batches, None)) is None):
        work(batch)


def _asks_at_its_end(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    for batch in batches:
        work(batch)
    while any_rank(False):
        work(None)


def _asks_too_late(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    more = True
    while more:
        batch = next(batches, None)
        work(batch)
        more = any_rank(batch is not None)


def _loses_what_it_asked_about(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    while any_rank(next(batches, None) is not None):
        work(next(batches, None))


def _repeats_the_last(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    last = None
    while any_rank((batch := next(batches, None)) is not None):
        last = batch or last
        work(last)


def _reads_ahead(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    waiting = list(batches)
    while any_rank(bool(waiting)):
        work(waiting.pop(0) if waiting else None)


to_the_last_batch = Exercise(
    task=(
        "to_the_last_batch(batches, work, any_rank): `batches` iterates over this rank's batches, whose number differs "
        "between ranks. Call work(batch) for each batch, and work(None) while only other ranks have batches. All ranks "
        "must make the same number of calls to work and any_rank(flag)."
    ),
    test=_test_streams,
    solution=_to_the_last_batch,
    wrong={
        "stops after its own batches": _to_its_own_end,
        "stops when the first rank has no batch left": _to_the_first_end,
        "calls any_rank only when it has no batch": _asks_at_its_end,
        "calls any_rank after the step": _asks_too_late,
        "takes a batch to check for one, and loses it": _loses_what_it_asked_about,
        "repeats its last batch": _repeats_the_last,
        "reads all its batches first": _reads_ahead,
    },
    hints=(
        "The number of batches is not known in advance, so the ranks must communicate before each step.",
        "next(batches, None) returns the next batch, or None at the end. any_rank(flag) is true if any rank has one.",
        "In each step, on every rank: take a batch, call any_rank, return if no rank has a batch, call work.",
    ),
)
