"""Run a function on several ranks, from a notebook cell, a script or `python -c`.

    def hello(world):
        return world.rank, dist.get_world_size()

    launch(hello, 2)   # [(0, 2), (1, 2)]

The processes are started by `torch.multiprocessing.spawn`. This module adds what that lacks:

- `fn` and its arguments are sent by value, so lambdas, closures and functions of a cell work. A script is imported by
  every rank instead, as torchrun's ranks run it; see `script`.
- The parent hosts the store where ranks meet, on a port that the system chose and on the loopback interface only,
  and sets the variables that torchrun sets. A rank runs the same code here and on a cluster.
- Each rank has two pipes to the parent. One takes file descriptors 1 and 2, so that whatever the rank, its
  children or C++ code print stays in order and has a name on it; the other carries progress, result and error.
- The parent waits on all ranks at once. When one raises, dies or leaves, all are ended; also when the time limit is
  reached (each rank reports first where it stands) and on an interrupt.
- A rank never outlives its parent.
"""

import inspect
import os
import pickle
import secrets
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from tempfile import TemporaryFile
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.collectives import RankZeroFailedError
from ddp_tutorial.environment import cores
from ddp_tutorial.processes.console import Console, RankLog, make_console
from ddp_tutorial.processes.errors import Raised, RankError, RankTimeoutError, lost_connection
from ddp_tutorial.processes.logs import current_logging
from ddp_tutorial.processes.rank import RankJob, run_rank
from ddp_tutorial.processes.script import MissingGuardError, Script, require_guard
from ddp_tutorial.processes.signals import StoppedError, handling
from ddp_tutorial.processes.spawn import (
    MARK,
    announce,
    cannot_be_killed,
    cell_sources,
    environment,
    exit_descriptor,
    has_exited,
    interrupts_deferred,
    loopback_store,
    main_module_hidden,
    oversubscription_warning,
    rank_environment,
    rename_cells,
    strip_noise,
    terminate_all,
)
from ddp_tutorial.processes.transport import Descriptor, dump_call, take_messages
from ddp_tutorial.world import COLLECTIVE_TIMEOUT, World, choose_backend, choose_device

Result = TypeVar("Result")

# When one rank has failed, the others are given this long to fail too, so that cause and effect can be told apart.
GRACE_SECONDS = 0.3
# When ranks have only heard that rank 0 has failed, it has this long to say how. It may still be closing files.
RANK_ZERO_SECONDS = 5.0
# How long ranks have to start, beside their time limit: Python has to import torch, on a machine that may be busy.
START_SECONDS = 120.0
# How long ranks have to say where they stand when the time is up.
REPORT_SECONDS = 2.0
# A pipe holds 64 KiB on Linux; what is left in that of a rank that has ended is read in a few pieces of that size. More
# can only come from a process that it has started, and which still writes.
_PIPE_PIECES = 16


