"""Write each step and evaluation of a run as a line of JSON and, optionally, as a TensorBoard event."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import notify_observers, without_nan, write_atomically
from ddp_tutorial.runs.folder import PER_SECOND, read_lines
from ddp_tutorial.runs.summaries import rates_of
from ddp_tutorial.world import World

_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would create an encoder for each line


class StepLog:
    """Log of a run's metrics. Rank 0 writes a JSON Lines file, and every rank keeps the losses and rates in memory.

    The methods expect values that are the same on all ranks, so no method is collective. `add` only appends to a list.
    `flush` writes complete lines in a single write, so a killed run leaves a valid file. `open` creates the file.
    """

    def __init__(self, world: World, path: Path, unit: str = "samples", *, events: bool = False) -> None:
        """Create a log without opening its file.

        `unit` is the unit of the `count` passed to `add`, such as "samples" or "tokens". The log contains the total
        count and the rate per second in this unit. With `events`, rank 0 also writes TensorBoard events.
        """
        self.unit = unit
        self.losses: list[float] = []
        self.rates: list[float] = []  # in `unit` per second, one for each flush
        self.count = 0.0  # in `unit`, since the start of the run; weighted samples count as fractions
        self._path = path
        self._is_main = world.is_main
        self._file: FileIO | None = None
        self._pending: list[tuple[Any, ...]] = []  # arguments of `add`; building many records at once is faster
        self._events = Events(path.parent, totals={unit, "elapsed"}) if events and world.is_main else None
        self._began = time.monotonic()
        self._flushed = time.monotonic()
        self._flushed_count = 0.0

    def open(self) -> None:
        """Open or create the file for appending, on rank 0."""
        if self._is_main:
            self._file = self._path.open("ab", buffering=0)

    def add(
        self,
        step: int,
        means: Mapping[str, float],
        count: float,
        grad_norm: torch.Tensor,
        learning_rate: float,
        seconds: Mapping[str, float],
        **others: float,
    ) -> None:
        """Add one step.

        `means` contains the means of the loss and the metrics over all ranks, and `count` is the number of tokens or
        samples on all ranks. `grad_norm` is the norm of the gradient before clipping.

        Raises:
            ConfigError: If a metric has the same name as a different value in the log.
        """
        names = {"step", "learning_rate", self.unit, self.unit + PER_SECOND, "elapsed", "seconds", "grad_norm", *others}
        if taken := names & means.keys():
            raise ConfigError(f"metric {min(taken)!r} must be renamed, because the log contains a value with this name")
        self.count += count
        self.losses.append(means["loss"])
        known = {"step": step, "learning_rate": learning_rate, self.unit: self._total(), "elapsed": self.elapsed()}
        self._pending.append((known, seconds, others, means, grad_norm))

    def _total(self) -> float:
        """Return the total count, as an integer unless the count is fractional."""
        rounded = round(self.count, 6)
        return int(rounded) if rounded.is_integer() else rounded

    def flush(self) -> None:
        """Write the steps that were added since the last flush."""
        if not self._pending:
            return
        steps, self._pending = self._pending, []
        now = time.monotonic()
        rate = (self.count - self._flushed_count) / (now - self._flushed)
        self._flushed, self._flushed_count = now, self.count
        self.rates.append(rate)
        measured = {self.unit + PER_SECOND: round(rate, 1)}
        self.write(
            *(
                {
                    **known,
                    "seconds": {name: round(value, 6) for name, value in seconds.items()},
                    **others,
                    **means,
                    "grad_norm": float(grad_norm),
                    **measured,
                }
                for known, seconds, others, means, grad_norm in steps
            )
        )

    def rewind(self, step: int, losses: list[float], count: float) -> None:
        """Rewind an earlier attempt's log to `step`, so that step `step + 1` can be added.

        Later steps are removed from the file, so that no step appears twice. Lines that cannot be parsed are removed as
        well. `losses` and `count` are the losses and the total number of tokens or samples up to `step`.
        """
        self.losses = list(losses)
        self.count = self._flushed_count = float(count)
        self._pending = []
        if self._file is not None:
            kept = [row for row in read_lines(self._path) if isinstance(row.get("step"), int) and row["step"] <= step]
            self._began = time.monotonic() - (kept[-1].get("elapsed", 0.0) if kept else 0.0)
            self.rates = rates_of(kept, self.unit)
            self._file.close()
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept).encode())
            self.open()
        if self._events is not None:
            self._events.rewind(step)

    def sync(self) -> None:
        """Flush the log, and wait until the file is on disk."""
        self.flush()
        if self._file is not None:
            notify_observers("fsync", self._path)
            os.fsync(self._file.fileno())

    def elapsed(self) -> float:
        """Return the run time in seconds, excluding the time between each interruption and the next restart."""
        return round(time.monotonic() - self._began, 3)

    @property
    def latest(self) -> dict[str, float]:
        """The most recent loss and rate, for a progress bar. The dict is empty before the first flush."""
        return {"loss": self.losses[-1], self.unit + PER_SECOND: self.rates[-1]} if self.rates else {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the block from the rate."""
        began = time.monotonic()
        yield
        self._flushed += time.monotonic() - began

    def write(self, *records: dict[str, Any]) -> None:
        """Append records to the file on rank 0. The last record is also sent to TensorBoard."""
        if self._file is not None:
            notify_observers("write", self._path)
            left = memoryview("".join(_encode(without_nan(record)) + "\n" for record in records).encode())
            while left:  # an almost full disk stores only some of the bytes; the next write then raises an error
                left = left[self._file.write(left) :]
        if self._events is not None:
            self._events.write(records[-1])

    def close(self) -> None:
        """Flush the log, and close the file."""
        self.flush()
        self.close_file()

    def close_file(self) -> None:
        """Close the file. Steps that have not been flushed are lost."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


class Events:
    """Writer for a run's TensorBoard events, which `tensorboard --logdir runs` shows.

    The first record creates the file. A resumed run writes a new file, so that TensorBoard discards the repeated steps
    of the earlier file.
    """

    def __init__(self, folder: Path, totals: Set[str]) -> None:
        """Create a writer without a file. `totals` contains the names of running totals, which are not plotted."""
        from tensorboardX import SummaryWriter  # imported now, so that the import does not slow down a step
        from tensorboardX.proto.summary_pb2 import Summary

        self._summary, self._totals = Summary, totals
        self._open = partial(SummaryWriter, str(folder), flush_secs=10)
        self._purge_step: int | None = None
        self._writer: Any = None

    def write(self, record: dict[str, Any]) -> None:
        """Write one point for each float in the record, except running totals."""
        if self._writer is None:
            self._writer = self._open(purge_step=self._purge_step)
        shown = {name: value for name, value in record.items() if isinstance(value, float) and name not in self._totals}
        # One summary for all values: calling add_scalar for each value costs several percent of a fast step.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in shown.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), record["step"])

    def rewind(self, step: int) -> None:
        """Close the file. When the next file is written, TensorBoard discards all events after `step`."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        """Close the current file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
