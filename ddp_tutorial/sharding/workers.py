"""Start, monitor, and stop the worker processes that prefetch batches for a rank.

The workers are torch `DataLoader` workers that ignore termination signals. `kill -TERM -- -PGID`, Ctrl-C, and Slurm
send a termination signal to all processes of a job. However, a rank that saves a checkpoint before it exits still needs
its workers.
"""

import atexit
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

from torch.utils.data import DataLoader

from ddp_tutorial.compat import monitored_workers, shutdown_workers, unmonitored_workers, worker_processes
from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.signals import SIGNALS
from ddp_tutorial.sharding.config import SourceConfig

LOG = logging.getLogger(__name__)
Item = TypeVar("Item")

# The timeout for one batch, in seconds. After this time, a worker is considered stuck.
WORKER_TIMEOUT: float = SourceConfig().worker_timeout
# The interval, in seconds, at which a rank checks that its workers are alive.
POLL_SECONDS = 2.0
# The interval, in seconds, at which a worker checks that its rank is alive.
WATCH_SECONDS = 1.0
# The grace period, in seconds, during which a worker may finish its batch before it is terminated.
END_SECONDS = 0.5
_NOT_FOR_WORKERS = (*SIGNALS, signal.SIGINT)


class SourceError(RuntimeError):
    """Raised if samples cannot be read. The message identifies the rank, the worker, and the samples."""


def worker_options(workers: int, prefetch: int, worker_timeout: float) -> dict[str, Any]:
    """Return the `DataLoader` arguments that configure the workers.

    Raises:
        ConfigError: If `workers` is negative, or if `prefetch` is less than 1.
    """
    if workers < 0:
        raise ConfigError(f"'workers' must be at least 0, got {workers}")
    require_prefetch(prefetch)
    if not workers:
        return {}
    look = min(POLL_SECONDS, worker_timeout)
    return {"num_workers": workers, "prefetch_factor": prefetch, "timeout": look}


def require_prefetch(prefetch: int) -> None:
    """Raise `ConfigError` if `prefetch` is less than 1."""
    if prefetch < 1:
        raise ConfigError(f"'prefetch' must be at least 1, got {prefetch}")


