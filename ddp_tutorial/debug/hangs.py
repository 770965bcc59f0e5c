"""Detect ranks whose collectives do not match, report where each rank waits and why, and terminate the ranks.

    def main(world):
        with watching(world, seconds=10):
            train(world)

    CollectiveError: the order of collectives differs. Rank 0 waits in all_reduce [3] (File "train.py", line 5, in
    step); rank 1 waits in broadcast [3] (File "train.py", line 7, in step).

A thread on each rank polls PyTorch's flight recorder. If a rank waits in one collective for `seconds`, or if PyTorch
raises an error, the rank requests an inspection through the shared store. Every rank then publishes its collectives,
the lines that called them, and its current line. All ranks reach the same diagnosis. This procedure uses no
collectives, so it works even while a rank's main thread is blocked in a collective.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
from pydantic import TypeAdapter

from ddp_tutorial.compat import default_store, group_ranks
from ddp_tutorial.config import FailedError
from ddp_tutorial.debug.recorder import Call, Line, calls, current_lines, ignore_former_groups, progress
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.processes.rank import exit_with
from ddp_tutorial.world import World, require_group

LOG = logging.getLogger(__name__)

# Seconds between a rank's checks for a long wait and for an inspection request.
POLL_SECONDS = 0.25
# A rank is busy if its CPU usage, measured for BUSY_SECONDS, is above BUSY_SHARE. On an oversubscribed machine, a rank
# is also busy if its main thread waited for a core for more than STARVED_SHARE of that time.
BUSY_SECONDS, BUSY_SHARE, STARVED_SHARE = 0.3, 0.1, 0.5
ANSWER_SECONDS = 1.5  # timeout for a rank to publish its status, in addition to BUSY_SECONDS
# One rank reports the error. After this time, the other ranks exit if they are still running.
REPORT_SECONDS = 5.0
# Collectives that require tensors of the same sizes on all ranks.
_SAME_SIZES = {"all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "allreduce_coalesced"}
_ROWS_BEFORE = 2

_watches = itertools.count()

Kind = Literal["order", "shape", "absent", "slow", "failed", "none"]
Reason = Literal["wait", "error", "question"]  # why an inspection was requested


class CollectiveError(FailedError):
    """Raised when ranks wait for each other forever, or pass incompatible tensors to one collective.

    The message contains each rank's collective and the line at which the rank waits.
    """


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank.

    Attributes:
        calls: The most recent collectives that the rank entered.
        lines: The current line of the rank's main thread, in the format of `Call.lines`.
        is_busy: Whether the rank uses the CPU, or waits for a core.
        members: Dict from process group name to the group's ranks, for each process group that includes this rank.
        left: "finished" if the rank left the block normally, "failed" if it raised an error, "idle" if it is waiting
            for work, otherwise "".
    """

    calls: tuple[Call, ...]
    lines: tuple[Line, ...] = ()
    is_busy: bool = False
    members: dict[str, list[int]] = field(default_factory=dict)
    left: Literal["", "finished", "failed", "idle"] = ""

    def call(self, group: str, number: int) -> Call | None:
        """Return the collective with sequence number `number` in `group`, or None if the rank has not entered it."""
        return next((call for call in self.calls if (call.group, call.number) == (group, number)), None)


