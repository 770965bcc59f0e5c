"""All figures, in one style that is legible in grey and for the colour-blind: a series has a colour of the Okabe-Ito
palette, and a dash, marker or hatch of its own."""

import io
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any, ParamSpec

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import EngFormatter

from ddp_tutorial.runs.folder import Run, smooth

if TYPE_CHECKING:  # these import torch, which drawing does not need
    from ddp_tutorial.collectives import Message
    from ddp_tutorial.figures.timeline import Span, Timeline

Args = ParamSpec("Args")

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]
HATCHES = ["", "///", "...", "\\\\\\", "xx", "++"]
INK, FAINT = "#222222", "#888888"

# The colour and the hatch of each part of a step, in `gantt`.
_GANTT = {
    "data": (PURPLE, "xx"),
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "finish": ("#dddddd", "////"),
    "update": (GREEN, "..."),
}

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
    """Make `draw` use the project's style, without changing the style of other figures."""

    @wraps(draw)
    def wrapped(*args: Args.args, **kwargs: Args.kwargs) -> Figure:
        with plt.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return wrapped


def as_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file. Closes it, which frees its memory."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


@styled
def loss_curves(runs: Mapping[str, Run], title: str = "Loss") -> Figure:
    """The training loss of each run, as a moving average, and its held-out loss as points. Later curves are thinner and
    dashed, so that equal ones are all seen."""
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
    axes.plot([], [], "o", color=FAINT, label="held-out data")
    axes.set(title=title, xlabel="optimiser step", ylabel="loss")
    axes.legend()
    return figure


@styled
def bars(
    values: Mapping[str, float | Sequence[float]],
    xlabel: str,
    title: str,
    note: Callable[[float], str] = "{:,.0f}".format,
) -> Figure:
    """A horizontal bar for each value, with `note(value)` at its end; for several values, their median and range."""
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


# Name -> (xs, ys).
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


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
    """A line through the points (xs, ys) of each series, with its name at its right end instead of in a legend. Where a
    scale is "log", every value should be positive."""
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for (xs, ys), color, dash in zip(series.values(), cycle(COLORS), cycle(DASHES)):
        axes.plot(xs, ys, color=color, linestyle=dash, linewidth=2.2)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
    axes.margins(x=0)
    if ylim is not None:
        axes.set_ylim(ylim)
    _label_ends(axes, {name: (xs[-1], ys[-1]) for name, (xs, ys) in series.items()})
    return figure


def _label_ends(axes: Axes, ends: Mapping[str, tuple[float, float]], gap: float = 0.07) -> None:
    """Write each name to the right of the axes, as near to the height of its point as possible, but with `gap` (a part
    of the axes' height) between two names."""
    axes.autoscale_view()
    place = axes.transData + axes.transAxes.inverted()  # data -> the unit square of the axes
    colors = dict(zip(ends, cycle(COLORS)))
    points = {name: place.transform(end) for name, end in ends.items()}
    names = sorted(points, key=lambda name: float(points[name][1]))  # from the lowest to the highest
    heights = [float(points[name][1]) for name in names]
    for _ in range(200):  # neighbours that are too close push each other apart
        for low, high in pairwise(range(len(names))):
            lacking = max(0.0, gap - (heights[high] - heights[low])) / 2
            heights[low], heights[high] = heights[low] - lacking, heights[high] + lacking
        heights[-1] = min(heights[-1], 0.96)  # above it is the title, which may be as long
    for name, height in zip(names, heights, strict=True):
        x, y = points[name]
        axes.plot([x, 1.03], [y, height], color=colors[name], linewidth=1.2, transform=axes.transAxes, clip_on=False)
        axes.text(1.035, height, name, color=INK, transform=axes.transAxes, va="center", fontsize=9.5)


@styled
def swimlane(
    spans: Sequence["Span"], title: str, xlabel: str = "seconds since the first process was started"
) -> Figure:
    """What each process did when: a lane for each, a bar for each of its spans. Time zero is the earliest start."""
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
    axes.set(xlabel=xlabel, title=title)
    axes.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.28 - 0.12 / len(lanes)))
    return figure


