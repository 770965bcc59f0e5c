"""Every source yields every sample once on any number of ranks, resumes anywhere, and reports failures on all ranks."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import datasets
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_tutorial.compat import tree_flatten, worker_processes
from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.sharding import dispatched, sharded, sources
from ddp_tutorial.sharding.config import Remainder, SourceConfig
from ddp_tutorial.sharding.dispatched import DispatchedSource, pack, unpack
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation
from ddp_tutorial.sharding.samples import (
    ArrowShards,
    Data,
    Rows,
    TokenBlocks,
    as_shards,
    select_rows,
    write_arrow,
)
from ddp_tutorial.sharding.sharded import ShardedSource, to_device
from ddp_tutorial.sharding.source import Source, SourceState, Tree
from ddp_tutorial.sharding.sources import SINGLE_PROCESS, check_source, make_source
from ddp_tutorial.sharding.streamed import StreamedSource
from ddp_tutorial.sharding.workers import SourceError, WorkerBatches, too_many_workers
from ddp_tutorial.world import World
from ranks import is_gone, wait_until

CONTEXT = 3
KINDS = ["sharded", "dispatched", "fast_stream", "streamed"]

worlds = st.integers(1, 8)
seeds = st.integers(0, 2**31 - 1)


def blocks_of(samples: int) -> TokenBlocks:
    """Return samples of tokens 0, 1, 2 ..., so that the first token of a sample identifies it."""
    return TokenBlocks(torch.arange(samples * CONTEXT + 1), CONTEXT)


def numbers(tree: Tree) -> list[int]:
    return [int(first) // CONTEXT for first in tree["tokens"][:, 0]]


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size)


def test_a_warning_appears_if_workers_outnumber_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert too_many_workers(0, 8, 2) is None
    assert too_many_workers(3, 4, 16) is None
    warning = too_many_workers(8, 4, 16)
    assert warning is not None
    assert "starts 32 worker processes on this machine, in addition to 4 ranks on 16 cores. Use" in warning
    assert "Use source.workers=3" in warning
    assert "Use source.workers=0" in str(too_many_workers(2, 4, 2))
    monkeypatch.setattr(sources, "cores", lambda: 1)
    for workers, warned in ((1, False), (2, True)):
        make_source(range(8), 4, World(), config=SourceConfig(workers=workers)).close()
        assert ("source.workers=2" in caplog.text) == warned


def test_a_source_is_checked_without_its_ranks() -> None:
    blocks, three = blocks_of(4), world_of(0, 3)
    check_source(blocks, 3, three, SourceConfig(kind="sharded"))
    check_source(blocks, 4, three, SourceConfig(kind="streamed", streams=3))
    with pytest.raises(ConfigError, match="rank 2 of 3 has no samples: with 4 samples and batch_size 2"):
        check_source(blocks, 2, three, SourceConfig(kind="sharded"))
    with pytest.raises(ConfigError, match=r"the number of streams must be at least 3 \(one stream per rank\), got 2"):
        check_source(blocks, 4, three, SourceConfig(kind="streamed", streams=2))
    with pytest.raises(ConfigError, match=r"'batch_size' must be at least 4 \(one sample per stream\), got 3"):
        check_source(blocks, 3, three, SourceConfig(kind="streamed"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_seed_is_rejected_before_the_first_step(kind: str, workdir: Path) -> None:
    with pytest.raises(ConfigError, match="'seed' must be None or at least 0, got -1"):
        make_source(blocks_of(8), 4, World(), seed=-1, config=SourceConfig(kind=kind))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'seed' must be None or at least 0, got -1"):
        Permutation(8, -1)
    with pytest.raises(ConfigError, match="'seed' must be None or at least 0, got -1"):
        StreamedSource(stream_of(8), 4, World(), seed=-1)


def test_a_source_prefetches_at_least_one_batch() -> None:
    sharding = GlobalBatchSampler(Permutation(8, 0), 4)
    with pytest.raises(ConfigError, match="'prefetch' must be at least 1, got 0"):
        ShardedSource(blocks_of(8), sharding, SINGLE_PROCESS, workers=1, prefetch=0)
    with pytest.raises(ConfigError, match="'prefetch' must be at least 1, got 0"):
        DispatchedSource(lambda: ShardedSource(blocks_of(8), sharding, SINGLE_PROCESS), SINGLE_PROCESS, prefetch=0)


# ------------------------------------------------------------------------ arithmetic and reading, all in one process


def ranks_of(data: Data, sharding: GlobalBatchSampler, size: int) -> list[ShardedSource]:
    return [ShardedSource(data, sharding, world_of(rank, size)) for rank in range(size)]


def step_of(ranks: list[ShardedSource]) -> Counter[int]:
    """Return the next step of all ranks together."""
    shares = [next(rank) for rank in ranks]
    found = [numbers(share.samples) for share in shares]
    assert [len(each) for each in found] == [share.count for share in shares]
    assert {share.global_count for share in shares} == {sum(share.count for share in shares)}
    assert len({str(rank.state_dict()) for rank in ranks}) == 1
    return Counter(number for each in found for number in each)


def data_of(kind: str, samples: int, files: int, folder: Path) -> Data:
    blocks = blocks_of(samples)
    if kind == "blocks":
        return blocks
    if kind == "rows":
        return Rows([{"tokens": blocks.fetch(np.array([i]))["tokens"][0]} for i in range(samples)])
    ends = sorted(np.random.default_rng(samples).integers(0, samples, files - 1, endpoint=True).tolist())
    paths = [folder / f"{i}.arrow" for i in range(files)]
    for path, part in zip(paths, np.split(np.arange(samples), ends), strict=True):  # some shards may be empty
        write_arrow(path, {"tokens": blocks.fetch(part)["tokens"].numpy()}, rows_a_batch=7)
    return ArrowShards(paths)


@given(
    draw=st.data(),
    kind=st.sampled_from(["blocks", "rows", "arrow"]),
    remainder=st.sampled_from(["carry", "exact", "pad", "drop"]),
    size=worlds,
    files=st.integers(1, 5),
    window=st.none() | st.integers(1, 20),
    seed=seeds,
)
def test_an_epoch_contains_the_dataset_up_to_the_remainder_policy(
    tmp_path_factory: pytest.TempPathFactory,
    draw: st.DataObject,
    kind: str,
    remainder: Remainder,
    size: int,
    files: int,
    window: int | None,
    seed: int,
) -> None:
    samples = draw.draw(st.integers(size, 40), label="samples")
    batch = draw.draw(st.integers(size, 45 if remainder != "drop" else samples), label="batch")
    order = Permutation(samples, seed, window)
    data = data_of(kind, samples, files, tmp_path_factory.mktemp("data"))
    ranks = ranks_of(data, GlobalBatchSampler(order, batch, remainder, size), size)
    once = Counter(range(samples))
    if remainder == "carry":  # so many steps make `batch` epochs
        assert sum((step_of(ranks) for _ in range(samples)), Counter()) == Counter(dict.fromkeys(once, batch))
        return
    for epoch in range(2):
        steps = samples // batch if remainder == "drop" else -(-samples // batch)
        seen = sum((step_of(ranks) for _ in range(steps)), Counter())
        first = order(epoch, np.arange(samples)).tolist()
        left = samples % batch
        if remainder == "exact":
            assert seen == once
        elif remainder == "drop":
            assert seen == Counter(first[: samples - left])
        else:
            lengths = [batch] * (samples // batch) + [left] * (left > 0)
            again = [first[i % samples] for length in lengths for i in range(-length % size)]
            assert seen == once + Counter(again)
    assert next(ranks[0]).count > 0


@pytest.mark.parametrize("remainder", ["carry", "exact", "pad", "drop"])
@given(size=worlds, samples=st.integers(8, 40), batch=st.integers(8, 16), k=st.integers(0, 12), seed=seeds)
def test_a_new_source_resumes_where_a_different_one_stopped(
    remainder: Remainder, size: int, samples: int, batch: int, k: int, seed: int
) -> None:
    batch = min(batch, samples)
    sharding = GlobalBatchSampler(Permutation(samples, seed), batch, remainder, size)
    for rank in range(size):
        first, fresh = (ShardedSource(blocks_of(samples), sharding, world_of(rank, size)) for _ in range(2))
        for _ in range(k):
            next(first)
        fresh.load_state_dict(first.state_dict())
        for _ in range(3):
            wanted, found = next(first), next(fresh)
            assert torch.equal(wanted.samples["tokens"], found.samples["tokens"])
            assert (wanted.count, wanted.global_count) == (found.count, found.global_count)
            assert first.state_dict() == fresh.state_dict()


@given(samples=st.integers(4, 40), batch=st.integers(4, 12), seed=seeds, window=st.none() | st.integers(1, 20))
def test_the_order_survives_a_change_of_world_size_from_4_to_2_to_3(
    samples: int, batch: int, seed: int, window: int | None
) -> None:
    data, sharding = blocks_of(samples), GlobalBatchSampler(Permutation(samples, seed, window), batch)
    alone = ranks_of(data, sharding, 1)
    state = alone[0].state_dict()
    for size in (4, 2, 3):
        ranks = ranks_of(data, sharding, size)
        for rank in ranks:
            rank.load_state_dict(state)
        for _ in range(4):
            assert step_of(ranks) == step_of(alone)
        state = ranks[0].state_dict()


def test_a_source_can_return_to_an_earlier_position() -> None:
    source = ShardedSource(blocks_of(20), GlobalBatchSampler(Permutation(20, 0), 3), SINGLE_PROCESS)
    steps = [numbers(next(source).samples) for _ in range(5)]
    source.load_state_dict({"cursor": 6})
    assert numbers(next(source).samples) == steps[2]
    assert source.state_dict() == {"cursor": 9}


def test_reading_does_not_affect_the_random_numbers_of_the_process() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    next(ShardedSource(blocks_of(20), GlobalBatchSampler(Permutation(20, 0), 3), SINGLE_PROCESS))
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("samples", "batch", "remainder", "told"),
    [
        (
            3,
            1,
            "carry",
            "rank 1 of 4 has no samples: with 3 samples and batch_size 1, at most 1 ranks",
        ),
        (3, 4, "exact", "rank 3 of 4 has no samples: with 3 samples and batch_size 4, at most 3 ranks"),
        (100, 2, "pad", "rank 2 of 4 has no samples: with 100 samples and batch_size 2"),
    ],
)
def test_a_rank_without_samples_is_named_on_every_rank(
    samples: int, batch: int, remainder: Remainder, told: str
) -> None:
    for rank in range(4):
        with pytest.raises(ConfigError, match=told):
            ShardedSource(
                blocks_of(samples), GlobalBatchSampler(Permutation(samples, 0), batch, remainder, 4), world_of(rank, 4)
            )


def test_padding_gives_four_ranks_three_samples() -> None:
    ranks = ranks_of(blocks_of(3), GlobalBatchSampler(Permutation(3, None), 4, "pad", 4), 4)
    assert [numbers(next(rank).samples) for rank in ranks] == [[0], [1], [2], [0]]


def test_steps_longer_than_an_epoch_span_several_epochs() -> None:
    ranks = ranks_of(blocks_of(3), GlobalBatchSampler(Permutation(3, None), 4), 4)
    assert [numbers(next(rank).samples) for rank in ranks for _ in range(2)] == [[0], [1], [1], [2], [2], [0], [0], [1]]


def test_an_order_for_a_different_dataset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="the data must contain 21 samples to match the permutation, got 20"):
        ShardedSource(blocks_of(20), GlobalBatchSampler(Permutation(21, 0), 3), SINGLE_PROCESS)


def fail_at(number: int) -> Callable[[Tree], Tree]:
    def transform(tree: Tree) -> Tree:
        if number in numbers(tree):
            raise ValueError(f"sample {number} is a bad one")
        return tree

    return transform


def test_a_failed_step_can_be_retried_and_is_not_counted() -> None:
    broken = [True]

    def transform(tree: Tree) -> Tree:
        if broken[0] and 4 in numbers(tree):
            raise ValueError("a bad one")
        return tree

    source = ShardedSource(
        blocks_of(9), GlobalBatchSampler(Permutation(9, None), 3), SINGLE_PROCESS, transform=transform
    )
    assert numbers(next(source).samples) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(SourceError, match=r"^rank 0, samples 3 to 5 \(3 of them\): a bad one"):
            next(source)
        assert source.state_dict() == {"cursor": 3}
    broken[0] = False
    assert numbers(next(source).samples) == [3, 4, 5]


# ----------------------------------------------------------------------------------------- streams, in one process


@pytest.mark.parametrize("kind", ["sharded", "dispatched", "streamed"])
def test_an_interrupted_step_is_read_again(kind: str) -> None:
    interrupts = [True]

    def transform(tree: Tree) -> Tree:
        if 4 in tree["x"] and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return tree

    data = stream_of(9) if kind == "streamed" else [{"x": number} for number in range(9)]
    config = SourceConfig(kind=kind)  # type: ignore[arg-type]
    source = make_source(data, 3, SINGLE_PROCESS, seed=None, config=config, transform=transform)
    assert take(source, 1) == [[0, 1, 2]]
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert take(source, 2) == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_dispatched_step_that_fails_after_reading_is_read_again(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Tree:
        monkeypatch.setattr(dispatched, "select_rows", select_rows)
        raise error

    data = [{"x": number} for number in range(9)]
    source = make_source(data, 3, SINGLE_PROCESS, seed=None, config=SourceConfig(kind="dispatched"))
    assert take(source, 1) == [[0, 1, 2]]
    monkeypatch.setattr(dispatched, "select_rows", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else SourceError):
        next(source)
    assert take(source, 2) == [[3, 4, 5], [6, 7, 8]]


def test_a_closed_source_continues_at_the_next_sample(workdir: Path) -> None:
    for kind in KINDS:
        source = make_source(blocks_of(40), 4, SINGLE_PROCESS, seed=None, config=SourceConfig(kind=kind, streams=4))  # type: ignore[arg-type]
        taken = []
        for _ in range(3):
            taken += numbers(next(source).samples)
            source.close()
        assert len(set(taken)) == 12, kind
        if kind != "streamed":
            assert taken == list(range(12)), kind


def stream_of(*lengths: int) -> Any:
    """Return a stream with one shard per length; samples are numbered."""
    ends = np.cumsum((0, *lengths)).tolist()

    def rows(shards: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
        for start, end in shards:
            for number in range(start, end):
                yield {"x": number}

    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(pairwise(ends))})


def take(source: Source, steps: int) -> list[list[int]]:
    return [share.samples["x"].tolist() for share in islice(iter(lambda: next(source), None), steps)]


@pytest.mark.parametrize("lengths", [(7,), (4, 4), (9, 1, 2), (3, 3, 3, 3, 3)])
@pytest.mark.parametrize("streams", [None, 1, 2, 3, 5])
def test_streams_contain_every_sample_once_and_resume_at_every_step(
    lengths: tuple[int, ...], streams: int | None
) -> None:
    samples, batch = sum(lengths), 5

    def fresh() -> StreamedSource:
        return StreamedSource(stream_of(*lengths), batch, SINGLE_PROCESS, streams=streams, seed=1, shuffle_buffer=4)

    source = fresh()
    steps, states = [], [source.state_dict()]
    while states[-1]["epoch"] < 3:
        steps += take(source, 1)
        states.append(source.state_dict())
    epochs = [[x for step, at in zip(steps, states[1:], strict=True) if at["epoch"] == e for x in step] for e in (0, 1)]
    for epoch in (0, 1, 2)[: len(epochs)]:
        assert sorted(epochs[epoch]) == list(range(samples))
    assert epochs[0] != epochs[1]
    for k, state in enumerate(states[:-1]):
        resumed = fresh()
        resumed.load_state_dict(state)
        assert take(resumed, 2)[: len(steps) - k] == steps[k : k + 2], f"resumed after {k} steps"


def test_a_corpus_is_written_to_four_files_by_default(tmp_path: Path) -> None:
    """The number of files determines the order of a stream, so a saved run requires the same number."""
    assert len(as_shards(blocks_of(SAMPLES), tmp_path)) == 4


def test_a_stream_without_a_seed_keeps_its_order() -> None:
    assert take(StreamedSource(stream_of(5), 2, SINGLE_PROCESS, seed=None), 4) == [[0, 1], [2, 3], [4], [0, 1]]


@pytest.mark.parametrize(
    ("lengths", "batch", "streams", "size", "told"),
    [
        ((0,), 2, None, 1, "the dataset is empty: none of its streams contains a sample"),
        ((0, 0), 2, None, 1, "the dataset is empty: none of its streams contains a sample"),
        ((5,), 2, 1, 2, r"the number of streams must be at least 2 \(one stream per rank\), got 1"),
        ((5, 5, 5), 2, None, 1, r"'batch_size' must be at least 3 \(one sample per stream\), got 2"),
    ],
)
def test_an_impossible_stream_is_reported(
    lengths: tuple[int, ...],
    batch: int,
    streams: int | None,
    size: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddp_tutorial.sharding.streamed.require_group", lambda _: None)
    with pytest.raises(ConfigError, match=told):
        next(StreamedSource(stream_of(*lengths), batch, world_of(0, size), streams=streams))


class Numbers(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"x": number} for number in range(4)])


def test_a_module_named_datasets_may_be_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("datasets")
    own.IterableDataset = IterableDataset  # type: ignore[attr-defined]  # imported by the user's module
    monkeypatch.setitem(sys.modules, "datasets", own)
    assert sorted(take(StreamedSource(Numbers(), 4, SINGLE_PROCESS), 1)[0]) == [0, 1, 2, 3]


def test_a_stream_that_fails_is_reported_with_its_places() -> None:
    def transform(tree: Tree) -> Tree:
        if 4 in tree["x"]:
            raise ValueError("a bad one")
        return tree

    source = StreamedSource(stream_of(9), 3, SINGLE_PROCESS, seed=None, transform=transform)
    assert take(source, 1) == [[0, 1, 2]]
    with pytest.raises(SourceError, match=r"^rank 0, positions 3 to 5 of epoch 0: a bad one"):
        next(source)
    assert source.state_dict()["places"] == 3


def test_a_stream_of_text_is_rejected_with_advice() -> None:
    dataset = datasets.Dataset.from_dict({"x": [1, 2], "text": ["a", "b"]}).to_iterable_dataset()
    with pytest.raises(SourceError, match=r"'text' of type str, not a tensor\. .*dataset\.select_columns"):
        next(StreamedSource(dataset, 2, SINGLE_PROCESS))
    assert len(take(StreamedSource(dataset.select_columns("x"), 2, SINGLE_PROCESS), 2)) == 2


# ------------------------------------------------------------------------------------------------- what travels


class Pair(NamedTuple):
    left: Any
    right: Any


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda shape, dtype, turned: torch.randint(0, 100, shape).to(dtype).T if turned else torch.ones(shape).to(dtype),
    st.tuples(st.integers(0, 4), st.integers(0, 4)) | shapes.filter(lambda shape: len(shape) == 2),
    st.sampled_from(DTYPES),
    st.booleans(),
) | st.builds(lambda shape, dtype: torch.randint(0, 100, shape).to(dtype), shapes, st.sampled_from(DTYPES))
leaves = tensors | st.none() | st.integers() | st.text(max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_arrives_as_it_was_sent(tree: Any) -> None:
    sent, form = tree_flatten(tree)
    found, found_form = tree_flatten(unpack(pack(tree)))
    assert found_form == form
    for before, after in zip(sent, found, strict=True):
        if torch.is_tensor(before):
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert torch.equal(after, before)
        else:
            assert after == before


def test_a_batch_may_have_a_type_that_cannot_be_imported() -> None:
    class Local(NamedTuple):  # as in a notebook cell
        x: torch.Tensor

    assert unpack(pack(Local(torch.ones(2)))).x.tolist() == [1, 1]


def test_a_batch_moves_to_the_device_with_all_its_tensors() -> None:
    moved = to_device({"x": torch.ones(2), "more": (torch.ones(2, 3), "text")}, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["more"][0].is_meta
    assert moved["more"][1] == "text"


def test_a_strided_tensor_is_sent_with_the_same_values() -> None:
    whole = torch.arange(24.0).view(4, 6)
    pair = torch.complex(torch.arange(3.0), torch.ones(3))
    for tensor in (whole[::2, 1:3], whole.T, whole[:0], pair.conj(), pair.conj().imag, whole.requires_grad_()):
        found = unpack(pack({"a": tensor}))["a"]
        assert torch.equal(found, tensor)
        assert not found.requires_grad


def test_a_dispatched_source_on_one_rank_reads_directly() -> None:
    sharding = GlobalBatchSampler(Permutation(20, 0), 3, "exact")
    source = DispatchedSource(lambda: ShardedSource(blocks_of(20), sharding, SINGLE_PROCESS), SINGLE_PROCESS)
    alone = ShardedSource(blocks_of(20), sharding, SINGLE_PROCESS)
    assert source.steps_per_epoch == alone.steps_per_epoch == 7
    for _ in range(9):
        assert numbers(next(source).samples) == numbers(next(alone).samples)
        assert source.state_dict() == alone.state_dict()
    source.load_state_dict({"cursor": 3})
    alone.load_state_dict({"cursor": 3})
    assert numbers(next(source).samples) == numbers(next(alone).samples)
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dispatch"]


def test_a_dispatched_source_closes_the_source_of_rank_0() -> None:
    class Inner(ShardedSource):
        closed = 0

        def load_state_dict(self, state: SourceState) -> None:
            self.cursor = state["cursor"]

        def close(self) -> None:
            self.closed += 1

    inner = Inner(blocks_of(20), GlobalBatchSampler(Permutation(20, 0), 3), SINGLE_PROCESS)
    source = DispatchedSource(lambda: inner, SINGLE_PROCESS)
    next(source)
    source.close()
    assert inner.closed == 1


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (
            lambda tree: {"tokens": tree["tokens"][1:]},
            r"every tensor in a batch of 3 samples must have 3 rows, got 'tokens' with 2 rows\.",
        ),
        (
            lambda tree: tree | {"mean": tree["tokens"].float().mean()},
            "'tokens' with 3 rows, 'mean' without a batch dimension",
        ),
        (lambda tree: tree | {"name": ["text"] * 3}, "'tokens' with 3 rows, 'name' of type str, not a tensor. A batch"),
    ],
)
def test_a_batch_that_cannot_be_sharded_is_reported(transform: Callable[[Tree], Tree], told: str) -> None:
    inner = ShardedSource(blocks_of(20), GlobalBatchSampler(Permutation(20, 0), 3), SINGLE_PROCESS, transform=transform)
    source = DispatchedSource(lambda: inner, SINGLE_PROCESS)
    with pytest.raises(SourceError, match=told):
        next(source)
    source.close()


# ------------------------------------------------------------------------------------------------------ real ranks

SAMPLES, BATCH = 104, 8  # 13 steps per epoch
STEPS = SAMPLES // BATCH


class Read(NamedTuple):
    """The samples of one rank in each step, the global counts, and the state after each step."""

    steps: list[list[int]]
    counts: list[int]
    states: list[SourceState]


def read(source: Source, steps: int) -> Read:
    taken: list[list[int]] = []
    counts, states = [], [source.state_dict()]
    for _ in range(steps):
        share = next(source)
        assert share.samples["tokens"].shape == (share.count, CONTEXT + 1)
        assert share.samples["tokens"].dtype == torch.int64
        taken.append(numbers(share.samples))
        counts.append(share.global_count)
        states.append(source.state_dict())
    source.close()
    return Read(taken, counts, states)


def made(world: World, kind: str, samples: int = SAMPLES, batch: int = BATCH, **options: Any) -> Source:
    config = SourceConfig(kind=kind, window=16, shuffle_buffer=20, **options)
    return make_source(blocks_of(samples), batch, world, seed=7, config=config)


def left_behind() -> tuple[list[str], list[int]]:
    """Return threads that read ahead, and processes."""
    threads = [thread.name for thread in threading.enumerate() if thread.name == "dispatch"]
    return threads, [child.pid for child in psutil.Process().children()]


def tour(world: World, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind] = read(made(world, kind), 2 * STEPS)
        found[kind, "resumed"] = []
        for state in found[kind].states:
            source = made(world, kind)
            source.load_state_dict(state)
            found[kind, "resumed"].append(read(source, 2))
        found[kind, "left"] = left_behind()
        if kind != "streamed":
            for remainder in ("exact", "pad", "drop"):
                found[kind, remainder] = read(made(world, kind, 3 * BATCH + 1, remainder=remainder), 8)
    found["streamed, ragged"] = read(made(world, "streamed", SAMPLES - 3), STEPS)
    found["streamed, dealt"] = read(made(world, "streamed", streams=3), STEPS)
    return found


def all_of(ranks: list[dict[str, Any]], key: Any) -> list[Counter[int]]:
    """Return the samples of all ranks, step by step."""
    return [
        Counter(x for step in steps for x in step) for steps in zip(*(rank[key].steps for rank in ranks), strict=True)
    ]


def total(steps: list[Counter[int]]) -> Counter[int]:
    return sum(steps, Counter())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tour, 2, tmp_path_factory.mktemp("two"), device="cpu", echo=False, timeout=300)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_used_once_per_epoch_on_some_rank(kind: str, two: list[dict[str, Any]]) -> None:
    steps = all_of(two, kind)
    first, second = total(steps[:STEPS]), total(steps[STEPS:])
    assert first == second == Counter(range(SAMPLES))
    for rank in two:
        assert rank[kind].counts == [BATCH] * 2 * STEPS
        assert rank[kind].states == two[0][kind].states
        assert all(len(step) == BATCH // 2 for step in rank[kind].steps)


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_differ_on_every_rank(kind: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        steps = rank[kind].steps
        assert steps[:STEPS] != steps[STEPS:]
        assert sorted(steps[0]) != sorted(steps[STEPS])


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_at_every_step_gives_exactly_the_rest_on_every_rank(kind: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        whole = rank[kind]
        assert len(rank[kind, "resumed"]) == 2 * STEPS + 1
        for k, resumed in enumerate(rank[kind, "resumed"]):
            left = min(2, 2 * STEPS - k)
            assert resumed.steps[:left] == whole.steps[k : k + left], f"resumed after {k} steps"
            assert resumed.states[: left + 1] == whole.states[k : k + left + 1]


@pytest.mark.parametrize("key", ["", "exact", "pad", "drop"])
def test_dispatched_gives_each_rank_the_samples_of_sharded(key: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank[("dispatched", key) if key else "dispatched"] == rank[("sharded", key) if key else "sharded"]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_last_batch_of_25_samples_in_batches_of_8(kind: str, two: list[dict[str, Any]]) -> None:
    """25 = 3 x 8 + 1: the last sample is on rank 0 only, duplicated, or dropped."""
    for epoch in (slice(0, 4), slice(4, 8)):
        assert total(all_of(two, (kind, "exact"))[epoch]) == Counter(range(25))
        assert (total(all_of(two, (kind, "pad"))[epoch]) - Counter(range(25))).total() == 1
    for epoch in (slice(0, 3), slice(3, 6)):
        dropped = total(all_of(two, (kind, "drop"))[epoch])
        assert (dropped.total(), max(dropped.values())) == (24, 1)
    for rank, last in enumerate((1, 0)):
        assert [len(step) for step in two[rank][kind, "exact"].steps] == [4, 4, 4, last] * 2
        assert [len(step) for step in two[rank][kind, "pad"].steps] == [4, 4, 4, 1] * 2
        assert two[rank][kind, "exact"].counts == [8, 8, 8, 1] * 2
        assert two[rank][kind, "pad"].counts == [8, 8, 8, 2] * 2


def test_streams_of_unequal_length_end_together(two: list[dict[str, Any]]) -> None:
    """101 samples are in 4 files of 26, 25, 25 and 25."""
    steps = all_of(two, "streamed, ragged")
    assert total(steps) == Counter(range(SAMPLES - 3))
    for rank in two:
        assert rank["streamed, ragged"].counts == [BATCH] * (STEPS - 1) + [5]
        assert rank["streamed, ragged"].states[-1]["epoch"] == 0


def test_streams_that_share_files_contain_every_sample_once(two: list[dict[str, Any]]) -> None:
    steps = all_of(two, "streamed, dealt")
    assert total(steps) == Counter(range(SAMPLES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_source_leaves_no_thread_or_process(kind: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank[kind, "left"] == ([], [])


# --------------------------------------------------------------------------------------- another number of ranks


def go_on(world: World, folder: Path, states: dict[str, SourceState]) -> dict[str, Any]:
    os.chdir(folder)
    found = {}
    for kind in KINDS:
        source = made(world, kind, streams=4)
        if states:
            source.load_state_dict(states[kind])
        found[kind] = read(source, 6)
    return found


def test_4_ranks_then_2_then_3_see_the_samples_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = {kind: read(made(World(), kind, streams=4), 18) for kind in KINDS}
    states: dict[str, SourceState] = {}
    for turn, size in enumerate((4, 2, 3)):
        ranks = launch(go_on, size, tmp_path, states, device="cpu", echo=False, timeout=300)
        for kind in KINDS:
            there = slice(6 * turn, 6 * turn + 6)
            assert all_of(ranks, kind) == [Counter(step) for step in alone[kind].steps[there]], (kind, size)
            for rank in ranks:
                assert rank[kind].states == alone[kind].states[6 * turn : 6 * turn + 7]
        states = {kind: ranks[-1][kind].states[-1] for kind in KINDS}
    assert max(state["epoch"] for state in alone["streamed"].states) == 1  # so the steps span two epochs


# -------------------------------------------------------------------------------------------------------- workers


# from Python 3.12 and later, and from torch on few cores
forking = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)


def noisy(tree: Tree) -> Tree:
    """Add random numbers of torch, Python and NumPy."""
    drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return tree | {"noise": torch.tensor([drawn] * len(next(iter(tree.values()))), dtype=torch.float64)}


def noise_of(source: Source) -> list[tuple[float, ...]]:
    """Return the random numbers of the first two steps, one from each of two workers."""
    rows = [row for _ in range(2) for row in next(source).samples["noise"].tolist()]
    source.close()
    return list(dict.fromkeys(map(tuple, rows)))


def all_differ(drawn: list[tuple[float, ...]]) -> bool:
    """Check that torch's, Python's and NumPy's numbers differ. With equal numbers, augmentation would be the same."""
    return all(len({each[library] for each in drawn}) == len(drawn) for library in range(3))


