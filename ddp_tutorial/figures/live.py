"""Sliders that choose the figure to show, in a running notebook.

Where no kernel runs, on a page of the repository or of a book, the first figure stands in their place.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from ddp_tutorial.figures.style import as_png


class _Choice(widgets.VBox):  # type: ignore[misc]  # of ipywidgets, which has no types
    """Sliders above a picture, which is the last of the children."""

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        picture = base64.b64encode(self.children[-1].value).decode()
        return super()._repr_mimebundle_(**kwargs) | {"image/png": picture}


def explore(
    draw: Callable[..., Figure], *, start: Mapping[str, Any] | None = None, **choices: Sequence[Any]
) -> _Choice:
    """A slider for each argument of `draw` in `choices`, over the values given there, and the figure that `draw` makes.

    It begins with the values in `start`, and with the first one of each slider that is not there. Where `draw` raises
    `ValueError`, its message stands above the last figure. Raises `ValueError` for a start that is on no slider.
    """
    begin = {name: values[0] for name, values in choices.items()} | dict(start or {})
    for name, value in begin.items():
        if name not in choices or value not in choices[name]:
            raise ValueError(f"start: {name}={value!r} is on no slider")
    sliders = {
        name: widgets.SelectionSlider(options=list(values), value=begin[name], description=name)
        for name, values in choices.items()
    }
    picture = widgets.Image(format="png", layout={"max_width": "100%", "align_self": "flex-start"})  # not stretched
    message = widgets.Label()

    def show(_: Mapping[str, Any] | None) -> None:
        try:
            picture.value = as_png(draw(**{name: each.value for name, each in sliders.items()}))
            message.value = ""
        except ValueError as error:
            message.value = str(error)

    for each in sliders.values():
        each.style.description_width = f"{max(map(len, sliders))}ch"  # one for all, so that they begin in one line
        each.observe(show, names="value")
    show(None)
    return _Choice([*sliders.values(), message, picture])
