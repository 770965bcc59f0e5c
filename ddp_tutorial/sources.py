"""Which samples does this rank see next, and how is that resumed?

A source gives, step after step, this rank's share of the world's batch, without end: epoch follows epoch. Its state is
small, the same on every rank, and means the same to a world of another size.

    sharded      every rank reads its own samples, by number
    dispatched   rank 0 reads, and sends each rank its share
    streamed     every rank reads streams that can only be followed, not looked up (`datasets.IterableDataset`)

What the project calls the fast stream is `sharded` over memory-mapped Arrow files (`data.ArrowShards`), in the order of
windows (`sharding.Order`): as quick as following, and yet by number.
"""

from typing import Any, Literal

from pydantic import Field

from ddp_tutorial.collectives import rank_zero_first
from ddp_tutorial.config import Config, ConfigError
from ddp_tutorial.corpus import CACHE
from ddp_tutorial.data import ArrowShards, Data, Windows, as_shards
from ddp_tutorial.dispatched import DispatchedSource
from ddp_tutorial.sharded import ShardedSource, Source, everyone_has_some
from ddp_tutorial.sharding import Order, Remainder, Sharding
from ddp_tutorial.world import World


class SourceConfig(Config):
    """Where batches come from."""

    kind: Literal["sharded", "dispatched", "streamed", "fast_stream"] = "sharded"
    remainder: Remainder = Field("carry", description="what becomes of an epoch's last samples; see sharding.py")
    workers: int = Field(0, ge=0, description="processes that read ahead, for each rank")
    prefetch: int = Field(2, ge=1, description="batches that are read ahead, by each worker or by rank 0")
    window: int = Field(65536, ge=1, description="fast_stream only: samples that are shuffled among themselves")
    streams: int | None = Field(None, ge=1, description="streamed only: logical streams, which decide the order")
    shuffle_buffer: int = Field(1000, ge=1, description="streamed only")


ALONE = World(0, 1, 0, 1)  # who reads for all has a world of one


def make_source(config: SourceConfig, windows: Windows, batch: int, seed: int, world: World) -> Source:
    """The source that `config` names, over a corpus. Collective.

    The two kinds that read from files find them below runs/cache, where rank 0 writes them once for each corpus.
    """
    ahead: dict[str, Any] = {"workers": config.workers, "prefetch": config.prefetch}
    if config.kind == "streamed" and config.remainder != "carry":
        raise ConfigError("'source.remainder' is for sources that know how long they are; a stream ends where it ends")
    if config.kind in {"streamed", "fast_stream"}:
        with rank_zero_first(world):
            paths = as_shards(windows, CACHE)
    if config.kind == "streamed":
        from ddp_tutorial.streamed import StreamedSource, iterable  # `datasets` takes a second to import

        options: dict[str, Any] = {
            "streams": config.streams,
            "seed": seed,
            "shuffle_buffer": config.shuffle_buffer,
            **ahead,
        }
        return StreamedSource(iterable(paths), batch, world, **options)
    data: Data = ArrowShards(paths) if config.kind == "fast_stream" else windows
    order = Order(len(data), seed, config.window if config.kind == "fast_stream" else None)
    sharding = Sharding(order, batch, config.remainder, world.size)
    if config.kind == "dispatched":
        everyone_has_some(sharding, world)
        on_cpu = lambda: ShardedSource(data, sharding, ALONE, **ahead)  # noqa: E731
        return DispatchedSource(on_cpu, world, prefetch=config.prefetch)
    return ShardedSource(data, sharding, world, **ahead)
