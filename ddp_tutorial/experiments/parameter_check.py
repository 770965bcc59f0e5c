"""Execute the notebook cells that read and check parameters, in separate processes.

A cell can change the environment or the working directory, set the number of torch threads, or exit. Therefore, the
process that plans a sweep does not execute cells. Instead, a second process imports the package once and forks for each
point.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_tutorial.config import Config, ConfigError

CELL_SECONDS = 60  # timeout for the two cells of one point


def resolve(notebook: str, cells: Sequence[str], points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a dict for each point, from variable names to the configs that the notebook's cells create.

    Args:
        notebook: The notebook's name, for error messages.
        cells: The sources of the parameters cell and of the cell that checks the parameters.
        points: The parameters of each point, as papermill would pass them.

    Raises:
        ConfigError: If a cell rejects the parameters of a point, raises a different exception, exits or times out.
    """
    request = json.dumps({"notebook": notebook, "cells": list(cells), "points": list(points)})
    command = [sys.executable, "-m", "ddp_tutorial.experiments.parameter_check"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for answer in answers:
        if "error" in answer:
            raise ConfigError(answer["error"])
    if done.returncode or len(answers) != len(points):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{notebook}: the parameters could not be checked: {reason}")
    return [answer["configs"] for answer in answers]


def main() -> None:
    """Read a request from standard input, and write one line of JSON per point."""
    import ddp_tutorial.training.config  # noqa: F401  imported once before the forks, because every check needs it

    request = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the cells' output
    for point in request["points"]:
        output.write(_answer_of_fork(request["notebook"], request["cells"], point) + "\n")
        output.flush()


def _answer_of_fork(notebook: str, cells: Sequence[str], point: Mapping[str, Any]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action terminates the process even in C code
        signal.alarm(CELL_SECONDS)
        try:
            os.write(writing, json.dumps(_execute(notebook, cells, point)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGALRM:
        answer = json.dumps({"error": f"{notebook}: the cell after the parameters took more than {CELL_SECONDS} s"})
    elif not answer:
        answer = json.dumps({"error": f"{notebook}: the cell after the parameters exited with code {code}"})
    return answer


def _execute(notebook: str, cells: Sequence[str], point: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(cells[0], notebook, "exec"), names)
        names |= point
        exec(compile(cells[1], notebook, "exec"), names)
    except ConfigError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:
        return {"error": f"{notebook}: the cell after the parameters raised {type(error).__name__}: {error}"}
    return {
        "configs": {name: value.model_dump(mode="json") for name, value in names.items() if isinstance(value, Config)}
    }


if __name__ == "__main__":
    main()
