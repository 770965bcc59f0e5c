"""Any dataset and any `collate_fn` work with a source without changes. Unsuitable data are reported."""

import pickle
import random
import time
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ddp_tutorial.compat import tree_flatten, tree_leaves
from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding import (
    ArrowShards,
    Rows,
    ShardedSource,
    Source,
    SourceConfig,
    TokenBlocks,
    as_samples,
    make_source,
    streamed,
)
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation
from ddp_tutorial.sharding.samples import write_arrow
from ddp_tutorial.sharding.workers import SourceError
from ddp_tutorial.world import World
from ranks import error_of

SAMPLES, BATCH = 22, 5
STEPS = 5  # an epoch, as `exact` cuts it: 5, 5, 5, 5, 2: too few for three ranks


class Nested(Dataset[Any]):
    """A dataset whose rows are tuples in dicts in tuples, with only the methods that torch requires."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return {"id": number, "inner": (torch.full((2,), number), [{"x": np.float32(number)}])}, float(number)


class Batched(Nested):
    """A dataset that reads many rows at once if torch requests them."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]

    def __getitem__(self, number: int) -> Any:
        return {"id": number}


def text(number: int) -> dict[str, Any]:
    """Return a text as a tokenizer returns it: between 1 and 7 tokens."""
    return {"input_ids": [number] * (1 + number * 5 % 7), "label": number % 2}


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, like the `BatchEncoding` of transformers."""


def pad(rows: list[dict[str, Any]]) -> Encoding:
    """Collate like transformers: a list of dicts -> a mapping of tensors."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = pad_sequence(ids, batch_first=True, padding_value=-1)
    return Encoding(input_ids=padded, attention_mask=padded >= 0, labels=torch.tensor([row["label"] for row in rows]))


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"id": range(SAMPLES), "pair": [[i, i + 1] for i in range(SAMPLES)]})


class Case(NamedTuple):
    """A dataset, its `collate_fn`, and the location of a sample's number in a batch."""

    dataset: Callable[[], Any]
    ids: Callable[[Any], torch.Tensor]
    collate_fn: Callable[[list[Any]], Any] | None = None


CASES = {
    "TensorDataset": Case(lambda: TensorDataset(torch.arange(SAMPLES), torch.rand(SAMPLES, 2)), lambda batch: batch[0]),
    "Dataset, nested": Case(Nested, lambda batch: batch[0]["id"]),
    "Dataset, __getitems__": Case(Batched, lambda batch: batch["id"]),
    "Subset": Case(lambda: Subset(range(100, 200), range(SAMPLES)), lambda batch: batch - 100),  # type: ignore[arg-type]
    "list": Case(lambda: [{"id": i} for i in range(SAMPLES)], lambda batch: batch["id"]),
    "tensor": Case(lambda: torch.arange(SAMPLES), lambda batch: batch),
    "datasets, no format": Case(table, lambda batch: batch["id"]),
    "datasets, torch": Case(lambda: table().with_format("torch"), lambda batch: batch["id"]),
    "datasets, numpy": Case(lambda: table().with_format("numpy"), lambda batch: batch["id"]),
    "text in a list": Case(lambda: [text(i) for i in range(SAMPLES)], lambda batch: batch["input_ids"][:, 0], pad),
    "text in datasets": Case(
        lambda: datasets.Dataset.from_list([text(i) for i in range(SAMPLES)]),
        lambda batch: batch["input_ids"][:, 0],
        pad,
    ),
    "text in datasets, torch": Case(
        lambda: datasets.Dataset.from_list([text(i) for i in range(SAMPLES)]).with_format("torch"),
        lambda batch: batch["input_ids"][:, 0],
        lambda rows: {"input_ids": pad_sequence([row["input_ids"] for row in rows], batch_first=True)},
    ),
}


