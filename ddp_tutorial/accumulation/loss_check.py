"""Detect loss functions that return a mean instead of a sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import LOSS, Loss, LossError, call_loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import any_rank
from ddp_tutorial.compat import tree_leaves, tree_map
from ddp_tutorial.rng import preserved_rng
from ddp_tutorial.world import World


def require_sum(world: World, loss: Loss, model: nn.Module, batch: Any, precision: Precision) -> None:
    """Raise `LossError` on all ranks if `loss` returns a mean instead of a sum on any rank. Collective.

    The check runs only if every rank's batch is a pytree whose tensors all have the same nonzero number of rows.
    """
    # Either all ranks check or no rank does, because a forward pass with sharded weights is collective.
    if any_rank(world, not has_rows(batch)):
        return
    if any_rank(world, is_mean_loss(loss, model, batch, precision)):
        raise LossError(
            "the loss must be a sum, got a mean (duplicating the samples doubled the count but not the loss). Return "
            "a sum, as in F.cross_entropy(..., reduction='sum')"
        )


def has_rows(batch: Any) -> bool:
    """Return whether `batch` is a pytree whose tensors all have the same nonzero number of rows."""
    rows = {len(leaf) if torch.is_tensor(leaf) and leaf.dim() else 0 for leaf in tree_leaves(batch)}
    return len(rows) == 1 and rows != {0}


def is_mean_loss(loss: Loss, model: nn.Module, batch: Any, precision: Precision) -> bool:
    """Return whether duplicating the samples doubles the count that `loss` returns, but not the sum.

    `batch` is a pytree of tensors, each with at least one row. Return False if the loss function raises an exception.
    """
    few = tree_map(lambda leaf: leaf[:2], batch)
    twice = tree_map(lambda leaf: torch.cat([leaf, leaf]), few)
    with (
        torch.compiler.set_stance("force_eager"),  # compiling the model for these few samples would be slower
        preserved_rng(tree_leaves(batch)[0].device),
        torch.no_grad(),
        evaluating(model),
        precision.autocast(),
    ):
        try:
            pairs = [call_loss(loss, model, each)[1][LOSS] for each in (few, twice)]
        except Exception:  # the step itself reports the error
            return False
    (sum_1, count_1), (sum_2, count_2) = ((float(total), float(count)) for total, count in pairs)
    return count_2 == 2 * count_1 != 0 and sum_1 != 0 and abs(sum_2 - sum_1) < 1e-3 * abs(sum_1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode, and restore the mode of each module after the block."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