def too_many_workers(workers: int, ranks: int, cores: int) -> str | None:
    """Return a warning if the workers of all ranks on a machine outnumber the CPU cores, and None otherwise."""
    if not workers or workers * ranks <= cores:
        return None
    advised = max(0, cores // ranks - 1)  # a rank needs its own core
    return (
        f"source.workers={workers} starts {workers * ranks} worker processes on this machine, in addition to {ranks} "
        f"ranks on {cores} cores. Use source.workers={advised}, unless the workers mostly wait for a disk or a network"
    )


def next_from(batches: Iterator[Item], worker_timeout: float) -> Item:
    """Return the next batch of a `DataLoader`.

    A `DataLoader` detects dead workers only when its own timeout expires. Therefore, the `DataLoader` timeout is at
    most `POLL_SECONDS`, and this function retries until `worker_timeout` has elapsed.

    Raises:
        SourceError: If no batch arrives within `worker_timeout` seconds.
    """
    deadline = time.monotonic() + worker_timeout
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            if time.monotonic() >= deadline:
                raise SourceError(
                    f"no batch arrived within {worker_timeout:g} s: the worker is stuck or slow. If it is slow, use a "
                    "larger source.worker_timeout"
                ) from None
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A worker passes a batch as a shared-memory file. If that fails, the worker has exited or is about to
            # exit, unless the dataset itself raised the error.
            is_own = "in DataLoader worker process" in str(error)
            if is_own or not (isinstance(batches, WorkerBatches) and batches.wait_for_worker_exit()):
                raise
            raise RuntimeError(f"the worker exited, and its connection was lost ({type(error).__name__})") from error


class WorkerRestart:
    """A policy that decides whether a source restarts its workers at a step.

    If a worker has exited, the workers are restarted, but at most once per step. Without this limit, a sample that
    crashes workers would cause endless restarts.
    """

    def __init__(self) -> None:
        """Start without a recorded restart."""
        self._place: object = None  # the step of the last restart

    def is_due(self, batches: object, place: object, message: str) -> bool:
        """Return whether to restart the workers at the position `place`. If so, log the restart.

        Args:
            batches: The iterator over the workers' batches.
            place: The source's position, which a restart does not change.
            message: The error message to log.
        """
        if not (isinstance(batches, WorkerBatches) and batches.exited_workers()) or place == self._place:
            return False
        self._place = place
        LOG.warning("%s. The workers restart and read the same samples again", message.partition("\n")[0].rstrip(" ."))
        return True


def failed_worker(batches: object, turn: int, workers: int) -> tuple[str, int]:
    """Return a description of the failed worker, and the number of batches that are due before its next batch.

    The failed worker is the first worker that has exited or, if no worker has exited, the worker whose batch is due.
    """
    if not isinstance(batches, WorkerBatches):
        return "", 0
    worker = next(iter(batches.exited_workers()), turn)
    return f", worker {worker} of {workers}", (worker - turn) % workers


class WorkerBatches(Iterator[Item]):
    """An iterator over a `DataLoader`'s batches that also manages the loader's workers.

    The workers exit when `close` is called, when this object is garbage-collected, or when this process exits. Even
    stuck workers exit.
    """

    def __init__(self, loader: DataLoader[Item]) -> None:
        """Start the workers of `loader`."""
        requests, send = multiprocessing.Pipe(duplex=False)
        loader.worker_init_fn = partial(_initialize, requests)
        # The workers inherit the signal mask, and unblock the signals when they have installed their handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
        try:
            with unmonitored_workers():
                self._batches: Any = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Run before Python's own exit handlers, which would send the workers a signal that they ignore, and then wait
        # for them.
        self.close = Finalize(self, _end, (self._batches, requests, send), exitpriority=0)

    def __next__(self) -> Item:
        """Return the next batch.

        Only this method detects that a worker has exited, so that the exit cannot interrupt a training step.
        """
        with monitored_workers(self._batches):
            return next(self._batches)

    def exited_workers(self) -> list[int]:
        """Return the indices of the workers that have exited."""
        return [number for number, process in enumerate(worker_processes(self._batches)) if not process.is_alive()]

    def wait_for_worker_exit(self) -> bool:
        """Wait up to `POLL_SECONDS` for a worker to exit, and return whether a worker has exited."""
        deadline = time.monotonic() + POLL_SECONDS
        while not (found := self.exited_workers()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(found)


def _end(batches: Any, requests: Connection, send: Connection) -> None:
    send.send_bytes(b"")
    shutdown_workers(batches)  # torch's own shutdown, which takes 10 seconds for each stuck worker
    for process in worker_processes(batches):
        process.join(10 * END_SECONDS)
        process.kill()
        process.join()
    requests.close()
    send.close()


def _initialize(requests: Connection, _: int) -> None:
    """Initialize a worker.

    Signals are caught rather than ignored, because the worker's child processes would inherit ignored signals.
    """
    for number in _NOT_FOR_WORKERS:
        signal.signal(number, _ignore_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_WORKERS)
    atexit.register(_exit_without_finalizing)
    threading.Thread(target=_exit_on_request, args=(requests,), name="exit on request", daemon=True).start()


def _exit_without_finalizing() -> None:
    """Exit before Python finalizes the interpreter. Only spawned workers call this function.

    The thread that sends batches may still be running PyTorch code. If that code returns during finalization, the
    worker aborts with the message "terminate called without an active exception", and its rank fails.
    """
    os._exit(0)


def _ignore_signals(number: int, frame: object) -> None:
    pass


def _exit_on_request(requests: Connection) -> None:
    """Terminate this worker when its rank requests termination or exits.

    PyTorch's own watchdog checks the rank only between batches, but a single batch may take forever.
    """
    rank = multiprocessing.parent_process()
    signs: list[Any] = [requests, rank.sentinel] if rank is not None else [requests]
    parent = os.getppid()  # the rank, or its fork server
    while not wait(signs, WATCH_SECONDS) and os.getppid() == parent:
        pass
    time.sleep(END_SECONDS)
    os._exit(0)