class Followed(IterableDataset[Any]):
    """A torch IterableDataset that splits its rows between the workers, as in torch's documentation."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        info = get_worker_info()
        return ({"id": i} for i in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1))


class Opened(IterableDataset[Any]):
    """Counts how often it is read in this process."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(range(SAMPLES))


class EmptyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class FollowedText(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(text, range(SAMPLES))


STREAMS = {
    "IterableDataset": Case(Followed, lambda batch: batch["id"]),
    "text in an IterableDataset": Case(FollowedText, lambda batch: batch["input_ids"][:, 0], pad),
    "datasets.IterableDataset": Case(lambda: table().to_iterable_dataset(num_shards=3), lambda batch: batch["id"]),
}


def content(tree: Any) -> Any:
    """Return the full content of a batch for comparison. Types that torch's pytree does not know differ from dicts."""
    leaves, form = tree_flatten(tree)
    return str(form), [(leaf.dtype, leaf.tolist()) if torch.is_tensor(leaf) else repr(leaf) for leaf in leaves]


# ------------------------------------------------------------------------------------------------- in one process


@pytest.mark.parametrize("name", CASES)
def test_indexed_samples_equal_the_batches_of_a_data_loader(name: str) -> None:
    case = CASES[name]
    dataset, numbers = case.dataset(), [4, 0, 21, 4]
    [batch] = DataLoader(dataset, batch_sampler=[numbers], collate_fn=case.collate_fn)
    samples = as_samples(dataset, case.collate_fn)
    assert len(samples) == SAMPLES
    found = samples.fetch(np.array(numbers))
    assert type(found) is type(batch)
    unwrapped = [dict(each) if isinstance(each, Encoding) else each for each in (found, batch)]
    assert content(unwrapped[0]) == content(unwrapped[1])
    assert case.ids(found).tolist() == numbers
    empty = samples.fetch(np.array([], dtype=np.int64))
    assert {len(leaf) for leaf in tree_leaves(empty)} == {0}


def test_an_object_with_fetch_is_returned_unchanged() -> None:
    blocks = TokenBlocks(torch.arange(10), 3)
    assert as_samples(blocks) is blocks
    rows = Rows([1, 2])
    assert as_samples(rows) is rows
    with pytest.raises(
        ConfigError, match=r"the fetch method of .*TokenBlocks returns batches, so 'collate_fn' must be None"
    ):
        as_samples(blocks, pad)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", ["IterableDataset", "datasets.IterableDataset"])
def test_an_iterable_dataset_is_read_completely_by_any_number_of_workers(name: str, workers: int) -> None:
    case = STREAMS[name]
    source = make_source(
        case.dataset(), BATCH, World(), config=SourceConfig(kind="streamed", workers=workers, streams=2)
    )
    epochs = []
    for _ in range(2):
        shares = [next(source) for _ in range(STEPS)]
        epochs.append([number for share in shares for number in case.ids(share.samples).tolist()])
    source.close()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(SAMPLES))
    assert epochs[0] != epochs[1], "shuffled anew"


def test_an_iterable_gets_the_epoch_and_keeps_its_order_without_a_seed() -> None:
    class Told:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[tuple[int, int]]:
            return iter([(self.epoch, i) for i in range(3)])

    source = make_source(Told(), 2, World(), seed=None, config=SourceConfig(kind="streamed"))
    steps = [list(zip(*(part.tolist() for part in next(source).samples), strict=True)) for _ in range(3)]
    assert steps == [[(0, 0), (0, 1)], [(0, 2)], [(1, 0), (1, 1)]]


def test_arrow_files_can_be_read_in_all_four_ways(tmp_path: Any) -> None:
    table().select_columns("id").save_to_disk(tmp_path)
    shards = ArrowShards(list(tmp_path.glob("*.arrow")))
    for kind in ("sharded", "dispatched", "streamed", "fast_stream"):
        source = make_source(shards, SAMPLES, World(), config=SourceConfig(kind=kind))  # type: ignore[arg-type]
        assert sorted(next(source).samples["id"].tolist()) == list(range(SAMPLES))
        assert source.batch_size == SAMPLES
        source.close()


