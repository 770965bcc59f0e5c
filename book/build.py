"""Build the book: `python book/build.py [FOLDER]`, by default in book/_build; `make book` does.

Writes the sources to FOLDER/pages and the site to FOLDER/site; open FOLDER/site/index.html. Executes no notebook. Ends
with code 1 where Sphinx has a warning, a link inside the site leads nowhere, or a page would load something from
another host.
"""

import shutil
import sys
import time
from pathlib import Path

from sphinx.cmd.build import build_main

from check import problems
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
    """Make the site of these pages. Prints what is wrong, if anything is."""
    options = ["-q", "-W", "--keep-going", "-c", str(BOOK), "-d", str(site.parent / "doctrees")]
    if build_main([*options, str(pages), str(site)]):
        return False
    wrong = problems(site)
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
    return not wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BOOK / "_build"))
