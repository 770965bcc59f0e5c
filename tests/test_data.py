"""Samples by index: reading returns the written samples, and unreadable samples are named."""

import os
import pickle
import tracemalloc
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding import samples as module
from ddp_tutorial.sharding.samples import (
    ArrowShards,
    Rows,
    TokenBlocks,
    as_arrow,
    as_batch,
    as_shards,
    check_same_structure,
    select_rows,
    write_arrow,
)


def at(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


# ------------------------------------------------------------------------------------------------------- token blocks


def test_a_block_overlaps_the_next_block_by_one_token() -> None:
    blocks = TokenBlocks(torch.arange(100, 120, dtype=torch.uint8), 4)
    [tokens] = blocks.fetch(at(2, 0, 2)).values()
    assert tokens.tolist() == [[108, 109, 110, 111, 112], [100, 101, 102, 103, 104], [108, 109, 110, 111, 112]]
    assert tokens.dtype == torch.uint8
    assert blocks.fetch(at())["tokens"].shape == (0, 5)


@pytest.mark.parametrize(("length", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (401, 100)])
def test_a_sample_requires_one_more_token_than_its_context(length: int, samples: int) -> None:
    blocks = TokenBlocks(torch.arange(length), 4)
    assert len(blocks) == samples
    if samples:
        assert blocks.fetch(at(samples - 1))["tokens"].shape == (1, 5)


# ---------------------------------------------------------------------------------------------- rows of a sequence


def test_rows_of_a_list_are_collated_in_the_requested_order() -> None:
    rows = Rows([{"x": i, "pair": (i, [float(i)])} for i in range(5)])
    found = rows.fetch(at(3, 1))
    assert len(rows) == 5
    assert found["x"].tolist() == [3, 1]
    assert found["pair"][0].tolist() == [3, 1]
    assert found["pair"][1][0].tolist() == [3.0, 1.0]


def test_rows_of_a_dataset_equal_those_of_the_same_list() -> None:
    table = {"x": list(range(7)), "name": [f"number {i}" for i in range(7)]}
    rows = Rows(datasets.Dataset.from_dict(table))
    found = rows.fetch(at(6, 0, 6))
    assert len(rows) == 7
    assert found["x"].tolist() == [6, 0, 6]
    assert found["name"] == ["number 6", "number 0", "number 6"]


@pytest.mark.parametrize("as_dataset", [False, True])
def test_zero_rows_have_the_same_structure_as_some_rows(as_dataset: bool) -> None:
    """A rank may have no samples in a step, and runs the same code as the others."""
    table: list[Any] = [{"x": torch.ones(2, 3)}] * 2
    rows = Rows(datasets.Dataset.from_dict({"x": [[[1.0] * 3] * 2] * 2}).with_format("torch") if as_dataset else table)
    assert rows.fetch(at())["x"].shape == (0, 2, 3)


def test_rows_can_be_combined_by_a_custom_function() -> None:
    rows = Rows([[1], [1, 2], []], collate_fn=lambda rows: torch.tensor([sum(row) for row in rows]))
    assert rows.fetch(at(2, 1, 0)).tolist() == [0, 3, 1]


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"x": 1}, "column 'y' of row 12 is missing, but column 'y' of row 10 is str"),
        ({"x": 1, "y": "a", "z": 2}, "column 'z' of row 12 is a number, but column 'z' of row 10 is missing"),
        ({"x": "one", "y": "a"}, "column 'x' of row 12 is str, but column 'x' of row 10 is a number"),
        ({"x": 1, "y": None}, "column 'y' of row 12 is NoneType, but column 'y' of row 10 is str"),
        ([1, "a"], "column 'x' of row 12 is missing, but column 'x' of row 10 is a number"),
    ],
)
def test_a_row_with_a_different_structure_is_named(odd: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_same_structure([{"x": 1, "y": "a"}, {"x": 2.5, "y": "b"}, odd], [10, 11, 12])


def test_rows_that_are_not_dicts_are_compared_directly() -> None:
    check_same_structure([], [])
    check_same_structure([1, 2.0], [0, 1])
    with pytest.raises(ValueError, match=r"^row 7 is str, but row 5 is a number. The rows of a batch"):
        check_same_structure([1, "two"], [5, 7])


def test_an_invalid_row_is_named_by_its_index_in_the_dataset() -> None:
    rows = Rows([{"x": i} for i in range(5)] + [{"x": "five"}])
    with pytest.raises(ValueError, match="column 'x' of row 5 is str, but column 'x' of row 2 is a number"):
        rows.fetch(at(2, 5, 3))


# ----------------------------------------------------------------------------------------------------------- trees


def test_select_rows_returns_some_rows_of_a_tree() -> None:
    tree = {"a": torch.arange(4), "b": [torch.arange(8).view(4, 2), (torch.zeros(4, 0),)]}
    assert as_batch(tree, 4) is tree
    some = select_rows(tree, torch.tensor([3, 1]))
    assert some["a"].tolist() == [3, 1]
    assert some["b"][0].tolist() == [[6, 7], [2, 3]]
    assert isinstance(some["b"][1], tuple)
    assert some["b"][1][0].shape == (2, 0)
    assert select_rows(torch.arange(4), slice(1, None, 2)).tolist() == [1, 3]


class Encoding(UserDict[str, Any]):
    """A mapping that torch's pytree does not know, like `BatchEncoding` of transformers."""


def test_any_nested_mapping_becomes_a_dict() -> None:
    found = as_batch((Encoding(x=torch.arange(2), more=Encoding(y=torch.ones(2, 3))), [torch.zeros(2)]), 2)
    assert type(found[0]) is type(found[0]["more"]) is dict
    assert select_rows(found, slice(1, 2))[0]["more"]["y"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"a": torch.zeros(2, 3), "b": torch.zeros(3)}, "'a' with 2 rows, 'b' with 3 rows"),
        ({"a": {"ids": torch.zeros(2)}, "b": (torch.zeros(2), torch.zeros(1))}, "'b.1' with 1 rows"),
        (torch.zeros(3), "a tensor with 3 rows"),
        (torch.tensor(1.0), "a tensor without a batch dimension"),
        ({"a": torch.tensor(1.0)}, "'a' without a batch dimension"),
        ({"a": ["text", "more"]}, "'a' of type str, not a tensor. "),
        ({"a": np.zeros(2)}, "'a' of type ndarray, not a tensor"),
        ({"mask": None}, "'mask' of type NoneType, not a tensor"),
        ("text", "an object of type str, not a tensor"),
        ({}, "an empty dict"),
    ],
)
def test_a_tree_that_is_not_a_batch_is_reported_with_its_leaves(tree: Any, told: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"^every tensor in a batch .* must have 2 rows, got .*{told}.*one row for each sample",
    ):
        as_batch(tree, 2)


