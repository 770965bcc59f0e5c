"""Define a source for data that do not support indexing. Every rank reads its own streams of the data."""

import logging
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.compat import hidden_worker_info, tree_map
from ddp_tutorial.config import ConfigError, require_package
from ddp_tutorial.rng import seed_of, seeded_rng
from ddp_tutorial.sharding.permutation import require_seed
from ddp_tutorial.sharding.samples import ArrowShards, CollateFn, as_batch, collate_rows, is_random_access, select_rows
from ddp_tutorial.sharding.sharded import (
    ByValue,
    Transform,
    errors_for_rank,
    for_rank,
    require_streams_for_all,
    to_device,
)
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
from ddp_tutorial.world import World, require_group

LOG = logging.getLogger(__name__)


class StreamedSource:
    """A source for data that can only be read from the beginning.

    The dataset can be a `datasets.IterableDataset`, a torch `IterableDataset`, `ArrowShards`, or any iterable that
    starts over on each call to `iter`.

    The data are split into `streams` logical streams. A `datasets.IterableDataset` with enough shards is split by
    shard. Other data are split by row: every stream reads all rows and keeps only its own rows. Therefore, the iterable
    must yield all samples on every rank, in the same order each time, and must not split the data itself.

    Samples are taken from the streams in round-robin order. With W ranks, rank r reads each stream s with s mod W = r.
    Thus, the sample order is the same for every world size up to `streams`. Each sample has a position in the sample
    order, and the source's state contains the number of consumed positions. An exhausted stream leaves its remaining
    positions empty. A rank does not know when the streams of other ranks are exhausted, so the ranks exchange their
    sample counts at every step. The epoch ends when no rank has any samples left.

    With a `seed`, samples are shuffled in a buffer, as in `datasets.IterableDataset.shuffle`. To resume, the source
    reads each stream from the beginning up to the saved position. A rank's streams are divided among its workers. The
    workers' `collate_fn` outputs are concatenated, so with several workers, `collate_fn` should pad to a fixed length.

    The random numbers that `collate_fn` and `transform` draw depend only on the seed, the epoch, and the position of
    the batch's first sample. Therefore, resuming does not change these random numbers. However, resuming may change
    the random numbers that the iterable itself draws.

    If a worker crashes, the source restarts the workers, at most once per step. The new workers first read their
    streams up to the current positions.
    """

    def __init__(
        self,
        dataset: Iterable[Any] | ArrowShards,
        batch_size: int,
        world: World,
        *,
        streams: int | None = None,
        seed: int | None = 0,
        shuffle_buffer: int = 1000,
        collate_fn: CollateFn = default_collate,
        transform: Transform | None = None,
        workers: int = 0,
        prefetch: int = 2,
        worker_timeout: float = WORKER_TIMEOUT,
    ) -> None:
        """Split the data into streams.

        Args:
            dataset: The iterable dataset, or `ArrowShards`.
            batch_size: The number of samples in a step, over all ranks.
            world: The ranks of the run.
            streams: The number of logical streams, which determines the sample order. The default is the number of
                shards or the world size, whichever is larger.
            seed: The seed of the sample order. None keeps the samples in their stored order.
            shuffle_buffer: The number of samples in the shuffle buffer.
            collate_fn: A function that combines a list of samples into one batch, as in torch's `DataLoader`.
            transform: A function that is applied to each batch, for example to augment the data.
            workers: The number of worker processes on this rank. If 0, the main process reads the samples.
            prefetch: The number of batches that each worker prefetches.
            worker_timeout: The timeout for a batch, in seconds.

        Raises:
            ConfigError: If `seed` is negative, if there are fewer streams than ranks, or if `batch_size` is less than
                the number of streams.
        """
        require_group(world)
        require_seed(seed)
        self.shards = _as_shards(dataset, seed, shuffle_buffer)
        self.streams = streams or max(world.size, self.shards.count)
        require_streams_for_all(self.streams, batch_size, world)
        self.batch_size, self.world, self.workers, self.worker_timeout = batch_size, world, workers, worker_timeout
        if self.shards.count < world.size and world.is_main:
            LOG.warning(
                "the data have fewer shards (%d) than there are ranks (%d), so every rank reads all samples and keeps "
                "only its own samples. If reading is slow, use source.kind=dispatched, so that only rank 0 reads, or a "
                "datasets.IterableDataset with at least one shard per rank",
                *(self.shards.count, world.size),
            )
        self.seed = seed or 0
        self.collate_fn, self.transform = collate_fn, transform
        self.epoch = 0
        self.places = 0  # positions completed in this epoch, over all ranks
        self._options = worker_options(workers, prefetch, worker_timeout)
        self.parts = 1  # micro-batches per step
        self._steps: Iterator[list[_Part]] | None = None
        self._restart = WorkerRestart()
        self._empty: Tree | None = None  # a batch of 0 rows, for steps in which this rank has no samples

    @property
    def steps_per_epoch(self) -> None:
        """The number of steps in one epoch, which is None because a stream's length is unknown."""
        return None

    @property
    def uses_local_rng(self) -> bool:
        """Whether reading uses or seeds the random number generators of this process.

        If true, no other thread may use the random number generators at the same time.
        """
        return not self.workers

    def __next__(self) -> LocalBatch:
        """Return this rank's samples for the next step as one batch. Collective."""
        return self.take(1)[0]

    def take(self, micro_batches: int) -> list[LocalBatch]:
        """Return this rank's samples for the next step, split into micro-batches. Collective.

        Raises:
            ConfigError: On all ranks, if the dataset is empty, or if a rank has no samples in an epoch's first step.
            SourceError: If reading fails. The message identifies the rank, the worker, and the sample positions.
        """
        if micro_batches != self.parts:
            self.close()  # the prefetched batches have a different number of micro-batches
            self.parts = micro_batches
        while True:
            mine = self._next_here()
            of_ranks = all_gather(self.world, [count for _, count in mine])
            counts = [sum(of_parts) for of_parts in of_ranks]
            if self.places == 0 and 0 in counts and any(counts):
                raise ConfigError(
                    f"rank {counts.index(0)} of {self.world.size} has no samples: there are fewer samples than streams "
                    f"({self.streams}). Use fewer ranks."
                )
            if any(counts):
                self.places += self.batch_size
                return [
                    LocalBatch(to_device(samples, self.world.device), count, sum(of_part))
                    for (samples, count), of_part in zip(mine, zip(*of_ranks, strict=True), strict=True)
                ]
            if self.places == 0:
                raise ConfigError("the dataset is empty: none of its streams contains a sample")
            self.close()
            self.epoch, self.places = self.epoch + 1, 0

    def _next_here(self) -> list[tuple[Tree, int]]:
        """Return this rank's samples for the next step, split into micro-batches, in the order of their positions."""
        if self._steps is None:
            entropy = (self.seed, 2, self.world.rank, self.epoch, self.places)  # seeds the iterable in the workers
            generator = torch.Generator().manual_seed(seed_of(*entropy))
            loader = DataLoader(_Follow(self), batch_size=None, generator=generator, **self._options)
            self._steps = WorkerBatches(loader) if self.workers else iter(loader)
        of_workers: list[list[_Part]] = []
        for worker in range(max(1, self.workers)):  # one step from each worker
            try:
                of_workers.append(next_from(self._steps, self.worker_timeout))
            except Exception as error:
                who, _ = failed_worker(self._steps, worker, self.workers)
                where = f"positions {self.places} to {self.places + self.batch_size - 1} of epoch {self.epoch}"
                message = f"rank {self.world.rank}{who}, {where}: {error}"
                again = self._restart.is_due(self._steps, (self.epoch, self.places), message)
                self.close()  # so that the caller can retry the step
                if again:
                    return self._next_here()
                raise SourceError(message) from error
            except BaseException:  # an interrupt; the next step reads the same samples again
                self.close()
                raise
        return [self._joined(parts) for parts in zip(*of_workers, strict=True)]

    def _joined(self, parts: Iterable["_Part"]) -> tuple[Tree, int]:
        """Combine all workers' samples for one micro-batch. Return the samples and the sample count."""
        full = [part for part in parts if len(part.places)]
        if not full:
            if self._empty is None:  # resumed at a step in which this rank has no samples
                for row in islice(self.shards.rows(0, 1, self.epoch), 1):
                    self._empty = select_rows(_Follow(self).together([(0, row)]).samples, slice(0, 0))
            return self._empty, 0
        samples = full[0].samples if len(full) == 1 else self._in_order(full)
        self._empty = select_rows(samples, slice(0, 0))
        return samples, sum(len(part.places) for part in full)

    def _in_order(self, parts: list["_Part"]) -> Tree:
        """Concatenate the samples of several workers in the order of their positions."""
        order = torch.argsort(torch.cat([part.places for part in parts]))
        try:
            return tree_map(lambda *leaves: torch.cat(leaves)[order], *[part.samples for part in parts])
        except (RuntimeError, ValueError) as error:
            self.close()
            raise SourceError(
                f"rank {self.world.rank}: the batches that its {self.workers} workers collated cannot be concatenated: "
                f"{error}. Pad to a fixed length in collate_fn, or use 1 worker per rank."
            ) from error

    def state_dict(self) -> SourceState:
        """Return the epoch, the number of consumed positions, and the number of streams.

        The number of streams is part of the state, because this number determines the sample order.
        """
        return {"epoch": self.epoch, "places": self.places, "streams": self.streams}

    def load_state_dict(self, state: SourceState) -> None:
        """Resume from a state that `state_dict` returned.

        Raises:
            ConfigError: If the saved run used fewer streams than this run has ranks.
        """
        if state["streams"] < self.world.size:
            raise ConfigError(
                f"the number of streams must be at least {self.world.size} (one stream per rank), got "
                f"{state['streams']}"
            )
        self.close()
        self.epoch, self.places, self.streams = state["epoch"], state["places"], state["streams"]

    def close(self) -> None:
        """Stop the workers. The next step starts new workers."""
        if isinstance(self._steps, WorkerBatches):
            self._steps.close()
        self._steps = None