def with_workers(world: World) -> dict[str, Any]:
    """Run a rank with workers, which are new processes and receive functions by value."""
    secret = 100

    def transform(tree: Tree) -> Tree:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return {"x": tree["tokens"][:, 0] + secret, "noise": torch.tensor([drawn] * len(tree["tokens"]))}

    sharding = GlobalBatchSampler(Permutation(SAMPLES, None), BATCH)
    source = ShardedSource(blocks_of(SAMPLES), sharding, world, transform=transform, workers=2)
    shares = [next(source).samples for _ in range(2)]
    source.close()
    return {
        "x": shares[0]["x"].tolist(),
        "noise": [tuple(share["noise"][0].tolist()) for share in shares],
        "state": source.state_dict(),
        "left": left_behind(),
    }


@pytest.mark.spawned
def test_workers_of_two_ranks_draw_different_numbers_and_exit() -> None:
    ranks = launch(with_workers, 2, device="cpu", echo=False, timeout=300)
    for number, rank in enumerate(ranks):
        assert rank["x"] == [100 + CONTEXT * i for i in range(number, BATCH, 2)]
        assert rank["state"] == {"cursor": 2 * BATCH}
        assert rank["left"] == ([], [])
    assert all_differ([each for rank in ranks for each in rank["noise"]])


