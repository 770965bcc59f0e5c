"""`ShardedSource`: every rank works out which samples are its own, and reads those. And what all sources share."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_tutorial.compat import tree_map
from ddp_tutorial.config import ConfigError
from ddp_tutorial.rng import seeded_rng
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Indices, global_micro_batch_sizes, shard_micro_batches
from ddp_tutorial.sharding.samples import (
    ArrowShards,
    Data,
    Tensors,
    TokenBlocks,
    Tree,
    as_batch,
    as_samples,
    select_rows,
)
from ddp_tutorial.sharding.workers import (
    WORKER_TIMEOUT,
    SourceError,
    WorkerBatches,
    WorkerRestart,
    failed_worker,
    next_from,
    worker_options,
)
from ddp_tutorial.world import World

Transform = Callable[[Tree], Tree]
SourceState = Mapping[str, int]
# A micro-batch: its number among those of all ranks, the cursor after its step, and its samples.
_Planned = tuple[int, int, Indices]


@dataclass(frozen=True)
class LocalBatch:
    """What a rank gets of one step, or of one micro-batch of it: `count` samples, of `global_count` on all ranks.

    `samples` is what the data's fetch or `collate_fn`, then `transform`, made: a tree of tensors with `count` rows. At
    the end of an epoch a rank may have none of a step; then the tensors have no rows.
    """

    samples: Tree
    count: int
    global_count: int


class Source(Protocol):
    """An endless iterator over steps. Every rank takes the same number of them."""

    @property
    def batch_size(self) -> int:
        """Samples of a step over all ranks; the last step of an epoch may have fewer."""
        ...

    def take(self, micro_batches: int) -> list[LocalBatch]:
        """This rank's samples of the next step, in `parts` micro-batches; see `order.shard_micro_batches`."""
        ...

    def __next__(self) -> LocalBatch:
        """This rank's samples of the next step, in one batch."""
        ...

    def state_dict(self) -> SourceState:
        """Where the world stands after the steps that have been taken, the same on every rank. Batches that were read
        ahead and not taken do not count."""
        ...

    def load_state_dict(self, state: SourceState) -> None:
        """Go on from there. Before the first step."""
        ...

    def close(self) -> None:
        """Stop reading ahead. Collective where ranks read for one another."""
        ...


class ShardedSource:
    """Every rank works out which samples are its own, and reads those.

    `data` is any map-style dataset, or samples as `as_samples` makes them (with a `collate_fn`, for instance).

    With `workers`, other processes read up to `prefetch` batches ahead each, and apply `transform` there. The random
    numbers that the dataset, its `collate_fn` and `transform` draw (torch's, NumPy's, Python's) depend on seed, cursor
    and micro-batch alone: a resumed run draws the same ones, and the number of workers changes nothing. Each
    micro-batch is collated by itself, so how far it is padded does not depend on the number of ranks.

    A worker that has died is told in the log and, once for each step, the workers are started again at the same
    samples. Raises `SourceError`, naming rank, worker and samples, for whatever fails while reading, a worker that dies
    twice at a step, and one that gives no batch within `worker_timeout` seconds.
    """

    def __init__(
        self,
        data: Any,
        sharding: GlobalBatchSampler,
        world: World,
        *,
        transform: Transform | None = None,
        workers: int = 0,
        prefetch: int = 2,
        worker_timeout: float = WORKER_TIMEOUT,
    ) -> None:
        self.data: Data = as_samples(data)
        if len(self.data) != sharding.order.samples:
            raise ConfigError(f"the data have {len(self.data)} samples, the order is one of {sharding.order.samples}")
        require_samples_for_all(sharding, world)
        self.sharding, self.world, self.batch_size = sharding, world, sharding.batch_size
        self.workers, self.worker_timeout = workers, worker_timeout
        self.cursor = 0
        self._parts = 1  # micro-batches of a step
        self._planned: deque[tuple[list[Indices], int, int]] = deque()  # this rank's samples; the world's cursor, count
        self._fetch = _Fetch(self.data, transform, sharding.order.seed or 0)
        self._options = worker_options(workers, prefetch, worker_timeout)
        self._batches: Iterator[list[Tree]] | None = None
        self._revival = WorkerRestart()

    @property
    def uses_local_rng(self) -> bool:
        """Does reading draw, or seed, random numbers of this process? No other thread may, meanwhile."""
        return not (self.workers or self._fetch.is_deterministic)

    def _plan(self) -> Iterator[list[_Planned]]:
        cursor, rank, size = self.cursor, self.world.rank, self.world.size
        while True:
            indices, cursor = self.sharding.step(cursor)
            mine = shard_micro_batches(indices, rank, size, self._parts)
            self._planned.append((mine, cursor, len(indices)))
            yield [(rank + size * number, cursor, each) for number, each in enumerate(mine)]

    def __next__(self) -> LocalBatch:
        return self.take(1)[0]

    def take(self, micro_batches: int) -> list[LocalBatch]:
        if micro_batches != self._parts:
            self.close()  # what has been read ahead is in other micro-batches
            self._parts = micro_batches
        if self._batches is None:
            self._batches = self._read()
            self._taken = 0
        try:
            samples = next_from(self._batches, self.worker_timeout)
        except Exception as error:
            turn = self._taken % max(1, self.workers)
            who, ahead = failed_worker(self._batches, turn, self.workers)
            where = _range(np.concatenate(self._planned[ahead][0])) if ahead < len(self._planned) else "reading ahead"
            told = f"rank {self.world.rank}{who}, {where}: {error}"
            again = self._revival.is_due(self._batches, self.cursor, told)
            self.close()  # the same step can be tried again
            if again:
                return self.take(micro_batches)
            raise SourceError(told) from error
        self._taken += 1
        mine, self.cursor, world_count = self._planned.popleft()
        counts = global_micro_batch_sizes(world_count, self.world.size, micro_batches)
        return [
            LocalBatch(to_device(each, self.world.device), len(indices), count)
            for each, indices, count in zip(samples, mine, counts, strict=True)
        ]

    def _read(self) -> Iterator[list[Tree]]:
        """Batch after batch, from the cursor on. Without workers and a GPU, torch's DataLoader would only cost time."""
        if not self.workers and self.world.device.type == "cpu":
            return map(self._fetch.__getitem__, self._plan())
        loader: DataLoader[list[Tree]] = DataLoader(
            self._fetch,
            sampler=_Plan(self._plan),
            batch_size=None,  # what the plan asks for are batches already
            generator=torch.Generator(),  # else torch's own would move on
            pin_memory=self.world.device.type == "cuda",
            **self._options,
        )
        return WorkerBatches(loader) if self.workers else iter(loader)

    def state_dict(self) -> SourceState:
        """The cursor, which is a number of samples."""
        return {"cursor": self.cursor}

    def load_state_dict(self, state: SourceState) -> None:
        """May be called at any time; batches that were read ahead are thrown away."""
        self.close()
        self.cursor = state["cursor"]

    def close(self) -> None:
        """End the workers. The next step would start new ones."""
        if isinstance(self._batches, WorkerBatches):
            self._batches.close()
        self._batches = None
        self._planned.clear()


