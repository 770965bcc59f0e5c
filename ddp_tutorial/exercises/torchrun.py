"""Run a learner's script with torchrun, and monitor its output, progress and exit code.

    with Torchrun(script, 2, "words.pt", folder=folder) as run:
        run.wait(lambda printed: "step 20" in printed)
        run.kill(rank=1)
        run.wait()

Exiting the block kills all processes. torchrun starts each rank in its own session, so the ranks are identified by an
inherited environment variable. If this process is killed, torchrun receives SIGTERM and terminates its ranks.
"""

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil

from ddp_tutorial.exercises import WrongAnswerError, expect
from ddp_tutorial.processes.process_tags import TORCHRUN, kill_torchrun

STUCK_SECONDS = 8.0  # a run that prints no line and uses no CPU for this time counts as stuck
LIMIT_SECONDS = 150.0  # time limit of a run, even if the ranks are computing
_BUSY = 0.2  # CPU seconds that count as progress; ranks that wait for one another use a few hundredths
# On Linux, torchrun receives SIGTERM when this process exits, and then terminates its ranks.
_BEGIN = "import ctypes, runpy; getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, 15); "
_BEGIN += "runpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)"


class WrongScript(NamedTuple):
    """A wrong answer that replaces text in the solution's script. `texts` alternates between old and new text."""

    solution: Path
    texts: tuple[str, ...]

    def write(self, path: Path) -> Path:
        """Write the wrong script to `path`, and return `path`."""
        text = self.solution.read_text(encoding="utf-8")
        for old, new in zip(self.texts[::2], self.texts[1::2], strict=True):
            assert old in text, f"the solution does not contain {old!r}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        return path


def read_script(script: Path) -> None:
    """Reject a missing, invalid or unfinished script before any rank starts."""
    expect(script.is_file(), f"There is no file {script}. Run the cell that writes it.")
    try:
        nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    except SyntaxError as error:
        raise WrongAnswerError(f"The script is not valid Python: {error.msg} on line {error.lineno}.") from None
    if any(isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node) for node in nodes):
        raise NotImplementedError
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    expect(
        not any("ddp_tutorial" in each for each in imports), "Use plain torch: the script must not import ddp_tutorial."
    )


class Torchrun:
    """A process that runs `torchrun --standalone --nproc-per-node=NPROCS SCRIPT ARGUMENTS...` with one thread per rank.

    The process writes its stdout and stderr to two new files in `folder`.
    """

    def __init__(self, script: Path, nprocs: int, *arguments: object, folder: Path) -> None:
        """Start torchrun, and redirect its output to files in `folder`."""
        self.mark = uuid4().hex
        self.stdout_path, self.stderr_path = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        command = [sys.executable, "-c", _BEGIN, "--standalone", f"--nproc-per-node={nprocs}", str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", TORCHRUN: self.mark}
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            # torchrun runs in its own session, so that Ctrl-C does not reach it directly.
            self.agent = psutil.Popen(
                [*command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        self.deadline = time.monotonic() + LIMIT_SECONDS

    def __enter__(self) -> "Torchrun":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill torchrun and all its ranks."""
        kill_torchrun(self.agent, self.mark)

    def printed(self) -> str:
        """Return the lines printed so far, without an incomplete last line."""
        return re.sub(r"[^\n]*\Z", "", self.stdout_path.read_text(errors="replace"))

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes in rank order. The list is empty until torchrun has started the ranks."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            for process in self.agent.children():
                with suppress(psutil.Error, OSError, KeyError):
                    found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def kill(self, rank: int) -> None:
        """Send SIGKILL to one rank."""
        self.ranks()[rank].kill()

    def wait(self, enough: Callable[[str], bool] = lambda _: False) -> int | None:
        """Wait until `enough` returns true for the printed lines, or until torchrun exits.

        Returns:
            The exit code of torchrun, or None if `enough` returned true first.

        Raises:
            WrongAnswerError: If the ranks wait for each other, or if the run exceeds its time limit.
        """
        alive, printed, computed, look = time.monotonic(), "", 0.0, 0.0
        while (code := self.agent.poll()) is None:
            now, before = time.monotonic(), printed
            printed = self.printed()
            if enough(printed):
                return None
            if now > look:
                computing, look = self._computed(), now + 0.2
            if printed != before or abs(computing - computed) > _BUSY:
                alive, computed = now, computing
            if now - alive > STUCK_SECONDS:
                raise WrongAnswerError(
                    f"{self._last_line()}. The ranks then made no progress for {STUCK_SECONDS:g} s, because they were "
                    "waiting for each other. Every rank must enter the same collectives in the same order. Check for "
                    "a collective inside `if rank == 0`. If the run has printed all its lines, call "
                    "destroy_process_group() only after the DDP model has been freed."
                )
            if now > self.deadline:
                raise WrongAnswerError(f"{self._last_line()}, and did not exit within {LIMIT_SECONDS:.0f} s.")
            time.sleep(0.002)
        return int(code)

    def _computed(self) -> float:
        """Return the ranks' CPU time in seconds, or torchrun's own CPU time if no rank has started yet."""
        used = 0.0
        with suppress(psutil.Error):
            for process in self.agent.children(recursive=True) or [self.agent]:
                with suppress(psutil.Error):
                    used += sum(process.cpu_times()[:2])
        return used

    def _last_line(self) -> str:
        lines = [line for line in self.printed().splitlines() if line]  # concurrent prints may leave empty lines
        return f"Your script last printed {lines[-1]!r}" if lines else "Your script printed nothing"

    def error(self) -> str:
        """Return the first error and the script line that raised it, or the exit codes if no rank raised an error."""
        stderr = self.stderr_path.read_text(errors="replace")
        if begin := re.search(r"^(\[rank\d+\]: ?|)Traceback .*", stderr, re.MULTILINE):
            lines = [
                line.removeprefix(begin[1]) for line in stderr[begin.start() :].splitlines() if _of(line, begin[1])
            ]
            last = next((number for number, line in enumerate(lines[1:], start=1) if not line.startswith(" ")), 0)
            where = re.findall(rf'{re.escape(self._script)}", line (\d+)', "\n".join(lines[:last]))
            return f"{lines[last]} (line {where[-1]} of your script)" if where else lines[last]
        ends = re.findall(r"rank +: (\d+) .*?exitcode +: (-?\d+)", stderr, re.DOTALL)
        return "; ".join(f"rank {rank} exited with code {code}" for rank, code in ends) or stderr[-500:]

    @property
    def _script(self) -> str:
        arguments: list[Any] = list(self.agent.args)
        return Path(arguments[5]).name


def _of(line: str, prefix: str) -> bool:
    """Return whether `line` starts with the rank's `prefix`. An empty prefix matches lines without a rank prefix."""
    return line.startswith(prefix) if prefix else not line.startswith("[rank")
