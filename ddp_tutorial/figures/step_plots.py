"""Draw timelines of steps and processes, and the step time as a function of one setting."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddp_tutorial.figures.style import (
    BLUE,
    COLORS,
    DASHES,
    FAINT,
    GREEN,
    HATCHES,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Series,
    styled,
)

if TYPE_CHECKING:  # imports torch, which drawing does not require
    from ddp_tutorial.ddp.timeline import Span, Timeline

# The color and hatch of each phase of a step in `gantt`.
_GANTT = {
    "data": (PURPLE, "xx"),
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "finish": ("white", "////"),
    "update": (GREEN, "..."),
}
_BACKGROUND = "#e4e4e4"  # behind both lanes during the backward pass


@styled
def swimlane(spans: Sequence["Span"], title: str) -> Figure:
    """Draw each process's spans as bars, with one lane per process. Time zero is the start of the earliest span."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    names = list(dict.fromkeys(span.name for span in spans))
    looks = {name: (COLORS[i % len(COLORS)], HATCHES[i % len(HATCHES)]) for i, name in enumerate(names)}
    zero = min(span.start for span in spans)
    width = max(span.end for span in spans) - zero
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.55 * len(lanes)))
    for span in spans:
        color, hatch = looks[span.name]
        row, left, length = lanes.index(span.lane), span.start - zero, span.end - span.start
        axes.barh(row, length, left=left, color=color, hatch=hatch, edgecolor="white", height=0.62)
        if length > 0.12 * width:
            label = f"{span.name}\n{length:.2f} s"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
            axes.text(left + length / 2, row, label, ha="center", va="center", fontsize=8.5, color=INK, bbox=box)
    for name, (color, hatch) in looks.items():
        axes.barh(0, 0, color=color, hatch=hatch, edgecolor="white", label=name)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="seconds since the start of the first process", title=title)
    axes.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.28 - 0.12 / len(lanes)))
    return figure


@styled
def gantt(timelines: Mapping[str, "Timeline"], title: str = "") -> Figure:
    """Draw rank 0's computation and communication in several runs, on one time axis.

    A gray background marks the backward pass. Communication on this background is overlapped, and all other
    communication is exposed. A run's label contains the durations of the step and of its exposed communication.
    """
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.95 * len(timelines)))
    _gantt(axes, timelines)
    axes.set(title=title)
    figure.legend(ncols=len(_GANTT) + 2, loc="outside lower center", columnspacing=1.2)
    return figure


def profiled_steps(timeline: "Timeline") -> Figure:
    """Draw the profiled steps of a run, with one row per rank and a shared time axis."""
    ranks = {f"rank {rank}": replace(timeline, ranks=[spans]) for rank, spans in enumerate(timeline.ranks)}
    return gantt(ranks, title="Profiled steps on every rank")


def _gantt(axes: Axes, timelines: Mapping[str, "Timeline"]) -> None:
    from ddp_tutorial.ddp.timeline import COMPUTE

    for row, timeline in enumerate(timelines.values()):
        spans = _seen(timeline)
        zero = min(span.start for span in spans)
        for span in spans:
            left, length = 1e3 * (span.start - zero), 1e3 * (span.end - span.start)
            color, hatch = _GANTT.get(span.name, (ORANGE, "")) if span.lane == COMPUTE else (ORANGE, "")
            y, height = (row - 0.19, 0.36) if span.lane == COMPUTE else (row + 0.19, 0.28)
            axes.barh(
                y, length, left=left, color=color, hatch=hatch, edgecolor=_edge(color), height=height, linewidth=0.5
            )
            if span.name == "backward":
                axes.barh(row, length, left=left, color=_BACKGROUND, height=0.86, zorder=0)
        overlap = timeline.overlap(0)
        exposed = 1e3 * (overlap.communication - overlap.hidden)
        note = f"  {_milliseconds(spans):.0f} ms,\n  {exposed:.0f} ms exposed" if overlap.communication else ""
        axes.annotate(note, (_milliseconds(spans), row), va="center", fontsize=8.5)
    drawn = {span.name for timeline in timelines.values() for span in timeline.ranks[0]}
    for name, (color, hatch) in _GANTT.items():
        if name in drawn:
            label = "finish (waiting)" if name == "finish" else name
            axes.barh(0, 0, color=color, hatch=hatch, edgecolor=_edge(color), label=label)
    axes.barh(0, 0, color=ORANGE, edgecolor="white", label="all-reduce")
    axes.barh(0, 0, color=_BACKGROUND, label="backward pass (background)")
    axes.set_yticks(range(len(timelines)), list(timelines))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.16)
    axes.set(xlabel="time (ms)")
    axes.set_xlim(left=0)


def _edge(color: str) -> str:
    """Return the color of a bar's edge and hatch."""
    return FAINT if color == "white" else "white"


