"""Provoke hangs repeatedly. Check that each verdict names the line at which each rank waits, and that all ranks exit.

`tests/test_hangs.py` tests each hang of notebook 11 once. This benchmark repeats the hangs and takes several minutes.
Verdicts are checked against this module's source. In each function that causes a hang, `# rank 0 waits` and
`# rank 1 waits` mark the lines that a verdict must name.

In one run with ten repeats on two cores, all 80 verdicts were correct. The wording of the verdicts was the same in
every repeat, and no process was left running. All ranks exited within 1.2 s of the timeout, with a median of 1.1 s.
"""

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.debug.hangs import CollectiveError, watching
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

RANKS = 2
PATIENCE = 1.0  # seconds after which a waiting rank is reported
WITHIN = 2.0  # seconds after the timeout within which all ranks should exit on an idle machine
TIME_LIMIT = 60  # timeout of a launch in seconds

Began = Callable[[], None]  # called when the hang begins


def another_order(world: World, began: Began) -> None:
    """Call a different collective on each rank."""
    began()
    if world.is_main:
        dist.all_reduce(torch.ones(3))  # rank 0 waits
    else:
        dist.broadcast(torch.ones(3), 0)  # rank 1 waits


def another_shape(world: World, began: Began) -> None:
    """All-reduce tensors of different shapes."""
    began()
    losses = torch.ones(3 + world.rank)
    dist.all_reduce(losses)  # rank 0 waits, rank 1 waits
    dist.barrier()


def rank_zero_only(world: World, began: Began) -> None:
    """Call a collective on rank 0 only."""
    began()
    if world.is_main:
        dist.all_reduce(torch.ones(3))  # rank 0 waits
    dist.barrier()  # rank 1 waits


def uneven_inputs(world: World, began: Began) -> None:
    """Give rank 1 one more batch than rank 0.

    Rank 1 hangs in an all-reduce that `DistributedDataParallel` starts in the backward pass.
    """
    model = DistributedDataParallel(nn.Linear(4, 1))
    began()
    for _ in range(2 + world.rank):
        model(torch.ones(2, 4)).sum().backward()  # rank 1 waits
    dist.barrier()  # rank 0 waits


def another_number_of_steps(world: World, began: Began) -> None:
    """Take a different number of steps on each rank."""
    began()
    for _ in range(3 if world.is_main else 4):
        dist.all_reduce(torch.ones(3))  # rank 1 waits
    dist.broadcast(torch.ones(1), 0)  # rank 0 waits


def barrier_in_the_loader(world: World, began: Began) -> None:
    """Call a barrier while loading data, but only on rank 0."""
    began()
    for number in range(3):
        if number == 2 and world.is_main:
            dist.barrier()  # rank 0 waits
        dist.all_reduce(torch.ones(3))  # rank 1 waits


def early_stopping(world: World, began: Began) -> None:
    """Stop each rank early based on its own loss, so that the ranks stop at different steps."""
    began()
    loss = 1.0 + world.rank
    while loss > 0.5:
        dist.all_reduce(torch.ones(3))  # rank 1 waits
        loss *= 0.6
    dist.barrier()  # rank 0 waits


def an_error_that_is_passed_over(world: World, began: Began) -> None:
    """Ignore an error on one rank, which then skips a collective."""
    began()
    for number in range(3):
        try:
            if number == 1 and world.rank == 1:
                raise ValueError("a bad batch")
            dist.all_reduce(torch.ones(3))  # rank 0 waits
        except ValueError:
            continue
    dist.barrier()  # rank 1 waits


HANGS: dict[str, Callable[[World, Began], None]] = {
    each.__name__: each
    for each in (
        another_order,
        another_shape,
        rank_zero_only,
        uneven_inputs,
        another_number_of_steps,
        barrier_in_the_loader,
        early_stopping,
        an_error_that_is_passed_over,
    )
}


