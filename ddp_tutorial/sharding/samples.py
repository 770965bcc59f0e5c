"""Samples that are read by number, many at a time: tokens of a corpus, any map-style dataset, or Arrow files.

What is read is a tree: a tensor whose first dimension counts the samples, or dicts, lists and tuples of such trees.
`as_samples` makes all of them from what a user has.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ddp_tutorial.compat import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import build_once
from ddp_tutorial.sharding.permutation import Indices

Tree = Any  # of tensors
CollateFn = Callable[[list[Any]], Tree]  # a list of samples -> one batch, as for torch's DataLoader


# --------------------------------------------------------------------------------------------------------- batches


def select_rows(tree: Tree, which: torch.Tensor | slice) -> Tree:
    """Some of the samples of a batch, as contiguous tensors, since a loss may call `view` on them.

    Raises `ValueError`, naming the leaf, for one that is not a tensor with rows.
    """
    leaves, form = tree_flatten(tree)
    if not all(torch.is_tensor(leaf) and leaf.dim() for leaf in leaves):
        raise ValueError(f"the samples of a batch cannot be told apart: {_contents(tree)}. {_HINT}")
    return tree_unflatten([leaf[which].contiguous() for leaf in leaves], form)


def as_batch(tree: Tree, count: int) -> Tree:
    """`tree`, if it is a batch of `count` samples; mappings that torch's pytree takes for leaves, such as the
    `BatchEncoding` of `transformers`, as dicts. Raises `ValueError`, naming the leaves and their lengths, if not."""
    if type(tree) is dict and _are_rows(tree.values(), count):  # nearly always, and torch's pytree is slow
        return tree
    leaves = tree_leaves(tree)
    if _are_rows(leaves, count):
        return tree
    if any(isinstance(leaf, Mapping) for leaf in leaves):
        return as_batch(tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, tree), count)
    raise ValueError(f"a batch of {count} samples came out as {_contents(tree)}. {_HINT}")


def _are_rows(leaves: Collection[Any], count: int) -> bool:
    return bool(leaves) and all(torch.is_tensor(leaf) and leaf.dim() and len(leaf) == count for leaf in leaves)


_HINT = (
    "A batch is made of tensors with one row for each sample. Make it so in collate_fn or transform, or leave out what "
    "is not needed (dataset.select_columns)."
)


def _contents(tree: Tree) -> str:
    """What a batch holds, in words: 'x' has 3 rows, 'y' has 4 rows, 'name' is a str."""
    told: dict[str, None] = {}  # in order, each once
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = ".".join(str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", "")))) for entry in path)
        if not torch.is_tensor(leaf):
            name, what = name.rpartition(".")[0] or name, f"is a {type(leaf).__name__}, not a tensor"
        elif leaf.dim():
            what = f"has {len(leaf)} rows"
        else:
            what = "is a single number"
        told[f"{name!r} {what}" if name else f"a tensor that {what}" if torch.is_tensor(leaf) else what] = None
    return ", ".join(told) or f"an empty {type(tree).__name__}"


# --------------------------------------------------------------------------------------------------------- samples


class Data(Protocol):
    """Samples that are read by number. What has these two methods fits every source of kind sharded or dispatched."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Indices) -> Tree:
        """The samples at `indices` [n], as one tree of n rows, on the CPU."""
        ...


def as_samples(dataset: Any, collate_fn: CollateFn | None = None) -> Data:
    """`dataset` as samples that are read by number.

    What has `fetch` (`TokenBlocks`, `ArrowShards`, a class of your own) is returned as it is. Any map-style dataset,
    one with `__len__` and `__getitem__`, is read row by row: torch's `Dataset`, `TensorDataset` and `Subset`, a
    `datasets.Dataset`, a list. `collate_fn` makes one batch of a list of its rows, as in torch's DataLoader: with rows
    of different lengths it pads them. Without one it is torch's `default_collate`.

    Raises `ConfigError` for what has no length or no numbers, and so can only be streamed.
    """
    require_dataset(dataset)
    if hasattr(dataset, "fetch"):
        if collate_fn is not None:
            raise ConfigError(f"{type_name(dataset)} gives whole batches (fetch): leave out collate_fn")
        return dataset
    if not is_map_style(dataset):
        raise ConfigError(
            f"{type_name(dataset)} has no length, or no samples by number: it lacks __len__ or __getitem__. Add both, "
            "or follow it as a stream: make_source(..., config=SourceConfig(kind='streamed'))."
        )
    if type(dataset) is TensorDataset and collate_fn is None:
        return Tensors(dataset.tensors)
    return Rows(dataset, collate_fn or default_collate)


