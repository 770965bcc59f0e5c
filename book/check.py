"""Check a built site: internal links have a target, external links are well-formed, no page loads from other hosts."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes whose address a browser fetches by itself. It also fetches the `href` of a `link`, except for ONLY_NAMED.
LOADING = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src")}
LOADING |= {("embed", "src"), ("object", "data"), ("image", "href"), ("use", "href"), ("video", "poster")}
ONLY_NAMED = {"canonical", "alternate", "author", "license", "next", "prev", "index", "search", "help", "top"}
# An address in a style or a script. A browser does not fetch a namespace.
ADDRESS = re.compile(r"(?:https?:)?//[a-z0-9-]+(?:\.[a-z0-9-]+)+[^\s\"'`)\\]*", re.IGNORECASE)
NAMESPACE = re.compile(r"https?://www\.w3\.org/(?:2000/svg|1999/xhtml|1999/xlink|1998/Math/MathML|XML/1998/namespace)")
HOST = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+(?::\d+)?", re.IGNORECASE)


class Page(HTMLParser):
    """The `ids` and `links` of a page, the addresses that it loads, and its inline styles and scripts (`code`)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.code: list[str] = []
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given and tag != "meta"}
        self.code += [given["style"]] if "style" in given else []
        self._inside = tag
        if tag in {"a", "area"} and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and not set(given.get("rel", "").split()) <= ONLY_NAMED:
            self.loaded.append(given.get("href", ""))
        self.loaded += [value for name, value in given.items() if (tag, name) in LOADING]
        self.loaded += [each.split()[0] for each in given.get("srcset", "").split(",") if each.strip()]

    def handle_data(self, data: str) -> None:
        if self._inside in {"script", "style"}:
            self.code.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def find_problems(site: Path) -> list[str]:
    """Return the problems of a site, one line each."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: {link} {why}" for link in page.links if (why := _broken(link, path, site, pages))]
        for address in page.loaded:
            if urlsplit(address).netloc or address.startswith("//"):
                found.append(f"{name}: loads {address}")
            elif why := _broken(address, path, site, pages):
                found.append(f"{name}: {address} {why}")
        found += [f"{name}: names {address} in a style or script" for address in fetched("\n".join(page.code))]
    for path in sorted(each for each in site.rglob("*") if each.suffix in {".js", ".css", ".svg"}):
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(site)}: names {address}" for address in fetched(text)]
    return found


def fetched(code: str) -> list[str]:
    """Return the addresses of other hosts in a style or a script, comments excluded."""
    bare = re.sub(r"/\*.*?\*/|(?:^|(?<=[\s;{}]))//[^\n]*", " ", code, flags=re.DOTALL)
    return [found for found in ADDRESS.findall(bare) if not NAMESPACE.match(found)]


def _broken(link: str, page: Path, site: Path, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link, or "". External links are not followed."""
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return f"is malformed: {error}"
    if parts.scheme in {"http", "https"}:
        return "" if HOST.fullmatch(parts.netloc) and " " not in link else "is malformed"
    if parts.scheme in {"data", "mailto"}:
        return ""
    if parts.scheme or parts.netloc:
        return "is neither relative nor http(s)"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "is no file"
    if not target.is_relative_to(site.resolve()):
        return "is outside of the site"
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].ids:
        return "is no anchor of that page"
    return ""
