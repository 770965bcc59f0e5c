"""Start jobs, inject faults, and read the logs of all attempts. Several notebooks use this module."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Fault = tuple[str, int]  # "kill worker" or "kill machine", and the step
Row = dict[str, Any]  # pid, size, step, loss and time of one step, as rank 0 logged it
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def start(folder: Path, name: str, *command: object, faults: Sequence[Fault] = (), **variables: str) -> Any:
    """Start a command in `folder`, and return a `subprocess.Popen`. The run's own folder is `folder/name`.

    The returned object's `log` attribute is the path of the process's output file.
    """
    (folder / name).mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"FAULTS": json.dumps(faults)} | variables
    log = folder / f"{name}-{time.monotonic_ns()}.log"
    with log.open("w") as file:
        process: Any = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, env=environment, cwd=folder)
    process.log = log
    return process


def finish(process: Any, code: int = 0) -> None:
    """Wait until a process exits. Raise `AssertionError` with the process's output if the exit code is not `code`."""
    process.wait(timeout=240)
    assert process.returncode == code, (
        f"expected exit code {code}, got {process.returncode}: {process.log.read_text()[-3000:]}"
    )


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until `condition()` is true. Raise `TimeoutError` after `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: timed out after {seconds:.0f} s")
        time.sleep(0.1)


def attempts_of(folder: Path) -> list[list[Row]]:
    """Return the logged steps of each attempt. A new attempt starts when rank 0's process ID changes.

    Times are in seconds since the first step of the first attempt.
    """
    log = folder / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # without an incomplete last line
    rows = [row | {"time": row["time"] - rows[0]["time"]} for row in rows]
    return [list(group) for _, group in groupby(rows, key=lambda row: row["pid"])]


def describe(attempts: Sequence[Sequence[Row]]) -> str:
    """Return a line for each attempt, with the attempt's steps and the cost of the preceding restart."""
    lines: list[str] = []
    for number, attempt in enumerate(attempts):
        first, last = attempt[0], attempt[-1]
        line = f"attempt {number + 1}, world size {first['size']}: steps {first['step']:3} to {last['step']:3}"
        if number:
            before = attempts[number - 1][-1]
            repeated, seconds = before["step"] + 1 - first["step"], first["time"] - before["time"]
            line += f"; {repeated:2} repeated, restarted in {seconds:.1f} s"
        lines.append(line)
    return "\n".join(lines)


def inject(folder: Path, rank: int, size: int, step: int) -> None:
    """Delay the run after `step`, and inject the faults from the environment variable FAULTS.

    With several ranks, the last rank injects each fault once, and records the fault in `folder`. A single rank injects
    no faults, but delays the run longer.
    """
    time.sleep(0.01 if size > 1 else 0.5)
    for kind, at in json.loads(os.environ.get("FAULTS", "[]")):
        happened = folder / f"{kind} {at}"
        if size == 1 or rank < size - 1 or step < at or happened.exists():
            continue
        happened.touch()
        if kind == "kill machine":
            os.kill(os.getppid(), signal.SIGKILL)  # the agent
        os.kill(os.getpid(), signal.SIGKILL)


def write_stand_ins(folder: Path) -> str:
    """Write stand-ins for Slurm's commands to `folder`, and return a value for PATH that starts with `folder`.

    `srun` runs its arguments as a command, and `scontrol` appends its arguments to the file `requeued`.
    """
    commands = {
        "srun": 'exec "$@"',
        "scontrol": 'echo "$@" >> requeued',
        "torchrun": f'exec {shlex.join(TORCHRUN)} "$@"',
    }
    folder.mkdir(exist_ok=True)
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder.resolve()}:{os.environ['PATH']}"
