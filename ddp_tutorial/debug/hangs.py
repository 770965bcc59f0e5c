"""Ranks whose collectives do not fit together: notice it, say who waits where and why, and end them.

    def main(world):
        with watching(world, seconds=10):
            train(world)

    CollectiveError: the order of collectives differs. Rank 0 waits in all_reduce [3] (File "train.py", line 5, in
    step); rank 1 waits in broadcast [3] (File "train.py", line 7, in step).

A thread of each rank looks at torch's flight recorder now and then. Where its rank has waited in one collective for
`seconds`, or torch has raised an error, it sets an alarm in the store that all ranks share; then each says which
collectives it has entered, from which lines, and where it stands, and all come to the same verdict. No collective is
needed for that, and no rank has to come back from the one that it waits in.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch.distributed as dist
from pydantic import TypeAdapter

from ddp_tutorial.compat import default_store, group_ranks
from ddp_tutorial.config import FailedError
from ddp_tutorial.debug.recorder import Call, Line, calls, progress, standing_lines
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.processes.rank import exit_with
from ddp_tutorial.world import World, require_group

LOG = logging.getLogger(__name__)

# A rank looks this often whether it waits, or whether there is an alarm.
LOOK_SECONDS = 0.25
# How long it is watched whether a rank computes, and how long ranks have to answer.
BUSY_SECONDS, BUSY_SHARE = 0.3, 0.1
ANSWER_SECONDS = 1.5
# The other ranks leave the word to one of them; should it fail to end the run, they end too, after this long.
SPEAK_SECONDS = 5.0
# Collectives in which all ranks bring tensors of the same sizes.
_SAME_SIZES = {"all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "allreduce_coalesced"}
_ROWS_BEFORE = 2

_watches = itertools.count()

Kind = Literal["order", "shape", "absent", "slow", "failed", "none"]
Reason = Literal["wait", "error", "question"]  # of an alarm


class CollectiveError(FailedError):
    """Ranks wait for one another for ever, or bring to one collective what does not fit. The message says which rank
    waits in which collective, at which line."""


@dataclass(frozen=True)
class RankStatus:
    """Where one rank stands: the collectives it has entered, the line it is at, and whether it computes."""

    calls: tuple[Call, ...]
    lines: tuple[Line, ...] = ()
    is_busy: bool = False
    members: dict[str, list[int]] = field(default_factory=dict)  # group -> its ranks, of the groups it is in
    left: Literal["", "well", "failed", "idle"] = ""  # how it has left, if it has; idle: it may return

    def call(self, group: str, number: int) -> Call | None:
        """The collective of this number, if it has entered that."""
        return next((call for call in self.calls if (call.group, call.number) == (group, number)), None)


as_json = TypeAdapter(RankStatus)  # as ranks tell it one another


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong: in one sentence, and as a table of collectives by rank, the first row in which they differ marked.

    `kind` is "order" (the ranks have entered different collectives), "shape" (the same one with tensors of different
    sizes or types), "absent" (some have not come, and do not compute), "slow" (they compute: no hang), "failed" (they
    have raised an error of their own, which says more), "none".
    """

    kind: Kind
    verdict: str = "all ranks have entered the same collectives"
    table: str = ""
    collective: tuple[str, int] | None = None  # the first in which they differ: its group, and its number there

    def explains(self, reason: Reason) -> bool:
        """Is it the cause of an alarm? An error of torch on one rank is not that others wait for this rank."""
        return self.kind in ({"order", "shape"} if reason == "error" else {"order", "shape", "absent"})

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{self.table}" if self.table else self.verdict


