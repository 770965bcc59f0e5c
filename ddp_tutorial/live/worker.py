"""Run one rank of a pool. The rank executes calls, keeps its variables between calls, and can abort blocked calls.

The main thread runs the calls. A second thread replies to queries about this rank's progress, and can interrupt Python
code. The second thread can also wake the main thread from a collective that will never finish, by closing the
connections to the other ranks.
"""

import ast
import builtins
import faulthandler
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ddp_tutorial.compat import group_ranks, inspection_text
from ddp_tutorial.debug.hangs import RankStatus, uses_cpu
from ddp_tutorial.debug.recorder import Call, calls, current_lines, group_names, ignore_former_groups, progress
from ddp_tutorial.live import display
from ddp_tutorial.live.messages import Failure, MimeBundle, Receiver, Snapshot, WorkerSpec
from ddp_tutorial.processes.errors import Raised, lost_connection
from ddp_tutorial.processes.process_tags import tagged_processes
from ddp_tutorial.processes.rank import initialize_rank, register_sources, user_traceback
from ddp_tutorial.processes.spawn import MARK
from ddp_tutorial.processes.transport import Sender, dump_result
from ddp_tutorial.world import World, abandon_group, process_group

_DISTRIBUTED = str(Path(dist.__file__).parent)
_LIBRARIES = (str(Path(torch.__file__).parent), sys.prefix, sys.base_prefix, "<frozen")
_GLOO_MESSAGES = ("gloo", "timed out waiting", "process group")


def serve(_: int, spec: WorkerSpec) -> None:
    """Run a rank of a pool in a new process, until the pool closes."""
    send = initialize_rank(spec.rank, spec.output, spec.messages, spec)
    os.environ["MPLBACKEND"] = "module://ddp_tutorial.live.figures"
    worker = Worker(spec, send)
    threading.Thread(target=worker.answer, daemon=True, name="live ranks").start()
    send("started")
    worker.work()