def test_a_worker_receives_the_paths_of_arrow_files_instead_of_their_rows(tmp_path: Path) -> None:
    table = pa.table({"id": range(100_000)})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    config = SourceConfig(kind="streamed", shuffle_buffer=10)
    source: Any = make_source(ArrowShards([tmp_path / "file.arrow"]), 8, World(), config=config)
    sent = pickle.dumps(source.shards)
    assert len(sent) < 10_000
    first, second = (list(islice(shards.rows(0, 1, 1), 20)) for shards in (source.shards, pickle.loads(sent)))
    assert first == second


def test_a_stream_reads_the_requested_columns_of_both_arrow_formats(tmp_path: Path) -> None:
    write_arrow(tmp_path / "stream.arrow", {"id": np.arange(4), "other": np.arange(4)})
    table = pa.table({"id": range(4, 8), "other": ["a", "b", "c", "d"]})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    shards = ArrowShards([tmp_path / "stream.arrow", tmp_path / "file.arrow"], ["id"])
    source = make_source(shards, 8, World(), seed=None, config=SourceConfig(kind="streamed"))
    assert sorted(next(source).samples["id"].tolist()) == list(range(8))


class FollowedNoise(IterableDataset[Any]):
    """A stream of samples to augment."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(100, 3))


class Augmented(Dataset[Any]):
    """A dataset whose rows draw random numbers, like augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand())], dtype=torch.float64)


def masked(rows: list[Any]) -> Any:
    """Collate and draw random numbers, like collators that mask words."""
    return {"row": torch.stack(rows), "mask": torch.rand(len(rows))}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_random_draws_of_a_dataset_depend_on_seed_rank_and_cursor_only() -> None:
    def steps(rank: int = 0, seed: int = 0, workers: int = 0, cursor: int = 0) -> list[Any]:
        sharding = GlobalBatchSampler(Permutation(SAMPLES, seed), 4)
        world = World(rank, 2, rank, 2)
        source = ShardedSource(as_samples(Augmented(), masked), sharding, world, workers=workers)
        source.load_state_dict({"cursor": cursor})
        found = [content(next(source).samples) for _ in range(3)]
        source.close()
        return found

    before = torch.get_rng_state(), random.getstate()
    first = steps()
    assert first == steps(workers=2)
    assert first[1:] == steps(cursor=4)[:2]
    assert len({str(each) for each in (*first, *steps(rank=1), *steps(seed=1))}) == 9
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate(), "those of the training are left alone"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [{"ids": [1, 2]}, {"ids": [1]}],
            r"column 'ids' of row 1 is a list of 1 \(int\), but column 'ids' of row 0 is a list of 2",
        ),
        ([torch.zeros(2), torch.zeros(3)], r"row 1 is torch.float32\[3\], but row 0 is torch.float32\[2\]"),
        (
            [(1, np.zeros(2)), (1, np.zeros((2, 2)))],
            r"column '1' of row 1 is float64\[2, 2\], but column '1' of row 0 is float64\[2\]",
        ),
        (
            [{"a": {"b": torch.zeros(1)}}, {"a": {"b": torch.zeros(2)}}],
            r"column 'a' of row 1 is {'b': 'torch.float32\[2\]'}",
        ),
    ],
)
def test_rows_of_different_shapes_require_a_collate_fn(rows: list[Any], told: str) -> None:
    source = make_source(rows, 2, World(), seed=None)
    with pytest.raises(SourceError, match=f"^rank 0, samples 0 to 1.*{told}.*pass a collate_fn.*make_source") as raised:
        next(source)
    assert isinstance(raised.value.__cause__, ValueError)