@styled
def gantt(timelines: Mapping[str, "Timeline"], rank: int = 0, title: str = "") -> Figure:
    """What one rank computed, and what its link carried meanwhile, for each of several runs on one time axis.

    The grey background is backward: communication in that time is hidden.
    """
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.95 * len(timelines)))
    _gantt(axes, timelines, rank)
    axes.set(title=title)
    figure.legend(ncols=len(_GANTT) + 1, loc="outside lower center")
    return figure


def _gantt(axes: Axes, timelines: Mapping[str, "Timeline"], rank: int) -> None:
    from ddp_tutorial.figures.timeline import COMPUTE

    for row, timeline in enumerate(timelines.values()):
        spans = _seen(timeline, rank)
        zero = min(span.start for span in spans)
        for span in spans:
            left, length = 1e3 * (span.start - zero), 1e3 * (span.end - span.start)
            color, hatch = _GANTT.get(span.name, (ORANGE, "")) if span.lane == COMPUTE else (ORANGE, "")
            y, height = (row - 0.19, 0.36) if span.lane == COMPUTE else (row + 0.19, 0.28)
            axes.barh(y, length, left=left, color=color, hatch=hatch, edgecolor="white", height=height, linewidth=0.5)
            if span.name == "backward":
                axes.barh(row, length, left=left, color="#eeeeee", height=0.86, zorder=0)
        overlap = timeline.overlap(rank)
        told = f"  {100 * overlap.fraction:.0f} % of what could be\n  hidden is hidden" if overlap.communication else ""
        axes.annotate(told, (_milliseconds(spans), row), va="center", fontsize=8.5)
    drawn = {span.name for timeline in timelines.values() for span in timeline.ranks[rank]}
    for name, (color, hatch) in _GANTT.items():
        if name in drawn:
            label = "finish (waiting)" if name == "finish" else name
            axes.barh(0, 0, color=color, hatch=hatch, edgecolor="white", label=label)
    axes.barh(0, 0, color=ORANGE, edgecolor="white", label="all-reduce on the link")
    axes.set_yticks(range(len(timelines)), list(timelines))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.16)
    axes.set(xlabel="milliseconds")
    axes.set_xlim(left=0)


def _seen(timeline: "Timeline", rank: int) -> list["Span"]:
    return [span for span in timeline.ranks[rank] if span.name != "grads"]  # which the others lie in


def _milliseconds(spans: Sequence["Span"]) -> float:
    return 1e3 * (max(span.end for span in spans) - min(span.start for span in spans))