@pytest.mark.parametrize(
    ("leaf", "told"), [("text", "of type str, not a tensor"), (torch.tensor(1), "without a batch dimension")]
)
def test_a_batch_that_cannot_be_split_is_reported_with_the_leaf(leaf: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"must have the same number of rows, got 'a' with 2 rows, 'b' {told}"):
        select_rows({"a": torch.zeros(2), "b": leaf}, slice(0, 1))


# --------------------------------------------------------------------------------------------------- Arrow files

TYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    dtype=st.sampled_from(TYPES),
    shape=st.sampled_from([(), (3,), (2, 2), (1, 2, 3)]),
    rows_a_batch=st.integers(1, 5),
    draw=st.data(),
)
def test_several_files_are_read_as_one_array(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dtype: str,
    shape: tuple[int, ...],
    rows_a_batch: int,
    draw: st.DataObject,
) -> None:
    folder, total = tmp_path_factory.mktemp("shards"), sum(lengths)
    size = total * int(np.prod(shape))
    whole = (np.arange(size) % 101).astype(dtype).reshape(total, *shape)
    numbers, paths, start = np.arange(total), [], 0
    for which, length in enumerate(lengths):
        part = slice(start, start := start + length)
        paths.append(folder / f"{which}.arrow")
        write_arrow(paths[-1], {"values": whole[part], "number": numbers[part]}, rows_a_batch)
    shards = ArrowShards(paths)
    assert len(shards) == total
    if not total:
        with pytest.raises(ConfigError, match="the Arrow files must contain at least one row"):
            shards.fetch(at())
        return
    indices = np.array(draw.draw(st.lists(st.integers(0, total - 1), max_size=20)), dtype=np.int64)
    for each in (shards, pickle.loads(pickle.dumps(shards))):
        found = each.fetch(indices)
        assert list(found) == ["values", "number"]
        assert found["values"].numpy().dtype == whole.dtype
        np.testing.assert_array_equal(found["values"].numpy(), whole[indices])
        assert found["number"].tolist() == indices.tolist()
    assert list(ArrowShards(paths, ["number"]).fetch(indices)) == ["number"]
    for outside in (-1, total):
        with pytest.raises(IndexError, match=f"between 0 and {total - 1}, got"):
            shards.fetch(at(0, outside))


