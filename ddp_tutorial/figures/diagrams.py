"""Draw diagrams of processes, messages, buckets and the assignment of samples to ranks."""

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from ddp_tutorial.figures.style import BLUE, COLORS, FAINT, GREEN, INK, RED, styled

if TYPE_CHECKING:  # imports torch, which drawing does not require
    from ddp_tutorial.lessons.all_reduce import Message

Tensors = Sequence[Sequence[int | None]]  # the numbers on each rank


@styled
def processes(parent: str, ranks: Sequence[str], between: str, title: str) -> Figure:
    """Draw the parent process of a launch, its ranks, and the data that the ranks exchange."""
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
def collectives(tensors: Mapping[str, tuple[Tensors, Tensors]], title: str) -> Figure:
    """Draw each rank's numbers before and after each collective, with one panel per collective.

    `tensors` contains all ranks' tensors before and after each collective. Chunk c on rank r contains the number
    10 r + c. A number's color identifies its source rank. Sums are black. An empty cell means that the rank has no
    valid data.
    """
    rows = (len(tensors) + 3) // 4
    figure, grid = plt.subplots(rows, 4, figsize=(11, 0.4 + 1.75 * rows), squeeze=False)
    for axes, (name, (before, after)) in zip(grid.flat, tensors.items(), strict=False):
        size = len(before)
        for left, ranks in ((0.0, before), (size + 1.4, after)):
            for rank, numbers in enumerate(ranks):
                for chunk, number in enumerate(numbers):
                    _chunk(axes, left + chunk, rank, number, size)
        _arrow(axes, (size - 0.35, (size - 1) / 2), (size + 0.75, (size - 1) / 2), "-|>", INK)
        axes.set(xlim=(-0.6, 2 * size + 1), ylim=(size - 0.4, -0.6), aspect="equal", title=name)
        axes.set_yticks(range(size), [str(rank) for rank in range(size)])
        axes.set_xticks([])
        axes.set_ylabel("rank")
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _chunk(axes: Axes, x: float, y: float, number: int | None, size: int) -> None:
    """Draw a square that contains a number, or an empty square if `number` is None."""
    place, side = (x - 0.45, y - 0.45), 0.9
    if number is None:
        axes.add_patch(Rectangle(place, side, side, fill=False, edgecolor="#cccccc", linewidth=0.8))
        return
    is_sum = number >= 10 * size
    look: dict[str, Any] = {"facecolor": INK} if is_sum else {"facecolor": COLORS[number // 10], "alpha": 0.4}
    axes.add_patch(Rectangle(place, side, side, **look))
    axes.text(x, y, f"{number:02d}", ha="center", va="center", fontsize=8.5, color="white" if is_sum else INK)


@styled
def chunks(rounds: Sequence[Sequence[Sequence[Collection[int]]]], title: str) -> Figure:
    """Draw the ranks that have contributed to each chunk, initially and after each round of a ring all-reduce.

    `rounds[k][rank][chunk]` contains the ranks that have contributed to the chunk after k rounds.

    A cell lists the contributing ranks, or shows their number if there are more than 4 ranks. A chunk that has just
    been received has a thick frame, and a complete chunk is dark. The second row of panels shows the all-gather.
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
    digits = "digits: ranks whose\ndata is in" if named else "number: ranks whose\ndata is in"
    words = f"{digits}\nthe chunk\n\nframe: just\nreceived\n\ndark: complete"
    key.text(0.0, 0.5, words, transform=key.transAxes, va="center", fontsize=9.5, color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@styled
def messages(sent: Mapping[str, Sequence["Message"]], size: int, title: str) -> Figure:
    """Draw each algorithm's messages as arrows from sender to receiver, in one panel per algorithm.

    A thicker arrow represents more bytes. Each rank's label contains the number of bytes that the rank sent.
    """
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
def buckets(
    layouts: Mapping[str, Sequence[Sequence[tuple[str, int]]]], order: Sequence[str], title: str, xlabel: str
) -> Figure:
    """Draw the gradients in each bucket.

    A row represents a layout, a frame represents a bucket, and a bar represents a gradient. A bucket contains a
    (name, bytes) pair for each gradient. `order` lists the names of the gradients in the order in which the gradients
    become ready. Earlier gradients are darker.
    """
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
def sample_assignment(seen: Mapping[str, Sequence[Sequence[Sequence[int]]]], title: str) -> Figure:
    """Draw the ranks that processed each sample in each epoch, with one panel per name.

    `seen[name][epoch][sample]` lists the ranks that processed the sample, including repeats.

    A cell shows the color and number of each rank that processed the sample. A white cell means that no rank processed
    the sample. A thick frame means that the sample was processed several times.
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
    """Draw a square, split into one strip per rank."""
    side, several = 0.9, len(ranks) > 1
    for number, rank in enumerate(ranks):
        strip, left = side / len(ranks), x - side / 2 + number * side / len(ranks)
        axes.add_patch(Rectangle((left, y - side / 2), strip, side, facecolor=COLORS[rank % len(COLORS)]))
        look: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 6.5 if several else 7.5}
        axes.text(left + strip / 2, y, str(rank), **look)
    frame: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.2} if several else {"edgecolor": "#cccccc"}
    axes.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, fill=False, **frame))
