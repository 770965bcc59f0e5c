"""Accumulate gradients over the micro-batches of an optimizer step, and communicate once.

A step computes the gradient of the mean loss over all micro-batches on all ranks. If the micro-batch sizes differ,
averaging the micro-batches' mean losses gives a different result. Therefore, the losses are summed, and the sum is
divided once by the total count (see `loss.StepLoss`).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ddp_tutorial.accumulation.loss import StepLoss, Totals, require_call
from ddp_tutorial.ddp.wrappers import DataParallel
from ddp_tutorial.phases import phase


def accumulate(model: DataParallel, loss: StepLoss, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
    """Run the forward and backward passes of all micro-batches, and return the totals over all ranks. Collective.

    Afterward, `.grad` on every rank contains the gradient of the mean loss over the micro-batches of all ranks,
    multiplied by `precision.loss_scale`. Ranks synchronize once, in the last micro-batch.

    Raises:
        ValueError: If there are no micro-batches, or (on all ranks) if the total count of the loss is zero.
        LossError: If the loss function does not call `model`.
    """
    if not batches:
        raise ValueError("a step must have at least 1 micro-batch, got 0")
    loss.begin(len(batches))
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        # Include the forward pass, because DDP decides there whether to reduce gradients.
        with nullcontext() if is_last else model.no_sync():
            calls = model.calls
            with phase("forward"):
                # Compensate for the averaging over ranks, because this loss is one term of a sum.
                part = loss.forward(model.loss_model, batch, loss_multiplier=model.world.size)
            require_call(model.calls > calls)
            if is_last:
                loss.reduce(stop_flags)
            with phase("backward"):
                part.backward()
    with phase("finish"):
        model.finish()
        return loss.finish(parameter for _, parameter in model.trainable)
