"""Hangs on purpose, again and again: is each told with both ranks, their collectives and their lines, how soon are all
processes gone, and is any left?

`tests/test_hangs.py` has the hangs of the notebook once each; this is for the repeats, which take minutes. The source
of this module is what verdicts are compared with: of each hang, the lines with `# rank 0 waits` or `# rank 1 waits`
are those to be named.

Ten repeats in one run on two cores: 80 of 80 were told right, in the same words each time, none was left, and all ranks
were gone 1.1 s after the patience in the median, 1.2 s at most.
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
PATIENCE = 1.0  # seconds that a rank waits before it is asked why
WITHIN = 2.0  # seconds after that in which it should be over, on a quiet machine
TIME_LIMIT = 60  # seconds of a launch

Began = Callable[[], None]  # called where the hang begins


def another_order(world: World, began: Began) -> None:
    began()
    if world.is_main:
        dist.all_reduce(torch.ones(3))  # rank 0 waits
    else:
        dist.broadcast(torch.ones(3), 0)  # rank 1 waits


def another_shape(world: World, began: Began) -> None:
    began()
    losses = torch.ones(3 + world.rank)
    dist.all_reduce(losses)  # rank 0 waits, rank 1 waits
    dist.barrier()


def rank_zero_only(world: World, began: Began) -> None:
    began()
    if world.is_main:
        dist.all_reduce(torch.ones(3))  # rank 0 waits
    dist.barrier()  # rank 1 waits


def uneven_inputs(world: World, began: Began) -> None:
    """Rank 1 has a batch more than rank 0, and waits in an all-reduce that `DistributedDataParallel` starts in
    backward."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    began()
    for _ in range(2 + world.rank):
        model(torch.ones(2, 4)).sum().backward()  # rank 1 waits
    dist.barrier()  # rank 0 waits


def another_number_of_steps(world: World, began: Began) -> None:
    began()
    for _ in range(3 if world.is_main else 4):
        dist.all_reduce(torch.ones(3))  # rank 1 waits
    dist.broadcast(torch.ones(1), 0)  # rank 0 waits


def barrier_in_the_loader(world: World, began: Began) -> None:
    began()
    for number in range(3):
        if number == 2 and world.is_main:
            dist.barrier()  # rank 0 waits
        dist.all_reduce(torch.ones(3))  # rank 1 waits


def early_stopping(world: World, began: Began) -> None:
    """The ranks stop early by their own losses, at different steps."""
    began()
    loss = 1.0 + world.rank
    while loss > 0.5:
        dist.all_reduce(torch.ones(3))  # rank 1 waits
        loss *= 0.6
    dist.barrier()  # rank 0 waits


def an_error_that_is_passed_over(world: World, began: Began) -> None:
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
    """Each of `HANGS` so often; `tell` is called with a line after each repeat.

    `right` counts verdicts that name both ranks with their lines, out of `of`; `other_verdicts` those that were not
    word for word that of the first time. `seconds` are from the hang until all ranks were gone, less the `patience`:
    the median and the most. `late` counts those above `within`, `left` the processes that were left.
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
        report(f"repeat {repeat}: {right} of {len(seconds)} told right, at most {max(seconds):.2f} s late, {left} left")
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
    """Has everything held that must hold? How long it takes depends on what else the machine does."""
    return bool(result["right"] == result["of"]) and not result["left"]


def describe(result: Mapping[str, Any]) -> str:
    """A report as text to print."""
    seconds = result["seconds"]
    return "\n".join(
        [
            f"{result['right']} of {result['of']} told right: {result['hangs']} hangs, {result['repeats']} repeats; "
            f"{result['other_verdicts']} in other words than the first time",
            f"over {seconds['median']} s after the patience of {result['patience']} s in the median, "
            f"{seconds['most']} s at most; {result['late']} later than {result['within']} s",
            f"processes left: {result['left']}",
            *result["wrong"],
        ]
    )


def is_right(name: str, message: str) -> bool:
    """Does the verdict name for each rank the line at which it hangs?"""
    sentence = message.partition("\n")[0]
    told: dict[int, int] = {}
    for part in re.split(r"; (?=rank)|\. (?=Rank)", sentence):
        found = re.search(r'(?i)ranks? ([\d, ]+) .*?File "[^"]*hangs\.py", line (\d+)', part)
        told |= {int(rank): int(found[2]) for rank in found[1].split(",")} if found else {}
    return told == hang_lines(name)


def hang_lines(name: str) -> dict[int, int]:
    """By rank, the number of the line in this file at which it hangs."""
    first = HANGS[name].__code__.co_firstlineno
    found: dict[int, int] = {}
    for number, line in enumerate(Path(__file__).read_text().splitlines()[first:], first + 1):
        if line.startswith(("def ", "HANGS")):
            break
        found |= {int(rank): number for rank in re.findall(r"rank (\d) waits", line)}
    return found


def _hang(name: str) -> tuple[str, float, int]:
    """Run one hang: its verdict; seconds from the hang until all ranks were gone, less the patience; how many processes
    are left."""
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
