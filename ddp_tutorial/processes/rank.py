"""Initialize a spawned process as a rank, run a function, and send the result or error to the parent."""

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
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddp_tutorial.compat import flight_record
from ddp_tutorial.processes.errors import Raised
from ddp_tutorial.processes.logs import Logs, configure
from ddp_tutorial.processes.script import Script
from ddp_tutorial.processes.signals import die_with_parent
from ddp_tutorial.processes.transport import Descriptor, Sender, dump_result
from ddp_tutorial.world import World, process_group

_send: Sender | None = None  # set by `initialize_rank`
_exit_code = 1


def progress(done: int, total: int, **numbers: float) -> None:
    """Report progress to the parent, which shows rank 0's progress as a bar.

    Outside `launch`, this function has no effect.

    Args:
        done: Number of completed steps.
        total: Total number of steps.
        **numbers: Values to show beside the bar, such as `loss`.
    """
    if _send is not None:
        _send("progress", done, total, numbers)


def exit_with(error: BaseException) -> NoReturn:
    """Report `error` from any thread, and exit this process.

    Use this function if the main thread is blocked in native code, where no exception can reach it. Under `launch`, the
    parent raises the error as a `RankError`. Otherwise, the error is printed to stderr, and the exit code is 1.
    """
    if _send is not None:
        _send("raised", Raised.of(error), "", time.monotonic())
    else:
        print(Raised.of(error), file=sys.stderr, flush=True)
    os._exit(1)


def send_figure(png: bytes) -> None:
    """Send a PNG image to the parent, which displays this rank's number and the image under the cell."""
    if _send is not None:
        _send("figure", png)


@dataclass
class ParentInfo:
    """Settings that a new rank requires from the parent process.

    Attributes:
        threads: Number of torch threads.
        sources: Dict that maps each notebook cell's file name to its source lines.
        logs: The parent's logging setup.
        parent: Process ID of the parent.
        dies_with_thread: Whether the rank is killed when the thread that started it exits.
    """

    threads: int
    sources: dict[str, list[str]]
    logs: Logs | None
    parent: int
    dies_with_thread: bool


@dataclass
class RankJob(ParentInfo):
    """The arguments that all ranks of a launch share.

    The pickled call is stored in a file instead of in this object. `spawn` waits until each process has read the
    arguments, so the ranks would start one after another if the arguments contained a large call.
    """

    outputs: list[Descriptor]
    messages: list[Descriptor]
    lifeline: Descriptor
    call: Descriptor
    device: str
    backend: str
    collective_timeout: timedelta
    script: Script | None


def run_rank(rank: int, job: RankJob) -> None:
    """Run the job in a new process. `torch.multiprocessing.spawn` calls this function."""
    global _exit_code
    atexit.register(_exit_without_finalizing)  # registered first, so it is called last
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
        except BaseException as error:  # sys.exit() is a failure too, because the other ranks wait
            outcome = ("raised", Raised.of(error), user_traceback(error), time.monotonic())
        # Send the outcome before the process group is destroyed. Destroying it may break the other ranks' connections,
        # and the parent should know the cause by then.
        send(*outcome)
    _exit_code = int(outcome[0] == "raised")


def initialize_rank(rank: int, output: Descriptor, messages: Descriptor, origin: ParentInfo) -> Sender:
    """Initialize this process as a rank, and return the `Sender` for messages to the parent.

    The rank exits when its parent exits, ignores interrupts, and writes its output to a pipe. The function `progress`
    also uses the returned sender.
    """
    global _send
    _keep_descriptors_from_children()
    gc.freeze()  # exclude torch and everything else imported so far from garbage collection
    _exit_with_parent(origin)
    _redirect_output(output.fd)
    local_rank = rank % int(os.environ["LOCAL_WORLD_SIZE"])  # the parent has set the other variables
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
    torch.set_num_threads(origin.threads)
    register_sources(origin.sources)
    configure(origin.logs)
    _send = Sender(messages.fd)
    return _send


def register_sources(sources: Mapping[str, list[str]]) -> None:
    """Register the source lines of notebook cells, so that tracebacks can show them."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _exit_without_finalizing() -> None:
    """Exit before Python finalizes the interpreter.

    PyTorch's threads can outlive the process group (see `process_group`). If such a thread releases a tensor during
    finalization, the rank aborts although it has already finished its work. The error message is "terminate called
    without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_code)


def _exit_with_parent(origin: ParentInfo) -> None:
    """Ignore interrupts, which the parent handles, and let the kernel kill this process when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if origin.dies_with_thread:
        die_with_parent()  # replaces spawn's parent-death signal, SIGINT, which this rank ignores
    if os.getppid() != origin.parent:  # the parent exited before `die_with_parent` took effect
        os._exit(1)


def _keep_descriptors_from_children() -> None:
    """Prevent child programs from inheriting the file descriptors of this rank.

    `multiprocessing` makes the descriptors inheritable. If a program outlived the rank, it would keep the pipes open,
    and the parent would never reach the end of the output.
    """
    for path in Path("/dev/fd").iterdir():
        if int(path.name) > 2:
            with suppress(OSError):  # the descriptor of the directory listing is closed by now
                os.set_inheritable(int(path.name), False)


def _redirect_output(fd: int) -> None:
    """Redirect the output of this process, of its child processes and of C++ code to a line-buffered pipe."""
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(all_threads=False)  # print the stack after a crash in native code


def _answer(lifeline: int, send: Sender, main_thread: int) -> None:
    """Wait until the parent closes the pipe `lifeline`, report this rank's stack, and exit when the parent exits.

    The pipe is closed after a timeout, or when the parent exits.
    """
    connection.wait([lifeline])
    with suppress(OSError):
        send("report", _where(main_thread))
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def user_traceback(error: BaseException, *files: str) -> str:
    """Format an error's traceback without the frames of this package's launcher and of the source files `files`.

    Returns:
        The traceback, or an empty string if no frames remain.
    """
    story = traceback.TracebackException.from_exception(error)
    ours = {__file__, *(ours.__code__.co_filename for ours in (Script.run, dump_result)), *files}
    story.stack = traceback.StackSummary.from_list([f for f in story.stack if f.filename not in ours])
    return "".join(story.format()) if story.stack else ""


def _where(thread: int) -> str:
    """Return a description of a thread's stack and of this rank's last collective.

    The stack starts in the user's function, and omits the frames inside torch.
    """
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    ours = max((i for i, frame in enumerate(stack) if frame.filename == __file__), default=-1)
    torchs = str(Path(torch.__file__).parent)
    theirs = [frame for frame in stack[ours + 1 :] if not frame.filename.startswith(torchs)]
    return "".join(traceback.format_list(theirs)) + _last_collective()


def _last_collective() -> str:
    """Describe the last collective in torch's flight recorder.

    Ranks that run the same sequence of collectives assign the same sequence numbers to them.
    """
    if not dist.is_initialized():
        return ""
    entries = flight_record(stacks=False).get("entries", [])
    if not entries:
        return "  no collective yet\n"
    last = entries[-1]
    state = "finished" if last["retired"] else "waiting"
    return f"  collective {last['collective_seq_id']}, {last['profiling_name']} of {last['input_sizes']}: {state}\n"
