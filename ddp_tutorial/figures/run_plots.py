"""Draw run metrics for the command `logs plot`. This module imports matplotlib, but not torch."""

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.figures.style import COLORS, DASHES, FAINT, styled
from ddp_tutorial.files import write_atomically
from ddp_tutorial.runs.folder import smooth
from ddp_tutorial.runs.summaries import (
    Row,
    Summary,
    differing_settings,
    elapsed_seconds,
    finite_number,
    metric,
    metrics_of,
    read_run,
)

Axis = Literal["step", "time", "tokens"]

LOSSES = "loss curves"  # a panel with two metrics
_XLABELS = {"step": "optimizer step", "time": "seconds since the start of the run", "tokens": "tokens"}
_YLABELS = {
    "loss": "training loss",
    "eval_loss": "validation loss",
    "grad_norm": "gradient norm\nbefore clipping",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "loss_scale": "loss scale",
    LOSSES: "loss",
}
# These metrics are not noisy, so they are not smoothed.
_SET = {"learning_rate", "loss_scale"}


@styled
def draw_runs(folders: Sequence[Path], panels: Sequence[str], axis: Axis, window: int, compare: bool) -> Figure:
    """Draw a grid of plots with one row per panel, and one column per run or a single column for all runs.

    Args:
        folders: The run folders.
        panels: Metric names, or `LOSSES`.
        axis: The quantity on the x-axis.
        window: The number of values in the moving average.
        compare: Whether to draw all runs in a single column.

    Raises:
        ConfigError: If the logs are empty, a metric is missing from every run, or `axis` is "time" and a log contains
            no times.
    """
    read = [read_run(folder) for folder in folders]
    logs, summaries = [rows for rows, _ in read], [summary for _, summary in read]
    known = list(dict.fromkeys(name for rows in logs for name in metrics_of(rows)))
    if not known:
        raise ConfigError(f"no steps have been logged yet in {', '.join(map(str, folders))}")
    for panel in panels:
        _check(panel, known)
    places = [_places(rows, axis, summary) for rows, summary in zip(logs, summaries, strict=True)]
    columns = 1 if compare else len(folders)
    size = (8 if columns == 1 else 1.0 + 4.6 * columns, 1.2 + 2.2 * len(panels))
    figure, grid = plt.subplots(len(panels), columns, figsize=size, squeeze=False, sharex="col", sharey="row")
    for index, (rows, xs) in enumerate(zip(logs, places, strict=True)):
        look = _line_style(index) if compare else _line_style(0) | {"linewidth": 1.5}
        for row, panel in enumerate(panels):
            axes = grid[row][0 if compare else index]
            _draw(axes, panel, rows, xs, window, look)
            if not compare and not set(_metrics(panel)) & set(metrics_of(rows)):
                axes.annotate("not logged", (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT)
    for row, panel in enumerate(panels):
        grid[row][0].set_ylabel(_YLABELS.get(panel) or _in_words(panel))
        if panel.endswith("_per_second"):
            grid[row][0].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axes in grid[-1]:
        axes.set_xlabel(_XLABELS[axis])
        axes.margins(x=0.02)
        if axis == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if axis == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.align_ylabels(grid[:, 0])
    _title(figure, grid, summaries, compare, window)
    _legend(figure, summaries, compare, LOSSES in panels)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the suffix of `path` specifies, and close the figure.

    The output is deterministic: writing the same figure twice produces bitwise identical files.
    """
    drawn = io.BytesIO()
    undated: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=undated.get(path.suffix))
    plt.close(figure)
    write_atomically(path, drawn.getvalue())


def _check(panel: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` if none of the panel's metrics is in `known`."""
    wanted = _metrics(panel)
    if not set(wanted) & set(known):
        close = did_you_mean(wanted[0], known)
        there = "" if "Known" in close else f" Known: {', '.join(known)}."
        raise ConfigError(f"unknown metric {wanted[0]!r}.{close}{there}")


def _metrics(panel: str) -> list[str]:
    return ["loss", "eval_loss"] if panel == LOSSES else [panel]


def _places(rows: Sequence[Row], axis: Axis, summary: Summary) -> list[float]:
    """Return the x coordinate of each row."""
    if axis == "time":
        times = elapsed_seconds(rows)
        if rows and times[-1] == 0:
            raise ConfigError(f"{summary.path} contains no step times; use --x step")
        return times
    if axis == "step":
        return [row["step"] for row in rows]
    count, places = 0.0, []
    for row in rows:  # an evaluation's row contains no count, and belongs to the previous step
        count = finite_number(row, summary.unit) or count
        places.append(count)
    return places


def _line_style(index: int) -> dict[str, Any]:
    """Return the line style of a run.

    Later lines are thinner and dashed, so that identical curves remain visible.
    """
    width = (2.6, 1.7, 1.3)[index % 3]
    return {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": width}


def _draw(
    axes: Axes, panel: str, rows: Sequence[Row], places: Sequence[float], window: int, look: dict[str, Any]
) -> None:
    """Draw one run in one panel. Non-finite values leave a gap."""
    for name in _metrics(panel):
        points = [(x, metric(row, name)) for x, row in zip(places, rows, strict=True) if _is_in(row, name)]
        xs = [x for x, _ in points]
        ys = [math.nan if y is None else y for _, y in points]
        if name == "eval_loss":
            axes.plot(xs, ys, **_as_points(look))
            continue
        if window > 1 and name not in _SET:
            axes.plot(xs, ys, color=look["color"], linewidth=0.8, alpha=0.25)
            ys = _smoothed(ys, window)
        axes.plot(xs, ys, **look)


def _as_points(look: dict[str, Any]) -> dict[str, Any]:
    """Return the style of a curve with few values. The markers are larger for thicker line styles."""
    size = 3.5 + 2 * look["linewidth"]
    return look | {"linewidth": 0.8, "marker": "o", "markersize": size, "markeredgewidth": 0, "zorder": 3}


def _is_in(row: Row, name: str) -> bool:
    """Return whether the row contains the metric.

    A value of None also counts as present. None represents a non-finite value, which leaves a gap in the curve.
    """
    group, _, key = name.rpartition(".")
    inside = row.get(group) if group else row
    return isinstance(inside, dict) and key in inside


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return a moving average over the finite values. Non-finite values become NaN."""
    means = iter(smooth([value for value in values if math.isfinite(value)], window))
    return [next(means) if math.isfinite(value) else math.nan for value in values]


def _title(figure: Figure, grid: Any, summaries: Sequence[Summary], compare: bool, window: int) -> None:
    smoothed = f"; mean of the last {window} values" if window > 1 else ""
    if not compare:
        for axes, run in zip(grid[0], summaries, strict=True):
            heading = f"{run.path}: {run.state}, step {run.step:,} of {run.steps:,}{smoothed}"
            axes.set_title(textwrap.fill(heading, 95 if len(summaries) == 1 else 48), fontsize=10)
        return
    first = f"{len(summaries)} runs compared{smoothed}" if len(summaries) > 1 else f"{summaries[0].path}{smoothed}"
    second = textwrap.fill(_differences(summaries), 105) if len(summaries) > 1 else ""
    figure.suptitle(f"{first}\n{second}".strip(), x=0.01, ha="left", fontsize=10)


def _differences(summaries: Sequence[Summary]) -> str:
    """Return a sentence with the settings that differ between the runs, and their values in run order."""
    settings = [
        f"{name} ({', '.join(dict.fromkeys(map(_format_value, v)))})"
        for name, v in differing_settings(summaries).items()
    ]
    most = 6
    more = [f"and {len(settings) - most} more"] if len(settings) > most else []
    return f"Different settings: {', '.join(settings[:most] + more)}" if settings else "Identical settings"


def _format_value(value: object) -> str:
    return "none" if value is None else str(value)


def _legend(figure: Figure, summaries: Sequence[Summary], compare: bool, with_losses: bool) -> None:
    """Add a legend below all panels, with one entry per run.

    If at most two settings differ between the runs, each entry contains their values.
    """
    handles: list[Line2D] = []
    if compare:
        settings = differing_settings(summaries)
        for index, run in enumerate(summaries):
            own = ", ".join(f"{name} {_format_value(values[index])}" for name, values in settings.items())
            label = f"{run.path} ({own})" if 0 < len(settings) <= 2 else run.path
            handles.append(Line2D([], [], label=label, **_line_style(index)))
    if with_losses:
        handles.append(Line2D([], [], color=FAINT, label="training"))
        handles.append(Line2D([], [], label="validation", **_as_points({"color": FAINT, "linewidth": 1.5})))
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        figure.legend(handles=handles, loc="outside lower left", ncols=max(1, min(len(handles), 100 // (longest + 8))))


def _in_words(name: str) -> str:
    """Return a metric's name in words, such as `"seconds in data"` for `"seconds.data"`."""
    return name.replace(".", " in ", 1).replace("_", " ")
