"""If a rank runs out of memory in the forward pass, all ranks agree to skip the batch.

    each rank                            all ranks
    forward pass of a micro-batch  ->    all-reduce: which ranks failed?  ->  none: backward pass
                                                                          ->  some: OutOfMemoryError on all ranks

DDP's collectives of the forward pass come before the model computes, and those of the backward pass have not started
yet. So at this point every rank can join the all-reduce, including those that failed. The reduced tensor contains one
number per rank. It runs for each micro-batch and must wait for the forward pass.

In three cases the ranks do not agree, and the error aborts the run. In the backward pass, the other ranks are already
in all-reduces that the failed rank never joins. A forward pass with collectives, such as that of `SyncBatchNorm`, has
the same problem. And if the first step fails, the next one would most likely fail as well.
"""

from typing import Any

import torch

from ddp_tutorial.accumulation.loss import StepLoss
from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.config import FailedError


class OutOfMemoryError(FailedError):
    """Some ranks ran out of memory in the forward pass. Raised on all ranks, before the backward pass communicates."""

    def __init__(self, ranks: tuple[int, ...], description: str = "") -> None:
        """Create the error. `ranks` failed; `description` is the allocator's message, on those ranks."""
        super().__init__(
            f"rank {', '.join(map(str, ranks))} ran out of memory in forward{description and f': {description}'}"
        )
        self.ranks, self.description = ranks, description

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...], str]]:
        """Return how to unpickle the error, because its arguments are not its message."""
        return OutOfMemoryError, (self.ranks, self.description)


class BackwardOutOfMemoryError(FailedError):
    """A rank ran out of memory in the backward pass, where ranks can no longer agree. Raised on that rank."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the allocator of a GPU or of the CPU raised `error`. For the CPU, torch has no error type."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError) and not isinstance(error, FailedError) and "DefaultCPUAllocator: " in str(error)
    )


class OutOfMemoryAgreement(StepLoss):
    """A `StepLoss` that raises `OutOfMemoryError` on all ranks if a rank runs out of memory in the forward pass."""

    def forward(self, model: Any, batch: Any, loss_multiplier: float = 1.0) -> torch.Tensor:
        """Return the loss of one micro-batch; see `StepLoss.forward`. Collective after the first step."""
        if not self.names:  # the first step
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
        assert part is not None, "it has not failed here"
        return part
