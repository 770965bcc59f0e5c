"""Which exercises a person has passed: noted in a file below `runs/`, and shown as a table. Nothing is sent anywhere.

The file has a name on each line, such as `quickstart.mean_loss`. A line is added by one write to the end of the file,
so two kernels that do so at once both succeed, and whatever else is in the file is left as it is and not counted.
Answers that a program gives, such as nbval, papermill or a test, are not noted: see `a_person_is_there`.
"""

import html
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_tutorial.files import RUNS
from ddp_tutorial.processes.console import ipython_shell

FILE = RUNS / "exercises.txt"  # below the folder that the notebook's kernel works in


def a_person_is_there() -> bool:
    """Did a person run this cell? A front end such as JupyterLab says with each cell that its user can be asked for
    input; programs that execute notebooks say that nobody can. Without a kernel, as in a script: no."""
    kernel = getattr(ipython_shell(), "kernel", None)
    return kernel is not None and bool(kernel.get_parent().get("content", {}).get("allow_stdin"))


def read_passed() -> set[str]:
    """The names in the file, and whatever else its lines hold; empty where it is not there or cannot be read."""
    try:
        return set(FILE.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return set()


def remember(name: str) -> None:
    """Note that a person has passed the exercise, unless that is noted already. Prints one line where the disk refuses:
    the check itself has done its work."""
    if not a_person_is_there() or name in read_passed():
        return
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with FILE.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            half_a_line = size > 0 and file.read(1) != b"\n"  # of a write that was cut short
            file.write(f"{chr(10) if half_a_line else ''}{name}\n".encode())
    except OSError as error:
        print(f"(Not noted for progress(): {FILE} cannot be written, {error.strerror}.)")


@dataclass(frozen=True)
class Chapter:
    """A notebook's exercises: the name of each, and whether it is passed."""

    part: str
    name: str
    path: Path | None  # of the notebook, where it is there
    exercises: Mapping[str, bool]

    @property
    def count(self) -> str:
        return f"{sum(self.exercises.values())} of {len(self.exercises)}"


@dataclass(frozen=True)
class Progress:
    """A table of all exercises by part and notebook; a notebook shows it as such."""

    chapters: tuple[Chapter, ...]

    def __str__(self) -> str:
        passed = sum(sum(chapter.exercises.values()) for chapter in self.chapters)
        return f"{passed} of {sum(len(chapter.exercises) for chapter in self.chapters)} exercises passed"

    def __repr__(self) -> str:
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
            # Elsewhere than in the repository, the front end's folder does not hold the notebook.
            if chapter.path is not None and Path.cwd().is_relative_to(chapter.path.parents[1]):
                name = f'<a href="{html.escape(Path(os.path.relpath(chapter.path)).as_posix())}">{name}</a>'
            each = ", ".join(
                f"<b>&#10003;&nbsp;{each}</b>" if passed else each for each, passed in chapter.exercises.items()
            )
            cells = f"<td>{chapter.count}</td>", f'<td style="text-align: left">{each}</td>'
            rows.append(f'<tr><td style="text-align: left">{name}</td>{"".join(cells)}</tr>')
        return f"<p>{html.escape(str(self))}</p><table>{''.join(rows)}</table>"


def progress_in(names: Collection[str]) -> Progress:
    """The exercises of these names, as `quickstart.mean_loss`, in the order of the notebooks, with what is noted."""
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
