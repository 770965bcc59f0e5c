"""Define a source in which every rank reads its own samples, and helpers for the other sources."""

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddp_tutorial.compat import tree_flatten, tree_map, tree_unflatten
from ddp_tutorial.config import ConfigError
from ddp_tutorial.rng import seeded_rng
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Indices, global_micro_batch_sizes, shard_micro_batches
from ddp_tutorial.sharding.samples import ArrowShards, Data, Tensors, TokenBlocks, as_batch, as_samples, select_rows
from ddp_tutorial.sharding.source import LocalBatch, SourceState, Tree
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
# A micro-batch: its index among the micro-batches of all ranks, the cursor after its step, and its sample indices.
_Planned = tuple[int, int, Indices]


class ShardedSource:
    """A source in which every rank computes the indices of its own samples and reads those samples.

    With `workers` > 0, worker processes prefetch batches and apply `transform`. The random numbers (torch, NumPy, or
    Python) that the dataset, `collate_fn`, and `transform` draw depend only on the seed, the cursor, and the
    micro-batch's global index. Therefore, neither resuming nor the number of workers changes the random numbers. Each
    micro-batch is collated separately, so its padding depends only on its own samples.

    If a worker crashes, the source logs a warning and restarts the workers, at most once per step.
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
        """Store the arguments. Worker processes start at the first step.

        Args:
            data: A map-style dataset, or the result of `as_samples`, which also accepts a `collate_fn`.
            sharding: A sampler that returns the global batch of each step.
            world: The ranks of the run.
            transform: A function that is applied to each batch, for example to augment the data.
            workers: The number of worker processes on this rank. If 0, the main process reads the samples.
            prefetch: The number of batches that each worker prefetches.
            worker_timeout: The timeout for a batch, in seconds.

        Raises:
            ConfigError: If `sharding.order` does not contain exactly `len(data)` samples, or if a rank would never
                receive a sample.
        """
        self.data: Data = as_samples(data)
        if len(self.data) != sharding.order.samples:
            raise ConfigError(
                f"the data must contain {sharding.order.samples} samples to match the permutation, got {len(self.data)}"
            )
        require_samples_for_all(sharding, world)
        self.sharding, self.world, self.batch_size = sharding, world, sharding.batch_size
        self.workers, self.worker_timeout = workers, worker_timeout
        self.cursor = 0
        self._parts = 1  # micro-batches per step
        self._planned: deque[tuple[list[Indices], int, int]] = deque()  # this rank's samples, cursor, global count
        self._fetch = _Fetch(self.data, transform, sharding.order.seed or 0)
        self._options = worker_options(workers, prefetch, worker_timeout)
        self._batches: Iterator[list[Tree]] | None = None
        self._restart = WorkerRestart()

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in one epoch; see `GlobalBatchSampler.steps_per_epoch`."""
        return self.sharding.steps_per_epoch

    @property
    def uses_local_rng(self) -> bool:
        """Whether reading uses or seeds the random number generators of this process.

        If true, no other thread may use the random number generators at the same time.
        """
        return not (self.workers or self._fetch.is_deterministic)

    def _plan(self) -> Iterator[list[_Planned]]:
        cursor, rank, size = self.cursor, self.world.rank, self.world.size
        while True:
            indices, cursor = self.sharding.step(cursor)
            mine = shard_micro_batches(indices, rank, size, self._parts)
            self._planned.append((mine, cursor, len(indices)))
            yield [(rank + size * number, cursor, each) for number, each in enumerate(mine)]

    def __next__(self) -> LocalBatch:
        """Return this rank's samples for the next step as one batch; see `take`."""
        return self.take(1)[0]

    def take(self, micro_batches: int) -> list[LocalBatch]:
        """Return this rank's samples for the next step, split into micro-batches.

        Raises:
            SourceError: If reading fails, if a worker crashes twice at the same step, or if a worker returns no batch
                within `worker_timeout` seconds. The message identifies the rank, the worker, and the samples.
        """
        if micro_batches != self._parts:
            self.close()  # the prefetched batches have a different number of micro-batches
            self._parts = micro_batches
        if self._batches is None:
            self._planned.clear()  # left by an interrupt while the workers started
            self._batches = self._read()
            self._taken = 0
        try:
            samples = next_from(self._batches, self.worker_timeout)
        except Exception as error:
            turn = self._taken % max(1, self.workers)
            who, ahead = failed_worker(self._batches, turn, self.workers)
            where = _range(np.concatenate(self._planned[ahead][0])) if ahead < len(self._planned) else "prefetching"
            message = f"rank {self.world.rank}{who}, {where}: {error}"
            again = self._restart.is_due(self._batches, self.cursor, message)
            self.close()  # so that the caller can retry the step
            if again:
                return self.take(micro_batches)
            raise SourceError(message) from error
        except BaseException:  # an interrupt; the next step reads the same samples again
            self.close()
            raise
        self._taken += 1
        mine, self.cursor, world_count = self._planned.popleft()
        counts = global_micro_batch_sizes(world_count, self.world.size, micro_batches)
        return [
            LocalBatch(to_device(each, self.world.device), len(indices), count)
            for each, indices, count in zip(samples, mine, counts, strict=True)
        ]

    def _read(self) -> Iterator[list[Tree]]:
        """Iterate over the batches, starting at the cursor.

        Without workers or a GPU, this method does not use a `DataLoader`, which would only add overhead.
        """
        if not self.workers and self.world.device.type == "cpu":
            return map(self._fetch.__getitem__, self._plan())
        loader: DataLoader[list[Tree]] = DataLoader(
            self._fetch,
            sampler=self._plan(),
            batch_size=None,  # the plan already yields batches
            generator=torch.Generator(),  # otherwise torch's global generator would advance
            pin_memory=self.world.device.type == "cuda",
            **self._options,
        )
        return WorkerBatches(loader) if self.workers else iter(loader)

    def state_dict(self) -> SourceState:
        """Return the cursor, which is the position in the sample sequence."""
        return {"cursor": self.cursor}

    def load_state_dict(self, state: SourceState) -> None:
        """Resume from a saved cursor, and discard prefetched batches."""
        self.close()
        self.cursor = state["cursor"]

    def close(self) -> None:
        """Stop the workers. The next step starts new workers."""
        if isinstance(self._batches, WorkerBatches):
            self._batches.close()
        self._batches = None
        self._planned.clear()


