"""The rank's side of a launch: make a spawned process a rank, run the call, send back its result or error."""

import atexit
import faulthandler
import gc
import io
import linecache
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from ddp_tutorial.compat import flight_record
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.logs import Logs, configure
from ddp_tutorial.processes.script import Script
from ddp_tutorial.processes.signals import die_with_parent
from ddp_tutorial.processes.transport import Descriptor, Sender, dump_result
from ddp_tutorial.world import World, process_group

_send: Sender | None = None  # set once, when this process becomes a rank
_exit_code = 1


def progress(done: int, total: int, **numbers: float) -> None:
    """Report that `done` of `total` is done. The parent shows rank 0's as a bar; outside `launch` it has no effect."""
    if _send is not None:
        _send("progress", done, total, numbers)


def exit_with(error: BaseException) -> NoReturn:
    """End this rank with `error`, from any thread: for when the main one waits in native code, which nothing wakes.

    Under `launch` the parent raises it as a `RankError`; elsewhere it goes to stderr, and the exit code is 1.
    """
    if _send is not None:
        _send("raised", Raised.of(error), "", time.monotonic())
    else:
        print(Raised.of(error), file=sys.stderr, flush=True)
    os._exit(1)


def send_figure(png: bytes) -> None:
    """Let the parent show a picture under this rank's name, below the cell that has started it."""
    if _send is not None:
        _send("figure", png)


@dataclass
class RankJob:
    """What a rank is given when it is spawned; one object for all ranks.

    The call itself waits in a file. Passed along here, a large one would make the ranks start one after
    another, because spawn writes to each until that one has read everything.
    """

    outputs: list[Descriptor]
    messages: list[Descriptor]
    lifeline: Descriptor
    call: Descriptor
    threads: int
    device: str
    backend: str
    collective_timeout: timedelta
    script: Script | None
    sources: dict[str, list[str]]
    logs: Logs | None
    parent: int
    dies_with_thread: bool


def run_rank(rank: int, job: RankJob) -> None:
    """The function that `torch.multiprocessing.spawn` calls in each new process."""
    global _exit_code
    atexit.register(_end_without_finalising)  # first in, so last to be called
    send = initialize_rank(rank, job.outputs[rank], job.messages[rank], job)
    for other, (output, messages) in enumerate(zip(job.outputs, job.messages, strict=True)):
        if other != rank:
            os.close(output.fd)
            os.close(messages.fd)
    threading.Thread(target=_answer, args=(job.lifeline.fd, send, threading.get_ident()), daemon=True).start()
    send("started")
    with ExitStack() as stack:
        try:
            if job.script is not None:
                job.script.run()
            fn, args = pickle.loads(mmap.mmap(job.call.fd, 0, access=mmap.ACCESS_READ))
            world = World.detect(device=job.device, backend=job.backend, timeout=job.collective_timeout)
            stack.enter_context(process_group(world))
            outcome: tuple[Any, ...] = ("result", dump_result(fn(world, *args)))
        except (Exception, SystemExit) as error:  # a rank that leaves has failed: the others count on it
            outcome = ("raised", Raised.of(error), user_traceback(error), time.monotonic())
        # Told before the group is torn down: when that breaks the others' connections, the cause is known already.
        send(*outcome)
    _exit_code = int(outcome[0] == "raised")


class ParentInfo(Protocol):
    """What a process has to know to become a rank: `sources` are the lines of notebook cells by file name, `logs` what
    its parent's `logging` shows, `parent` the process that has started it, which dies with it or with its thread."""

    threads: int
    sources: dict[str, list[str]]
    logs: Logs | None
    parent: int
    dies_with_thread: bool


def initialize_rank(rank: int, output: Descriptor, messages: Descriptor, origin: ParentInfo) -> Sender:
    """Make this process a rank: it ends with its parent and leaves interrupts to it, prints into `output`, and talks
    through the sender that is returned, as `progress` does."""
    global _send
    _keep_descriptors_from_children()
    gc.freeze()  # torch, and what else is imported by now, stays: no search for garbage need look at it again
    _never_outlive_the_parent(origin)
    _redirect_output(output.fd)
    local_rank = rank % int(os.environ["LOCAL_WORLD_SIZE"])  # the other variables were set when it was started
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
    torch.set_num_threads(origin.threads)
    register_sources(origin.sources)
    configure(origin.logs)
    _send = Sender(messages.fd)
    return _send


def register_sources(sources: Mapping[str, list[str]]) -> None:
    """Let tracebacks show the lines of cells."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _end_without_finalising() -> None:
    """End this process before Python takes its interpreter apart.

    torch's threads can outlive the process group (see `process_group`). One that lets go of a tensor while the
    interpreter is being torn down aborts a rank that has done its work: "terminate called without an active
    exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_code)


def _never_outlive_the_parent(origin: ParentInfo) -> None:
    """Ignore interrupts, which are for the parent to handle, and be killed when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if origin.dies_with_thread:
        die_with_parent()  # torch.multiprocessing.spawn asked for SIGINT here, which we have just decided to ignore
    if os.getppid() != origin.parent:  # it died before we asked to be told
        os._exit(1)


def _keep_descriptors_from_children() -> None:
    """Close the descriptors of this rank in the programs that it starts.

    `multiprocessing` hands them down in a way that makes them inheritable. A program that a rank leaves behind would
    keep the other ends open: its parent would read on, and would not notice that the rank is gone.
    """
    for path in Path("/dev/fd").iterdir():
        if int(path.name) > 2:
            with suppress(OSError):  # that of the listing itself
                os.set_inheritable(int(path.name), False)


def _redirect_output(fd: int) -> None:
    """Send all that this process, its children and C++ code print down one pipe, a line at a time."""
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(all_threads=False)  # a crash in native code leaves its stack in the log


def _answer(lifeline: int, send: Sender, main_thread: int) -> None:
    """Wait until the parent closes the lifeline: at the time limit, or because it has died. Report where this rank
    stands, and end when the parent does."""
    connection.wait([lifeline])
    with suppress(OSError):
        send("report", _where(main_thread))
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def user_traceback(error: BaseException, *files: str) -> str:
    """The traceback without the frames of this package's launching, and of `files`; empty where there are no others."""
    story = traceback.TracebackException.from_exception(error)
    ours = {__file__, *(ours.__code__.co_filename for ours in (Script.run, dump_result)), *files}
    story.stack = traceback.StackSummary.from_list([f for f in story.stack if f.filename not in ours])
    return "".join(story.format()) if story.stack else ""


def _where(thread: int) -> str:
    """The stack of a thread inside the user's function, down to where it calls torch, and the last collective that
    this rank entered."""
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    ours = max((i for i, frame in enumerate(stack) if frame.filename == __file__), default=-1)
    torchs = str(Path(torch.__file__).parent)
    theirs = [frame for frame in stack[ours + 1 :] if not frame.filename.startswith(torchs)]
    return "".join(traceback.format_list(theirs)) + _last_collective()


def _last_collective() -> str:
    """From torch's flight recorder. Ranks in step number their collectives alike."""
    if not dist.is_initialized():
        return ""
    entries = flight_record(stacks=False).get("entries", [])
    if not entries:
        return "  no collective yet\n"
    last = entries[-1]
    state = "finished" if last["retired"] else "waiting"
    return f"  collective {last['collective_seq_id']}, {last['profiling_name']} of {last['input_sizes']}: {state}\n"
