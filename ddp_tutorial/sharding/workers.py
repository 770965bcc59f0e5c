"""The processes that read ahead for a rank: how they are started, waited for, and ended.

They are torch's DataLoader's, with one thing changed: a signal to stop is for their rank, not for them. Whoever stops a
job tells all its processes (`kill -TERM -- -PGID`, Ctrl-C, Slurm), and a rank that is to save first has to read on.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddp_tutorial.compat import shutdown_workers, worker_processes
from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.signals import SIGNALS

LOG = logging.getLogger(__name__)
Item = TypeVar("Item")

# How long a worker may take for one batch, in seconds, before it counts as stuck.
WORKER_TIMEOUT = 120.0
# How often, in seconds, it is checked that the workers are alive.
POLL_SECONDS = 2.0
# How often, in seconds, a worker looks whether its rank is alive.
WATCH_SECONDS = 1.0
# How long a worker has to end between two batches, in seconds, before it ends wherever it is.
END_SECONDS = 0.5
_NOT_FOR_WORKERS = (*SIGNALS, signal.SIGINT)


class SourceError(RuntimeError):
    """Samples could not be read; says by which rank and worker, and which samples."""


def worker_options(workers: int, prefetch: int, worker_timeout: float) -> dict[str, Any]:
    """What a DataLoader is told about its workers. Raises `ConfigError` for a negative number of them."""
    if workers < 0:
        raise ConfigError(f"'workers' should be 0 or more processes, found {workers}")
    if not workers:
        return {}
    look = min(POLL_SECONDS, worker_timeout)
    return {"num_workers": workers, "prefetch_factor": prefetch, "timeout": look}


def next_from(batches: Iterator[Item], worker_timeout: float) -> Item:
    """The next of a DataLoader's batches. Raises `SourceError` if there is none within `worker_timeout` seconds.

    A DataLoader notices dead workers only when its own timeout is over; so that is `POLL_SECONDS`, again and again.
    """
    deadline = time.monotonic() + worker_timeout
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            if time.monotonic() >= deadline:
                raise SourceError(f"no answer within {worker_timeout:g} s; it is stuck, or slow") from None
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A batch is in shared memory, of which its worker hands over the file. Where that fails, the worker has
            # ended, or is about to; unless it is the dataset's own error.
            is_own = "in DataLoader worker process" in str(error)
            if is_own or not (isinstance(batches, WorkerBatches) and batches.wait_for_worker_exit()):
                raise
            raise RuntimeError(f"its connection was lost, {type(error).__name__}: it has died") from error


class WorkerRestart:
    """Whether a source may start its workers again at a step: where one has died, and not at this step before. A sample
    that kills its worker does so again."""

    def __init__(self) -> None:
        self._place: object = None  # the step at which they were started again

    def is_due(self, batches: object, place: object, told: str) -> bool:
        """`place` is where the source stands, which is not changed by it. Says so in the log."""
        if not (isinstance(batches, WorkerBatches) and batches.exited_workers()) or place == self._place:
            return False
        self._place = place
        LOG.warning(
            "%s. The workers are started again, and read the same samples", told.partition("\n")[0].rstrip(" .")
        )
        return True


def failed_worker(batches: object, turn: int, workers: int) -> tuple[str, int]:
    """Which worker an error is about, in words, and how many batches after this one its batch comes.

    It is the worker that has died, if one has, or else the one whose turn it is.
    """
    if not isinstance(batches, WorkerBatches):
        return "", 0
    worker = next(iter(batches.exited_workers()), turn)
    return f", worker {worker} of {workers}", (worker - turn) % workers


class WorkerBatches(Iterator[Item]):
    """The batches of a DataLoader, and the workers that read ahead for it. They end with `close`, with the last
    reference to this, or with this process, and each of them also where it is stuck."""

    def __init__(self, loader: DataLoader[Item]) -> None:
        told, tell = multiprocessing.Pipe(duplex=False)
        loader.worker_init_fn = partial(_begin, told)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)  # which they inherit, until they are ready
        try:
            self._batches: Any = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # What else is done when a process ends comes later: Python would then ask workers to end with a signal that
        # they leave to their rank, and wait for them.
        self.close = Finalize(self, _end, (self._batches, told, tell), exitpriority=0)

    def __next__(self) -> Item:
        return next(self._batches)

    def exited_workers(self) -> list[int]:
        """The numbers of workers that have ended."""
        return [number for number, process in enumerate(worker_processes(self._batches)) if not process.is_alive()]

    def wait_for_worker_exit(self) -> bool:
        """Has a worker ended, or does one within `POLL_SECONDS`?"""
        deadline = time.monotonic() + POLL_SECONDS
        while not (found := self.exited_workers()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(found)


def _end(batches: Any, told: Connection, tell: Connection) -> None:
    tell.send_bytes(b"")
    shutdown_workers(batches)  # torch's way, which takes workers that are stuck 10 seconds each
    for process in worker_processes(batches):
        process.join(10 * END_SECONDS)
        process.kill()
        process.join()
    told.close()
    tell.close()


def _begin(told: Connection, _: int) -> None:
    """What a worker does first. Signals are caught, not ignored: programs that it starts would inherit that."""
    np.random.seed(torch.initial_seed() % 2**32)  # torch and Python's random are seeded by torch
    for number in _NOT_FOR_WORKERS:
        signal.signal(number, _leave_it_to_the_rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_WORKERS)
    threading.Thread(target=_end_when_told, args=(told,), name="end when told", daemon=True).start()


def _leave_it_to_the_rank(number: int, frame: object) -> None:
    pass


def _end_when_told(told: Connection) -> None:
    """End this worker when its rank says so, or is gone. torch's own watch looks only between two batches, and one
    batch may take for ever."""
    rank = multiprocessing.parent_process()
    signs: list[Any] = [told, rank.sentinel] if rank is not None else [told]
    parent = os.getppid()  # the rank, or a server that forks for it
    while not wait(signs, WATCH_SECONDS) and os.getppid() == parent:
        pass
    time.sleep(END_SECONDS)
    os._exit(0)
