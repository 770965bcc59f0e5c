"""Generate short stories.

A generated dataset can have any size, requires no network access, and is the same on every machine.
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from ddp_tutorial.files import directory_written_atomically


def write_stories(count: int, folder: Path, files: int = 8, seed: int = 0) -> list[Path]:
    """Write `count` stories, numbered from 0, to Parquet files in a new folder, and return the files' paths.

    Each file has one column, `text`, and contains consecutive stories.

    Raises:
        FileExistsError: If the folder exists.
    """
    names = [f"stories-{number}.parquet" for number in range(files)]
    with directory_written_atomically(folder) as unfinished:
        for number, name in enumerate(names):
            mine = range(count * number // files, count * (number + 1) // files)
            text = pa.array([story(each, seed) for each in mine], pa.string())
            pyarrow.parquet.write_table(pa.table({"text": text}), unfinished / name)
    return [folder / name for name in names]


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


def story(number: int, seed: int = 0) -> str:
    """Return one short story. The same number and seed produce the same story on every machine."""
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
