"""Load tokenizers and tokenize corpora.

The default tokenizer is `bytes`. Other tokenizers are loaded from `tokenizer.json` files, the format of Hugging Face's
`tokenizers` package.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ddp_tutorial.config import ConfigError, require_package
from ddp_tutorial.sharding.corpus import CACHE, SEPARATOR, Corpus, cached, decode, encode

BYTES = "bytes"
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")  # the first token in the vocabulary is used


@dataclass(frozen=True)
class Tokenizer:
    """Functions that convert between text and tokens.

    Attributes:
        encode: A function that converts text to int64 tokens of shape [tokens].
        decode: A function that converts tokens to text.
        separator: The tokens between two documents.
        vocab: The vocabulary size, which is one more than the largest token.
    """

    encode: Callable[[str], torch.Tensor]
    decode: Callable[[torch.Tensor], str]
    separator: tuple[int, ...]
    vocab: int


def load_tokenizer(name: str) -> Tokenizer:
    """Return the `bytes` tokenizer, or load a tokenizer from a `tokenizer.json` file.

    Raises:
        ConfigError: If the file does not exist or contains no tokenizer, or if the `tokenizers` package is not
            installed.
    """
    if name == BYTES:
        return Tokenizer(encode, decode, (SEPARATOR,), 256)
    if not Path(name).is_file():
        raise ConfigError(f"'tokenizer' must be {BYTES!r} or a tokenizer.json file, got {name!r}, which is not a file")
    require_package("tokenizers", "examples")
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_file(name)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {error}") from None
    ends = [inner.token_to_id(token) for token in _END_OF_TEXT]
    return Tokenizer(
        lambda text: torch.tensor(inner.encode(text).ids, dtype=torch.int64),
        lambda tokens: inner.decode(tokens.tolist()),
        tuple([end for end in ends if end is not None][:1]),
        max(inner.get_vocab().values(), default=-1) + 1,  # the ids may have gaps
    )


def tokenize(corpus: Corpus, name: str) -> Corpus:
    """Tokenize a text corpus with the tokenizer `name`.

    The tokens are cached under runs/cache. If the ranks share the cache folder, rank 0 must call this function first.

    Raises:
        ConfigError: If the tokenizer cannot be loaded; see `load_tokenizer`.
    """
    if name == BYTES:
        return corpus
    tokenizer = load_tokenizer(name)
    key = hashlib.blake2b(Path(name).read_bytes(), digest_size=8)
    key.update(corpus.identity.encode())  # a cached corpus may be large, so its tokens are not hashed
    for part in () if corpus.identity else (corpus.train, corpus.valid):
        key.update(part.numpy().data)
    folder = CACHE / f"tokens-{key.hexdigest()}"
    return cached(corpus.name, folder, lambda: (_tokenized(part, tokenizer) for part in (corpus.train, corpus.valid)))


def _tokenized(text: torch.Tensor, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the tokens of all documents, with a separator between consecutive documents."""
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.int32
    separator = np.array(tokenizer.separator, dtype)
    pieces: list[np.ndarray] = []
    for document in bytes(text.numpy().data).split(bytes([SEPARATOR])):
        pieces += [tokenizer.encode(document.decode(errors="replace")).numpy().astype(dtype), separator]
    return torch.from_numpy(np.concatenate(pieces[:-1]))
