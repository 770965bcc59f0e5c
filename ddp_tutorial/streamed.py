"""Every rank follows streams of its own, through data that cannot be looked up by number."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.config import ConfigError
from ddp_tutorial.data import Tree, rows_of
from ddp_tutorial.dice import seed_of
from ddp_tutorial.sharded import (
    PATIENCE,
    ByValue,
    Share,
    SourceError,
    State,
    Transform,
    culprit,
    end_workers,
    next_from,
    to_device,
    worker_options,
)
from ddp_tutorial.world import World, require_group


class StreamedSource:
    """Data that can only be followed from a beginning, such as a `datasets.IterableDataset`.

    The data set is cut into `streams` logical streams, by shards if there are enough of them, else by rows. Sample
    after sample is taken from one stream after another, and rank r of W follows the streams s with s mod W = r. So the
    order is the same for every world size up to `streams`, and where the world stands is one number, a count of places.
    A stream that has ended leaves its places empty. As no rank knows when those of others end, they tell one another
    how many samples each has, at every step; the epoch is over when nobody has any.

    `shuffle_buffer` is that of `IterableDataset.shuffle`, and only as good as it is large. To go on from somewhere, a
    stream is followed to there again. Worker processes share a rank's streams.
    """

    def __init__(
        self,
        dataset: Any,  # a datasets.IterableDataset
        batch: int,
        world: World,
        *,
        streams: int | None = None,
        seed: int | None = 0,
        shuffle_buffer: int = 1000,
        collate: Callable[[list[Any]], Tree] = default_collate,
        transform: Transform | None = None,
        workers: int = 0,
        prefetch: int = 2,
        patience: float = PATIENCE,
    ) -> None:
        require_group(world)
        self.streams = streams or max(world.size, dataset.num_shards)
        if self.streams < world.size:
            raise ConfigError(
                f"{self.streams} streams are too few for {world.size} ranks, which follow one or more each"
            )
        if batch < self.streams:
            raise ConfigError(f"a batch of {batch} has no place for one sample of each of {self.streams} streams")
        self.dataset = dataset if seed is None else dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        self.batch, self.world, self.workers, self.patience = batch, world, workers, patience
        self.seed = seed or 0
        self.collate, self.transform = collate, transform
        self.epoch = 0
        self.places = 0  # that the world has passed in this epoch
        self._options = worker_options(workers, prefetch, patience)
        self._parts: Iterator[_Part] | None = None
        self._empty: Tree | None = None  # this rank's last samples, to make none of the same kind

    def __next__(self) -> Share:
        while True:
            samples, count = self._next_here()
            counts = all_gather(self.world, count)
            if self.places == 0 and 0 in counts and any(counts):
                raise ConfigError(
                    f"rank {counts.index(0)} of {self.world.size} has no samples: there are fewer samples than streams "
                    f"({self.streams}). Use fewer ranks."
                )
            if any(counts):
                self.places += self.batch
                return Share(to_device(samples, self.world.device), count, sum(counts))
            if self.places == 0:
                raise ConfigError("the data set is empty: none of its streams has a sample")
            self.close()
            self.epoch, self.places = self.epoch + 1, 0

    def _next_here(self) -> tuple[Tree, int]:
        """This rank's samples of the next step, in the order of their places."""
        if self._parts is None:
            entropy = (self.seed, 2, self.world.rank, self.epoch, self.places)  # of the workers' random numbers
            generator = torch.Generator().manual_seed(seed_of(*entropy))
            self._parts = iter(DataLoader(_Follow(self), batch_size=None, generator=generator, **self._options))
        parts: list[_Part] = []
        for worker in range(max(1, self.workers)):  # one part from each, in turn
            try:
                parts.append(next_from(self._parts, self.patience))
            except Exception as error:
                who, _ = culprit(self._parts, worker, self.workers)
                where = f"places {self.places} to {self.places + self.batch - 1} of epoch {self.epoch}"
                self.close()  # the same step can be tried again
                raise SourceError(f"rank {self.world.rank}{who}, {where}: {error}") from error
        full = [part for part in parts if len(part.places)]
        if not full:
            for row in islice(self.dataset, 1) if self._empty is None else ():  # resumed where there is none left
                self._empty = rows_of(_Follow(self).together([(0, row)]).samples, slice(0, 0))
            return self._empty, 0
        order = torch.argsort(torch.cat([part.places for part in full]))
        samples = tree_map(lambda *leaves: torch.cat(leaves)[order], *[part.samples for part in full])
        self._empty = rows_of(samples, slice(0, 0))
        return samples, len(order)

    def state(self) -> State:
        """Epoch, places passed in it, and the number of streams, which decides the order."""
        return {"epoch": self.epoch, "places": self.places, "streams": self.streams}

    def restore(self, state: State) -> None:
        if state["streams"] < self.world.size:
            raise ConfigError(f"this run has {state['streams']} streams: too few for {self.world.size} ranks")
        self.close()
        self.epoch, self.places, self.streams = state["epoch"], state["places"], state["streams"]

    def close(self) -> None:
        """End the workers. The next step would start new ones."""
        end_workers(self._parts)
        self._parts = None