def test_modifying_a_batch_does_not_modify_the_file(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", {"x": np.arange(3)})
    shards = ArrowShards([tmp_path / "a.arrow"])
    shards.fetch(at(0, 1))["x"].add_(100)
    assert shards.fetch(at(0, 1))["x"].tolist() == [0, 1]


def test_both_arrow_formats_and_those_of_datasets_can_be_read(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2, 3]})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset.from_dict({"x": [4, 5]}).save_to_disk(tmp_path / "saved")
    [saved] = (tmp_path / "saved").glob("*.arrow")
    assert ArrowShards([tmp_path / "file.arrow", saved]).fetch(at(4, 0, 2))["x"].tolist() == [5, 1, 3]


def test_pickling_sends_paths_instead_of_data(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", {"x": np.zeros(100_000)})
    assert len(pickle.dumps(ArrowShards([tmp_path / "a.arrow"]))) < 1000


def test_a_sliced_table_is_read_from_its_offset(tmp_path: Path) -> None:
    """Arrow stores the offset of a slice separately from its values, also inside lists."""
    lists = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int64()), 2)
    table = pa.table({"x": lists, "y": pa.array(range(6))}).slice(2, 3)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    found = ArrowShards([tmp_path / "a.arrow"]).fetch(at(0, 2))
    assert found["x"].tolist() == [[4, 5], [8, 9]]
    assert found["y"].tolist() == [2, 4]


def corrupt(path: Path) -> None:
    path.write_bytes(b"not an Arrow file at all, but long enough to be one" * 10)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncate_between_batches(path: Path) -> None:
    """Truncate a file so that Arrow would read the remaining rows without an error."""
    os.truncate(path, path.stat().st_size - 8)