class _Part(NamedTuple):
    """One worker's samples in a micro-batch.

    Attributes:
        places: The samples' positions [n] (int64) in the sample order.
        samples: The samples.
    """

    places: torch.Tensor
    samples: Tree


class _Follow(ByValue, IterableDataset[list[_Part]]):
    """An infinite dataset that yields a rank's samples for each step. Each worker reads only its own streams."""

    def __init__(self, source: StreamedSource) -> None:
        self.shards, self.streams, self.batch_size = source.shards, source.streams, source.batch_size
        self.seed, self.epoch, self.places = source.seed, source.epoch, source.places
        self.rank, self.size, self.parts = source.world.rank, source.world.size, source.parts
        self.collate_fn, self.transform = source.collate_fn, source.transform

    def __iter__(self) -> Iterator[list[_Part]]:
        """Yield this worker's samples for each step, as a list of micro-batches."""
        with errors_for_rank():
            yield from self._steps()

    def _steps(self) -> Iterator[list[_Part]]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        own = range(self.rank, self.streams, self.size)[number::workers]
        with hidden_worker_info():
            following = {stream: self.follow(stream) for stream in own}
        place = self.places
        while True:
            of_rank = [p for p in range(place, place + self.batch_size) if p % self.streams % self.size == self.rank]
            with hidden_worker_info():
                found = [
                    (number % self.parts, each, row)
                    for number, each in enumerate(of_rank)
                    if (stream := each % self.streams) in following
                    for row in islice(following[stream], 1)
                ]
            place += self.batch_size
            yield [self.together([(p, row) for of, p, row in found if of == part]) for part in range(self.parts)]

    def follow(self, stream: int) -> Iterator[Any]:
        """Iterate over a stream's rows, starting at the current position in this epoch."""
        # The `skip` of `datasets` would not work here: it keeps the shard order of epoch 0 and, if the data are split
        # by rows, skips the rows of all streams.
        rows = self.shards.rows(stream, self.streams, self.epoch)
        return islice(rows, len(range(stream, self.places, self.streams)), None)

    def together(self, found: list[tuple[int, Any]]) -> _Part:
        """Collate rows into a batch, and store the rows' positions."""
        if not found:
            return _Part(torch.empty(0, dtype=torch.int64), None)
        places = [place for place, _ in found]
        with seeded_rng(self.seed, 2, self.epoch, places[0]):
            samples = collate_rows([row for _, row in found], places, self.collate_fn)
            samples = self.transform(samples) if self.transform else samples
        return _Part(torch.tensor(places), for_rank(as_batch(samples, len(places))))


