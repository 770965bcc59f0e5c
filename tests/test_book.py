"""The book: built once, as by `make book`. It is complete, its links have targets, and it works offline."""

import ast
import base64
import html
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import nbformat
import pytest
import yaml
from torch.distributed.run import parse_args

import ddp_tutorial
from ddp_tutorial.__main__ import cli as main_command
from ddp_tutorial.config import CONFIGS, flat, layers, load, merged
from ddp_tutorial.debug.config import FaultyConfig
from ddp_tutorial.experiments.notebooks import NOTEBOOKS, chapters, find_notebooks

BOOK = Path(__file__).parent.parent / "book"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The build fails on a Sphinx warning, a broken link, and content from a different host."""
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, str(BOOK / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
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
    """Return the content of a page, without the sidebars."""
    return text_of(page).partition("<article")[2].partition("</article>")[0]


# --------------------------------------------------------------------------------------------------------- notebooks


def test_the_sidebar_and_the_readme_list_the_same_notebooks(site: Path) -> None:
    beside = text_of(site / "index.html").partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    found, part = [], ""
    for caption, link in re.findall(r'class="caption-text">([^<]+)<|href="(notebooks/[^"]+)\.html"', beside):
        part = html.unescape(caption) or part
        if link:
            found.append((part, link))
    expected = [(each.part, f"notebooks/{each.path.relative_to(NOTEBOOKS).with_suffix('')}") for each in chapters()]
    assert found == expected
    assert {each.path for each in chapters()} == set(find_notebooks())


def test_a_notebook_that_the_readme_does_not_list_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    for name in ("01_one", "02_two"):
        (tmp_path / "notebooks" / f"{name}.ipynb").touch()
    (tmp_path / "README.md").write_text("**Part**, of a kind\n\n| [02_two](notebooks/02_two.ipynb) | two |\n")
    monkeypatch.setattr("ddp_tutorial.experiments.notebooks.NOTEBOOKS", tmp_path / "notebooks")
    assert [(each.part, each.path.stem, each.shows) for each in chapters()] == [
        ("Part", "02_two", "two"),
        ("", "01_one", ""),
    ]


def test_every_figure_is_on_its_page_and_can_be_enlarged(site: Path) -> None:
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


def test_printed_output_matches_the_committed_output(site: Path) -> None:
    for path in find_notebooks():
        shown = html.unescape(re.sub(r"<[^>]+>", "", article(page_of(site, path))))
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                first = output.get("text", "").strip().partition("\n")[0]
                assert "\x1b" in first or first in shown, f"{path.stem}: {first}"


def test_formulas_are_mathml(site: Path) -> None:
    count = 0
    for path in find_notebooks():
        prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
        text = re.sub(r"`[^`]*`", "", "\n".join(prose))
        written = len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.DOTALL))
        assert article(page_of(site, path)).count("<math ") == written, path.stem
        count += written
    assert count > 50


def test_a_notebook_name_is_a_link(site: Path) -> None:
    for path in find_notebooks():
        last = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"][-1]
        for name in re.findall(r"`(\w+)\.ipynb`", last):
            assert f'href="{name}.html"' in article(page_of(site, path)), f"{path.stem} -> {name}"


# -------------------------------------------------------------------------------------------------------------- pages


def test_the_readme_is_a_landing_page_that_links_every_page(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert set(re.findall(r"\]\(book/(\w+\.md)\)", text)) == {path.name for path in BOOK.glob("*.md")}
    assert len(re.findall(r"(?<!\[)!\[", text)) == 1  # not counting the badges, which are links


def test_the_sidebar_lists_every_page(site: Path) -> None:
    beside = text_of(site / "index.html").partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert set(re.findall(r'href="book/(\w+)\.html"', beside)) == {path.stem for path in BOOK.glob("*.md")}
    assert 'href="api/index.html"' in beside


def test_relative_links_also_work_on_github(root: Path) -> None:
    """The build checks them in the book, whose pages have the same layout as the repository."""
    for page in [root / "README.md", *BOOK.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            assert target.exists() or link == "api/index.md", f"{page.name}: {link}"


@pytest.mark.parametrize("name", ["configuration.md", "architecture.svg"])
def test_generated_files_are_current(name: str, tools: Any) -> None:
    generated = importlib.import_module("generate").GENERATED[name]()
    assert (BOOK / name).read_text(encoding="utf-8") == generated, "run `make book` and commit the result"


def test_every_setting_is_in_the_configuration_reference_and_described() -> None:
    text = (BOOK / "configuration.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.endswith("|  |")] == []
    base = flat(yaml.safe_load((CONFIGS / "base.yaml").read_text()))
    assert [name for name in base if f"| `{name}` |" not in text and f"| `{name}." not in text] == []


def test_every_term_is_in_the_glossary_and_most_link_to_a_notebook(site: Path, tools: Any) -> None:
    terms = importlib.import_module("pages").glossary()
    glossary, linked = text_of(site / "book" / "glossary.html"), 0
    for term in terms:
        places = [f"term-{re.sub(r'[^0-9A-Za-z_]+', '-', name.replace('`', '')).strip('-')}" for name in term.names]
        assert all(f'id="{place}"' in glossary for place in places), term.names
        assert term.notebooks, term.names
        pages = [site / "notebooks" / path.with_suffix(".html") for path in term.notebooks]
        linked += any(f'glossary.html#{place}"' in text_of(page) for place in places for page in pages)
    assert len(terms) > 50
    assert linked > 0.6 * len(terms)  # the other terms occur in code, in headings, or within other terms


def test_a_term_is_linked_to_its_definition_once_per_page(site: Path) -> None:
    page = article(site / "notebooks" / "02_collectives.html")
    links = re.findall(
        r'<a class="term reference internal" href="\.\./book/glossary\.html#term-([\w-]+)" title="([^"]+)"', page
    )
    assert len(dict(links)) == len(links) > 5
    assert dict(links)["all-reduce"].startswith("A collective that sums a tensor")


def test_every_public_name_is_described_on_one_page(site: Path) -> None:
    pages = {path: text_of(path) for path in (site / "api").glob("*.html")}
    for name in ddp_tutorial.__all__:
        found = [path.name for path, text in pages.items() if f'id="ddp_tutorial.{name}"' in text]
        assert found == ["ddp_tutorial.html"]
    assert 'href="ddp_tutorial.html#ddp_tutorial.launch"' in pages[site / "api" / "ddp_tutorial.processes.html"]
    assert 'id="ddp_tutorial.debug.checking"' in pages[site / "api" / "ddp_tutorial.debug.html"]
    assert "api/ddp_tutorial.debug.html#ddp_tutorial.debug.watching" in article(site / "book" / "troubleshooting.html")
    assert "../api/ddp_tutorial.html#ddp_tutorial.launch" in article(site / "notebooks" / "live_ranks.html")
    top = html.unescape(re.sub(r"<[^>]+>", "", pages[site / "api" / "ddp_tutorial.html"]))
    assert " ".join((ddp_tutorial.World.__doc__ or "").split()[:6]).replace("`", "") in " ".join(top.split())
    assert "<h1>API reference<" in text_of(site / "api" / "index.html")


def test_the_search_finds_every_page(site: Path) -> None:
    index = (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    known = set(json.loads(index)["docnames"])
    assert known >= {f"book/{path.stem}" for path in BOOK.glob("*.md")} | {"api/ddp_tutorial.debug"}
    assert {f"notebooks/{path.relative_to(NOTEBOOKS).with_suffix('')}" for path in find_notebooks()} <= known


# ----------------------------------------------------------------------------------------------------------- commands


def code_blocks(kind: str) -> list[tuple[str, str]]:
    """Return the code blocks of a language in the README and the pages, each with the name of its page."""
    pages = [BOOK.parent / "README.md", *BOOK.glob("*.md")]
    block = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page.name, text) for page in pages for of, text in block.findall(page.read_text()) if of == kind]


def documented_commands() -> list[list[str]]:
    """Return the commands in code blocks, with torchrun's arguments in torchrun's commands."""
    lines = [line for _, text in code_blocks("") for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines if "ddp_tutorial" in line]


def parse_command(words: list[str]) -> None:
    """Parse the arguments of `ddp-tutorial`. Raises an error of click for unknown commands and options."""
    command, context, rest = main_command, click.Context(main_command), words
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_context(context.info_name, rest, resilient_parsing=False, parent=context.parent)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discard environment variables that options set, such as --runs-dir."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.usefixtures("own_environment")
def test_documented_commands_have_known_names_and_options() -> None:
    commands = [words[words.index("ddp_tutorial") + 1 :] for words in documented_commands() if "ddp_tutorial" in words]
    for words in commands:
        parse_command(words)
    assert len(commands) > 20


@pytest.mark.usefixtures("own_environment")
def test_settings_and_commands_for_users_of_other_trainers_are_valid() -> None:
    rows = re.findall(r"^\|.+\| (.+) \|$", (BOOK / "coming_from.md").read_text(encoding="utf-8"), re.MULTILINE)
    spans = [shlex.split(span) for row in rows for span in re.findall(r"`([^`]+)`", row)]
    settings = [words for words in spans if all(re.match(r"[\w.]+=", word) for word in words)]
    for words in settings:
        load("2proc", FaultyConfig, words)
    commands = [words[1:] for words in spans if words[0] == "ddp-tutorial"]
    for words in commands:
        parse_command(words)
    for words in (words[1:] for words in spans if words[0] == "torchrun"):
        assert parse_args(words).training_script == "ddp_tutorial"
    assert len(settings) > 80
    assert len(commands) > 8


def test_the_user_guide_lists_every_command() -> None:
    table = (BOOK / "user_guide.md").read_text(encoding="utf-8").partition("## All commands")[2]
    cells = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)} == set(main_command.commands)


def test_documented_configs_and_settings_are_valid() -> None:
    trained = [words[words.index("train") + 1 :] for words in documented_commands() if "train" in words]
    assert len(trained) > 10
    for config, *arguments in trained:
        if not config.startswith("my"):
            load(config, FaultyConfig, [each for each in arguments if re.match(r"[\w.]+=", each)])


def test_the_script_in_the_user_guide_trains_and_resumes(workdir: Path) -> None:
    [script] = [text for _, text in code_blocks("python") if "Trainer(" in text]
    Path("script.py").write_text(script.replace("steps=300", "steps=5"))
    for _ in range(2):
        runpy.run_path("script.py", run_name="__main__")
    assert json.loads(Path("runs/mine/result.json").read_text())["step"] == 5


def test_documented_python_imports_public_names() -> None:
    for page, text in code_blocks("python"):
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes if node.module == "ddp_tutorial" for alias in node.names}
        assert names <= set(ddp_tutorial.__all__), page


FOREIGN = {  # messages of Python, the system and PyTorch
    "Can't get attribute ... on <module '__main__'>",
    "Address already in use",
    "Connection refused",
    "Expected to have finished reduction in the prior iteration",
    "Expected to mark a variable ready only once",
}


def messages() -> Iterator[str]:
    """Yield the strings of the package, with "..." in place of the values of f-strings."""
    for path in Path(ddp_tutorial.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_in_troubleshooting_exist_in_the_source() -> None:
    headings = re.findall(r"^### (.+)$", (BOOK / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = {message for heading in headings for message in re.findall(r"`([^`]+ [^`]+)`", heading)} - FOREIGN
    known = "\n".join(messages())
    gone = [each for each in quoted if not re.search(".*".join(map(re.escape, each.split("..."))), known)]
    assert gone == []
    assert len(quoted) > 12


def test_documented_yaml_is_valid() -> None:
    for page, text in code_blocks("yaml"):
        for document in yaml.safe_load_all(text):
            assert document, page
            if "extends" in document:
                FaultyConfig.model_validate(merged([*layers(document.pop("extends")), (page, document)]))


def test_torchrun_accepts_the_commands_in_the_manifests() -> None:
    manifests = [text for _, text in code_blocks("yaml") if "torchrun" in text]
    assert len(manifests) == 2
    for text in manifests:
        command = text.partition("torchrun ")[2].replace("\\\n", " ").split(" resources:")[0]
        for variable, value in {"JOB_COMPLETION_INDEX": "1", "SKYPILOT_NODE_RANK": "1"}.items():
            command = command.replace(f"${variable}", value)
        command = re.sub(r"\$\(.*?\)|\$\w+", "2", command)
        given = parse_args(shlex.split(command))
        assert (given.nnodes, given.node_rank, given.training_script) == ("2", 1, "ddp_tutorial")
        [config, *settings] = given.training_script_args[1:]
        assert load(config, FaultyConfig, settings).resume == "auto"


def test_dark_mode_figures_terms_and_search_work_offline(site: Path) -> None:
    browser = pytest.importorskip("browser", reason="an extra: pip install 'ddp-tutorial[dev]'")
    if browser.CHROMIUM is None:
        pytest.skip(browser.ADVICE)
    asked: set[str] = set()
    with browser.chromium() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(150_000)
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
        page.locator("a.term").first.click()
        page.wait_for_url("**/book/glossary.html#term-*")
        page.goto((site / "search.html").as_uri() + "?q=rendezvous")
        page.locator("#search-results a").first.wait_for()
    assert "file" in asked
    assert asked <= {"file", "data"}


# ---------------------------------------------------------------------------------------------------------- the checks


def test_the_site_is_smaller_than_15_mb(site: Path) -> None:
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 15e6


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        ("", '<a href="gone.html">x</a>', "gone.html is no file"),
        ("", '<a href="b.html#gone">x</a>', "b.html#gone is no anchor of that page"),
        ("", '<a href="#gone">x</a>', "#gone is no anchor of that page"),
        ("", '<a href="../../out.html">x</a>', "../../out.html is no file"),
        ("", '<a href="https://exa mple.org">x</a>', "is malformed"),
        ("", '<a href="http://[x">x</a>', "is malformed"),
        ("", '<a href="file:///etc/hosts">x</a>', "is neither relative nor http(s)"),
        ("", '<img src="gone.png">', "gone.png is no file"),
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
def test_the_link_check_reports_problems(head: str, body: str, said: str, tools: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<html><head>{head}</head><body>{body}</body></html>")
    (tmp_path / "b.html").write_text('<p id="there">x</p>')
    [found] = tools.find_problems(tmp_path)
    assert said in found


def test_the_link_check_reads_styles_and_scripts_but_not_comments(tools: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://example.org">'
        '<a href="https://example.org">x</a><a href="b.html#there">y</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there">x</p>')
    (tmp_path / "a.css").write_text("/* https://example.org */ a { background: url(b.png) }")
    (tmp_path / "a.js").write_text('// see https://example.org\nmake("http://www.w3.org/2000/svg"); f(a) // b.c\n')
    assert tools.find_problems(tmp_path) == []
    (tmp_path / "a.css").write_text("@font-face { src: url(https://example.org/x.woff2) }")
    (tmp_path / "a.js").write_text('fetch("//example.org/x.json")')
    assert sorted(tools.find_problems(tmp_path)) == [
        "a.css: names https://example.org/x.woff2",
        "a.js: names //example.org/x.json",
    ]


def test_a_sphinx_warning_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# A page\n\nSee [another](gone.md).\n")
    code = "import sys, build, pathlib; sys.exit(not build.is_built(*map(pathlib.Path, sys.argv[1:])))"
    command = [sys.executable, "-c", code, str(tmp_path / "pages"), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=BOOK, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "gone.md" in done.stderr