def written(table: dict[str, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        whole = pa.table(table)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, whole.schema) as writer:
            writer.write_table(whole)

    return write


def pairs(*values: Any) -> Any:
    return pa.array(values, pa.list_(pa.int64(), 2))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (corrupt, r"cannot be read as an Arrow file: "),
        (truncate, r"cannot be read as an Arrow file: "),
        (truncate_between_batches, r"Arrow file: the end of the file is missing"),
        (lambda path: os.truncate(path, 0), r"cannot be read as an Arrow file: "),
        (lambda path: path.unlink(), r"cannot be read as an Arrow file: .*No such file"),
        (
            written({"y": [1]}),
            "column 'x' must have the same type in all files, got missing in this file and int64 in the previous files",
        ),
        (
            written({"x": [1], "y": [1], "z": [1]}),
            "column 'z' must have the same type in all files, got int64 in this file and missing in the previous files",
        ),
        (
            written({"x": [1.5], "y": [1]}),
            "column 'x' must have the same type in all files, got float64 in this file and int64 in the previous files",
        ),
        (
            written({"x": pairs([1, 2]), "y": [1]}),
            r"column 'x' must have the same type in all files, got int64\[2\] in this file and int64 in",
        ),
        (written({"x": [1, None], "y": [1, 1]}), "column 'x' must not contain missing values, got 1"),
        (written({"x": pairs([1, None], None), "y": [1, 1]}), "column 'x' must not contain missing values, got [12]"),
        (written({"x": ["text"], "y": [1]}), "column 'x' has type string, which cannot be memory-mapped"),
        (written({"x": [[1, 2]], "y": [1]}), "column 'x' has type list<.*Convert it to numbers or to"),
        (written({"x": [True], "y": [1]}), "column 'x' has type bool"),
    ],
)
def test_an_unreadable_file_is_named_with_its_column(tmp_path: Path, spoil: Callable[[Path], None], told: str) -> None:
    paths = [tmp_path / f"{i}.arrow" for i in range(2)]
    for path in paths:
        write_arrow(path, {"x": np.arange(1000), "y": np.arange(1000)}, rows_a_batch=100)
    spoil(paths[1])
    with pytest.raises(ConfigError, match=f"1.arrow.*{told}") as raised:
        ArrowShards(paths)
    assert "\n" not in str(raised.value)


