"""Read batches of samples by index from a token corpus, any map-style dataset, or Arrow files.

A batch is a tree: a tensor whose first dimension is the number of samples, or a dict, list, or tuple of such trees.
`as_samples` converts a dataset to an object that implements `Data`.
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
from ddp_tutorial.sharding.source import Tree

CollateFn = Callable[[list[Any]], Tree]  # a list of samples -> one batch, as for torch's DataLoader


# --------------------------------------------------------------------------------------------------------- batches


def select_rows(tree: Tree, which: torch.Tensor | slice) -> Tree:
    """Return the selected rows of a batch as contiguous tensors, because a loss function may call `view`.

    Raises:
        ValueError: If a leaf is not a tensor with at least one dimension. The message contains the leaf's name.
    """
    leaves, form = tree_flatten(tree)
    if not all(torch.is_tensor(leaf) and leaf.dim() for leaf in leaves):
        raise ValueError(f"every tensor in a batch must have the same number of rows, got {_contents(tree)}. {_HINT}")
    return tree_unflatten([leaf[which].contiguous() for leaf in leaves], form)


def as_batch(tree: Tree, count: int) -> Tree:
    """Check that `tree` is a batch of `count` samples, and return the batch.

    Mappings that torch's pytree treats as leaves, such as `transformers.BatchEncoding`, are converted to dicts.

    Raises:
        ValueError: If `tree` is not a batch of `count` samples. The message lists the leaves and their lengths.
    """
    if type(tree) is dict and _are_rows(tree.values(), count):  # fast path: torch's pytree is slow
        return tree
    leaves = tree_leaves(tree)
    if _are_rows(leaves, count):
        return tree
    if any(isinstance(leaf, Mapping) for leaf in leaves):
        return as_batch(tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, tree), count)
    raise ValueError(
        f"every tensor in a batch of {count} samples must have {count} rows, got {_contents(tree)}. {_HINT}"
    )


def _are_rows(leaves: Collection[Any], count: int) -> bool:
    return bool(leaves) and all(torch.is_tensor(leaf) and leaf.dim() and len(leaf) == count for leaf in leaves)


_HINT = (
    "A batch consists of tensors with one row for each sample. Convert the batch in collate_fn or transform, or remove "
    "columns with dataset.select_columns."
)


def _contents(tree: Tree) -> str:
    """Describe the leaves of a batch, as in "'x' with 3 rows, 'name' of type str, not a tensor"."""
    descriptions: dict[str, None] = {}  # an ordered set
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = ".".join(str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", "")))) for entry in path)
        if not torch.is_tensor(leaf):
            name, what = name.rpartition(".")[0] or name, f"of type {type(leaf).__name__}, not a tensor"
        elif leaf.dim():
            what = f"with {len(leaf)} rows"
        else:
            what = "without a batch dimension"
        kind = "a tensor" if torch.is_tensor(leaf) else "an object"
        descriptions[f"{name!r} {what}" if name else f"{kind} {what}"] = None
    return ", ".join(descriptions) or f"an empty {type(tree).__name__}"


# --------------------------------------------------------------------------------------------------------- samples


class Data(Protocol):
    """A dataset whose samples are read by index.

    Sources of kind `sharded` or `dispatched` accept any object that defines `__len__` and `fetch`.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def fetch(self, indices: Indices) -> Tree:
        """Return the samples at `indices` [n] as one tree of CPU tensors with n rows each."""
        ...


def as_samples(dataset: Any, collate_fn: CollateFn | None = None) -> Data:
    """Convert `dataset` to an object whose samples are read by index.

    An object with a `fetch` method (`TokenBlocks`, `ArrowShards`, or a custom class) is returned unchanged. A map-style
    dataset, which defines `__len__` and `__getitem__`, is wrapped. Map-style datasets include torch's `TensorDataset`
    and `Subset`, Hugging Face's `datasets.Dataset`, and lists.

    Args:
        dataset: The dataset.
        collate_fn: A function that combines a list of rows into one batch, as in torch's `DataLoader`. The function
            must pad rows that have different lengths. The default is torch's `default_collate`.

    Raises:
        ConfigError: If `dataset` cannot be read by index, or if it has a `fetch` method and `collate_fn` is not None.
    """
    require_dataset(dataset)
    if hasattr(dataset, "fetch"):
        if collate_fn is not None:
            raise ConfigError(f"the fetch method of {type_name(dataset)} returns batches, so 'collate_fn' must be None")
        return dataset
    if not is_map_style(dataset):
        raise ConfigError(
            f"{type_name(dataset)} must define __len__ and __getitem__. Define both, or read the dataset as a stream: "
            "make_source(..., config=SourceConfig(kind='streamed'))."
        )
    if type(dataset) is TensorDataset and collate_fn is None:
        return Tensors(dataset.tensors)
    return Rows(dataset, collate_fn or default_collate)


