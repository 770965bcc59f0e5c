"""The micro-batches of one optimizer step, and when ranks communicate.

The gradient of a step is that of the mean loss over all its micro-batches on all ranks. A mean of the micro-batches'
means is another number as soon as they differ in length; so what adds up here are sums, divided once by the count of
all (see `loss.StepLoss`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from ddp_tutorial.accumulation.loss import StepLoss, Totals, require_call
from ddp_tutorial.ddp.wrappers import DataParallel
from ddp_tutorial.phases import phase

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
