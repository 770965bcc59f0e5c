"""Define the interface between a training step and the strategy that computes its gradient."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Totals
from ddp_tutorial.ddp.link import Link

# A checkpoint component: an object with `state_dict` and `load_state_dict`, and a value of
# `checkpoint.components.Shared` that specifies how ranks share the object.
Part = tuple[Any, str]


class Strategy(Protocol):
    """The interface of strategies that compute the gradient on several ranks.

    After `backward`, `.grad` contains the gradient of the mean loss over the micro-batches of all ranks, multiplied by
    the loss scale. If gradients are sharded, each rank stores only its shard. All methods except `state_dict` and
    `load_state_dict` are collective.
    """

    link: Link | None  # sends the gradients; None if PyTorch sends them directly

    @property
    def micro_batches_per_rank(self) -> int:
        """The number of micro-batches per step on each rank."""
        ...

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that updates the weights. Call this method once, before the first step.

        `optimizer` must hold the full model's parameters, and must not have taken a step. If the weights are sharded,
        the result is an optimizer for this rank's shard.
        """
        ...

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute `.grad`, and return the totals of the loss, the metrics and the `stop_flags` over all ranks."""
        ...

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of the full gradient, on all ranks. `gradients` are this rank's gradients."""
        ...

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers. Call this method before the model is evaluated or saved."""
        ...

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Return a context manager that loads the evaluation weights into the model on every rank."""
        ...

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields the model with its full weights on every rank."""
        ...

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the checkpoint components of the model and of the `optimizer` that `setup_optimizer` returned."""
        ...

    def state_dict(self) -> Mapping[str, float]:
        """Return the state required to resume with bitwise identical results. The state is the same on all ranks."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restore a state that `state_dict` returned."""
        ...
