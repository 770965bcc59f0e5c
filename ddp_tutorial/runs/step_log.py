"""The numbers of a run: every step and evaluation as a line of JSON, and, thinned out, as TensorBoard reads them."""

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

from ddp_tutorial.files import notify_observers, without_nan, write_atomically
from ddp_tutorial.runs.folder import PER_SECOND, read_lines
from ddp_tutorial.runs.summaries import rates_of
from ddp_tutorial.world import World

_encode = json.JSONEncoder(allow_nan=False).encode  # one for all lines: json.dumps makes one for each


class StepLog:
    """What a run keeps of its steps: a file of JSON lines, on rank 0, and the losses and rates, on every rank.

    What it is given is the same on all ranks already, so nothing here is collective. A step costs an entry in a list;
    `flush` writes them, in one write of whole lines, so a killed run's file is valid. `unit` is what the loss counts,
    "samples" or "tokens", say: the log has how many it were so far, and how many a second. There is no file before
    `open`.
    """

    def __init__(self, world: World, path: Path, unit: str = "samples", *, events: bool = False) -> None:
        self.unit = unit
        self.losses: list[float] = []
        self.rates: list[float] = []  # of `unit` per second, between flushes
        self.count = 0.0  # of `unit`, since the run began; a loss with weighted samples counts fractions
        self._path = path
        self._is_main = world.is_main
        self._file: FileIO | None = None
        self._pending: list[tuple[Any, ...]] = []  # what `add` was given: records are quicker made many at a time
        self._events = Events(path.parent, totals={unit, "elapsed"}) if events and world.is_main else None
        self._began = time.monotonic()
        self._flushed = time.monotonic()
        self._flushed_count = 0.0

    def open(self) -> None:
        """Make the file, on rank 0, or go on at its end where it is there."""
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
        """One step: means of the loss and the metrics over all ranks, how much the loss has counted, the norm of the
        gradient before clipping, seconds by phase, and other numbers."""
        self.count += count
        self.losses.append(means["loss"])
        known = {"step": step, "learning_rate": learning_rate, self.unit: self._total(), "elapsed": self.elapsed()}
        self._pending.append((known, seconds, others, means, grad_norm))

    def _total(self) -> float:
        """Return the count as it is written: an integer, unless the loss counts fractions."""
        rounded = round(self.count, 6)
        return int(rounded) if rounded.is_integer() else rounded

    def flush(self) -> None:
        """Write the steps since the last flush."""
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
        """Carry on after `step` of an earlier run: cut its file back, so that no step is in it twice.

        A line that cannot be read, as a disk may leave it, is left out, as readers do.
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
        """Let the file reach the disk, with all steps so far."""
        self.flush()
        if self._file is not None:
            notify_observers("fsync", self._path)
            os.fsync(self._file.fileno())

    def elapsed(self) -> float:
        """Seconds that the run has gone on, without those between an interruption and its resumption."""
        return round(time.monotonic() - self._began, 3)

    @property
    def latest(self) -> dict[str, float]:
        """The last loss and rate, for a progress bar; empty before the first flush."""
        return {"loss": self.losses[-1], self.unit + PER_SECOND: self.rates[-1]} if self.rates else {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not part of the time that steps take."""
        began = time.monotonic()
        yield
        self._flushed += time.monotonic() - began

    def write(self, *records: dict[str, Any]) -> None:
        """Append records to the file, on rank 0; the last of them becomes a point of TensorBoard's curves."""
        if self._file is not None:
            notify_observers("write", self._path)
            left = memoryview("".join(_encode(without_nan(record)) + "\n" for record in records).encode())
            while left:  # a disk that is nearly full takes a part, and says how much; then none, which is an error
                left = left[self._file.write(left) :]
        if self._events is not None:
            self._events.write(records[-1])

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.flush()
        self.close_file()

    def close_file(self) -> None:
        """Close the file as it is; steps that have not been written yet are not written."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


class Events:
    """The numbers of a run once more, as TensorBoard reads them: `tensorboard --logdir runs`, where that is installed.

    A file is made with the first numbers. A run that goes on after a step writes another, which says that what comes
    after that step in the file before does not count.
    """

    def __init__(self, folder: Path, totals: Set[str] = frozenset({"elapsed"})) -> None:
        from tensorboardX import SummaryWriter  # now, rather than in the time of a step
        from tensorboardX.proto.summary_pb2 import Summary

        self._summary, self._totals = Summary, totals
        self._open = partial(SummaryWriter, str(folder), flush_secs=10)
        self._purge_step: int | None = None
        self._writer: Any = None

    def write(self, record: dict[str, Any]) -> None:
        """Write one point of every curve: all numbers of a record but the step, other integers, and totals."""
        if self._writer is None:
            self._writer = self._open(purge_step=self._purge_step)
        shown = {name: value for name, value in record.items() if isinstance(value, float) and name not in self._totals}
        # At once: one by one, as add_scalar takes them, they cost a fast step several percent.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in shown.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), record["step"])

    def rewind(self, step: int) -> None:
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
