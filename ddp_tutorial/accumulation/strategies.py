"""How the ranks come to agree on a gradient: one method, `backward`, from the micro-batches of one step."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.out_of_memory import (
    BackwardOutOfMemoryError,
    OutOfMemoryAgreement,
    is_out_of_memory,
    require_local_forward,
)
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import broadcast_tensors
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.world import World

# What a checkpoint keeps: something with `state_dict` and `load_state_dict`, and which ranks have the same of it, in
# the words of `checkpoint.components.Shared`.
Part = tuple[Any, str]


class Strategy(Protocol):
    """After `backward`, every rank holds the gradient of the mean loss over the micro-batches of all ranks, or its part
    of that, times the scale of its `Precision`. All methods but `per_rank` and the state's are collective."""

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


class ReplicatedStrategy:
    """What is the same for all strategies by which each rank has the whole `module` and steps it by itself."""

    loss: StepLoss

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module, self.world = module, world

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return get_total_norm(gradients)

    def evaluation_weights(self) -> AbstractContextManager[object]:
        return nullcontext()

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        return {"model": (self.module, "replicated"), "optimizer": (optimizer, "replicated")}

    def sync_buffers(self) -> None:
        # As the variants do within a step. After the last one, each rank's BatchNorm has statistics of its own.
        broadcast_tensors(self.world, list(self.module.buffers()))

    def state_dict(self) -> Mapping[str, float]:
        return self.loss.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loss.load_state_dict(state)


class DDPStrategy(ReplicatedStrategy):
    """Every rank has the whole model and a part of the batch; the gradients are averaged as `config` says.

    With `agree_on_memory`, a rank that runs out of memory in forward makes all raise `OutOfMemoryError`, and all can go
    on with the next step; see `out_of_memory` for what it costs, and where it cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: DDPConfig | None = None,
        *,
        accumulation: int = 1,
        precision: Precision | None = None,
        agree_on_memory: bool = False,
    ) -> None:
        if agree_on_memory:
            require_local_forward(model)
        super().__init__(model, world)
        self.model = data_parallel(model, world, config)
        self.link, self.accumulation = self.model.link, accumulation
        self.loss = (OutOfMemoryAgreement if agree_on_memory else StepLoss)(loss, world, precision)

    @property
    def micro_batches_per_rank(self) -> int:
        return self.accumulation

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        try:
            return accumulate(self.model, self.loss, batches, stop_flags)
        except Exception as error:
            if not (isinstance(self.loss, OutOfMemoryAgreement) and self.loss.names and is_out_of_memory(error)):
                raise
            raise BackwardOutOfMemoryError(
                f"rank {self.model.world.rank} ran out of memory in backward: {str(error).partition(chr(10))[0]}. The "
                "other ranks may be adding up gradients already, so this step cannot be left out. Use smaller "
                "micro-batches (a larger 'accumulation'), or model.recompute"
            ) from error

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        checkpoint_components = super().checkpoint_components(optimizer)
        if self.model.kept is not None:  # what a rank has yet to send
            checkpoint_components["compression"] = (self.model.kept, "per_rank")
        return checkpoint_components