def share_storages(_: object) -> int:
    """Start a thread that shares storages, as the thread that sends a worker's batches does."""

    def share() -> None:
        while True:
            torch.UntypedStorage(8)._share_fd_cpu_()

    threading.Thread(target=share, daemon=True).start()
    return 0


def exit_codes_of_workers(world: World) -> list[int | None]:
    workers = WorkerBatches(DataLoader(range(8), collate_fn=share_storages, num_workers=2))
    next(workers)
    processes = worker_processes(workers._batches)
    workers.close()
    return [process.exitcode for process in processes]


@pytest.mark.spawned
def test_a_worker_that_is_sending_a_batch_when_it_is_stopped_exits_cleanly() -> None:
    assert launch(exit_codes_of_workers, 1, device="cpu", echo=False, timeout=300) == [[0, 0]]


@forking
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_do_not_change_samples_and_batches_ahead_do_not_count(kind: str, workers: int, workdir: Path) -> None:
    before = left_behind()
    assert read(made(World(), kind, workers=workers), STEPS + 2) == read(made(World(), kind), STEPS + 2)
    assert left_behind() == before


@forking
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["sharded", "dispatched", "streamed"])
def test_each_step_may_have_a_different_number_of_micro_batches(kind: str, workers: int) -> None:
    data = stream_of(16) if kind == "streamed" else [{"x": number} for number in range(16)]
    config = SourceConfig(kind=kind, workers=workers)  # type: ignore[arg-type]
    source = make_source(data, 4, SINGLE_PROCESS, seed=None, config=config)
    for step, count in enumerate([1, 2, 4, 1]):
        parts = [part.samples["x"].tolist() for part in source.take(count)]
        assert [len(part) for part in parts] == [4 // count] * count
        assert sorted(chain(*parts)) == list(range(4 * step, 4 * step + 4))
    source.close()


@forking
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_draws_the_same_numbers(workers: int) -> None:
    def source(workers: int) -> ShardedSource:
        sharding = GlobalBatchSampler(Permutation(SAMPLES, 0), BATCH)
        return ShardedSource(blocks_of(SAMPLES), sharding, World(), transform=noisy, workers=workers)

    whole, torchs = source(0), torch.get_rng_state()
    drawn = [next(whole).samples["noise"] for _ in range(4)]
    assert all_differ([tuple(noise[0].tolist()) for noise in drawn])
    resumed = source(workers)
    resumed.load_state_dict({"cursor": 2 * BATCH})
    assert all(torch.equal(next(resumed).samples["noise"], noise) for noise in drawn[2:])
    resumed.close()
    assert torch.equal(torch.get_rng_state(), torchs), "the process's own are left alone"


@forking
def test_random_numbers_of_streams_differ_by_worker_rank_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_tutorial.sharding.streamed.require_group", lambda _: None)
    monkeypatch.setattr("ddp_tutorial.sharding.streamed.all_gather", lambda world, thing: [thing] * world.size)
    drawn = []
    for rank, epoch in ((0, 0), (1, 0), (0, 1)):
        source = StreamedSource(stream_of(*[5] * 4), 4, world_of(rank, 2), transform=noisy, workers=2)
        source.load_state_dict({"epoch": epoch, "places": 0, "streams": 4})
        found = noise_of(source)
        assert len(found) == 4  # two workers, two steps
        drawn += found
    assert all_differ(drawn)


@forking
def test_a_transform_of_streams_may_query_its_worker() -> None:
    def transform(tree: Tree) -> Tree:
        info = get_worker_info()
        return {"worker": torch.full_like(tree["x"], -1 if info is None else info.id)}

    source = StreamedSource(stream_of(5, 5), 4, SINGLE_PROCESS, transform=transform, workers=2, seed=None)
    assert next(source).samples["worker"].tolist() == [0, 1, 0, 1]
    source.close()


@forking
@pytest.mark.parametrize("kind", ["sharded", "streamed"])
def test_a_worker_sends_batches_and_errors_whose_types_cannot_be_imported(kind: str) -> None:
    class Local(NamedTuple):  # as in a notebook cell
        x: torch.Tensor

    class BadSampleError(Exception): ...

    def transform(tree: Tree) -> Any:
        if 4 in tree["x"]:
            raise BadSampleError("sample 4 is a bad one")
        return Local(tree["x"])

    data = stream_of(9) if kind == "streamed" else [{"x": number} for number in range(9)]
    config = SourceConfig(kind=kind, workers=1)  # type: ignore[arg-type]
    source = make_source(data, 3, SINGLE_PROCESS, seed=None, config=config, transform=transform)
    assert next(source).samples.x.tolist() == [0, 1, 2]
    with pytest.raises(SourceError, match="BadSampleError: sample 4 is a bad one"):
        next(source)
    source.close()
    source = make_source(data, 3, SINGLE_PROCESS, seed=None, config=SourceConfig(kind=kind), transform=transform)  # type: ignore[arg-type]
    next(source)
    with pytest.raises(SourceError, match="sample 4 is a bad one") as raised:
        next(source)
    assert isinstance(raised.value.__cause__, BadSampleError)  # without workers, the type is kept


@forking
def test_an_interrupt_while_the_workers_start_skips_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(loader: Any) -> Any:
        monkeypatch.setattr(sharded, "WorkerBatches", WorkerBatches)
        WorkerBatches(loader).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(sharded, "WorkerBatches", interrupted)
    sharding = GlobalBatchSampler(Permutation(SAMPLES, None), BATCH)
    source = ShardedSource(blocks_of(SAMPLES), sharding, SINGLE_PROCESS, workers=1)
    with pytest.raises(KeyboardInterrupt):
        next(source)
    for step in range(4):
        assert numbers(next(source).samples)[0] == step * BATCH
        assert source.state_dict() == {"cursor": (step + 1) * BATCH}
    source.close()


@forking
def test_a_batch_type_of_a_script_is_the_same_type_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scripted(NamedTuple):
        x: torch.Tensor

    Scripted.__module__, Scripted.__qualname__ = "__main__", "Scripted"
    monkeypatch.setattr(sys.modules["__main__"], "Scripted", Scripted, raising=False)
    here, there = multiprocessing.Pipe()

    def send() -> None:
        there.send_bytes(pack(Scripted(torch.ones(2))).numpy().tobytes())

    rank = multiprocessing.get_context("fork").Process(target=send)
    rank.start()
    received = unpack(torch.frombuffer(bytearray(here.recv_bytes()), dtype=torch.uint8))
    rank.join()
    assert type(received) is Scripted
    assert received.x.tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------- what goes wrong


def error_of(source: Source, steps: int = 20) -> tuple[str, str, float, SourceState]:
    """Return the error within this number of steps, the seconds until then, and the position of the source."""
    start = time.monotonic()
    try:
        for _ in range(steps):
            next(source)
    except Exception as error:
        return type(error).__name__, str(error).split("\n")[0], time.monotonic() - start, source.state_dict()
    return "nothing", "", 0.0, source.state_dict()


def in_worker(number: int, do: Callable[[], object]) -> Callable[[Tree], Tree]:
    """Run a function in worker `number`, while all other workers are slow."""

    def transform(tree: Tree) -> Tree:
        info = get_worker_info()
        if info is not None and info.id == number:
            do()
        time.sleep(1)
        return tree

    return transform


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(1000)


SOON = 100.0  # seconds, to be told of a worker's death: torch looks every 5, and the machine may be busy


def troubles(world: World) -> dict[str, Any]:
    blocks, sharding = blocks_of(SAMPLES), GlobalBatchSampler(Permutation(SAMPLES, None), BATCH)

    def dispatched(**options: Any) -> DispatchedSource:
        return DispatchedSource(lambda: ShardedSource(blocks, sharding, SINGLE_PROCESS, **options), world)

    found: dict[str, Any] = {}
    for name, options in {
        "transform": {"transform": fail_at(3 * BATCH)},
        "transform in a worker": {"transform": fail_at(3 * BATCH), "workers": 1},
        "killed": {"transform": in_worker(0, die), "workers": 1},
    }.items():
        source: Source = dispatched(**options)
        found[f"dispatched, {name}"] = error_of(source)
        source.close()
    try:
        dispatched(workers=-1)
    except Exception as error:
        found["dispatched, not made"] = str(error)
    for samples, batch in ((1, 2), (10, 1)):
        for kind in KINDS:
            try:
                options = {"streams": 2} if kind == "streamed" else {"remainder": "exact"}
                source = made(world, kind, samples, batch, **options)
                found["too few", samples, kind] = error_of(source)[:2]
            except ConfigError as error:
                found["too few", samples, kind] = "ConfigError", str(error)
    found["left"] = left_behind()
    return found


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Use spawned ranks, because a forked rank would leave behind a server for its workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "spawn", spawn)
        patch.chdir(tmp_path_factory.mktemp("trouble"))
        return launch(troubles, 2, device="cpu", echo=False, timeout=300)


