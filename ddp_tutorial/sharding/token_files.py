"""Memory-map token files in the formats of nanoGPT and Megatron-LM.

In nanoGPT, `prepare.py` writes `train.bin` and `val.bin`, which contain only unsigned 16-bit tokens. In Megatron-LM,
`preprocess_data.py` writes `PREFIX.bin` and `PREFIX.idx`. The `.idx` file is an index, and its header specifies the
token dtype.

The files are memory-mapped. Reading a sample loads only the sample's pages, so a file may be larger than memory.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_tutorial.config import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QB")  # after the magic: the version, and the type code
_TYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def map_tokens(path: Path) -> torch.Tensor:
    """Return the tokens of a `.bin` file as a one-dimensional, memory-mapped tensor.

    Args:
        path: The token file. If an index with the suffix `.idx` exists next to the file, the index specifies the token
            dtype. Otherwise, the tokens are unsigned 16-bit integers.

    Raises:
        ConfigError: If the file is missing or empty, if its size is not a multiple of the token size, or if the index
            is damaged or unsupported.
    """
    if not path.is_file():
        raise ConfigError(f"token file {str(path)!r} does not exist; create it, for example with nanoGPT's prepare.py")
    index = path.with_suffix(".idx")
    dtype = np.dtype(_type_of(index) if index.is_file() else np.uint16)
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise ConfigError(
            f"the size of {str(path)!r} must be a positive multiple of {dtype.itemsize} bytes (one {dtype} token), got "
            f"{size} bytes. The file may be incomplete"
        )
    # "c" is copy on write: torch requires writable memory, and the file must not change.
    return torch.from_numpy(np.memmap(path, dtype=dtype, mode="c"))


def _type_of(index: Path) -> type[np.integer[Any]]:
    """Return the token dtype that a Megatron-LM index specifies."""
    with index.open("rb") as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
    if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEADER.size:
        raise ConfigError(
            f"{str(index)!r} is not a Megatron-LM index file. To read 16-bit tokens without an index, remove the file"
        )
    version, code = _HEADER.unpack(head[len(_MAGIC) :])
    if version != 1 or code not in _TYPES:
        raise ConfigError(
            f"{str(index)!r} must have version 1 and an integer type code ({', '.join(map(str, _TYPES))}), got "
            f"version {version} and type code {code}"
        )
    return _TYPES[code]


def largest_token(tokens: torch.Tensor, count: int = 1 << 20) -> int:
    """Return the largest of the first `count` and last `count` tokens. Reading the whole file could take minutes."""
    return max(int(part.long().max()) for part in (tokens[:count], tokens[-count:]))
