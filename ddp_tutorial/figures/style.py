"""Define a style for all figures that is legible in grayscale and for color-blind readers.

Each series has a color from the Okabe-Ito palette and its own dash, marker or hatch.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.figure import Figure

Args = ParamSpec("Args")

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]
HATCHES = ["", "///", "...", "\\\\\\", "xx", "++"]
INK, FAINT = "#222222", "#888888"

# The points (xs, ys) of each series, by name.
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]

_STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "font.size": 10,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}


def styled(draw: Callable[Args, Figure]) -> Callable[Args, Figure]:
    """Apply the project's style to the figures that `draw` creates, without affecting other figures."""

    @wraps(draw)
    def wrapped(*args: Args.args, **kwargs: Args.kwargs) -> Figure:
        with plt.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return wrapped


def as_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes, and close it to free its memory."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()
