"""Which collectives has this rank entered, and from which line of the program? torch's flight recorder, read.

torch keeps the last 2,000 collectives of a process (TORCH_FR_BUFFER_SIZE), gloo's too, those that DDP starts in C++
included, each with its number in its group, its sizes and the Python stack it was called from.
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

from ddp_tutorial.compat import flight_record
from ddp_tutorial.processes import rank as rank_module

_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parent.parent)  # this package
_RANK = rank_module.__file__  # what is further out than this has only started the rank


@dataclass(frozen=True)
class Line:
    """A line of the program: where a rank called torch, or stands."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.number}, in {self.function}'


@dataclass(frozen=True)
class Call:
    """A collective, as one rank has entered it. Ranks that are in step give it the same number in its group."""

    group: str
    number: int
    op: str  # "all_reduce", "broadcast", ...
    sizes: tuple[tuple[int, ...], ...]  # of its inputs
    dtypes: tuple[str, ...]
    lines: tuple[Line, ...]  # where it was called: in this package first, if it was there, then in the user's program
    done: bool

    @property
    def what(self) -> str:
        """`all_reduce [3]`"""
        return " ".join([self.op, *(str(list(size)) for size in self.sizes)])


def calls(last: int = 200, since: int = 0) -> list[Call]:
    """The last collectives that this rank has entered, in that order; those of the groups number `since` and later, as
    the recorder numbers the groups of a process: one that was made anew has the name of the old one."""
    entries = flight_record().get("entries", [])
    return [_call(entry) for entry in entries[-last:] if not entry["is_p2p"] and entry["pg_id"] >= since]


def progress() -> dict[str, tuple[int, int]]:
    """Group -> the number of the last collective that this rank has entered there, and of the last that has ended."""
    status = flight_record(entries=False).get("pg_status", {})
    return {
        str(group): (each["last_enqueued_collective"], each["last_completed_collective"])
        for group, each in status.items()
    }


def standing_lines(thread: int | None = None) -> tuple[Line, ...]:
    """Where the main thread, or another one, is at this moment: as the lines of a `Call`."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    return lines_of(frame) if frame else ()


def lines_of(frame: FrameType) -> tuple[Line, ...]:
    """Where a frame and those that have called it are: as the lines of a `Call`."""
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
    """Of a stack, the innermost frame first: the first outside of torch and of Python's own library, and, where that is
    in this package, the first outside of it too."""
    found: list[Line] = []
    for file, number, function in stack:
        if file == _RANK or (found and not found[0].file.startswith(_OURS)):
            break
        is_library = file.startswith((_TORCH, "<")) or (file.startswith(_STDLIB) and "site-packages" not in file)
        if not is_library and not (found and file.startswith(_OURS)):
            found.append(Line(file, number, function))
    return tuple(found)