@styled
def chunks(rounds: Sequence[Sequence[Sequence[Collection[int]]]], title: str) -> Figure:
    """Which ranks have contributed to which chunk, at the start and after each round of an all-reduce over a ring.

    `rounds[k][rank][chunk]` holds those ranks; their numbers are written in the chunk, or how many they are where there
    are more than 4 ranks. A chunk that has just been received has a thick frame, a complete one is dark. The second row
    is the all-gather.
    """
    size = len(rounds[0])
    named = size <= 4
    figure, grid = plt.subplots(2, size, figsize=(9, 0.7 + 18 / size), sharex=True, sharey=True)
    panels = [*grid[0], *grid[1][1 - size :]]
    for number, (axes, now) in enumerate(zip(panels, rounds, strict=True)):
        for rank, row in enumerate(now):
            for chunk, shares in enumerate(row):
                shade = 0.08 + 0.22 * (len(shares) - 1) / max(1, size - 2) if len(shares) < size else 0.95
                came = number > 0 and set(shares) != set(rounds[number - 1][rank][chunk])
                place, square = (chunk - 0.44, rank - 0.44), 0.88
                axes.add_patch(Rectangle(place, square, square, facecolor=BLUE, alpha=shade))
                if came:
                    axes.add_patch(Rectangle(place, square, square, fill=False, edgecolor=INK, linewidth=2))
                look: dict[str, Any] = {"color": "white", "weight": "bold"} if len(shares) == size else {"color": INK}
                text = "".join(map(str, sorted(shares))) if named else str(len(shares))
                axes.text(chunk, rank, text, ha="center", va="center", fontsize=11 - 0.6 * size, **look)
        axes.set(xlim=(-0.55, size - 0.45), ylim=(size - 0.45, -0.55), aspect="equal")
        axes.set_title("start" if number == 0 else f"after round {number - 1}", fontsize=10)
        axes.grid(visible=False)
        axes.tick_params(length=0, labelleft=number in {0, size}, labelbottom=True)
        axes.set_xticks(range(size), [str(chunk) for chunk in range(size)])
        axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
        axes.spines[:].set_visible(False)
    grid[0][0].set_xlabel("chunk")
    key = grid[1][0]
    key.axis("off")
    digits = "digits: the ranks\nwhose shares are in" if named else "number: how many\nranks' shares are in"
    words = f"{digits}\nthe chunk\n\nframe: has just\ncome in\n\ndark: complete"
    key.text(0.0, 0.5, words, transform=key.transAxes, va="center", fontsize=9.5, color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@styled
def messages(sent: Mapping[str, Sequence["Message"]], size: int, title: str) -> Figure:
    """Which rank sent to which in each round: an arrow for each message, the thicker the more bytes. A panel for each
    algorithm; beside each rank stand the bytes that it sent in all."""
    figure, grid = plt.subplots(1, len(sent), figsize=(10, 0.9 + 0.62 * size), squeeze=False)
    most = max(message.nbytes for each in sent.values() for message in each)
    for axes, (name, each), color in zip(grid[0], sent.items(), cycle(COLORS), strict=False):
        rounds = 1 + max(message.round for message in each)
        for message in each:
            ends = (message.round + 0.12, message.sender), (message.round + 0.88, message.receiver)
            width = 0.7 + 3 * message.nbytes / most
            look: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 6 + 3 * width}
            axes.add_patch(FancyArrowPatch(*ends, color=color, linewidth=width, **look))
        sums = [sum(message.nbytes for message in each if message.sender == rank) for rank in range(size)]
        axes.set_yticks(range(size), [f"rank {rank}\n{nbytes:,} B" for rank, nbytes in enumerate(sums)])
        axes.set_xticks([0.5 + k for k in range(rounds)], [str(k) for k in range(rounds)])
        axes.set(xlim=(0, rounds), ylim=(size - 0.6, -0.4), xlabel="round", title=name)
        axes.grid(visible=False, axis="x")
        axes.tick_params(length=0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@styled
def measured_and_model(
    measured: Series,
    model: Series,
    title: str,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Measured points and the lines of a model, (xs, ys) under the same names: xs in bytes and ys in seconds, both on
    logarithmic scales. `marks` are values of x to mark, by the word to write there."""
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
def sweeps(
    measured: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]],
    model: Series,
    title: str,
    xlabel: str,
    ylabel: str,
) -> Figure:
    """How a time depends on x, in a panel for each name: the quickest of what was measured at each x, with a line up to
    the median, and the line (xs, ys) of a model. The lowest point of either is marked, and its x is in the title."""
    figure, grid = plt.subplots(1, len(measured), figsize=(10, 3.9), squeeze=False)
    for axes, (name, (xs, several)) in zip(grid[0], measured.items(), strict=True):
        best, lowest = _sweep(axes, xs, several, model[name])
        axes.set(xlabel=xlabel)
        axes.set_title(f"{name}\nbest: {best:g}, by the model: {lowest:.2g}", fontsize=10)
    grid[0][0].set_ylabel(ylabel)
    handles = [Line2D([], [], label=label, **look) for label, look in _OF_SWEEP.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


_OF_SWEEP: dict[str, dict[str, Any]] = {
    "measured: quickest, up to the median": {"color": BLUE, "marker": "o", "linestyle": "-"},
    "lowest measured": {"color": BLUE, "marker": "o", "markersize": 12, "fillstyle": "none", "linestyle": ""},
    "model": {"color": ORANGE, "linestyle": DASHES[1], "linewidth": 2},
    "lowest of the model": {"color": ORANGE, "marker": "v", "markeredgecolor": INK, "linestyle": ""},
}


def _sweep(
    axes: Axes,
    xs: Sequence[float],
    several: Sequence[Sequence[float]],
    model: tuple[Sequence[float], Sequence[float]],
) -> tuple[float, float]:
    """Draws one panel of `sweeps`; where the lowest point of what was measured is, and that of the model."""
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
    rank: int = 0,
) -> Figure:
    """One point of a sweep: above the timeline of the step at `x`, as in `gantt`; below how the milliseconds of a step
    depend on x, as in `sweeps`, with the point that is shown above marked. Both have `several` times, or the timeline
    of a step, for each x; the axis of the timeline has room for all of them."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), height_ratios=[1, 1.7])
    _gantt(above, {"": timelines[x]}, rank)
    lengths = {each: _milliseconds(_seen(timeline, rank)) for each, timeline in timelines.items()}
    above.set(title=title, xlim=(0, 1.25 * max(lengths.values())), yticks=[])
    _sweep(below, list(several), list(several.values()), model)
    below.axvline(x, color=RED, linewidth=6, alpha=0.25, zorder=0)
    below.plot(x, lengths[x], "D", color=RED, markersize=8, markeredgecolor="white", zorder=3)
    below.set(xlabel=xlabel, ylabel="milliseconds a step")
    handles, _ = above.get_legend_handles_labels()
    handles += [Line2D([], [], label=label, **look) for label, look in _OF_SWEEP.items()]
    handles.append(Line2D([], [], color=RED, marker="D", linestyle="", label="the step above"))
    figure.legend(handles=handles, ncols=4, loc="outside lower center", fontsize=9)
    return figure


@styled
def buckets(
    layouts: Mapping[str, Sequence[Sequence[tuple[str, int]]]], order: Sequence[str], title: str, xlabel: str
) -> Figure:
    """Which gradients share a bucket: a row for each layout, a frame for each bucket, a bar for the (name, bytes) of
    each gradient in it. `order` has the names in the order in which gradients arrive: the earlier, the darker."""
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.8 * len(layouts)))
    gap = 0.012 * max(sum(nbytes for bucket in layout for _, nbytes in bucket) for layout in layouts.values())
    for row, layout in enumerate(layouts.values()):
        left = 0.0
        for number, bucket in enumerate(layout):
            start = left
            for name, nbytes in bucket:
                shade = 0.9 - 0.85 * order.index(name) / max(1, len(order) - 1)
                axes.barh(row, nbytes, left=left, color=BLUE, alpha=shade, edgecolor="white", height=0.5)
                look: dict[str, Any] = {"color": "white" if shade > 0.5 else INK, "fontsize": 9}
                axes.text(left + nbytes / 2, row, name, ha="center", va="center", **look)
                left += nbytes
            frame = Rectangle((start, row - 0.25), left - start, 0.5, fill=False, edgecolor=INK, linewidth=1.8)
            axes.add_patch(frame)
            axes.text(start, row - 0.29, f"bucket {number}", fontsize=8.5, color=INK)
            left += gap
    axes.set_yticks(range(len(layouts)), list(layouts))
    axes.set_xticks([])
    axes.set_ylim(len(layouts) - 0.6, -0.6)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(title=title, xlabel=xlabel)
    return figure


