"""Sliders that select a figure in a running notebook.

Without a running kernel, for example on GitHub or in the book, a notebook shows only the first figure.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from ddp_tutorial.config import require_package
from ddp_tutorial.figures.style import as_png

require_package("ipywidgets", "notebooks")
import ipywidgets as widgets  # noqa: E402


class _Choice(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no type annotations
    """A widget with sliders above a picture. The picture is the last child of the widget."""

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        picture = base64.b64encode(self.children[-1].value).decode()
        return super()._repr_mimebundle_(**kwargs) | {"image/png": picture}


def explore(
    draw: Callable[..., Figure], *, start: Mapping[str, Any] | None = None, **choices: Sequence[Any]
) -> _Choice:
    """Return a widget with one slider per argument in `choices`, and the figure for the selected values.

    If `draw` raises `ValueError`, the error message appears above the last figure.

    Args:
        draw: A function that takes the selected values as keyword arguments and returns the figure.
        start: Initial slider values, by name. All other sliders start at their first value.
        choices: The values of each slider.

    Raises:
        ValueError: If `start` contains an unknown slider, or a value that the slider does not contain.
    """
    begin = {name: values[0] for name, values in choices.items()} | dict(start or {})
    for name, value in begin.items():
        if name not in choices or value not in choices[name]:
            raise ValueError(f"the start value of slider {name!r} must be one of its values, got {value!r}")
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
        each.style.description_width = f"{max(map(len, sliders))}ch"  # the same width for all, to align the sliders
        each.observe(show, names="value")
    show(None)
    return _Choice([*sliders.values(), message, picture])