as_json = TypeAdapter(RankStatus)  # the format in the store


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of the collectives that the ranks have entered.

    The values of `kind` are:

    - "order": The ranks have entered different collectives.
    - "shape": The ranks have passed tensors of different sizes or types to the same collective.
    - "absent": Some ranks have not entered the collective, and are not computing.
    - "slow": Some ranks have not entered the collective, but are still computing, so this is not a hang.
    - "failed": Some ranks have not entered the collective, because a rank has raised an error.
    - "none": No difference was found.

    Attributes:
        kind: The kind of problem.
        verdict: A description of the problem in one sentence.
        table: A table of collectives by rank. A marker points to the first row in which the ranks differ.
        collective: The group and the sequence number of the first collective in which the ranks differ.
    """

    kind: Kind
    verdict: str = "all ranks have entered the same collectives"
    table: str = ""
    collective: tuple[str, int] | None = None

    def explains(self, reason: Reason) -> bool:
        """Return whether the diagnosis explains the `reason` for the inspection.

        If PyTorch raises an error on one rank, the other ranks wait for that rank, but their waits do not explain the
        error.
        """
        return self.kind in ({"order", "shape"} if reason == "error" else {"order", "shape", "absent"})

    def __str__(self) -> str:
        """Return the description of the problem and the table."""
        return f"{self.verdict}\n\n{self.table}" if self.table else self.verdict


@contextmanager
def watching(world: World, seconds: float = 30.0) -> Iterator["Watch"]:
    """Monitor the collectives of all ranks inside the context.

    All ranks must enter the context the same number of times. Monitoring itself uses no collectives. An inspection
    starts if a rank waits in one collective for `seconds`, or if PyTorch raises an error on a rank.

    If the collectives do not match, one rank exits with `CollectiveError`, and `launch` raises a `RankError`. Without
    `launch`, the error is printed to stderr and the exit code is 1. If the ranks wait for a rank that is still
    computing, a warning is logged. A rank that waits for a resource such as a disk also counts as hanging, so `seconds`
    must exceed the longest expected wait.

    Args:
        world: The participating ranks.
        seconds: The maximum time in seconds that a rank may wait in one collective.

    Yields:
        This rank's `Watch` object.

    Raises:
        ValueError: If `seconds` is not positive.
        CollectiveError: If PyTorch raises an error because the collectives do not match.
    """
    if not seconds > 0:
        raise ValueError(f"'seconds' must be a positive number, such as 30, got {seconds!r}")
    require_group(world)
    watch = Watch(world, seconds, next(_watches))
    if world.size == 1:
        yield watch
        return
    ignore_former_groups()
    watch.start()
    try:
        yield watch
    except RuntimeError as error:
        if not isinstance(error, FailedError):
            reason: Reason = "wait" if lost_connection(error) else "error"  # this rank waited for a rank that exited
            found = watch.inspect(reason)
            if found.explains(reason):
                watch.close("finished")
                raise CollectiveError(str(found)) from error
        watch.close("failed")
        raise
    except BaseException:
        watch.close("failed")
        raise
    else:
        watch.close("finished")


class Watch(threading.Thread):
    """The monitoring thread of one rank.

    The thread has its own connection to the store, because the main thread may block the default connection.
    """

    def __init__(self, world: World, seconds: float, number: int) -> None:
        """Store the arguments. `number` is this block's sequence number, which must be the same on all ranks."""
        super().__init__(name="watching", daemon=True)
        self.world, self.seconds = world, seconds
        self._number = number
        self._left = threading.Event()
        self._inspection = 0  # the number of the next inspection
        self._seen: dict[str, tuple[int, int]] = {}
        self._since = time.monotonic()
        self._found: dict[int, Diagnosis] = {}  # inspection -> its diagnosis
        self._settled: dict[str, tuple[int, int]] | None = None  # progress at the last wait that was not a hang

    def run(self) -> None:
        """Poll for long waits and inspection requests until this rank leaves the block."""
        with suppress(RuntimeError, ValueError):  # the store, the group or the other ranks no longer exist
            calls()  # the first call in a process imports torch's compiler, which may take longer than ANSWER_SECONDS
            while not self._left.wait(min(POLL_SECONDS, self.seconds / 4)):
                if self._store.check([f"inspection {self._inspection}"]):
                    self._answer()
                elif self._waits_too_long():
                    self._request_inspection("wait")

    def inspect(self, reason: Reason = "question") -> Diagnosis:
        """Return a diagnosis of the current state of all ranks.

        Any rank may call this method from its main thread, regardless of the state of the other ranks.
        """
        if self.world.size == 1:
            return Diagnosis("none")
        number = self._inspection
        with suppress(RuntimeError):
            self._request_inspection(reason)
        deadline = time.monotonic() + POLL_SECONDS + BUSY_SECONDS + 2 * ANSWER_SECONDS
        while number not in self._found and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._found.get(
            number, Diagnosis("none", "no diagnosis: this rank's monitoring thread has not responded")
        )

    def close(self, how: Literal["finished", "failed"]) -> None:
        """Stop the thread and publish this rank's last state, which the other ranks may still need for a diagnosis."""
        self._left.set()
        with suppress(RuntimeError, ValueError):  # the store or the group no longer exists
            last = RankStatus(tuple(calls()), members=group_ranks(), left=how)
            self._store.set(f"left {self.world.rank}", as_json.dump_json(last).decode())

    @cached_property
    def _store(self) -> dist.Store:
        store: Any = default_store()  # PyTorch's stubs lack `clone`
        return dist.PrefixStore(f"watching {self._number}", store.clone())

    def _request_inspection(self, reason: Reason) -> None:
        self._store.set(f"inspection {self._inspection}", reason)

    def _waits_too_long(self) -> bool:
        seen, now = progress(), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        is_waiting = any(entered > left for entered, left in seen.values())
        return is_waiting and seen != self._settled and now - self._since >= self.seconds

    def _answer(self) -> None:
        """Publish the state of this rank, wait for the other ranks, and act on the diagnosis."""
        number, settled = self._inspection, progress()
        reason = cast("Reason", self._store.get(f"inspection {number}").decode())
        self._store.set(f"{number} {self.world.rank}", as_json.dump_json(_own_status()).decode())
        statuses = {rank: self._published_status(number, rank) for rank in range(self.world.size)}
        before = self._found.get(number - 1)
        found = self._found[number] = diagnose(statuses)
        was_slow = before is not None and before.kind == "slow" and before.collective == found.collective
        may_be_slow = was_slow and found.kind == "absent"  # the rank was computing, so wait for the next inspection
        if found.kind == "slow" or may_be_slow:
            self._since = time.monotonic()  # the rank may still hang later
        elif reason != "question":
            self._settled = settled
        self._inspection = number + 1
        reporter = min((rank for rank, each in statuses.items() if each and not each.left), default=0)
        if self._left.is_set() or reason == "question":
            return
        if found.explains(reason) and not may_be_slow:
            # The main thread of a rank with an error reports more details.
            if (reason == "error" or self.world.rank != reporter) and self._left.wait(REPORT_SECONDS):
                return
            exit_with(CollectiveError(str(found)))
        if found.kind == "slow" and not was_slow and self.world.rank == reporter:
            LOG.warning("%s", found.verdict)

    def _published_status(self, number: int, rank: int) -> RankStatus | None:
        """Return the state that a rank has published for this inspection or on exit. Return None after a timeout."""
        deadline = time.monotonic() + BUSY_SECONDS + ANSWER_SECONDS
        while time.monotonic() < deadline:
            for key in (f"{number} {rank}", f"left {rank}"):
                if self._store.check([key]):
                    return as_json.validate_json(self._store.get(key))
            time.sleep(0.02)
        return None


