"""The assignment of samples to ranks and steps, for all sizes."""

import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding.config import Remainder
from ddp_tutorial.sharding.permutation import (
    BLOCK,
    GlobalBatchSampler,
    Permutation,
    global_micro_batch_sizes,
    shard_indices,
    shard_micro_batches,
)

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**31 - 1)
worlds = st.integers(1, 8)


# ------------------------------------------------------------------------------------------- the order of samples

windows = st.none() | st.integers(1, 60)


@given(sizes, seeds, st.integers(0, 2**20), windows)
def test_the_order_of_an_epoch_is_a_reproducible_permutation(
    samples: int, seed: int, epoch: int, window: int | None
) -> None:
    order = Permutation(samples, seed, window)
    placed = order(epoch, np.arange(samples))
    assert placed.dtype == np.int64
    assert sorted(placed.tolist()) == list(range(samples))
    np.random.seed(epoch)  # regardless of the state of the process
    assert np.array_equal(Permutation(samples, seed, window)(epoch, np.arange(samples)), placed)


@given(st.integers(1, 10**9), st.integers(0, 2**20), seeds, windows)
def test_any_position_of_a_large_order_is_computed_independently(
    samples: int, epoch: int, seed: int, window: int | None
) -> None:
    order = Permutation(samples, seed, window)
    places = np.unique(np.linspace(0, samples - 1, 50).astype(np.int64))
    together = order(epoch, places)
    assert len(set(together.tolist())) == len(places)
    assert together.min() >= 0
    assert together.max() < samples
    assert [int(order(epoch, places[i : i + 1])[0]) for i in range(len(places))] == together.tolist()


@pytest.mark.parametrize("window", [None, 20])
@given(seeds, st.integers(0, 1000))
def test_the_order_depends_on_epoch_and_seed(window: int | None, seed: int, epoch: int) -> None:
    def drawn(seed: int, epoch: int) -> list[int]:
        return Permutation(100, seed, window)(epoch, np.arange(100)).tolist()

    assert drawn(seed, epoch) != drawn(seed, epoch + 1)
    assert drawn(seed, epoch) != drawn(seed + 1, epoch)


