"""Draw measurements, and re-export the figures in `diagrams`, `restart_plots` and `step_plots`."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from ddp_tutorial.figures.diagrams import buckets, chunks, collectives, messages, processes, sample_assignment
from ddp_tutorial.figures.restart_plots import attempts, goodput, restart_levels, stale_address, world_sizes
from ddp_tutorial.figures.step_plots import gantt, one_of_sweep, sweeps, swimlane
from ddp_tutorial.figures.style import (
    BLUE,
    COLORS,
    DASHES,
    FAINT,
    HATCHES,
    INK,
    SKY,
    Series,
    as_png,
    styled,
)
from ddp_tutorial.runs.folder import Run, smooth

__all__ = [
    "COLORS",
    "INK",
    "as_png",
    "attempts",
    "bars",
    "buckets",
    "chunks",
    "collectives",
    "curves",
    "dots_by_group",
    "gantt",
    "goodput",
    "intervals",
    "loss_curves",
    "measured_and_model",
    "messages",
    "one_of_sweep",
    "points",
    "processes",
    "repeats_and_medians",
    "restart_levels",
    "sample_assignment",
    "stacked",
    "stale_address",
    "styled",
    "sweeps",
    "swimlane",
    "world_sizes",
]


@styled
def loss_curves(runs: Mapping[str, Run], title: str = "Loss") -> Figure:
    """Draw the training loss of each run as a moving average, and its validation loss as points.

    Later curves are thinner and dashed, so that identical curves remain visible.
    """
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for (label, run), color, dash, width in zip(runs.items(), cycle(COLORS), cycle(DASHES), cycle([4, 1.8, 1.4])):
        steps, losses = run.series("loss")
        axes.plot(
            steps,
            smooth(losses, window=max(1, len(losses) // 20)),
            color=color,
            linestyle=dash,
            linewidth=width,
            label=label,
        )
        eval_steps, eval_losses = run.series("eval_loss")
        axes.plot(eval_steps, eval_losses, "o", color=color, markersize=3 + width, markeredgecolor="white")
    axes.plot([], [], "o", color=FAINT, label="validation")
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (training: moving average)")
    axes.legend()
    return figure


@styled
def bars(
    values: Mapping[str, float | Sequence[float]],
    xlabel: str,
    title: str,
    note: Callable[[float], str] = "{:,.0f}".format,
) -> Figure:
    """Draw one horizontal bar per name, labeled with `note(value)`.

    If a bar represents several values, its length is their median, and a horizontal line spans their range.
    """
    figure, axes = plt.subplots(figsize=(7, 0.7 + 0.5 * len(values)))
    for row, ((_, value), color, hatch) in enumerate(zip(values.items(), cycle(COLORS), cycle(HATCHES))):
        several = sorted(value) if isinstance(value, Sequence) else [value]
        middle = statistics.median(several)
        axes.barh(row, middle, color=color, hatch=hatch, edgecolor="white", height=0.7)
        if len(several) > 1:
            axes.plot([several[0], several[-1]], [row, row], color=INK, marker="|", linewidth=1.2)
        axes.annotate(f"  {note(middle)}", (max(several), row), va="center")
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set(xlabel=xlabel, title=title)
    return figure


@styled
def curves(
    series: Series,
    title: str,
    xlabel: str,
    ylabel: str,
    xscale: str = "linear",
    yscale: str = "linear",
    ylim: tuple[float, float] | None = None,
) -> Figure:
    """Draw each series as a line through its points (xs, ys), labeled with the series' name at the right end.

    On a "log" scale, every value must be positive.
    """
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for (xs, ys), color, dash in zip(series.values(), cycle(COLORS), cycle(DASHES)):
        axes.plot(xs, ys, color=color, linestyle=dash, linewidth=2.2)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
    axes.margins(x=0)
    if ylim is not None:
        axes.set_ylim(ylim)
    _label_ends(axes, {name: (xs[-1], ys[-1]) for name, (xs, ys) in series.items()})
    return figure


def _label_ends(axes: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Write each name to the right of the axes, as close to the height of its point as possible."""
    axes.autoscale_view()
    gap = 0.07  # the minimum distance between two names, as a fraction of the axes' height
    place = axes.transData + axes.transAxes.inverted()  # from data to axes coordinates
    colors = dict(zip(ends, cycle(COLORS)))
    points = {name: place.transform(end) for name, end in ends.items()}
    names = sorted(points, key=lambda name: float(points[name][1]))  # from lowest to highest
    heights = [float(points[name][1]) for name in names]
    for _ in range(200):  # separate names that are too close to each other
        for low, high in pairwise(range(len(names))):
            lacking = max(0.0, gap - (heights[high] - heights[low])) / 2
            heights[low], heights[high] = heights[low] - lacking, heights[high] + lacking
        heights[-1] = min(heights[-1], 0.96)  # leave room for the title, which may reach this far
    for name, height in zip(names, heights, strict=True):
        x, y = points[name]
        axes.plot([x, 1.03], [y, height], color=colors[name], linewidth=1.2, transform=axes.transAxes, clip_on=False)
        axes.text(1.035, height, name, color=INK, transform=axes.transAxes, va="center", fontsize=9.5)