@pytest.mark.parametrize("where", ["transform", "transform in a worker"])
def test_a_failure_on_rank_0_is_raised_on_all_ranks_with_its_name(where: str, trouble: list[dict[str, Any]]) -> None:
    worker = ", worker 0 of 1" if "worker" in where else ""
    for rank in trouble:
        kind, told, seconds, state = rank[f"dispatched, {where}"]
        assert kind == "SourceError"
        assert told.startswith(f"rank 0 failed to read: rank 0{worker}, samples 24 to 31 (8 of them): ")
        assert seconds < SOON
        assert state == {"cursor": 24}  # three steps were taken
    assert "sample 24 is a bad one" in trouble[0]["dispatched, transform"][1]
    assert "sample 24 is a bad one" in trouble[1]["dispatched, transform"][1]


def second_rank(**options: Any) -> ShardedSource:
    sharding = GlobalBatchSampler(Permutation(SAMPLES, None), BATCH)
    return ShardedSource(blocks_of(SAMPLES), sharding, world_of(1, 2), workers=2, **options)


def test_a_lost_connection_of_the_dataset_is_reported_as_it_is() -> None:
    def fail(tree: Tree) -> Tree:
        raise ConnectionError("the file server is gone")

    source = ShardedSource(
        blocks_of(SAMPLES), GlobalBatchSampler(Permutation(SAMPLES, None), BATCH), SINGLE_PROCESS, transform=fail
    )
    assert error_of(source)[1].endswith(": the file server is gone")