def require_dataset(dataset: Any) -> None:
    """Raise `ConfigError` if `dataset` is a `DataLoader`, or a mapping of splits or columns."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "a DataLoader creates its own batches, but a source creates the batches of all ranks. Pass the "
            "DataLoader's dataset and collate_fn: "
            "make_source(loader.dataset, batch_size, world, collate_fn=loader.collate_fn)."
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, dataset))
        raise ConfigError(
            f"a dataset must be a sequence of samples, got {type_name(dataset)} with keys {names}. Pass one of its "
            "splits, or create a dataset from its columns with TensorDataset(x, y) or datasets.Dataset.from_dict(...)."
        )


def is_map_style(dataset: Any) -> bool:
    """Return whether `dataset` is a map-style dataset, whose samples can be read by index."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    try:
        return len(dataset) >= 0
    except (TypeError, NotImplementedError):
        return False


def type_name(dataset: Any) -> str:
    """Return the type name of `dataset` for error messages, such as "a datasets.arrow_dataset.Dataset"."""
    return f"a {type(dataset).__module__}.{type(dataset).__qualname__}".replace("builtins.", "")


class TokenBlocks:
    """A sequence of tokens, split into samples of `context` tokens.

    Each sample also contains the following token, which is the target for the last of the `context` tokens.
    """

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        """Store the 1-D `tokens`, and the number of input tokens per sample."""
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        """Return the number of full samples."""
        return max(0, len(self.tokens) - 1) // self.context

    def fetch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return a dict whose entry `tokens` has the shape [n, context + 1] and the sequence's dtype."""
        which = torch.from_numpy(indices.copy())
        # A view of all samples, without a copy. `unfold` raises an error if the sequence is shorter than a sample.
        size, step = (len(self), self.context + 1), self.tokens.stride(0)
        return {"tokens": self.tokens.as_strided(size, (self.context * step, step))[which]}


class Tensors:
    """The columns of a `TensorDataset`.

    Reading a batch requires one indexing operation per column. Reading and stacking individual rows would take about 30
    times as long.
    """

    def __init__(self, columns: Sequence[torch.Tensor]) -> None:
        """Store the columns, which must have the same length."""
        self.columns = columns

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.columns[0])

    def fetch(self, indices: Indices) -> list[torch.Tensor]:
        """Return the rows at `indices` as a list of columns, as `default_collate` does for tuples."""
        which = torch.from_numpy(indices.copy())
        return [column[which] for column in self.columns]


class Rows:
    """A map-style dataset whose rows are combined by `collate_fn`.

    Rows are read with `__getitems__` if the dataset defines this method, and otherwise one by one.
    """

    def __init__(self, rows: Any, collate_fn: CollateFn = default_collate) -> None:
        """Store the dataset and its `collate_fn`."""
        self.rows, self.collate_fn = rows, collate_fn

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def fetch(self, indices: Indices) -> Tree:
        """Return the rows at `indices` as one batch.

        Raises:
            ValueError: If a row cannot be read, or if the columns or types of two rows differ. The message contains the
                row's index.
        """
        numbers = indices.tolist()
        if not numbers:  # return zero rows with the structure of a batch
            return select_rows(as_batch(self.fetch(np.zeros(1, dtype=np.int64)), 1), slice(0, 0))
        many = getattr(self.rows, "__getitems__", None)  # faster than one row at a time
        rows = _read(many, numbers, numbers) if many else [_read(self.rows.__getitem__, n, [n]) for n in numbers]
        return collate_rows(rows, numbers, self.collate_fn)


def _read(read: Callable[[Any], Any], what: object, numbers: Sequence[int]) -> Any:
    try:
        return read(what)
    except Exception as error:
        raise ValueError(f"{_range(numbers)} cannot be read: {type(error).__name__}: {error}") from error


def _range(numbers: Sequence[int]) -> str:
    count = len(numbers)
    return f"row {numbers[0]}" if count == 1 else f"{count} rows (indices {min(numbers)} to {max(numbers)})"


