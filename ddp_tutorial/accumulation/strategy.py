"""The contract between a training step and the strategy that computes its gradient."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Totals
from ddp_tutorial.ddp.link import Link

# What a checkpoint keeps: something with `state_dict` and `load_state_dict`, and which ranks have the same of it, in
# the words of `checkpoint.components.Shared`.
Part = tuple[Any, str]


class Strategy(Protocol):
    """A way to compute the gradient on several ranks.

    After `backward`, every rank holds the gradient of the mean loss over the micro-batches of all ranks, or its shard
    of that gradient, times the scale of its `Precision`. All methods are collective, except `micro_batches_per_rank`,
    `state_dict` and `load_state_dict`.
    """

    link: Link | None  # what carries the gradients, where Python sees it

    @property
    def micro_batches_per_rank(self) -> int:
        """How many micro-batches of a step each rank computes."""
        ...

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that is stepped, whose parameters have the gradients: `optimizer`, made from the whole model
        and not stepped yet, or one of this rank's part. Once, before the first step."""
        ...

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Fill `.grad`; return the sums and counts of the loss and the metrics, and of `stop_flags`, over all ranks."""
        ...

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole gradient, the same on all ranks; `gradients` are those that this rank holds."""
        ...

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers, before the model is judged or saved."""
        ...

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Inside, the model that is trained has the weights by which the run is judged, on every rank."""
        ...

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Inside, each rank has a model with all weights: to be digested, or written by rank 0."""
        ...

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """What a checkpoint keeps of the model and of `optimizer`, the one that is stepped, and who has the same."""
        ...

    def state_dict(self) -> Mapping[str, float]:
        """What it needs to go on with the same bits; the same on all ranks."""
        ...

    def load_state_dict(self, state: Any) -> None: ...