@contextmanager
def watching(world: World, seconds: float = 30.0) -> Iterator["Watch"]:
    """Inside, all ranks are looked at where one waits in a collective for `seconds`, or gets an error from torch. All
    ranks enter it, each about as often as the others; nothing in it is a collective.

    Where the ranks' collectives do not fit together, one rank ends with `CollectiveError`, which `launch` raises as a
    `RankError`; elsewhere it goes to stderr, and the exit code is 1. Where they wait for a rank that computes, that is
    a warning. A rank that waits for something else than a rank, such as a disk, counts as waiting for ever: let
    `seconds` be longer than that takes. Raises `ValueError` for a time that is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: should be a positive number of seconds, such as 30")
    require_group(world)
    watch = Watch(world, seconds, next(_watches))
    if world.size == 1:
        yield watch
        return
    watch.start()
    try:
        yield watch
    except RuntimeError as error:
        if not isinstance(error, FailedError):
            reason: Reason = "wait" if lost_connection(error) else "error"  # it has waited, and then the other has left
            found = watch.inspect(reason)
            if found.explains(reason):
                watch.close("well")
                raise CollectiveError(str(found)) from error
        watch.close("failed")
        raise
    except BaseException:
        watch.close("failed")
        raise
    else:
        watch.close("well")


class Watch(threading.Thread):
    """The thread of one rank, with a connection to the store of its own: the main thread may be waiting in there."""

    def __init__(self, world: World, seconds: float, number: int) -> None:
        super().__init__(name="watching", daemon=True)
        self.world, self.seconds = world, seconds
        self._number = number
        self._left = threading.Event()
        self._alarm = 0  # the number of the next one
        self._seen: dict[str, tuple[int, int]] = {}
        self._since = time.monotonic()
        self._found: dict[int, Diagnosis] = {}  # by alarm
        self._settled: dict[str, tuple[int, int]] | None = None  # how far it was when an alarm came to nothing

    def run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it all the others
            calls()  # the first call in a process imports torch's compiler, which may take longer than ANSWER_SECONDS
            while not self._left.wait(min(LOOK_SECONDS, self.seconds / 4)):
                if self._store.check([f"alarm {self._alarm}"]):
                    self._answer()
                elif self._waits_too_long():
                    self._raise_alarm("wait")

    def inspect(self, reason: Reason = "question") -> Diagnosis:
        """What all ranks are doing at this moment. Any rank may ask, from its main thread, whatever the others do."""
        if self.world.size == 1:
            return Diagnosis("none")
        alarm = self._alarm
        with suppress(RuntimeError):
            self._raise_alarm(reason)
        deadline = time.monotonic() + LOOK_SECONDS + BUSY_SECONDS + 2 * ANSWER_SECONDS
        while alarm not in self._found and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._found.get(alarm, Diagnosis("none"))

    def close(self, how: Literal["well", "failed"]) -> None:
        """The block is over for this rank. Others may still wait for it: leave word of where it was last."""
        self._left.set()
        with suppress(RuntimeError, ValueError):  # the store, or the group, is gone
            last = RankStatus(tuple(calls()), members=group_ranks(), left=how)
            self._store.set(f"left {self.world.rank}", as_json.dump_json(last).decode())

    @cached_property
    def _store(self) -> dist.Store:
        store: Any = default_store()  # torch's stubs do not know clone
        return dist.PrefixStore(f"watching {self._number}", store.clone())

    def _raise_alarm(self, reason: Reason) -> None:
        self._store.set(f"alarm {self._alarm}", reason)

    def _waits_too_long(self) -> bool:
        seen, now = progress(), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        is_waiting = any(entered > ended for entered, ended in seen.values())
        return is_waiting and seen != self._settled and now - self._since >= self.seconds

    def _answer(self) -> None:
        """Say where this rank stands, hear the others, and do what follows from it."""
        alarm, settled = self._alarm, progress()
        reason = cast("Reason", self._store.get(f"alarm {alarm}").decode())
        self._store.set(f"{alarm} {self.world.rank}", as_json.dump_json(_standing()).decode())
        standings = {rank: self._heard(alarm, rank) for rank in range(self.world.size)}
        before = self._found.get(alarm - 1)
        found = self._found[alarm] = diagnose(standings)
        was_slow = before is not None and before.kind == "slow" and before.collective == found.collective
        may_be_slow = was_slow and found.kind == "absent"  # it has computed until now: look once more
        if found.kind == "slow" or may_be_slow:
            self._since = time.monotonic()  # it may hang yet
        else:
            self._settled = settled
        self._alarm = alarm + 1
        speaker = min((rank for rank, each in standings.items() if each and not each.left), default=0)
        if self._left.is_set() or reason == "question":
            return
        if found.explains(reason) and not may_be_slow:
            if reason == "error" or self.world.rank != speaker:
                time.sleep(SPEAK_SECONDS)  # the main thread of the rank with the error says it better
            exit_with(CollectiveError(str(found)))
        if found.kind == "slow" and not was_slow and self.world.rank == speaker:
            LOG.warning("%s", found.verdict)

    def _heard(self, alarm: int, rank: int) -> RankStatus | None:
        """What another rank says, or said when it left; None where it says nothing."""
        deadline = time.monotonic() + BUSY_SECONDS + ANSWER_SECONDS
        while time.monotonic() < deadline:
            for key in (f"{alarm} {rank}", f"left {rank}"):
                if self._store.check([key]):
                    return as_json.validate_json(self._store.get(key))
            time.sleep(0.02)
        return None


def _standing() -> RankStatus:
    is_busy = uses_cpu()
    return RankStatus(tuple(calls()), standing_lines(), is_busy, group_ranks())


def uses_cpu() -> bool:
    """Return whether this process uses the CPU, measured for `BUSY_SECONDS`."""
    before = time.process_time()
    time.sleep(BUSY_SECONDS)
    return time.process_time() - before > BUSY_SHARE * BUSY_SECONDS


# --------------------------------------------------------------------------------------------------- the verdict


def diagnose(statuses: Mapping[int, RankStatus | None]) -> Diagnosis:
    """Find the first collective in which the ranks differ. None stands for a rank that does not answer."""
    known = [each for each in statuses.values() if each is not None]
    for group in dict.fromkeys(call.group for each in known for call in each.calls):
        ranks = next((each.members[group] for each in known if group in each.members), list(statuses))
        for number in _numbers(known, group):
            row = {rank: each.call(group, number) if (each := statuses[rank]) else None for rank in ranks}
            if verdict := _differ(row, statuses):
                table = _table({rank: statuses[rank] for rank in ranks}, group, number)
                return Diagnosis(*verdict, table, (group, number))
    return Diagnosis("none")


def _numbers(standings: Sequence[RankStatus], group: str) -> range:
    """Those of the collectives of `group` that can be compared: each rank keeps its last ones only."""
    of_ranks = [[call.number for call in each.calls if call.group == group] for each in standings]
    kept = [numbers for numbers in of_ranks if numbers]
    return range(max(numbers[0] for numbers in kept), max(numbers[-1] for numbers in kept) + 1)


def _differ(row: Mapping[int, Call | None], standings: Mapping[int, RankStatus | None]) -> tuple[Kind, str] | None:
    """What is wrong in one row of collectives: the kind, and the sentence."""
    there = {rank: call for rank, call in row.items() if call is not None}
    if len({call.op for call in there.values()}) > 1:
        return "order", f"the order of collectives differs. {_sentence(_waits(there))}"
    op = next(iter(there.values())).op if there else ""
    if op.partition(" ")[0] in _SAME_SIZES and len({(call.sizes, call.dtypes) for call in there.values()}) > 1:
        return "shape", f"the ranks bring different tensors to one {op}. {_sentence(_waits(there))}"
    missing = [rank for rank in row if rank not in there]
    late = [each for rank in missing if (each := standings[rank]) is not None]
    # Where a rank has left, its connections may be gone, and the collective is over, with an error.
    has_left = any(each.left for each in late)
    if not missing or (all(call.done for call in there.values()) and not has_left):
        return None
    story = _sentence([*_waits(there, has_left), *(_absent(rank, standings[rank]) for rank in missing)])
    if any(each.left == "failed" for each in late):
        return "failed", f"a rank has failed. {story}"
    if len(late) == len(missing) and all(each.is_busy for each in late):
        return "slow", f"no hang, but a slow rank. {story}"
    return "absent", f"not all ranks have come. {story}"


def _waits(calls: Mapping[int, Call], lost: bool = False) -> list[str]:
    """Who waits where; ranks that wait at the same place together. `lost`: a connection was, so that a collective that
    is over may have failed."""
    places: dict[tuple[str, tuple[Line, ...], bool], list[int]] = {}
    for rank, call in calls.items():
        places.setdefault((f"{call.what} {_types(call)}".strip(), call.lines, call.done), []).append(rank)
    return [
        f"{_named(ranks)} {_verb(ranks, done, lost)} {what}{_at(lines)}"
        for (what, lines, done), ranks in places.items()
    ]


def _types(call: Call) -> str:
    return "/".join(dict.fromkeys(call.dtypes)).lower()


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _verb(ranks: Sequence[int], done: bool, lost: bool) -> str:
    if done and lost:
        return "was in" if len(ranks) == 1 else "were in"
    if done:
        return "has come through" if len(ranks) == 1 else "have come through"
    return "waits in" if len(ranks) == 1 else "wait in"


def _absent(rank: int, standing: RankStatus | None) -> str:
    if standing is None:
        return f"rank {rank} does not answer: it has ended, was stopped, or is busy in native code"
    if standing.left:
        last = standing.calls[-1] if standing.calls else None
        how = {"failed": "has raised an error", "well": "has left", "idle": "runs no cell"}[standing.left]
        return f"rank {rank} {how}" + (f"; its last collective was {last.what}{_at(last.lines)}" if last else "")
    where = ", called from ".join(map(str, standing.lines)) or "no line of Python"
    return f"rank {rank} has not come: it {'computes' if standing.is_busy else 'is'} at {where}"


def _at(lines: Sequence[Line]) -> str:
    return f" ({', called from '.join(map(str, lines))})" if lines else ""


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _table(standings: Mapping[int, RankStatus | None], group: str, number: int) -> str:
    """The collectives around the one in which the ranks differ, a column for each rank."""
    header = ["", "collective", *(f"rank {rank}" for rank in standings)]
    rows = [header]
    for row in range(max(1, number - _ROWS_BEFORE), number + 1):
        cells = [_cell(each.call(group, row) if each else None, row == number) for each in standings.values()]
        rows.append([">" if row == number else "", str(row), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(call: Call | None, is_marked: bool) -> str:
    """Whether a rank waits is told in the marked row only: torch may mark a collective as done late, or never."""
    if call is None:
        return "-"
    where = f", line {call.lines[0].number} in {call.lines[0].function}" if call.lines else ""
    return f"{call.what}{where}{', waiting' if is_marked and not call.done else ''}"
