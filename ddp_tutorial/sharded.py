"""Every rank works out which samples are its own, and reads those; and what all sources have in common."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import cloudpickle
import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_tutorial.config import ConfigError
from ddp_tutorial.data import Data, Tree
from ddp_tutorial.dice import dice_of
from ddp_tutorial.sharding import Indices, Sharding, deal
from ddp_tutorial.world import World

Batch = TypeVar("Batch")
Transform = Callable[[Tree], Tree]
State = Mapping[str, int]

# How long a worker may take for one batch, in seconds, before it counts as stuck.
PATIENCE = 120.0
# How often it is made sure, in seconds, that they are alive.
LOOK = 2.0


@dataclass(frozen=True)
class Share:
    """What a rank gets of one step: a tree of `count` samples (there may be none), of `world_count` on all ranks."""

    samples: Tree
    count: int
    world_count: int


class SourceError(RuntimeError):
    """Samples could not be read; says by which rank and worker, and which samples."""


class Source(Protocol):
    """An endless iterator over steps. Every rank takes the same number of them."""

    def __next__(self) -> Share: ...

    def state(self) -> State:
        """Where the world stands after the steps that have been taken. Reading ahead does not count."""
        ...

    def restore(self, state: State) -> None:
        """Go on from there. Before the first step."""
        ...

    def close(self) -> None:
        """Stop reading ahead. Collective where ranks read for one another."""
        ...


class ShardedSource:
    """Every rank works out which samples are its own, and reads those.

    With `workers`, other processes read up to `prefetch` batches ahead each, and apply `transform` there. The random
    numbers that `transform` draws (torch's, NumPy's, Python's) depend on seed, rank and cursor alone: a run that goes
    on draws what it would have drawn. What a worker raises, or that it has died or is stuck, is raised here as a
    `SourceError`.
    """

    def __init__(
        self,
        data: Data,
        sharding: Sharding,
        world: World,
        *,
        transform: Transform | None = None,
        workers: int = 0,
        prefetch: int = 2,
        patience: float = PATIENCE,
    ) -> None:
        if len(data) != sharding.order.samples:
            raise ConfigError(f"the data have {len(data)} samples, the order is one of {sharding.order.samples}")
        everyone_has_some(sharding, world)
        self.data, self.sharding, self.world = data, sharding, world
        self.workers, self.patience = workers, patience
        self.cursor = 0
        self._planned: deque[tuple[Indices, int, int]] = deque()  # samples of this rank, cursor and count of the world
        self._fetch = _Fetch(data, transform, (sharding.order.seed or 0, world.rank))
        self._options = worker_options(workers, prefetch, patience)
        self._batches: Iterator[Tree] | None = None

    def _plan(self) -> Iterator[tuple[int, Indices]]:
        cursor = self.cursor
        while True:
            indices, cursor = self.sharding.step(cursor)
            mine = deal(indices, self.world.rank, self.world.size)
            self._planned.append((mine, cursor, len(indices)))
            yield cursor, mine

    def __next__(self) -> Share:
        if self._batches is None:
            self._batches = self._read()
            self._taken = 0
        try:
            samples = next_from(self._batches, self.patience)
        except Exception as error:
            turn = self._taken % max(1, self.workers)
            who, ahead = culprit(self._batches, turn, self.workers)
            where = _range(self._planned[ahead][0]) if ahead < len(self._planned) else "reading ahead"
            self.close()  # the same step can be tried again
            raise SourceError(f"rank {self.world.rank}{who}, {where}: {error}") from error
        self._taken += 1
        mine, self.cursor, world_count = self._planned.popleft()
        return Share(to_device(samples, self.world.device), len(mine), world_count)

    def _read(self) -> Iterator[Tree]:
        """Batch after batch, from the cursor on. Without workers, torch's DataLoader would only cost time."""
        if not self.workers and self.world.device.type == "cpu":
            return map(self._fetch.__getitem__, self._plan())
        loader: DataLoader[Tree] = DataLoader(
            self._fetch,
            sampler=_Plan(self._plan),
            batch_size=None,  # what the plan asks for is a batch already
            generator=torch.Generator(),  # else torch's own would move on
            pin_memory=self.world.device.type == "cuda",
            **self._options,
        )
        return iter(loader)

    def state(self) -> State:
        """The cursor, which is a number of samples."""
        return {"cursor": self.cursor}

    def restore(self, state: State) -> None:
        """At any time: what has been read ahead is thrown away."""
        self.close()
        self.cursor = state["cursor"]

    def close(self) -> None:
        """End the workers. The next step would start new ones."""
        end_workers(self._batches)
        self._batches = None
        self._planned.clear()


def worker_options(workers: int, prefetch: int, patience: float) -> dict[str, Any]:
    """What a DataLoader needs to know for them. Raises `ConfigError` for fewer than none."""
    if workers < 0:
        raise ConfigError(f"'workers' should be 0 or more processes, found {workers}")
    if not workers:
        return {}
    look = min(LOOK, patience)
    return {"num_workers": workers, "prefetch_factor": prefetch, "timeout": look, "worker_init_fn": _seed_numpy}


def next_from(batches: Iterator[Batch], patience: float) -> Batch:
    """The next of a DataLoader's batches. It looks for dead workers only when its time is up, so give it little."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            if time.monotonic() >= deadline:
                raise SourceError(f"no answer within {patience:g} s; it is stuck, or slow") from None


def culprit(batches: object, turn: int, workers: int) -> tuple[str, int]:
    """Whom an error is about, and how many batches after this: a worker that has died, or the one whose turn it is."""
    if not workers:
        return "", 0
    processes = getattr(batches, "_workers", [])
    worker = next((number for number, process in enumerate(processes) if not process.is_alive()), turn)
    return f", worker {worker} of {workers}", (worker - turn) % workers


def _seed_numpy(_: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)  # torch and Python's random are seeded by torch


def _range(indices: Indices) -> str:
    if not len(indices):
        return "no samples"
    return f"samples {indices.min()} to {indices.max()} ({len(indices)} of them)"


def end_workers(batches: object) -> None:
    """Now, and not when the last that refers to them is gone, which may be the traceback of an error."""
    if shutdown := getattr(batches, "_shutdown_workers", None):
        shutdown()


class _Plan(Sampler[tuple[int, Indices]]):
    def __init__(self, plan: Callable[[], Iterator[tuple[int, Indices]]]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        return self.plan()


class ByValue:
    """Goes to a worker, a new process, with whatever functions it holds: those of a notebook's cell, too."""

    def __getstate__(self) -> bytes:
        return cloudpickle.dumps(vars(self))

    def __setstate__(self, state: bytes) -> None:
        vars(self).update(cloudpickle.loads(state))


class _Fetch(ByValue, Dataset[Tree]):
    """What runs in a worker."""

    def __init__(self, data: Data, transform: Transform | None, entropy: tuple[int, ...]) -> None:
        self.data, self.transform, self.entropy = data, transform, entropy

    def __getitem__(self, planned: tuple[int, Indices]) -> Tree:
        cursor, indices = planned
        samples = self.data.fetch(indices)
        if self.transform is None:
            return samples
        with dice_of(*self.entropy, cursor):
            return self.transform(samples)


def everyone_has_some(sharding: Sharding, world: World) -> None:
    """Raise `ConfigError` if some rank would never see a sample."""
    samples, batch = sharding.order.samples, sharding.batch
    repeats = sharding.remainder in {"pad", "carry"}  # so that few samples serve many ranks
    for limit, what in ((batch, f"batch {batch}"), (batch if repeats else samples, f"{samples} samples")):
        if limit < world.size:
            raise ConfigError(
                f"rank {limit} of {world.size} has no samples: {samples} samples, batch {batch}, "
                f"and {what} is not enough for {world.size} ranks. Use fewer ranks."
            )


def to_device(samples: Tree, device: torch.device) -> Tree:
    """On the CPU nothing is copied; to a GPU, from pinned memory, computing goes on meanwhile."""
    if device.type == "cpu":
        return samples
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf, samples)
