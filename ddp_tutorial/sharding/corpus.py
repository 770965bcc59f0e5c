"""Load training text as bytes. Each byte is a token, so no tokenizer needs to be downloaded.

`python` is the source code of Python's standard library, which every Python installation includes. `stories` is a small
set of generated stories, stored in the repository. `stories:N` generates N stories.

`text:PATH` reads text from a file or a folder. `json:PATH` and `parquet:PATH` read a text column from a file or a
folder. By default, the column is `text`; `json:notes.jsonl#body` selects the column `body`. `hub:OWNER/NAME` is a
dataset on the Hugging Face Hub. `hub:OWNER/NAME@REVISION` specifies a commit, branch or tag. `hub:OWNER/NAME[:20000]`
streams the first 20,000 documents and does not download the others. The `datasets` package reads `json`, `parquet`, and
`hub` corpora, and the tokens are cached under runs/cache. A cached dataset from the Hub is never updated.

`bin:FOLDER` memory-maps the token files `train.bin` and `val.bin`; see token_files.py.
"""

import glob
import hashlib
import os
import socket
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch

from ddp_tutorial.config import ConfigError, did_you_mean, require_package
from ddp_tutorial.files import PROJECT, RUNS, build_once
from ddp_tutorial.sharding.stories import story
from ddp_tutorial.sharding.token_files import map_tokens

STORIES = PROJECT / "data" / "stories"

# One in `VALIDATION_EVERY` documents, selected by its position in the list, belongs to the validation set.
VALIDATION_EVERY = 20

# The byte between two documents: NUL, which does not occur in text.
SEPARATOR = 0

CACHE = RUNS / "cache"


@dataclass(frozen=True)
class Corpus:
    """A corpus of training and validation tokens, stored as 1-D tensors.

    Bytes are stored as uint8, and a tokenizer's tokens as uint16 or int32. Tokens from token files keep their dtype.

    Attributes:
        name: The name of the corpus.
        train: The training tokens.
        valid: The validation tokens.
        identity: A string that identifies a cached corpus by its folder name, file sizes, and modification times. The
            string is empty if the corpus is not cached.
    """

    name: str
    train: torch.Tensor
    valid: torch.Tensor
    identity: str = ""


def load_corpus(name: str) -> Corpus:
    """Load a corpus by name.

    If the ranks share the cache folder, load the corpus on rank 0 first (see `collectives.rank_zero_first`). The other
    ranks then read the cache.

    Raises:
        ConfigError: If the corpus is unknown, does not exist, or is empty.
    """
    kind, _, argument = name.partition(":")
    if kind == "bin":
        return Corpus(name, map_tokens(Path(argument, "train.bin")), map_tokens(Path(argument, "val.bin")))
    if kind in _READERS:
        return Corpus(name, *_split(name, _READERS[kind](argument)))
    if kind not in _DATASETS:
        raise ConfigError(f"unknown corpus {name!r}.{did_you_mean(kind, sorted([*_READERS, *_DATASETS, 'bin']))}")
    return cached(name, _cache_of(kind, argument), lambda: _split(name, list(_read_dataset(kind, argument))))


def cached(name: str, folder: Path, make: Callable[[], Iterable[torch.Tensor]]) -> Corpus:
    """Return the corpus that is cached in `folder`.

    If the folder does not exist, create it from the training and validation tokens that `make` returns.
    """

    def fill(unfinished: Path) -> None:
        for part, tokens in zip(("train", "valid"), make(), strict=True):
            np.save(unfinished / f"{part}.npy", tokens.numpy())

    build_once(folder, fill)
    files = [folder / f"{part}.npy" for part in ("train", "valid")]
    stats = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    train, valid = (torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False)) for file in files)
    return Corpus(name, train, valid, f"{folder.name} {stats}")


def is_cached(name: str) -> bool:
    """Return whether the corpus can be read without writing a cache.

    Raises:
        ConfigError: If the corpus files do not exist.
    """
    kind, _, argument = name.partition(":")
    return kind not in _DATASETS or _cache_of(kind, argument).exists()


def _cache_of(kind: str, argument: str) -> Path:
    return CACHE / f"corpus-{hashlib.blake2b(_identity(kind, argument).encode(), digest_size=8).hexdigest()}"


