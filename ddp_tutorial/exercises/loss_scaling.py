"""Exercise on taking or skipping a step on all ranks together, for the `loss_scaling` deep dive."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import all_gather, any_rank, from_rank_zero
from ddp_tutorial.exercises import Answer, Exercise, expect, numbers, on_ranks
from ddp_tutorial.world import World

_STUCK = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."

_CASES = {
    "all gradients are finite": {},
    "rank 0 has an infinite gradient": {0: math.inf},
    "rank 1 has an infinite gradient": {1: math.inf},
    "rank 1 has a NaN gradient": {1: math.nan},
    "both ranks overflow": {0: math.inf, 1: -math.inf},
}
_SCALE = 8.0


def _one_case(world: World, answer: Answer, bad: dict[int, float]) -> dict[str, Any]:
    """Run the answer on two weights with unscaled gradients 1 and 2. `bad` maps a rank to a non-finite gradient."""
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
                f"If {story}, the weights of rank {rank} must become {numbers(want)}, got "
                f"{numbers(each['weights'])}. The gradients are multiplied by `scale`, so divide them by `scale` "
                "first.",
            )
        scales = [each["scale"] for each in found]
        next_scale = _SCALE / 2 if bad else _SCALE
        expect(
            scales == [next_scale] * 2,
            f"If {story}, all ranks must return the scale {next_scale:g} (the previous scale is {_SCALE:g}), got "
            f"{scales}.",
        )
        expect(
            not any(each["left"] for each in found),
            f"If {story}, the gradients are not cleared, and would be added to the next step's gradients.",
        )
    return (
        "Either all ranks step or none does, whichever rank has a non-finite gradient, and all return the same scale."
    )


def _step_together(
    world: World, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], scale: float
) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    overflow = torch.tensor(0.0 if all(bool(gradient.isfinite().all()) for gradient in gradients) else 1.0)
    dist.all_reduce(overflow, dist.ReduceOp.MAX)  # 1 on all ranks if it is 1 on any rank
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
    """Return a variant of the solution that skips a step if `decide` returns True. The options select mistakes."""

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
        "step_together(world, optimizer, parameters, scale): each rank stores a shard of the gradients, multiplied "
        "by `scale`. Take the step on all ranks or on none, and clear all gradients. Return the scale for the next "
        "step, which is half of `scale` after an overflow, and `scale` otherwise."
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
        "Has this rank's shard overflowed? Has any rank's shard overflowed? Only the second answer determines "
        "whether to step.",
        "gradient.isfinite().all() answers the first question. For the second question, every rank must enter "
        "any_rank(world, flag), or an all-reduce of 0 or 1 with dist.ReduceOp.MAX.",
        "Decide once, then step, update the scale and call zero_grad. Clear the gradients after an overflow, too.",
    ),
)
