"""The contract between a training step and the source of its samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tree = Any  # of tensors
SourceState = Mapping[str, int]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of one step, or of one micro-batch.

    Attributes:
        samples: A tree of tensors with `count` rows: the output of the dataset's `fetch` or `collate_fn`, and then of
            `transform`.
        count: The number of samples on this rank. At the end of an epoch, it may be 0.
        global_count: The number of samples on all ranks.
    """

    samples: Tree
    count: int
    global_count: int


class Source(Protocol):
    """An endless iterator over steps. Every rank takes the same number of steps."""

    @property
    def batch_size(self) -> int:
        """The number of samples in a step, over all ranks. The last step of an epoch may be smaller."""
        ...

    @property
    def steps_per_epoch(self) -> float | None:
        """The number of steps in one epoch, or None if the source does not know its number of samples.

        It is a fraction if a step may contain samples of two epochs.
        """
        ...

    def take(self, micro_batches: int) -> list[LocalBatch]:
        """Return this rank's samples of the next step, split into micro-batches.

        `permutation.shard_micro_batches` defines the split.
        """
        ...

    def __next__(self) -> LocalBatch:
        """Return this rank's samples of the next step as one batch."""
        ...

    def state_dict(self) -> SourceState:
        """Return the position after the steps that have been taken. It is the same on every rank.

        Batches that were read ahead but not taken do not count.
        """
        ...

    def load_state_dict(self, state: SourceState) -> None:
        """Resume from a position that `state_dict` returned. Call this method before the first step."""
        ...

    def close(self) -> None:
        """Stop reading ahead. Collective if ranks read for each other."""
        ...
