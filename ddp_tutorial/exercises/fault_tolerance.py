"""Exercises of 12_fault_tolerance: how often to save, the goodput of a run with restarts, and ownership of a folder."""

import fcntl
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_tutorial.exercises import Answer, Exercise, expect, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------- 1. how often to save

# Seconds per step, seconds per save, seconds between failures -> steps between saves.
_INTERVALS = {
    (0.5, 4.0, 7200.0): 480,  # sqrt(2 * 4 * 7200) = 240 s
    (2.0, 60.0, 3000.0): 300,  # 600 s
    (0.1, 0.02, 1.0): 2,
    (30.0, 1.0, 50.0): 1,  # 10 s are less than a step
}


def _test_interval(answer: Answer) -> str:
    for (step, save, between), steps in _INTERVALS.items():
        got = answer(step, save, between)
        case = f"Steps of {step:g} s, saves of {save:g} s, a failure every {between:g} s"
        expect(isinstance(got, int), f"{case}: the result must be an integer, got {got!r}.")
        expect(got >= 1, f"{case}: the interval must be at least 1 step, got {got}.")
        expect(got == steps, f"{case}: the interval must be {steps} steps, got {got}.")
    return "With this interval, saves and failures cost about the same time."


def _interval(step_seconds: float, save_seconds: float, between_failures: float) -> int:
    return max(1, round(math.sqrt(2 * save_seconds * between_failures) / step_seconds))


interval = Exercise(
    task=(
        "interval(step_seconds, save_seconds, between_failures): return the best number of steps between saves; all "
        "arguments are in seconds."
    ),
    test=_test_interval,
    solution=_interval,
    wrong={
        "forgets the factor of 2": lambda step, save, between: max(1, round(math.sqrt(save * between) / step)),
        "returns seconds": lambda step, save, between: round(math.sqrt(2 * save * between)),
        "saves every zero steps": lambda step, save, between: round(math.sqrt(2 * save * between) / step / 2) * 2,
        "does not round": lambda step, save, between: math.sqrt(2 * save * between) / step,
        "saves twice between two failures": lambda step, save, between: max(1, round(between / 2 / step)),
    },
    hints=(
        "The best time between saves is sqrt(2 * save_seconds * between_failures), in seconds.",
        "To get a number of steps, divide by the seconds per step, and round.",
        "If a step takes longer than that time, save after every step: max(1, ...).",
    ),
)

# ----------------------------------------------------------------------------------------------------------- 2. goodput

# Attempts as (first step, last step, seconds), the seconds per step, and the goodput.
_CHAINS: list[tuple[list[tuple[int, int, float]], float, float]] = [
    ([(0, 100, 50.0)], 0.5, 1.0),
    ([(0, 100, 60.0)], 0.5, 50 / 60),  # 10 s to start
    ([(0, 30, 20.0), (20, 60, 30.0), (60, 100, 50.0)], 0.5, 0.5),  # 10 steps lost
    ([(0, 9, 9.0), (0, 9, 9.0), (0, 10, 10.0)], 1.0, 10 / 28),
    ([(0, 40, 30.0), (40, 40, 10.0), (20, 40, 40.0)], 1.0, 0.5),  # attempt 2 did nothing; a damaged checkpoint
]


def _test_goodput(answer: Answer) -> str:
    for lives, step, right in _CHAINS:
        got = float(answer(lives, step))
        done = sum(last - first for first, last, _ in lives)
        case = f"Attempts {lives}, steps of {step:g} s"
        expect(
            done == lives[-1][1] or not math.isclose(got, done * step / sum(each[2] for each in lives)),
            f"{case}: {done} steps were run, but only {lives[-1][1]} of them count: the others were repeated.",
        )
        expect(math.isclose(got, right), f"{case}: the goodput must be {right:.3f}, got {got:.3f}.")
    return "The goodput counts every step of the final run once, and the seconds of all attempts."


def _goodput_of(lives: list[tuple[int, int, float]], step_seconds: float) -> float:
    last = lives[-1][1]
    return last * step_seconds / sum(seconds for _, _, seconds in lives)


def _counts_lost_steps(lives: list[tuple[int, int, float]], step_seconds: float) -> float:
    return sum(last - first for first, last, _ in lives) * step_seconds / sum(each[2] for each in lives)


def _last_life_only(lives: list[tuple[int, int, float]], step_seconds: float) -> float:
    first, last, seconds = lives[-1]
    return (last - first) * step_seconds / seconds


def _steps_per_second(lives: list[tuple[int, int, float]], step_seconds: float) -> float:
    return lives[-1][1] / sum(seconds for _, _, seconds in lives)


