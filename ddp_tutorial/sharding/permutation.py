"""Which rank sees which sample at which step: pure index arithmetic, no processes.

Every epoch has an order of its own, which depends on seed and epoch alone. Put end to end, the orders are one endless
sequence. A step takes the next `batch_size` samples of it for the whole world, and deals them out to the ranks. Where
the world stands is one number, the cursor, and it means the same for every world size.

    sequence   7 2 5 0 3 | 6 1 4 ...          8 samples, 5 a step
    step 0     7 2 5 0 3                      rank 0 of 2: 7 5 3    rank 1 of 2: 2 0
    step 1     6 1 4 + what the remainder policy says
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ddp_tutorial.config import ConfigError

Indices = npt.NDArray[np.int64]
Some = TypeVar("Some", Indices, torch.Tensor)

# What becomes of the samples at the end of an epoch that do not make a whole batch:
#   carry   they begin a batch that the next epoch completes; nothing is repeated or left out
#   exact   they are a batch of their own, a smaller one: what evaluation needs
#   pad     the same, made up with the epoch's first samples until all ranks have equally many (DistributedSampler)
#   drop    they are left out; another order leaves out others
Remainder = Literal["carry", "exact", "pad", "drop"]

BLOCK = 4096  # positions whose samples are worked out at a time, since numpy is slow at few


@dataclass(frozen=True)
class Permutation:
    """The order of `samples` in every epoch. A piece of it is computed when asked for, so that no list as long as the
    data is kept.

    Every sample is equally likely to be at any place. The order is a keyed permutation, a Feistel network over
    a x b >= samples with a and b near the root, which steps over the few numbers too large (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002): about 50 ns a sample on one core of 2020, so 50 s for an epoch of 10^9,
    spread over the whole of it, where a shuffled list of them takes 8 GB on every rank.

    With a `window`, for files that are slow to read here and there, the data are cut into windows of so many samples.
    The windows come in random order, and the samples of each in random order, before the next one begins. Where the
    first begins is random, too, so that the same two samples do not always share a window. Without a `seed`, samples
    come in the order in which they are stored.
    """

    samples: int
    seed: int | None
    window: int | None = None

    def take(self, cursor: int, count: int) -> Indices:
        """The next `count` samples after the first `cursor` ones, through as many epochs as that takes."""
        parts = []
        while count:
            epoch, start = divmod(cursor, self.samples)
            number = start // BLOCK
            part = _block(self, epoch, number)[start - number * BLOCK :][:count]
            parts.append(part)
            cursor, count = cursor + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """The samples at `positions` of an epoch, each from 0 up to `samples`."""
        if self.seed is None:
            return positions
        if self.window is None:
            return permute(positions, self.samples, _keys(self.seed, epoch))
        return self._in_windows(epoch, positions, min(self.window, self.samples))

    def _in_windows(self, epoch: int, positions: Indices, window: int) -> Indices:
        assert self.seed is not None
        whole = self.samples // window
        windows, within = positions // window, positions % window
        lies = np.empty_like(positions)
        for number in np.unique(windows):  # those of one block: one or two, unless windows are small
            length = min(window, self.samples - number * window)  # the last may be a smaller one, and stays last
            there = windows == number
            lies[there] = permute(within[there], length, _keys(self.seed, epoch, 1, int(number)))
        shuffled = permute(np.minimum(windows, whole - 1), whole, _keys(self.seed, epoch, 2))
        begins = np.where(windows < whole, shuffled, windows) * window
        offset = int(_keys(self.seed, epoch, 3)[0] % np.uint64(self.samples))
        return (begins + lies + offset) % self.samples


@lru_cache(maxsize=16)
def _block(order: Permutation, epoch: int, number: int) -> Indices:
    block = order(epoch, np.arange(number * BLOCK, min((number + 1) * BLOCK, order.samples)))
    block.flags.writeable = False  # it is cached: the next who asks gets the same array
    return block


@lru_cache(maxsize=256)
def _keys(*entropy: int) -> npt.NDArray[np.uint64]:
    # Not torch's generator: on a CPU it takes the low 32 bits of its seed only, too few for two numbers.
    return np.random.SeedSequence(entropy).generate_state(8, np.uint64).astype(np.uint64)


def permute(positions: Indices, size: int, keys: npt.NDArray[np.uint64]) -> Indices:
    """Where each of `positions`, from 0 up to `size`, goes in the permutation that `keys` (an even number) give."""
    a = max(1, math.isqrt(size - 1) + 1) if size > 1 else 1
    b = -(-size // a)
    placed = _rounds(positions.astype(np.uint64), np.uint64(a), np.uint64(b), keys)
    # a x b is a little more than size: what lands beyond it is permuted once more
    while len(beyond := np.flatnonzero(placed >= size)):
        placed[beyond] = _rounds(placed[beyond], np.uint64(a), np.uint64(b), keys)
    return placed.astype(np.int64)


def _rounds(
    numbers: npt.NDArray[np.uint64], a: np.uint64, b: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    left, right = numbers // b, numbers % b
    for key, other in zip(keys[0::2], keys[1::2], strict=True):  # each half moves by a hash of the other: reversible
        left = (left + _hash(right, key) % a) % a
        right = (right + _hash(left, other) % b) % b
    return left * b + right


def _hash(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = (numbers + key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


class GlobalBatch(NamedTuple):
    """One step of the whole world: its sample indices (int64), and the cursor after it."""

    indices: Indices
    cursor: int


@dataclass(frozen=True)
class GlobalBatchSampler:
    """The steps of a world: `batch_size` samples each, in `order`, with a policy for the remainder of an epoch.

    `pad_to` is for remainder 'pad': the world size, of which the length of every step becomes a multiple. Raises
    `ConfigError` for no samples, an empty batch, and for remainder 'drop' with fewer samples than one batch.
    """

    order: Permutation
    batch_size: int
    remainder: Remainder = "carry"
    pad_to: int = 1

    def __post_init__(self) -> None:
        samples, batch = self.order.samples, self.batch_size
        if samples < 1:
            raise ConfigError("the dataset is empty: there are 0 samples to read")
        if batch < 1:
            raise ConfigError(f"'batch_size' should be 1 or more, found {batch}")
        if self.remainder == "drop" and samples < batch:
            raise ConfigError(f"{samples} samples are less than one batch of {batch}: remainder 'drop' leaves nothing")

    def step(self, cursor: int) -> GlobalBatch:
        """The step after `cursor` samples."""
        samples, batch = self.order.samples, self.batch_size
        left = samples - cursor % samples  # in this epoch
        if self.remainder == "carry":
            return GlobalBatch(self.order.take(cursor, batch), cursor + batch)
        if self.remainder == "drop" and left < batch:
            cursor, left = cursor + left, samples
        count = min(batch, left)
        indices = self.order.take(cursor, count)
        if self.remainder == "pad" and (missing := -count % self.pad_to):
            first = self.order.take(cursor - cursor % samples, min(missing, samples))
            indices = np.concatenate([indices, np.resize(first, missing)])  # as often as it takes
        return GlobalBatch(indices, cursor + count)

    def epoch(self, number: int) -> Iterator[Indices]:
        """The steps of one epoch. With remainder 'carry' they do not end where it does: use `step`."""
        if self.remainder == "carry":
            raise ValueError("with remainder 'carry' a step may belong to two epochs. Go from step to step instead.")
        samples = self.order.samples
        cursor, end = number * samples, (number + 1) * samples
        while cursor < end:
            indices, cursor = self.step(cursor)
            if cursor <= end:
                yield indices


def shard_indices(indices: Some, rank: int, size: int) -> Some:
    """This rank's part, dealt like cards: every `size`-th of `indices`. The parts differ in length by one at most."""
    return indices[rank::size]


def shard_micro_batches(indices: Some, rank: int, size: int, micro_batches: int) -> list[Some]:
    """This rank's part in `parts` micro-batches. Number j has what `size * parts` ranks would deal to `rank + size *
    j`, so the micro-batches of a step are the same for every `size` and `parts` with the same product."""
    return [shard_indices(indices, rank + size * number, size * micro_batches) for number in range(micro_batches)]


def global_micro_batch_sizes(count: int, size: int, micro_batches: int) -> list[int]:
    """How many of `count` samples each micro-batch has on all ranks together."""
    return [
        sum(len(range(size * j + rank, count, size * micro_batches)) for rank in range(size))
        for j in range(micro_batches)
    ]


_NONE = np.empty(0, dtype=np.int64)
