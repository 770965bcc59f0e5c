"""Generate the API reference from the public names and their docstrings.

The names come from the objects themselves: those that `from ddp_tutorial import ...` offers, and those of each room.
Docstrings are Markdown. Each name is described on one page, and the names of the package come first.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sphinx.util.inspect import stringify_signature

import ddp_tutorial
from ddp_tutorial.config import Config
from settings import settings_table

PACKAGE = Path(ddp_tutorial.__file__).parent
TOP = "ddp_tutorial"
_PAGE, _MEMBER = "`" * 8, "`" * 6  # fences of directives; the outer fence is longer

INDEX = """\
# API reference

The names of the package `ddp_tutorial` are stable. The names of its subpackages may change.

```{{toctree}}
:maxdepth: 1

{pages}
```
"""


def public_names() -> dict[str, dict[str, Any]]:
    """Return the public objects by package and name. A name of the top package is not repeated under its room."""
    packages = [TOP, *(f"{TOP}.{stub.parent.name}" for stub in sorted(PACKAGE.glob("*/__init__.pyi")))]
    found: dict[str, dict[str, Any]] = {}
    for package in packages:
        module = importlib.import_module(package)
        names = {name: getattr(module, name) for name in sorted(module.__all__)}
        found[package] = {name: value for name, value in names.items() if name not in found.get(TOP, {})}
    return found


def write_api(folder: Path) -> None:
    """Write a page for each package with public names, and an index of these pages."""
    folder.mkdir()
    found = public_names()
    for package, names in found.items():
        (folder / f"{package}.md").write_text(package_page(package, names), encoding="utf-8")
    (folder / "index.md").write_text(INDEX.format(pages="\n".join(found)), encoding="utf-8")


def package_page(package: str, names: dict[str, Any]) -> str:
    """Return the page of a package: its docstring and its public names."""
    module = importlib.import_module(package)
    text = [f"# `{package}`\n", inspect.getdoc(module) or ""]
    elsewhere = sorted(set(module.__all__) - set(names))
    if elsewhere:
        listed = ", ".join(f"{{py:obj}}`{name} <{TOP}.{name}>`" for name in elsewhere)
        text.append(f"\nThis package also contains {listed}.")
    text.append("")
    for name, value in names.items():
        text.append(f"## `{name}`\n")
        text.append(description(package, name, value))
    return "\n".join(text)


def description(package: str, name: str, value: Any) -> str:
    """Return the directive of one name: its signature, its docstring, and the methods and settings of a class."""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        return directive(kind, f"{name}{signature(value)}", f":module: {package}\n\n{class_body(value)}")
    if callable(value):
        return directive("function", f"{name}{signature(value)}", f":module: {package}\n\n{doc_of(value)}")
    kind = f"A {type(value).__name__} of {len(value)}." if hasattr(value, "__len__") else ""
    return directive("data", name, f":module: {package}\n\n{kind}")


def directive(kind: str, declared: str, content: str, fence: str = _PAGE) -> str:
    return f"{fence}{{py:{kind}}} {declared}\n{content}\n{fence}\n"


SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note):$", re.MULTILINE)


def doc_of(value: Any) -> str:
    """Return the docstring of `value` as Markdown, with the sections of the Google convention as lists."""
    doc = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    beginning, *sections = SECTION.split(doc)
    pairs = zip(sections[::2], sections[1::2], strict=True)
    return "\n".join([beginning, *(f"**{title}:**\n\n{_section(title, text)}" for title, text in pairs)])


def _section(title: str, text: str) -> str:
    """Return the text of a section. Each entry, such as `name: description`, becomes an item of a list."""
    body, _, rest = text.partition("\n\n")
    body = inspect.cleandoc(body)
    if title in {"Args", "Raises", "Attributes"}:
        body = re.sub(r"^(\S[^:\n]*): ", r"- `\1`: ", body, flags=re.MULTILINE)
    return f"{body}\n\n{inspect.cleandoc(rest) if rest else ''}"


def class_body(cls: type) -> str:
    """Return the docstrings of a class and its constructor, the settings if it is a config, and the methods."""
    constructor = vars(cls).get("__init__")
    text = [doc_of(cls), doc_of(constructor) if inspect.isfunction(constructor) else ""]
    if issubclass(cls, Config):
        text.append(settings_table(cls.model_fields))
    for name, member in members(cls):
        if isinstance(member, property):
            text.append(directive("property", name, doc_of(member), _MEMBER))
        else:
            function = getattr(cls, name)
            kind = ":classmethod:\n" if isinstance(member, classmethod) else ""
            kind = ":staticmethod:\n" if isinstance(member, staticmethod) else kind
            bound = signature(function, method=not isinstance(member, classmethod | staticmethod))
            text.append(directive("method", f"{name}{bound}", f"{kind}\n{doc_of(member)}", _MEMBER))
    return "\n\n".join(part for part in text if part)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties with a docstring, including those of base classes in this package."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith(TOP):
            continue
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            is_one = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
            if name not in seen and not name.startswith("_") and is_one and getattr(function, "__doc__", None):
                yield name, member
            seen.add(name)


def signature(value: Any, *, method: bool = False) -> str:
    """Return the parameters with types and defaults, as in Python; "" for a config, an exception or a protocol."""
    if inspect.isclass(value) and issubclass(value, BaseModel | BaseException):
        return ""
    if getattr(value, "_is_protocol", False):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = list(found.parameters.values())[1 if method else 0 :]
    written = stringify_signature(found.replace(parameters=parameters), unqualified_typehints=True)
    return re.sub(r" at 0x[0-9a-f]+", "", written)
