"""The sources side by side: training from each, reading from each without training, and finding a place."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import CONTEXT, Training, random_text, take_turns, timed
from ddp_tutorial.data import ArrowShards, as_shards, write_arrow
from ddp_tutorial.launcher import launch
from ddp_tutorial.sharded import ShardedSource, Source
from ddp_tutorial.sharding import Order, Sharding
from ddp_tutorial.sources import ALONE, SourceConfig, make_source
from ddp_tutorial.world import World

BATCH = 16  # samples of a step over all ranks
SAMPLES = 20_000
_TURNS, _STEPS = 4, 10  # turns of an arm in a repeat, steps in a turn
_LOADED = 2_000  # samples that one turn of a loader reads
ROWS = 1_200_000  # of the files in which a place is looked for

KINDS = ["sharded", "dispatched", "streamed", "fast_stream"]


def measure(repeats: int) -> dict[str, Any]:
    """Samples per second end to end and from the loaders alone, the parts of a step, and the time to find a place."""
    with tempfile.TemporaryDirectory() as folder:
        trained = launch(_train, 2, folder, repeats, device="cpu", threads=1, echo=False)[0]
        loaded = launch(_load, 2, folder, repeats, device="cpu", threads=1, echo=False)[0]
        skipped = {"skip_to_1m": _skip(Path(folder), repeats)}
    samples = trained | loaded | skipped
    units = {name: "s" if name.endswith(("_wait", "_compute", "_sync", "_1m")) else "samples/s" for name in samples}
    ratios = {f"{kind}_vs_sharded": (kind, "sharded") for kind in KINDS[1:]}
    return report("sources", samples, units, ratios | {"fast_vs_iterable": ("load_fast_stream", "load_iterable")})


def _sources(world: World) -> dict[str, Source]:
    configs = {kind: SourceConfig.model_validate({"kind": kind}) for kind in KINDS}
    return {kind: make_source(config, random_text(SAMPLES), BATCH, 0, world) for kind, config in configs.items()}


def _train(world: World, folder: str, repeats: int) -> Samples:
    """All sources live in the same two ranks and take turns, with a model each, and the same samples in the end."""
    with chdir(folder):
        arms = {kind: Training(source, world) for kind, source in _sources(world).items()}
    samples: Samples = {}
    for repeat in range(repeats + 1):
        for kind, seconds in take_turns(arms, _TURNS, _STEPS).items():
            parts = arms[kind].watch.take()
            if repeat:  # the first is not counted: files are opened, memory is allocated
                samples.setdefault(kind, []).append(BATCH * _STEPS / statistics.median(seconds))
                for part, names in _PARTS.items():
                    spent = sum(parts.get(name, 0.0) for name in names) / _STEPS / _TURNS
                    samples.setdefault(f"{kind}_{part}", []).append(spent)
    for training in arms.values():
        training.source.close()
    return samples


_PARTS = {"wait": ["data"], "compute": ["forward", "backward", "update"], "sync": ["finish"]}


def _load(world: World, folder: str, repeats: int) -> Samples:
    """Without a model: how fast can each deliver? `iterable` is `datasets`' own stream in torch's DataLoader, as its
    documentation puts the two together."""
    with chdir(folder):
        sources, iterable = _sources(world), _iterable(world)
    arms: dict[str, Callable[[], object]] = {kind: partial(next, source) for kind, source in sources.items()}
    arms["iterable"] = partial(next, iterable)
    samples: Samples = {f"load_{name}": [] for name in arms}
    for repeat in range(repeats + 1):
        for name in sorted(arms, reverse=bool(repeat % 2)):
            seconds = timed(arms[name], _LOADED // BATCH)
            if repeat:
                samples[f"load_{name}"].append(_LOADED / seconds)
    for source in sources.values():
        source.close()
    return samples


def _iterable(world: World) -> Iterator[Any]:
    from datasets.distributed import split_dataset_by_node

    from ddp_tutorial.corpus import CACHE
    from ddp_tutorial.streamed import iterable

    dataset = iterable(as_shards(random_text(SAMPLES), CACHE)).shuffle(seed=0, buffer_size=1000)
    dataset = split_dataset_by_node(dataset, world.rank, world.size)
    for epoch in range(10**6):
        dataset.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=BATCH // world.size)


def _skip(folder: Path, repeats: int) -> list[float]:
    """Seconds from nothing to the batch after a million samples: open the files, restore, and read."""
    paths = [folder / f"rows-{number}.arrow" for number in range(4)]
    for number, path in enumerate(paths):
        rows = np.arange(ROWS // 4 * CONTEXT, dtype=np.uint8).reshape(-1, CONTEXT)
        write_arrow(path, {"tokens": rows + np.uint8(number)})
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        data = ArrowShards(paths)
        source = ShardedSource(data, Sharding(Order(len(data), 0, 65536), BATCH), ALONE)
        source.restore({"cursor": 1_000_000})
        next(source)
        seconds.append(time.perf_counter() - start)
    return seconds