def _range(indices: Indices) -> str:
    if not len(indices):
        return "no samples"
    return f"samples {indices.min()} to {indices.max()} ({len(indices)} of them)"


class _Plan(Sampler[list[_Planned]]):
    """The steps that a DataLoader reads, as `plan()` yields them, each a list of micro-batches."""

    def __init__(self, plan: Callable[[], Iterator[list[_Planned]]]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[list[_Planned]]:
        return self.plan()


class ByValue:
    """Pickled by value with cloudpickle, so that functions defined in a notebook's cell reach a worker process."""

    def __getstate__(self) -> bytes:
        return cloudpickle.dumps(vars(self))

    def __setstate__(self, state: bytes) -> None:
        vars(self).update(cloudpickle.loads(state))


class _Fetch(ByValue, Dataset[list[Tree]]):
    """The dataset that a DataLoader, and so a worker, reads: its items are steps, in micro-batches."""

    def __init__(self, data: Data, transform: Transform | None, seed: int) -> None:
        self.data, self.transform, self.seed = data, transform, seed
        # Seeding takes longer than reading from these, and they draw nothing.
        self.is_deterministic = transform is None and isinstance(data, TokenBlocks | ArrowShards | Tensors)

    def __getitem__(self, step: list[_Planned]) -> list[Tree]:
        return [self._batch(*planned) for planned in step]

    def _batch(self, number: int, cursor: int, indices: Indices) -> Tree:
        if not len(indices):  # one sample goes the way of all, and is then left out: what is left has the right form
            return select_rows(self._batch(number, cursor, np.zeros(1, dtype=np.int64)), slice(0, 0))
        with nullcontext() if self.is_deterministic else seeded_rng(self.seed, number, cursor):
            samples = self.data.fetch(indices)
            return as_batch(self.transform(samples) if self.transform else samples, len(indices))


def require_samples_for_all(sharding: GlobalBatchSampler, world: World) -> None:
    """Raise `ConfigError` if some rank would never see a sample."""
    samples, batch = sharding.order.samples, sharding.batch_size
    repeats = sharding.remainder in {"pad", "carry"}  # so that few samples serve many ranks
    for limit, what in ((batch, f"batch_size {batch}"), (batch if repeats else samples, f"{samples} samples")):
        if limit < world.size:
            raise ConfigError(
                f"rank {limit} of {world.size} has no samples: {samples} samples, batch_size {batch}, "
                f"and {what} is not enough for {world.size} ranks. Use fewer ranks."
            )


def require_streams_for_all(streams: int, batch_size: int, world: World) -> None:
    """Raise `ConfigError` if some rank would follow no stream, or some stream has no place in a batch."""
    if streams < world.size:
        raise ConfigError(f"{streams} streams are too few for {world.size} ranks, which follow one or more each")
    if batch_size < streams:
        raise ConfigError(
            f"a batch of {batch_size} has no place for one sample of each of {streams} streams. Use a larger "
            "batch_size, or fewer streams."
        )


def to_device(samples: Tree, device: torch.device) -> Tree:
    """A batch on this rank's device. On the CPU nothing is copied; to a GPU the copy, from pinned memory, runs beside
    the computation."""
    if device.type == "cpu":
        return samples
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf, samples)