@pytest.mark.parametrize("kind", ["sharded", "streamed"])
def test_the_config_sets_the_timeout_of_a_worker(kind: str) -> None:
    source: Any = made(World(), kind, worker_timeout=0.5)
    assert source.worker_timeout == 0.5


@forking
def test_a_failure_in_a_worker_names_rank_worker_and_samples() -> None:
    before = left_behind()
    source = second_rank(transform=fail_at(3 * BATCH + 1))
    kind, told, _, state = error_of(source)
    assert kind == "SourceError"
    assert told.startswith("rank 1, worker 1 of 2, samples 25 to 31 (4 of them): Caught ValueError")
    assert state == {"cursor": 24}
    assert left_behind() == before


@forking
def test_a_killed_worker_is_named_while_a_different_worker_is_awaited() -> None:
    before = left_behind()
    kind, told, seconds, _ = error_of(second_rank(transform=in_worker(1, die)))
    assert kind == "SourceError"
    assert told.startswith("rank 1, worker 1 of 2, samples 9 to 15 (4 of them): DataLoader worker")
    assert seconds < SOON
    assert left_behind() == before


@forking
@pytest.mark.parametrize("kind", ["sharded", "streamed", "dispatched"])
def test_a_worker_that_dies_while_the_rank_computes_is_restarted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = read(made(SINGLE_PROCESS, kind), 8).steps
    source = made(SINGLE_PROCESS, kind, workers=1)
    found = [numbers(next(source).samples) for _ in range(3)]
    [worker] = multiprocessing.active_children()
    worker.kill()
    assert wait_until(lambda: is_gone(worker.pid or 0))  # torch's handler of SIGCHLD would raise an error here
    found += [numbers(next(source).samples) for _ in range(5)]
    source.close()
    assert found == expected
    assert caplog.text.count("The workers restart") == 1


