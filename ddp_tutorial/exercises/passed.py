"""Record passed exercises in a local file under `runs/`, and show all exercises in a table.

No data leaves this machine. Each line of the file is an exercise name, such as `quickstart.mean_loss`. Each line is
appended in a single write, so two kernels can safely append at the same time. Unknown lines are kept, but not counted.
Answers are not recorded if a test or a tool such as nbval or papermill runs them (see `a_person_is_there`).
"""

import html
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_tutorial.files import RUNS
from ddp_tutorial.processes.console import a_person_is_there

FILE = RUNS / "exercises.txt"  # relative to the working directory of the notebook's kernel


def read_passed() -> set[str]:
    """Return the set of lines in the file, or an empty set if the file is missing or unreadable."""
    try:
        return set(FILE.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return set()


def remember(name: str) -> None:
    """Record that the user passed the exercise `name` interactively, unless the file already contains `name`.

    If the file cannot be written, print one line instead of raising an error, because the check itself succeeded.
    """
    if not a_person_is_there() or name in read_passed():
        return
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with FILE.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            half_a_line = size > 0 and file.read(1) != b"\n"  # from an interrupted write
            file.write(f"{chr(10) if half_a_line else ''}{name}\n".encode())
    except OSError as error:
        print(f"(The result was not recorded for progress(), because {FILE} cannot be written: {error.strerror}.)")


@dataclass(frozen=True)
class Chapter:
    """The exercises of one notebook. `exercises` maps each exercise name to True if the exercise is passed."""

    part: str
    name: str
    path: Path | None  # path of the notebook, or None if there is no notebook
    exercises: Mapping[str, bool]

    @property
    def count(self) -> str:
        """The number of exercises passed, as a string such as "1 of 3"."""
        return f"{sum(self.exercises.values())} of {len(self.exercises)}"


@dataclass(frozen=True)
class Progress:
    """A table of all exercises by part and notebook. Jupyter renders the table as HTML."""

    chapters: tuple[Chapter, ...]

    def __str__(self) -> str:
        """Return the number of exercises passed, as a string such as "1 of 3 exercises passed"."""
        passed = sum(sum(chapter.exercises.values()) for chapter in self.chapters)
        return f"{passed} of {sum(len(chapter.exercises) for chapter in self.chapters)} exercises passed"

    def __repr__(self) -> str:
        """Return the table as text."""
        width = max((len(chapter.name) for chapter in self.chapters), default=0)
        lines, part = [str(self)], None
        for chapter in self.chapters:
            if chapter.part != part:
                lines.append(f"\n{chapter.part}".rstrip(" "))
                part = chapter.part
            each = "  ".join(f"[{'x' if passed else ' '}] {name}" for name, passed in chapter.exercises.items())
            lines.append(f"  {chapter.name:{width}}  {chapter.count}  {each}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows, part = [], None
        for chapter in self.chapters:
            if chapter.part != part:
                rows.append(f'<tr><th colspan="3" style="text-align: left">{html.escape(chapter.part)}</th></tr>')
                part = chapter.part
            name = html.escape(chapter.name)
            # Outside the repository, the front end's folder does not contain the notebook.
            if chapter.path is not None and Path.cwd().is_relative_to(chapter.path.parents[1]):
                name = f'<a href="{html.escape(Path(os.path.relpath(chapter.path)).as_posix())}">{name}</a>'
            each = ", ".join(
                f"<b>&#10003;&nbsp;{each}</b>" if passed else each for each, passed in chapter.exercises.items()
            )
            cells = f"<td>{chapter.count}</td>", f'<td style="text-align: left">{each}</td>'
            rows.append(f'<tr><td style="text-align: left">{name}</td>{"".join(cells)}</tr>')
        return f"<p>{html.escape(str(self))}</p><table>{''.join(rows)}</table>"


def progress_in(names: Collection[str]) -> Progress:
    """Return a table of the exercises in `names` (such as `quickstart.mean_loss`), in notebook order."""
    from ddp_tutorial.experiments.notebooks import chapters

    passed = read_passed()
    of_module: dict[str, dict[str, bool]] = {}
    for name in names:
        module, _, exercise = name.partition(".")
        of_module.setdefault(module, {})[exercise] = name in passed
    found = [
        Chapter(each.part, each.path.stem, each.path, of_module.pop(module))
        for each in chapters()
        if (module := each.path.stem.lstrip("0123456789_")) in of_module
    ]
    return Progress((*found, *(Chapter("", module, None, of_module[module]) for module in sorted(of_module))))
