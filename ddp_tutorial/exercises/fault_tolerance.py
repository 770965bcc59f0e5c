"""The exercises of 12_fault_tolerance: how often to save, what a chain of lives was worth, and whose a folder is."""

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

# Seconds of a step, seconds of a save, seconds between failures -> steps from one save to the next.
_INTERVALS = {
    (0.5, 4.0, 7200.0): 480,  # sqrt(2 * 4 * 7200) = 240 s
    (2.0, 60.0, 3000.0): 300,  # 600 s
    (0.1, 0.02, 1.0): 2,
    (30.0, 1.0, 50.0): 1,  # 10 s are less than a step
}


def _test_interval(answer: Answer) -> str:
    for (step, save, between), steps in _INTERVALS.items():
        got = answer(step, save, between)
        told = f"Steps of {step:g} s, saves of {save:g} s, a failure every {between:g} s: "
        expect(isinstance(got, int), f"{told}return a whole number of steps, not {got!r}.")
        expect(got >= 1, f"{told}you save every {got} steps; once a step is as often as one can.")
        expect(got == steps, f"{told}it is every {steps} steps, and you say {got}.")
    return "That often, what saves cost and what failures cost are about the same."


def _interval(step_seconds: float, save_seconds: float, between_failures: float) -> int:
    return max(1, round(math.sqrt(2 * save_seconds * between_failures) / step_seconds))


interval = Exercise(
    task=(
        "interval(step_seconds, save_seconds, between_failures): return the best number of steps from save to save; "
        "all three are in seconds."
    ),
    test=_test_interval,
    solution=_interval,
    wrong={
        "forgets the two": lambda step, save, between: max(1, round(math.sqrt(save * between) / step)),
        "returns seconds": lambda step, save, between: round(math.sqrt(2 * save * between)),
        "saves every zero steps": lambda step, save, between: round(math.sqrt(2 * save * between) / step / 2) * 2,
        "returns no whole number": lambda step, save, between: math.sqrt(2 * save * between) / step,
        "saves twice between two failures": lambda step, save, between: max(1, round(between / 2 / step)),
    },
    hints=(
        "The best time from one save to the next is sqrt(2 * save_seconds * between_failures), in seconds.",
        "A number of steps: divide by the seconds of a step, and round.",
        "Where a step is longer than that time, save after every step: max(1, ...).",
    ),
)

# -------------------------------------------------------------------------------------------- 2. what a chain was worth

# Lives, each (the step that it went on from, the last step that it has done, its seconds), and seconds of a step.
_CHAINS: list[tuple[list[tuple[int, int, float]], float, float]] = [
    ([(0, 100, 50.0)], 0.5, 1.0),
    ([(0, 100, 60.0)], 0.5, 50 / 60),  # 10 s to start
    ([(0, 30, 20.0), (20, 60, 30.0), (60, 100, 50.0)], 0.5, 0.5),  # 10 steps lost
    ([(0, 9, 9.0), (0, 9, 9.0), (0, 10, 10.0)], 1.0, 10 / 28),
    ([(0, 40, 30.0), (40, 40, 10.0), (20, 40, 40.0)], 1.0, 0.5),  # the second life did nothing; a damaged checkpoint
]


def _test_goodput(answer: Answer) -> str:
    for lives, step, right in _CHAINS:
        got = float(answer(lives, step))
        done = sum(last - first for first, last, _ in lives)
        told = f"Lives {lives}, steps of {step:g} s: "
        expect(
            done == lives[-1][1] or not math.isclose(got, done * step / sum(each[2] for each in lives)),
            f"{told}{done} steps were done, but only {lives[-1][1]} of them count: the others were done again.",
        )
        expect(math.isclose(got, right), f"{told}the goodput is {right:.3f}, and you say {got:.3f}.")
    return "Only what the last life built upon counts; all seconds count."


def _goodput(lives: list[tuple[int, int, float]], step_seconds: float) -> float:
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
    task="goodput_of(lives, step_seconds): return the part, 0 to 1, of all seconds that steps which count have taken.",
    test=_test_goodput,
    solution=_goodput,
    wrong={
        "counts lost steps": _counts_lost_steps,
        "looks at the last life only": _last_life_only,
        "returns steps per second": _steps_per_second,
        "takes starting for free": _without_starting,
    },
    hints=(
        "How many steps has the run when all is over? How often they were done does not matter.",
        "All seconds of all lives are below the line: starting, loading, saving, and steps that were lost.",
        "lives[-1][1] * step_seconds / sum(seconds for _, _, seconds in lives)",
    ),
)

# ------------------------------------------------------------------------------------------------- 3. whose a folder is


def _in_a_child(run: Callable[[], Any]) -> tuple[int, int]:
    """Fork a process that says by a pipe whether `run` returns something, and then waits: its number and the pipe."""
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
    """What processes were told that asked for a folder, one after another."""
    folder, other, children = Path(name), Path(name) / "other", list[int]()
    other.mkdir()
    found = {}
    with suppress(OSError):
        answer(Path(name) / "nowhere")  # raises `NotImplementedError` where it is told as such, and not in a child
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
        stuck = "A process waits for ever: return None at once where another has the folder."
        [found] = on_ranks(_claimed, 1, answer, name, stuck=stuck, timeout=20)
    for who, said in found.items():
        expect(said != "error", f"In the process that was the {who} to ask, your answer raised an error.")
    expect(found["first"] == "yes", "Nobody has the folder, and yet the first process gets None.")
    expect(found["second"] == "no", "Two processes that live have the same folder.")
    expect(found["elsewhere"] == "yes", "Another folder is free, but a process that asks for it gets None.")
    expect(found["heir"] == "yes", "The owner was killed by SIGKILL, and the folder is still taken: nobody can go on.")
    expect(found["late"] == "no", "After a dead owner had been replaced, two processes have the folder.")
    return "One process has it, and when that dies, however it dies, it is free."


def _claim(folder: Path) -> Any:
    file = os.open(folder / "owner", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file  # the folder is ours until this is closed, or the process ends


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
        "claim(folder): return something to hold on to while the folder is this process's, or None where another has "
        "it; an owner that is killed has it no longer."
    ),
    test=_test_claim,
    solution=_claim,
    wrong={
        "leaves a mark that outlives its owner": _process_number,
        "makes a file that outlives its owner": _exclusively_made,
        "lets go at once": _closed_at_once,
        "shares it": _shared,
        "has one lock for all folders": _one_for_all,
    },
    hints=(
        "A file that says whose it is stays when its owner is killed. What does the kernel let go of by itself?",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) raises BlockingIOError where another process has the lock.",
        "The lock lasts as long as the file is open: return what os.open gave you, so that it stays so.",
    ),
)