@forking
def test_a_worker_that_hangs_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    # The time that torch waits for its exit.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    before = left_behind()
    source = second_rank(transform=in_worker(1, hang))
    next(source)  # of worker 0, which may start slowly
    source.worker_timeout = 2
    kind, told, seconds, state = error_of(source)
    assert kind == "SourceError"
    assert told == (
        "rank 1, worker 1 of 2, samples 9 to 15 (4 of them): no batch arrived within 2 s: the worker is stuck or slow. "
        "If it is slow, use a larger source.worker_timeout"
    )
    assert 2 <= seconds < SOON
    assert state == {"cursor": 8}
    assert left_behind() == before


def read_while_a_worker_is_stuck(ending: str, told: Any) -> None:
    """Run a process that exits while one worker waits for work and one reads forever."""
    source = ShardedSource(
        blocks_of(SAMPLES),
        GlobalBatchSampler(Permutation(SAMPLES, None), BATCH),
        SINGLE_PROCESS,
        transform=stuck,
        workers=2,
    )
    first = next(source)
    workers = psutil.Process().children()
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            worker.send_signal(number)
    second = next(source)  # they continue reading
    told.send(([numbers(each.samples)[0] for each in (first, second)], [worker.pid for worker in workers]))
    if ending == "killed":
        time.sleep(100)
    elif ending == "closed":
        source.close()
    kept.append(source)  # a global object always has another reference


