"""Define the interface through which a training step receives samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tree = Any  # a tree of tensors
SourceState = Mapping[str, int]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's samples for one step or for one micro-batch.

    Attributes:
        samples: A tree of tensors with `count` rows. The tree is the output of the dataset's `fetch` or `collate_fn`,
            processed by `transform`.
        count: The number of samples on this rank, which may be 0 at the end of an epoch.
        global_count: The total number of samples over all ranks in the same step or micro-batch.
    """

    samples: Tree
    count: int
    global_count: int


class Source(Protocol):
    """An infinite iterator over this rank's batches, one per step. Every rank takes the same number of steps."""

    @property
    def batch_size(self) -> int:
        """The number of samples in a step, over all ranks. The last step of an epoch may contain fewer samples."""
        ...

    @property
    def steps_per_epoch(self) -> float | None:
        """The number of steps in one epoch, or None if the number of samples is unknown.

        The number can be fractional if a step can contain samples from several epochs.
        """
        ...

    def take(self, micro_batches: int) -> list[LocalBatch]:
        """Return this rank's samples for the next step, split into micro-batches.

        `permutation.shard_micro_batches` defines the split.
        """
        ...

    def __next__(self) -> LocalBatch:
        """Return this rank's samples for the next step as one batch."""
        ...

    def state_dict(self) -> SourceState:
        """Return the position after the steps taken so far. The position is the same on every rank.

        The position does not count prefetched batches that have not been taken.
        """
        ...

    def load_state_dict(self, state: SourceState) -> None:
        """Resume from a position that `state_dict` returned, even if batches have already been taken."""
        ...

    def close(self) -> None:
        """Stop prefetching. This method is collective if rank 0 reads for all ranks."""
        ...
