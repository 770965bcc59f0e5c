"""The text to learn from, as bytes: one token a byte, 256 kinds, nothing to download and nothing to train first.

`python` is the standard library's own source, which is on every machine that runs this. `tales` is a small sample
of made-up stories that comes with the repository; `tales:N` makes N of them on the spot. `text:PATH` is a file or
a folder of yours.
"""

import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch

from ddp_tutorial.config import ConfigError, did_you_mean

TALES = Path(__file__).parent.parent / "data" / "tales"

# One document in this many is held out for evaluation, by its place in the list, so that none is in both.
HELD_OUT = 20


@dataclass(frozen=True)
class Corpus:
    """Two runs of bytes (uint8 tensors of one dimension): for training, and held out for evaluation."""

    name: str
    train: torch.Tensor
    valid: torch.Tensor


def load_corpus(name: str) -> Corpus:
    """Read a corpus by name. Raises `ConfigError` if it is not known, not there, or empty."""
    kind, _, argument = name.partition(":")
    if kind not in _READERS:
        raise ConfigError(f"corpus {name!r} is not known.{did_you_mean(kind, sorted(_READERS))}")
    documents = [text for text in _READERS[kind](argument) if text]
    if not documents:
        raise ConfigError(f"corpus {name!r} is empty: there is no text in it to learn from")
    if len(documents) == 1:  # one document: hold out its end
        cut = len(documents[0]) - len(documents[0]) // HELD_OUT
        return Corpus(name, _tokens([documents[0][:cut]]), _tokens([documents[0][cut:]]))
    held_out = [i % HELD_OUT == min(HELD_OUT, len(documents)) - 1 for i in range(len(documents))]
    train = [text for text, out in zip(documents, held_out, strict=True) if not out]
    valid = [text for text, out in zip(documents, held_out, strict=True) if out]
    return Corpus(name, _tokens(train), _tokens(valid))


def encode(text: str) -> torch.Tensor:
    """Text -> its UTF-8 bytes as tokens [bytes] (int64)."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """Tokens [bytes] -> text; bytes that are not UTF-8 become a replacement character."""
    return bytes(tokens.tolist()).decode(errors="replace")


def _tokens(documents: list[bytes]) -> torch.Tensor:
    # a NUL byte, which is in no text, marks where one document ends and the next begins
    return torch.from_numpy(np.frombuffer(b"\0".join(documents), dtype=np.uint8).copy())


def _read_python(argument: str) -> list[bytes]:
    if argument:
        raise ConfigError(f"corpus 'python' takes no argument, found 'python:{argument}'")
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [path for path in library.rglob("*.py") if not skipped & set(path.relative_to(library).parts)]
    return [path.read_bytes() for path in sorted(paths)]


def _read_text(argument: str) -> list[bytes]:
    path = Path(argument)
    if not argument or not path.exists():
        raise ConfigError(f"corpus 'text:{argument}': there is no file or folder {argument!r}")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [file.read_bytes() for file in files]


def _read_tales(argument: str) -> list[bytes]:
    if not argument:
        if not TALES.is_dir():
            raise ConfigError("corpus 'tales' reads data/tales of the repository. Elsewhere, use 'tales:3000'.")
        tables = [pyarrow.parquet.read_table(path) for path in sorted(TALES.glob("*.parquet"))]
        return [tale.encode() for table in tables for tale in table["text"].to_pylist()]
    if not argument.isdecimal() or int(argument) == 0:
        raise ConfigError(f"corpus 'tales:{argument}': give a number of stories, such as tales:3000")
    return [tale(number).encode() for number in range(int(argument))]


_READERS: dict[str, Callable[[str], list[bytes]]] = {
    "python": _read_python,
    "tales": _read_tales,
    "text": _read_text,
}


# ------------------------------------------------------------------------------------------------ a teller of tales

_NAMES = ["Ada", "Bo", "Cleo", "Dov", "Elin", "Finn", "Gita", "Hugo", "Ines", "Jomo", "Kaya", "Lev", "Mina", "Noor"]
_KINDS = ["fox", "girl", "boy", "robot", "sparrow", "tailor", "bear", "baker", "snail", "ferryman", "old cat"]
_TRAITS = ["curious", "shy", "patient", "clumsy", "brave", "sleepy", "cheerful", "careful", "proud", "small"]
_PLACES = ["by the sea", "in a quiet valley", "at the edge of the forest", "in a tall house", "under a bridge"]
_WISHES = {
    "a lantern": ["It had rolled under a bench", "A crow had carried it to its nest", "It hung behind the door"],
    "a red kite": ["The wind had left it in a tree", "It was caught on the mill", "It lay in the long grass"],
    "a silver key": ["A fish had swallowed it", "It was in the other pocket", "It was frozen in the pond"],
    "a warm coat": ["Moths had made it full of holes", "It was much too long", "A scarecrow was wearing it"],
    "a song": ["Nobody knew how it ended", "The words were in an old book", "Only the river still hummed it"],
    "a friend": ["Everyone seemed busy", "The neighbour was shy as well", "A letter had gone astray"],
}
_HELPERS = ["an owl", "a lost traveller", "the neighbour", "a kind giant", "the youngest mouse", "a clockmaker"]
_DEEDS = ["shared some bread", "told a joke", "listened for a long time", "asked the right question", "held the rope"]
_TIMES = ["One morning", "On a rainy day", "Just before supper", "In the first week of spring", "One windy night"]
_ENDS = [
    "After that, {name} was never {trait} in the same way again.",
    "They walked home together, and the {kind} laughed all the way.",
    "And from then on there were always two cups on the table.",
    "That night {name} slept better than ever before.",
    "What was lost is found, said {name}, and what is found is shared.",
]


def tale(number: int, seed: int = 0) -> str:
    """One short story. The same number and seed give the same story on every machine, in any order."""
    choose = random.Random(f"{seed}/{number}").choice
    name, kind, trait, place = choose(_NAMES), choose(_KINDS), choose(_TRAITS), choose(_PLACES)
    wish = choose(list(_WISHES))
    trouble, helper, deed = choose(_WISHES[wish]), choose(_HELPERS), choose(_DEEDS)
    other = choose([each for each in _NAMES if each != name])
    sentences = [
        f"Once there was a {trait} {kind} called {name}, who lived {place}.",
        choose([f"More than anything, {name} wanted {wish}.", f"{name} had been looking for {wish} for a year."]),
        f"{choose(_TIMES)}, {name} set out with {other} to find it.",
        f"{trouble}.",
        choose([f'"We will never manage," said {other}.', f'"Do not give up," said {other}.']),
        f"Then they met {helper}, and {name} {deed}.",
        choose(["So they tried once more, and it worked.", "It took all day, but they did it."]),
        choose(_ENDS).format(name=name, kind=kind, trait=trait),
    ]
    return " ".join(sentences)
