"""The book: built once, as `make book` does, and read. Every chapter, figure, word and name is in it, its links lead
somewhere, and it is all there without a network."""

import base64
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
import pytest

import ddp_tutorial
from ddp_tutorial.experiments.notebooks import NOTEBOOKS, chapters, find_notebooks

BOOK = Path(__file__).parent.parent / "book"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Building fails on a warning of Sphinx, on a link inside that leads nowhere, and on what another host has."""
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, str(BOOK / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("index.html")
    return folder / "site"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BOOK))
    import check

    return check


def page_of(site: Path, notebook: Path) -> Path:
    return site / "notebooks" / notebook.relative_to(NOTEBOOKS).with_suffix(".html")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def article(page: Path) -> str:
    """What is the page's own, without the lists of pages beside it."""
    return text_of(page).partition("<article")[2].partition("</article>")[0]


# ---------------------------------------------------------------------------------------------------------- chapters


def test_every_notebook_is_a_chapter_in_the_order_of_the_readme_and_in_its_part(site: Path) -> None:
    beside = text_of(site / "index.html").partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    found, part = [], ""
    for caption, link in re.findall(r'class="caption-text">([^<]+)<|href="(notebooks/[^"]+)\.html"', beside):
        part = html.unescape(caption) or part
        if link:
            found.append((part, link))
    told = [(each.part, f"notebooks/{each.path.relative_to(NOTEBOOKS).with_suffix('')}") for each in chapters()]
    assert found == told
    assert {each.path for each in chapters()} == set(find_notebooks())


def test_a_notebook_that_the_readme_does_not_name_yet_is_a_chapter_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks").mkdir()
    for name in ("01_one", "02_two"):
        (tmp_path / "notebooks" / f"{name}.ipynb").touch()
    (tmp_path / "README.md").write_text("**Part**, of a kind\n\n| [02_two](notebooks/02_two.ipynb) | two |\n")
    monkeypatch.setattr("ddp_tutorial.experiments.notebooks.NOTEBOOKS", tmp_path / "notebooks")
    assert [(each.part, each.path.stem, each.shows) for each in chapters()] == [
        ("Part", "02_two", "two"),
        ("", "01_one", ""),
    ]


def test_every_figure_stands_in_its_chapter_and_can_be_enlarged(site: Path) -> None:
    count = 0
    for path in find_notebooks():
        page = page_of(site, path)
        shown = re.findall(r'<a class="figure" href="([^"]+)"><img alt="[A-Z][^"/]+"[^>]* src="([^"]+)"', article(page))
        assert all(link == source for link, source in shown)
        images = [(page.parent / unquote(source)).read_bytes() for _, source in shown]
        outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
        drawn = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
        assert images == [base64.b64decode(image) for image in drawn], path.stem
        count += len(drawn)
    assert count > 50


def test_printed_output_is_there_as_it_was_committed(site: Path) -> None:
    for path in find_notebooks():
        told = html.unescape(re.sub(r"<[^>]+>", "", article(page_of(site, path))))
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                first = output.get("text", "").strip().partition("\n")[0]
                assert "\x1b" in first or first in told, f"{path.stem}: {first}"


def test_formulas_are_drawn_by_the_browser_itself(site: Path) -> None:
    count = 0
    for path in find_notebooks():
        prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
        text = re.sub(r"`[^`]*`", "", "\n".join(prose))
        written = len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.DOTALL))
        assert article(page_of(site, path)).count("<math ") == written, path.stem
        count += written
    assert count > 50


def test_a_notebook_that_is_named_in_a_chapter_is_linked(site: Path) -> None:
    for path in find_notebooks():
        last = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"][-1]
        for name in re.findall(r"`(\w+)\.ipynb`", last):
            assert f'href="{name}.html"' in article(page_of(site, path)), f"{path.stem} -> {name}"


# ------------------------------------------------------------------------------------------- words, symptoms, names


