"""Draw a rank's computation and communication, with one box per span."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ddp_tutorial.figures.style import BLUE, GREEN, INK, ORANGE, RED, SKY, styled

if TYPE_CHECKING:
    from ddp_tutorial.ddp.timeline import Span

_LOOKS = {
    "forward": (SKY, "", INK),
    "backward": (BLUE, "", "white"),
    "all-reduce": (ORANGE, "///", INK),
    "gather": (GREEN, "", "white"),
    "scatter": (RED, "\\\\\\", INK),
}


@styled
def lanes(panels: Mapping[str, Sequence["Span"]], title: str) -> Figure:
    """Draw spans in one panel per name, with one row per lane.

    All panels share one time axis in milliseconds. In each panel, the first span starts at time zero. A span's name,
    such as "gather 2", consists of a kind and a label. The kind determines the color of the box, and the box shows the
    label. The kinds are forward, backward, all-reduce, gather and scatter. White areas represent waiting time or other
    work.
    """
    rows = {name: list(dict.fromkeys(span.lane for span in spans)) for name, spans in panels.items()}
    heights = [len(each) for each in rows.values()]
    size = (10, 1.1 + sum(0.35 + 0.42 * height for height in heights))
    figure, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False, sharex=True, height_ratios=heights)
    longest = max(max(span.end for span in spans) - _zero(spans) for spans in panels.values())
    for axes, (name, spans) in zip(grid[:, 0], panels.items(), strict=True):
        for span in spans:
            kind, _, word = span.name.partition(" ")
            color, hatch, ink = _LOOKS[kind]
            left, length, row = span.start - _zero(spans), span.end - span.start, rows[name].index(span.lane)
            look: dict[str, Any] = {"facecolor": color, "hatch": hatch, "edgecolor": "white"}
            axes.add_patch(Rectangle((1e3 * left, row - 0.42), 1e3 * length, 0.84, **look))
            if length > 0.012 * len(word) * longest:
                box = {"facecolor": color, "edgecolor": "none", "pad": 1.0}
                place = 1e3 * (left + length / 2), row
                axes.text(*place, word, ha="center", va="center", color=ink, fontsize=8.5, bbox=box)
        axes.set(xlim=(0, 1.01e3 * longest), ylim=(len(rows[name]) - 0.45, -0.55))
        axes.set_yticks(range(len(rows[name])), rows[name])
        axes.set_title(name, fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    grid[-1, 0].set_xlabel("milliseconds")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    drawn = {span.name.partition(" ")[0] for spans in panels.values() for span in spans}
    keys = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=kind)
        for kind, (color, hatch, _) in _LOOKS.items()
        if kind in drawn
    ]
    figure.legend(handles=keys, ncols=len(keys), loc="outside lower center")
    return figure


def _zero(spans: Sequence["Span"]) -> float:
    return min(span.start for span in spans)
