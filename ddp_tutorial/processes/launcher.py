"""Run a function on several ranks, from a notebook cell, a script or `python -c`.

    def hello(world):
        return world.rank, dist.get_world_size()

    launch(hello, 2)   # [(0, 2), (1, 2)]

`torch.multiprocessing.spawn` starts the processes. This module adds the following features:

- `fn` and its arguments are pickled by value, so lambdas, closures and functions from a notebook cell work. A script's
  functions are not pickled by value, because every rank imports the script, as under torchrun (see `script`).
- The parent hosts the rendezvous store on the loopback interface, on a port chosen by the operating system. The parent
  sets the same environment variables as torchrun, so the same code runs on this machine and on a cluster.
- Two pipes connect each rank to the parent. The first pipe replaces file descriptors 1 and 2, and captures the output
  of the rank, its child processes and C++ code in order. The parent can therefore attribute each line to a rank. The
  second pipe carries progress, the result and errors.
- The parent monitors all ranks simultaneously. If a rank raises an exception, crashes or exits early, the parent
  terminates all ranks, as it does after an interrupt or a timeout. After a timeout, each rank first reports its stack.
- A rank never outlives its parent.
"""

import inspect
import math
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
from ddp_tutorial.processes.signals import StoppedError, handling, signal_name
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

# After the first failure, the parent waits this long for failures of other ranks, to distinguish cause from effect.
GRACE_SECONDS = 0.3
# If ranks report only that rank 0 failed, the parent waits this long for rank 0's own error. Rank 0 may still be
# closing files.
RANK_ZERO_SECONDS = 5.0
# Seconds that ranks may take to start, in addition to the timeout. Importing torch is slow on a busy machine.
START_SECONDS = 120.0
# Seconds between two updates of the elapsed time that the console shows.
TICK_SECONDS = 1.0
# Seconds that ranks have to report their stacks after a timeout.
REPORT_SECONDS = 2.0
# Number of 64 KiB reads from the output pipe of a rank that has exited. A pipe holds 64 KiB on Linux, so more output
# can only come from a child process that is still writing.
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
    """Run `fn(world, *args)` on `nprocs` ranks, and return their results in rank order.

    Inside `fn`, the process group is initialized (unless `nprocs` is 1), and `progress` updates the progress bar that
    the parent shows. Call `launch` from the main thread, because Python delivers interrupts to the main thread only.
    Several threads may call `launch` at the same time, but an interrupt stops only the launch in the main thread.

    In a script, call `launch` under `if __name__ == "__main__":`. Every rank first imports the script. Top-level
    statements such as `torch.manual_seed(0)` therefore take effect in every rank, as under torchrun. Statements under
    the guard run in the parent only, so pass their results to the ranks as `args`. Functions from a notebook, from
    `python -c` or from an interactive session are pickled by value, together with the global variables that they use.

    Before `launch` returns or raises an error, it terminates all processes that the ranks started. If this process is
    killed by SIGKILL, the ranks are killed as well, but processes that the ranks started may survive. `DataLoader`
    workers exit when they detect that their rank has exited.

    Args:
        fn: Function to run on every rank, with the rank's `World` as its first argument.
        nprocs: Number of ranks.
        *args: Additional arguments for `fn`.
        device: "cpu", "cuda" or "auto". "auto" uses one GPU per rank with NCCL if there are enough GPUs, and otherwise
            the CPU with gloo.
        backend: "gloo", "nccl" or "auto". "auto" chooses the backend for the device. With `device="cuda"` and gloo,
            several ranks may share a GPU.
        timeout: Timeout in seconds for `fn` to return on all ranks. Startup may take up to two additional minutes.
            `None` means no timeout. After a timeout, `launch` raises a `RankTimeoutError` that reports the line each
            rank is executing.
        collective_timeout: Timeout in seconds for each collective, after which the waiting ranks raise an error.
            `collective_timeout` applies whether or not `timeout` is set. The default is ten minutes.
        threads: Number of torch threads per rank. By default, the ranks share this machine's cores evenly.
        echo: Whether to show the ranks' output and progress, and the chosen device.
        in_process: Whether to call `fn` in this process, which requires `nprocs=1`. In this mode, exceptions are not
            wrapped, and `timeout` and `threads` have no effect.
        forward_signals: Signals, such as SIGTERM, that this process forwards to the ranks instead of handling them.

    Returns:
        The results of `fn`, in rank order. Tensors in the results are moved to the CPU, except with `in_process`.

    Raises:
        RankError: If a rank failed. All ranks have been terminated.
        RankTimeoutError: If the ranks did not return within `timeout`.
        StoppedError: If a forwarded signal terminated ranks that had not installed a handler for it.
        ValueError: If an argument is invalid. No process has started.
        TypeError: If `fn` cannot be called with these arguments, or if `fn` or an argument cannot be pickled. No
            process has started.
        MissingGuardError: If a script calls `launch` at its top level.
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
    except KeyboardInterrupt as interrupt:  # notebooks show this text without the frames of this module
        lines = ["KeyboardInterrupt: interrupted; all ranks have been terminated", *getattr(interrupt, "__notes__", [])]
        interrupt._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
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
        raise TypeError(f"launch(fn, nprocs): 'fn' must be a function, got {fn!r}")
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"'nprocs' must be a positive integer such as 2, got {nprocs!r}")
    if not 0 < collective_timeout < math.inf:
        raise ValueError(f"'collective_timeout' must be a positive number of seconds, got {collective_timeout!r}")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"'timeout' must be a positive number of seconds, or None for no timeout, got {timeout!r}")
    if threads is not None and not (isinstance(threads, int) and threads >= 1):
        raise ValueError(f"'threads' must be a positive integer, or None to divide the cores evenly, got {threads!r}")
    if in_process and nprocs != 1:
        raise ValueError(f"'nprocs' must be 1 with in_process=True, got {nprocs}. Use nprocs=1, or omit in_process.")


def _check_call(fn: Callable[..., object], args: Sequence[object]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        given = "".join(f", {type(arg).__name__}" for arg in args)
        raise TypeError(
            f"each rank calls {name}(world{given}), but {name}{signature} does not accept these arguments: {error}. "
            "The first parameter must be `world`, and the others must match launch's arguments after nprocs."
        ) from None


@dataclass
class _Rank:
    """The parent's handle for a rank, which contains the rank's process, two pipes, and result or error."""

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
    raised_at: float = 0.0  # time.monotonic(), which all processes of a machine share
    report: str | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank raised an exception, or exited without a result."""
        return self.raised is not None or (self.exit_code is not None and self.result is None)

    @property
    def repeats_rank_zero_error(self) -> bool:
        """Whether the rank raised an error only because rank 0 reported its own failure."""
        return self.raised is not None and self.raised.is_a(RankZeroFailedError)

    @property
    def lost_connection(self) -> bool:
        """Whether the rank raised an error because it lost the connection to a different rank."""
        return self.raised is not None and lost_connection(self.raised.message)

    @property
    def cause_order(self) -> tuple[int, float]:
        """Sort key for failed ranks. The rank with the smallest key is the most likely cause of the failure.

        Ranks whose exception was not caused by a different rank come first, sorted by time. Next come ranks that
        exited without an exception, then ranks that lost a connection, and finally ranks that repeat rank 0's error.
        """
        if self.raised is None:
            return 1, 0.0
        return (3 if self.repeats_rank_zero_error else 2 if self.lost_connection else 0), self.raised_at

    @property
    def reason(self) -> str:
        """A description of the rank's state, such as "raised ValueError: no disk"."""
        if self.raised is not None:
            return f"raised {strip_noise(str(self.raised))}"
        if self.result is not None:
            return "had returned"
        if self.exit_code is None:
            return "was still running"
        if self.exit_code < 0:
            return f"was killed by {signal_name(-self.exit_code)}"
        when = "before it returned a result" if self.started else "before it reached your function"
        return f"exited with code {self.exit_code} {when}"