def _range(indices: Indices) -> str:
    if not len(indices):
        return "no samples"
    return f"samples {indices.min()} to {indices.max()} ({len(indices)} of them)"


class ByValue:
    """A base class for objects that are pickled by value with cloudpickle.

    As a result, functions defined in a notebook cell can be sent to a worker process.
    """

    def __getstate__(self) -> bytes:
        """Pickle the attributes by value."""
        return cloudpickle.dumps(vars(self))

    def __setstate__(self, state: bytes) -> None:
        """Restore the attributes."""
        vars(self).update(cloudpickle.loads(state))


def pickled(thing: object) -> bytes:
    """Pickle an object for a different process, by reference if possible and otherwise by value.

    A type from a notebook cell must be pickled by value, because pickle cannot import the type. A type from a script
    must be pickled by reference, because the receiver would otherwise create a second type with the same name.
    """
    try:
        return pickle.dumps(thing)
    except Exception:  # pickle raises several types
        return cloudpickle.dumps(thing)


class _Sent:
    """A batch that a worker sends to its rank. Unpickling returns the batch itself.

    A `DataLoader` worker pickles its batches in a background thread. If pickling fails, the rank receives nothing.
    """

    def __init__(self, batch: Tree) -> None:
        self.batch = batch

    def __reduce__(self) -> Any:
        leaves, form = tree_flatten(self.batch)
        return _received, (pickled(tree_unflatten(list(range(len(leaves))), form)), leaves)


def _received(form: bytes, leaves: list[torch.Tensor]) -> Tree:
    return tree_unflatten(leaves, tree_flatten(pickle.loads(form))[1])


def for_rank(batch: Tree) -> Tree:
    """Return a batch of tensors in a form that a worker can send to its rank.

    The batch may contain types from a notebook cell. Outside a worker, the batch is returned unchanged.
    """
    columns = batch.values() if type(batch) is dict else batch if type(batch) in {list, tuple} else [None]
    if get_worker_info() is None or all(map(torch.is_tensor, columns)):
        return batch
    return _Sent(batch)


@contextmanager
def errors_for_rank() -> Iterator[None]:
    """Replace exceptions of types that cannot be pickled, so that a worker can report each error to its rank.

    Raises:
        RuntimeError: In a worker, with the type name and message of the original exception.
    """
    try:
        yield
    except Exception as error:
        if get_worker_info() is not None:
            try:
                pickle.dumps(type(error))
            except Exception:  # pickle raises several types
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


class _Fetch(ByValue, Dataset[list[Tree]]):
    """The dataset that the `DataLoader` and its workers read. Each item is a list of one step's micro-batches."""

    def __init__(self, data: Data, transform: Transform | None, seed: int) -> None:
        self.data, self.transform, self.seed = data, transform, seed
        # These datasets draw no random numbers, and seeding would take longer than reading them.
        self.is_deterministic = transform is None and isinstance(data, TokenBlocks | ArrowShards | Tensors)

    def __getitem__(self, step: list[_Planned]) -> list[Tree]:
        with errors_for_rank():
            return [for_rank(self._batch(*planned)) for planned in step]

    def _batch(self, number: int, cursor: int, indices: Indices) -> Tree:
        if not len(indices):  # read one sample and drop it, to get a batch of 0 rows with the right structure
            return select_rows(self._batch(number, cursor, np.zeros(1, dtype=np.int64)), slice(0, 0))
        with nullcontext() if self.is_deterministic else seeded_rng(self.seed, number, cursor):
            samples = self.data.fetch(indices)
            return as_batch(self.transform(samples) if self.transform else samples, len(indices))


def require_samples_for_all(sharding: GlobalBatchSampler, world: World) -> None:
    """Raise `ConfigError` if there are so many ranks that some ranks would never receive a sample."""
    samples, batch = sharding.order.samples, sharding.batch_size
    repeats = sharding.remainder in {"pad", "carry"}  # samples are repeated, so there may be fewer samples than ranks
    limit = batch if repeats else min(batch, samples)
    if limit < world.size:
        raise ConfigError(
            f"rank {limit} of {world.size} has no samples: with {samples} samples and batch_size {batch}, at most "
            f"{limit} ranks have samples. Use fewer ranks."
        )


def require_streams_for_all(streams: int, batch_size: int, world: World) -> None:
    """Raise `ConfigError` if there are fewer streams than ranks, or if `batch_size` is less than `streams`."""
    if streams < world.size:
        raise ConfigError(f"the number of streams must be at least {world.size} (one stream per rank), got {streams}")
    if batch_size < streams:
        raise ConfigError(
            f"'batch_size' must be at least {streams} (one sample per stream), got {batch_size}. Use a larger "
            "batch_size, or fewer streams."
        )


def to_device(samples: Tree, device: torch.device) -> Tree:
    """Move a batch to this rank's device.

    On the CPU, the batch is not copied. A copy from pinned memory to a GPU can overlap with computation.
    """
    if device.type == "cpu":
        return samples
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf, samples)
