"""The contract between a training step and the strategy that computes its gradient."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Totals
from ddp_tutorial.ddp.link import Link

# A component of a checkpoint: an object with `state_dict` and `load_state_dict`, and how ranks share it, as a value of
# `checkpoint.components.Shared`.
Part = tuple[Any, str]


class Strategy(Protocol):
    """A way to compute the gradient on several ranks.

    After `backward`, every rank holds the gradient of the mean loss over the micro-batches of all ranks, or its shard
    of that gradient, times the scale of its `Precision`. All methods are collective, except `micro_batches_per_rank`,
    `state_dict` and `load_state_dict`.
    """

    link: Link | None  # carries the gradients; None if PyTorch sends them directly

    @property
    def micro_batches_per_rank(self) -> int:
        """Micro-batches of a step on each rank."""
        ...

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to step. Call this method once, before the first step.

        `optimizer` was created from the whole model and has not been stepped. If the weights are sharded, the result is
        an optimizer of this rank's shard.
        """
        ...

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Fill `.grad`. Return the totals of the loss, the metrics and the `stop_flags` over all ranks."""
        ...

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of the whole gradient, the same on all ranks. `gradients` are those of this rank."""
        ...

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, before the model is evaluated or saved."""
        ...

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Return a context in which the model has the weights to evaluate, on every rank."""
        ...

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Return a context that yields a model with all weights on every rank, to compare or save it."""
        ...

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the checkpoint components of the model and of `optimizer`, which `setup_optimizer` returned."""
        ...

    def state_dict(self) -> Mapping[str, float]:
        """Return the state that makes a resumed run bitwise identical; it is the same on all ranks."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restore a state."""
        ...