def test_streamed_rows_of_different_lengths_require_a_collate_fn() -> None:
    source = make_source(FollowedText(), 4, World(), config=SourceConfig(kind="streamed"))
    with pytest.raises(SourceError, match=r"^rank 0, positions 0 to 3 of epoch 0: column 'input_ids' .* pass a coll"):
        next(source)


class Broken(Nested):
    def __getitem__(self, number: int) -> Any:
        return {"x": {3: 1}[number]}


def lose_a_row(rows: list[Any]) -> Any:
    return {"x": torch.zeros(len(rows)), "y": (torch.zeros(len(rows) - 1), torch.zeros(len(rows)))}


def fail(rows: list[Any]) -> Any:
    raise KeyError("label")


BAD_ROWS: dict[str, tuple[Any, Any, str]] = {
    "unequal leaves": (
        range(SAMPLES),
        lose_a_row,
        "every tensor in a batch of {n} samples must have {n} rows, got 'x' with {n} rows, 'y.0' with {less} "
        "rows, 'y.1' with {n} rows",
    ),
    "one for all": (range(SAMPLES), lambda rows: {"n": torch.tensor(1)}, "'n' without a batch dimension"),
    "text": (
        [{"x": i, "name": "a"} for i in range(SAMPLES)],
        None,
        "'x' with {n} rows, 'name' of type str, not a tensor",
    ),
    "unreadable": (Broken(), None, "row {first} cannot be read: KeyError: {first}"),
    "collate_fn fails": (range(SAMPLES), fail, "collate_fn (fail) cannot combine {n} rows (indices {first} to "),
}

# ------------------------------------------------------------------------------------------------------ real ranks


class Read(NamedTuple):
    """The observations of a rank in each step: sample numbers, contents, and the state after the step."""

    numbers: list[list[int]]
    contents: list[Any]
    states: list[Any]


def read(source: Source, ids: Callable[[Any], torch.Tensor], steps: int) -> Read:
    numbers, contents, states = [], [], [source.state_dict()]
    for _ in range(steps):
        share = next(source)
        assert not isinstance(share.samples, UserDict)
        assert {len(leaf) for leaf in tree_leaves(share.samples)} == {share.count}
        numbers.append(ids(share.samples).tolist())
        contents.append(content(share.samples))
        states.append(source.state_dict())
    source.close()
    return Read(numbers, contents, states)


def tour(world: World) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    ways = [(name, case, kind) for name, case in CASES.items() for kind in ("sharded", "dispatched")]
    for name, case, kind in [*ways, *((name, case, "streamed") for name, case in STREAMS.items())]:
        torch.manual_seed(0)
        dataset = case.dataset()
        config = SourceConfig.model_validate(
            {"kind": kind, "shuffle_buffer": 7} | ({} if kind == "streamed" else {"remainder": "exact"})
        )
        fresh = partial(make_source, dataset, BATCH, world, seed=3, config=config, collate_fn=case.collate_fn)
        steps = 2 * (STEPS if kind != "streamed" else STEPS + 2)
        whole = read(fresh(), case.ids, steps)
        resumed = []
        for state in whole.states:
            source = fresh()
            source.load_state_dict(state)
            resumed.append(read(source, case.ids, 1))
        found[name, kind] = {"whole": whole, "resumed": resumed, "batch_size": fresh().batch_size}
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return launch(tour, request.param, device="cpu", threads=1, echo=False, timeout=300)


ByNumber = [(name, kind) for name in CASES for kind in ("sharded", "dispatched")]
Followable = [(name, "streamed") for name in STREAMS]


@pytest.mark.parametrize("way", ByNumber, ids=str)
def test_every_sample_is_used_once_per_epoch(ranks: list[Any], way: tuple[str, str]) -> None:
    for epoch in (slice(0, STEPS), slice(STEPS, 2 * STEPS)):
        seen = Counter(n for rank in ranks for step in rank[way]["whole"].numbers[epoch] for n in step)
        assert seen == Counter(range(SAMPLES))
    for rank in ranks:
        assert rank[way]["whole"].states == ranks[0][way]["whole"].states
        assert rank[way]["batch_size"] == BATCH