def measure_hangs(repeats: int, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Cause each hang in `HANGS` `repeats` times, and check the verdicts of `launch`.

    Args:
        repeats: The number of repeats.
        report: A function to call with a line of text after each repeat.

    Returns:
        The report. `of` counts the verdicts, and `right` counts the verdicts that name the correct line for each rank.
        `other_verdicts` counts the verdicts whose wording differs from the first repeat's wording. `seconds` contains
        the median and maximum time from the start of a hang until all ranks have exited, minus `patience`. `late`
        counts the hangs for which this time exceeds `within`, and `left` counts the processes still running.
    """
    right, late, left, others, seconds = 0, 0, 0, 0, list[float]()
    first: dict[str, str] = {}
    wrong: list[str] = []
    for repeat in range(1, repeats + 1):
        for name in HANGS:
            message, taken, remaining = _hang(name)
            seconds.append(taken)
            late += taken > WITHIN
            left += remaining
            others += first.setdefault(name, message) != message
            if is_right(name, message):
                right += 1
            else:
                wrong.append(f"{name}: {message}")
        report(f"repeat {repeat}: {right} of {len(seconds)} correct, at most {max(seconds):.2f} s late, {left} running")
    return {
        "bench": "hangs",
        "environment": describe_environment(),
        "hangs": len(HANGS),
        "repeats": repeats,
        "of": len(seconds),
        "right": right,
        "other_verdicts": others,
        "patience": PATIENCE,
        "within": WITHIN,
        "seconds": {"median": round(statistics.median(seconds), 2), "most": round(max(seconds), 2)},
        "late": late,
        "left": left,
        "wrong": wrong,
    }


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether all verdicts are correct and no process is left running, regardless of the times."""
    return bool(result["right"] == result["of"]) and not result["left"]


def describe(result: Mapping[str, Any]) -> str:
    """Return a report as text."""
    seconds = result["seconds"]
    return "\n".join(
        [
            f"{result['right']} of {result['of']} correct: {result['hangs']} hangs, {result['repeats']} repeats; "
            f"{result['other_verdicts']} verdicts differ from the first repeat",
            f"delay after the timeout of {result['patience']} s: {seconds['median']} s median, "
            f"{seconds['most']} s at most; {result['late']} later than {result['within']} s",
            f"processes still running: {result['left']}",
            *result["wrong"],
        ]
    )


def is_right(name: str, message: str) -> bool:
    """Return whether the verdict names the line at which each rank hangs."""
    sentence = message.partition("\n")[0]
    named: dict[int, int] = {}
    for part in re.split(r"; (?=rank)|\. (?=Rank)", sentence):
        match = re.search(r'(?i)ranks? ([\d, ]+) .*?File "[^"]*hangs\.py", line (\d+)', part)
        named |= {int(rank): int(match[2]) for rank in match[1].split(",")} if match else {}
    return named == hang_lines(name)


def hang_lines(name: str) -> dict[int, int]:
    """Return the line number in this file at which each rank hangs."""
    first = HANGS[name].__code__.co_firstlineno
    lines: dict[int, int] = {}
    for number, line in enumerate(Path(__file__).read_text().splitlines()[first:], first + 1):
        if line.startswith(("def ", "HANGS")):
            break
        lines |= {int(rank): number for rank in re.findall(r"rank (\d) waits", line)}
    return lines


def _hang(name: str) -> tuple[str, float, int]:
    """Provoke one hang.

    Returns:
        The verdict, the time in seconds from the hang's timeout until all ranks have exited, and the number of
        processes still running.
    """
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        notes, message = Path(folder), "no error"
        try:
            launch(_watched, RANKS, name, notes, device="cpu", threads=1, echo=False, timeout=TIME_LIMIT)
        except RankError as error:
            message = error.message if error.is_a(CollectiveError) else f"{type(error).__name__}: {error.message}"
        over = time.monotonic()
        began = [float(note.read_text()) for note in notes.glob("began.*")]
        left = sum(psutil.pid_exists(int(note.read_text())) for note in notes.glob("pid.*"))
    return message, over - max(began, default=over) - PATIENCE, left


def _watched(world: World, name: str, notes: Path) -> None:
    (notes / f"pid.{world.rank}").write_text(str(os.getpid()))

    def began() -> None:
        (notes / f"began.{world.rank}").write_text(str(time.monotonic()))

    with watching(world, PATIENCE):
        HANGS[name](world, began)
