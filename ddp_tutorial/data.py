"""Samples that can be read by number, many at a time: a corpus, any sequence, or Arrow files as large as you like.

What is read is a tree: a tensor whose first dimension counts the samples, or dicts, lists and tuples of such trees.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import directory_written_atomically
from ddp_tutorial.sharding import Indices

Tree = Any  # of tensors


def rows_of(tree: Tree, which: torch.Tensor | slice) -> Tree:
    """Some of the samples of a tree."""
    return tree_map(lambda leaf: leaf[which], tree)


def count_rows(tree: Tree) -> int:
    """How many samples there are in a tree. Raises `ValueError` where its tensors do not agree."""
    counts = {len(leaf) if torch.is_tensor(leaf) and leaf.dim() else -1 for leaf in tree_leaves(tree)}
    if len(counts) != 1 or -1 in counts:
        raise ValueError(f"a batch is made of tensors with one row for each sample; found {describe(tree)}")
    return counts.pop()


def describe(tree: Tree) -> str:
    """Dtypes and shapes, in a line."""
    return str(tree_map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if torch.is_tensor(leaf) else repr(leaf), tree))


class Data(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Indices) -> Tree:
        """The samples at `indices` [n], as one tree of n rows, on the CPU."""
        ...


class Windows:
    """A run of tokens, cut into samples of `context` tokens, each with one more, the target of its last."""

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def fetch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """`tokens` [n, context + 1], in the type in which they are kept."""
        positions = torch.from_numpy(indices.copy())[:, None] * self.context + torch.arange(self.context + 1)
        return {"tokens": self.tokens[positions]}


class Rows:
    """Any sequence of samples, a `datasets.Dataset` among them: read one by one, then put together by `collate`."""

    def __init__(self, rows: Sequence[Any], collate: Callable[[list[Any]], Tree] = default_collate) -> None:
        self.rows, self.collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Indices) -> Tree:
        """Raises `ValueError`, naming the row, where one is not like the others."""
        numbers = indices.tolist()
        if not numbers:  # nothing, in the form that samples have
            return rows_of(self.fetch(np.zeros(1, dtype=np.int64)), slice(0, 0))
        many = getattr(self.rows, "__getitems__", None)  # of datasets.Dataset: quicker than one at a time
        found = many(numbers) if many else [self.rows[number] for number in numbers]
        check_alike(found, numbers)
        return self.collate(found)


def check_alike(rows: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` where a row has other columns or other types than the first; `numbers` are theirs."""
    first = _kind(rows[0]) if rows else {}
    for row, number in zip(rows, numbers, strict=True):
        for name in dict.fromkeys((*first, *(kind := _kind(row)))):
            if kind.get(name) != first.get(name):
                where = f"column {name!r} of row" if name else "row"
                raise ValueError(
                    f"{where} {number} is {kind.get(name, 'missing')}, that of row {numbers[0]} is "
                    f"{first.get(name, 'missing')}. The rows of a batch should be alike."
                )


def _kind(row: Any) -> dict[str, str]:
    """What each column is; a row that is no dict has one without a name."""
    columns = row if isinstance(row, Mapping) else {"": row}
    kinds = {str(name): type(value).__name__ for name, value in columns.items()}
    return {name: "a number" if kind in {"int", "float"} else kind for name, kind in kinds.items()}


