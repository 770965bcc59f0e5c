"""Exercises on excluding hosts, requeueing a job, and an elastic script, for notebook 12_fault_tolerance."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect
from ddp_tutorial.exercises.torchrun import Torchrun, WrongScript, read_script
from ddp_tutorial.exercises.words import (
    course,
    lines_of,
    load_checkpoint,
    make_words,
    wrong_after_resuming,
    wrong_from_the_start,
)

# ------------------------------------------------------------------------------------------- 1. which hosts to exclude

# The ranks' exits in one attempt: seconds since the start, host, and exit code (a negative code is a signal).
Attempt = list[tuple[float, str, int]]

_RECORDS: list[tuple[list[Attempt], set[str]]] = [
    # n3's GPU fails twice. Its peers lose the connection (1), or are stopped by their agents (-15).
    (
        [
            [(912.4, "n1", -15), (907.1, "n2", 1), (905.0, "n3", -9)],
            [(77.3, "n2", 1), (76.9, "n3", -6), (81.2, "n1", -15)],
        ],
        {"n3"},
    ),
    # In each attempt, a different host fails first, which may be chance.
    ([[(5.0, "n1", -9), (6.0, "n2", 1)], [(8.0, "n2", -9), (9.0, "n1", 1)]], set()),
    # n2 exits first in two attempts, but only because its agent stops it (-15).
    (
        [
            [(40.0, "n2", -15), (41.0, "n1", -11), (42.0, "n3", 1)],
            [(30.0, "n2", -15), (31.5, "n3", -9), (33.0, "n1", 1)],
        ],
        set(),
    ),
    # One attempt contains no failure. Two hosts fail first in two attempts each.
    (
        [
            [(10.0, "n1", -9), (11.0, "n2", 1)],
            [(50.0, "n1", -15), (50.1, "n2", -15)],
            [(13.0, "n1", 1), (12.0, "n2", -9)],
            [(21.0, "n2", 1), (20.0, "n1", -7)],
            [(99.0, "n1", 0), (97.0, "n2", -9)],
        ],
        {"n1", "n2"},
    ),
]


def _test_hosts_to_exclude(answer: Answer) -> str:
    for attempts, right in _RECORDS:
        got = answer([list(attempt) for attempt in attempts])
        listed = "\n".join(f"    {attempt}" for attempt in attempts)
        case = f"Attempts:\n{listed}\n"
        expect(isinstance(got, set), f"{case}The result must be a set of hosts, got {got!r}.")
        expect(got == right, f"{case}The hosts to exclude must be {sorted(right)}, got {sorted(got)}.")
    return "The first failure in an attempt is the cause. Exclude a host that causes at least two failures."


def _hosts_to_exclude(attempts: Any) -> set[str]:
    times: Counter[str] = Counter()
    for attempt in attempts:
        failures = [(seconds, host) for seconds, host, code in attempt if code not in (0, -signal.SIGTERM)]
        if failures:
            times[min(failures)[1]] += 1
    return {host for host, many in times.items() if many >= 2}


def _every_failed_host(attempts: Any) -> set[str]:
    times = Counter(host for attempt in attempts for _, host, code in attempt if code not in (0, -15))
    return {host for host, many in times.items() if many >= 2}


def _first_exit(attempts: Any) -> set[str]:
    times = Counter(min(attempt)[1] for attempt in attempts)
    return {host for host, many in times.items() if many >= 2}


def _first_in_list(attempts: Any) -> set[str]:
    times: Counter[str] = Counter()
    for attempt in attempts:
        times.update([host for _, host, code in attempt if code not in (0, -15)][:1])
    return {host for host, many in times.items() if many >= 2}


def _after_one_failure(attempts: Any) -> set[str]:
    failed = [[exit_ for exit_ in attempt if exit_[2] not in (0, -15)] for attempt in attempts]
    return {min(each)[1] for each in failed if each}


hosts_to_exclude = Exercise(
    task=(
        "hosts_to_exclude(attempts): return the set of hosts whose rank was the first to fail in at least two attempts."
    ),
    test=_test_hosts_to_exclude,
    solution=_hosts_to_exclude,
    wrong={
        "counts failures that result from the first failure": _every_failed_host,
        "counts ranks that the agent stopped": _first_exit,
        "takes the first failure in the list": _first_in_list,
        "excludes a host after one failure": _after_one_failure,
    },
    hints=(
        "Exit codes 0 and -15 are not failures: the agent stops the other ranks with SIGTERM.",
        "The records are not sorted. The first failure is the failure with the smallest number of seconds.",
        "Count the hosts of the first failures with collections.Counter. An attempt may contain no failure.",
    ),
)

# ---------------------------------------------------------------------------------------- 2. a loop that requeues a job

_READY_SECONDS = 60.0  # longest wait until a job is near its time limit
# Kinds of attempts: "finish" and "crash" exit at once. "save" waits for the signal, takes a while to save, and exits
# with code 75, or with code 9 after a second signal. "starting" has no handler yet, so the signal terminates it.
_JOB = """
import signal, sys, time
kind, ready = sys.argv[1:]
received = []
if kind in ("finish", "crash"):
    sys.exit(kind == "crash")
