"""Handle the signals that ask a process to stop, such as SIGTERM."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from ddp_tutorial.config import FailedError

# Signals that a cluster sends before it stops a job. Slurm and torchrun send SIGTERM, and many batch scripts request
# SIGUSR1.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # EX_TEMPFAIL in sysexits.h; the same command resumes the run
_REPEAT_SECONDS = 0.01  # by then, the callback that ignored the exception has returned
_PR_SET_PDEATHSIG = 1
_SIGACTION_BYTES = 256  # at least sizeof(struct sigaction): 152 bytes with glibc on Linux, 16 on macOS


def signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL", or its number, such as "signal 36", if the signal has no name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


class StoppedError(FailedError):
    """Raised if a signal stops a process that has nothing to save yet. Earlier checkpoints do not change."""

    def __init__(self, number: int) -> None:
        """Create the error for the signal `number`."""
        super().__init__(f"stopped by {signal_name(number)} before there was anything to save")


class _Signaled(BaseException):
    """Raised when a signal arrives inside `stopped_by_signals`.

    The class derives from `BaseException`, because torch catches `Exception` in many places while it is imported.
    """


def _raise(number: int, frame: object) -> None:
    raise _Signaled(number)


def exit_code(environ: Mapping[str, str] = os.environ, *, by_signal: bool = True) -> int:
    """Return the exit code of a run that was asked to stop.

    Normally, the code is `EXIT_CODE`, which means that the same command resumes the run. The code is 0 if `EXIT_CODE`
    would restart the run immediately, which happens in two cases:

    - under torchrun, which treats every nonzero code as a failure and restarts the ranks with `--max-restarts`;
    - under `srun` if no signal stopped the run, because the batch script requeues jobs that exit with `EXIT_CODE`.

    Args:
        environ: Environment variables of the run.
        by_signal: Whether a signal stopped the run.
    """
    if "TORCHELASTIC_RUN_ID" in environ or ("SLURM_STEP_ID" in environ and not by_signal):
        return 0
    return EXIT_CODE


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler(number, frame)` for these signals inside the block, then restore the previous handlers.

    Python allows signal handlers in the main thread only. In other threads, the block runs without the handler.
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
    """Restore a signal's handler when the block exits.

    Python can restore only handlers that were set from Python. Handlers set by C code, for example by
    `faulthandler.register`, are restored with `sigaction`.
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
    """Let the kernel kill this process with SIGKILL when the thread that started it exits.

    This function has no effect on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise `StoppedError` if SIGTERM or SIGUSR1 arrives inside the block."""
    with handling(SIGNALS, _raise), _ignored_signals_repeated():
        try:
            yield
        except _Signaled as signaled:
            raise StoppedError(signaled.args[0]) from None


@contextmanager
def _ignored_signals_repeated() -> Iterator[None]:
    """Send a signal again if Python has ignored the exception that `_raise` raised.

    Python ignores exceptions in finalizers and in callbacks of weak references. The import system registers such a
    callback for each module, and about 0.1 % of the signals that arrived during imports were handled inside one.
    """
    before = sys.unraisablehook

    def repeat(ignored: "sys.UnraisableHookArgs") -> None:
        if isinstance(ignored.exc_value, _Signaled):
            threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), ignored.exc_value.args[0])).start()
        else:
            before(ignored)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before
