"""The signals that ask a process to end in good time, and how to handle them for the length of a block."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from ddp_tutorial.config import FailedError

# What a cluster sends to a job that has to go: Slurm and torchrun SIGTERM, many a batch script SIGUSR1.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # sysexits.h's EX_TEMPFAIL, "try again later": the same command carries on
_PR_SET_PDEATHSIG = 1
_SIGACTION_BYTES = 256  # at least the size of the C library's struct: 152 bytes with glibc on Linux, 16 on macOS


class StoppedError(FailedError):
    """This process was asked to end, before there was anything to save. What was saved earlier is as it was."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before there was anything to save")


class _Signalled(BaseException):
    """Not an `Exception`: torch, while it is imported, has `except Exception` around much of what it tries."""


def _raise(number: int, frame: object) -> None:
    raise _Signalled(number)


def exit_code(environ: Mapping[str, str] = os.environ, *, by_signal: bool = True) -> int:
    """The exit code of a run that was asked to stop: `EXIT_CODE`, which means that the same command carries on with it.

    It is 0 where `EXIT_CODE` would have the run started again at once: under torchrun, which takes any code but 0 for a
    failure and, with `--max-restarts`, starts the ranks again; and inside `srun` where no signal stopped the run
    (`by_signal=False`), since the batch script requeues jobs that end with `EXIT_CODE`.
    """
    if "TORCHELASTIC_RUN_ID" in environ or ("SLURM_STEP_ID" in environ and not by_signal):
        return 0
    return EXIT_CODE


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler(number, frame)` for these signals inside the block. Afterwards, restore what was there before.

    Python allows handlers in the main thread only; in another thread the block runs without them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as before:
        for number in signals:
            before.enter_context(_restored(number))
            signal.signal(number, handler)
        yield


@contextmanager
def _restored(number: signal.Signals) -> Iterator[None]:
    """Restore a signal's handler at the end of the block.

    Python knows the handlers that were set from Python. Those that C code has set, such as `faulthandler.register`, are
    known to the kernel only.
    """
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(int(number), None, action)
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
        libc.sigaction(int(number), action, None)


def die_with_parent() -> None:
    """Have this process killed by SIGKILL when the thread that started it ends. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, a signal to end raises `StoppedError`, wherever the main thread is."""
    with handling(SIGNALS, _raise):
        try:
            yield
        except _Signalled as signalled:
            raise StoppedError(signalled.args[0]) from None