def _own_status() -> RankStatus:
    is_busy = uses_cpu()
    return RankStatus(tuple(calls()), current_lines(), is_busy, group_ranks())


def uses_cpu() -> bool:
    """Return whether this process uses the CPU or waits for a core, measured over the next `BUSY_SECONDS`."""
    used, waited = time.process_time(), _seconds_without_core()
    time.sleep(BUSY_SECONDS)
    if time.process_time() - used > BUSY_SHARE * BUSY_SECONDS:
        return True
    return _seconds_without_core() - waited > STARVED_SHARE * BUSY_SECONDS


def _seconds_without_core() -> float:
    """Return how long this process's main thread was ready to run, but had no core. Without Linux, return 0."""
    try:
        _, waited, _ = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text().split()
    except (OSError, ValueError):  # the kernel does not measure this time
        return 0.0
    return int(waited) / 1e9


# --------------------------------------------------------------------------------------------------- the verdict


def diagnose(statuses: Mapping[int, RankStatus | None]) -> Diagnosis:
    """Diagnose the first collective in which the ranks differ.

    Args:
        statuses: Dict from rank to status, which is None if the rank does not respond.
    """
    known = [each for each in statuses.values() if each is not None]
    for group in dict.fromkeys(call.group for each in known for call in each.calls):
        ranks = next((each.members[group] for each in known if group in each.members), list(statuses))
        for number in _numbers(known, group):
            row = {rank: each.call(group, number) if (each := statuses[rank]) else None for rank in ranks}
            if verdict := _differ(row, statuses):
                table = _table({rank: statuses[rank] for rank in ranks}, group, number)
                return Diagnosis(*verdict, table, (group, number))
    return Diagnosis("none")


