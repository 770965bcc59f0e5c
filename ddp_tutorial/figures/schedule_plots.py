"""Draw planned or measured pipeline schedules, with one row per rank and one box per forward or backward pass."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ddp_tutorial.figures.style import BLUE, GREEN, INK, ORANGE, SKY, styled

if TYPE_CHECKING:
    from ddp_tutorial.pipeline.schedules import Timed

_YELLOW = "#F7D488"
_COLORS = {"F": (BLUE, SKY), "B": (ORANGE, _YELLOW), "W": (GREEN, GREEN)}  # (a rank's first stage, later stages)


@styled
def schedules(plans: Mapping[str, Sequence[Sequence["Timed"]]], title: str, xlabel: str = "seconds") -> Figure:
    """Draw each rank's actions, with one panel per schedule.

    All panels share one time axis. In each panel, the first action starts at time zero. A box contains the index of its
    micro-batch. If a rank runs several stages, all stages except the first have lighter colors. White areas are idle
    time. In schedules that split the backward pass, actions of kind "W" compute only the gradients of the weights.
    """
    heights = [len(ranks) for ranks in plans.values()]
    size = (10, 0.9 + sum(0.45 + 0.34 * height for height in heights))
    figure, grid = plt.subplots(len(plans), 1, figsize=size, squeeze=False, sharex=True, height_ratios=heights)
    last = max(end - _zero(ranks) for ranks in plans.values() for rank in ranks for _, _, end in rank)
    largest = max(m for ranks in plans.values() for rank in ranks for (_, _, m), _, _ in rank)
    room = 0.006 * (1 + len(str(largest))) * last  # the width of an index
    for axes, (name, ranks) in zip(grid[:, 0], plans.items(), strict=True):
        zero = _zero(ranks)
        for row, rank in enumerate(ranks):
            for (kind, stage, m), start, end in rank:
                later = stage >= len(ranks)
                color = _COLORS[str(kind)][later]
                box = Rectangle((start - zero, row - 0.42), end - start, 0.84, facecolor=color, edgecolor="white")
                axes.add_patch(box)
                if end - start > room:
                    ink = "white" if kind == "F" and not later else INK
                    axes.text((start + end) / 2 - zero, row, str(m), ha="center", va="center", color=ink, fontsize=8)
        axes.set(xlim=(0, 1.005 * last), ylim=(len(ranks) - 0.5, -0.5))
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axes.set_title(name, fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    grid[-1, 0].set_xlabel(xlabel)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    keys = [Patch(color=BLUE, label="forward"), Patch(color=ORANGE, label="backward")]
    if any(str(action[0]) == "W" for ranks in plans.values() for rank in ranks for action, _, _ in rank):
        keys.append(Patch(color=GREEN, label="gradient of the weights"))
    if any(action[1] >= len(ranks) for ranks in plans.values() for rank in ranks for action, _, _ in rank):
        keys += [Patch(color=SKY, label="forward, later stage"), Patch(color=_YELLOW, label="backward, later stage")]
    figure.legend(handles=keys, ncols=len(keys), loc="outside lower center")
    return figure


def _zero(ranks: Sequence[Sequence["Timed"]]) -> float:
    return min(start for rank in ranks for _, start, _ in rank)
