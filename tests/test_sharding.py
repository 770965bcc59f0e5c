"""Which rank sees which sample when: for all sizes."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding import deal, epoch_order, take
from ddp_tutorial.sources import Batch, ShardedSource, count_samples, read_batch
from ddp_tutorial.world import World

CONTEXT = 3
CPU = torch.device("cpu")

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**31 - 1)
worlds = st.integers(1, 8)


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size)


def source(samples: int, batch: int, seed: int, rank: int = 0, size: int = 1) -> ShardedSource:
    """A source over tokens 0, 1, 2 ..., so that the first token of a sample tells its index."""
    return ShardedSource(torch.arange(samples * CONTEXT + 1), CONTEXT, batch, seed, world_of(rank, size))


def indices_of(batches: list[Batch]) -> list[int]:
    return [int(first) // CONTEXT for batch in batches for first in batch.inputs[:, 0]]


# ------------------------------------------------------------------------------------------- the order of samples


@given(sizes, seeds, st.integers(0, 2**20))
def test_the_order_of_an_epoch_is_a_permutation_and_the_same_each_time(samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(samples, seed, epoch).clone()
    assert sorted(order.tolist()) == list(range(samples))
    epoch_order.cache_clear()
    torch.manual_seed(epoch)  # whatever the state of the process
    assert torch.equal(order, epoch_order(samples, seed, epoch))


@given(seeds, st.integers(0, 1000))
def test_the_order_differs_between_epochs_and_between_seeds(seed: int, epoch: int) -> None:
    order = epoch_order(100, seed, epoch)  # 100! orders: two that are equal by chance do not happen
    assert not torch.equal(order, epoch_order(100, seed, epoch + 1))
    assert not torch.equal(order, epoch_order(100, (seed + 1) % 2**31, epoch))


def test_drawing_an_order_leaves_the_random_numbers_of_the_process_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    epoch_order(1234, 5, 6)
    assert torch.equal(before, torch.get_rng_state())


@given(st.integers(1, 40), seeds, st.integers(0, 300), st.integers(0, 150))
def test_take_is_a_slice_of_all_epochs_put_end_to_end(samples: int, seed: int, cursor: int, count: int) -> None:
    epochs = (cursor + count) // samples + 1
    sequence = torch.cat([epoch_order(samples, seed, epoch) for epoch in range(epochs)])
    taken = take(samples, seed, cursor, count)
    assert taken.dtype == torch.int64
    assert torch.equal(taken, sequence[cursor : cursor + count])


@given(sizes, worlds)
def test_dealing_gives_each_to_one_rank_and_lengths_differ_by_one_at_most(count: int, size: int) -> None:
    indices = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    hands = [deal(indices, rank, size).tolist() for rank in range(size)]
    assert Counter(index for hand in hands for index in hand) == Counter(indices.tolist())
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    assert len(hands[0]) == max(map(len, hands))


def test_dealing_is_like_cards() -> None:
    indices = torch.tensor([7, 2, 5, 0, 3])
    assert [deal(indices, rank, 2).tolist() for rank in range(2)] == [[7, 5, 3], [2, 0]]


# ------------------------------------------------------------------------------------------------- steps of a world


@given(st.data(), st.integers(1, 60), worlds, seeds)
def test_every_sample_is_seen_exactly_once_an_epoch(data: st.DataObject, samples: int, size: int, seed: int) -> None:
    batch = data.draw(st.integers(1, samples), label="batch")
    ranks = [source(samples, batch, seed, rank, size) for rank in range(size)]
    seen: list[int] = []
    while len(seen) < 3 * samples:  # a step's samples are next to one another in the sequence, whoever has them
        seen += sorted(index for rank in ranks for index in indices_of(next(rank)))
    step_of = {position: position // batch for position in range(len(seen))}
    sequence = take(samples, seed, 0, len(seen)).tolist()
    for step in set(step_of.values()):
        there = [position for position, its in step_of.items() if its == step]
        assert Counter(seen[i] for i in there) == Counter(sequence[i] for i in there)
    for epoch in range(3):
        assert sorted(sequence[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(st.data(), st.integers(1, 60), seeds)
def test_each_step_has_the_same_samples_for_every_world_size(data: st.DataObject, samples: int, seed: int) -> None:
    batch = data.draw(st.integers(1, samples), label="batch")
    alone = source(samples, batch, seed)
    ranks = {size: [source(samples, batch, seed, rank, size) for rank in range(size)] for size in (2, 3, 4)}
    for _ in range(5):
        wanted = Counter(indices_of(next(alone)))
        assert sum(wanted.values()) == batch
        for sources in ranks.values():
            assert sum((Counter(indices_of(next(each))) for each in sources), Counter()) == wanted


@given(st.data(), st.integers(1, 60), worlds)
def test_the_tokens_of_the_world_are_those_of_its_ranks(data: st.DataObject, samples: int, size: int) -> None:
    batch = data.draw(st.integers(1, samples), label="batch")
    for batches in zip(*(next(source(samples, batch, 0, rank, size)) for rank in range(size)), strict=True):
        total = sum(each.targets.numel() for each in batches)
        assert [each.world_tokens for each in batches] == [total] * size
        assert total == batch * CONTEXT


@given(st.data(), st.integers(1, 40), st.integers(0, 20), seeds)
def test_a_fresh_source_goes_on_where_another_stood(data: st.DataObject, samples: int, k: int, seed: int) -> None:
    batch = data.draw(st.integers(1, samples), label="batch")
    first = source(samples, batch, seed)
    for _ in range(k):
        next(first)
    fresh = source(samples, batch, seed)
    fresh.restore(first.state())
    for _ in range(5):
        [wanted], [found] = next(first), next(fresh)
        assert torch.equal(wanted.inputs, found.inputs)
        assert torch.equal(wanted.targets, found.targets)
        assert first.state() == fresh.state()


@given(st.data(), st.integers(1, 40), seeds)
def test_the_order_survives_a_change_of_world_size_from_4_to_2_to_3(
    data: st.DataObject, samples: int, seed: int
) -> None:
    batch = data.draw(st.integers(1, samples), label="batch")
    alone = source(samples, batch, seed)
    state = alone.state()
    for size in (4, 2, 3):
        ranks = [source(samples, batch, seed, rank, size) for rank in range(size)]
        for each in ranks:
            each.restore(state)
        for _ in range(4):
            seen = sum((Counter(indices_of(next(each))) for each in ranks), Counter())
            assert seen == Counter(indices_of(next(alone)))
        assert len({str(each.state()) for each in ranks}) == 1
        state = ranks[0].state()


# ---------------------------------------------------------------------------------------------------- what is read


def test_targets_are_inputs_shifted_by_one() -> None:
    batch = read_batch(torch.arange(100, 120, dtype=torch.uint8), 4, torch.tensor([2, 0]), 2, CPU)
    assert batch.inputs.tolist() == [[108, 109, 110, 111], [100, 101, 102, 103]]
    assert batch.targets.tolist() == [[109, 110, 111, 112], [101, 102, 103, 104]]
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.world_tokens == 8


@pytest.mark.parametrize(("length", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (401, 100)])
def test_a_sample_needs_one_token_more_than_its_context(length: int, samples: int) -> None:
    tokens = torch.arange(length)
    assert count_samples(tokens, 4) == samples
    if samples:
        last = read_batch(tokens, 4, torch.tensor([samples - 1]), 1, CPU)
        assert last.targets.shape == (1, 4)


def test_a_corpus_too_small_for_one_batch_is_told_so() -> None:
    assert len(indices_of(next(source(5, 5, 0)))) == 5
    with pytest.raises(ConfigError, match="has 4 samples of 3 tokens, too few for one batch of 5"):
        source(4, 5, 0)