def _numbers(statuses: Sequence[RankStatus], group: str) -> range:
    """Return the sequence numbers to compare, without those of old collectives that some ranks no longer record."""
    of_ranks = [[call.number for call in each.calls if call.group == group] for each in statuses]
    kept = [numbers for numbers in of_ranks if numbers]
    return range(max(numbers[0] for numbers in kept), max(numbers[-1] for numbers in kept) + 1)


def _differ(row: Mapping[int, Call | None], statuses: Mapping[int, RankStatus | None]) -> tuple[Kind, str] | None:
    """Return the kind and the description of a mismatch in one row of collectives, or None."""
    there = {rank: call for rank, call in row.items() if call is not None}
    if len({call.op for call in there.values()}) > 1:
        return "order", f"the order of collectives differs. {_sentence(_waits(there))}"
    op = next(iter(there.values())).op if there else ""
    if op.partition(" ")[0] in _SAME_SIZES and len({(call.sizes, call.dtypes) for call in there.values()}) > 1:
        return "shape", f"the ranks pass different tensors to the same {op}. {_sentence(_waits(there))}"
    missing = [rank for rank in row if rank not in there]
    late = [each for rank in missing if (each := statuses[rank]) is not None]
    # If a rank has left, its connections may be closed, and the collective may have failed on the other ranks.
    has_left = any(each.left for each in late)
    if not missing or (all(call.done for call in there.values()) and not has_left):
        return None
    story = _sentence([*_waits(there, has_left), *(_absent(rank, statuses[rank]) for rank in missing)])
    if any(each.left == "failed" for each in late):
        return "failed", f"a rank has failed. {story}"
    if len(late) == len(missing) and all(each.is_busy for each in late):
        return "slow", f"no hang, but a slow rank. {story}"
    return "absent", f"not all ranks have entered the collective. {story}"


def _waits(calls: Mapping[int, Call], lost: bool = False) -> list[str]:
    """Describe where the ranks wait, grouped by location.

    If a connection was lost (`lost`), a collective that is marked as completed may have failed.
    """
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
        return "has finished" if len(ranks) == 1 else "have finished"
    return "waits in" if len(ranks) == 1 else "wait in"


def _absent(rank: int, status: RankStatus | None) -> str:
    if status is None:
        return f"rank {rank} does not respond: it has exited, is stopped, or is busy in native code"
    if status.left:
        last = status.calls[-1] if status.calls else None
        how = {"failed": "has raised an error", "finished": "has left", "idle": "is idle"}[status.left]
        return f"rank {rank} {how}" + (f"; its last collective was {last.what}{_at(last.lines)}" if last else "")
    where = ", called from ".join(map(str, status.lines)) or "an unknown line"
    return f"rank {rank} has not entered it: it is {'computing ' if status.is_busy else ''}at {where}"


def _at(lines: Sequence[Line]) -> str:
    return f" ({', called from '.join(map(str, lines))})" if lines else ""


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _table(statuses: Mapping[int, RankStatus | None], group: str, number: int) -> str:
    """Return a table of the collectives up to the first difference, with a column for each rank."""
    header = ["", "collective", *(f"rank {rank}" for rank in statuses)]
    rows = [header]
    for row in range(max(1, number - _ROWS_BEFORE), number + 1):
        cells = [_cell(each.call(group, row) if each else None, row == number) for each in statuses.values()]
        rows.append([">" if row == number else "", str(row), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(call: Call | None, is_marked: bool) -> str:
    """Format one collective of one rank.

    Only the last row shows whether the rank is waiting, because PyTorch may record a collective's completion late or
    not at all.
    """
    if call is None:
        return "-"
    where = f", line {call.lines[0].number} in {call.lines[0].function}" if call.lines else ""
    return f"{call.what}{where}{', waiting' if is_marked and not call.done else ''}"