@styled
def points(values: Mapping[str, tuple[float, float]], title: str, xlabel: str, ylabel: str) -> Figure:
    """A point (x, y) for each name, with the name beside it, on logarithmic scales; x is in bytes."""
    figure, axes = plt.subplots(figsize=(8, 3.8))
    for (name, (x, y)), color, marker in zip(values.items(), cycle(COLORS), cycle("os^Dv")):
        axes.plot(x, y, marker, color=color, markersize=9, markeredgecolor="white")
        axes.annotate(name, (x, y), xytext=(9, 0), textcoords="offset points", va="center")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
    axes.margins(x=0.2, y=0.15)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    return figure


@styled
def processes(parent: str, ranks: Sequence[str], between: str, title: str) -> Figure:
    """The processes of a launch: the parent on top, the ranks that it started below, and what they exchange."""
    figure, axes = plt.subplots(figsize=(8, 3.6))
    places = [(0.5 + i) / len(ranks) for i in range(len(ranks))]
    _box(axes, (0.5, 0.85), parent, BLUE)
    for rank, x in zip(ranks, places, strict=True):
        _box(axes, (x, 0.22), rank, GREEN)
        _arrow(axes, (0.5, 0.72), (x, 0.42), "-|>", FAINT)
    for left, right in pairwise(places):
        _arrow(axes, (left + 0.13, 0.22), (right - 0.13, 0.22), "<|-|>", RED)
        axes.text((left + right) / 2, 0.27, between, ha="center", va="bottom", fontsize=10, color=RED)
    axes.set(xlim=(0, 1), ylim=(0, 1), title=title)
    axes.axis("off")
    return figure