def launch(
    fn: Callable[..., Result],
    nprocs: int,
    *args: Any,
    device: str = "auto",
    backend: str = "auto",
    timeout: float | None = None,
    collective_timeout: float = COLLECTIVE_TIMEOUT.total_seconds(),
    threads: int | None = None,
    echo: bool = True,
    in_process: bool = False,
    forward_signals: Sequence[signal.Signals] = (),
) -> list[Result]:
    """Run `fn(world, *args)` on `nprocs` ranks and return their results, rank 0's first.

    Call it from the main thread, the only one that Python interrupts; launches of other threads, several at a time,
    run to their end. Inside `fn` the process group is up (a single rank has none), and `progress` moves the bar that
    the parent shows.

    In a script, call it under `if __name__ == "__main__":`. Every rank imports the script first, so what the script
    does at its top level, such as `torch.manual_seed(0)`, holds in every rank, as under torchrun. What it does under
    the guard happens in this process only: pass on as `args` what ranks need of it. The functions of a notebook, of
    `python -c` and of an interactive session are sent by value, with the global variables that they use.

    - `device`: "cpu", "cuda" or "auto": a GPU for each rank with NCCL if there are enough, else CPU and gloo.
    - `backend`: "gloo", "nccl" or "auto": what fits the device. With device "cuda" and gloo, ranks may share a GPU.
    - `timeout`: seconds until every rank must have returned, counted from when all have started, for which they have
      two minutes. By default there is no limit, as training takes as long as it takes. With one, a launch that hangs
      raises `RankTimeoutError`, which reports the line that each rank is executing.
    - `collective_timeout`: seconds that a rank waits in a collective for the others, ten minutes by default. Then it
      raises, with and without `timeout`.
    - `threads`: torch's threads in each rank; by default the cores of this machine shared out evenly.
    - `echo`: show what the ranks print, their progress, and which device was chosen.
    - `in_process`: with `nprocs=1`, call `fn` in this process. Its exceptions then arrive as they were raised;
      `timeout` and `threads` have no effect.
    - `forward_signals`: signals, such as SIGTERM, that this process sends on to the ranks instead of ending at once.

    Processes that the ranks have started are ended with them, after a success too: a launch leaves none behind. Only
    where this process is killed by SIGKILL, the ranks die with it, but nobody is left to end what they have started
    (workers of a DataLoader end by themselves).

    Raises `RankError` (`RankTimeoutError` at the limit) when a rank fails, after all have been ended; `StoppedError`
    where a signal that was passed on has ended ranks, because they did not handle it or not yet; and `ValueError` or
    `TypeError` for arguments that cannot be used, before anything is started. Raises `MissingGuardError` if a script
    calls `launch` at its top level.
    """
    require_guard("launch")
    _check(fn, nprocs, timeout, collective_timeout, threads, in_process)
    _check_call(fn, args)
    kind = choose_device(device, local_size=nprocs, backend=backend)
    carrier = choose_backend(backend, kind)
    console = make_console(echo)
    if device == "auto":
        console.message(announce(nprocs, kind.type, carrier))
    if warning := oversubscription_warning(nprocs, kind.type, cores()):
        console.message(warning)
    if in_process:
        console.close([])
        return [fn(World.detect({}, device=kind.type, backend=carrier), *args)]
    script = Script.of_this_process()
    call = dump_call(fn, args, script)
    ranks = _Ranks(nprocs, console)
    try:
        with handling(forward_signals, ranks.forward_signal), ranks:
            ranks.start(call, script, kind.type, carrier, collective_timeout, threads or max(1, cores() // nprocs))
            ranks.wait(timeout)
            return ranks.results()
    except RankError as error:
        if error.is_a(MissingGuardError):
            raise MissingGuardError(error.message) from None
        raise
    except KeyboardInterrupt as interrupt:  # a notebook shows this, and none of the frames in here
        told = ["KeyboardInterrupt: interrupted; all ranks have been ended", *getattr(interrupt, "__notes__", [])]
        interrupt._render_traceback_ = lambda: told  # type: ignore[attr-defined]
        raise


def _check(
    fn: object,
    nprocs: object,
    timeout: float | None,
    collective_timeout: float,
    threads: int | None,
    in_process: bool,
) -> None:
    if not callable(fn):
        raise TypeError(f"launch(fn, nprocs): fn should be a function, found {fn!r}")
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"nprocs={nprocs!r}: should be a whole number of ranks, 1 or more, such as nprocs=2")
    if not collective_timeout > 0:
        raise ValueError(f"collective_timeout={collective_timeout!r}: should be a positive number of seconds")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"timeout={timeout!r}: should be a positive number of seconds, or None for no limit")
    if threads is not None and not (isinstance(threads, int) and threads >= 1):
        raise ValueError(f"threads={threads!r}: should be 1 or more, or None to share out the cores")
    if in_process and nprocs != 1:
        raise ValueError(f"in_process=True runs one rank, found nprocs={nprocs}. Use nprocs=1, or leave it out.")


