"""A rank that runs out of memory in forward: all ranks agree to leave the step out, instead of waiting for it.

    each rank by itself            all together
    forward of a micro-batch  ->   who has failed?  ->  nobody: backward
                                                    ->  somebody: OutOfMemoryError on all ranks, none enters backward

The place is chosen by what ranks do together. DDP's collectives of forward are at its beginning, before the model
computes, and those of backward have not begun; so all ranks come to the question, whoever has failed. It is an
all-reduce of one number a rank for each micro-batch, for which forward has to be waited.

What cannot be agreed on ends the run, as any error does: memory that runs out in backward, since the others are inside
all-reduces by then, which the rank that failed will never enter; in a forward with collectives of its own, such as
`SyncBatchNorm`; and in the first step, which would most likely fail the next time too.
"""

from typing import Any

import torch

from ddp_tutorial.accumulation.loss import StepLoss
from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.config import FailedError


class OutOfMemoryError(FailedError):
    """Ranks have run out of memory in forward; raised on all ranks, before any of them has begun the backward in which
    they talk. `description` is the allocator's message, on the ranks that have failed."""

    def __init__(self, ranks: tuple[int, ...], description: str = "") -> None:
        super().__init__(
            f"rank {', '.join(map(str, ranks))} ran out of memory in forward{description and f': {description}'}"
        )
        self.ranks, self.description = ranks, description

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...], str]]:
        return OutOfMemoryError, (self.ranks, self.description)


class BackwardOutOfMemoryError(FailedError):
    """A rank has run out of memory in backward, where the others cannot be asked any more. Raised on that rank."""


def is_out_of_memory(error: BaseException) -> bool:
    """Is it an allocator's, of a GPU or of the CPU? torch has no type of its own for the latter."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError) and not isinstance(error, FailedError) and "DefaultCPUAllocator: " in str(error)
    )


class OutOfMemoryAgreement(StepLoss):
    """A `StepLoss` after each forward of which all ranks know whether one has run out of memory: then all raise."""

    def forward(self, model: Any, batch: Any, loss_multiplier: float = 1.0) -> torch.Tensor:
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
