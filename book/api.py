"""Pages about the public names: what the package hands on at its front door, and what each room does.

Made by looking at the objects themselves. Docstrings are Markdown here, as they are written: a name between backticks,
an indented block of code. A name stands on one page, with the front door's names on the first.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.util.inspect import stringify_signature

import ddp_tutorial

PACKAGE = Path(ddp_tutorial.__file__).parent
TOP = "ddp_tutorial"
# How many backticks stand around a directive: more around those that hold others.
_PAGE, _MEMBER = "`" * 8, "`" * 6


def public_names() -> dict[str, dict[str, Any]]:
    """The front door and each room that hands names on -> name -> object. An object is named once, at the front door
    if it is there."""
    rooms = [TOP, *(f"{TOP}.{stub.parent.name}" for stub in sorted(PACKAGE.glob("*/__init__.pyi")))]
    found: dict[str, dict[str, Any]] = {}
    for room in rooms:
        module = importlib.import_module(room)
        names = {name: getattr(module, name) for name in sorted(module.__all__)}
        found[room] = {name: value for name, value in names.items() if name not in found.get(TOP, {})}
    return found


def write_api(folder: Path) -> None:
    """A page for the front door and each room, and one that lists them."""
    folder.mkdir()
    found = public_names()
    for room, names in found.items():
        (folder / f"{_page(room)}.md").write_text(page_of_room(room, names), encoding="utf-8")
    pages = "\n".join(_page(room) for room in found)
    (folder / "index.md").write_text(
        "# Names of the package\n\n"
        "What `from ddp_tutorial import ...` offers is meant to stay as it is. Rooms have more, which may change.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```\n",
        encoding="utf-8",
    )


def _page(room: str) -> str:
    return "front_door" if room == TOP else room.partition(".")[2]


def page_of_room(room: str, names: dict[str, Any]) -> str:
    """The docstring of the room, and all its names."""
    title = "The front door: `ddp_tutorial`" if room == TOP else f"`{room}`"
    module = importlib.import_module(room)
    text = [f"# {title}\n", inspect.getdoc(module) or ""]
    at_front = sorted(set(module.__all__) - set(names))
    if at_front:
        listed = ", ".join(f"{{py:obj}}`{name} <{TOP}.{name}>`" for name in at_front)
        text.append(f"\nThe front door has these names, too: {listed}.")
    text.append("")
    for name, value in names.items():
        text.append(f"## `{name}`\n")
        text.append(described(room, name, value))
    return "\n".join(text)


def described(room: str, name: str, value: Any) -> str:
    """A directive with the signature and the docstring of one name, and of its methods and fields if it has any."""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        return directive(kind, f"{name}{signature(value)}", f":module: {room}\n\n{about_class(value)}")
    if callable(value):
        return directive("function", f"{name}{signature(value)}", f":module: {room}\n\n{doc_of(value)}")
    kind = f"A {type(value).__name__} of {len(value)}." if hasattr(value, "__len__") else ""
    return directive("data", name, f":module: {room}\n\n{kind}")


def directive(kind: str, declared: str, content: str, fence: str = _PAGE) -> str:
    return f"{fence}{{py:{kind}}} {declared}\n{content}\n{fence}\n"


def doc_of(value: Any) -> str:
    """The docstring, if it is its own."""
    doc = getattr(value, "__doc__", None)
    return inspect.cleandoc(doc) if doc else ""


def about_class(cls: type) -> str:
    text = [doc_of(cls)]
    if issubclass(cls, BaseModel):
        text.append(table_of_fields(cls))
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
    """Public methods and properties that have a docstring, also those of a base that is ours."""
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
    """Arguments with their types and defaults, written as in Python; "" where there is nothing to tell."""
    if inspect.isclass(value) and issubclass(value, BaseModel | BaseException):
        return ""  # a table tells the settings; exceptions are made by the package
    if getattr(value, "_is_protocol", False):
        return ""
    try:
        told = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    arguments = list(told.parameters.values())[1 if method else 0 :]
    written = stringify_signature(told.replace(parameters=arguments), unqualified_typehints=True)
    return re.sub(r" at 0x[0-9a-f]+", "", written)


def table_of_fields(cls: type[BaseModel]) -> str:
    """The settings of a config: name, type, default, what it is for."""
    lines = ["| setting | type | by default | what for |", "|---|---|---|---|"]
    for name, field in cls.model_fields.items():
        kind = inspect.formatannotation(field.annotation).replace("typing.", "")
        kind = re.sub(r"\b(?:\w+\.)+(?=\w)", "", kind).replace("|", "\\|")
        default = "" if field.default is PydanticUndefined else f"`{field.default!r}`"
        if isinstance(field.default, BaseModel):
            default = "its own"
        lines.append(f"| `{name}` | `{kind}` | {default} | {field.description or ''} |")
    return "\n".join(lines)