kept: list[Source] = []


def stuck(tree: Tree) -> Tree:
    if tree["tokens"][0, 0] > CONTEXT * BATCH:  # the third batch and later ones
        time.sleep(1000)
    time.sleep(0.3)
    return tree


@forking
@pytest.mark.parametrize("ending", ["killed", "closed", "left open"])
def test_workers_ignore_signals_and_always_exit_with_their_rank(ending: str) -> None:
    here, there = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=read_while_a_worker_is_stuck, args=(ending, there))
    rank.start()
    first, workers = here.recv()
    assert first == [0, BATCH]
    if ending == "killed":
        rank.kill()
    rank.join(30)
    assert rank.exitcode == (-signal.SIGKILL if ending == "killed" else 0)
    assert wait_until(lambda: all(map(is_gone, workers)))


@forking
def test_a_slow_worker_within_the_timeout_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_tutorial.sharding.workers.POLL_SECONDS", 0.2)

    def slow(tree: Tree) -> Tree:
        time.sleep(0.7)  # longer than the interval of the liveness check
        return tree

    source = second_rank(transform=slow, worker_timeout=30)
    assert numbers(next(source).samples) == [1, 3, 5, 7]
    source.close()


def test_a_killed_worker_of_rank_0_is_reported_on_all_ranks_quickly(trouble: list[dict[str, Any]]) -> None:
    for rank in trouble:
        kind, told, seconds, _ = rank["dispatched, killed"]
        assert kind == "SourceError"
        assert told.startswith("rank 0 failed to read: rank 0, worker 0 of 1, samples 0 to 7 (8 of them): DataLoader")
        assert seconds < SOON


