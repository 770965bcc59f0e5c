"""Show a cell's displayed values, its figures, and the value of its last expression for each rank."""

import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ddp_tutorial.config import named_ranks
from ddp_tutorial.live.messages import MimeBundle

_show: Callable[[MimeBundle], None] | None = None  # set if this process is a rank of a pool


def set_display(show: Callable[[MimeBundle], None]) -> None:
    """Set the function that `display` calls in this process."""
    global _show
    _show = show


def display(*values: Any, **_: Any) -> None:
    """Display values in the notebook, as IPython's `display` does, labeled with this rank's number.

    Outside a pool, the values are printed.
    """
    for value in values:
        if _show is None:
            print(value)
        else:
            sys.stdout.flush()
            _show(mime_bundle(value))


def mime_bundle(value: Any) -> MimeBundle:
    """Return the representations of `value` that a notebook would show."""
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        from ddp_tutorial.processes.figures import png_of  # imports matplotlib, which the cell has already imported

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
    """Return IPython's formatter for displayed values, or None if IPython is not installed."""
    try:
        from IPython.core.formatters import DisplayFormatter
    except ImportError:
        return None
    return DisplayFormatter()


def show_open_figures() -> None:
    """Show and close all open figures, as a notebook does at the end of a cell."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_fignums():
        pyplot.show()


class RankResults(dict[int, str]):
    """Dict that maps each rank to its result's text representation. The `repr` groups ranks with identical text."""

    def __init__(self, texts: Mapping[int, str], ranks: int) -> None:
        """Store the text representations.

        Args:
            texts: Text representation of the last expression's value, by rank. Ranks without a value are omitted.
            ranks: Number of ranks in the pool.
        """
        super().__init__(texts)
        self.ranks = ranks

    def __repr__(self) -> str:
        """Return one line or block for each distinct text, prefixed with the ranks that share the text."""
        together: dict[str, list[int]] = {}
        for rank, text in self.items():
            together.setdefault(text, []).append(rank)
        return "\n".join(f"{self._name(ranks)}:{_beside(text)}" for text, ranks in together.items())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def _name(self, ranks: list[int]) -> str:
        return "all ranks" if len(ranks) == self.ranks > 1 else named_ranks(ranks)


def _beside(text: str) -> str:
    return f"\n{text}" if "\n" in text else f" {text}"
