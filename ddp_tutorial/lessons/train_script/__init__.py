"""The course's training script, stored as `base.py` (written by 06_plain_torch) and one patch per later stage.

A stage is named after the notebook that adds it. `07_sharding_data.diff` contains the changes from notebook 06's script
to notebook 07's script. A notebook calls `write_stage("07")`, which writes the script to `runs/07/train.py` and shows
the diff. To change a stage, write its script with `write_stage`, edit the file, and store it with `store_stage`.
"""

import difflib
import html
import re
from pathlib import Path

FOLDER = Path(__file__).parent
BASE = "06_plain_torch"
# The colors of removed and added lines; the text keeps the color of the theme.
_COLORS = {"-": "rgba(248, 81, 73, 0.2)", "+": "rgba(46, 160, 67, 0.2)", "@": "rgba(84, 174, 255, 0.2)"}


def stages() -> list[str]:
    """Return the names of all stages, in order."""
    return [BASE, *sorted(path.stem for path in FOLDER.glob("*.diff"))]


def script(number: str) -> str:
    """Return the script of a stage.

    Args:
        number: The number of the stage's notebook, such as "07".

    Raises:
        ValueError: If there is no such stage, or if a patch does not apply to the previous stage.
    """
    numbers = [name[:2] for name in stages()]
    if number not in numbers:
        raise ValueError(f"'number' must be one of {', '.join(numbers)}, got {number!r}")
    text = (FOLDER / "base.py").read_text(encoding="utf-8")
    for name in stages()[1 : numbers.index(number) + 1]:
        text = apply(text, (FOLDER / f"{name}.diff").read_text(encoding="utf-8"), name)
    return text


def apply(text: str, patch: str, name: str) -> str:
    """Apply a unified diff, ignoring its line numbers. The old lines of a hunk must occur exactly once in `text`."""
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        found = [match.start() for match in re.finditer(f"^{re.escape(old)}", text, re.MULTILINE)]
        if len(found) != 1:
            raise ValueError(f"{name}: these lines must occur exactly once, but occur {len(found)} times:\n{old}")
        text = text[: found[0]] + new + text[found[0] + len(old) :]
    return text


class Diff:
    """The changes from one script to the next, for display in a notebook."""

    def __init__(self, before: str, after: str, context: int = 3) -> None:
        """Compare two scripts line by line."""
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
        self.lines = [*difflib.unified_diff(old, new, n=context)][2:]

    def __repr__(self) -> str:
        """Return the unified diff without its header."""
        return "".join(re.sub(r"^@@.*", "@@", line) for line in self.lines).rstrip("\n")

    def _repr_html_(self) -> str:
        rows = [(_COLORS.get(line[0], "none"), html.escape(line)) for line in f"{self!r}\n".splitlines(keepends=True)]
        spans = [f'<span style="background: {color}; display: block">{line}</span>' for color, line in rows]
        return f'<pre style="line-height: 1.3">{"".join(spans)}</pre>'


def write_stage(number: str) -> Diff:
    """Write the script of a stage to `runs/NUMBER/train.py`, and return the difference from the previous stage."""
    text, names = script(number), [name[:2] for name in stages()]
    path = Path("runs") / number / "train.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return Diff(script(names[max(0, names.index(number) - 1)]), text)


def store_stage(name: str, path: Path) -> None:
    """Store the script at `path` as the patch that creates the stage `name` from the previous stage."""
    before = script(max(other for other in stages() if other < name)[:2])
    after = Path(path).read_text(encoding="utf-8")
    for context in range(3, 30):  # enough lines to find each hunk
        patch = repr(Diff(before, after, context)) + "\n"
        try:
            if apply(before, patch, name) == after:
                (FOLDER / f"{name}.diff").write_text(patch, encoding="utf-8")
                return
        except ValueError:
            continue
    raise ValueError(
        f"{name}: the original lines of each hunk must occur exactly once in the script of the previous stage"
    )
