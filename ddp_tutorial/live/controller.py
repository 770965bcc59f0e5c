"""Start a pool's ranks, send them calls, and recover from failures.

A call finishes when all participating ranks have finished. During a call, the controller checks the ranks' progress
periodically. If a rank waits in a collective that not all ranks enter, the controller queries the status of all ranks
and aborts the call.
"""

import secrets
import selectors
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from ddp_tutorial.config import ConfigError, named_ranks
from ddp_tutorial.debug.hangs import BUSY_SECONDS, CollectiveError, Diagnosis, RankStatus, diagnose
from ddp_tutorial.live.backends import Backend
from ddp_tutorial.live.messages import Answer, Snapshot
from ddp_tutorial.live.worker_handle import WorkerHandle, describe_output
from ddp_tutorial.processes.console import make_console
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.logs import current_logging
from ddp_tutorial.processes.spawn import MARK, cell_sources, wait_for_exit

# Seconds between progress checks during a call.
POLL_SECONDS = 0.25
# Seconds that a rank may wait in a collective for a rank that has already finished the call.
ENDED_SECONDS = 1.0
# REACT_SECONDS: timeout for a rank to stop an interrupted call. GROUP_SECONDS: timeout for forming a process group.
# ANSWER_SECONDS: timeout for an answer to a query. On a busy machine, an answer can take more than a second.
REACT_SECONDS, GROUP_SECONDS, ANSWER_SECONDS = 10.0, 60.0, 5.0


