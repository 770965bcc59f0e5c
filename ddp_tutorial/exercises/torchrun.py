"""A learner's script under a real torchrun, watched from outside: what it prints, whether it is stuck, how it ends.

    with Torchrun(script, 2, "words.pt", folder=folder) as run:
        run.wait(lambda printed: "step 20" in printed)
        run.kill(rank=1)
        run.wait()

When the block ends, so have all processes: torchrun puts each rank into a session of its own, so they are found by an
environment variable that all of them inherit. Should this process be killed, torchrun is told to end its ranks.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from ddp_tutorial.exercises import WrongAnswerError
from ddp_tutorial.processes.process_tags import TORCHRUN, kill_torchrun

STUCK_SECONDS = 8.0  # without a sign of life: a printed line, or computing
LIMIT_SECONDS = 150.0  # for a run that computes, and does not end
_BUSY = 0.2  # seconds of computing in that time; ranks that wait for one another compute for hundredths
# Where the system can, it sends SIGTERM to torchrun when this process is gone, and torchrun ends its ranks.
_BEGIN = "import ctypes, runpy; getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, 15); "
_BEGIN += "runpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)"


class Torchrun:
    """`torchrun --standalone --nproc-per-node=NPROCS SCRIPT ARGUMENTS...`, one thread a rank.

    What it prints goes to two files in a new folder below `folder`.
    """

    def __init__(self, script: Path, nprocs: int, *arguments: object, folder: Path) -> None:
        self.mark = uuid4().hex
        self.printed_to, self.said_to = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        command = [sys.executable, "-c", _BEGIN, "--standalone", f"--nproc-per-node={nprocs}", str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", TORCHRUN: self.mark}
        with self.printed_to.open("wb") as out, self.said_to.open("wb") as err:
            # In a session of its own, so that an interrupt reaches it from here only.
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
        return self

    def __exit__(self, *_: object) -> None:
        kill_torchrun(self.agent, self.mark)

    def printed(self) -> str:
        """The lines that were printed so far, without one that is not yet whole."""
        return re.sub(r"[^\n]*\Z", "", self.printed_to.read_text(errors="replace"))

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in their order. None before torchrun has started them."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            for process in self.agent.children():
                with suppress(psutil.Error, OSError, KeyError):
                    found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def kill(self, rank: int) -> None:
        """SIGKILL for one rank."""
        self.ranks()[rank].kill()

    def wait(self, enough: Callable[[str], bool] = lambda _: False) -> int | None:
        """Wait until `enough` says so of what was printed, or torchrun has ended; then its exit code.

        Raises `WrongAnswerError` where the ranks wait for one another, or do not come to an end.
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
                    f"{self._stood()}. Then the ranks did nothing for {STUCK_SECONDS:g} s: they wait for one another. "
                    "Every rank has to enter the same collectives, in the same order: is one inside `if rank == 0`?"
                )
            if now > self.deadline:
                raise WrongAnswerError(f"{self._stood()}, and has not come to an end in {LIMIT_SECONDS:.0f} s.")
            time.sleep(0.002)
        return int(code)

    def _computed(self) -> float:
        """Seconds of processor time that the ranks have used; those of torchrun until there are any."""
        used = 0.0
        with suppress(psutil.Error):
            for process in self.agent.children(recursive=True) or [self.agent]:
                with suppress(psutil.Error):
                    used += sum(process.cpu_times()[:2])
        return used

    def _stood(self) -> str:
        lines = [line for line in self.printed().splitlines() if line]  # ranks that print at a time share lines
        return f"Your script printed {f'{lines[-1]!r} last' if lines else 'nothing'}"

    def error(self) -> str:
        """The first error that a rank ended with, and the line of the script. Else how torchrun saw the ranks end."""
        said = self.said_to.read_text(errors="replace")
        if begin := re.search(r"^(\[rank\d+\]: ?|)Traceback .*", said, re.MULTILINE):
            lines = [line.removeprefix(begin[1]) for line in said[begin.start() :].splitlines() if _of(line, begin[1])]
            last = next((number for number, line in enumerate(lines[1:], start=1) if not line.startswith(" ")), 0)
            where = re.findall(rf'{re.escape(self._script)}", line (\d+)', "\n".join(lines[:last]))
            return f"{lines[last]} (line {where[-1]} of your script)" if where else lines[last]
        ends = re.findall(r"rank +: (\d+) .*?exitcode +: (-?\d+)", said, re.DOTALL)
        return "; ".join(f"rank {rank} ended with exit code {code}" for rank, code in ends) or said[-500:]

    @property
    def _script(self) -> str:
        arguments: list[Any] = list(self.agent.args)
        return Path(arguments[5]).name


def _of(line: str, prefix: str) -> bool:
    """Is it a line of the rank with that prefix? Without one, those of no rank."""
    return line.startswith(prefix) if prefix else not line.startswith("[rank")
