"""Every figure in one style. Legible in grey and for the colour-blind: a series has a colour of the Okabe-Ito palette,
and also its own dash, marker or hatch."""

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

from ddp_tutorial.runs import Run, smooth

if TYPE_CHECKING:  # what draws the curves of a run starts without torch
    from ddp_tutorial.collectives import Message
    from ddp_tutorial.timeline import Span, Timeline

Args = ParamSpec("Args")

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]
HATCHES = ["", "///", "...", "\\\\\\", "xx", "++"]
INK, FAINT = "#222222", "#888888"

# How the parts of a step look.
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
    """Draw in the project's style, and leave everybody else's as it was."""

    @wraps(draw)
    def wrapped(*args: Args.args, **kwargs: Args.kwargs) -> Figure:
        with plt.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return wrapped


def as_png(figure: Figure) -> bytes:
    """The figure as a file would hold it; it is closed, and takes no more memory."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


@styled
def loss_curves(runs: Mapping[str, Run], title: str = "Loss") -> Figure:
    """Training loss of each run, a moving average, and its held-out loss as points. One curve hides another where they
    are equal: the later ones are drawn thinner and dashed, so that both are seen."""
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
    axes.plot([], [], "o", color=FAINT, label="held-out text")
    axes.set(title=title, xlabel="optimiser step", ylabel="nats per byte")
    axes.legend()
    return figure


@styled
def bars(
    values: Mapping[str, float | Sequence[float]],
    xlabel: str,
    title: str,
    note: Callable[[float], str] = "{:,.0f}".format,
) -> Figure:
    """A horizontal bar for each value, told in words at its end; of several values the median, with their range."""
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
    """A line through the points (xs, ys) of each series, with its name at its right end, where a legend would make
    one search. A scale may be "log": then every value should be positive."""
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
    """Each name to the right of the axes, level with its point where it can be, and `gap` of the height apart."""
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
    for name, height in zip(names, heights, strict=True):
        x, y = points[name]
        axes.plot([x, 1.03], [y, height], color=colors[name], linewidth=1.2, transform=axes.transAxes, clip_on=False)
        axes.text(1.035, height, name, color=INK, transform=axes.transAxes, va="center", fontsize=9.5)


@styled
def swimlane(
    spans: Sequence["Span"], title: str, xlabel: str = "seconds since the first process was started"
) -> Figure:
    """Who did what when: a lane for each process, a bar for each span. The first start is time zero."""
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

    Numbers on the link are buckets. The shaded stretch is backward: what is carried there is hidden.
    """
    from ddp_tutorial.timeline import COMPUTE

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.95 * len(timelines)))
    for row, timeline in enumerate(timelines.values()):
        spans = timeline.ranks[rank]
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
        last = 1e3 * (max(span.end for span in spans) - zero)
        axes.annotate(told, (last, row), va="center", fontsize=8.5)
    drawn = {span.name for timeline in timelines.values() for span in timeline.ranks[rank]}
    shown = {name: look for name, look in _GANTT.items() if name in drawn}
    for name, (color, hatch) in shown.items():
        label = "finish (waiting)" if name == "finish" else name
        axes.barh(0, 0, color=color, hatch=hatch, edgecolor="white", label=label)
    axes.barh(0, 0, color=ORANGE, edgecolor="white", label="all-reduce on the link")
    axes.set_yticks(range(len(timelines)), list(timelines))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.16)
    axes.set(xlabel="milliseconds", title=title)
    axes.set_xlim(left=0)
    figure.legend(ncols=len(shown) + 1, loc="outside lower center")
    return figure