def _split(name: str, documents: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    documents = [text for text in documents if text]
    if not documents:
        raise ConfigError(f"corpus {name!r} must contain text, but is empty")
    if len(documents) == 1:  # a single document: its end is the validation set
        cut = len(documents[0]) - len(documents[0]) // VALIDATION_EVERY
        return _tokens([documents[0][:cut]]), _tokens([documents[0][cut:]])
    in_validation = [i % VALIDATION_EVERY == min(VALIDATION_EVERY, len(documents)) - 1 for i in range(len(documents))]
    train = [text for text, out in zip(documents, in_validation, strict=True) if not out]
    valid = [text for text, out in zip(documents, in_validation, strict=True) if out]
    return _tokens(train), _tokens(valid)


def encode(text: str) -> torch.Tensor:
    """Return the UTF-8 bytes of `text` as a 1-D int64 tensor."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """Decode a 1-D tensor of UTF-8 bytes, and replace invalid bytes with U+FFFD.

    Tokens above 255, which a model with a larger vocabulary may generate, are also replaced.
    """
    return bytes(min(token, 255) for token in tokens.tolist()).decode(errors="replace")  # 255 never occurs in UTF-8


def _tokens(documents: list[bytes]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes([SEPARATOR]).join(documents), dtype=np.uint8).copy())


def _read_python(argument: str) -> list[bytes]:
    if argument:
        raise ConfigError(f"corpus 'python' does not accept an argument, got 'python:{argument}'")
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - skipped  # do not list these folders, which contain most of the files
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    return [path.read_bytes() for path in sorted(paths)]


def _read_text(argument: str) -> list[bytes]:
    path = Path(argument)
    if not argument or not path.exists():
        raise ConfigError(f"corpus 'text:{argument}': there is no file or folder {argument!r}")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [file.read_bytes() for file in files]


def _read_stories(argument: str) -> list[bytes]:
    if not argument:
        if not STORIES.is_dir():
            raise ConfigError(
                "corpus 'stories' requires the repository's folder data/stories. Without it, use 'stories:3000'."
            )
        tables = [pyarrow.parquet.read_table(path) for path in sorted(STORIES.glob("*.parquet"))]
        return [text.encode() for table in tables for text in table["text"].to_pylist()]
    if not argument.isdecimal() or int(argument) == 0:
        raise ConfigError(f"the number of stories must be at least 1, as in 'stories:3000', got 'stories:{argument}'")
    return [story(number).encode() for number in range(int(argument))]


_READERS: dict[str, Callable[[str], list[bytes]]] = {
    "python": _read_python,
    "stories": _read_stories,
    "text": _read_text,
}


# ---------------------------------------------------------------------------------------------- through `datasets`

_DATASETS = ["json", "parquet", "hub"]


def _identity(kind: str, argument: str) -> str:
    """Return a string that contains the corpus name and each local file's path, size, and modification time."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(kind, argument)]
    return f"{kind}:{argument} {stats}"


def _files(kind: str, argument: str) -> list[Path]:
    if kind == "hub":
        return []
    where = argument.partition("#")[0]
    path = Path(where)
    endings = {"json": (".json", ".jsonl"), "parquet": (".parquet",)}[kind]
    files = sorted(each for each in path.rglob("*") if each.suffix in endings) if path.is_dir() else [path]
    if not where or not files or not path.exists():
        what = f"{' or '.join(endings)} file in folder" if where and path.is_dir() else "file or folder"
        raise ConfigError(f"corpus '{kind}:{argument}': there is no {what} {where!r}")
    return files


def _read_dataset(kind: str, argument: str) -> Iterator[bytes]:
    """Yield the documents from local files or from a dataset on the Hub.

    Raises:
        ConfigError: If the data cannot be read, or if the column is missing or contains a value that is not text.
    """
    require_package("datasets", "data")
    from datasets import disable_progress_bars, load_dataset  # importing takes a second
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    source, _, column = argument.partition("#")
    where, column = source, column or "text"
    try:
        if kind == "hub":
            where, sliced, first = where.partition("[:")
            where, _, revision = where.partition("@")
            _reach_hub(argument)
            rows = load_dataset(where, split="train", revision=revision or None, streaming=bool(sliced))
            rows = rows.take(int(first.removesuffix("]"))) if sliced else rows
        else:
            files = [glob.escape(str(file)) for file in _files(kind, argument)]  # `load_dataset` expands wildcards
            disable_progress_bars()  # local files are read quickly
            # The default batch size is the size of a file's first row group, and `datasets` rejects an empty file.
            options = {"batch_size": 65536} if kind == "parquet" else {}
            rows = load_dataset(kind, data_files=files, split="train", cache_dir=str(CACHE / "datasets"), **options)
        for number, row in enumerate(rows):
            if column not in row:
                others = ", ".join(map(repr, row))
                raise ConfigError(
                    f"corpus '{kind}:{argument}' does not contain column {column!r}. "
                    f"Use '{kind}:{source}#COLUMN', where COLUMN is one of: {others}"
                )
            if not isinstance(row[column], str):
                got = type(row[column]).__name__
                raise ConfigError(f"corpus '{kind}:{argument}', row {number}: {column!r} must contain text, got {got}")
            yield row[column].encode()
    except ConfigError:
        raise
    except DatasetNotFoundError as error:
        raise ConfigError(f"corpus '{kind}:{argument}' cannot be read: {error}") from None
    except (OSError, RuntimeError, ValueError, DatasetGenerationError) as error:
        cause = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(f"corpus '{kind}:{argument}' cannot be read: {cause}") from None


def _reach_hub(argument: str) -> None:
    """Raise `ConfigError` if the Hub cannot be reached. Without this check, `datasets` would retry five times."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"corpus 'hub:{argument}': {address.hostname} cannot be reached ({error}). To use a dataset that has "
            "already been downloaded, set HF_HUB_OFFLINE=1. To avoid the download, use 'python' or 'stories:100000', "
            "or read your own files with 'json:PATH' or 'parquet:PATH'."
        ) from None
