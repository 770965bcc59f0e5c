"""Every figure in one style. Legible in grey and for the colour-blind: a series has a colour of the Okabe-Ito palette,
and also its own dash, marker or hatch."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import cycle, pairwise
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from ddp_tutorial.runs import Run, smooth

Args = ParamSpec("Args")

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]
HATCHES = ["", "///", "...", "\\\\\\", "xx", "++"]
INK, FAINT = "#222222", "#888888"

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


@dataclass(frozen=True)
class Span:
    """Something that one lane did from `start` to `end`, in seconds."""

    lane: str
    name: str
    start: float
    end: float


@styled
def swimlane(spans: Sequence[Span], title: str, xlabel: str = "seconds since the first process was started") -> Figure:
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