def require_dataset(dataset: Any) -> None:
    """Raise `ConfigError` for what is often taken for a dataset: a DataLoader, and a mapping of splits or columns."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "a DataLoader cuts batches itself, which a source does for all ranks. Give its dataset and its collate_fn: "
            "make_source(loader.dataset, batch_size, world, collate_fn=loader.collate_fn)."
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, dataset))
        raise ConfigError(
            f"{type_name(dataset)} is a mapping of {names}, not a list of samples. Choose one of its splits, or make "
            "a dataset of its columns: TensorDataset(x, y), datasets.Dataset.from_dict(...)."
        )


def is_map_style(dataset: Any) -> bool:
    """Is it a map-style dataset, whose samples can be read by number?"""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    try:
        return len(dataset) >= 0
    except (TypeError, NotImplementedError):
        return False


def type_name(dataset: Any) -> str:
    """What kind of thing it is, for a message: "a datasets.arrow_dataset.Dataset"."""
    return f"a {type(dataset).__module__}.{type(dataset).__qualname__}".replace("builtins.", "")


class TokenBlocks:
    """A run of tokens, cut into samples of `context` tokens, each with one more, the target of its last."""

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def fetch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """`tokens` [n, context + 1], in the type in which they are kept."""
        which = torch.from_numpy(indices.copy())
        # All samples as a view, nothing is copied. `unfold` would not cut a run that is shorter than a sample.
        size, step = (len(self), self.context + 1), self.tokens.stride(0)
        return {"tokens": self.tokens.as_strided(size, (self.context * step, step))[which]}


class Tensors:
    """The columns of a `TensorDataset`. A batch is indexed out of each at once, which takes a thirtieth of the time
    that reading and stacking row by row does, and gives the same."""

    def __init__(self, columns: Sequence[torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def fetch(self, indices: Indices) -> list[torch.Tensor]:
        """Each column at `indices`, in a list, as `default_collate` makes of rows that are tuples."""
        which = torch.from_numpy(indices.copy())
        return [column[which] for column in self.columns]


class Rows:
    """A map-style dataset: rows are read one by one, or with `__getitems__` where it has that, and put together by
    `collate_fn`."""

    def __init__(self, rows: Any, collate_fn: CollateFn = default_collate) -> None:
        self.rows, self.collate_fn = rows, collate_fn

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Indices) -> Tree:
        """Raises `ValueError`, naming the row, where one cannot be read or is not like the others."""
        numbers = indices.tolist()
        if not numbers:  # no rows, in the form that a batch has
            return select_rows(as_batch(self.fetch(np.zeros(1, dtype=np.int64)), 1), slice(0, 0))
        many = getattr(self.rows, "__getitems__", None)  # quicker than one at a time
        rows = _read(many, numbers, numbers) if many else [_read(self.rows.__getitem__, n, [n]) for n in numbers]
        return collate_rows(rows, numbers, self.collate_fn)


def _read(read: Callable[[Any], Any], what: object, numbers: Sequence[int]) -> Any:
    try:
        return read(what)
    except Exception as error:
        raise ValueError(f"{_range(numbers)} cannot be read: {type(error).__name__}: {error}") from error


def _range(numbers: Sequence[int]) -> str:
    return f"row {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} rows from {min(numbers)} to {max(numbers)}"


def collate_rows(rows: Sequence[Any], numbers: Sequence[int], collate_fn: CollateFn) -> Tree:
    """One batch of several rows, whose numbers are `numbers`. Raises `ValueError`, saying why, where that fails.

    A `collate_fn` of the user's may get rows of any kind. `default_collate` would in silence leave out a column that
    the first row lacks, and keep a list of strings and numbers, so it gets rows with the same columns and types only.
    """
    if collate_fn is default_collate:
        check_same_structure(rows, numbers)
    try:
        return collate_fn(list(rows))
    except Exception as error:
        if collate_fn is default_collate and (found := _first_unlike(rows, numbers, _shapes)):
            raise ValueError(
                f"{found}. Rows of different shapes need a collate_fn that pads them, like that of torch's DataLoader: "
                "make_source(..., collate_fn=...) or as_samples(dataset, collate_fn)."
            ) from error
        name = getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__)
        raise ValueError(
            f"collate_fn ({name}) cannot make a batch of {_range(numbers)}: {type(error).__name__}: {error}"
        ) from error


def check_same_structure(rows: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` where a row has other columns or other types than the first; `numbers` are theirs."""
    if all(isinstance(row, dict) for row in rows) and len({(*row, *map(type, row.values())) for row in rows}) == 1:
        return  # as nearly always, and seen in a third of the time
    if found := _first_unlike(rows, numbers, _types):
        raise ValueError(f"{found}. The rows of a batch should be alike.")


