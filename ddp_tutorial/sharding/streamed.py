"""`StreamedSource`: every rank follows streams of its own, through data that cannot be read by number."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from datasets import Dataset, concatenate_datasets
from datasets import IterableDataset as ShardedIterable
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.compat import hidden_worker_info, tree_map
from ddp_tutorial.config import ConfigError
from ddp_tutorial.rng import seed_of, seeded_rng
from ddp_tutorial.sharding.samples import CollateFn, Tree, as_batch, collate_rows, select_rows
from ddp_tutorial.sharding.sharded import (
    ByValue,
    LocalBatch,
    SourceState,
    Transform,
    require_streams_for_all,
    to_device,
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
from ddp_tutorial.world import World, require_group


class StreamedSource:
    """Data that can only be followed from a beginning: a `datasets.IterableDataset`, a torch `IterableDataset`, or any
    other iterable that begins anew with each `iter`.

    The data are cut into `streams` logical streams: by the shards of a `datasets.IterableDataset`, if there are enough
    of them, else by rows, where every stream reads all rows and keeps its own. So the iterable must give all samples on
    every rank, in the same order each time, and leave the dividing to the source.

    Sample after sample is taken from one stream after another, and rank r of W follows the streams s with s mod W = r.
    So the order is the same for every world size up to `streams`, and where the world stands is one number, a count of
    places. A stream that has ended leaves its places empty. As no rank knows when the streams of others end, the ranks
    tell one another at every step how many samples they have; the epoch is over when all have none.

    With a `seed`, samples are shuffled in a buffer of `shuffle_buffer` samples, as `IterableDataset.shuffle` does. To
    resume, a stream is followed from its beginning to where it was. `workers` share the streams of their rank. What
    `collate_fn` makes of the samples of two workers is concatenated, so with `workers` above 1 it should pad to a fixed
    length.

    The random numbers that `collate_fn` and `transform` draw depend on seed, epoch and place alone: a resumed
    run draws the same ones. Those that the iterable itself draws do not.

    Raises `ConfigError` for fewer streams than ranks, and, at the first step, on all ranks, for data without samples.
    Raises `SourceError`, naming rank, worker and places, for what fails while reading. Where a worker has died, the
    workers are started again first, once for each step, and follow their streams to the same places.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
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
        require_group(world)
        self.shards: _Shards = _as_shards(dataset, seed, shuffle_buffer)
        self.streams = streams or max(world.size, self.shards.count)
        require_streams_for_all(self.streams, batch_size, world)
        self.batch_size, self.world, self.workers, self.worker_timeout = batch_size, world, workers, worker_timeout
        self.seed = seed or 0
        self.collate_fn, self.transform = collate_fn, transform
        self.epoch = 0
        self.places = 0  # that the world has passed in this epoch
        self._options = worker_options(workers, prefetch, worker_timeout)
        self.parts = 1  # micro-batches of a step
        self._steps: Iterator[list[_Part]] | None = None
        self._revival = WorkerRestart()
        self._empty: Tree | None = None  # a batch without rows, for steps in which this rank has no samples

    @property
    def uses_local_rng(self) -> bool:
        """Does reading draw, or seed, random numbers of this process? No other thread may, meanwhile."""
        return not self.workers

    def __next__(self) -> LocalBatch:
        return self.take(1)[0]

    def take(self, micro_batches: int) -> list[LocalBatch]:
        if micro_batches != self.parts:
            self.close()  # what has been read ahead is in other micro-batches
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
                raise ConfigError("the data set is empty: none of its streams has a sample")
            self.close()
            self.epoch, self.places = self.epoch + 1, 0

    def _next_here(self) -> list[tuple[Tree, int]]:
        """This rank's samples of the next step, in micro-batches, in the order of their places."""
        if self._steps is None:
            entropy = (self.seed, 2, self.world.rank, self.epoch, self.places)  # of what the iterable draws in workers
            generator = torch.Generator().manual_seed(seed_of(*entropy))
            loader = DataLoader(_Follow(self), batch_size=None, generator=generator, **self._options)
            self._steps = WorkerBatches(loader) if self.workers else iter(loader)
        of_workers: list[list[_Part]] = []
        for worker in range(max(1, self.workers)):  # a step from each, in turn
            try:
                of_workers.append(next_from(self._steps, self.worker_timeout))
            except Exception as error:
                who, _ = failed_worker(self._steps, worker, self.workers)
                where = f"places {self.places} to {self.places + self.batch_size - 1} of epoch {self.epoch}"
                told = f"rank {self.world.rank}{who}, {where}: {error}"
                again = self._revival.is_due(self._steps, (self.epoch, self.places), told)
                self.close()  # the same step can be tried again
                if again:
                    return self._next_here()
                raise SourceError(told) from error
        return [self._joined(parts) for parts in zip(*of_workers, strict=True)]

    def _joined(self, parts: Iterable["_Part"]) -> tuple[Tree, int]:
        """The samples that all workers have of one micro-batch, and their number."""
        full = [part for part in parts if len(part.places)]
        if not full:
            if self._empty is None:  # resumed where this rank has none left
                for row in islice(self.shards.rows(0, 1, self.epoch), 1):
                    self._empty = select_rows(_Follow(self).together([(0, row)]).samples, slice(0, 0))
            return self._empty, 0
        samples = full[0].samples if len(full) == 1 else self._in_order(full)
        self._empty = select_rows(samples, slice(0, 0))
        return samples, sum(len(part.places) for part in full)

    def _in_order(self, parts: list["_Part"]) -> Tree:
        """The samples of several workers, by their places."""
        order = torch.argsort(torch.cat([part.places for part in parts]))
        try:
            return tree_map(lambda *leaves: torch.cat(leaves)[order], *[part.samples for part in parts])
        except (RuntimeError, ValueError) as error:
            self.close()
            raise SourceError(
                f"rank {self.world.rank}: what its {self.workers} workers have collated does not fit together: "
                f"{error}. Let collate_fn pad to a fixed length, or use 1 worker for each rank."
            ) from error

    def state_dict(self) -> SourceState:
        """Epoch, places passed in it, and the number of streams, which decides the order."""
        return {"epoch": self.epoch, "places": self.places, "streams": self.streams}

    def load_state_dict(self, state: SourceState) -> None:
        """Go on from there. Raises `ConfigError` where the state's run had fewer streams than this world has ranks."""
        if state["streams"] < self.world.size:
            raise ConfigError(f"this run has {state['streams']} streams: too few for {self.world.size} ranks")
        self.close()
        self.epoch, self.places, self.streams = state["epoch"], state["places"], state["streams"]

    def close(self) -> None:
        """End the workers. The next step would start new ones."""
        if isinstance(self._steps, WorkerBatches):
            self._steps.close()
        self._steps = None


