"""The Sphinx extension of the book: links from terms, names and file names in prose; formulas; enlarged figures."""

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
from pages import Term, glossary, plain

# Terms that also have an everyday meaning. They are links only in the notebooks that introduce them.
EVERYDAY = {
    "agent", "buffer", "cursor", "digest", "drift", "hang", "host", "interface", "interleaved", "mesh", "nat",
    "node", "pipeline", "ring", "schedule", "stage", "tree",
}  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(LinkFromText)
    app.add_html_math_renderer("mathml", (formula("inline"), leave), (formula("block"), leave))
    app.connect("html-page-context", finish_body)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# ------------------------------------------------------------------------------------------------------------- links


class LinkFromText(SphinxPostTransform):
    """Turn names in prose into links.

    The file name of a notebook links to the notebook. On each page, the first use of a public name links to the API
    reference, and the first use of a term links to the glossary.
    """

    default_priority = 5

    def run(self, **_: Any) -> None:
        self.page = self.env.docname
        self.imported = self._imported()
        self.seen: set[str] = set()
        without_terms = self.page == "book/glossary" or self.page.startswith("api/")
        self.terms = {} if without_terms else self._terms()
        for node in [*self.document.findall(is_prose)]:
            if isinstance(node, nodes.literal):
                self._link_literal(node)
            elif self.terms:
                self._link_terms(node)
        for image in self.document.findall(nodes.image):
            image.setdefault("alt", f"Figure in the section: {section_of(image)}")

    def _imported(self) -> set[str]:
        """Return the names that the code of this page imports from the package."""
        code = "\n".join(block.astext() for block in self.document.findall(nodes.literal_block))
        taken = re.findall(rf"^from {TOP}[\w.]* import (\([^)]*\)|.+)", code, re.MULTILINE)
        return {name for names in taken for name in re.findall(r"\w+", names)}

    def _terms(self) -> dict[str, Term]:
        """Return the terms to link on this page."""
        found = {}
        for term in glossary():
            pages = {f"notebooks/{path.with_suffix('').as_posix()}" for path in term.notebooks}
            for name in map(plain, term.names):
                if name not in EVERYDAY or self.page in pages:
                    found[name] = term
        return found

    def _link_literal(self, node: nodes.literal) -> None:
        text = node.astext()
        if file := re.fullmatch(r"(?:notebooks/)?((?:deep_dives/|experiments/)?\w+)\.ipynb", text):
            pages = [f"notebooks/{file[1]}", f"notebooks/deep_dives/{file[1]}", f"notebooks/experiments/{file[1]}"]
            for page in pages:
                if page in self.env.all_docs and page != self.page:
                    self._wrap(node, page, "", "")
                    return
        called = re.fullmatch(rf"(with |{TOP}\.(?:\w+\.)*)?(\w+)(?:\(.*\):?)?", text)
        name = called[2] if called else ""
        is_a_word = name.isalpha() and name.islower() and name != "launch"  # a word such as `mean` has other uses
        is_public = (called is not None and called[1]) or name in self.imported or not is_a_word
        if is_public and name in (names := full_names()):
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

    def _link_terms(self, node: nodes.Text) -> None:
        text, made, at = node.astext(), [], 0
        for found in re.finditer(self._pattern(), text):
            name = self._written[found[1].lower()]
            if name in self.seen or (not name.islower() and found[1] != name):
                continue
            self.seen.add(name)
            page, anchor = self.env.domains.standard_domain.objects["term", name]
            link = self._reference(page, anchor, plain(self.terms[name].definition), nodes.Text(found[0]))
            link["classes"].append("term")
            made += [nodes.Text(text[at : found.start()]), link]
            at = found.end()
        if made:
            node.parent.replace(node, [*made, nodes.Text(text[at:])])

    def _pattern(self) -> re.Pattern[str]:
        self._written = {name.lower(): name for name in self.terms}
        longest_first = sorted(map(re.escape, self.terms), key=len, reverse=True)
        return re.compile(rf"(?<![\w.`/-])({'|'.join(longest_first)})(?:s|es)?(?![\w`/-]|\.\w)", re.IGNORECASE)


@cache
def full_names() -> dict[str, str]:
    """Return each public name with the full name under which the API reference describes it."""
    return {name: f"{package}.{name}" for package, names in reversed(public_names().items()) for name in names}


def is_prose(node: nodes.Node) -> bool:
    """Return whether a node is text, or code in text, that may become a link."""
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
    """Return the heading of the section that contains `node`."""
    sections = [each for each in ancestors(node) if isinstance(each, nodes.section)]
    title = sections[0].next_node(nodes.title) if sections else None
    return title.astext() if title else ""


# ---------------------------------------------------------------------------------------------- formulas and figures


def formula(display: str) -> Callable[[Any, nodes.Element], None]:
    def visit(writer: Any, node: nodes.Element) -> None:
        mathml = convert(node.astext(), display=display)
        writer.body.append(f'<div class="formula">{mathml}</div>' if display == "block" else mathml)
        raise nodes.SkipNode

    return visit


def leave(writer: Any, node: nodes.Element) -> None:
    """Do nothing: `visit` wrote the whole element."""


def finish_body(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Make each figure a link to itself, which `book.js` opens over the page; without JavaScript, it opens alone.

    In the HTML output of a cell, turn links to notebooks into links to their pages.
    """
    if "body" in context:
        linked = re.sub(r'<img [^>]*?src="([^"]+)"[^>]*>', r'<a class="figure" href="\1">\g<0></a>', context["body"])
        context["body"] = re.sub(r'href="((?:\.\./)*[\w/]+)\.ipynb"', r'href="\1.html"', linked)
