"""Write the Sphinx sources of the book.

The sources have the layout of the repository, so that a relative link works on GitHub and in the book:

    index.md         the README and the tree of all pages
    book/*.md        the pages of this directory
    notebooks/       the notebooks with their committed outputs
    api/             the API reference, generated from docstrings
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from api import write_api
from ddp_tutorial.experiments.notebooks import NOTEBOOKS, Chapter, chapters

BOOK = Path(__file__).parent
README = BOOK.parent / "README.md"
GLOSSARY = BOOK / "glossary.md"
GUIDES = ("installation", "user_guide", "launching", "strategies", "planning", "coming_from", "troubleshooting")
REFERENCE = ("book/configuration", "api/index", "book/glossary", "book/benchmarks", "book/gpus", "genindex")
PROJECT = ("threat_model", "contributing")


class Term(NamedTuple):
    """A row of the glossary."""

    names: tuple[str, ...]  # synonyms, or terms that are defined together
    definition: str  # Markdown
    notebooks: tuple[Path, ...]  # that introduce the term, relative to `notebooks/`


def write_pages(folder: Path) -> None:
    """Write the sources of the whole book to the new directory `folder`."""
    folder.mkdir(parents=True)
    for chapter in chapters():
        copy = folder / "notebooks" / chapter.path.relative_to(NOTEBOOKS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(chapter.path, copy)
    shutil.copytree(NOTEBOOKS / "figures", folder / "notebooks" / "figures")
    (folder / "book").mkdir()
    for page in [*BOOK.glob("*.md"), *BOOK.glob("*.svg")]:
        shutil.copy(page, folder / "book")
    (folder / "book" / "glossary.md").write_text(glossary_page(), encoding="utf-8")
    write_api(folder / "api")
    (folder / "index.md").write_text(first_page(), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- the first page


def first_page() -> str:
    """Return the README, followed by the table of contents, which Sphinx shows in the sidebar."""
    parts: dict[str, list[Chapter]] = {}
    for chapter in chapters():
        parts.setdefault(chapter.part or "More", []).append(chapter)
    text = [README.read_text(encoding="utf-8"), toctree("Guides", [f"book/{name}" for name in GUIDES])]
    for part, those in parts.items():
        text.append(toctree(part, [f"{title_of(each.path)} <{source_of(each.path)}>" for each in those]))
    text.append(toctree("Reference", REFERENCE))
    text.append(toctree("Project", [f"book/{name}" for name in PROJECT]))
    return "\n".join(text)


def toctree(caption: str, pages: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    listed = "\n".join(pages)
    return f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n:titlesonly:\n\n{listed}\n```\n"


def source_of(notebook: Path) -> str:
    return f"notebooks/{notebook.relative_to(NOTEBOOKS).as_posix()}"


def title_of(notebook: Path) -> str:
    """Return the title of a notebook in the sidebar: `04_ddp_from_scratch.ipynb` -> "04 DDP from scratch"."""
    words = notebook.stem.split("_")
    number = f"{words.pop(0)} " if words[0].isdigit() else ""
    words = [word.upper() if word == "ddp" else word for word in words]
    return f"{number}{words[0][0].upper()}{' '.join(words)[1:]}"


# ------------------------------------------------------------------------------------------------------ the glossary


def glossary() -> list[Term]:
    """Return the rows of the glossary's tables."""
    return [*_terms(GLOSSARY.read_text(encoding="utf-8"))]


def _terms(text: str) -> Iterator[Term]:
    for names, definition, notebooks in re.findall(r"^\| (.+?) \| (.+) \| (\[.+) \|$", text, re.MULTILINE):
        paths = tuple(Path(path) for path in re.findall(r"\(\.\./notebooks/([\w/]+\.ipynb)\)", notebooks))
        yield Term(tuple(names.split(", ")), definition, paths)


def glossary_page() -> str:
    """Return the glossary with Sphinx's `glossary` directive in place of each table."""
    return re.sub(r"(?:^\|.+\n)+", _directive, GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _directive(table: re.Match[str]) -> str:
    entries = []
    for term in sorted(_terms(table[0]), key=lambda term: plain(term.names[0]).lower()):
        links = ", ".join(f"[{title_of(path)}](../notebooks/{path.as_posix()})" for path in term.notebooks)
        names = "\n".join(map(plain, term.names))
        entries.append(f"{names}\n  {term.definition}\n  Notebook: {links}.\n")
    listed = "\n".join(entries)
    return f"```{{glossary}}\n{listed}```\n"


def plain(markdown: str) -> str:
    return markdown.replace("`", "")
