"""The micro-batches of one optimiser step: how a batch is cut, when ranks talk, and how each part is weighted.

The gradient of a step is that of the mean loss over all tokens of all its micro-batches on all ranks. A mean of the
micro-batches' means is another number as soon as they differ in length; so what adds up here are sums, divided once, by
the tokens of all.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import nn

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.data import rows_of
from ddp_tutorial.ddp import DataParallel
from ddp_tutorial.metrics import Mean
from ddp_tutorial.model import loss_sum
from ddp_tutorial.phases import phase
from ddp_tutorial.precision import Precision
from ddp_tutorial.sharded import Share
from ddp_tutorial.world import World

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    `inputs` and `targets` are tokens [samples, context] (int64), targets shifted by one; where a sample is shorter than
    the others, its targets end in -100, which the loss leaves out. `tokens` counts the targets of this rank,
    `world_tokens` those of all ranks. A source that cuts windows knows both, so they cost no communication; else see
    `weigh`.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    tokens: int
    world_tokens: int


def next_token(share: Share) -> Batch:
    """To predict each token from those before it."""
    tokens = share.samples["tokens"].to(torch.int64)
    targets = tokens[:, 1:]
    return Batch(tokens[:, :-1], targets, targets.numel(), share.world_count * targets.shape[1])


def split(share: Share, count: int, world: World) -> list[Share]:
    """Deal a rank's share of a step out once more, into `count` micro-batches of the same size, or one less.

    As shares are dealt to ranks like cards, micro-batch j of rank r has the samples of the step at places r + W j, r +
    W j + W K, ...: what a world of W K ranks would have given to rank r + W j. So the W K micro-batches of a step are
    the same for every W and K with the same product.
    """
    if count < 1:
        raise ValueError(f"a step has 1 micro-batch or more, found {count}")
    return [
        Share(
            rows_of(share.samples, slice(number, None, count)),
            len(range(number, share.count, count)),
            sum(len(range(world.size * number + r, share.world_count, world.size * count)) for r in range(world.size)),
        )
        for number in range(count)
    ]


def windows(items: Iterable[Item], count: int, remainder: Literal["flush", "drop"] = "flush") -> Iterator[list[Item]]:
    """`count` micro-batches at a time, for a loop over a loader that ends. What is left at the end is a window of its
    own, a smaller one, or dropped; it never waits for the next epoch."""
    if count < 1:
        raise ValueError(f"a step has 1 micro-batch or more, found {count}")
    window: list[Item] = []
    for item in items:
        window.append(item)
        if len(window) == count:
            yield window
            window = []
    if window and remainder == "flush":
        yield window


def weigh(batches: Sequence[Batch], world: World) -> list[Batch]:
    """Let the ranks count their tokens together, where no source knows how many the others have. Collective.

    Raises `RuntimeError`, on all ranks, if they have different numbers of micro-batches: who has fewer would be done
    while others still compute, and count as nothing.
    """
    tokens = all_gather(world, [batch.tokens for batch in batches])
    lengths = [len(each) for each in tokens]
    if len(set(lengths)) > 1:
        told = ", ".join(f"rank {rank} {length}" for rank, length in enumerate(lengths))
        raise RuntimeError(f"the ranks have different numbers of micro-batches in this step: {told}")
    totals = [sum(each) for each in zip(*tokens, strict=True)]
    return [replace(batch, world_tokens=total) for batch, total in zip(batches, totals, strict=True)]


def accumulate(model: DataParallel, batches: Sequence[Batch], precision: Precision | None = None) -> Mean:
    """Forward and backward of all micro-batches; then every rank has the gradient of the mean loss over all tokens,
    times `precision.loss_scale`.

    Ranks talk once, in the last one. Returns this rank's loss, as a sum and a count. Raises `ValueError` for no
    micro-batches, and for a step without a token on any rank.
    """
    precision = precision or Precision()
    world_tokens = sum(batch.world_tokens for batch in batches)
    if world_tokens == 0:
        raise ValueError(f"a step of {len(batches)} micro-batches without a token: there is no mean of nothing")
    # Gradients are averaged over ranks: a rank's loss has to be its sum, times the ranks, over the tokens of all.
    scale = model.world.size / world_tokens * precision.loss_scale
    losses = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last else model.no_sync():  # forward too: torch decides there what to reduce
            with phase("forward"), precision.autocast():
                loss = loss_sum(model(batch.inputs), batch.targets)
            with phase("backward"):
                (loss * scale).backward()
        losses.append(loss.detach())
    with phase("finish"):
        model.finish()
    return Mean(torch.stack(losses).sum(), sum(batch.tokens for batch in batches))


def blame(world: World, module: nn.Module, batches: Sequence[Batch], precision: Precision) -> str:
    """Where does a number that is not finite come from? Collective; for after the fact, since it computes anew.

    Once the ranks have added up their gradients, all have the NaN of one. So each looks at its own again, without
    touching any `.grad`: the loss first, then parameter by parameter, in the order in which backward comes to them.
    """
    found = None
    parameters = _parameters_backwards(module)
    for number, batch in enumerate(batches):
        with precision.autocast():
            loss = loss_sum(module(batch.inputs), batch.targets)
        gradients = torch.autograd.grad(loss, [parameter for _, parameter in parameters], allow_unused=True)
        first = _first_not_finite([(name, g) for (name, _), g in zip(parameters, gradients, strict=True)])
        where = f"of micro-batch {number}"
        if weight := _first_not_finite(parameters):
            found = f"parameter {weight!r} itself"
        elif not bool(loss.isfinite()):
            found = f"the loss {where}" + (f", hence the gradient of {first!r} and others" if first else "")
        elif first:
            found = f"the gradient {where} for parameter {first!r}, the first on the way back from the loss"
        if found:
            break
    told = [f"on rank {rank}, {each}" for rank, each in enumerate(all_gather(world, found)) if each]
    return "; ".join(told) or "computed once more, everything is finite on every rank: the sum over ranks, or dropout"


def _first_not_finite(named: Sequence[tuple[str, torch.Tensor | None]]) -> str | None:
    """The first of them that has an infinity or a NaN."""
    return next((name for name, tensor in named if tensor is not None and not bool(tensor.isfinite().all())), None)


def _parameters_backwards(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those to be trained, the last registered first, which is about the order in which backward reaches them."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad][::-1]