class Controller:
    """Manager of a pool's ranks. The subclass `Ranks` adds the public methods."""

    def __init__(
        self,
        n: int,
        place: Backend,
        threads: int,
        device: str,
        backend: str,
        wait_timeout: float,
        collective_timeout: float,
        echo: bool,
    ) -> None:
        """Store the settings; see `Ranks`. The subclass creates and starts the workers."""
        self.n, self.wait_timeout, self.echo = n, wait_timeout, echo
        self.threads, self.collective_timeout = threads, collective_timeout
        self.device, self.backend = device, backend
        self._place = place
        self._workers: list[WorkerHandle] = []
        self._selector = selectors.DefaultSelector()
        self._mark = secrets.token_hex(8)
        self._busy = threading.Lock()
        self._number = self._question = 0
        self._known: set[str] = set()  # cells whose source lines have been sent to the ranks
        self._has_group = False

    # ---------------------------------------------------------------------------------------------------- starting

    def _start(self, workers: Sequence[WorkerHandle]) -> None:
        """Start the workers' processes. If one process cannot be started, all `workers` count as dead."""
        settings = {
            "threads": self.threads,
            "device": self.device,
            "backend": self.backend,
            "collective_timeout": self.collective_timeout,
            "sources": cell_sources(),
            "logs": current_logging(),
        }
        try:
            self._place.start(workers, settings, {MARK: self._mark})
            for each in workers:
                each.register(self._selector)
        except BaseException:
            for each in workers:
                if each.process:
                    each.process.kill()
                each.close(self._selector)
                each.death = "could not be started"
            raise

    def _wait_until_started(self) -> None:
        """Wait until all processes have started, then form a process group.

        Raises:
            RankError: If a rank exited before it was ready.
        """
        console = make_console(self.echo)
        for each in self._workers:
            each.attach_console(console)
        console.status(f"starting {self.n} ranks")
        with closing(console), _interrupts_recorded() as interrupts:
            while not all(each.started or each.death for each in self._workers):
                self._receive(POLL_SECONDS)
                console.tick()
                if interrupts:
                    return  # the context manager raises the interrupt
            for each in self._workers:
                if each.death:
                    raise RankError(each.rank, f"{each.death} before it was ready", log=each.log.tail())
            self._form_group()

    def _form_group(self) -> None:
        """Replace the current process group with a new group of all ranks.

        Raises:
            RankError: If a rank fails, or does not join within `GROUP_SECONDS`. Ranks that are still trying to join are
                killed.
        """
        self._has_group = False
        pids = self._place.pids(self._workers)
        everyone = self._begin("form_group", self._place.new_port(), pids, on=self._workers)
        deadline = time.monotonic() + GROUP_SECONDS
        while any(each.is_busy for each in everyone) and not any(each.death or each.failure for each in everyone):
            if not self._receive(deadline - time.monotonic()):
                break
        if failed := [each for each in everyone if each.is_busy or each.death or each.failure]:
            first = min(failed, key=lambda each: each.cause_order)
            error = self._error(first, "The ranks have no process group. `restart` restarts them.")
            self._kill([each for each in everyone if each.is_busy])
            raise error
        self._has_group = True

    # ------------------------------------------------------------------------------------------------------- a call

    def _call(self, kind: str, *content: Any, on: Iterable[int] | None = None) -> dict[int, Any]:
        """Run the request `kind` on the ranks in `on` (by default, all ranks), and return each rank's result.

        Raises:
            RuntimeError: If a different thread is using the ranks.
            RankError: If the request failed on a rank.
            CollectiveError: If a rank waited in a collective that not all ranks entered.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the ranks are busy with a call from a different thread: wait until the call finishes")
        try:
            with _interrupts_recorded() as interrupts:
                return self._call_of(self._chosen(on), interrupts, kind, *content)
        finally:
            self._busy.release()

    def _call_of(
        self, workers: Sequence[WorkerHandle], interrupts: list[int], kind: str, *content: Any
    ) -> dict[int, Any]:
        console = make_console(self.echo)
        for each in workers:
            each.attach_console(console)
        try:
            self._begin(kind, *content, on=workers)
            found = self._wait(workers, interrupts)
            if interrupts:
                interrupts.clear()
                raise self._interrupted(workers)
            if found is not None or any(each.failure or each.death for each in workers):
                raise self._failed(workers, found)
            return {each.rank: each.value for each in workers}
        finally:
            console.close([each.finish() for each in workers])
            for each in workers:
                each.display_all()

    def _chosen(self, on: Iterable[int] | None) -> list[WorkerHandle]:
        if not self._workers:
            raise RuntimeError("the ranks have been stopped: create a new Ranks object")
        self._receive(0.0)
        ranks = list(range(self.n)) if on is None else list(on)
        for rank in ranks:
            if rank not in range(self.n):
                raise ConfigError(f"rank must be between 0 and {self.n - 1}, got {rank}")
            if death := self._workers[rank].death:
                raise RankError(rank, f"is dead: the process {death}", others=self._advice())
        if not self._has_group and self.n > 1 and on is None:
            if self._place.outage or any(each.death for each in self._workers):
                raise RankError(ranks[0], "has no process group", others=self._place.outage or self._advice())
            self._form_group()
        return [self._workers[rank] for rank in sorted(set(ranks))]

    def _advice(self) -> str:
        living = [each.rank for each in self._workers if not each.death]
        if not living:
            return "`restart` (%ranks restart) restarts the ranks."
        keep = "are still running and keep their" if living[1:] else "is still running and keeps its"
        kept = f"{named_ranks(living).capitalize()} {keep} variables."
        return f"{kept} `restart` (%ranks restart) restarts the dead ranks, and forms a process group."

    def _begin(self, kind: str, *content: Any, on: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        self._number += 1
        for each in on:
            each.begin(self._number)
        for each in on:
            each.request(self._selector, self._number, kind, *content)
        return on

    def _wait(self, workers: Sequence[WorkerHandle], interrupts: list[int]) -> Diagnosis | None:
        """Wait until all workers have finished the call, or until an interrupt arrives.

        If a rank waits in a collective that not all ranks enter, abort the call and return the diagnosis.
        """
        poll_at = time.monotonic() + POLL_SECONDS
        slow_until = 0.0
        while any(each.is_busy for each in workers) and not interrupts:
            self._receive(max(0.0, poll_at - time.monotonic()))
            now = time.monotonic()
            if now < poll_at:
                continue
            poll_at = now + POLL_SECONDS
            workers[0].console.tick()
            busy = [each for each in workers if each.is_busy]
            any_finished = len(busy) < len(workers)
            limit = min(ENDED_SECONDS, self.wait_timeout) if any_finished else self.wait_timeout
            if now > slow_until and any(each.waited_for(now) > limit for each in busy):
                found = diagnose(self._statuses())
                if found.kind == "none" and not any_finished and self._place.outage:
                    found = Diagnosis("absent", f"{self._place.outage}: {found.verdict}, but no data arrives")
                if found.kind in {"order", "shape", "absent", "failed"} and any(each.is_busy for each in workers):
                    self._end_call([each for each in workers if each.is_busy])
                    return found
                if found.kind == "slow" and not slow_until:
                    workers[0].console.message(describe_output(found.verdict))
                slow_until = time.monotonic() + limit
            self._question += 1
            for each in busy:
                if each.answered == each.asked:  # wait for the pending answer first
                    each.ask("snapshot", self._question)
        return None

    def _end_call(self, workers: Sequence[WorkerHandle]) -> None:
        """Interrupt workers that have not finished the call. Unresponsive workers are first woken, then killed."""
        for each in workers:
            each.was_terminated = each.is_busy
        for seconds, wake in ((0.3, False), (REACT_SECONDS / 2, True), (REACT_SECONDS / 2, True)):
            for each in workers:
                if each.is_busy:
                    each.control("interrupt", each.number)
                    if wake:
                        each.was_woken = True
                        each.control("wake", each.number)
            deadline = time.monotonic() + seconds
            while any(each.is_busy for each in workers) and self._receive(deadline - time.monotonic()):
                pass
        self._kill([each for each in workers if each.is_busy], "did not react to an interrupt, and was killed")
        self._ask("snapshot", ANSWER_SECONDS)  # an answer proves that a rank has handled earlier wake messages

    def _kill(self, workers: Sequence[WorkerHandle], why: str = "was killed") -> None:
        for each in workers:
            each.process.kill()
        stuck = wait_for_exit([each.process for each in workers])
        for each in workers:
            survived = f"did not exit after SIGKILL, and is still running as process {each.process.pid}"
            each.record_exit(self._selector, survived if each.process in stuck else why)

    def _interrupted(self, workers: Sequence[WorkerHandle]) -> KeyboardInterrupt:
        self._end_call(workers)
        stood = []
        for each in workers:
            where = each.failure.line if each.failure else ""
            stood.append(f"rank {each.rank} {each.death or (f'was at {where}' if where else 'had finished the call')}")
        text = "\n".join(["interrupted", *(describe_output(line) for line in stood), *self._recover(workers)])
        error = KeyboardInterrupt(text)
        error._render_traceback_ = lambda: f"KeyboardInterrupt: {text}".split("\n")  # type: ignore[attr-defined]
        return error

    def _failed(self, workers: Sequence[WorkerHandle], found: Diagnosis | None) -> Exception:
        """Return the exception for a failed or aborted call. The message identifies the likely cause."""
        own = [each for each in workers if (each.failure or each.death) and not each.was_terminated]
        causes = [each for each in own if each.death or found is None or found.kind == "failed"]
        after = self._recover(workers)
        verdict = describe_output(str(found)) if found else ""
        if found is not None and not causes:
            story = "\n\n".join([verdict, *after])
            error = CollectiveError(story)
            error._render_traceback_ = lambda: f"CollectiveError: {story}".split("\n")  # type: ignore[attr-defined]
            return error
        first = min(own or workers, key=lambda each: each.cause_order)
        others = [each for each in workers if each is not first and (each.failure or each.death)]
        same = [each.rank for each in others if each.reason == first.reason]
        described = [
            f"rank {each.rank} {each.reason}" for each in others if each.rank not in same and not each.was_terminated
        ]
        meanwhile = [f"The same failure occurred on {named_ranks(same)}."] if same else []
        meanwhile += [f"Meanwhile {', '.join(described)}."] if described else []
        return self._error(first, "\n\n".join([*meanwhile, *([verdict] if verdict else []), *after]))

    def _error(self, each: WorkerHandle, others: str) -> RankError:
        if each.is_busy and not each.death:
            return RankTimeoutError(
                each.rank, f"did not join the process group within {GROUP_SECONDS:g} s", others=others
            )
        trace = describe_output(each.failure.traceback) if each.failure else ""
        raised = each.failure.raised if each.failure else None
        log = each.log.tail() if each.death else ""
        return RankError(each.rank, each.reason, trace, log, others, raised)

    def _recover(self, workers: Sequence[WorkerHandle]) -> list[str]:
        """Recover from a failed call, and return sentences that describe the recovery.

        If a rank has exited, the other ranks leave the process group. If a collective has failed, or the ranks have not
        finished the same collectives, the ranks form a new group as soon as they can communicate.
        """
        has_died = any(each.death for each in self._workers)
        if not has_died and (self.n == 1 or self._are_in_step(workers)):
            return []
        kept = {each.rank: each.outcome for each in workers}
        if has_died or self._place.outage:
            self._leave_group()
        else:
            self._form_group()
        for each in workers:
            each.outcome = kept[each.rank]
        if has_died:
            return [self._advice()]
        if not self._has_group:
            return [
                f"The ranks keep their variables, but have no process group, because {self._place.outage}. "
                "They form one at the first call after the cable is plugged in."
            ]
        return [
            "The ranks keep their variables, and have formed a new process group. Create objects that hold the old "
            "group, such as DistributedDataParallel, again."
        ]

    def _leave_group(self) -> None:
        self._has_group = False
        workers = self._begin("leave", on=[each for each in self._workers if not each.death])
        deadline = time.monotonic() + REACT_SECONDS
        while any(each.is_busy for each in workers) and self._receive(deadline - time.monotonic()):
            pass
        self._kill([each for each in workers if each.is_busy])

    def _are_in_step(self, workers: Sequence[WorkerHandle]) -> bool:
        """Return whether the ranks of each group have finished the same collectives and no collective has failed.

        The result is also False if a rank was woken from a collective. Such a rank may not report an error, because
        the interrupt may have arrived before gloo's error.
        """
        if any(each.was_woken or (each.failure and each.failure.in_collective) for each in workers):
            return False
        found = [each for each in self._ask("groups", ANSWER_SECONDS).values() if isinstance(each, Snapshot)]
        if len(found) < self.n or any(each.waits for each in found):
            return False
        members = {name: ranks for each in found for name, ranks in each.members.items()}
        return all(len({found[rank].steps.get(name) for rank in ranks}) == 1 for name, ranks in members.items())

    def _statuses(self) -> dict[int, RankStatus | None]:
        answers = self._ask("status", BUSY_SECONDS + ANSWER_SECONDS)
        return {rank: each if isinstance(each, RankStatus) else None for rank, each in answers.items()}

    def _ask(self, what: str, seconds: float) -> dict[int, Answer | None]:
        """Query all running ranks in parallel, even while they execute a call.

        A rank's answer is None if the rank does not reply within `seconds`.
        """
        self._question += 1
        number = self._question
        living = [each for each in self._workers if not each.death]
        for each in living:
            each.ask(what, number)
        deadline = time.monotonic() + seconds
        while any(each.answered != number and not each.death for each in living):
            if not self._receive(deadline - time.monotonic()):
                break
        return {each.rank: each.answer if each.answered == number else None for each in self._workers}

    def _receive(self, seconds: float | None) -> bool:
        """Wait for events from the ranks, and handle them. Return False after a timeout."""
        if seconds is not None and seconds < 0:
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data(self._selector)
        return bool(ready) or seconds is None or seconds > 0


@contextmanager
def _interrupts_recorded() -> Iterator[list[int]]:
    """Record interrupts inside the block instead of raising them, so that no message from a rank is truncated.

    A caller that handles an interrupt clears the yielded list. Otherwise, the interrupt is raised when the block exits.
    """
    interrupts: list[int] = []
    # Python delivers interrupts to the main thread only.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not in_main_thread or not callable(before):
        yield interrupts
        return
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
