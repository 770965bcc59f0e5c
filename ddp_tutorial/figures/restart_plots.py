"""Draw the restart levels, attempts, goodput and world sizes of jobs that fail and restart."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from ddp_tutorial.figures.style import BLUE, COLORS, DASHES, FAINT, GREEN, INK, ORANGE, PURPLE, RED, SKY, styled


@styled
def restart_levels(title: str) -> Figure:
    """Draw Slurm, two torchrun agents, four workers and the checkpoint, with the restarts at each level."""
    figure, axes = plt.subplots(figsize=(10, 4.6))
    boxes = [
        (
            0.0,
            5.6,
            10.0,
            0.9,
            "Slurm starts the agents and requeues the job after a node failure or near the time limit",
            PURPLE,
        ),
        (0.0, -0.5, 10.0, 0.9, "checkpoint on shared storage: the state that outlives all processes", GREEN),
    ]
    for machine, left in enumerate((0.0, 5.2)):
        store = " (hosts the store)" if machine == 0 else ""
        text = f"agent on machine {machine}{store}\nrestarts its workers when any worker fails"
        boxes.append((left, 3.5, 4.8, 1.2, text, BLUE))
        for local in range(2):
            boxes.append(
                (left + 2.5 * local, 1.4, 2.3, 1.2, f"worker {2 * machine + local}\nloads the checkpoint", ORANGE)
            )
            _arrow(axes, (left + 1.15 + 2.5 * local, 3.45), (left + 1.15 + 2.5 * local, 2.65))
            _arrow(axes, (left + 1.15 + 2.5 * local, 0.45), (left + 1.15 + 2.5 * local, 1.35))
        _arrow(axes, (left + 2.4, 5.55), (left + 2.4, 4.75))
    for left, bottom, width, height, text, color in boxes:
        axes.add_patch(Rectangle((left, bottom), width, height, facecolor=color, edgecolor=color, alpha=0.2))
        axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", color=INK)
    axes.set(xlim=(-0.1, 10.1), ylim=(-0.6, 6.6), title=title)
    axes.axis("off")
    return figure


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": FAINT})


@styled
def attempts(
    whole: tuple[Sequence[float], Sequence[float]],
    parts: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]],
    title: str,
) -> Figure:
    """Draw the progress over time and the loss curve of a run that was killed and restarted.

    `whole` contains the steps and losses of the uninterrupted run. `parts` maps the name of each attempt to its
    seconds, steps and losses.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9))
    right.plot(*whole, color="#cccccc", linewidth=7, label="uninterrupted")
    for (name, (seconds, steps, losses)), color, dash in zip(parts.items(), cycle(COLORS), cycle(DASHES)):
        left.plot(seconds, steps, color=color, linewidth=2.4)
        left.plot(seconds[-1], steps[-1], "x" if name != list(parts)[-1] else "o", color=color, markersize=9)
        right.plot(steps, losses, color=color, linestyle=dash, linewidth=2, label=name)
    left.set(title="Progress (x: a worker is killed; dot: the run ends)", xlabel="time (s)", ylabel="step")
    right.set(title="Loss curves of all attempts", xlabel="step", ylabel="loss", yscale="log")
    right.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("{x:g}")
    right.legend(fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.17))  # below the curves
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@styled
def goodput(
    labels: Sequence[str],
    spent: Sequence[Mapping[str, float]],
    models: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
) -> Figure:
    """Draw each run's time by activity as a stacked bar, and its predicted goodput as a marker.

    `spent` contains each run's seconds by activity. The first activity counts as goodput. `models` maps the name of
    each performance model to the predicted goodput of each run.
    """
    figure, axes = plt.subplots(figsize=(9, 4))
    bottom = [0.0] * len(labels)
    for activity, color, hatch in zip(spent[0], (GREEN, RED, ORANGE, SKY), ("", "///", "...", "xx"), strict=True):
        shares = [each[activity] / sum(each.values()) for each in spent]
        look: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "label": activity}
        axes.bar(range(len(labels)), shares, 0.6, bottom, **look)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for (name, values), marker, fill in zip(models.items(), "Do", (INK, "white"), strict=True):
        axes.plot(values, marker, color=fill, markeredgecolor=INK, markersize=8, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(title=title, xlabel=xlabel, ylabel="fraction of time", ylim=(0, 1))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


@styled
def world_sizes(attempts: Sequence[Sequence[Mapping[str, Any]]], title: str) -> Figure:
    """Draw each attempt's steps over time. An attempt is a list of dicts with the keys `time`, `step` and `size`."""
    figure, axes = plt.subplots(figsize=(9, 3.4))
    for rows in attempts:
        size = rows[0]["size"]
        seconds = [row["time"] for row in rows]
        label = f"world size {size}" if rows is next(each for each in attempts if each[0]["size"] == size) else None
        axes.plot(seconds, [row["step"] for row in rows], ".-", color=COLORS[size - 1], label=label)
    axes.set(title=title, xlabel="time (s)", ylabel="step", xlim=(0, None), ylim=(0, None))
    axes.legend(loc="upper left")
    return figure


@styled
def stale_address(title: str) -> Figure:
    """Draw two attempts that share a store. In the second attempt, a fast rank reads a stale address."""
    figure, axes = plt.subplots(figsize=(9, 3.2))
    lanes = {"rank 0": 2, "store": 1, "rank 1": 0}
    messages = [
        (1.0, "rank 0", "store", "writes A0", INK),
        (1.9, "rank 1", "store", "writes A1", INK),
        (6.0, "rank 0", "store", "writes B0", INK),
        (6.9, "store", "rank 0", "reads A1: a dead rank", RED),
        (8.2, "rank 1", "store", "writes B1, too late", INK),
    ]
    axes.plot([0.4, 10], [1, 1], color=INK, linewidth=3)
    for lane in (0, 2):
        for number, (first, last, color) in enumerate(((0.4, 4, ORANGE), (5.4, 10, BLUE)), start=1):
            axes.plot([first, last], [lane, lane], color=color, linewidth=3)
            axes.text(first, lane + 0.12, f"attempt {number}", color=color)
        axes.plot(4, lane, "X", color=RED, markersize=10)
    for moment, source, target, text, color in messages:
        axes.annotate(
            "", (moment, lanes[target]), (moment, lanes[source]), arrowprops={"arrowstyle": "-|>", "color": color}
        )
        axes.text(moment + 0.08, (lanes[source] + lanes[target]) / 2, text, va="center", fontsize=9, color=color)
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set(title=title, xlabel="time", xticks=[], xlim=(0, 10.4), ylim=(-0.3, 2.5))
    axes.grid(visible=False)
    return figure