def test_a_source_that_rank_0_cannot_create_is_reported_on_all_ranks(trouble: list[dict[str, Any]]) -> None:
    for rank in trouble:
        assert "'workers' must be at least 0, got -1" in rank["dispatched, not made"]
    assert trouble[1]["dispatched, not made"].startswith("rank 0 failed while rank 1 was waiting for it: ")


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_samples_than_ranks_are_rejected_on_every_rank(kind: str, trouble: list[dict[str, Any]]) -> None:
    for rank in trouble:
        name, told = rank["too few", 1, kind]
        assert name == "ConfigError"
        assert told.startswith("rank 1 of 2 has no samples: ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_smaller_than_the_world_is_rejected_on_every_rank(kind: str, trouble: list[dict[str, Any]]) -> None:
    for rank in trouble:
        name, told = rank["too few", 10, kind]
        assert name == "ConfigError"
        assert "batch" in told


def test_no_thread_and_no_worker_is_left_afterward(trouble: list[dict[str, Any]]) -> None:
    for rank in trouble:
        assert rank["left"] == ([], [])


def train_on(world: World, kind: str) -> None:
    """Run steps at whose end the ranks wait for each other, as in training."""
    options: dict[str, Any] = {"transform": in_worker(0, die), "workers": 1} if world.rank == 1 else {}
    sharding = GlobalBatchSampler(Permutation(SAMPLES, 0), BATCH)
    source: Source = (
        StreamedSource(stream_of(50, 50), BATCH, world, **options)
        if kind == "streamed"
        else ShardedSource(blocks_of(SAMPLES), sharding, world, **options)
    )
    for _ in range(5):
        next(source)
        torch.distributed.barrier()


@pytest.mark.parametrize("kind", ["sharded", "streamed"])
def test_a_killed_worker_stops_all_ranks_quickly_with_one_error(kind: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1, worker 0 of 1, ") as raised:
        launch(train_on, 2, kind, device="cpu", echo=False, timeout=300)
    assert raised.value.rank == 1
    assert time.monotonic() - start < SOON


def leave(world: World) -> int:
    """Exit without notifying the others and without closing the source."""
    sharding = GlobalBatchSampler(Permutation(SAMPLES, 0), BATCH)
    source = DispatchedSource(lambda: ShardedSource(blocks_of(SAMPLES), sharding, SINGLE_PROCESS), world)
    return next(source).count


@pytest.mark.spawned
def test_an_unclosed_dispatched_source_does_not_block_the_ranks() -> None:
    assert launch(leave, 2, device="cpu", echo=False, timeout=300) == [4, 4]


def send_beside_a_dispatched_source(world: World) -> tuple[list[list[int]], int]:
    """Take one more step on rank 1 than rank 0 has sent, so that its thread waits while rank 0's queue is full."""
    sharding = GlobalBatchSampler(Permutation(SAMPLES, None), BATCH)
    source = DispatchedSource(lambda: ShardedSource(blocks_of(SAMPLES), sharding, SINGLE_PROCESS), world, prefetch=1)
    taken = [numbers(next(source).samples) for _ in range(1 + world.rank)]
    time.sleep(0.5)  # until the threads wait
    message = torch.tensor(7 if world.is_main else 0)
    if world.is_main:
        torch.distributed.send(message, 1)
    else:
        torch.distributed.recv(message, 0)
    taken += [numbers(next(source).samples) for _ in range(3 - len(taken))]
    source.close()
    return taken, int(message)


def test_ranks_communicate_while_a_dispatched_source_waits() -> None:
    ranks = launch(send_beside_a_dispatched_source, 2, device="cpu", echo=False, timeout=300)
    for rank, (taken, message) in enumerate(ranks):
        assert taken == [list(range(first + rank, first + BATCH, 2)) for first in (0, BATCH, 2 * BATCH)]
        assert message == 7


def uneven(world: World) -> dict[str, Any]:
    """Return a stream with 3 samples on rank 0 and 17 on rank 1."""

    def fresh() -> StreamedSource:
        return StreamedSource(stream_of(3, 17), 4, world, seed=None)

    source = fresh()
    shares, states = [], [source.state_dict()]
    for _ in range(11):
        shares.append(next(source))
        states.append(source.state_dict())
    resumed = []
    for state in states:
        again = fresh()
        again.load_state_dict(state)
        share = next(again)
        resumed.append((share.samples["x"].tolist(), share.count, share.global_count))
    return {
        "steps": [(share.samples["x"].tolist(), share.count, share.global_count) for share in shares],
        "states": states,
        "resumed": resumed,
    }


def test_a_rank_whose_stream_ends_early_gets_empty_batches() -> None:
    ranks = launch(uneven, 2, device="cpu", echo=False, timeout=300)
    # two places a step for each: rank 0 is done after two steps, rank 1 after nine
    assert [step[0] for step in ranks[0]["steps"]] == [[0, 1], [2], *[[]] * 7, [0, 1], [2]]
    assert [step[0] for step in ranks[1]["steps"]][:10] == [*[[i, i + 1] for i in range(3, 19, 2)], [19], [3, 4]]
    for rank in ranks:
        assert [step[2] for step in rank["steps"]] == [4, 3, *[2] * 6, 1, 4, 3]
        assert rank["states"] == ranks[0]["states"]
        assert rank["resumed"][:-1] == rank["steps"]


# ------------------------------------------------------------------------------------------------------- by config


def test_a_stream_does_not_know_its_steps_per_epoch() -> None:
    assert made(World(), "streamed").steps_per_epoch is None


def test_a_stream_rejects_a_remainder_before_it_writes_anything(workdir: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'source\.remainder' must be 'carry' for a stream, got 'exact'\. A stream's length is unknown",
    ):
        made(World(), "streamed", remainder="exact")
    assert not list(workdir.iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kind": "shared"}, "kind"),
        ({"workers": -1}, "workers"),
        ({"prefetch": 0}, "prefetch"),
        ({"remainder": "repeat"}, "remainder"),
        ({"worker": 2}, "worker"),
        ({"window": 0}, "window"),
        ({"streams": 0}, "streams"),
        ({"shuffle_buffer": 0}, "shuffle_buffer"),
    ],
)
def test_an_impossible_source_is_rejected_by_its_config(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SourceConfig(**options)


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_with_fewer_samples_than_files_is_read_completely(kind: str, samples: int, workdir: Path) -> None:
    source = made(World(), kind, samples, batch=samples)
    assert sorted(numbers(next(source).samples)) == list(range(samples))
    source.close()