def _box(axes: Axes, center: tuple[float, float], text: str, color: str) -> None:
    look: dict[str, Any] = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": color, "linewidth": 2}
    axes.text(*center, text, ha="center", va="center", fontsize=10.5, color=INK, bbox=look, linespacing=1.4)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style: str, color: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, color=color, mutation_scale=14, linewidth=1.6))


@styled
def who_saw_what(seen: Mapping[str, Sequence[Sequence[Sequence[int]]]], title: str) -> Figure:
    """Which rank saw which sample in which epoch, a panel for each name.

    `seen[name][epoch][sample]` lists the ranks, once for each time that they saw it. A cell has their colours and
    numbers; it is white if nobody saw the sample, and has a thick frame if it was seen several times.
    """
    heights = [len(epochs) for epochs in seen.values()]
    width = max(len(epochs[0]) for epochs in seen.values())
    size = (min(11.0, 1.5 + 0.36 * width), 0.9 + sum(0.6 + 0.24 * height for height in heights))
    figure, grid = plt.subplots(len(seen), 1, figsize=size, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (name, epochs) in zip(grid[:, 0], seen.items(), strict=True):
        for epoch, samples in enumerate(epochs):
            for sample, ranks in enumerate(samples):
                _cell(axes, sample, epoch, ranks)
        axes.set(xlim=(-0.6, width - 0.4), ylim=(len(epochs) - 0.4, -0.6), ylabel="epoch")
        axes.set_title(name, fontsize=10)
        axes.set_yticks(range(len(epochs)))
        axes.set_xticks(range(width))
        axes.tick_params(length=0, labelsize=8)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    grid[-1, 0].set_xlabel("sample")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _cell(axes: Axes, x: float, y: float, ranks: Sequence[int]) -> None:
    """A square, cut into a strip for each of `ranks`."""
    side, several = 0.9, len(ranks) > 1
    for number, rank in enumerate(ranks):
        strip, left = side / len(ranks), x - side / 2 + number * side / len(ranks)
        axes.add_patch(Rectangle((left, y - side / 2), strip, side, facecolor=COLORS[rank % len(COLORS)]))
        look: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 6.5 if several else 7.5}
        axes.text(left + strip / 2, y, str(rank), **look)
    frame: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.2} if several else {"edgecolor": "#cccccc"}
    axes.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, fill=False, **frame))


