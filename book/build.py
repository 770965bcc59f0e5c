"""Build the book: `python book/build.py [DIRECTORY]`, by default in `book/_build`.

Writes the sources to `DIRECTORY/pages` and the site to `DIRECTORY/site`; open `DIRECTORY/site/index.html`. Executes no
notebook. Exits with code 1 on a Sphinx warning, a broken link inside the site, a malformed external link, or a page
that would load something from another host.
"""

import shutil
import sys
import time
from pathlib import Path

from sphinx.cmd.build import build_main

from check import find_problems
from pages import write_pages

BOOK = Path(__file__).parent


def main(folder: Path) -> int:
    began = time.monotonic()
    pages, site = folder / "pages", folder / "site"
    for old in (pages, site, folder / "doctrees"):
        shutil.rmtree(old, ignore_errors=True)
    write_pages(pages)
    if not is_built(pages, site):
        return 1
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    seconds, count = time.monotonic() - began, len(list(site.rglob("*.html")))
    print(f"{count} pages, {size:.1f} MB, in {seconds:.0f} s: {site / 'index.html'}")
    return 0


def is_built(pages: Path, site: Path) -> bool:
    """Build the site from the sources in `pages` and check it. Print the problems and return whether there are none."""
    options = ["-q", "-W", "--keep-going", "-c", str(BOOK), "-d", str(site.parent / "doctrees")]
    if build_main([*options, str(pages), str(site)]):
        return False
    problems = find_problems(site)
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
    return not problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BOOK / "_build"))