@pytest.mark.parametrize(("samples", "window"), [(2, None), (3, None), (7, None), (16, None), (100, None), (64, 16)])
def test_a_sample_is_equally_likely_at_any_position(samples: int, window: int | None) -> None:
    """Pearson's chi-squared statistic over many epochs is close to its degrees of freedom for a fair shuffle."""
    epochs = 4000
    found = np.zeros((samples, samples))
    for epoch in range(epochs):
        found[np.arange(samples), Permutation(samples, 1, window)(epoch, np.arange(samples))] += 1
    expected, freedom = epochs / samples, (samples - 1) ** 2
    assert ((found - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5 + 5


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    """A run that an earlier version saved resumes in this order."""
    assert Permutation(12, 0)(0, np.arange(12)).tolist() == [0, 1, 11, 2, 9, 5, 7, 8, 3, 6, 10, 4]
    assert Permutation(12, 7, window=4)(3, np.arange(12)).tolist() == [4, 6, 7, 5, 0, 1, 2, 3, 8, 11, 9, 10]


def test_neighbors_are_separated() -> None:
    """With a poor hash, neighboring samples would often stay neighbors."""
    order = Permutation(10_000, 0)(0, np.arange(10_000))
    assert np.sum(np.abs(np.diff(order)) == 1) < 15  # 2 of 10,000 pairs by chance, times 10,000: two, more or less


def test_windows_are_read_one_after_another() -> None:
    samples, window = 1000, 64
    order = Permutation(samples, 3, window)(0, np.arange(samples))
    starts = []
    for first in range(0, samples, window):
        rows = order[first : first + window]
        begin = next(row for row in rows if (row - 1) % samples not in rows)
        assert sorted((rows - begin) % samples) == list(range(len(rows))), "a run of neighbours, in some order"
        assert (rows - begin).tolist() != sorted(rows - begin)
        starts.append(begin)
    assert starts != sorted(starts)


def test_without_a_seed_samples_keep_their_order() -> None:
    assert Permutation(5, None).take(3, 7).tolist() == [3, 4, 0, 1, 2, 3, 4]


def test_an_order_of_a_billion_samples_requires_no_list() -> None:
    order = Permutation(10**9, 0)
    tracemalloc.start()
    taken = order.take(10**9 - 5, 10)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()
    assert len(set(taken.tolist())) == 10


@given(st.integers(1, 40), seeds, st.integers(0, 300), st.integers(0, 150), windows)
def test_take_is_a_slice_of_the_concatenated_epochs(
    samples: int, seed: int, cursor: int, count: int, window: int | None
) -> None:
    order = Permutation(samples, seed, window)
    sequence = np.concatenate([order(e, np.arange(samples)) for e in range((cursor + count) // samples + 1)])
    taken = order.take(cursor, count)
    assert taken.dtype == np.int64
    assert taken.tolist() == sequence[cursor : cursor + count].tolist()


@given(st.integers(BLOCK - 10, 2 * BLOCK + 10), st.integers(0, 4 * BLOCK), st.integers(0, 2 * BLOCK))
def test_the_block_size_does_not_affect_the_order(samples: int, cursor: int, count: int) -> None:
    order = Permutation(samples, 0)
    epochs = [order(epoch, np.arange(samples)) for epoch in range((cursor + count) // samples + 1)]
    assert np.array_equal(order.take(cursor, count), np.concatenate(epochs)[cursor : cursor + count])


def test_taken_indices_cannot_be_modified_for_others() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Permutation(100, 0).take(0, 5)[0] = 1


# ------------------------------------------------------------------------------------- the remainder of an epoch


@given(st.integers(1, 60), st.integers(1, 25), seeds, windows, st.integers(0, 3))
def test_an_exact_epoch_contains_every_sample_once(
    samples: int, batch: int, seed: int, window: int | None, epoch: int
) -> None:
    steps = list(GlobalBatchSampler(Permutation(samples, seed, window), batch, "exact").epoch(epoch))
    assert sorted(np.concatenate(steps).tolist()) == list(range(samples))
    assert [len(step) for step in steps] == [batch] * (samples // batch) + [samples % batch] * (samples % batch > 0)


@given(st.integers(1, 60), st.integers(1, 25), worlds, seeds, st.integers(0, 3))
def test_a_padded_epoch_repeats_only_its_first_samples(
    samples: int, batch: int, size: int, seed: int, epoch: int
) -> None:
    order = Permutation(samples, seed)
    first = order(epoch, np.arange(samples)).tolist()
    counts = Counter[int]()
    for step in GlobalBatchSampler(order, batch, "pad", size).epoch(epoch):
        shards = [shard_indices(step, rank, size) for rank in range(size)]
        assert len({len(shard) for shard in shards}) == 1, "all shards have the same length"
        counts.update(step.tolist())
    sizes_of_steps = [batch] * (samples // batch) + [samples % batch] * (samples % batch > 0)
    expected = Counter(first)
    for length in sizes_of_steps:
        expected.update([first[i % samples] for i in range(-length % size)])
    assert counts == expected


@given(st.integers(1, 60), st.integers(1, 25), seeds, st.integers(0, 3))
def test_a_dropped_remainder_is_less_than_a_batch_and_varies_by_epoch(
    samples: int, batch: int, seed: int, epoch: int
) -> None:
    if samples < batch:
        with pytest.raises(ValueError, match=rf"the dataset must contain at least {batch} samples \(one batch\)"):
            GlobalBatchSampler(Permutation(samples, seed), batch, "drop")
        return
    sharding = GlobalBatchSampler(Permutation(samples, seed), batch, "drop")
    steps = list(sharding.epoch(epoch))
    assert [len(step) for step in steps] == [batch] * (samples // batch)
    assert len(set(np.concatenate(steps).tolist())) == samples // batch * batch


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 8), seeds, st.booleans())
def test_padding_equals_that_of_distributed_sampler(
    samples: int, each: int, size: int, epoch: int, shuffle: bool
) -> None:
    """The comparison is by rank and batch, with the same order."""
    order = Permutation(samples, 0 if shuffle else None)
    places = order(epoch, np.arange(samples)).tolist()
    for rank in range(size):
        sampler = DistributedSampler(places, size, rank, shuffle=False)  # type: ignore[arg-type]
        theirs = [places[i] for i in sampler]
        ours = [
            shard_indices(step, rank, size).tolist()
            for step in GlobalBatchSampler(order, each * size, "pad", size).epoch(epoch)
        ]
        assert ours == [theirs[i : i + each] for i in range(0, len(theirs), each)]


@pytest.mark.parametrize("remainder", ["carry", "exact", "pad", "drop"])
@given(st.integers(1, 30), st.integers(1, 12), seeds, st.integers(0, 12))
def test_steps_continue_from_any_cursor_across_epochs(
    remainder: Remainder, samples: int, batch: int, seed: int, k: int
) -> None:
    if remainder == "drop" and samples < batch:
        return
    sharding, cursor, steps = GlobalBatchSampler(Permutation(samples, seed), batch, remainder, 3), 0, []
    for _ in range(k):
        indices, cursor = sharding.step(cursor)
        steps.append(indices.tolist())
    if remainder == "carry":
        assert cursor == k * batch
        assert sharding.steps_per_epoch == samples / batch
        assert list(chain.from_iterable(steps)) == sharding.order.take(0, cursor).tolist()
        return
    epochs = [step.tolist() for epoch in range(k + 1) for step in sharding.epoch(epoch)]
    assert steps == epochs[:k]
    assert len(list(sharding.epoch(k))) == sharding.steps_per_epoch


@pytest.mark.parametrize("remainder", ["carry", "exact", "drop"])
@given(st.integers(1, 30), st.integers(1, 12), st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=12))
def test_a_step_has_the_same_samples_for_any_world_size(
    remainder: Remainder, samples: int, batch: int, worlds_in_turn: list[int]
) -> None:
    if remainder == "drop" and samples < batch:
        return
    order = Permutation(samples, 5)
    alone, cursor = 0, 0
    for size in worlds_in_turn:
        wanted, alone = GlobalBatchSampler(order, batch, remainder).step(alone)
        found, cursor = GlobalBatchSampler(order, batch, remainder, size).step(cursor)
        assert np.array_equal(wanted, found)
        assert alone == cursor


def test_an_empty_dataset_has_no_steps() -> None:
    with pytest.raises(ConfigError, match="the dataset must contain at least 1 sample, got 0"):
        GlobalBatchSampler(Permutation(0, 0), 1)
    with pytest.raises(ConfigError, match="'batch_size' must be at least 1, got 0"):
        GlobalBatchSampler(Permutation(1, 0), 0)


# ----------------------------------------------------------------------------------------------- shards of a batch


@given(sizes, worlds)
def test_sharding_gives_each_sample_to_one_rank_evenly(count: int, size: int) -> None:
    indices = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    shards = [shard_indices(indices, rank, size).tolist() for rank in range(size)]
    assert Counter(index for shard in shards for index in shard) == Counter(indices.tolist())
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert len(shards[0]) == max(map(len, shards))


def test_sharding_is_round_robin() -> None:
    indices = torch.tensor([7, 2, 5, 0, 3])
    assert [shard_indices(indices, rank, 2).tolist() for rank in range(2)] == [[7, 5, 3], [2, 0]]


@given(st.integers(0, 50), st.integers(1, 8), st.integers(1, 9))
def test_micro_batches_contain_each_sample_of_a_rank_once(samples: int, size: int, count: int) -> None:
    for rank in range(size):
        parts = shard_micro_batches(torch.arange(samples), rank, size, count)
        assert len(parts) == count
        found = Counter(chain.from_iterable(part.tolist() for part in parts))
        assert found == Counter(shard_indices(torch.arange(samples), rank, size).tolist())
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 50), st.integers(1, 8), st.integers(1, 9))
def test_every_rank_knows_the_global_size_of_each_micro_batch(samples: int, size: int, count: int) -> None:
    ranks = [shard_micro_batches(torch.arange(samples), rank, size, count) for rank in range(size)]
    assert global_micro_batch_sizes(samples, size, count) == [
        sum(map(len, parts)) for parts in zip(*ranks, strict=True)
    ]


@given(st.integers(0, 60), st.integers(0, 3), st.integers(0, 3))
def test_micro_batches_of_a_step_do_not_depend_on_the_world_size(samples: int, a: int, b: int) -> None:
    def numbered(size: int, count: int) -> dict[int, list[int]]:
        return {
            rank + size * number: part.tolist()
            for rank in range(size)
            for number, part in enumerate(shard_micro_batches(torch.arange(samples), rank, size, count))
        }

    assert numbered(2**a, 2**b) == numbered(1, 2 ** (a + b)) == numbered(2 ** (a + b), 1)