def test_every_word_of_the_readme_is_in_the_glossary_and_linked_from_a_chapter_that_shows_it(
    site: Path, root: Path
) -> None:
    table = (root / "README.md").read_text().partition("\n### Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \| (\[.+) \|$", table, re.MULTILINE)
    glossary, linked = text_of(site / "words.html"), 0
    for terms, _, shown in rows:
        places = [
            f"term-{re.sub(r'[^0-9A-Za-z_]+', '-', term.replace('`', '')).strip('-')}" for term in terms.split(", ")
        ]
        assert all(f'id="{place}"' in glossary for place in places), terms
        pages = [site / f"notebooks/{name}.html" for name in re.findall(r"notebooks/([\w/]+)\.ipynb", shown)]
        linked += any(f'words.html#{place}"' in text_of(page) for place in places for page in pages)
    assert len(rows) > 50
    assert linked > 0.6 * len(rows)  # the others stand in code, or in a heading, or in other words


def test_a_word_is_linked_once_on_a_page_and_tells_its_meaning(site: Path) -> None:
    page = article(site / "notebooks" / "02_collectives.html")
    links = re.findall(
        r'<a class="word reference internal" href="\.\./words\.html#term-([\w-]+)" title="([^"]+)"', page
    )
    assert len(dict(links)) == len(links) > 5
    assert dict(links)["all-reduce"] == "everybody gives a tensor, everybody gets the sum"


def test_every_symptom_of_the_readme_is_a_heading_and_in_the_index(site: Path, root: Path) -> None:
    table = (root / "README.md").read_text().partition("\n## When something goes wrong\n")[2].partition("\n## ")[0]
    symptoms = [line.split(" | ")[0].lstrip("| ") for line in table.splitlines() if line.startswith("|")][2:]
    page = html.unescape(re.sub(r"</?(?:code|span)[^>]*>", "", text_of(site / "symptoms.html")))
    index = html.unescape(text_of(site / "genindex.html"))
    assert len(symptoms) > 20
    for symptom in symptoms:
        words = symptom.replace("`", "")
        assert f"<h2>{words[0].upper()}{words[1:]}<" in page
        assert words.replace(";", ",") in index


def test_every_public_name_is_described_on_one_page(site: Path) -> None:
    pages = {path: text_of(path) for path in (site / "api").glob("*.html")}
    for name in ddp_tutorial.__all__:
        assert [path.name for path, text in pages.items() if f'id="ddp_tutorial.{name}"' in text] == ["front_door.html"]
        assert f'href="front_door.html#ddp_tutorial.{name}"' not in pages[site / "api" / "front_door.html"]
    assert 'href="front_door.html#ddp_tutorial.launch"' in pages[site / "api" / "processes.html"]
    assert 'id="ddp_tutorial.debug.checking"' in pages[site / "api" / "debug.html"]
    assert "api/debug.html#ddp_tutorial.debug.watching" in article(site / "symptoms.html")
    assert "../api/front_door.html#ddp_tutorial.launch" in article(site / "notebooks" / "live_ranks.html")
    front = html.unescape(re.sub(r"<[^>]+>", "", pages[site / "api" / "front_door.html"]))
    assert " ".join((ddp_tutorial.World.__doc__ or "").split()[:6]).replace("`", "") in " ".join(front.split())
    assert "the highest of the schedule" in front  # a setting's own words


def test_the_threat_model_is_a_page_that_the_readme_links(site: Path) -> None:
    assert "How to isolate a job" in article(site / "threat_model.html")
    assert 'href="threat_model.html"' in article(site / "in_your_own_project.html")
    beside = text_of(site / "index.html").partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert 'href="threat_model.html"' in beside


