"""Define `make_source`, which creates a source from a dataset and a config.

A source provides the samples that this rank processes next, and can resume from a saved state. A source is an infinite
iterator over this rank's shards of the global batches. The source's state is small and identical on every rank, and can
be loaded on a different number of ranks. All four kinds of source can read token blocks and Arrow files.

    Kind          How the data are read                                  Data
    sharded       every rank reads its own samples, by index             any map-style dataset
    dispatched    rank 0 reads, and sends each rank its shard            any dataset
    streamed      every rank reads its own streams                       any iterable dataset
    fast_stream   every rank reads its own samples, by index, from       Arrow files
                  memory-mapped Arrow files, in the order of shuffle
                  windows; as fast as reading a stream
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from ddp_tutorial.collectives import all_gather, digest, rank_zero_first
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import cores
from ddp_tutorial.sharding.config import SourceConfig
from ddp_tutorial.sharding.corpus import CACHE
from ddp_tutorial.sharding.dispatched import DispatchedSource
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation, require_seed
from ddp_tutorial.sharding.samples import (
    SHARDS,
    ArrowShards,
    CollateFn,
    Data,
    Tensors,
    TokenBlocks,
    as_samples,
    as_shards,
    is_map_style,
    require_dataset,
    type_name,
)
from ddp_tutorial.sharding.sharded import ShardedSource, Transform, require_samples_for_all, require_streams_for_all
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.sharding.workers import too_many_workers
from ddp_tutorial.world import World

LOG = logging.getLogger(__name__)
SINGLE_PROCESS = World(0, 1, 0, 1)  # rank 0 of a dispatched source reads the whole batch


def make_source(
    data: Any,
    batch_size: int,
    world: World,
    *,
    seed: int | None = 0,
    config: SourceConfig = SourceConfig(),  # noqa: B008  # frozen
    collate_fn: CollateFn | None = None,
    transform: Transform | None = None,
) -> Source:
    """Create the source that `config` specifies. Collective.

    With kind streamed or fast_stream, rank 0 writes token blocks to Arrow files under runs/cache, once per corpus.

    Args:
        data: A map-style dataset (see `as_samples`; kind sharded or dispatched), an iterable dataset (kind streamed or
            dispatched), or `TokenBlocks` or `ArrowShards` (any kind). Every rank must pass the full dataset.
        batch_size: The number of samples in a step, over all ranks.
        world: The ranks of the run.
        seed: The seed of the sample order. None keeps the samples in their stored order.
        config: Settings that specify how the data are read.
        collate_fn: A function that combines a list of samples into one batch, as in torch's `DataLoader`.
        transform: A function that is applied to each batch, for example to augment the data.

    Raises:
        ConfigError: On all ranks, if the data do not support the kind, are empty, or differ between ranks (see
            `require_same_samples`). Also raised on all ranks if `seed` is negative, or if a rank would never receive a
            sample.
    """
    require_seed(seed)
    _require_kind(config, data)
    ahead: dict[str, Any] = {"transform": transform}
    ahead |= {name: getattr(config, name) for name in ("workers", "worker_timeout", "prefetch")}
    reading = 1 if config.kind == "dispatched" else world.local_size
    if world.is_main and (warning := too_many_workers(config.workers, reading, cores())):
        LOG.warning(warning)
    if config.kind == "streamed" and not isinstance(data, TokenBlocks | ArrowShards):
        return _streamed(data, batch_size, world, seed, config, collate_fn, ahead)
    if config.kind == "dispatched" and _is_stream(data):
        require_streams_for_all(world.size, batch_size, world)
        read = partial(_streamed, data, batch_size, SINGLE_PROCESS, seed, config, collate_fn, ahead)
        return DispatchedSource(read, world, prefetch=config.prefetch)
    samples = as_samples(data, collate_fn)
    require_same_samples(samples, world)
    if not len(samples):
        raise ConfigError("the dataset must contain at least 1 sample, got 0")
    if isinstance(samples, TokenBlocks) and config.kind in {"streamed", "fast_stream"}:
        with rank_zero_first(world):
            paths = as_shards(samples, CACHE)
        samples = ArrowShards(paths)
    if config.kind == "streamed":
        return _streamed(samples, batch_size, world, seed, config, None, ahead)
    sharding = _sharding(len(samples), batch_size, world, seed, config)
    if config.kind == "dispatched":
        require_samples_for_all(sharding, world)
        inner = partial(ShardedSource, samples, sharding, SINGLE_PROCESS, **ahead)
        return DispatchedSource(inner, world, prefetch=config.prefetch)
    return ShardedSource(samples, sharding, world, **ahead)


def _sharding(
    samples: int, batch_size: int, world: World, seed: int | None, config: SourceConfig
) -> GlobalBatchSampler:
    order = Permutation(samples, seed, config.window if config.kind == "fast_stream" else None)
    return GlobalBatchSampler(order, batch_size, config.remainder, world.size)


def check_source(blocks: TokenBlocks, batch_size: int, world: World, config: SourceConfig) -> None:
    """Validate the arguments of `make_source` without starting ranks or writing files.

    Raises:
        ConfigError: If `make_source` would reject the arguments.
    """
    _require_kind(config, blocks)
    if config.kind == "streamed":
        require_streams_for_all(config.streams or max(world.size, min(SHARDS, len(blocks))), batch_size, world)
    else:
        require_samples_for_all(_sharding(len(blocks), batch_size, world, None, config), world)


def _streamed(
    data: Any,
    batch_size: int,
    world: World,
    seed: int | None,
    config: SourceConfig,
    collate_fn: CollateFn | None,
    ahead: dict[str, Any],
) -> Source:
    from ddp_tutorial.sharding.streamed import StreamedSource

    options = {"streams": config.streams, "seed": seed, "shuffle_buffer": config.shuffle_buffer, **ahead}
    if collate_fn is not None:
        options["collate_fn"] = collate_fn
    return StreamedSource(data, batch_size, world, **options)


def _is_stream(data: Any) -> bool:
    return isinstance(data, Iterable) and not hasattr(data, "fetch") and not is_map_style(data)


def _require_kind(config: SourceConfig, data: Any) -> None:
    require_dataset(data)
    kind, name = config.kind, type_name(data)
    if (kind == "streamed" or _is_stream(data)) and config.remainder != "carry":
        raise ConfigError(
            f"'source.remainder' must be 'carry' for a stream, got {config.remainder!r}. A stream's length is unknown"
        )
    if isinstance(data, TokenBlocks | ArrowShards):
        return
    if kind == "fast_stream":
        raise ConfigError(
            f"source.kind=fast_stream requires Arrow files, got {name}. Use source.kind=sharded, or pass Arrow files: "
            "make_source(ArrowShards(paths), ...)."
        )
    if kind == "streamed" and (hasattr(data, "fetch") or is_map_style(data)):
        as_stream = ", or pass dataset.to_iterable_dataset()" if hasattr(data, "to_iterable_dataset") else ""
        raise ConfigError(
            f"source.kind=streamed is for data without random access, but {name} supports indexing. Use "
            f"source.kind=sharded{as_stream}."
        )


_LARGE = 1 << 26  # tokens; a digest of this many tokens takes a tenth of a second


def require_same_samples(samples: Data, world: World, what: str = "training samples") -> None:
    """Raise `ConfigError` on all ranks if a rank's samples differ from rank 0's samples. Collective.

    The ranks compare the number of samples. For a `TensorDataset` or small `TokenBlocks`, the ranks also compare all
    values. For large `TokenBlocks` or Arrow files, the ranks compare 64 samples. Samples of other datasets are not
    compared, because reading a sample may be slow and may draw random numbers.

    Args:
        samples: This rank's samples.
        world: The ranks to compare.
        what: A description of the samples for the error message.
    """
    if world.size == 1:
        return
    of_ranks = all_gather(world, (len(samples), _fingerprint(samples)))
    for rank, (length, fingerprint) in enumerate(of_ranks):
        if length != of_ranks[0][0]:
            raise ConfigError(
                f"every rank must have the same number of samples, got {length} on rank {rank} and {of_ranks[0][0]} on "
                "rank 0. Pass the whole dataset on every rank, because the source shards it."
            )
        if fingerprint != of_ranks[0][1]:
            raise ConfigError(
                f"rank {rank} has the same number of {what} as rank 0, but the {what} differ. Each rank reads the "
                "files on its own node. Store the files on a shared disk, or copy them to the same path on "
                "every node."
            )


def _fingerprint(samples: Data) -> str:
    """Return a digest of all samples or of 64 samples, or "" if only the number of samples is compared."""
    if isinstance(samples, TokenBlocks) and len(samples.tokens) < _LARGE:
        return digest({"tokens": samples.tokens})
    if isinstance(samples, Tensors):
        return digest({str(place): column for place, column in enumerate(samples.columns)})
    if isinstance(samples, ArrowShards | TokenBlocks) and len(samples):
        return digest(samples.fetch(np.unique(np.linspace(0, len(samples) - 1, 64).astype(np.int64))))
    return ""