if kind == "save":
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
open(ready, "w").close()
limit = time.monotonic() + 20
while not received and time.monotonic() < limit:
    time.sleep(0.005)
limit = time.monotonic() + 0.7
while received and len(received) < 2 and time.monotonic() < limit:
    time.sleep(0.005)
sys.exit({0: 8, 1: 75}.get(len(received), 9))
"""
_JOBS: list[tuple[list[str], list[int]]] = [  # a job's attempts and the expected exit codes; up to 2 crashes in a row
    (["finish"], [0]),
    (["save", "save", "save", "save", "finish"], [75, 75, 75, 75, 0]),
    (["crash", "crash", "save", "crash", "crash", "finish"], [1, 1, 75, 1, 1, 0]),
    (["save", "crash", "crash", "crash", "finish"], [75, 1, 1, 1]),
    (["starting", "starting", "starting", "starting", "finish"], [*4 * [-signal.SIGUSR1], 0]),
]


def _run_one_job(answer: Answer, kinds: Sequence[str], folder: Path) -> Any:
    """Run the answer with a job whose attempts behave as specified in `kinds`."""
    started: list[subprocess.Popen[bytes]] = []
    begins = count()

    def start() -> "subprocess.Popen[bytes]":
        number = next(begins)
        if started and started[-1].poll() is None:
            raise WrongAnswerError(f"Attempt {number + 1} was started while attempt {number} was still running.")
        expect(
            number < len(kinds),
            f"The job must be started at most {number} times, got {number + 1}. The attempts were: {', '.join(kinds)}.",
        )
        command = [sys.executable, "-c", _JOB, kinds[number], str(folder / f"{number}.ready")]
        started.append(subprocess.Popen(command))
        asked[started[-1].pid] = time.monotonic()
        return started[-1]

    def is_near_limit(process: "subprocess.Popen[bytes]") -> bool:
        number = [each.pid for each in started].index(process.pid)
        waited = time.monotonic() - asked[process.pid]
        expect(waited < _READY_SECONDS, f"Attempt {number + 1} did not exit within {_READY_SECONDS:.0f} s.")
        return (folder / f"{number}.ready").exists()

    asked: dict[int, float] = {}
    try:
        return answer(start, is_near_limit, 2)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _test_run_job(answer: Answer) -> str:
    for kinds, right in _JOBS:
        with TemporaryDirectory() as name:
            got = _run_one_job(answer, kinds, Path(name))
        case = f"The attempts were: {', '.join(kinds)}. Up to 2 crashes in a row are allowed."
        expect(isinstance(got, list), f"{case} The result must be a list of exit codes, got {got!r}.")
        expect(8 not in got, f"{case} Attempt {[*got, 8].index(8) + 1} waited for SIGUSR1, but never received it.")
        expect(9 not in got, f"{case} Attempt {[*got, 9].index(9) + 1} received SIGUSR1 more than once.")
        expect(got == right, f"{case} The exit codes must be {right}, got {got}.")
    return "Your loop requeues a job that has saved, restarts a crashed job, and gives up on a job that keeps crashing."


def _run_job(start: Any, is_near_limit: Any, crashes: int) -> list[int]:
    codes, in_a_row = [], 0
    while True:
        process, warned = start(), False
        while process.poll() is None:
            if not warned and is_near_limit(process):
                process.send_signal(signal.SIGUSR1)
                warned = True
            time.sleep(0.01)
        codes.append(code := process.returncode)
        if code == 0:
            return codes
        saved = code == 75 or (warned and code == -signal.SIGUSR1)  # or the handler was not installed yet
        in_a_row = 0 if saved else in_a_row + 1
        if in_a_row > crashes:
            return codes


Outcome = Callable[[int, bool, int], "int | None"]  # code, warned, crashes so far -> crashes, or None to give up


def _variant(after: Outcome, send: str = "once", number: int = signal.SIGUSR1) -> Answer:
    """Return a variant of the solution.

    The function `after` returns the number of consecutive crashes, or None to give up. `send` ("once" or "always")
    specifies how often the loop sends the signal `number`.
    """

    def run_job(start: Any, is_near_limit: Any, crashes: int) -> list[int]:
        codes: list[int] = []
        in_a_row: int | None = 0
        while in_a_row is not None and in_a_row <= crashes:
            process, warned = start(), False
            while process.poll() is None:
                if is_near_limit(process) and (send == "always" or not warned):
                    process.send_signal(number)
                    warned = True
                time.sleep(0.01)
            codes.append(process.returncode)
            in_a_row = None if codes[-1] == 0 else after(codes[-1], warned, in_a_row)
        return codes

    return run_job


run_job = Exercise(
    task=(
        "run_job(start, is_near_limit, crashes): run a job until it finishes or has crashed more than `crashes` times "
        "in a row. Return the exit codes of all attempts."
    ),
    test=_test_run_job,
    solution=_run_job,
    wrong={
        "counts requeues as crashes": _variant(lambda code, warned, crashes: crashes + 1),
        "restarts a broken job forever": _variant(lambda code, warned, crashes: 0),
        "gives up after a crash": _variant(lambda code, warned, crashes: 0 if code == 75 or warned else None),
        "counts all crashes, not only crashes in a row": _variant(
            lambda code, warned, crashes: crashes + (code != 75 and not warned)
        ),
        "counts a warning during the startup as a crash": _variant(
            lambda code, warned, crashes: 0 if code == 75 else crashes + 1
        ),
        "sends the signal repeatedly": _variant(
            lambda code, warned, crashes: 0 if code == 75 or warned else crashes + 1, "always"
        ),
        "kills the job instead of warning it": _variant(
            lambda code, warned, crashes: 0 if code == 75 or warned else crashes + 1, number=signal.SIGKILL
        ),
    },
    hints=(
        "One iteration of the outer loop is one attempt: start it, then loop until process.poll() is not None.",
        "Remember whether you have sent the signal, so that you send it only once. Sleep 10 ms between polls.",
        "Exit code 75 means that the job has saved: start it again, and reset the number of crashes in a row. Exit "
        "code 0 means that the job has finished.",
        "A job that is still importing torch has no handler, so SIGUSR1 terminates the job with exit code "
        "-signal.SIGUSR1. This is not a crash, either.",
    ),
)

# ------------------------------------------------------------------------------------------------- 3. an elastic script

_EVERY = 17  # steps between checkpoints; an epoch has 13 steps
_SEEN = _EVERY + 4  # steps that the first two attempts take before they receive a signal
_FOREVER = 20_000  # steps of the interrupted attempts; finite in case the interruption fails
_SOLUTION = Path(__file__).with_name("fault_tolerance_script.py")


def _test_elastic_script(answer: Path | str | WrongScript) -> str:
    with TemporaryDirectory() as name:
        folder = Path(name)
        script = answer.write(folder / "elastic.py") if isinstance(answer, WrongScript) else Path(answer).resolve()
        read_script(script)
        torch.save(make_words(), folder / "words.pt")
        done = _stop_by_sigterm(script, folder)
        done = _kill_one_of_three(script, folder, done)
        stop = done + 20
        with _torchrun(script, 1, folder, stop) as run:
            code = run.wait()
            _require_lines(run, "On one rank, after the kill", done)
            last = max((line.step for line in lines_of(run.printed())), default=done)
            expect(
                code == 0 and last == stop,
                f"On one rank, the script must train until step {stop} and exit with code 0, got step {last} and exit "
                f"code {code}. {run.error()}",
            )
        weights = load_checkpoint(folder / "state.pt", "The run on one rank has finished")["model"]
    right = course(stop).weights
    apart = max(float((weights[each] - right[each]).abs().max()) for each in right)
    expect(
        apart < 1e-4, f"The final weights differ from the weights of one uninterrupted process by up to {apart:.1e}."
    )
    return (
        "After a SIGTERM to one of two ranks, both ranks stopped without losing a step. Three ranks survived a kill, "
        "and one rank finished. The losses and weights equal those of one uninterrupted process."
    )


def _torchrun(script: Path, nprocs: int, folder: Path, steps: int) -> Torchrun:
    return Torchrun(script, nprocs, folder / "words.pt", folder / "state.pt", steps, _EVERY, folder=folder)


def _require_lines(run: Torchrun, when: str, done: int) -> None:
    """Raise `WrongAnswerError` if a run that resumed after step `done` has printed wrong lines."""
    lines = lines_of(run.printed())
    mistake = wrong_after_resuming(lines, done) if done else wrong_from_the_start(lines)
    expect(not mistake, f"{when}: {mistake}")


def _run_until(run: Torchrun, many: int, when: str, done: int) -> None:
    """Wait until the run has printed `many` lines, and check the lines."""
    code = run.wait(lambda printed: len(lines_of(printed)) >= many)
    _require_lines(run, when, done)
    got = len(lines_of(run.printed()))
    expect(code is None, f"{when}: the script must train until step {_FOREVER}, got {got} steps. {run.error()}")


def _stop_by_sigterm(script: Path, folder: Path) -> int:
    """Send SIGTERM to rank 1 of two ranks, and return the saved step."""
    with _torchrun(script, 2, folder, _FOREVER) as run:
        _run_until(run, _SEEN, "On two ranks", 0)
        run.ranks()[1].terminate()
        code = run.wait()
        _require_lines(run, "On two ranks", 0)
        last = lines_of(run.printed())[-1].step
        expect(
            code == 0,
            f"Rank 1 received SIGTERM during step {last} or earlier. All ranks must save and exit with code 0, but "
            f"torchrun exited with code {code}. {run.error()}",
        )
    step = int(load_checkpoint(folder / "state.pt", "Rank 1 received SIGTERM")["step"])
    expect(step == last, f"After SIGTERM, the checkpoint must be from the last step, {last}, got step {step}.")
    return step


def _kill_one_of_three(script: Path, folder: Path, done: int) -> int:
    """Resume on three ranks, kill rank 2 after a checkpoint, and return the saved step."""
    with _torchrun(script, 3, folder, _FOREVER) as run:
        _run_until(run, _SEEN, f"On three ranks, after step {done}", done)
        run.kill(rank=2)
        run.wait()
        _require_lines(run, f"On three ranks, after step {done}", done)
    step = int(load_checkpoint(folder / "state.pt", "Rank 2 of 3 was killed")["step"])
    expect(step > done, f"The run resumed after step {done} and took {_SEEN} steps without saving a checkpoint.")
    return step


elastic_script = Exercise(
    task="Write a torchrun script that resumes on any number of ranks, and loses no step when a signal stops it.",
    test=_test_elastic_script,
    solution=_SOLUTION,
    wrong={
        "stops only the rank that received the signal": WrongScript(_SOLUTION, ("dist.all_reduce(flag)", "pass")),
        "stops without saving": WrongScript(_SOLUTION, ("(stop or done % every == 0", "(done % every == 0")),
        "exits in the signal handler": WrongScript(_SOLUTION, ("received.append(number)", "os._exit(0)")),
        "assigns five words to each of three ranks": WrongScript(
            _SOLUTION, ("[rank::size]", "[: 16 // size * size][rank::size]")
        ),
        "takes a mean of means": WrongScript(
            _SOLUTION, ("* dist.get_world_size() / total[1]", "/ (following >= 0).sum()")
        ),
    },
    hints=(
        "Start from your script of notebook 06. DistributedSampler pads to shards of equal size, so index the words "
        "yourself. For seed 0, it uses torch.randperm(200, generator=torch.Generator().manual_seed(epoch)).",
        "The position in the data is a function of the step: divmod(step, 13) returns the epoch and the step in the "
        "epoch. Rank r of N reads the words r, r + N, ... of the step's 16 words.",
        "The handler only sets a flag. After each step, all-reduce the flag: if any rank has received a signal, all "
        "ranks save the same step and leave the loop.",
        "Call dist.barrier() at the end, so that no rank exits before rank 0 has written the checkpoint.",
    ),
)