@pytest.mark.parametrize("way", Followable, ids=str)
def test_every_sample_of_a_stream_is_used_once_per_epoch(ranks: list[Any], way: tuple[str, str]) -> None:
    epochs: dict[int, Counter[int]] = {}
    for rank in ranks:
        read = rank[way]["whole"]
        for numbers, state in zip(read.numbers, read.states[1:], strict=True):
            epochs.setdefault(state["epoch"], Counter()).update(numbers)
    assert epochs[0] == Counter(range(SAMPLES))
    assert epochs[1] <= epochs[0]


@pytest.mark.parametrize("way", [*ByNumber, *Followable], ids=str)
def test_resuming_at_any_step_gives_the_same_batch_on_every_rank(ranks: list[Any], way: tuple[str, str]) -> None:
    for rank in ranks:
        whole, resumed = rank[way]["whole"], rank[way]["resumed"]
        assert len(resumed) == len(whole.contents) + 1
        for k, content in enumerate(whole.contents):
            assert resumed[k].contents == [content], f"resumed after {k} steps"


def drawing(batch: Any) -> Any:
    """Augment a batch slowly, while other code draws random numbers."""
    time.sleep(0.05)
    return batch, torch.tensor([[torch.rand(()).item(), random.random(), float(np.random.rand())]] * len(batch))


