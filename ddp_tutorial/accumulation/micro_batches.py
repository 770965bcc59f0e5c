"""The micro-batches of one optimizer step, and when ranks communicate.

The gradient of a step is that of the mean loss over all its micro-batches on all ranks. A mean of the micro-batches'
means is another number as soon as they differ in length; so what adds up here are sums, divided once by the count of
all (see `loss.StepLoss`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals, call_loss, require_call
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.ddp.wrappers import DataParallel
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World

Item = TypeVar("Item")


def group(items: Iterable[Item], count: int, remainder: Literal["flush", "drop"] = "flush") -> Iterator[list[Item]]:
    """`count` micro-batches at a time, for a loop over a loader that ends. What is left is a smaller group, or is
    dropped; it never waits for the next epoch."""
    if count < 1:
        raise ValueError(f"a step has 1 micro-batch or more, found {count}")
    step: list[Item] = []
    for item in items:
        step.append(item)
        if len(step) == count:
            yield step
            step = []
    if step and remainder == "flush":
        yield step


def accumulate(model: DataParallel, loss: StepLoss, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
    """Forward and backward of all micro-batches; then every rank has the gradient of the mean loss over those of all
    ranks, times `precision.loss_scale`.

    Ranks talk once, in the last one. Returns the totals of all ranks. Raises `ValueError` for no micro-batches, and, on
    all ranks, for a step in which the loss counts nothing on any of them. Raises `LossError` if the loss does not call
    `model`.
    """
    if not batches:
        raise ValueError("a step has 1 micro-batch or more, found 0")
    loss.begin(len(batches))
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last else model.no_sync():  # forward too: torch decides there what to reduce
            calls = model.calls
            with phase("forward"):
                # Gradients are averaged over ranks, which divides by their number; this is a part of a sum.
                part = loss.forward(model, batch, loss_multiplier=model.world.size)
            require_call(model.calls > calls)
            if is_last:
                loss.reduce(stop_flags)
            with phase("backward"):
                part.backward()
    with phase("finish"):
        model.finish()
        return loss.finish(parameter for _, parameter in model.trainable)


def locate_nonfinite(world: World, module: nn.Module, loss: Loss, batches: Sequence[Any], precision: Precision) -> str:
    """Where does a number that is not finite come from? Collective; computes forward and backward anew.

    Once the ranks have added up their gradients, all have the NaN of one. So each looks at its own again, without
    touching any `.grad`: the loss first, then parameter by parameter, in the order in which backward comes to them.
    """
    found = None
    parameters = _parameters_backwards(module)
    for number, batch in enumerate(batches):
        with precision.autocast():
            total, _ = call_loss(loss, module, batch)
        gradients = torch.autograd.grad(total, [parameter for _, parameter in parameters], allow_unused=True)
        first = _first_not_finite([(name, g) for (name, _), g in zip(parameters, gradients, strict=True)])
        where = f"of micro-batch {number}"
        if found:
            continue  # where weights are sharded, a forward is collective: all ranks do as many
        if weight := _first_not_finite(parameters):
            found = f"parameter {weight!r} itself"
        elif not bool(total.isfinite()):
            found = f"the loss {where}" + (f", hence the gradient of {first!r} and others" if first else "")
        elif first:
            found = f"the gradient {where} for parameter {first!r}, the first on the way back from the loss"
    told = [f"on rank {rank}, {each}" for rank, each in enumerate(all_gather(world, found)) if each]
    return "; ".join(told) or "computed once more, everything is finite on every rank: the sum over ranks, or dropout"


def _first_not_finite(named: Sequence[tuple[str, torch.Tensor | None]]) -> str | None:
    """The first of them that has an infinity or a NaN."""
    return next((name for name, tensor in named if tensor is not None and not bool(tensor.isfinite().all())), None)


def _parameters_backwards(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those to be trained, the last registered first, which is about the order in which backward reaches them."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad][::-1]