class _Ranks:
    """Context manager that terminates the ranks of one launch when the block exits."""

    def __init__(self, nprocs: int, console: Console) -> None:
        self.nprocs = nprocs
        self.console = console
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.store: dist.TCPStore | None = None
        self.reading = ExitStack()  # the parent's ends of the ranks' pipes
        self.mark = secrets.token_hex(8)
        # The ranks hold the other end. When the parent closes this end, they report their stacks.
        self.lifeline: int | None = None
        self.signalled: int | None = None  # the last forwarded signal

    def __enter__(self) -> None:
        """Do nothing. The method `start` starts the ranks, and `__exit__` terminates them."""

    def start(
        self, call: bytes, script: Script | None, device: str, backend: str, collective_timeout: float, threads: int
    ) -> None:
        """Start the ranks, and register their pipes and exit descriptors with the selector."""
        self.console.status("starting one rank" if self.nprocs == 1 else f"starting {self.nprocs} ranks")
        self.store = store = loopback_store(self.nprocs)  # kept open for as long as the ranks run
        environ = {**rank_environment(self.nprocs, threads, store.port if store else 0), MARK: self.mark}
        environ |= self.console.environment
        with ExitStack() as parents_copies, interrupts_deferred(), main_module_hidden(), environment(environ):
            outputs, messages = ([self._pipe(parents_copies) for _ in range(self.nprocs)] for _ in range(2))
            lifeline, self.lifeline = os.pipe()
            parents_copies.callback(os.close, lifeline)
            call_file = parents_copies.enter_context(TemporaryFile())  # deleted when the last process closes it
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
                # The parent-death signal is sent when the thread that started the child exits.
                dies_with_thread=threading.current_thread() is threading.main_thread(),
            )
            processes = torch.multiprocessing.spawn(run_rank, (job,), self.nprocs, join=False).processes
            for rank, process in enumerate(processes):
                log = RankLog(rank, self.console.line, rename_cells)  # warnings may contain the file names of cells
                exit_fd = exit_descriptor(process)
                self.reading.callback(os.close, exit_fd)
                self._listen(_Rank(rank, process, exit_fd, outputs[rank][0], messages[rank][0], log))
        if self.signalled:  # a signal arrived while the ranks were starting
            self.forward_signal(self.signalled, None)

    def _pipe(self, parents_copies: ExitStack) -> tuple[int, int]:
        """Create a pipe, and return its read end and its write end.

        The read end stays open until the launch has finished. The ranks inherit the write end.
        """
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
        """Handle events until all ranks have exited or a rank has failed. If a rank has failed, raise an error."""
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
        """Return whether every failure detected so far repeats an error that rank 0 has not reported yet."""
        return all(rank.repeats_rank_zero_error for rank in self.ranks if rank.failed)

    def forward_signal(self, number: int, frame: object) -> None:
        """Forward a received signal to every running rank."""
        self.signalled = number
        for rank in self._running():
            with suppress(ProcessLookupError):  # it has just exited
                os.kill(rank.process.pid, number)

    def results(self) -> list[Any]:
        """Unpickle and return the ranks' results."""
        values = []
        for rank in self.ranks:
            if rank.exit_code:
                self.console.message(
                    f"rank {rank.rank} returned its result, but then exited with code {rank.exit_code}"
                )
            try:
                values.append(pickle.loads(rank.result or b""))
            except Exception as error:
                why = f"returned a value that the parent process cannot unpickle: {type(error).__name__}: {error}"
                raise RankError(rank.rank, why) from error
        return values

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Terminate the remaining processes, then show the output.

        Interrupts are deferred, because an interrupted cleanup would leave ranks running. If `launch` raises an
        error, a note is added to the error for each process that cannot be killed.
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
            self._close_lifeline()
            self.console.close([rank.log for rank in self.ranks])

    def _running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def _listen_until(self, deadline: float | None) -> bool:
        """Wait at most one second for events, and handle them. Return False if the deadline has passed."""
        remaining = TICK_SECONDS if deadline is None else min(TICK_SECONDS, deadline - time.monotonic())
        if remaining <= 0:
            return False
        for key, _ in self.selector.select(remaining):
            key.data()
        self.console.tick()
        return True

    def _read_output(self, rank: _Rank) -> bool:
        return self._drain(rank.output, rank.log.feed)

    def _read_messages(self, rank: _Rank) -> bool:
        more = self._drain(rank.messages, rank.inbox.extend)
        for kind, *content in take_messages(rank.inbox):
            match kind:
                case "started":
                    rank.started = True
                    if all(each.started for each in self.ranks):
                        self.console.status("running")
                case "progress" if rank.rank == 0:
                    self.console.progress(*content)
                case "figure":
                    self.console.figure(rank.rank, content[0])
                case "result":
                    rank.result = content[0]
                case "raised":
                    raised, trace, rank.raised_at = content
                    # The message may contain the file names of cells.
                    rank.raised = replace(raised, message=rename_cells(raised.message))
                    rank.traceback = rename_cells(trace)
                case "report":
                    rank.report = rename_cells(content[0])
        return more

    def _drain(self, fd: int, take: Callable[[bytes], object]) -> bool:
        """Read at most 64 KiB, so that a flood of output cannot block the parent. Return whether data was read."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:  # the other side has closed the pipe
            with suppress(KeyError):
                self.selector.unregister(fd)
        take(data)
        return bool(data)

    def _reap(self, rank: _Rank) -> None:
        """Record that the rank's process has exited, and read the remaining data from the rank's pipes.

        The method does not wait until the pipes are closed, because child processes of the rank may keep them open.
        """
        if rank.exit_code is not None:
            return
        while self._read_messages(rank):
            pass
        for _ in range(_PIPE_PIECES):
            if not self._read_output(rank):
                break
        if not has_exited(rank.process):  # a debugger or strace may delay the exit code
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
                " A rank that returns closes its connections. Every rank must enter every collective, with tensors of "
                "the same size. With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch reports sizes that differ."
            )
        trace = strip_noise(first.traceback)
        return RankError(first.rank, first.reason, trace, first.log.tail(), note, first.raised)

    def _timed_out(self, timeout: float | None) -> RankTimeoutError:
        late = self._running()
        self._close_lifeline()
        deadline = time.monotonic() + REPORT_SECONDS
        while any(rank.report is None for rank in self._running()) and self._listen_until(deadline):
            pass
        stories = []
        for rank in self.ranks:
            silent = "  The rank did not respond: it is still starting, is stopped, or is busy in native code."
            stood = (rank.report or silent).rstrip() if rank in late else ""
            stories.append(f"rank {rank.rank} {rank.reason}\n{stood}".rstrip())
        # Prefer a rank that has not returned and is not waiting in a collective.
        first = min(late, key=lambda rank: (rank.result is not None, ": waiting" in (rank.report or "")))
        running = ", ".join(str(rank.rank) for rank in late)
        reason = f"did not finish within {timeout:g} s (still running: rank {running})"
        return RankTimeoutError(first.rank, reason, "\n\n".join(stories), first.log.tail())

    def _close_lifeline(self) -> None:
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None