def _as_shards(dataset: Any, seed: int | None, shuffle_buffer: int) -> "_DatasetsShards | _OneShard":
    # A dataset of this type has already imported the module. A user's own module may be named `datasets`.
    datasets = sys.modules.get("datasets.iterable_dataset")
    if datasets is not None and isinstance(dataset, datasets.IterableDataset):
        return _DatasetsShards(dataset, seed, shuffle_buffer)
    if isinstance(dataset, ArrowShards):
        return _ArrowShards(dataset, seed, shuffle_buffer)
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"a {type(dataset).__name__} can be iterated over only once, but a source iterates over the dataset in "
            "every epoch and when a run resumes. Pass an object whose __iter__ starts over, such as a torch "
            "IterableDataset."
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"a dataset must define __iter__ or __getitem__, got {type(dataset).__name__}")
    return _OneShard(dataset, seed, shuffle_buffer)


class _DatasetsShards:
    """A `datasets.IterableDataset`, which provides its own shards and shuffling."""

    def __init__(self, dataset: Any, seed: int | None, shuffle_buffer: int) -> None:
        self.dataset = dataset if seed is None else dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        self.count = dataset.num_shards

    def rows(self, stream: int, streams: int, epoch: int) -> Iterator[Any]:
        """Iterate over the rows of the stream with index `stream`, in the sample order of `epoch`.

        Each row belongs to exactly one of the `streams` streams.
        """
        from datasets.distributed import split_dataset_by_node

        rows = split_dataset_by_node(self.dataset, stream, streams)
        rows.set_epoch(epoch)  # after the split, which resets the epoch
        return iter(rows)