@styled
def measured_and_model(
    measured: Series,
    model: Series,
    title: str,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Draw measured points, and a model's predictions as lines, on logarithmic scales.

    A series is a pair (xs, ys), with xs in bytes and ys in seconds. `marks` maps labels to the x values of vertical
    lines.
    """
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for (name, (xs, ys)), color, marker in zip(measured.items(), cycle(COLORS), cycle("os^Dv")):
        axes.plot(xs, ys, marker, color=color, markersize=7, markeredgecolor="white", label=f"{name}, measured")
    for (name, (xs, ys)), color, dash in zip(model.items(), cycle(COLORS), cycle(DASHES)):
        axes.plot(xs, ys, color=color, linestyle=dash, linewidth=2, label=f"{name}, model")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    for word, x in (marks or {}).items():
        axes.axvline(x, color=FAINT, linewidth=1.2)
        axes.annotate(f"{word} ", (x, 0.97), xycoords=("data", "axes fraction"), ha="right", va="top", fontsize=9.5)
    axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, 0.9), fontsize=9)
    return figure


@styled
def points(values: Mapping[str, tuple[float, float]], title: str, xlabel: str, ylabel: str) -> Figure:
    """Draw a labeled point (x, y) for each name. Both axes are logarithmic, and x is in bytes."""
    figure, axes = plt.subplots(figsize=(8, 3.8))
    for (name, (x, y)), color, marker in zip(values.items(), cycle(COLORS), cycle("os^Dv")):
        axes.plot(x, y, marker, color=color, markersize=9, markeredgecolor="white")
        axes.annotate(name, (x, y), xytext=(9, 0), textcoords="offset points", va="center")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
    axes.margins(x=0.2, y=0.15)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    return figure


@styled
def dots_by_group(groups: Mapping[str, Mapping[str, Sequence[float]]], xlabel: str, title: str) -> Figure:
    """Draw one panel per group, with the same rows in all panels and a shared logarithmic axis.

    A labeled point marks the median of the values, and a line shows their range. Every value must be positive.
    """
    rows = max(map(len, groups.values()))
    size = (10, 1.2 + 0.5 * rows)
    figure, grid = plt.subplots(1, len(groups), figsize=size, squeeze=False, sharex=True, sharey=True)
    for axes, (group, values) in zip(grid[0], groups.items(), strict=True):
        for row, (several, color, marker) in enumerate(zip(values.values(), cycle(COLORS), cycle("os^Dv"))):
            middle = statistics.median(several)
            axes.plot([min(several), max(several)], [row, row], color=color, linewidth=5, alpha=0.4)
            axes.plot(middle, row, marker, color=color, markersize=8, markeredgecolor="white")
            label = f"{middle:,.0f}"
            axes.annotate(label, (middle, row), (0, 7), textcoords="offset points", ha="center", fontsize=9)
        axes.set_yticks(range(len(values)), list(values))
        axes.set(xlabel=xlabel, xscale="log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_title(group, fontsize=10)
    grid[0][0].set_ylim(rows - 0.6, -0.75)
    low, high = grid[0][0].get_xlim()
    grid[0][0].set_xlim(low / 1.6, high * 1.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@styled
def intervals(
    values: Mapping[str, tuple[float, float, float]],
    title: str,
    xlabel: str,
    note: Callable[[float], str] = "{:.2f}".format,
    mark: float | None = None,
    band: str = "90 % band",
) -> Figure:
    """Draw a band (low, high) and a point (middle) for each name.

    Args:
        values: The values (low, middle, high) for each name.
        title: The title of the figure.
        xlabel: The label of the x-axis.
        note: A function that formats a value.
        mark: An x value at which to draw a vertical line.
        band: The legend label of the bands.
    """
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.48 * len(values)))
    dot: dict[str, Any] = {"marker": "o", "color": BLUE, "markersize": 9, "markeredgewidth": 1.8}
    for row, (low, middle, high) in enumerate(values.values()):
        axes.plot([low, high], [row, row], color=SKY, linewidth=9, solid_capstyle="butt")
        axes.plot(middle, row, **dot)
        axes.annotate(note(middle), (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9.5)
    if mark is not None:
        axes.axvline(mark, color=FAINT, linestyle=(0, (5, 2)), linewidth=1.4)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set(title=title, xlabel=xlabel)
    median = Line2D([], [], **dot, linestyle="none", label="median")
    keys = [median, Line2D([], [], color=SKY, linewidth=9, label=band)]
    figure.legend(handles=keys, ncols=len(keys), loc="outside lower center")
    return figure


@styled
def stacked(
    parts: Mapping[str, Mapping[str, float]], title: str, xlabel: str, notes: Mapping[str, str] | None = None
) -> Figure:
    """Draw stacked bars of named parts. Each bar is labeled with its total, or with its entry in `notes`."""
    names = list(dict.fromkeys(name for each in parts.values() for name in each))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.42 * len(parts)))
    for row, (whole, each) in enumerate(parts.items()):
        left = 0.0
        for name, color, hatch in zip(names, cycle(COLORS), cycle(HATCHES)):
            value = each.get(name, 0.0)
            axes.barh(row, value, left=left, color=color, hatch=hatch, edgecolor="white", height=0.7)
            left += value
        axes.annotate(f"  {notes[whole] if notes else f'{left:,.0f}'}", (left, row), va="center")
    for name, color, hatch in zip(names, cycle(COLORS), cycle(HATCHES)):
        axes.barh(0, 0, color=color, hatch=hatch, edgecolor="white", label=name)
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.2 if notes else 0.1)
    axes.set(title=title, xlabel=xlabel)
    figure.legend(ncols=len(names), loc="outside lower center")
    return figure


@styled
def repeats_and_medians(
    series: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    from_zero: bool = False,
) -> Figure:
    """Draw the value of each repeat as a point above the name of its group, and each median as a dash.

    Within a group, the series are drawn side by side, with one median per series. The points of a series are in the
    order of the repeats. With `from_zero`, the y-axis starts at 0, so that ratios of heights equal ratios of values.
    """
    figure, axes = plt.subplots(figsize=(8.5, 3.8))
    places = list(dict.fromkeys(name for groups in series.values() for name in groups))
    room = 0.8 / len(series)
    for number, ((label, groups), color, marker) in enumerate(zip(series.items(), cycle(COLORS), cycle("os^Dv"))):
        for name, values in groups.items():
            center = places.index(name) + (number - (len(series) - 1) / 2) * room
            xs = [center + 0.5 * room * ((i + 0.5) / len(values) - 0.5) for i in range(len(values))]
            axes.plot(xs, values, marker, color=color, markersize=6, markeredgecolor="white", zorder=3)
            ends = [center - 0.35 * room, center + 0.35 * room]
            axes.plot(ends, [statistics.median(values)] * 2, color=INK, linewidth=2)
        axes.plot([], [], marker, color=color, label=label)
    axes.plot([], [], color=INK, linewidth=2, label="median")
    axes.set_xticks(range(len(places)), places)
    axes.set_xlim(-0.5, len(places) - 0.5)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    figure.legend(ncols=min(6, len(series) + 1), loc="outside lower center")
    return figure