def test_a_missing_column_is_reported_with_the_existing_columns(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", {"x": np.arange(3), "label": np.arange(3)})
    with pytest.raises(ConfigError, match=r"a.arrow does not contain column 'lable'\. Its columns are 'x', 'label'"):
        ArrowShards([tmp_path / "a.arrow"], ["x", "lable"])


def test_a_file_without_columns_or_with_duplicate_columns_is_rejected(tmp_path: Path) -> None:
    for columns, told in (
        ([], "a.arrow contains no columns"),
        (["x", "x"], "a.arrow contains more than one column 'x'"),
    ):
        table = pa.Table.from_arrays([pa.array([1])] * len(columns), names=columns)
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(ConfigError, match=told):
            ArrowShards([tmp_path / "a.arrow"])


def test_a_text_column_that_is_not_requested_is_ignored(tmp_path: Path) -> None:
    written({"x": [1, 2], "text": ["one", None]})(tmp_path / "a.arrow")
    assert ArrowShards([tmp_path / "a.arrow"], ["x"]).fetch(at(1))["x"].tolist() == [2]


def test_an_empty_list_of_files_is_rejected() -> None:
    with pytest.raises(ConfigError, match="requires at least one Arrow file"):
        ArrowShards([])


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_file_with_one_wrong_byte_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    """The file has no checksum, so a wrong number is not detected. A wrong description must not cause a crash."""
    path = tmp_path_factory.mktemp("shard") / "a.arrow"
    write_arrow(path, {"x": np.arange(8), "y": np.ones((8, 2), dtype=np.float32)}, rows_a_batch=4)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(content)
    try:
        shards = ArrowShards([path])
        shards.fetch(np.arange(len(shards)))
    except ConfigError as error:
        assert "a.arrow" in str(error)  # noqa: PT017


# --------------------------------------------------------------------------------------------- made once, for all


@given(st.integers(0, 30), st.integers(1, 5))
def test_the_shards_of_a_corpus_contain_its_samples(
    tmp_path_factory: pytest.TempPathFactory, samples: int, files: int
) -> None:
    blocks = TokenBlocks(torch.arange(samples * 3 + 1, dtype=torch.uint8), 3)
    paths = as_shards(blocks, tmp_path_factory.mktemp("cache"), files)
    assert len(paths) == files
    shards = ArrowShards(paths)
    assert len(shards) == samples
    if samples:
        everything = np.arange(samples)
        torch.testing.assert_close(shards.fetch(everything), blocks.fetch(everything), rtol=0, atol=0)


def test_shards_are_written_once_per_corpus_context_type_and_file_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.zeros(64, dtype=torch.int16)
    first = as_shards(TokenBlocks(tokens, 3), tmp_path)
    others = [
        as_shards(TokenBlocks(tokens + 1, 3), tmp_path),
        as_shards(TokenBlocks(tokens, 4), tmp_path),
        as_shards(TokenBlocks(tokens.view(torch.float16), 3), tmp_path),  # the same bytes
        as_shards(TokenBlocks(tokens, 3), tmp_path, files=2),
    ]
    assert len({paths[0].parent for paths in [first, *others]}) == 5
    assert all(path.is_file() for paths in [first, *others] for path in paths)

    def refuse(*_: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(module, "write_arrow", refuse)
    assert as_shards(TokenBlocks(tokens.clone(), 3), tmp_path) == first


def test_existing_shards_are_found_without_a_copy_of_the_tokens(tmp_path: Path) -> None:
    blocks = TokenBlocks(torch.zeros(1 << 20, dtype=torch.int64), 1 << 10)  # 8 MB
    paths = as_shards(blocks, tmp_path)
    tracemalloc.start()
    try:
        assert as_shards(blocks, tmp_path) == paths
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_incomplete_shards_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_arrow", full)
    with pytest.raises(OSError, match="No space left"):
        as_shards(TokenBlocks(torch.arange(10), 3), tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert len(ArrowShards(as_shards(TokenBlocks(torch.arange(10), 3), tmp_path))) == 3


def test_two_concurrent_writers_of_the_same_shards_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, write = TokenBlocks(torch.arange(10), 3), module.write_arrow

    def while_another_does(path: Path, *columns: Any) -> None:
        monkeypatch.setattr(module, "write_arrow", write)
        as_shards(blocks, tmp_path)
        monkeypatch.undo()
        write(path, *columns)

    monkeypatch.setattr(module, "write_arrow", while_another_does)
    paths = as_shards(blocks, tmp_path)
    assert len(ArrowShards(paths)) == 3
    assert [path.name for path in tmp_path.iterdir()] == [paths[0].parent.name]


def test_parquet_files_are_converted_to_arrow_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / folder / "part.parquet" for folder in ("a", "b")]  # with the same name
    for number, path in enumerate(paths):
        path.parent.mkdir()
        pa.parquet.write_table(pa.table({"x": [number, number + 10]}), path)
    made = as_arrow(paths, tmp_path / "arrow")
    assert ArrowShards(made).fetch(np.arange(4))["x"].tolist() == [0, 10, 1, 11]
    other = as_arrow(paths[1:], tmp_path / "arrow")  # with the same name as the first file
    assert ArrowShards(other).fetch(np.arange(2))["x"].tolist() == [1, 11]
    with monkeypatch.context() as patch:
        patch.delattr("pyarrow.parquet.read_table")
        assert as_arrow(paths, tmp_path / "arrow") == made
    pa.parquet.write_table(pa.table({"x": [2, 12]}), paths[0])
    assert ArrowShards(as_arrow(paths, tmp_path / "arrow")).fetch(np.arange(4))["x"].tolist() == [2, 12, 1, 11]


@pytest.mark.parametrize("spoil", [corrupt, truncate, lambda path: os.truncate(path, 0), Path.unlink])
def test_an_unreadable_parquet_file_is_named_and_nothing_is_written(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    paths = [tmp_path / f"{i}.parquet" for i in range(2)]
    for path in paths:
        pa.parquet.write_table(pa.table({"x": range(1000)}), path)
    spoil(paths[1])
    with pytest.raises(ConfigError, match=r"1.parquet cannot be read as a Parquet file: "):
        as_arrow(paths, tmp_path / "arrow")
    assert not list(tmp_path.rglob("*.arrow"))
