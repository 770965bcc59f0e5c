"""Compute each rank's sample indices for each step. This module contains only index arithmetic.

Every epoch has a different sample order, which depends only on the seed and the epoch number. The sample orders of
successive epochs form one infinite sequence. Each step's global batch contains the next `batch_size` samples of the
sequence, and is split among the ranks. The cursor, which is the position in the sequence, is a single integer that does
not depend on the world size.

    Sequence   7 2 5 0 3 | 6 1 4 ...          8 samples, 5 per step
    Step 0     7 2 5 0 3                      rank 0 of 2: 7 5 3    rank 1 of 2: 2 0
    Step 1     6 1 4 + samples according to the remainder policy
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding.config import Remainder

Indices = npt.NDArray[np.int64]
Some = TypeVar("Some", Indices, torch.Tensor)

# The policies for the last samples of an epoch if they do not fill a batch:
#   carry   The batch is completed with samples from the next epoch. No sample is repeated or skipped.
#   exact   The last batch is smaller. Evaluation needs this policy.
#   pad     The last batch is padded with the first samples of the epoch until all ranks have the same number of
#           samples, as in DistributedSampler.
#   drop    The last samples are skipped. With a seed, every epoch skips different samples.
BLOCK = 4096  # positions computed at a time, because NumPy is slow on small arrays


@dataclass(frozen=True)
class Permutation:
    """The order in which each epoch visits the samples.

    Blocks of the order are computed on demand, so the memory usage does not grow with the dataset size.

    Every sample is equally likely to be at any position. The order is a keyed permutation, computed with a Feistel
    network on a x b values. Both a and b are near the square root of `samples`, and a x b is at least `samples`.
    Results outside the range [0, `samples`) are permuted again (cycle walking; Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002).

    Computing the permutation takes about 50 ns per sample on a 2020 CPU core. For an epoch of 10^9 samples, the total
    time is 50 seconds, spread over the epoch. A shuffled array of 10^9 indices would require 8 GB on every rank.

    Attributes:
        samples: The number of samples in the dataset.
        seed: The seed of the sample order. None keeps the samples in their stored order.
        window: The number of samples in a shuffle window, for files with slow random access. The windows are visited in
            random order. All samples of a window are visited, in random order, before the next window begins. The first
            window starts at a random sample, so that the windows of different epochs contain different samples.

    Raises:
        ConfigError: If `seed` is negative.
    """

    samples: int
    seed: int | None
    window: int | None = None

    def __post_init__(self) -> None:
        """Validate `seed`."""
        require_seed(self.seed)

    def take(self, cursor: int, count: int) -> Indices:
        """Return the indices of `count` samples, starting at `cursor`. The samples may span several epochs."""
        parts = []
        while count:
            epoch, start = divmod(cursor, self.samples)
            number = start // BLOCK
            part = _block(self, epoch, number)[start - number * BLOCK :][:count]
            parts.append(part)
            cursor, count = cursor + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample indices at `positions` in the order of `epoch`. Positions range from 0 to `samples` - 1."""
        if self.seed is None:
            return positions
        if self.window is None:
            return permute(positions, self.samples, _keys(self.seed, epoch))
        return self._in_windows(epoch, positions, min(self.window, self.samples))

    def _in_windows(self, epoch: int, positions: Indices, window: int) -> Indices:
        assert self.seed is not None
        whole = self.samples // window
        windows, within = positions // window, positions % window
        inner = np.empty_like(positions)
        for number in np.unique(windows):  # one or two windows per block, unless windows are small
            length = min(window, self.samples - number * window)  # the last window may be smaller, and stays last
            selected = windows == number
            inner[selected] = permute(within[selected], length, _keys(self.seed, epoch, 1, int(number)))
        shuffled = permute(np.minimum(windows, whole - 1), whole, _keys(self.seed, epoch, 2))
        begins = np.where(windows < whole, shuffled, windows) * window
        offset = int(_keys(self.seed, epoch, 3)[0] % np.uint64(self.samples))
        return (begins + inner + offset) % self.samples


def require_seed(seed: int | None) -> None:
    """Raise `ConfigError` if `seed` is negative, because NumPy would not reject the seed until the first step."""
    if seed is not None and seed < 0:
        raise ConfigError(f"'seed' must be None or at least 0, got {seed}")


@lru_cache(maxsize=16)
def _block(order: Permutation, epoch: int, number: int) -> Indices:
    block = order(epoch, np.arange(number * BLOCK, min((number + 1) * BLOCK, order.samples)))
    block.flags.writeable = False  # cached, so all callers share the array
    return block


@lru_cache(maxsize=256)
def _keys(*entropy: int) -> npt.NDArray[np.uint64]:
    # torch's CPU generator uses only the low 32 bits of its seed, which cannot hold several integers.
    return np.random.SeedSequence(entropy).generate_state(8, np.uint64).astype(np.uint64)


