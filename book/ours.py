"""What the book adds to Sphinx: links from words, names and file names in the text, formulas, figures to enlarge."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from api import TOP, public_names
from pages import Word, plain, words

# Words that also have an everyday meaning: linked only in chapters that show them.
EVERYDAY = {
    "agent", "buffer", "cursor", "digest", "drift", "hang", "host", "interface", "interleaved", "law", "mesh", "nat",
    "node", "pipeline", "ring", "schedule", "stage", "tree",
}  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(LinkFromText)
    app.add_html_math_renderer("mathml", (formula("inline"), leave), (formula("block"), leave))
    app.connect("html-page-context", finish_body)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# ------------------------------------------------------------------------------------------------------------- links


class LinkFromText(SphinxPostTransform):
    """A file name of a notebook leads to it, and the first use of a public name on a page to its description. In
    chapters and the README's pages, the first use of a word of the glossary leads there."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        self.page = self.env.docname
        self.imported = self._imported()
        self.seen: set[str] = set()
        without_words = self.page == "words" or self.page.startswith("api/")
        self.terms = {} if without_words else self._terms()
        for node in [*self.document.findall(is_prose)]:
            if isinstance(node, nodes.literal):
                self._link_literal(node)
            elif self.terms:
                self._link_words(node)
        for image in self.document.findall(nodes.image):
            image.setdefault("alt", f"Figure in the section: {section_of(image)}")

    def _imported(self) -> set[str]:
        """What the code of this page takes from the package."""
        code = "\n".join(block.astext() for block in self.document.findall(nodes.literal_block))
        taken = re.findall(rf"^from {TOP}[\w.]* import (\([^)]*\)|.+)", code, re.MULTILINE)
        return {name for names in taken for name in re.findall(r"\w+", names)}

    def _terms(self) -> dict[str, tuple[str, Word]]:
        """What may stand in the text -> the term of the glossary, and its row."""
        found = {}
        for word in words():
            shown = {f"notebooks/{path.with_suffix('').as_posix()}" for path in word.shown}
            for term in map(plain, word.terms):
                if term not in EVERYDAY or self.page in shown:
                    found[term] = (term, word)
        return found

    def _link_literal(self, node: nodes.literal) -> None:
        text = node.astext()
        if file := re.fullmatch(r"(?:notebooks/)?((?:experiments/)?\w+)\.ipynb", text):
            pages = [f"notebooks/{file[1]}", f"notebooks/experiments/{file[1]}"]
            for page in pages:
                if page in self.env.all_docs and page != self.page:
                    self._wrap(node, page, "", "")
                    return
        called = re.fullmatch(rf"(with |{TOP}\.(?:\w+\.)*)?(\w+)(?:\(.*\):?)?", text)
        name = called[2] if called else ""
        is_a_word = name.isalpha() and name.islower() and name != "launch"  # `total` means other things, too
        is_ours = (called is not None and called[1]) or name in self.imported or not is_a_word
        if is_ours and name in (names := full_names()):
            full = names[name]
            target = self.env.domains.python_domain.objects.get(full)
            if target is not None and full not in self.seen:
                self.seen.add(full)
                self._wrap(node, target.docname, target.node_id, full)

    def _wrap(self, node: nodes.literal, page: str, anchor: str, title: str) -> None:
        node.replace_self(self._reference(page, anchor, title, node.deepcopy()))

    def _reference(self, page: str, anchor: str, title: str, *inside: nodes.Node) -> nodes.reference:
        assert self.app.builder is not None
        uri = self.app.builder.get_relative_uri(self.page, page) + (f"#{anchor}" if anchor else "")
        link = nodes.reference("", "", *inside, internal=True, refuri=uri)
        if title:
            link["reftitle"] = title
        return link

    def _link_words(self, node: nodes.Text) -> None:
        text, made, at = node.astext(), [], 0
        for found in re.finditer(self._pattern(), text):
            term, word = self.terms[self._written[found[1].lower()]]
            if term in self.seen or (not term.islower() and found[1] != term):
                continue
            self.seen.add(term)
            page, anchor = self.env.domains.standard_domain.objects["term", term]
            link = self._reference(page, anchor, plain(word.meaning), nodes.Text(found[0]))
            link["classes"].append("word")
            made += [nodes.Text(text[at : found.start()]), link]
            at = found.end()
        if made:
            node.parent.replace(node, [*made, nodes.Text(text[at:])])

    def _pattern(self) -> re.Pattern[str]:
        self._written = {term.lower(): term for term in self.terms}
        longest_first = sorted(map(re.escape, self.terms), key=len, reverse=True)
        return re.compile(rf"(?<![\w.`/-])({'|'.join(longest_first)})(?:s|es)?(?![\w`/-]|\.\w)", re.IGNORECASE)


@cache
def full_names() -> dict[str, str]:
    """Each public name, and the same with the room before it that a page describes it in."""
    return {name: f"{room}.{name}" for room, names in reversed(public_names().items()) for name in names}


def is_prose(node: nodes.Node) -> bool:
    """Words, and code between them, where they may become links."""
    if not isinstance(node, nodes.literal | nodes.Text):
        return False
    above = list(ancestors(node))
    if not any(isinstance(each, nodes.paragraph) for each in above):
        return False
    closed: tuple[type[nodes.Element], ...] = (
        nodes.reference,
        nodes.title,
        nodes.literal_block,
        nodes.math,
        addnodes.pending_xref,
        nodes.raw,
    )
    if isinstance(node, nodes.Text):
        closed = (*closed, nodes.literal)
    return not any(isinstance(each, closed) for each in above)


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while (node := node.parent) is not None:
        yield node


def section_of(node: nodes.Node) -> str:
    """The heading above it."""
    sections = [each for each in ancestors(node) if isinstance(each, nodes.section)]
    title = sections[0].next_node(nodes.title) if sections else None
    return title.astext() if title else ""


# ---------------------------------------------------------------------------------------------- formulas and figures


def formula(display: str) -> Callable[[Any, nodes.Element], None]:
    def visit(writer: Any, node: nodes.Element) -> None:
        made = convert(node.astext(), display=display)
        writer.body.append(f'<div class="formula">{made}</div>' if display == "block" else made)
        raise nodes.SkipNode

    return visit


def leave(writer: Any, node: nodes.Element) -> None:
    """Nothing: the visit has written all of it."""


def finish_body(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Each figure is a link to itself, which `book.js` shows over the page; without JavaScript it opens alone. Links to
    notebooks in a cell's output, which is HTML already, lead to the chapters."""
    if "body" in context:
        linked = re.sub(r'<img [^>]*?src="([^"]+)"[^>]*>', r'<a class="figure" href="\1">\g<0></a>', context["body"])
        context["body"] = re.sub(r'href="((?:\.\./)*[\w/]+)\.ipynb"', r'href="\1.html"', linked)
