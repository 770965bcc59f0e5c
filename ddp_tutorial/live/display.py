"""What a cell shows on each rank: `display`, figures, the last expression; and how that is put together at home."""

import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ddp_tutorial.live.messages import MimeBundle

_show: Callable[[MimeBundle], None] | None = None  # set once, where this process is a rank of a pool


def set_display(show: Callable[[MimeBundle], None]) -> None:
    """Let `display` in this process call `show`."""
    global _show
    _show = show


def display(*values: Any, **_: Any) -> None:
    """Show values at home, under this rank's name, as IPython's `display` does; outside a pool, print them."""
    for value in values:
        if _show is None:
            print(value)
        else:
            sys.stdout.flush()
            _show(mime_bundle(value))


def mime_bundle(value: Any) -> MimeBundle:
    """What a notebook would show of `value`."""
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        from ddp_tutorial.processes.figures import png_of  # it imports matplotlib, which is here already

        return MimeBundle({"text/plain": repr(value), "image/png": b64encode(png_of(value)).decode()})
    formatter = _formatter()
    if formatter is None:
        return MimeBundle({"text/plain": repr(value)})
    data, metadata = formatter.format(value)
    return MimeBundle(
        {mime: b64encode(d).decode() if isinstance(d, bytes) else d for mime, d in data.items()}, metadata
    )


@cache
def _formatter() -> Any:
    """IPython's formatter of displayed values, imported when it is first needed; None where there is no IPython."""
    try:
        from IPython.core.formatters import DisplayFormatter
    except ImportError:
        return None
    return DisplayFormatter()


def show_open_figures() -> None:
    """Show all open figures, and close them: at the end of a cell, as a notebook does."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_fignums():
        pyplot.show()


class RankResults(dict[int, str]):
    """What the last expression of a cell was on each rank: rank -> text. Ranks that agree are shown in one line."""

    def __init__(self, texts: Mapping[int, str], ranks: int) -> None:
        super().__init__(texts)
        self.ranks = ranks

    def __repr__(self) -> str:
        together: dict[str, list[int]] = {}
        for rank, text in self.items():
            together.setdefault(text, []).append(rank)
        return "\n".join(f"{self._name(ranks)}:{_beside(text)}" for text, ranks in together.items())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def _name(self, ranks: list[int]) -> str:
        if len(ranks) == self.ranks > 1:
            return "all ranks"
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _beside(text: str) -> str:
    return f"\n{text}" if "\n" in text else f" {text}"
