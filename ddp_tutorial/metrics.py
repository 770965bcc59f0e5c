"""Numbers that mean the same whatever the number of ranks, and the file they are kept in."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.files import write_atomically
from ddp_tutorial.world import World, require_group


@dataclass(frozen=True)
class Mean:
    """A mean that has not been taken yet: sums and counts of ranks and micro-batches add up, means do not."""

    sum: torch.Tensor
    count: int

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.count + other.count)


def mean_over_ranks(world: World, means: list[Mean]) -> list[float]:
    """The true mean of each, over the samples of all ranks, in one collective. Every rank must bring equally many."""
    return start_mean_over_ranks(world, means)()


def start_mean_over_ranks(world: World, means: list[Mean]) -> Callable[[], list[float]]:
    """Begin `mean_over_ranks` without waiting for the other ranks; call what it returns to wait and have the result."""
    require_group(world)
    reduced = torch.stack(
        [torch.stack([mean.sum.double(), mean.sum.new_tensor(mean.count).double()]) for mean in means]
    )
    work = dist.all_reduce(reduced, async_op=True) if world.size > 1 else None

    def finish() -> list[float]:
        if work is not None:
            work.wait()
        sums, counts = reduced.unbind(1)
        values: list[float] = (sums / counts).tolist()
        return values

    return finish


class StepLog:
    """What a run keeps of its steps: a file of JSON lines, on rank 0, and the losses and rates, on every rank.

    Losses cross the ranks many steps at a time, and while the next steps already run: waiting for one another at
    each step, even at each tenth, costs a fast step several percent. Hence the file is one `flush` behind, until
    `settle`. Each flush is one write of whole lines, so a killed run's file is valid.
    """

    def __init__(self, world: World, path: Path, tokens_per_step: int, *, events: bool = False) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []  # tokens per second between flushes
        self._world = world
        self._tokens_per_step = tokens_per_step
        self._path = path
        self._file = path.open("ab", buffering=0) if world.is_main else None
        self._pending: list[tuple[Mean, torch.Tensor, dict[str, Any]]] = []
        self._underway: Callable[[], None] | None = None
        self._events = Events(path.parent) if events and world.is_main else None
        self._began = time.monotonic()
        self._window_began = time.monotonic()

    def add(
        self,
        step: int,
        loss: Mean,
        grad_norm: torch.Tensor,
        learning_rate: float,
        seconds: dict[str, float],
        **others: float,
    ) -> None:
        """One step: this rank's loss, the norm of the gradient before clipping, seconds by phase, and what else there
        is that all ranks know."""
        record = {
            "step": step,
            "learning_rate": learning_rate,
            "tokens": step * self._tokens_per_step,
            "elapsed": self.elapsed(),
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
        } | others
        self._pending.append((loss, grad_norm, record))

    def flush(self) -> None:
        """Write the steps up to the flush before, and send off those since. Every rank, at the same step."""
        self._land()
        if not self._pending:
            return
        steps, self._pending = self._pending, []
        now = time.monotonic()
        rate = len(steps) * self._tokens_per_step / (now - self._window_began)
        self._window_began = now
        losses_of_world = start_mean_over_ranks(self._world, [loss for loss, _, _ in steps])

        def finish() -> None:
            losses = losses_of_world()
            for loss, (_, grad_norm, record) in zip(losses, steps, strict=True):
                record |= {"loss": loss, "grad_norm": float(grad_norm), "tokens_per_second": round(rate, 1)}
            self.write(*(record for _, _, record in steps))
            self.losses += losses
            self.rates.append(rate)

        self._underway = finish

    def go_back(self, step: int, losses: list[float]) -> None:
        """Carry on after `step` of an earlier run: cut its file back, so that no step is in it twice."""
        self.losses = list(losses)
        if self._file is not None:
            lines = self._path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
            elapsed = json.loads(kept[-1]).get("elapsed", 0.0) if kept else 0.0
            self._began = time.monotonic() - elapsed
            self._file.close()
            write_atomically(self._path, b"".join(kept))
            self._file = self._path.open("ab", buffering=0)
        if self._events is not None:
            self._events.go_back(step)

    def sync(self) -> None:
        """Let the file reach the disk, with all steps so far. Every rank, at the same step."""
        self.settle()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def settle(self) -> None:
        """Write every step so far, waiting for the other ranks. Every rank, at the same step."""
        self.flush()
        self._land()

    def _land(self) -> None:
        finish, self._underway = self._underway, None
        if finish is not None:
            finish()

    def elapsed(self) -> float:
        """Seconds that the run has gone on, without those between an interruption and its resumption."""
        return round(time.monotonic() - self._began, 3)

    @property
    def latest(self) -> dict[str, float]:
        """The last loss and rate that are known, for whoever watches; nothing before the second flush."""
        return {"loss": self.losses[-1], "tokens_per_second": self.rates[-1]} if self.rates else {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not part of the time that steps take."""
        began = time.monotonic()
        yield
        self._window_began += time.monotonic() - began

    def write(self, *records: dict[str, Any]) -> None:
        """Append records to the file, on rank 0."""
        if self._file is not None:
            lines = "".join(json.dumps(without_nan(record), allow_nan=False) + "\n" for record in records)
            self._file.write(lines.encode())
        if self._events is not None:
            self._events.write(records)

    def close(self) -> None:
        """Settle, and close the file."""
        self.settle()
        self.close_file()

    def close_file(self) -> None:
        """Without the steps that have not been written yet."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


class Events:
    """The numbers of a run once more, as TensorBoard reads them: `tensorboard --logdir runs`, where that is installed.

    A file is made with the first numbers. A run that goes on after a step writes another, which says that what comes
    after that step in the file before does not count.
    """

    SHOWN = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "loss_scale")

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # now, rather than in the time of a step
        from tensorboardX.proto.summary_pb2 import Summary

        self._summary = Summary
        self._open = partial(SummaryWriter, str(folder), flush_secs=10)
        self._purge_step: int | None = None
        self._writer: Any = None

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        if self._writer is None:
            self._writer = self._open(purge_step=self._purge_step)
        for record in records:
            # All of a step at once: one by one, as add_scalar takes them, they cost a fast step several percent.
            values = [self._summary.Value(tag=name, simple_value=record[name]) for name in self.SHOWN if name in record]
            self._writer.file_writer.add_summary(self._summary(value=values), record["step"])

    def go_back(self, step: int) -> None:
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: a diverged loss becomes null, and readers show a gap."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