def drawn(world: World, kind: str, workers: int, begin: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the random numbers of the data and of the training in six steps, first without and then with a resume."""
    data: Any = FollowedNoise() if kind == "streamed" else Augmented()
    config = SourceConfig(kind=kind, workers=workers, prefetch=1)  # type: ignore[arg-type]
    source = make_source(data, 4, world, config=config, transform=drawing)
    torch.manual_seed(world.rank)
    if begin and kind == "streamed":
        source.load_state_dict({"streams": world.size, "epoch": 0, "places": 4 * begin})
    elif begin:
        source.load_state_dict({"cursor": 4 * begin})
    of_data, of_training = [], [torch.rand(3).tolist() for _ in range(begin)]
    for _ in range(begin, 6):
        of_data.append([leaf.tolist() for leaf in tree_leaves(next(source).samples)])
        time.sleep(0.02)
        of_training.append(torch.rand(3).tolist())
    source.close()
    return of_data, of_training


def refusals(world: World) -> dict[str, str]:
    """Return this rank's error messages for all unsuitable data."""

    def made(data: Any, batch_size: int = 4, kind: str = "sharded", remainder: str = "carry", **options: Any) -> Source:
        config = SourceConfig.model_validate({"kind": kind, "remainder": remainder})
        return make_source(data, batch_size, world, config=config, **options)

    class NoLength(Dataset[Any]):
        def __getitem__(self, number: int) -> int:
            return number

    ten, blocks = list(range(10)), TokenBlocks(torch.arange(31), 3)
    found = {
        "IterableDataset, sharded": error_of(lambda: made(Followed())),
        "stream, dispatched, few": error_of(lambda: made(table().to_iterable_dataset(), 1, kind="dispatched")),
        "stream, dispatched, pad": error_of(lambda: made(Followed(), kind="dispatched", remainder="pad")),
        "no length": error_of(lambda: made(NoLength())),
        "nothing": error_of(lambda: made(None)),
        "DataLoader": error_of(lambda: made(DataLoader(Nested()))),
        "splits": error_of(lambda: made({"train": ten, "test": ten})),
        "splits, streamed": error_of(lambda: made({"train": ten, "test": ten}, kind="streamed")),
        "list, streamed": error_of(lambda: made(ten, kind="streamed")),
        "datasets, streamed": error_of(lambda: made(table(), kind="streamed")),
        "list, fast_stream": error_of(lambda: made(ten, kind="fast_stream")),
        "generator": error_of(lambda: made((i for i in ten), kind="streamed")),
        "nothing, streamed": error_of(lambda: made(None, kind="streamed")),
        "blocks with collate_fn": error_of(lambda: made(blocks, kind="streamed", collate_fn=default_collate)),
        "empty": error_of(lambda: made([])),
        "empty, dispatched": error_of(lambda: made([], kind="dispatched")),
        "empty, streamed": error_of(lambda: next(made(EmptyStream(), kind="streamed"))),
        "different": error_of(lambda: made(range(10 + world.rank))),
        "too few": error_of(lambda: made([1], remainder="exact")),
        "too few, dispatched": error_of(lambda: made(ten, batch_size=1, kind="dispatched")),
        "batch_size": error_of(lambda: made(ten, batch_size=0)),
    }
    for name, (rows, collate_fn, _) in BAD_ROWS.items():
        for kind in ("sharded", "dispatched"):
            source = make_source(rows, 4, world, seed=None, config=SourceConfig(kind=kind), collate_fn=collate_fn)  # type: ignore[arg-type]
            found[f"{name}, {kind}"] = error_of(lambda source=source: next(source))  # type: ignore[misc]
            source.close()
    return found


def dispatched_stream(world: World) -> tuple[list[list[int]], list[int], int]:
    """Return this rank's samples of the steps of an epoch, those of a resumed step, and how often this rank reads."""
    config, data = SourceConfig(kind="dispatched"), Opened()
    source, states, steps = make_source(data, 4, world, config=config), [], []
    while sum(step.global_count for step in steps) < SAMPLES:
        steps.append(next(source))
        states.append(source.state_dict())
    source.close()
    again = make_source(Opened(), 4, world, config=config)
    again.load_state_dict(states[0])
    resumed = next(again).samples.tolist()
    again.close()
    return [step.samples.tolist() for step in steps], resumed, data.times


def test_a_stream_without_shards_is_read_by_rank_0_and_dispatched() -> None:
    ranks = launch(dispatched_stream, 2, device="cpu", threads=1, echo=False, timeout=300)
    of_rank = [[sample for step in steps for sample in step] for steps, _, _ in ranks]
    assert sorted(of_rank[0] + of_rank[1]) == list(range(SAMPLES))
    assert abs(len(of_rank[0]) - len(of_rank[1])) <= 1
    assert [resumed for _, resumed, _ in ranks] == [steps[1] for steps, _, _ in ranks]
    assert [times for _, _, times in ranks] == [1, 0]


def test_a_warning_appears_if_there_are_more_ranks_than_shards(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "require_group", lambda world: None)
    for ranks, warned in ((1, False), (3, False), (4, True)):
        caplog.clear()
        streamed.StreamedSource(table().to_iterable_dataset(num_shards=3), 8, World(0, ranks, 0, ranks))
        assert ("fewer shards (3) than there are ranks (4)" in caplog.text) == warned


def noise(world: World) -> dict[Any, Any]:
    return {(kind, *way): drawn(world, kind, *way) for kind in NOISY for way in WAYS}


@pytest.fixture(scope="module")
def refused() -> list[dict[str, str]]:
    return launch(refusals, 2, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("IterableDataset, sharded", "test_any_dataset.Followed must define __len__ and __getitem__"),
        ("stream, dispatched, few", "'batch_size' must be at least 2 (one sample per stream), got 1"),
        (
            "stream, dispatched, pad",
            "'source.remainder' must be 'carry' for a stream, got 'pad'. A stream's length is unknown",
        ),
        ("no length", "NoLength must define __len__ and __getitem__. Define both, or read the dataset as a"),
        ("nothing", "a NoneType must define __len__"),
        ("DataLoader", "collate_fn=loader.collate_fn)"),
        (
            "splits",
            "a dataset must be a sequence of samples, got a dict with keys 'train', 'test'",
        ),
        ("splits, streamed", "Pass one of its splits"),
        ("list, streamed", "but a list supports indexing. Use source.kind=sharded."),
        ("datasets, streamed", "Use source.kind=sharded, or pass dataset.to_iterable_dataset()"),
        ("list, fast_stream", "source.kind=fast_stream requires Arrow files, got a list. Use source.kind=sharded"),
        ("generator", "a generator can be iterated over only once"),
        ("nothing, streamed", "a dataset must define __iter__ or __getitem__, got NoneType"),
        ("blocks with collate_fn", "'collate_fn' must be None"),
        ("empty", "the dataset must contain at least 1 sample, got 0"),
        ("empty, dispatched", "the dataset must contain at least 1 sample, got 0"),
        ("empty, streamed", "the dataset is empty"),
        ("different", "got 11 on rank 1 and 10 on rank 0. Pass the whole dataset on every rank"),
        ("too few", "rank 1 of 2 has no samples: with 1 samples and batch_size 4"),
        ("too few, dispatched", "rank 1 of 2 has no samples: with 10 samples and batch_size 1"),
        ("batch_size", "'batch_size' must be at least 1, got 0"),
    ],
)
def test_unsuitable_data_raise_one_clear_config_error_on_all_ranks(
    what: str, told: str, refused: list[dict[str, str]]
) -> None:
    for rank in refused:
        assert rank[what].startswith("ConfigError: ")
        assert told in rank[what]
        assert "\n" not in rank[what]


