"""One rank as its pool sees it: its process, its pipes, and what has come of the call it is in."""

import os
import re
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from ddp_tutorial.live.messages import Answer, Failure, MimeBundle, Snapshot
from ddp_tutorial.processes.console import Console, NotebookConsole, RankLog
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.processes.spawn import exit_descriptor, has_exited, rename_cells, strip_noise
from ddp_tutorial.processes.transport import Outbox, Sender, take_messages

_PIECE = 1 << 16
# What is left in the pipe of a rank that has ended is read in so many pieces; more comes from its children.
_PIECES = 16


class WorkerHandle:
    """A rank: what it was asked, and what it has said."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.process: Any = None
        self.started = False
        self.death = ""  # how, in words, once it is dead
        self.number = 0  # of the call
        self.outcome: tuple[Any, ...] | None = ("done", None)
        self.was_terminated = False  # by an interrupt of the pool, for what another has done
        self.was_woken = False  # from a collective: its connections to the others are closed
        self.asked = self.answered = 0  # numbers of the last question and of the last answer
        self.answer: Answer | None = None
        self._seen: Snapshot | None = None
        self._since = 0.0
        self._inbox = bytearray()
        self._pipes = ExitStack()
        self._exit: int | None = None  # a descriptor that becomes readable when the process exits
        self._closed = False
        self._shown: list[MimeBundle] = []
        self.console = Console()
        self.log = RankLog(rank, self.console.line, describe_output)

    # ------------------------------------------------------------------------------------------------------- pipes

    def open_pipes(self, theirs: ExitStack) -> tuple[int, int, int, int]:
        """The rank's ends of its pipes, which `theirs` closes here: output, messages, requests, control."""
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
        """Have `selector` handle what the rank prints and sends, and its exit."""
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
        """Close the pool's ends of this rank's pipes: when its control pipe is closed, it ends by itself if it can."""
        if self._closed:  # its descriptors may be somebody else's by now
            return
        self._closed = True
        if self._exit is not None:
            for fd in (self._output, self._messages, self._exit):
                with suppress(KeyError, ValueError):
                    selector.unregister(fd)
            self._request.close(selector)
        self._pipes.close()

    def request(self, selector: selectors.BaseSelector, number: int, kind: str, *content: Any) -> None:
        """Give its main thread something to do: `selector` sends it."""
        if not self._closed:
            self._request.put((number, kind, *content), selector)

    def control(self, *message: Any) -> bool:
        """Send its other thread a message. Never blocks: returns False if the rank is dead, or if the pipe is full,
        because the rank has not run for a long time."""
        if not self._closed:
            with suppress(BrokenPipeError, BlockingIOError):
                self._control(*message)  # far shorter than PIPE_BUF, so it is written whole or not at all
                return True
        return False

    def ask(self, what: str, number: int) -> None:
        """Ask its other thread to "look" or to "stand". The answer has the same number."""
        if self.control(what, number):
            self.asked = number

    # ------------------------------------------------------------------------------------------------------ a call

    def begin(self, number: int) -> None:
        """Begin the call of this number: nothing has come of it yet."""
        self.number, self.outcome = number, None
        self._seen, self._since = None, time.monotonic()

    def attach_console(self, console: Console) -> None:
        """What it says from now on, and has said since the last call, goes to `console`."""
        self.console, self._shown = console, []
        self.was_terminated = self.was_woken = False
        lines = self.log.lines  # said since the last call
        self.log = RankLog(self.rank, console.line, describe_output)
        self.log.lines.extend(lines)

    def finish(self) -> RankLog:
        """End the call on this rank; returns the log of all that it has printed in it."""
        self._drain()
        log, self.log = self.log, RankLog(self.rank, self.console.line, describe_output)
        return log

    def display_all(self) -> None:
        """Show what it has displayed in this call."""
        for bundle in self._shown:
            self.display(bundle, self.console)
        self._shown = []

    def display(self, bundle: MimeBundle, console: Console) -> None:
        """Show one thing, under this rank's name."""
        if not isinstance(console, NotebookConsole):
            console.line(self.rank, bundle.text)
            return
        from IPython.display import display

        print(f"[rank {self.rank}]", flush=True)
        display(bundle.data, metadata=bundle.metadata, raw=True)

    @property
    def is_busy(self) -> bool:
        return self.outcome is None and not self.death

    @property
    def value(self) -> Any:
        return self.outcome[1] if self.outcome else None

    @property
    def failure(self) -> Failure | None:
        return self.outcome[1] if self.outcome and self.outcome[0] == "raised" else None

    @property
    def reason(self) -> str:
        """How this rank has failed, in words: as its death or its exception says."""
        if self.death:
            return self.death
        return (
            f"raised {strip_noise(describe_output(str(self.failure.raised)))}" if self.failure else "has ended the call"
        )

    @property
    def cause_order(self) -> tuple[int, float]:
        """For finding the cause: what ranks raised by themselves, in order of time; deaths; lost connections."""
        if self.failure is None:
            return (1 if self.death else 3), 0.0
        return (2 if lost_connection(self.failure.raised.message) else 0), self.failure.at

    def waited_for(self, now: float) -> float:
        """Seconds for which this rank has waited in one collective, as far as its last answer says; else 0."""
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
                case "shown", [number, bundle] if number == self.number:
                    self._shown.append(bundle)
                case (("done" | "raised"), [number, value]) if number == self.number:
                    self.outcome = (kind, value)
                case "answer", [number, answer]:
                    self.answered, self.answer = number, answer
                    self._note(answer)
        return more

    def _note(self, answer: Answer) -> None:
        if isinstance(answer, Snapshot) and answer != self._seen:
            self._seen, self._since = answer, time.monotonic()

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
        """What it has printed until now; what its children go on to print comes with the next call."""
        for _ in range(_PIECES):
            if not self._read_output():
                break
        self.log.feed(b"", final=True)

    def reap(self, selector: selectors.BaseSelector) -> None:
        """Record that the rank's process has exited, and how."""
        if not has_exited(self.process):  # a debugger or strace may hold the exit code back for a while
            time.sleep(0.01)
            return
        code = self.process.exitcode
        self.record_exit(
            selector, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )

    def record_exit(self, selector: selectors.BaseSelector, death: str) -> None:
        """Read what is left in the rank's pipes, close them, and record its `death`, which says how it died."""
        if self.death:
            return
        while self._read_messages():
            pass
        self._drain()
        self.death = death
        self.close(selector)


def describe_output(text: str) -> str:
    """The text of an error, with cells called by the names that the notebook gives them."""
    return re.sub(r'File "((?:Cell In\[\d+\]|call \d+))"', r"\1", rename_cells(text))