class _ArrowShards(_DatasetsShards):
    """Arrow files that each worker reopens. `datasets` would pickle all rows of a random-access file."""

    def __init__(self, files: ArrowShards, seed: int | None, shuffle_buffer: int) -> None:
        super().__init__(iterable_dataset(files.paths, files.columns), seed, shuffle_buffer)
        self.arguments = files, seed, shuffle_buffer

    def __reduce__(self) -> Any:
        return type(self), self.arguments


class _OneShard:
    """An iterable without shards, whose rows this class shuffles.

    If the iterable defines a `set_epoch` method, this class calls `set_epoch` in every epoch.
    """

    count = 1

    def __init__(self, dataset: Any, seed: int | None, shuffle_buffer: int) -> None:
        self.dataset, self.seed, self.shuffle_buffer = dataset, seed, shuffle_buffer

    def rows(self, stream: int, streams: int, epoch: int) -> Iterator[Any]:
        """Iterate over the rows of a stream; see `_DatasetsShards.rows`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        rows: Iterator[Any] = iter(self.dataset)
        if self.seed is not None:
            rows = _shuffled(rows, self.shuffle_buffer, random.Random(seed_of(self.seed, 3, epoch)))
        return islice(rows, stream, None, streams)


def _shuffled(rows: Iterator[Any], size: int, rng: random.Random) -> Iterator[Any]:
    """Shuffle rows with a buffer of `size` rows. Each new row replaces a random buffered row, which is yielded."""
    buffer = list(islice(rows, size))
    for row in rows:
        place = rng.randrange(size)
        yield buffer[place]
        buffer[place] = row
    rng.shuffle(buffer)
    yield from buffer


def iterable_dataset(paths: Sequence[Path], columns: Sequence[str] | None = None) -> Any:
    """Return an iterable dataset of `columns` (by default, all columns), with one shard per Arrow file."""
    require_package("datasets", "data")
    from datasets import Dataset, concatenate_datasets

    def read(path: Path) -> Dataset:
        if is_random_access(path):  # `from_file` reads only the streaming format
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            return Dataset(table, fingerprint=str(path))  # the default fingerprint would read the whole file
        return Dataset.from_file(str(path))

    parts = [read(path) for path in paths]
    dataset = concatenate_datasets([part.select_columns(list(columns)) for part in parts] if columns else parts)
    return dataset.to_iterable_dataset(num_shards=max(1, min(len(paths), len(dataset)))).with_format("torch")