class _Part(NamedTuple):
    """What one worker has of a micro-batch: samples, and the places [n] (int64) that they belong to."""

    places: torch.Tensor
    samples: Tree


class _Follow(ByValue, IterableDataset[list[_Part]]):
    """Follows the streams of one rank, or those of them that fall to this worker, step by step, for ever."""

    def __init__(self, source: StreamedSource) -> None:
        self.shards, self.streams, self.batch_size = source.shards, source.streams, source.batch_size
        self.seed, self.epoch, self.places = source.seed, source.epoch, source.places
        self.rank, self.size, self.parts = source.world.rank, source.world.size, source.parts
        self.collate_fn, self.transform = source.collate_fn, source.transform

    def __iter__(self) -> Iterator[list[_Part]]:
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
        """The rows of a stream, from this epoch's place on."""
        # Not datasets' skip: it leaves shards in the order of epoch 0, and where rows are dealt, skips all streams'.
        rows = self.shards.rows(stream, self.streams, self.epoch)
        return islice(rows, len(range(stream, self.places, self.streams)), None)

    def together(self, found: list[tuple[int, Any]]) -> _Part:
        """A batch of rows and their places."""
        if not found:
            return _Part(torch.empty(0, dtype=torch.int64), None)
        places = [place for place, _ in found]
        with seeded_rng(self.seed, 2, self.epoch, places[0]):
            samples = collate_rows([row for _, row in found], places, self.collate_fn)
            samples = self.transform(samples) if self.transform else samples
        return _Part(torch.tensor(places), as_batch(samples, len(places)))


class _Shards(Protocol):
    """Data to be followed, in shards."""

    count: int

    def rows(self, stream: int, streams: int, epoch: int) -> Iterator[Any]:
        """The rows of one of so many streams, in the order of this epoch. All streams together have each row once."""
        ...


def _as_shards(dataset: Any, seed: int | None, shuffle_buffer: int) -> _Shards:
    if isinstance(dataset, ShardedIterable):
        return _DatasetsShards(dataset if seed is None else dataset.shuffle(seed=seed, buffer_size=shuffle_buffer))
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"a {type(dataset).__name__} can be followed once only; a source does so in every epoch, and to "
            "resume. Give an object whose __iter__ begins anew, such as a torch IterableDataset."
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"a {type(dataset).__name__} cannot be followed: it has no __iter__")
    return _OneShard(dataset, seed, shuffle_buffer)


class _DatasetsShards:
    """A `datasets.IterableDataset`, which has shards and shuffles by itself."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.count = dataset, dataset.num_shards

    def rows(self, stream: int, streams: int, epoch: int) -> Iterator[Any]:
        rows = split_dataset_by_node(self.dataset, stream, streams)
        rows.set_epoch(epoch)  # after the split, which forgets it
        return iter(rows)


class _OneShard:
    """An iterable that knows of no shards, shuffled here; `set_epoch` is called if it has that."""

    count = 1

    def __init__(self, dataset: Any, seed: int | None, shuffle_buffer: int) -> None:
        self.dataset, self.seed, self.shuffle_buffer = dataset, seed, shuffle_buffer

    def rows(self, stream: int, streams: int, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        rows: Iterator[Any] = iter(self.dataset)
        if self.seed is not None:
            rows = _shuffled(rows, self.shuffle_buffer, random.Random(seed_of(self.seed, 3, epoch)))
        return islice(rows, stream, None, streams)


def _shuffled(rows: Iterator[Any], size: int, rng: random.Random) -> Iterator[Any]:
    """In an order as random as a buffer of `size` rows allows: each new row takes the place of one that leaves."""
    buffer = list(islice(rows, size))
    for row in rows:
        place = rng.randrange(size)
        yield buffer[place]
        buffer[place] = row
    rng.shuffle(buffer)
    yield from buffer


def iterable_dataset(paths: Sequence[Path], columns: Sequence[str] | None = None) -> Any:
    """Arrow files as a `datasets.IterableDataset` with a shard for each; some of their columns, or all."""
    dataset = concatenate_datasets([Dataset.from_file(str(path)) for path in paths])
    dataset = dataset.select_columns(list(columns)) if columns else dataset
    return dataset.to_iterable_dataset(num_shards=max(1, min(len(paths), len(dataset)))).with_format("torch")
