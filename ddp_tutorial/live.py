"""Figures that one can turn over by hand, in a running notebook.

What a widget shows is not kept in a saved notebook: show one figure beside it that stands alone.
"""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def slider(frames: Mapping[str, Figure], label: str) -> widgets.VBox:
    """A slider that flips through `frames`, by their names, beginning with the first; `label` says what the names are.

    Each figure is drawn once, here, and closed, so that the notebook does not show it a second time. The picture
    follows the slider in the kernel: without one it stands still.
    """
    if not frames:
        raise ValueError("a slider needs at least one figure")
    pictures = {name: _png(figure) for name, figure in frames.items()}
    names = list(pictures)
    picture = widgets.Image(value=pictures[names[0]], format="png")
    choice = widgets.SelectionSlider(options=names, description=label, layout={"width": "600px"})
    choice.style.description_width = "initial"

    def turn(change: Mapping[str, Any]) -> None:
        picture.value = pictures[change["new"]]

    choice.observe(turn, names="value")
    return widgets.VBox([choice, picture])


def explore(draw: Callable[..., Figure], **choices: Sequence[Any]) -> widgets.VBox:
    """A slider for each of `choices`, the values that an argument of `draw` can take, and the figure that it draws.

    It begins with the first value of each. Where `draw` raises `ValueError`, its message stands above the last figure.
    """
    sliders = {
        name: widgets.SelectionSlider(options=list(values), description=name) for name, values in choices.items()
    }
    picture, message = widgets.Image(format="png"), widgets.Label()

    def turn(_: Mapping[str, Any] | None) -> None:
        try:
            picture.value = _png(draw(**{name: each.value for name, each in sliders.items()}))
            message.value = ""
        except ValueError as error:
            message.value = str(error)

    for each in sliders.values():
        each.style.description_width = "initial"
        each.observe(turn, names="value")
    turn(None)
    return widgets.VBox([*sliders.values(), message, picture])


def _png(figure: Figure) -> bytes:
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    return drawn.getvalue()