def test_the_search_knows_every_page(site: Path) -> None:
    index = (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    known = set(json.loads(index)["docnames"])
    assert {"words", "symptoms", "api/debug"} <= known
    assert {f"notebooks/{path.relative_to(NOTEBOOKS).with_suffix('')}" for path in find_notebooks()} <= known


@pytest.mark.timeout(300)
def test_in_a_browser_it_turns_dark_enlarges_a_figure_follows_a_word_finds_and_asks_no_host(site: Path) -> None:
    browser = pytest.importorskip("browser", reason="an extra: pip install 'ddp-tutorial[dev]'")
    if browser.CHROMIUM is None:
        pytest.skip(browser.ADVICE)
    asked: set[str] = set()
    with browser.chromium() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.add(request.url.partition(":")[0]))
        page.goto((site / "index.html").as_uri())
        before = page.evaluate("document.body.dataset.theme")
        page.locator(".theme-toggle").filter(visible=True).first.click()
        assert page.evaluate("document.body.dataset.theme") != before
        page.goto((site / "notebooks" / "04_ddp_from_scratch.html").as_uri())
        page.locator("a.figure").first.click()
        page.locator("dialog.enlarged img").wait_for()
        page.keyboard.press("Escape")
        page.locator("dialog.enlarged").wait_for(state="detached")
        page.locator("a.word").first.click()
        page.wait_for_url("**/words.html#term-*")
        page.goto((site / "search.html").as_uri() + "?q=rendezvous")
        page.locator("#search-results a").first.wait_for()
    assert "file" in asked
    assert asked <= {"file", "data"}


# -------------------------------------------------------------------------------------------------- nothing is missing


def test_it_is_small(site: Path) -> None:
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 15e6


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        ("", '<a href="gone.html">x</a>', "gone.html leads to no file"),
        ("", '<a href="b.html#gone">x</a>', "b.html#gone leads to no place in that page"),
        ("", '<a href="#gone">x</a>', "#gone leads to no place in that page"),
        ("", '<a href="../../out.html">x</a>', "../../out.html leads to no file"),
        ("", '<img src="gone.png">', "gone.png leads to no file"),
        ("", '<img src="https://example.org/x.png">', "loads https://example.org/x.png"),
        ("", '<img srcset="b.html 1x, //example.org/x.png 2x">', "loads //example.org/x.png"),
        ('<script src="//example.org/x.js"></script>', "", "loads //example.org/x.js"),
        ('<link rel="stylesheet" href="http://example.org/x.css">', "", "loads http://example.org/x.css"),
        ('<link rel="preconnect" href="https://example.org">', "", "loads https://example.org"),
        ("<style>@import 'https://example.org/x.css';</style>", "", "names https://example.org/x.css"),
        ('<script>import("https://example.org/x.js")</script>', "", "names https://example.org/x.js"),
        ("", '<p style="background: url(//example.org/x.png)">x</p>', "names //example.org/x.png"),
    ],
)
def test_the_check_finds(head: str, body: str, said: str, tools: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<html><head>{head}</head><body>{body}</body></html>")
    (tmp_path / "b.html").write_text('<p id="there">x</p>')
    [found] = tools.problems(tmp_path)
    assert said in found


def test_the_check_reads_styles_and_scripts_and_lets_through_what_is_not_fetched(tools: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://example.org">'
        '<a href="https://example.org">x</a><a href="b.html#there">y</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there">x</p>')
    (tmp_path / "a.css").write_text("/* https://example.org */ a { background: url(b.png) }")
    (tmp_path / "a.js").write_text('// see https://example.org\nmake("http://www.w3.org/2000/svg"); f(a) // b.c\n')
    assert tools.problems(tmp_path) == []
    (tmp_path / "a.css").write_text("@font-face { src: url(https://example.org/x.woff2) }")
    (tmp_path / "a.js").write_text('fetch("//example.org/x.json")')
    assert sorted(tools.problems(tmp_path)) == [
        "a.css: names https://example.org/x.woff2",
        "a.js: names //example.org/x.json",
    ]


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# A page\n\nSee [another](gone.md).\n")
    code = "import sys, build, pathlib; sys.exit(not build.is_built(*map(pathlib.Path, sys.argv[1:])))"
    command = [sys.executable, "-c", code, str(tmp_path / "pages"), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=BOOK, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "gone.md" in done.stderr