def _first_unlike(
    rows: Iterable[Any], numbers: Sequence[int], columns_of: Callable[[Any], dict[str, str]]
) -> str | None:
    """Which column of which row differs from the first row, in words, if any does."""
    first: dict[str, str] | None = None
    for row, number in zip(rows, numbers, strict=True):
        columns = columns_of(row)
        first = columns if first is None else first
        for name in dict.fromkeys((*first, *columns)):
            if columns.get(name) != first.get(name):
                where = f"column {name!r} of row" if name else "row"
                return (
                    f"{where} {number} is {columns.get(name, 'missing')}, that of row {numbers[0]} is "
                    f"{first.get(name, 'missing')}"
                )
    return None


def _types(row: Any) -> dict[str, str]:
    """The type of each column; a row that is no dict has one column, without a name."""
    columns = row if isinstance(row, Mapping) else {"": row}
    types = {str(name): type(value).__name__ for name, value in columns.items()}
    return {name: "a number" if kind in {"int", "float"} else kind for name, kind in types.items()}


def _shapes(row: Any) -> dict[str, str]:
    """The shape of each column; the columns of a tuple are numbered."""
    columns = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, tuple) else {"": row}
    return {str(name): _shape(value) for name, value in columns.items()}


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return str({name: _shape(each) for name, each in value.items()})
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(dict.fromkeys(map(_shape, value)))})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


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

    def __reduce__(self) -> Any:  # another process gets the paths, and maps the files itself
        return type(self), (self.paths, self.columns)

    def fetch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Each column at `indices` [n], as a tensor [n, ...] of its own type. Raises `IndexError` for rows beyond the
        end."""
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


SHARDS = 4  # files, unless another number is asked for


def as_shards(blocks: TokenBlocks, cache: Path, files: int = SHARDS) -> list[Path]:
    """The samples of a corpus as `files` Arrow files, made once.

    They lie in a folder of `cache` that is named after a digest of the tokens, the context and the number of files.
    """
    tokens = blocks.tokens.numpy()
    key = hashlib.blake2b(tokens.tobytes(), digest_size=8, person=tokens.dtype.str.encode()).hexdigest()
    folder = cache / f"{key}-{blocks.context}-{files}"
    names = [f"{number}-of-{files}.arrow" for number in range(files)]

    def fill(unfinished: Path) -> None:
        for name, indices in zip(names, np.array_split(np.arange(len(blocks)), files), strict=True):
            columns = blocks.fetch(indices)
            write_arrow(unfinished / name, {column: tensor.numpy() for column, tensor in columns.items()})

    build_once(folder, fill)
    return [folder / name for name in names]


def as_arrow(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Decode Parquet files, which are compressed and cannot be mapped, into Arrow files in `folder`, made once."""
    # numbered, as files of two folders may share a name
    names = [f"{number}-{path.stem}.arrow" for number, path in enumerate(paths)]

    def fill(unfinished: Path) -> None:
        for path, name in zip(paths, names, strict=True):
            try:
                table = pyarrow.parquet.read_table(path)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(f"{path} cannot be read as a Parquet file; is it damaged? {error}") from None
            with pa.OSFile(str(unfinished / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=65536)

    build_once(folder, fill)
    return [folder / name for name in names]