class _Part(NamedTuple):
    """What one worker has of a step: samples, and the places [n] (int64) that they belong to."""

    places: torch.Tensor
    samples: Tree


class _Follow(ByValue, IterableDataset[_Part]):
    """Follows the streams of one rank, or those of them that fall to this worker, step by step, for ever."""

    def __init__(self, source: StreamedSource) -> None:
        self.dataset, self.streams, self.batch = source.dataset, source.streams, source.batch
        self.epoch, self.places = source.epoch, source.places
        self.rank, self.size = source.world.rank, source.world.size
        self.collate, self.transform = source.collate, source.transform

    def __iter__(self) -> Iterator[_Part]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        own = range(self.rank, self.streams, self.size)[number::workers]
        following = {stream: self.follow(stream) for stream in own}
        place = self.places
        while True:
            with _worker_hidden():
                found = [
                    (each, row)
                    for each in range(place, place + self.batch)
                    if (stream := each % self.streams) in following
                    for row in islice(following[stream], 1)
                ]
            place += self.batch
            yield self.together(found)

    def follow(self, stream: int) -> Iterator[Any]:
        rows = split_dataset_by_node(self.dataset, stream, self.streams)
        rows.set_epoch(self.epoch)  # after the split, which forgets it
        # Not rows.skip: it leaves shards in the order of epoch 0, and where rows are dealt, skips those of all streams.
        return islice(rows, len(range(stream, self.places, self.streams)), None)

    def together(self, found: list[tuple[int, Any]]) -> _Part:
        if not found:
            return _Part(torch.empty(0, dtype=torch.int64), None)
        samples = self.collate([row for _, row in found])
        samples = self.transform(samples) if self.transform else samples
        if others := {type(leaf).__name__ for leaf in tree_leaves(samples) if not isinstance(leaf, torch.Tensor)}:
            raise TypeError(
                f"a sample has values of type {', '.join(sorted(others))}; batches are of tensors. Keep the columns of "
                "numbers with dataset.select_columns, or make tensors of the others in 'collate' or 'transform'."
            )
        return _Part(torch.tensor([place for place, _ in found]), samples)


@contextmanager
def _worker_hidden() -> Iterator[None]:
    """`datasets` asks which worker it is in, and would divide by the workers a second time what is divided here."""
    module = torch.utils.data._utils.worker
    info, module._worker_info = module._worker_info, None
    try:
        yield
    finally:
        module._worker_info = info


def iterable(paths: Sequence[Path]) -> Any:
    """Arrow files as a `datasets.IterableDataset` with a shard for each."""
    dataset = concatenate_datasets([Dataset.from_file(str(path)) for path in paths])
    return dataset.to_iterable_dataset(num_shards=max(1, min(len(paths), len(dataset)))).with_format("torch")
