"""The sources of the book: the notebooks as they are, the Markdown files of this folder, and pages made of the README
and of docstrings.

Nothing is said twice: chapters and their parts, words and symptoms are those of the README's tables, so a notebook that
is added there is in the book. A section of the README becomes a page.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from api import write_api
from ddp_tutorial.experiments.notebooks import NOTEBOOKS, Chapter, chapters

README = NOTEBOOKS.parent / "README.md"
OWN_PAGES = sorted(Path(__file__).parent.glob("*.md"))
THE_NOTEBOOKS, WORDS, SYMPTOMS = "The notebooks", "Words", "When something goes wrong"
# The sections that a reader comes back to; all others of the README are about using the project.
LOOKED_UP = ("words", "symptoms", "api/index", "genindex")


class Word(NamedTuple):
    """A row of the README's table of words."""

    terms: tuple[str, ...]  # that mean the same, or belong together
    meaning: str  # Markdown
    shown: tuple[Path, ...]  # the notebooks, below `notebooks`


def write_pages(folder: Path) -> None:
    """Write the sources of the whole book to `folder`, which must not exist. Raises `SystemExit` where the README lacks
    a table that the book is made of."""
    folder.mkdir(parents=True)
    for chapter in chapters():
        copy = folder / "notebooks" / chapter.path.relative_to(NOTEBOOKS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(chapter.path, copy)
    shutil.copytree(NOTEBOOKS / "figures", folder / "notebooks" / "figures")
    beginning, sections = read_readme()
    using = []
    for title, text in sections.items():
        if title not in {THE_NOTEBOOKS, SYMPTOMS}:
            using.append(slug(title))
            (folder / f"{slug(title)}.md").write_text(f"# {title}\n{promoted(text)}", encoding="utf-8")
    for page in OWN_PAGES:
        using.append(page.stem)
        shutil.copy(page, folder)
    (folder / "words.md").write_text(page_of_words(), encoding="utf-8")
    (folder / "symptoms.md").write_text(page_of_symptoms(sections), encoding="utf-8")
    write_api(folder / "api")
    (folder / "index.md").write_text(first_page(beginning, using), encoding="utf-8")


def read_readme() -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the text of each section by its title."""
    text = README.read_text(encoding="utf-8").replace("](book/", "](")  # the book has these pages beside the README's
    beginning, *rest = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    for title in (THE_NOTEBOOKS, SYMPTOMS):
        if title not in sections:
            raise SystemExit(f"README.md has no section '## {title}', of which the book makes pages")
    return beginning, sections


def slug(title: str) -> str:
    return "_".join(re.findall(r"\w+", title.lower()))


def promoted(text: str) -> str:
    """Headings one level up: the section has a page of its own."""
    return re.sub(r"^#(#+ )", r"\1", text, flags=re.MULTILINE)


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the first table in `text`, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


# ---------------------------------------------------------------------------------------------------- the first page


def first_page(beginning: str, using: list[str]) -> str:
    """The beginning of the README, the chapters with what they show, and the tree of all pages."""
    parts: dict[str, list[Chapter]] = {}
    for chapter in chapters():
        parts.setdefault(chapter.part or "More", []).append(chapter)
    how = "This book is made of the notebooks, with the outputs that were committed."
    text = [beginning, f"{how} To step through them yourself, see [Try it](try_it.md).\n\n## The chapters\n"]
    for part, those in parts.items():
        text.append(f"\n### {part}\n\n| chapter | what it shows |\n|---|---|")
        text += [f"| [{name_of(each.path)}]({source_of(each.path)}) | {each.shows or 'new'} |" for each in those]
    for part, those in parts.items():
        text.append(toctree(part, [f"{name_of(each.path)} <{source_of(each.path)}>" for each in those]))
    text += [toctree("Look up", list(LOOKED_UP)), toctree("Use it", using)]
    return "\n".join(text)


def toctree(caption: str, pages: list[str]) -> str:
    listed = "\n".join(pages)
    return f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n:titlesonly:\n\n{listed}\n```\n"


def source_of(notebook: Path) -> str:
    return f"notebooks/{notebook.relative_to(NOTEBOOKS).as_posix()}"


def name_of(notebook: Path) -> str:
    """`04_ddp_from_scratch.ipynb` -> "04 DDP from scratch"."""
    words = notebook.stem.split("_")
    number = f"{words.pop(0)} " if words[0].isdigit() else ""
    words = [word.upper() if word == "ddp" else word for word in words]
    return f"{number}{words[0][0].upper()}{' '.join(words)[1:]}"


def named(text: str) -> str:
    """The README's links by number, `[04](notebooks/04_...)`, with the chapter's name."""
    link = r"\[\d\d\]\((notebooks/([\w/]+)\.ipynb)\)"
    return re.sub(link, lambda found: f"[{name_of(Path(found[2]))}]({found[1]})", text)


# ------------------------------------------------------------------------------------------------ words and symptoms


def words() -> list[Word]:
    """The README's table of words."""
    text = README.read_text(encoding="utf-8")
    _, found, table = text.partition(f"\n### {WORDS}\n")
    if not found:
        raise SystemExit(f"README.md has no section '### {WORDS}', of which the book makes its glossary")
    made = []
    for terms, meaning, shown in rows(table.partition("\n## ")[0]):
        paths = tuple(Path(path) for path in re.findall(r"\(notebooks/([\w/]+\.ipynb)\)", shown))
        made.append(Word(tuple(terms.split(", ")), meaning, paths))
    return sorted(made, key=lambda word: plain(word.terms[0]).lower())


def plain(markdown: str) -> str:
    return markdown.replace("`", "")


def page_of_words() -> str:
    entries = []
    for word in words():
        shown = ", ".join(f"[{name_of(path)}](notebooks/{path.as_posix()})" for path in word.shown)
        terms = "\n".join(plain(term) for term in word.terms)
        entries.append(f"{terms}\n  {word.meaning[0].upper()}{word.meaning[1:]}.\n  Shown in {shown}.\n")
    listed = "\n".join(entries)
    return f"# {WORDS}\n\nIn the chapters, a word's first use leads here.\n\n```{{glossary}}\n{listed}```\n"


def page_of_symptoms(sections: dict[str, str]) -> str:
    text = [f"# {SYMPTOMS}\n", "What you see, where it is shown, and how it is mended.\n"]
    for symptom, answer in rows(sections[SYMPTOMS]):
        entry = plain(symptom).replace(";", ",").replace("!", "")
        text.append(f"```{{index}} single: {entry}\n```\n")
        text.append(f"## {symptom[0].upper()}{symptom[1:]}\n\n{named(answer)}\n")
    return "\n".join(text)