@styled
def dots_by_group(
    groups: Mapping[str, Mapping[str, Sequence[float]]],
    xlabel: str,
    title: str,
    note: Callable[[float], str] = "{:,.0f}".format,
) -> Figure:
    """The same rows for several groups, a panel for each group, on one logarithmic axis for all: the median of the
    values as a point with `note(median)` above it, and their range. Every value should be positive."""
    rows = max(map(len, groups.values()))
    size = (10, 1.2 + 0.5 * rows)
    figure, grid = plt.subplots(1, len(groups), figsize=size, squeeze=False, sharex=True, sharey=True)
    for axes, (group, values) in zip(grid[0], groups.items(), strict=True):
        for row, (several, color, marker) in enumerate(zip(values.values(), cycle(COLORS), cycle("os^Dv"))):
            middle = statistics.median(several)
            axes.plot([min(several), max(several)], [row, row], color=color, linewidth=5, alpha=0.4)
            axes.plot(middle, row, marker, color=color, markersize=8, markeredgecolor="white")
            axes.annotate(note(middle), (middle, row), (0, 7), textcoords="offset points", ha="center", fontsize=9)
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
    hollow: Collection[str] = (),
    model: Mapping[str, float] | None = None,
    mark: float | None = None,
) -> Figure:
    """For each name a 90 % band and a point in it: (low, middle, high). Points of the names in `hollow` are hollow, for
    those with more ranks than cores. `model` has predictions, shown with their error. `mark` draws a vertical line."""
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.48 * len(values)))
    dot: dict[str, Any] = {"marker": "o", "color": BLUE, "markersize": 9, "markeredgewidth": 1.8}
    diamond: dict[str, Any] = {"marker": "D", "color": ORANGE, "markersize": 8, "markeredgecolor": INK}
    for row, (name, (low, middle, high)) in enumerate(values.items()):
        axes.plot([low, high], [row, row], color=SKY, linewidth=9, solid_capstyle="butt")
        axes.plot(middle, row, **dot, markerfacecolor="white" if name in hollow else BLUE)
        told = note(middle)
        if model and name in model:
            axes.plot(model[name], row, **diamond)
            told += f", model {note(model[name])} ({model[name] / middle - 1:+.0%})"
        axes.annotate(told, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9.5)
    if mark is not None:
        axes.axvline(mark, color=FAINT, linestyle=(0, (5, 2)), linewidth=1.4)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set(title=title, xlabel=xlabel)
    none: dict[str, Any] = {"xdata": [], "ydata": [], "linestyle": "none"}
    keys = [Line2D(**none, **dot, label="measured"), Line2D([], [], color=SKY, linewidth=9, label="90 % band")]
    if hollow:
        keys.insert(1, Line2D(**none, **dot, markerfacecolor="white", label="measured, more ranks than cores"))
    if model:
        keys.append(Line2D(**none, **diamond, label="model"))
    figure.legend(handles=keys, ncols=len(keys), loc="outside lower center")
    return figure


@styled
def stacked(
    parts: Mapping[str, Mapping[str, float]], title: str, xlabel: str, notes: Mapping[str, str] | None = None
) -> Figure:
    """A bar for each whole, made of its named parts. At its end stands the total, or its note from `notes`."""
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
    series: Mapping[str, Mapping[str, Sequence[float]]], title: str, xlabel: str, ylabel: str
) -> Figure:
    """The value of each repeat as a point, above the name of its group, and a dash at the median of the group.

    The points of a group are in the order of the repeats; in each group, the series are side by side.
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
    axes.grid(visible=False, axis="x")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    figure.legend(ncols=min(6, len(series) + 1), loc="outside lower center")
    return figure


@styled
def lives(
    whole: tuple[Sequence[float], Sequence[float]],
    parts: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]],
    title: str,
) -> Figure:
    """A run that was killed and started again: what each of its lives did, as (seconds, steps, losses) by its name. On
    the left the step against the time, on the right losses over those of the `whole` run, (steps, losses)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9))
    right.plot(*whole, color="#cccccc", linewidth=7, label="undisturbed")
    for (name, (seconds, steps, losses)), color, dash in zip(parts.items(), cycle(COLORS), cycle(DASHES)):
        left.plot(seconds, steps, color=color, linewidth=2.4)
        left.plot(seconds[-1], steps[-1], "x" if name != list(parts)[-1] else "o", color=color, markersize=9)
        right.plot(steps, losses, color=color, linestyle=dash, linewidth=2, label=name)
    left.set(title="x: a rank is killed", xlabel="seconds", ylabel="step")
    right.set(title="the losses of all lives", xlabel="step", ylabel="loss", yscale="log")
    right.legend(fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@styled
def optimum(
    measured: tuple[Sequence[float], Sequence[float]],
    model: tuple[Sequence[float], Sequence[float]],
    best: float,
    title: str,
    xlabel: str,
    ylabel: str,
) -> Figure:
    """Measured points over the line of a model, by (xs, ys), and where the model has its best x; x is logarithmic."""
    figure, axes = plt.subplots(figsize=(8, 3.8))
    axes.plot(*model, color=BLUE, linewidth=2, label="model")
    axes.plot(*measured, "o", color=ORANGE, markersize=9, markeredgecolor="white", label="measured")
    axes.axvline(best, color=GREEN, linestyle="--", linewidth=1.6, label="Young and Daly")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale="log", ylim=(0, 1))
    axes.legend()
    return figure
