"""Show the losses, the throughput and each rank's resources while a run is in progress.

This module imports matplotlib, but not torch. All data comes from the run's folder. Therefore, any process that can
read this folder can watch the run, for example a different notebook.
"""

import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from ddp_tutorial.figures.style import BLUE, COLORS, DASHES, FAINT, HATCHES, ORANGE, as_png, styled
from ddp_tutorial.runs.folder import PER_SECOND, smooth
from ddp_tutorial.runs.summaries import Row, Summary, finite_number, numbers_of_ranks, read_run, seconds_of_ranks


def watch(run: str | Path, *, seconds: float = float("inf"), every: float = 1.0) -> None:
    """Show a run in a notebook and refresh the picture while the run is in progress.

    `watch` returns when the run exits, or after `seconds` seconds. Interrupting the cell does not affect the run. The
    last picture remains in the notebook.

    Args:
        run: The run's folder.
        seconds: The timeout in seconds.
        every: The number of seconds between refreshes.

    Raises:
        ConfigError: If `run` is not a run folder.
    """
    from IPython.display import Image, display  # required only in notebooks

    handle, deadline = None, time.monotonic() + seconds
    while True:
        rows, summary = read_run(Path(run))
        picture = Image(as_png(_drawn(Path(run), rows, summary)), format="png")
        if handle is None:
            handle = display(picture, display_id=True)
        else:
            handle.update(picture)
        if summary.state != "running" or time.monotonic() >= deadline:
            return
        time.sleep(min(every, max(0.0, deadline - time.monotonic())))


@styled
def _drawn(run: Path, rows: Sequence[Row], summary: Summary) -> Figure:
    """Draw the current state of a run.

    The panels show the loss and throughput by step, and each rank's memory at each evaluation. A further panel shows
    the seconds spent in each phase between the last two evaluations.
    """
    figure, grid = plt.subplots(2, 2, figsize=(10, 5.2))
    _losses(grid[0][0], rows)
    _rate(grid[0][1], rows, summary)
    _memory(grid[1][0], rows)
    _phases(grid[1][1], rows)
    for axes in (*grid[0], grid[1][0]):
        axes.set_xlim(0, max(summary.steps, summary.step, 1))
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in grid.flat:
        if not axes.has_data():
            axes.annotate("no data yet", (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT)
    ranks = "1 rank" if summary.ranks == 1 else f"{summary.ranks} ranks"
    figure.suptitle(f"{run.name}: {summary.state}, step {summary.step} of {summary.steps}, {ranks}", x=0.01, ha="left")
    return figure


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    steps, values = _series(rows, "loss")
    if steps:
        axes.plot(steps, values, color=BLUE, linewidth=0.8, alpha=0.25)
        axes.plot(steps, smooth(values), color=BLUE, label="training, mean of 10")
    steps, values = _series(rows, "eval_loss")
    if steps:
        axes.plot(steps, values, color=ORANGE, marker="o", markersize=4, linewidth=0.8, label="validation")
    axes.set_title("loss")
    if axes.has_data():
        axes.legend()


def _rate(axes: Axes, rows: Sequence[Row], summary: Summary) -> None:
    steps, values = _series(rows, summary.unit + PER_SECOND)
    if steps:
        axes.plot(steps, values, color=BLUE)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(f"{summary.unit} per second, all ranks")


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw each rank's GPU memory by step, or its process's resident memory if no rank uses a GPU."""
    logged = [(row["step"], row["ranks"]) for row in rows if "ranks" in row]
    kind = "cuda_mb" if any("cuda_mb" in ranks for _, ranks in logged) else "rss_mb"
    points = [(step, used) for step, ranks in logged if (used := numbers_of_ranks(ranks, kind))]
    for rank in range(max((len(used) for _, used in points), default=0)):
        xs = [step for step, used in points if rank < len(used)]
        ys = [used[rank] for _, used in points if rank < len(used)]
        look: dict[str, Any] = {"color": COLORS[rank % len(COLORS)], "linestyle": DASHES[rank % len(DASHES)]}
        axes.plot(xs, ys, marker="o", markersize=4, label=f"rank {rank}" if rank < len(COLORS) else None, **look)
    axes.set_title("MB of memory" + (" on the GPU" if kind == "cuda_mb" else ""))
    if points:
        axes.set_ylim(0, 1.15 * max(max(used) for _, used in points))
        axes.legend(loc="lower right")


def _phases(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw one bar per rank. The phase "grads" is omitted, because the bars contain the parts of this phase."""
    latest = [row["ranks"] for row in rows if "ranks" in row][-1:]
    phases = {name: each for name, each in seconds_of_ranks(latest).items() if name != "grads" and ": " not in name}
    ranks = len(next(iter(phases.values()), ()))
    left = [0.0] * ranks
    for (name, each), color, hatch in zip(phases.items(), cycle(COLORS), cycle(HATCHES), strict=False):
        axes.barh(range(ranks), each, left=left, color=color, hatch=hatch, edgecolor="white", height=0.7, label=name)
        left = [start + value for start, value in zip(left, each, strict=True)]
    axes.set_title("seconds per rank between two evaluations")
    axes.grid(visible=False, axis="y")
    if ranks:
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
        axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric, excluding missing and non-finite values."""
    points = [(row["step"], value) for row in rows if (value := finite_number(row, name)) is not None]
    return [step for step, _ in points], [value for _, value in points]
