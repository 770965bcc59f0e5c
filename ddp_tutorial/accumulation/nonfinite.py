"""Locate the origin of an infinity or a NaN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, call_loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.world import World


def locate_nonfinite(world: World, module: nn.Module, loss: Loss, batches: Sequence[Any], precision: Precision) -> str:
    """Return a description of where a non-finite gradient originated. Collective.

    After the all-reduce, a NaN from one rank appears in the gradients of all ranks. Therefore, each rank repeats the
    forward and backward passes of its own batches, without changing `.grad`. Each rank checks the parameters, then the
    loss, and then the gradients in the order of the backward pass.
    """
    found = None
    # The reverse order approximates the order of the backward pass.
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
    for number, batch in enumerate(batches):
        with torch.compiler.set_stance("force_eager"), precision.autocast():
            total, _ = call_loss(loss, module, batch)
        gradients = torch.autograd.grad(total, [parameter for _, parameter in parameters], allow_unused=True)
        first = _first_nonfinite([(name, g) for (name, _), g in zip(parameters, gradients, strict=True)])
        where = f"of micro-batch {number}"
        if found:
            continue  # with sharded weights, a forward pass is collective, so all ranks run the same number of passes
        if weight := _first_nonfinite(parameters):
            found = f"parameter {weight!r} itself"
        elif not bool(total.isfinite()):
            found = f"the loss {where}" + (f", and therefore the gradient of {first!r} and others" if first else "")
        elif first:
            found = f"the gradient {where} for parameter {first!r}, the first in the backward pass"
    descriptions = [f"on rank {rank}, {each}" for rank, each in enumerate(all_gather(world, found)) if each]
    return "; ".join(descriptions) or (
        "when the passes were repeated, all values were finite on every rank: the sum over ranks overflowed, or "
        "dropout differed"
    )


def _first_nonfinite(named: Sequence[tuple[str, torch.Tensor | None]]) -> str | None:
    """Return the name of the first tensor that contains an infinity or a NaN."""
    return next((name for name, tensor in named if tensor is not None and not bool(tensor.isfinite().all())), None)