class ArrowShards:
    """Several Arrow files as one table of numbers, memory-mapped: nothing is read before it is asked for.

    Rows are numbered through the files, so that files need not be equally long, nor as many as there are ranks. A batch
    is taken from the mapped columns by number, without a step of Python for each row. Columns hold numbers, or lists of
    a fixed length; decode Parquet, and prepare text, beforehand (`as_arrow`, `packed`).

    Raises `ConfigError` for a file that is damaged, lacks a column, or has another type in it than the first.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        if not paths:
            raise ConfigError("there are no Arrow files to read")
        self.paths, self.columns = list(paths), columns
        self._chunks: list[dict[str, np.ndarray[Any, Any]]] = []
        first: dict[str, str] = {}
        for path in paths:
            for chunk in _map_arrow(path, columns):
                kinds = {name: f"{column.dtype}{list(column.shape[1:]) or ''}" for name, column in chunk.items()}
                first = first or kinds
                for name in (*first, *kinds):
                    if kinds.get(name) != first.get(name):
                        raise ConfigError(
                            f"{path}: column {name!r} is {kinds.get(name, 'missing')}; "
                            f"in the files before it is {first.get(name, 'missing')}"
                        )
                self._chunks.append(chunk)
        self._chunks = [chunk for chunk in self._chunks if len(next(iter(chunk.values())))]
        lengths = [len(next(iter(chunk.values()))) for chunk in self._chunks]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> Any:  # to another process goes where to read, not what
        return type(self), (self.paths, self.columns)

    def fetch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Each column at `indices` [n], as a tensor [n, ...] of its own type."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        chunk_of = np.searchsorted(self._starts, indices, side="right") - 1
        found = {name: np.empty((len(indices), *c.shape[1:]), c.dtype) for name, c in self._like().items()}
        for number in set(chunk_of.tolist()):
            there = chunk_of == number
            within = indices[there] - self._starts[number]
            for name, column in self._chunks[number].items():
                found[name][there] = column[within]
        return {name: torch.from_numpy(column) for name, column in found.items()}

    def _like(self) -> dict[str, np.ndarray[Any, Any]]:
        if not self._chunks:
            raise ConfigError(f"{len(self.paths)} Arrow files, and no row in any of them: {self.paths[0]} ...")
        return self._chunks[0]


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _map_arrow(path: Path, columns: Sequence[str] | None) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The record batches of a file, each a dict of arrays that lie in the file, not in memory."""
    try:
        mapped = pa.memory_map(str(path))
        data = mapped.read_buffer()
        if data[:6].to_pybytes() == b"ARROW1":  # Arrow has two file formats
            table = pa.ipc.open_file(mapped).read_all()
        else:
            table = pa.ipc.open_stream(data).read_all()
            if data[-8:].to_pybytes() != _END_OF_STREAM:  # Arrow itself takes what there is for all
                raise pa.ArrowInvalid("its end is missing")
        table.validate()
        found = table.column_names
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as an Arrow file; is it damaged? {error}") from None
    names = list(columns) if columns else found
    for name in names:
        if found.count(name) != 1:
            problem = "has no column" if name not in found else "has more than one column"
            raise ConfigError(f"{path} {problem} {name!r}. It has {', '.join(map(repr, found))}.")
    if not names:
        raise ConfigError(f"{path} has no columns")
    batches = table.select(names).to_batches()
    return [{name: _as_array(path, name, batch.column(name)) for name in names} for batch in batches]


def _as_array(path: Path, name: str, column: Any) -> np.ndarray[Any, Any]:
    shape, missing = [len(column)], column.null_count
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.flatten()
        missing += column.null_count
    if missing:
        raise ConfigError(f"{path}: column {name!r} has {missing} missing values; it should have none")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ConfigError(
            f"{path}: column {name!r} is {column.type}. Numbers and lists of a fixed length can be mapped; "
            "turn others into those first, or read the data with source.kind=sharded."
        )
    return column.to_numpy(zero_copy_only=True).reshape(shape)


def write_arrow(path: Path, columns: Mapping[str, np.ndarray[Any, Any]], rows_a_batch: int = 65536) -> None:
    """Arrays [rows, ...] as an Arrow file (the streaming format, which `datasets` maps as well)."""
    arrays = {name: _fixed(array) for name, array in columns.items()}
    table = pa.table(arrays)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)


def _fixed(array: np.ndarray[Any, Any]) -> Any:
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for length in array.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return flat


def as_shards(windows: Windows, cache: Path, files: int = 4) -> list[Path]:
    """The samples of a corpus as `files` Arrow files in a folder of `cache` that is named after them, made once."""
    tokens = windows.tokens.numpy()
    key = hashlib.blake2b(tokens.tobytes(), digest_size=8, person=tokens.dtype.str.encode()).hexdigest()
    folder = cache / f"{key}-{windows.context}-{files}"
    names = [f"{number}-of-{files}.arrow" for number in range(files)]

    def fill(aside: Path) -> None:
        for name, indices in zip(names, np.array_split(np.arange(len(windows)), files), strict=True):
            columns = windows.fetch(indices)
            write_arrow(aside / name, {column: tensor.numpy() for column, tensor in columns.items()})

    _make_once(folder, fill)
    return [folder / name for name in names]


def _make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """`fill` a folder that is not there yet. Should another process do the same, the first to end has made it."""
    if folder.exists():
        return
    try:
        with directory_written_atomically(folder) as aside:
            fill(aside)
    except OSError:
        if not folder.exists():
            raise


def as_arrow(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Decode Parquet files, which are compressed and cannot be mapped, into Arrow files in `folder`, made once."""
    # numbered, as files of two folders may share a name
    names = [f"{number}-{path.stem}.arrow" for number, path in enumerate(paths)]

    def fill(aside: Path) -> None:
        for path, name in zip(paths, names, strict=True):
            try:
                table = pyarrow.parquet.read_table(path)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(f"{path} cannot be read as a Parquet file; is it damaged? {error}") from None
            with pa.OSFile(str(aside / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=65536)

    _make_once(folder, fill)
    return [folder / name for name in names]
