"""Skip a batch on all ranks if any rank runs out of memory in the forward pass.

    Each rank                            All ranks
    forward pass of a micro-batch  ->    all-reduce: which ranks failed?  ->  none: backward pass
                                                                          ->  some: OutOfMemoryError on all ranks.

The all-reduce starts after DDP's forward collectives have finished and before DDP's backward collectives start.
Therefore, every rank can join the all-reduce, even if its forward pass failed. The reduced tensor contains one flag per
rank. The all-reduce runs in each micro-batch and must wait for the forward pass.

An out-of-memory error in a backward pass still aborts the run, because the other ranks are already in all-reduces that
the failed rank never joins. An error in the first micro-batch also aborts the run, because later steps would probably
fail too. Models whose forward pass contains collectives, such as models with `SyncBatchNorm`, are rejected.
"""

from typing import Any

import torch

from ddp_tutorial.accumulation.loss import StepLoss
from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.config import FailedError, named_ranks


class OutOfMemoryError(FailedError):
    """Raised on all ranks, before the backward pass, if any rank ran out of memory in the forward pass."""

    def __init__(self, ranks: tuple[int, ...], description: str = "") -> None:
        """Create the error for the failed `ranks`. On a failed rank, `description` is the allocator's message."""
        super().__init__(
            f"{named_ranks(ranks)} ran out of memory in the forward pass{description and f': {description}'}"
        )
        self.ranks, self.description = ranks, description

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...], str]]:
        """Return the class and its constructor arguments. By default, `pickle` would keep only the message."""
        return OutOfMemoryError, (self.ranks, self.description)


class BackwardOutOfMemoryError(FailedError):
    """Raised on a rank that runs out of memory in the backward pass, when it is too late to skip the batch."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or CPU allocator raised `error`. PyTorch has no out-of-memory exception for the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError) and not isinstance(error, FailedError) and "DefaultCPUAllocator: " in str(error)
    )


class OutOfMemoryAgreement(StepLoss):
    """A `StepLoss` that raises `OutOfMemoryError` on all ranks if any rank runs out of memory in the forward pass."""

    def forward(self, model: Any, batch: Any, loss_multiplier: float = 1.0) -> torch.Tensor:
        """Return the loss of one micro-batch; see `StepLoss.forward`. Collective."""
        if not self.names:  # the first call
            return super().forward(model, batch, loss_multiplier)
        part, description = None, ""
        try:
            part = super().forward(model, batch, loss_multiplier)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            description = str(error).partition("\n")[0]
        failed = torch.zeros(self.world.size, device=self.world.device)
        failed[self.world.rank] = part is None
        ranks = tuple(rank for rank, has in enumerate(all_reduce_sum(self.world, failed).tolist()) if has)
        if ranks:
            raise OutOfMemoryError(ranks, description)
        assert part is not None, "the forward pass has not failed on this rank"
        return part