class Worker:
    """One rank of a pool, with its process group and its namespace (the `__main__` module)."""

    def __init__(self, spec: WorkerSpec, send: Sender) -> None:
        """Create a worker that has not yet joined a process group."""
        self.send = send
        self.requests, self.control = Receiver(spec.requests.fd), Receiver(spec.control.fd)
        timeout = timedelta(seconds=spec.collective_timeout)
        self.world = World.detect(device=spec.device, backend=spec.backend, timeout=timeout)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        self.names = vars(main)
        self.names.update(__builtins__=builtins, world=self.world, display=display.display)
        self.group: AbstractContextManager[World] | None = None
        self.pids: Sequence[int] = ()  # process IDs of all ranks, as this process sees them
        self.number = 0  # number of the current call
        self.main_thread = threading.get_ident()
        self.interruptible = self.interrupted = False
        self.state = "idle"
        display.set_display(lambda bundle: send("display", self.number, bundle))

    # ------------------------------------------------------------------------------------------------- main thread

    def work(self) -> None:
        """Run calls one after another until the pool closes."""
        while (request := self.requests()) is not None:
            self.number, kind, *content = request
            signal.signal(signal.SIGINT, self._on_interrupt)  # a cell may have replaced the handler
            act: Callable[..., object] = getattr(self, f"do_{kind}")
            outcome = self._guarded(lambda act=act, content=content: act(*content))  # type: ignore[misc]
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            self.state = "failed" if outcome[0] == "raised" else "idle"
            self.send(outcome[0], self.number, *outcome[1:])
        os._exit(0)

    def _guarded(self, act: Callable[[], object]) -> tuple[Any, ...]:
        self.state, self.interrupted = "", False
        try:
            try:
                self.interruptible = True
                return "done", act()
            finally:
                self.interruptible = False
        except BaseException as error:
            self.interruptible = False
            return "raised", _failure(error)

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Raise `KeyboardInterrupt` in a call if the pool requested an interrupt.

        The terminal or the kernel may send an interrupt to all processes. This handler ignores such an interrupt,
        because the pool receives the same interrupt, and then sends an interrupt request.
        """
        asked, self.interrupted = self.interrupted, False
        if asked and self.interruptible:
            raise KeyboardInterrupt

    def do_nothing(self) -> None:
        """Do nothing, to measure the overhead of calls."""

    def do_form_group(self, port: int, pids: Sequence[int]) -> None:
        """Leave the current process group, and form a new group with the other ranks. Collective.

        The rendezvous store listens on `port`. `pids` contains the process IDs of all ranks.
        """
        self.do_leave()
        self.pids = pids
        os.environ["MASTER_PORT"] = str(port)
        self.group = process_group(self.world)
        self.group.__enter__()
        if self.world.size > 1:
            ignore_former_groups()

    def do_leave(self) -> None:
        """Leave the process group, even during a collective. Ranks that wait for this rank receive an error."""
        group, self.group = self.group, None
        if group is not None:
            with suppress(RuntimeError):
                group.__exit__(None, None, None)

    def do_execute(self, source: str, name: str, cell: str, offset: int) -> MimeBundle | None:
        """Run a cell, and return the representation of its last expression's value.

        Args:
            source: Source code to run.
            name: File name for tracebacks.
            cell: Source code of the whole notebook cell.
            offset: Number of lines in `cell` before `source`.

        Returns:
            The representation, or None if the cell does not end with an expression, or if the expression's value is
            None.
        """
        linecache.cache[name] = (len(cell), None, [f"{line}\n" for line in cell.split("\n")], name)
        if "IPython" in source:
            import IPython.display

            IPython.display.display = display.display
        tree = ast.parse("\n" * offset + source, name)
        last = tree.body[-1] if tree.body else None
        value = None
        if isinstance(last, ast.Expr) and not source.rstrip().endswith(";"):
            exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), self.names)
            value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
        else:
            exec(compile(tree, name, "exec"), self.names)
        display.show_open_figures()
        if value is None:
            return None
        self.names["_"] = value
        return display.mime_bundle(value)

    def do_run(self, call: bytes, sources: dict[str, list[str]]) -> bytes:
        """Call a pickled function with `world`, and return its pickled result."""
        register_sources(sources)
        fn, args = pickle.loads(call)
        result = fn(self.world, *args)
        display.show_open_figures()
        return dump_result(result)

    def do_get(self, name: str) -> bytes:
        """Return the pickled value of a variable or expression."""
        return dump_result(eval(name, self.names))

    def do_put(self, values: bytes) -> None:
        """Update the namespace from `values`, a pickled dict."""
        self.names.update(pickle.loads(values))

    def do_names(self, text: str) -> list[str]:
        """Return the names that complete `text`, or the attributes if `text` contains a dot."""
        from rlcompleter import Completer

        completer, found = Completer(self.names), list[str]()
        while (each := completer.complete(text, len(found))) is not None:
            found.append(each.rstrip("()"))
        return found

    def do_inspect(self, name: str, detail: int) -> str:
        """Return IPython's description of a name, as `?` or `??` shows it."""
        return inspection_text(eval(name, self.names), name, detail)

    # ------------------------------------------------------------------------------------------- control thread

    def answer(self) -> None:
        """Handle control messages until the pool closes."""
        while (message := self.control()) is not None:
            match message:
                case ("snapshot", question):
                    self.send("answer", question, Snapshot(self._progress()))
                case ("groups", question):
                    self.send("answer", question, self._groups())
                case ("status", question):
                    self.send("answer", question, self._status())
                case ("interrupt", number) if number == self.number:  # ignore interrupts for earlier calls
                    self.interrupted = True
                    signal.pthread_kill(self.main_thread, signal.SIGINT)
                case ("wake", number) if number == self.number:
                    self._wake()
        faulthandler.disable()
        os._exit(0)

    def _progress(self) -> dict[str, tuple[int, int]]:
        with suppress(ValueError):  # the main thread may leave the group at any time
            return progress()
        return {}

    def _groups(self) -> Snapshot:
        with suppress(ValueError):
            return Snapshot(progress(), group_names(), group_ranks())
        return Snapshot()

    def _status(self) -> RankStatus:
        state, is_busy = self.state, uses_cpu()
        entered: tuple[Call, ...] = ()
        with suppress(ValueError):  # this rank has no group
            entered = tuple(calls())
        return RankStatus(entered, current_lines(self.main_thread), is_busy, group_ranks(), state)  # type: ignore[arg-type]

    def _wake(self) -> None:
        """Wake the main thread if it is blocked in native code.

        With gloo, close the connections to other ranks to abort the collective. With NCCL, abort the communicators.
        """
        if self.world.backend == "nccl":
            with suppress(Exception):
                abandon_group(self.world)
            return
        # Forks of a dead rank may keep its connections open.
        started = tagged_processes(MARK, os.environ.get(MARK, "").__eq__)
        ranks = {*self.pids, *(process.pid for process in started)} - {os.getpid()}
        for connection in _connections_to(ranks, int(os.environ["MASTER_PORT"])):
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)


def _connections_to(pids: Iterable[int], store: int) -> list[Any]:
    """Return this process's connections to the processes in `pids`, except connections to the port `store`.

    A connection to a different node is always included, because processes in other network namespaces are not visible.
    """
    theirs = set[tuple[Any, Any]]()
    for pid in pids:
        with suppress(psutil.Error):  # a process that has exited has no connections
            theirs.update((each.raddr, each.laddr) for each in psutil.Process(pid).net_connections("tcp"))
    return [
        each
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED
        and store not in {each.laddr.port, each.raddr.port}
        and (each.laddr.ip != each.raddr.ip or (each.laddr, each.raddr) in theirs)
    ]


def _failure(error: BaseException) -> Failure:
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [place for place in places if not place[0].startswith(_LIBRARIES) and place[0] != __file__]
    line = 'File "{}", line {}'.format(*users[-1]) if users else ""
    raised = Raised.of(error)
    message = raised.message.lower()
    in_collective = isinstance(error, RuntimeError) and (
        places[-1][0].startswith(_DISTRIBUTED)
        or lost_connection(message)
        or any(word in message for word in _GLOO_MESSAGES)
    )
    trace = user_traceback(error, __file__, ast.__file__)
    return Failure(raised, trace, time.monotonic(), line, in_collective)