@pytest.mark.parametrize("kind", ["sharded", "dispatched"])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_an_invalid_batch_is_reported_on_all_ranks_with_its_leaves(
    name: str, kind: str, refused: list[dict[str, str]]
) -> None:
    for number, rank in enumerate(refused):
        n, first = (4, "rank 0 failed to read: rank 0") if kind == "dispatched" else (2, f"rank {number}")
        told = rank[f"{name}, {kind}"]
        assert told.startswith(f"SourceError: {first}, samples ")
        assert BAD_ROWS[name][2].format(n=n, less=n - 1, first=0 if kind == "dispatched" else number) in told


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_that_pad_a_stream_differently_get_advice() -> None:
    config = SourceConfig(kind="streamed", workers=2, streams=2)
    source = make_source(FollowedText(), 4, World(), seed=None, config=config, collate_fn=pad)
    with pytest.raises(SourceError, match=r"its 2 workers collated cannot be concatenated.* Pad to a fixed length in"):
        [next(source) for _ in range(3)]
    source = make_source(FollowedText(), 4, World(), config=config.model_copy(update={"workers": 1}), collate_fn=pad)
    assert isinstance(next(source).samples, Mapping)
    source.close()


# ------------------------------------------------------------------------------------------------- random numbers

NOISY = ["sharded", "dispatched", "streamed"]
WAYS = [(0, 0), (0, 3), (1, 3)]  # the number of workers, and the step after which to start


@pytest.fixture(scope="module")
def noises() -> list[dict[Any, Any]]:
    return launch(noise, 2, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("kind", NOISY)
def test_ranks_draw_their_own_numbers_with_workers_and_after_a_resume(kind: str, noises: list[dict[Any, Any]]) -> None:
    for rank in noises:
        whole = rank[kind, 0, 0][0]
        assert rank[kind, 0, 3][0] == rank[kind, 1, 3][0] == whole[3:]
    steps = [str(step) for rank in noises for step in rank[kind, 0, 0][0]]
    assert len(set(steps)) == 12, "of each step, and of each rank"


@pytest.mark.parametrize("kind", NOISY)
def test_random_numbers_of_training_do_not_depend_on_the_reader(kind: str, noises: list[dict[Any, Any]]) -> None:
    for number, rank in enumerate(noises):
        alone = torch.Generator().manual_seed(number)
        wanted = [torch.rand(3, generator=alone).tolist() for _ in range(6)]
        assert [rank[kind, *way][1] == wanted for way in WAYS] == [True] * len(WAYS)
