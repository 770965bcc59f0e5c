"""Define the pool's handle for one rank. The handle contains the rank's process, pipes and current call."""

import os
import re
import selectors
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from ddp_tutorial.live.messages import Answer, Failure, MimeBundle, Snapshot
from ddp_tutorial.processes.console import Console, NotebookConsole, RankLog
from ddp_tutorial.processes.errors import Raised, lost_connection
from ddp_tutorial.processes.signals import signal_name
from ddp_tutorial.processes.spawn import exit_descriptor, has_exited, rename_cells, strip_noise
from ddp_tutorial.processes.transport import Outbox, Sender, take_messages

_PIECE = 1 << 16
# After this many reads, the output pipe of an exited rank is empty. Further output comes from its child processes.
_PIECES = 16


class WorkerHandle:
    """Handle for one rank, with the rank's process, pipes, current call and latest answer."""

    def __init__(self, rank: int) -> None:
        """Create a handle for a rank whose process has not started yet."""
        self.rank = rank
        self.process: Any = None
        self.started = False
        self.death = ""  # description of how the rank died; empty while the rank is alive
        self.number = 0  # number of the current call
        self.outcome: tuple[Any, ...] | None = ("done", None)
        self.was_terminated = False  # the pool interrupted the rank because of a different rank
        self.was_woken = False  # the rank's connections were closed to abort a collective
        self.asked = self.answered = 0  # sequence numbers of the last query and the last answer
        self.answer: Answer | None = None
        self._seen: Snapshot | None = None
        self._since = 0.0
        self._inbox = bytearray()
        self._pipes = ExitStack()
        self._exit: int | None = None  # a file descriptor that becomes readable when the process exits
        self._closed = False
        self._last_failure: Failure | None = None  # reported by `exit_with`, just before the process exits
        self._shown: list[MimeBundle] = []
        self.console = Console()
        self.log = RankLog(rank, self.console.line, describe_output)

    # ------------------------------------------------------------------------------------------------------- pipes

    def open_pipes(self, theirs: ExitStack) -> tuple[int, int, int, int]:
        """Create the pipes, and return the rank's ends in the order output, messages, requests, control.

        The exit stack `theirs` closes the rank's ends in this process.
        """
        ends = []
        for ours_reads in (True, True, False, False):
            read, write = os.pipe()
            ours, its = (read, write) if ours_reads else (write, read)
            self._pipes.callback(os.close, ours)
            theirs.callback(os.close, its)
            ends.append((ours, its))
        self._output, self._messages, requests, control = (ours for ours, _ in ends)
        for ours, _ in ends:
            os.set_blocking(ours, False)
        self._request, self._control = Outbox(requests), Sender(control)
        output, messages, its_requests, its_control = (its for _, its in ends)
        return output, messages, its_requests, its_control

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the rank's output pipe, message pipe and exit descriptor with `selector`."""
        self._exit = exit_descriptor(self.process)
        self._pipes.callback(os.close, self._exit)
        handlers: dict[int, Callable[..., object]] = {
            self._output: self._read_output,
            self._messages: self._read_messages,
            self._exit: self.reap,
        }
        for fd, handler in handlers.items():
            selector.register(fd, selectors.EVENT_READ, handler)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Close the pool's ends of the pipes. A rank that is still running exits when its control pipe is closed."""
        if self._closed:  # the descriptor numbers may have been reused
            return
        self._closed = True
        if self._exit is not None:
            for fd in (self._output, self._messages, self._exit):
                with suppress(KeyError, ValueError):
                    selector.unregister(fd)
            self._request.close(selector)
        self._pipes.close()

    def request(self, selector: selectors.BaseSelector, number: int, kind: str, *content: Any) -> None:
        """Queue a request to the rank's main thread. The request is sent once the pipe is writable."""
        if not self._closed:
            self._request.put((number, kind, *content), selector)

    def control(self, *message: Any) -> bool:
        """Send a message to the rank's control thread without blocking, and return whether it was sent.

        The message is not sent if the rank is dead, or if the pipe is full because the rank is suspended.
        """
        if not self._closed:
            with suppress(BrokenPipeError, BlockingIOError):
                self._control(*message)  # far shorter than PIPE_BUF, so it is written completely or not at all
                return True
        return False

    def ask(self, what: str, number: int) -> None:
        """Send the query "snapshot" or "status" to the rank's control thread. The answer contains `number`."""
        if self.control(what, number):
            self.asked = number

    # ------------------------------------------------------------------------------------------------------ a call

    def begin(self, number: int) -> None:
        """Begin call `number`, and discard the outcome of the previous call."""
        self.number, self.outcome = number, None
        self._seen, self._since = None, time.monotonic()

    def attach_console(self, console: Console) -> None:
        """Send the rank's output since the last call, and all later output, to `console`."""
        self.console, self._shown = console, []
        self.was_terminated = self.was_woken = False
        lines = self.log.lines  # printed since the last call
        self.log = RankLog(self.rank, console.line, describe_output)
        self.log.lines.extend(lines)

    def finish(self) -> RankLog:
        """Finish the call on this rank, and return the log of the rank's output."""
        self._drain()
        log, self.log = self.log, RankLog(self.rank, self.console.line, describe_output)
        return log

    def display_all(self) -> None:
        """Show all values that the rank has displayed in this call."""
        for bundle in self._shown:
            self.display(bundle, self.console)
        self._shown = []

    def display(self, bundle: MimeBundle, console: Console) -> None:
        """Show one value that this rank displayed, labeled with the rank's number."""
        if not isinstance(console, NotebookConsole):
            console.line(self.rank, bundle.text)
            return
        from IPython.display import display

        print(f"[rank {self.rank}]", flush=True)
        display(bundle.data, metadata=bundle.metadata, raw=True)

    @property
    def is_busy(self) -> bool:
        """Whether the rank is alive and has not finished its call."""
        return self.outcome is None and not self.death

    @property
    def value(self) -> Any:
        """The result or the `Failure` of the last call."""
        return self.outcome[1] if self.outcome else None

    @property
    def failure(self) -> Failure | None:
        """The failure of the last call, or None if the call succeeded or is still running."""
        return self.outcome[1] if self.outcome and self.outcome[0] == "raised" else None

    @property
    def reason(self) -> str:
        """A description of the rank's exception, or of its exit."""
        if self.failure:
            return f"raised {strip_noise(describe_output(str(self.failure.raised)))}"
        return self.death or "has finished the call"

    @property
    def cause_order(self) -> tuple[int, float]:
        """Sort key for failed ranks. The rank with the smallest key is the most likely cause of the failure.

        Exceptions other than lost connections come first, sorted by time, then exited ranks, then lost connections.
        """
        if self.failure is None:
            return (1 if self.death else 3), 0.0
        return (2 if lost_connection(self.failure.raised.message) else 0), self.failure.at

    def waited_for(self, now: float) -> float:
        """Return the time in seconds that this rank has waited in a collective, according to its last answer."""
        return now - self._since if self._seen is not None and self._seen.waits else 0.0

    # --------------------------------------------------------------------------------------------------- listening

    def _read_output(self, selector: selectors.BaseSelector | None = None) -> bool:
        return self._read(self._output, self.log.feed, selector)

    def _read_messages(self, selector: selectors.BaseSelector | None = None) -> bool:
        more = self._read(self._messages, self._inbox.extend, selector)
        for kind, *content in take_messages(self._inbox):
            match kind, content:
                case "started", _:
                    self.started = True
                case "progress", _ if self.rank == 0:
                    self.console.progress(*content)
                case "display", [number, bundle] if number == self.number:
                    self._shown.append(bundle)
                case (("done" | "raised"), [number, value]) if number == self.number:
                    self.outcome = (kind, value)
                case "raised", [Raised() as raised, trace, at]:
                    self._last_failure = Failure(raised, trace, at)
                case "answer", [number, answer]:
                    self.answered, self.answer = number, answer
                    if isinstance(answer, Snapshot) and answer != self._seen:
                        self._seen, self._since = answer, time.monotonic()
        return more

    def _read(self, fd: int, take: Callable[[bytes], object], selector: selectors.BaseSelector | None) -> bool:
        if self._closed:
            return False
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return False
        if not data and selector is not None:
            with suppress(KeyError, ValueError):
                selector.unregister(fd)
        take(data)
        return bool(data)

    def _drain(self) -> None:
        """Read the output written so far. Later output of the rank's child processes belongs to the next call."""
        for _ in range(_PIECES):
            if not self._read_output():
                break
        self.log.feed(b"", final=True)

    def reap(self, selector: selectors.BaseSelector) -> None:
        """Record the exit of the rank's process."""
        if not has_exited(self.process):  # a debugger or strace may delay the exit code
            time.sleep(0.01)
            return
        code = self.process.exitcode
        self.record_exit(selector, f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}")

    def record_exit(self, selector: selectors.BaseSelector, death: str) -> None:
        """Read the remaining data from the pipes, close them, and record how the rank died."""
        if self.death:
            return
        while self._read_messages():
            pass
        self._drain()
        if self._last_failure:
            self.outcome = ("raised", self._last_failure)
        self.death = death
        self.close(selector)


def describe_output(text: str) -> str:
    """Replace the file names of cells in an error text with the labels that the notebook shows."""
    return re.sub(r'File "((?:Cell In\[\d+\]|call \d+))"', r"\1", rename_cells(text))