def _check_call(fn: Callable[..., object], args: Sequence[object]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of some built-in functions nobody knows it
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        given = "".join(f", {type(arg).__name__}" for arg in args)
        raise TypeError(
            f"a rank calls {name}(world{given}), and {name}{signature} cannot be called so: {error}. What ranks run "
            "takes `world` first, then what launch is given after the number of ranks."
        ) from None


@dataclass
class _Rank:
    """One rank as its parent sees it: its process, its two pipes, and its result or error."""

    rank: int
    process: Any
    exit: int  # a descriptor that becomes readable when the process exits
    output: int
    messages: int
    log: RankLog
    inbox: bytearray = field(default_factory=bytearray)
    started: bool = False
    result: bytes | None = None
    raised: Raised | None = None
    traceback: str = ""
    raised_at: float = 0.0  # on the machine's monotonic clock
    report: str | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.raised is not None or (self.exit_code is not None and self.result is None)

    @property
    def repeats_rank_zero_error(self) -> bool:
        """It has raised because rank 0 told it of its own failure: the cause is rank 0's."""
        return self.raised is not None and self.raised.is_a(RankZeroFailedError)

    @property
    def lost_connection(self) -> bool:
        return self.raised is not None and lost_connection(self.raised.message)

    @property
    def cause_order(self) -> tuple[int, float]:
        """For finding the cause among several failures: what a rank raised by itself, in order of time; then ranks that
        died without an error; then those that lost the connection to another; last those that heard of rank 0."""
        if self.raised is None:
            return 1, 0.0
        return (3 if self.repeats_rank_zero_error else 2 if self.lost_connection else 0), self.raised_at

    @property
    def reason(self) -> str:
        if self.raised is not None:
            return f"raised {strip_noise(str(self.raised))}"
        if self.result is not None:
            return "had returned"
        if self.exit_code is None:
            return "was still running"
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        when = "before it returned a result" if self.started else "before it reached your function"
        return f"exited with code {self.exit_code} {when}"


class _Ranks:
    """All ranks of one launch: started, listened to, and ended when the block ends, however it does."""

    def __init__(self, nprocs: int, console: Console) -> None:
        self.nprocs = nprocs
        self.console = console
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.store: dist.TCPStore | None = None
        self.reading = ExitStack()  # our ends of the ranks' pipes
        self.mark = secrets.token_hex(8)
        # The ranks hold the other end; when this one is closed, they report where they stand.
        self.lifeline: int | None = None
        self.signalled: int | None = None  # the last signal that was passed on

    def __enter__(self) -> None:
        pass

    def start(
        self, call: bytes, script: Script | None, device: str, backend: str, collective_timeout: float, threads: int
    ) -> None:
        self.store = store = loopback_store(self.nprocs)  # it has to live as long as the ranks
        environ = {**rank_environment(self.nprocs, threads, store.port if store else 0), MARK: self.mark}
        environ |= self.console.environment
        with ExitStack() as parents_copies, interrupts_deferred(), main_module_hidden(), environment(environ):
            outputs, messages = ([self._pipe(parents_copies) for _ in range(self.nprocs)] for _ in range(2))
            lifeline, self.lifeline = os.pipe()
            parents_copies.callback(os.close, lifeline)
            call_file = parents_copies.enter_context(TemporaryFile())  # nameless: it vanishes with its last user
            call_file.write(call)
            call_file.flush()
            job = RankJob(
                outputs=[Descriptor(write) for _, write in outputs],
                messages=[Descriptor(write) for _, write in messages],
                lifeline=Descriptor(lifeline),
                call=Descriptor(call_file.fileno()),
                threads=threads,
                device=device,
                backend=backend,
                collective_timeout=timedelta(seconds=collective_timeout),
                script=script,
                sources=cell_sources(),
                logs=current_logging(),
                parent=os.getpid(),
                # the signal of a parent's death is bound to the thread that started the child
                dies_with_thread=threading.current_thread() is threading.main_thread(),
            )
            processes = torch.multiprocessing.spawn(run_rank, (job,), self.nprocs, join=False).processes
            for rank, process in enumerate(processes):
                log = RankLog(rank, self.console.line, rename_cells)  # a warning may name lines of a cell
                exit_fd = exit_descriptor(process)
                self.reading.callback(os.close, exit_fd)
                self._listen(_Rank(rank, process, exit_fd, outputs[rank][0], messages[rank][0], log))
        if self.signalled:  # meanwhile
            self.forward_signal(self.signalled, None)

    def _pipe(self, parents_copies: ExitStack) -> tuple[int, int]:
        """Its end for reading, open until all is over, and for writing, which ranks inherit."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self.reading.callback(os.close, read)
        parents_copies.callback(os.close, write)
        return read, write

    def _listen(self, rank: _Rank) -> None:
        self.ranks.append(rank)
        for fd, handle in (
            (rank.output, self._read_output),
            (rank.messages, self._read_messages),
            (rank.exit, self._reap),
        ):
            self.selector.register(fd, selectors.EVENT_READ, partial(handle, rank))

    def wait(self, timeout: float | None) -> None:
        """Listen until all ranks have returned and ended; raise for the first that fails."""
        deadline = None if timeout is None else time.monotonic() + START_SECONDS + timeout
        are_up = False
        while self._running() and not any(rank.failed for rank in self.ranks):
            if timeout is not None and not are_up and all(rank.started for rank in self.ranks):
                are_up, deadline = True, time.monotonic() + timeout
            if not self._listen_until(deadline):
                raise self._timed_out(timeout)
        self._listen_while(lambda: True, GRACE_SECONDS)
        self._listen_while(self._cause_is_missing, RANK_ZERO_SECONDS)
        failed = [rank for rank in self.ranks if rank.failed]
        if self.signalled and any(rank.exit_code == -self.signalled for rank in failed):
            raise StoppedError(self.signalled)
        if failed:
            raise self._failure(min(failed, key=lambda rank: rank.cause_order))

    def _listen_while(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and condition() and self._listen_until(deadline):
            pass

    def _cause_is_missing(self) -> bool:
        """Ranks have failed, but only because rank 0 has, and that one has not said how."""
        return all(rank.repeats_rank_zero_error for rank in self.ranks if rank.failed)

    def forward_signal(self, number: int, frame: object) -> None:
        """Send every rank the signal that this process has been sent."""
        self.signalled = number
        for rank in self._running():
            with suppress(ProcessLookupError):  # it is just being reaped
                os.kill(rank.process.pid, number)

    def results(self) -> list[Any]:
        """What the ranks returned, rebuilt in this process."""
        values = []
        for rank in self.ranks:
            if rank.exit_code:
                self.console.message(f"rank {rank.rank} returned its result, but then ended with code {rank.exit_code}")
            try:
                values.append(pickle.loads(rank.result or b""))
            except Exception as error:
                why = f"returned a value that cannot be rebuilt here: {type(error).__name__}: {error}"
                raise RankError(rank.rank, why) from error
        return values

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End what still runs, then show what was printed. An interrupt waits: cut short, this would leave ranks.

        The error that ends the launch gets a note for each process that cannot be killed.
        """
        with interrupts_deferred():
            stuck = terminate_all([rank.process for rank in self.ranks], self.mark)
            for rank in self.ranks:
                self._reap(rank)
                if error is not None and rank.process in stuck:
                    error.add_note(cannot_be_killed(rank.rank, rank.process.pid))
            self.selector.close()
            self.reading.close()
            self.store = None
            self._let_go_of_lifeline()
            self.console.close([rank.log for rank in self.ranks])

    def _running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def _listen_until(self, deadline: float | None) -> bool:
        """Handle what has arrived, or wait for it. False when the deadline has passed."""
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            return False
        for key, _ in self.selector.select(remaining):
            key.data()
        return True

    def _read_output(self, rank: _Rank) -> bool:
        return self._drain(rank.output, rank.log.feed)

    def _read_messages(self, rank: _Rank) -> bool:
        more = self._drain(rank.messages, rank.inbox.extend)
        for kind, *content in take_messages(rank.inbox):
            match kind:
                case "started":
                    rank.started = True
                case "progress" if rank.rank == 0:
                    self.console.progress(*content)
                case "figure":
                    self.console.figure(rank.rank, content[0])
                case "result":
                    rank.result = content[0]
                case "raised":
                    raised, trace, rank.raised_at = content
                    rank.raised = replace(raised, message=rename_cells(raised.message))  # it may name lines of a cell
                    rank.traceback = rename_cells(trace)
                case "report":
                    rank.report = rename_cells(content[0])
        return more

    def _drain(self, fd: int, take: Callable[[bytes], object]) -> bool:
        """Read one piece; a flood of output must not keep the parent from all else. False if there was nothing."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:  # the other side has closed it: stop watching
            with suppress(KeyError):
                self.selector.unregister(fd)
        take(data)
        return bool(data)

    def _reap(self, rank: _Rank) -> None:
        """Record the exit of the rank's process, and read what is left in its pipes.

        Does not wait for the pipes to be closed: children of the rank may hold them open.
        """
        if rank.exit_code is not None:
            return
        while self._read_messages(rank):
            pass
        for _ in range(_PIPE_PIECES):
            if not self._read_output(rank):
                break
        if not has_exited(rank.process):  # a debugger or strace may hold the exit code back for a while
            time.sleep(0.01)
            return
        rank.log.feed(b"", final=True)
        rank.exit_code = rank.process.exitcode
        self.selector.unregister(rank.exit)

    def _failure(self, first: _Rank) -> RankError:
        others = [f"rank {rank.rank} {rank.reason}" for rank in self.ranks if rank is not first]
        note = f"Meanwhile {', '.join(others)}." if others else ""
        if first.lost_connection and any(rank.result is not None for rank in self.ranks):
            note += (
                " A rank that returns closes its connections: every rank must enter every collective, with tensors of "
                "one size. With TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment, torch names sizes that differ."
            )
        trace = strip_noise(first.traceback)
        return RankError(first.rank, first.reason, trace, first.log.tail(), note, first.raised)

    def _timed_out(self, timeout: float | None) -> RankTimeoutError:
        late = self._running()
        self._let_go_of_lifeline()
        deadline = time.monotonic() + REPORT_SECONDS
        while any(rank.report is None for rank in self._running()) and self._listen_until(deadline):
            pass
        stories = []
        for rank in self.ranks:
            silent = "  no answer: not up yet, stopped, or busy in native code"
            stood = (rank.report or silent).rstrip() if rank in late else ""
            stories.append(f"rank {rank.rank} {rank.reason}\n{stood}".rstrip())
        # the rank to name is one that is not waiting for the others
        first = min(late, key=lambda rank: (rank.result is not None, ": waiting" in (rank.report or "")))
        running = ", ".join(str(rank.rank) for rank in late)
        reason = f"did not end within {timeout:g} s (still running: rank {running})"
        return RankTimeoutError(first.rank, reason, "\n\n".join(stories), first.log.tail())

    def _let_go_of_lifeline(self) -> None:
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None