def _seen(timeline: "Timeline") -> list["Span"]:
    return [span for span in timeline.ranks[0] if span.name != "grads"]  # "grads" contains the other spans


def _milliseconds(spans: Sequence["Span"]) -> float:
    return 1e3 * (max(span.end for span in spans) - min(span.start for span in spans))


@styled
def sweeps(
    measured: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]],
    model: Series,
    title: str,
    xlabel: str,
    ylabel: str,
) -> Figure:
    """Draw measured and modeled times as functions of x, with one panel per name.

    A point marks the fastest measurement at each x value, and a vertical line extends from the point to the median. A
    curve shows the model. The minima of the measurements and of the model are marked. Each panel's title contains the x
    values of both minima. `measured` maps the name of each panel to x values and several measurements per x value.
    """
    figure, grid = plt.subplots(1, len(measured), figsize=(10, 3.9), squeeze=False)
    for axes, (name, (xs, several)) in zip(grid[0], measured.items(), strict=True):
        best, lowest = _sweep(axes, xs, several, model[name])
        axes.set(xlabel=xlabel)
        axes.set_title(f"{name}\nbest: {best:g} measured, {lowest:.2g} modeled", fontsize=10)
    grid[0][0].set_ylabel(ylabel)
    handles = [Line2D([], [], label=label, **look) for label, look in _OF_SWEEP.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


_OF_SWEEP: dict[str, dict[str, Any]] = {
    "measured: minimum to median": {"color": BLUE, "marker": "o", "linestyle": "-"},
    "measured minimum": {"color": BLUE, "marker": "o", "markersize": 12, "fillstyle": "none", "linestyle": ""},
    "model": {"color": ORANGE, "linestyle": DASHES[1], "linewidth": 2},
    "modeled minimum": {"color": ORANGE, "marker": "v", "markeredgecolor": INK, "linestyle": ""},
}


def _sweep(
    axes: Axes,
    xs: Sequence[float],
    several: Sequence[Sequence[float]],
    model: tuple[Sequence[float], Sequence[float]],
) -> tuple[float, float]:
    """Draw one panel of `sweeps`, and return the x values of the lowest measurement and of the model's minimum."""
    quickest = [min(ys) for ys in several]
    best = min(range(len(xs)), key=quickest.__getitem__)
    fine, line = model
    lowest = min(range(len(fine)), key=line.__getitem__)
    axes.plot(fine, line, color=ORANGE, linestyle=DASHES[1], linewidth=2, zorder=1)
    axes.vlines(xs, quickest, [statistics.median(ys) for ys in several], color=BLUE, linewidth=1.4)
    axes.plot(xs, quickest, "o", color=BLUE, markersize=7, markeredgecolor="white")
    axes.plot(xs[best], quickest[best], "o", color=BLUE, markersize=14, fillstyle="none", markeredgewidth=1.6)
    axes.plot(fine[lowest], line[lowest], "v", color=ORANGE, markersize=10, markeredgecolor=INK)
    axes.set(xscale="log")
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.minorticks_off()
    axes.margins(y=0.12)
    return xs[best], fine[lowest]


@styled
def one_of_sweep(
    timelines: Mapping[float, "Timeline"],
    x: float,
    several: Mapping[float, Sequence[float]],
    model: tuple[Sequence[float], Sequence[float]],
    title: str,
    xlabel: str,
) -> Figure:
    """Draw the timeline of one point in a sweep (see `gantt`) above the measurements of the sweep (see `sweeps`).

    The lower panel also marks the point. The time axis of the upper panel fits every timeline, so figures for different
    points have the same scale.

    Args:
        timelines: The timeline of a step at each x value.
        x: The x value of the point to show.
        several: The measurements at each x value, in milliseconds.
        model: The points (xs, ys) of the model.
        title: The title of the figure.
        xlabel: The label of the x-axis.
    """
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), height_ratios=[1, 1.7])
    _gantt(above, {"": timelines[x]})
    lengths = {each: _milliseconds(_seen(timeline)) for each, timeline in timelines.items()}
    above.set(title=title, xlim=(0, 1.25 * max(lengths.values())), yticks=[])
    _sweep(below, list(several), list(several.values()), model)
    below.axvline(x, color=RED, linewidth=6, alpha=0.25, zorder=0)
    below.plot(x, lengths[x], "D", color=RED, markersize=8, markeredgecolor="white", zorder=3)
    below.set(xlabel=xlabel, ylabel="milliseconds per step")
    handles, _ = above.get_legend_handles_labels()
    handles.append(Line2D([], [], color=RED, marker="D", linestyle="", label="the step above"))
    figure.legend(handles=handles, ncols=4, loc="outside lower center", fontsize=9)
    return figure
