"""The signals that ask a process to end in good time, and how to handle them for the length of a block."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# What a cluster sends to a job that has to go: Slurm and torchrun SIGTERM, many a batch script SIGUSR1.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # sysexits.h's EX_TEMPFAIL, "try again later": the same command carries on


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Inside, these signals call `handler(number, frame)`. Python allows that in the main thread only; in another one
    the block runs without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
