"""Read the collectives that this rank has entered, and the lines that called them, from PyTorch's flight recorder.

PyTorch keeps the last 2,000 collectives of a process (TORCH_FR_BUFFER_SIZE). The records include gloo's collectives,
and the collectives that DDP starts in C++. Each record contains the collective's sequence number in its group, the
tensor sizes and the Python stack.
"""

import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.compat import flight_record, used_groups
from ddp_tutorial.processes import rank as rank_module

_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parent.parent)  # this package
_RANK = rank_module.__file__  # frames of this file and outside of them only start the rank
_oldest = 0  # the flight recorder's ID of the first process group to include


@dataclass(frozen=True)
class Line:
    """A source line that called a collective, or that a thread is executing."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """Return the line in the format of a traceback."""
        return f'File "{self.file}", line {self.number}, in {self.function}'


@dataclass(frozen=True)
class Call:
    """A collective that one rank has entered. Matching collectives have the same number on all ranks.

    Attributes:
        group: The name of the process group.
        number: The sequence number of the collective in its group.
        op: The operation, such as "all_reduce" or "broadcast".
        sizes: The sizes of the inputs.
        dtypes: The types of the inputs.
        lines: The line of this package that called the collective, if any, followed by the line of the user's program.
        done: Whether the collective has completed.
    """

    group: str
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    lines: tuple[Line, ...]
    done: bool

    @property
    def what(self) -> str:
        """Description of the operation and sizes, for example "all_reduce [3]"."""
        return " ".join([self.op, *(str(list(size)) for size in self.sizes)])


def calls(last: int = 200) -> list[Call]:
    """Return the collectives among this rank's most recent `last` records, oldest first."""
    entries = flight_record().get("entries", [])
    return [_call(entry) for entry in entries[-last:] if not entry["is_p2p"] and entry["pg_id"] >= _oldest]


def progress() -> dict[str, tuple[int, int]]:
    """Return the sequence numbers of the last entered and the last completed collective of each group.

    A group's first NCCL collective connects the ranks, and PyTorch enqueues the collective only after all ranks have
    entered it. For a group without an enqueued collective, this function therefore also reads the recorder's entries,
    which takes up to 40 ms. PyTorch does not list a collective as active while the collective connects the ranks.
    """
    seen = {
        str(group): (each["last_enqueued_collective"], each["last_completed_collective"])
        for group, each in flight_record(entries=False).get("pg_status", {}).items()
        if int(group) >= _oldest
    }
    if dist.get_backend() == "nccl" and any(entered == -1 for entered, _ in seen.values()):
        for entry in flight_record(stacks=False).get("entries", []):
            group = str(entry["pg_id"])
            if group in seen and not entry["is_p2p"] and not entry["retired"]:
                seen[group] = max(seen[group][0], entry["collective_seq_id"]), seen[group][1]
    return seen


def group_names() -> dict[int, str]:
    """Return the names of the recorder's process groups by ID. An ID is valid only in this process."""
    entries = flight_record(stacks=False).get("entries", [])
    return {entry["pg_id"]: entry["process_group"][0] for entry in entries if not entry["is_p2p"]}


def ignore_former_groups() -> None:
    """Exclude former process groups from all later results. Requires a process group.

    PyTorch gives a new group the same name as a former group, but a higher ID.
    """
    global _oldest
    names = group_names()
    latest = {name: number for number, name in sorted(names.items())}
    current = {latest[name] for name in used_groups() if name in latest}
    _oldest = max(names.keys() - current, default=_oldest - 1) + 1


def current_lines(thread: int | None = None) -> tuple[Line, ...]:
    """Return the line that a thread (by default, the main thread) is executing, in the format of `Call.lines`."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    return lines_of(frame) if frame else ()


def lines_of(frame: FrameType) -> tuple[Line, ...]:
    """Return the relevant lines of a frame and its callers, in the format of `Call.lines`."""
    stack = traceback.walk_stack(frame)
    return _lines((each.f_code.co_filename, number, each.f_code.co_name) for each, number in stack)


def _call(entry: dict[str, Any]) -> Call:
    name, description = entry["process_group"]
    return Call(
        group=name or description or str(entry["pg_id"]),
        number=entry["collective_seq_id"],
        op=entry["profiling_name"].partition(":")[2],
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        dtypes=tuple(entry["input_dtypes"]),
        lines=_lines((each["filename"], each["line"], each["name"]) for each in entry.get("frames", [])),
        done=entry["retired"],
    )


def _lines(stack: Iterable[tuple[str, int, str]]) -> tuple[Line, ...]:
    """Select the relevant lines of a stack, which starts with the innermost frame.

    The first selected line is the innermost line outside of PyTorch and the standard library. If the first line is in
    this package, the second selected line is the innermost line outside of this package.
    """
    found: list[Line] = []
    for file, number, function in stack:
        if file == _RANK or (found and not found[0].file.startswith(_OURS)):
            break
        is_library = file.startswith((_TORCH, "<")) or (file.startswith(_STDLIB) and "site-packages" not in file)
        if not is_library and not (found and file.startswith(_OURS)):
            found.append(Line(file, number, function))
    return tuple(found)
