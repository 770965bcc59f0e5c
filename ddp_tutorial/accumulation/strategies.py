"""Define the DDP strategy, and the base class of the strategies that replicate the model on each rank."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.out_of_memory import BackwardOutOfMemoryError, OutOfMemoryAgreement, is_out_of_memory
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategy import Part
from ddp_tutorial.collectives import broadcast_tensors
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.config import CompileConfig, DDPConfig
from ddp_tutorial.ddp.sync_bn import SyncBatchNorm
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.world import World


class ReplicatedStrategy:
    """Base class of the strategies in which each rank stores and updates the full `module`."""

    loss: StepLoss
    micro_batches_per_rank: int

    def __init__(self, module: nn.Module, world: World) -> None:
        """Store the model, which must be on this rank's device."""
        self.module, self.world = module, world

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer` unchanged."""
        return optimizer

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of this rank's `gradients`."""
        return get_total_norm(gradients)

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Return a context manager that does nothing, because the model already contains the evaluation weights."""
        return nullcontext()

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields the model."""
        return nullcontext(self.module)

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the model and optimizer components, which are identical on all ranks."""
        return {"model": (self.module, "replicated"), "optimizer": (optimizer, "replicated")}

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers. BatchNorm's running statistics differ between ranks after a step."""
        broadcast_tensors(self.world, list(self.module.buffers()))

    def state_dict(self) -> Mapping[str, float]:
        """Return the state of the loss."""
        return self.loss.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of the loss."""
        self.loss.load_state_dict(state)


class DDPStrategy(ReplicatedStrategy):
    """A strategy in which each rank stores the full model, and gradients are averaged over all ranks.

    With `agree_on_memory`, all ranks raise `OutOfMemoryError` if any rank runs out of memory in the forward pass. The
    ranks can then continue with the next batch. The `out_of_memory` module documents the option's cost and limitations.
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
        compilation: CompileConfig | None = None,
    ) -> None:
        """Wrap the model, and broadcast rank 0's weights."""
        if agree_on_memory:
            require_local_forward(model)
        super().__init__(model, world)
        self.model = data_parallel(model, world, config, compilation)
        self.link, self.micro_batches_per_rank = self.model.link, accumulation
        self.loss = (OutOfMemoryAgreement if agree_on_memory else StepLoss)(loss, world, precision)

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute `.grad`, and return the totals over all ranks; see `Strategy.backward`."""
        try:
            return accumulate(self.model, self.loss, batches, stop_flags)
        except Exception as error:
            if not (isinstance(self.loss, OutOfMemoryAgreement) and self.loss.names and is_out_of_memory(error)):
                raise
            raise BackwardOutOfMemoryError(
                f"rank {self.model.world.rank} ran out of memory in the backward pass: "
                f"{str(error).partition(chr(10))[0]}. The other ranks may already be reducing gradients, so this step "
                "cannot be skipped. Use smaller micro-batches (a larger 'accumulation'), or set model.recompute=true"
            ) from error

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the model and optimizer components and, with PowerSGD, each rank's compression errors."""
        components = super().checkpoint_components(optimizer)
        if self.model.kept is not None:  # the compression errors that a rank has not sent yet
            components["compression"] = (self.model.kept, "per_rank")
        return components


def require_local_forward(model: nn.Module) -> None:
    """Raise `ConfigError` if the forward pass contains collectives, which would wait for a failed rank."""
    for name, part in model.named_modules():
        if isinstance(part, nn.SyncBatchNorm | SyncBatchNorm):
            raise ConfigError(
                f"'oom_skips' requires a forward pass without collectives, but {name!r} is a {type(part).__name__}, "
                "which synchronizes the ranks in the forward pass. Use BatchNorm, or set oom_skips=0"
            )