def collate_rows(rows: Sequence[Any], numbers: Sequence[int], collate_fn: CollateFn) -> Tree:
    """Combine rows into one batch.

    A custom `collate_fn` receives rows of any type. `default_collate` silently drops columns that are missing from the
    first row, and does not convert mixed strings and numbers to tensors. Therefore, `default_collate` receives only
    rows with the same columns and types. `numbers` contains the index of each row, for error messages.

    Raises:
        ValueError: If the rows cannot be combined. The message contains the reason.
    """
    if collate_fn is default_collate:
        check_same_structure(rows, numbers)
    try:
        return collate_fn(list(rows))
    except Exception as error:
        if collate_fn is default_collate and (found := _first_unlike(rows, numbers, _shapes)):
            raise ValueError(
                f"{found}. To combine rows of different shapes, pass a collate_fn that pads them, as for a DataLoader: "
                "make_source(..., collate_fn=...) or as_samples(dataset, collate_fn)."
            ) from error
        name = getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__)
        raise ValueError(
            f"collate_fn ({name}) cannot combine {_range(numbers)}: {type(error).__name__}: {error}"
        ) from error


def check_same_structure(rows: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` if the columns or types of a row differ from those of the first row."""
    if all(isinstance(row, dict) for row in rows) and len({(*row, *map(type, row.values())) for row in rows}) == 1:
        return  # the common case: this check takes a third of the time of the full check
    if found := _first_unlike(rows, numbers, _types):
        raise ValueError(f"{found}. The rows of a batch must have the same columns and types.")


def _first_unlike(
    rows: Iterable[Any], numbers: Sequence[int], columns_of: Callable[[Any], dict[str, str]]
) -> str | None:
    """Describe the first column in which a row differs from the first row, or return None if all rows match."""
    first: dict[str, str] | None = None
    for row, number in zip(rows, numbers, strict=True):
        columns = columns_of(row)
        first = columns if first is None else first
        for name in dict.fromkeys((*first, *columns)):
            if columns.get(name) != first.get(name):
                where = f"column {name!r} of row" if name else "row"
                return (
                    f"{where} {number} is {columns.get(name, 'missing')}, but {where} {numbers[0]} is "
                    f"{first.get(name, 'missing')}"
                )
    return None


def _types(row: Any) -> dict[str, str]:
    """Return the type of each column. A row that is not a mapping counts as one column without a name."""
    columns = row if isinstance(row, Mapping) else {"": row}
    types = {str(name): type(value).__name__ for name, value in columns.items()}
    return {name: "a number" if kind in {"int", "float"} else kind for name, kind in types.items()}


def _shapes(row: Any) -> dict[str, str]:
    """Return the shape of each column. A tuple's columns are named after their positions."""
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
    """A table of numbers, stored in several memory-mapped Arrow files. Rows are loaded only on demand.

    Rows are numbered consecutively across the files. The files may have different lengths, and the number of files does
    not depend on the world size. A batch is gathered from the mapped columns by index, without a Python loop over rows.
    Columns must contain numbers or lists of a fixed length. Before you create an `ArrowShards` object, convert Parquet
    files with `as_arrow`, and tokenize text.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        """Memory-map `columns` of the files, or all columns if `columns` is None.

        Raises:
            ConfigError: If a file is damaged, a column is missing, or the type of a column differs between files.
        """
        if not paths:
            raise ConfigError("ArrowShards requires at least one Arrow file, got none")
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
                            f"{path}: column {name!r} must have the same type in all files, got "
                            f"{kinds.get(name, 'missing')} in this file and "
                            f"{first.get(name, 'missing')} in the previous files"
                        )
                self._chunks.append(chunk)
        self._chunks = [chunk for chunk in self._chunks if len(next(iter(chunk.values())))]
        lengths = [len(next(iter(chunk.values()))) for chunk in self._chunks]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def __len__(self) -> int:
        """Return the total number of rows."""
        return int(self._starts[-1])

    def __reduce__(self) -> Any:
        """Pickle only the paths and column names. The receiving process memory-maps the files again."""
        return type(self), (self.paths, self.columns)

    def fetch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return the rows at `indices` [n]. Each column becomes a tensor of shape [n, ...] with the column's dtype.

        Raises:
            IndexError: If an index is out of range.
        """
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"indices must be between 0 and {len(self) - 1}, got {indices.min()} to {indices.max()}")
        chunk_of = np.searchsorted(self._starts, indices, side="right") - 1
        columns = {name: np.empty((len(indices), *c.shape[1:]), c.dtype) for name, c in self._like().items()}
        for number in set(chunk_of.tolist()):
            selected = chunk_of == number
            within = indices[selected] - self._starts[number]
            for name, column in self._chunks[number].items():
                columns[name][selected] = column[within]
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def _like(self) -> dict[str, np.ndarray[Any, Any]]:
        if not self._chunks:
            raise ConfigError(
                f"the Arrow files must contain at least one row, but all {len(self.paths)} files are empty: "
                f"{self.paths[0]} ..."
            )
        return self._chunks[0]


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def is_random_access(path: Path) -> bool:
    """Return whether an Arrow file is in the random access format rather than the streaming format."""
    with Path(path).open("rb") as file:  # the caller may have passed a string
        return file.read(6) == b"ARROW1"


def _map_arrow(path: Path, columns: Sequence[str] | None) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the record batches of a file, each as a dict of memory-mapped arrays."""
    try:
        mapped = pa.memory_map(str(path))
        if is_random_access(path):
            table = pa.ipc.open_file(mapped).read_all()
        else:
            data = mapped.read_buffer()
            table = pa.ipc.open_stream(data).read_all()
            if data[-8:].to_pybytes() != _END_OF_STREAM:  # Arrow accepts a truncated stream
                raise pa.ArrowInvalid("the end of the file is missing")
        table.validate()
        found = table.column_names
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as an Arrow file: {error}") from None
    names = list(columns) if columns else found
    for name in names:
        if found.count(name) != 1:
            problem = "does not contain" if name not in found else "contains more than one"
            raise ConfigError(f"{path} {problem} column {name!r}. Its columns are {', '.join(map(repr, found))}.")
    if not names:
        raise ConfigError(f"{path} contains no columns")
    batches = table.select(names).to_batches()
    return [{name: _as_array(path, name, batch.column(name)) for name in names} for batch in batches]


def _as_array(path: Path, name: str, column: Any) -> np.ndarray[Any, Any]:
    shape, missing = [len(column)], column.null_count
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.flatten()
        missing += column.null_count
    if missing:
        raise ConfigError(f"{path}: column {name!r} must not contain missing values, got {missing}")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ConfigError(
            f"{path}: column {name!r} has type {column.type}, which cannot be memory-mapped. Convert it to numbers or "
            "to lists of a fixed length, or use source.kind=sharded."
        )
    return column.to_numpy(zero_copy_only=True).reshape(shape)


def write_arrow(path: Path, columns: Mapping[str, np.ndarray[Any, Any]], rows_a_batch: int = 65536) -> None:
    """Write arrays of shape [rows, ...] to an Arrow file that `datasets` can memory-map (streaming format)."""
    arrays = {name: _fixed(array) for name, array in columns.items()}
    table = pa.table(arrays)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)


def _fixed(array: np.ndarray[Any, Any]) -> Any:
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for length in array.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return flat


SHARDS = 4  # the default number of files


def as_shards(blocks: TokenBlocks, cache: Path, files: int = SHARDS) -> list[Path]:
    """Cache a corpus's samples in Arrow files, and return the paths of the files.

    The files are stored in a subfolder of `cache`. The subfolder's name contains a digest of the tokens, the context
    length, and the number of files.
    """
    tokens = blocks.tokens.numpy()
    key = hashlib.blake2b(
        np.ascontiguousarray(tokens).data, digest_size=8, person=tokens.dtype.str.encode()
    ).hexdigest()
    folder = cache / f"{key}-{blocks.context}-{files}"
    names = [f"{number}-of-{files}.arrow" for number in range(files)]

    def fill(unfinished: Path) -> None:
        for name, indices in zip(names, np.array_split(np.arange(len(blocks)), files), strict=True):
            columns = blocks.fetch(indices)
            write_arrow(unfinished / name, {column: tensor.numpy() for column, tensor in columns.items()})

    build_once(folder, fill)
    return [folder / name for name in names]


def as_arrow(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Cache the contents of Parquet files in Arrow files, and return the paths of the Arrow files.

    Parquet files are compressed, so they cannot be memory-mapped. The Arrow files are stored in a subfolder of
    `folder`. The subfolder's name is a digest of the Parquet files' paths, sizes, and modification times.
    The Arrow files of an earlier version are not removed.

    Raises:
        ConfigError: If a Parquet file cannot be read.
    """
    try:
        read = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read as a Parquet file: {error.strerror}") from None
    folder /= hashlib.blake2b(repr(read).encode(), digest_size=8).hexdigest()
    # numbered, because files in different folders may have the same name
    names = [f"{number}-{path.stem}.arrow" for number, path in enumerate(paths)]

    def fill(unfinished: Path) -> None:
        for path, name in zip(paths, names, strict=True):
            try:
                table = pyarrow.parquet.read_table(path)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(f"{path} cannot be read as a Parquet file: {error}") from None
            with pa.OSFile(str(unfinished / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=65536)

    build_once(folder, fill)
    return [folder / name for name in names]