@styled
def chunks(rounds: Sequence[Sequence[Sequence[Collection[int]]]], title: str) -> Figure:
    """Which ranks' shares are in which chunk, at the start and after each round of an all-reduce over a ring.

    `rounds[k][rank][chunk]` holds the ranks that have contributed. They are named, or counted where there are many. A
    chunk that has just come in has a thick frame, one that is complete is dark. The second row is the all-gather.
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
    """Who sent to whom in which round: an arrow for each message, thick where it has many bytes. Each algorithm has a
    panel, where each rank is told how many bytes it sent in all."""
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
    yscale: str = "log",
) -> Figure:
    """Points that were measured and lines that a model gives, (xs, ys) under the same names, in bytes (logarithmic) and
    seconds (`yscale` "log" or "linear"). `marks` are places on the x axis, with a word each."""
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for (name, (xs, ys)), color, marker in zip(measured.items(), cycle(COLORS), cycle("os^Dv")):
        axes.plot(xs, ys, marker, color=color, markersize=7, markeredgecolor="white", label=f"{name}, measured")
    for (name, (xs, ys)), color, dash in zip(model.items(), cycle(COLORS), cycle(DASHES)):
        axes.plot(xs, ys, color=color, linestyle=dash, linewidth=2, label=f"{name}, model")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale="log", yscale=yscale)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    for word, x in (marks or {}).items():
        axes.axvline(x, color=FAINT, linewidth=1.2)
        axes.annotate(f"{word} ", (x, 0.97), xycoords=("data", "axes fraction"), ha="right", va="top", fontsize=9.5)
    if yscale == "log":
        axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, 0.9), fontsize=9)
    else:
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2, loc="upper right", fontsize=9)
    return figure


@styled
def buckets(
    layouts: Mapping[str, Sequence[Sequence[tuple[str, int]]]], order: Sequence[str], title: str, xlabel: str
) -> Figure:
    """Which gradients travel together: a row for each layout, in it a frame for each bucket, in that (name, bytes) of
    each gradient. `order` is that in which the gradients arrive: the earlier, the darker."""
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
    """A point (x, y) for each name, which stands beside it, on logarithmic scales."""
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
    """Who saw which sample in which epoch, a panel for each name. `seen[name][epoch][sample]` are ranks, one for each
    time: a cell has the colour and the number of the rank, is white if there is none, and framed if there are several.
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
    """A square of as many strips as there are ranks."""
    side, several = 0.9, len(ranks) > 1
    for number, rank in enumerate(ranks):
        strip, left = side / len(ranks), x - side / 2 + number * side / len(ranks)
        axes.add_patch(Rectangle((left, y - side / 2), strip, side, facecolor=COLORS[rank % len(COLORS)]))
        look: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 6.5 if several else 7.5}
        axes.text(left + strip / 2, y, str(rank), **look)
    frame: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.2} if several else {"edgecolor": "#cccccc"}
    axes.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, fill=False, **frame))


@styled
def bars_by_group(
    groups: Mapping[str, Mapping[str, Sequence[float]]],
    xlabel: str,
    title: str,
    note: Callable[[float], str] = "{:,.0f}".format,
) -> Figure:
    """The same bars in several situations, a panel with a scale of its own for each: median and range of the values."""
    rows = max(map(len, groups.values()))
    figure, grid = plt.subplots(1, len(groups), figsize=(10, 1.2 + 0.45 * rows), squeeze=False, sharey=True)
    for axes, (group, values) in zip(grid[0], groups.items(), strict=True):
        for row, (several, color, hatch) in enumerate(zip(values.values(), cycle(COLORS), cycle(HATCHES))):
            middle = statistics.median(several)
            axes.barh(row, middle, color=color, hatch=hatch, edgecolor="white", height=0.7)
            axes.plot([min(several), max(several)], [row, row], color=INK, marker="|", linewidth=1.2)
            axes.annotate(f"  {note(middle)}", (max(several), row), va="center")
        axes.set_yticks(range(len(values)), list(values))
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.3)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=xlabel)
        axes.set_title(group, fontsize=10)
    grid[0][0].invert_yaxis()
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
    """A point for each value, in the 90 % band (low, middle, high) where it may lie. The names in `hollow` had more
    ranks than cores. `model` has what was predicted, with its error. `mark` is a vertical line to compare with."""
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
    """What a whole is made of: a bar for each whole, in it a piece for each named part. The total is at its end, or
    the note on it."""
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
    """Every value of every repeat as a point, above the name of its group, with a dash at their median. With several
    series, those of one stand side by side; the points of a group stand in the order of the repeats."""
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
