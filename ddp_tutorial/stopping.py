"""Stop early, all ranks at the same step: on a signal, because somebody has asked for it, or for lack of progress."""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from ddp_tutorial.runs import STOP_REQUEST
from ddp_tutorial.world import World

# What a cluster sends to a job that has to go: Slurm and torchrun SIGTERM, many a batch script SIGUSR1.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # "try again later", as sysexits.h has it: the same command carries on

Wish = Literal["", "stop", "save"]
_WISHES: Sequence[Wish] = ("", "stop", "save")


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Inside, call `handler(number, frame)` for these signals. Python lets only the main thread see to that; others go
    on without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Stopping:
    """What some rank wishes, one step later, on all ranks.

    Asking costs an all-reduce of one number. It travels while the next step computes, so nobody waits for it; the price
    is that all stop one step after they have been asked to.
    """

    def __init__(self, world: World, run: Path) -> None:
        self.world, self.request = world, run / STOP_REQUEST
        self.signalled = False
        self._asked: tuple[torch.Tensor, dist.Work | None] | None = None

    def listening(self) -> AbstractContextManager[None]:
        """Inside, a signal is a wish to save and stop."""
        return handling(SIGNALS, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = True

    def wish(self) -> Wish:
        """After each step, on all ranks: what they wished when they were asked last. Saving goes before stopping."""
        answer = self._answer()
        own = torch.tensor([_WISHES.index(self._own())], device=self.world.device)
        work = dist.all_reduce(own, dist.ReduceOp.MAX, async_op=True) if self.world.size > 1 else None
        self._asked = own, work
        return answer if self.world.size > 1 else self._answer()

    def close(self) -> None:
        """No question is left under way; the request is done with."""
        self._answer()
        if self.world.is_main:
            self.request.unlink(missing_ok=True)

    def _own(self) -> Wish:
        if self.signalled:
            return "save"
        if self.world.is_main and self.request.exists():
            return "save" if self.request.read_text().strip() == "save" else "stop"
        return ""

    def _answer(self) -> Wish:
        asked, self._asked = self._asked, None
        if asked is None:
            return ""
        wish, work = asked
        if work is not None:
            work.wait()
        return _WISHES[int(wish)]


def without_progress(losses: Mapping[int, float], minimum_delta: float = 0.0, grace_steps: int = 0) -> int:
    """Evaluations in a row that were not better than the best before them, up to the last. `losses` are by step.

    Better means lower by more than `minimum_delta`; a NaN never is. Evaluations of the first `grace_steps` steps may be
    the best, but are not held against the run. All there is to know is in the losses, so a resumed run decides as the
    uninterrupted one.
    """
    best, count = math.inf, 0
    for step in sorted(losses):
        if losses[step] < best - minimum_delta:
            best, count = losses[step], 0
        elif step > grace_steps:
            count += 1
    return count


def best_step(losses: Mapping[int, float]) -> int | None:
    """The step with the lowest loss, the first of equals; None where there is no finite one."""
    finite = [step for step in sorted(losses) if math.isfinite(losses[step])]
    return min(finite, key=losses.__getitem__, default=None)