def permute(positions: Indices, size: int, keys: npt.NDArray[np.uint64]) -> Indices:
    """Apply the permutation defined by `keys` to `positions`.

    Args:
        positions: Values in the range [0, `size`).
        size: The size of the permutation, at least 1.
        keys: The keys of the Feistel rounds. The number of keys must be even.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    placed = _rounds(positions.astype(np.uint64), np.uint64(a), np.uint64(b), keys)
    # a x b may be slightly larger than size, so values of at least size are permuted again
    while len(beyond := np.flatnonzero(placed >= size)):
        placed[beyond] = _rounds(placed[beyond], np.uint64(a), np.uint64(b), keys)
    return placed.astype(np.int64)


def _rounds(
    numbers: npt.NDArray[np.uint64], a: np.uint64, b: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    left, right = numbers // b, numbers % b
    for key, other in zip(keys[0::2], keys[1::2], strict=True):  # a shift by a hash of the other half is invertible
        left = (left + _hash(right, key) % a) % a
        right = (right + _hash(left, other) % b) % b
    return left * b + right


def _hash(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = (numbers + key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


class GlobalBatch(NamedTuple):
    """The global batch of one step.

    Attributes:
        indices: The sample indices (int64).
        cursor: The cursor after the step.
    """

    indices: Indices
    cursor: int


@dataclass(frozen=True)
class GlobalBatchSampler:
    """A sampler that returns each step's global batch, which contains the next `batch_size` samples of `order`.

    Attributes:
        order: The order of the samples.
        batch_size: The number of samples in a step, over all ranks.
        remainder: The policy for the last samples of an epoch; see `Remainder`.
        pad_to: The world size, used only with remainder 'pad'. Each global batch is padded to a multiple of this size.

    Raises:
        ConfigError: If there are no samples, if `batch_size` is less than 1, or if remainder 'drop' would drop all
            samples.
    """

    order: Permutation
    batch_size: int
    remainder: Remainder = "carry"
    pad_to: int = 1

    def __post_init__(self) -> None:
        """Validate the fields."""
        samples, batch = self.order.samples, self.batch_size
        if samples < 1:
            raise ConfigError("the dataset must contain at least 1 sample, got 0")
        if batch < 1:
            raise ConfigError(f"'batch_size' must be at least 1, got {batch}")
        if self.remainder == "drop" and samples < batch:
            raise ConfigError(
                f"with remainder='drop', the dataset must contain at least {batch} samples (one batch), got {samples}"
            )

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in one epoch. With remainder 'carry', the number may be fractional."""
        steps = self.order.samples / self.batch_size
        rounded = {"carry": steps, "drop": math.floor(steps)}
        return rounded.get(self.remainder, math.ceil(steps))

    def step(self, cursor: int) -> GlobalBatch:
        """Return the global batch of the step that starts at `cursor`."""
        samples, batch = self.order.samples, self.batch_size
        left = samples - cursor % samples  # samples left in this epoch
        if self.remainder == "carry":
            return GlobalBatch(self.order.take(cursor, batch), cursor + batch)
        if self.remainder == "drop" and left < batch:
            cursor, left = cursor + left, samples
        count = min(batch, left)
        indices = self.order.take(cursor, count)
        if self.remainder == "pad" and (missing := -count % self.pad_to):
            first = self.order.take(cursor - cursor % samples, min(missing, samples))
            indices = np.concatenate([indices, np.resize(first, missing)])  # repeated if necessary
        return GlobalBatch(indices, cursor + count)

    def epoch(self, number: int) -> Iterator[Indices]:
        """Yield the sample indices of each step of one epoch.

        Raises:
            ValueError: If the remainder is 'carry', because a step may then span several epochs. Use `step` instead.
        """
        if self.remainder == "carry":
            raise ValueError(
                "epoch() does not support remainder='carry', because a step may belong to two epochs. "
                "Use step() instead."
            )
        samples = self.order.samples
        cursor, end = number * samples, (number + 1) * samples
        while cursor < end:
            indices, cursor = self.step(cursor)
            if cursor <= end:
                yield indices


def shard_indices(indices: Some, rank: int, size: int) -> Some:
    """Return the shard of `rank`, which contains every `size`-th index, starting at position `rank`.

    The lengths of the shards differ by at most 1.
    """
    return indices[rank::size]


def shard_micro_batches(indices: Some, rank: int, size: int, micro_batches: int) -> list[Some]:
    """Return the shard of `rank`, split into micro-batches.

    Micro-batch j is the shard that rank `rank + size * j` would receive in a world of `size * micro_batches` ranks.
    Therefore, the set of all ranks' micro-batches depends only on the product `size * micro_batches`.
    """
    return [shard_indices(indices, rank + size * number, size * micro_batches) for number in range(micro_batches)]


def global_micro_batch_sizes(count: int, size: int, micro_batches: int) -> list[int]:
    """Return the total size of each micro-batch over all ranks, for a step of `count` samples."""
    return [
        sum(len(range(size * j + rank, count, size * micro_batches)) for rank in range(size))
        for j in range(micro_batches)
    ]