def _without_starting(lives: list[tuple[int, int, float]], step_seconds: float) -> float:
    return lives[-1][1] / sum(last - first for first, last, _ in lives)


goodput = Exercise(
    task="goodput_of(lives, step_seconds): return the fraction (0 to 1) of all seconds spent on steps that were kept.",
    test=_test_goodput,
    solution=_goodput_of,
    wrong={
        "counts lost steps": _counts_lost_steps,
        "uses the last attempt only": _last_life_only,
        "returns steps per second": _steps_per_second,
        "ignores the startup time": _without_starting,
    },
    hints=(
        "How many steps has the run completed at the end? Repeated steps count once.",
        "The denominator is the seconds of all attempts: starting, loading, saving, and steps that were lost.",
        "lives[-1][1] * step_seconds / sum(seconds for _, _, seconds in lives)",
    ),
)

# ------------------------------------------------------------------------------------------------------ 3. own a folder


def _in_a_child(run: Callable[[], Any]) -> tuple[int, int]:
    """Fork a process that reports whether `run` returns None, then sleeps. Returns its pid and the pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            held = run()
            os.write(writer, b"no" if held is None else b"yes")
            time.sleep(600)
        os.write(writer, b"error")
        os._exit(1)
    os.close(writer)
    return child, reader


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _answer_in_child(answer: Answer, folder: Path) -> tuple[str, int]:
    child, reader = _in_a_child(lambda: answer(folder))
    said = os.read(reader, 10).decode()
    os.close(reader)
    return said, child


def _claimed(world: World, answer: Answer, name: str) -> dict[str, Any]:
    """Return the results of processes that claim a folder one after another."""
    folder, other, children = Path(name), Path(name) / "other", list[int]()
    other.mkdir()
    found = {}
    with suppress(OSError):
        answer(Path(name) / "nowhere")  # raises `NotImplementedError` here, not in a child
    try:
        for who, what in (("first", folder), ("second", folder), ("elsewhere", other)):
            found[who], child = _answer_in_child(answer, what)
            children.append(child)
        _end(children.pop(0))
        for who in ("heir", "late"):
            found[who], child = _answer_in_child(answer, folder)
            children.append(child)
    finally:
        for child in children:
            _end(child)
    return found


def _test_claim(answer: Answer) -> str:
    with tempfile.TemporaryDirectory() as name:
        stuck = "A process waits forever: return None immediately if another process owns the folder."
        [found] = on_ranks(_claimed, 1, answer, name, stuck=stuck, timeout=20)
    for who, said in found.items():
        expect(said != "error", f"Your answer raised an error in the process for the case {who!r}.")
    expect(found["first"] == "yes", "The folder has no owner, but the first process gets None.")
    expect(found["second"] == "no", "Two running processes own the same folder.")
    expect(found["elsewhere"] == "yes", "A different folder has no owner, but a process that claims it gets None.")
    expect(found["heir"] == "yes", "The owner was killed by SIGKILL, but the folder is still taken: no run can resume.")
    expect(found["late"] == "no", "After a killed owner was replaced, two processes own the folder.")
    return "One process owns the folder, and when it exits or is killed, the folder is free again."


def _claim(folder: Path) -> Any:
    file = os.open(folder / "owner", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file  # this process owns the folder until the file is closed or the process exits


def _process_number(folder: Path) -> Any:
    mark = folder / "owner"
    if mark.exists():
        return None
    mark.write_text(str(os.getpid()))
    return mark


def _exclusively_made(folder: Path) -> Any:
    try:
        return open(folder / "owner", "x")
    except FileExistsError:
        return None


def _closed_at_once(folder: Path) -> Any:
    with open(folder / "owner", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return True


def _shared(folder: Path) -> Any:
    file = os.open(folder / "owner", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _one_for_all(folder: Path) -> Any:
    parent = next(path for path in (folder, *folder.parents) if path.name != "other")
    file = os.open(parent / "owner", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return file


claim = Exercise(
    task=(
        "claim(folder): return an object that this process keeps while it owns the folder, or None if another process "
        "owns it. A killed process must no longer own the folder."
    ),
    test=_test_claim,
    solution=_claim,
    wrong={
        "writes a pid file that outlives its owner": _process_number,
        "creates a file that outlives its owner": _exclusively_made,
        "releases the lock immediately": _closed_at_once,
        "takes a shared lock": _shared,
        "has one lock for all folders": _one_for_all,
    },
    hints=(
        "A file with the owner's name remains when the owner is killed. Which resources does the kernel release?",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) raises BlockingIOError if another process holds the lock.",
        "The lock lasts as long as the file is open: return the result of os.open, so that the file stays open.",
    ),
)
