"""Compare the speed of data sources in training, in reading without training, and in resuming far into the data."""

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
from ddp_tutorial.benches.step import CONTEXT, gpt_step, random_text
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.experiments.arms import by_repeat, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.config import SourceConfig
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation
from ddp_tutorial.sharding.samples import ArrowShards, as_shards, write_arrow
from ddp_tutorial.sharding.sharded import ShardedSource
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.sharding.sources import SINGLE_PROCESS, make_source
from ddp_tutorial.world import World

BATCH = 16  # global batch size
SAMPLES = 20_000
_TURNS, _STEPS = 4, 10  # turns per arm per repeat, and steps per turn
_LOADED = 2_000  # samples that a loader reads per turn
ROWS = 1_200_000  # rows in all files that the resume arm reads

KINDS = ["sharded", "dispatched", "streamed", "fast_stream"]


def measure(repeats: int) -> dict[str, Any]:
    """Measure the speed of each source.

    The report contains the samples per second with and without training, the duration of each step phase, and the time
    to resume, in seconds.
    """
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
    return {kind: make_source(random_text(SAMPLES), BATCH, world, config=config) for kind, config in configs.items()}


def _train(world: World, folder: str, repeats: int) -> Samples:
    """Train from each source on the same two ranks, in alternating turns, with one model per source. Collective."""
    with chdir(folder):
        arms = {
            kind: gpt_step(source, world, ddp=DDPConfig(variant="bucket")) for kind, source in _sources(world).items()
        }
    turns = run_interleaved(world, arms, _STEPS, repeats * _TURNS)
    samples: Samples = {}
    for kind, taken in turns.items():
        samples[kind] = [BATCH / seconds for seconds in by_repeat(taken, repeats)]
        for name, part in _PARTS.items():
            samples[f"{kind}_{name}"] = by_repeat(taken, repeats, part)
    for step in arms.values():
        step.close()
    return samples


_PARTS = {"wait": "data", "compute": "compute", "sync": "sync"}


def _load(world: World, folder: str, repeats: int) -> Samples:
    """Return each source's throughput in samples per second, measured without training. Collective.

    The arm `iterable` reads a stream from `datasets` with torch's DataLoader, as in the `datasets` documentation.
    """
    with chdir(folder):  # also for the first batches, because `iterable` creates its files before its first batch
        sources = _sources(world)
        arms: dict[str, Callable[[], object]] = {kind: partial(next, source) for kind, source in sources.items()}
        arms["iterable"] = partial(next, _iterable(world))
        turns = run_interleaved(world, arms, _LOADED // BATCH, repeats)
    samples = {f"load_{name}": [BATCH / turn["step"] for turn in taken] for name, taken in turns.items()}
    for source in sources.values():
        source.close()
    return samples


def _iterable(world: World) -> Iterator[Any]:
    from datasets.distributed import split_dataset_by_node

    from ddp_tutorial.sharding.corpus import CACHE
    from ddp_tutorial.sharding.streamed import iterable_dataset

    dataset = iterable_dataset(as_shards(random_text(SAMPLES), CACHE)).shuffle(seed=0, buffer_size=1000)
    dataset = split_dataset_by_node(dataset, world.rank, world.size)
    for epoch in range(10**6):
        dataset.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=BATCH // world.size)


def _skip(folder: Path, repeats: int) -> list[float]:
    """Return the time in seconds to open the files, restore a cursor at sample 1,000,000, and read the next batch."""
    paths = [folder / f"rows-{number}.arrow" for number in range(4)]
    for number, path in enumerate(paths):
        rows = np.arange(ROWS // 4 * CONTEXT, dtype=np.uint8).reshape(-1, CONTEXT)
        write_arrow(path, {"tokens": rows + np.uint8(number)})
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        data = ArrowShards(paths)
        source = ShardedSource(data, GlobalBatchSampler(Permutation(len(data), 0, 65536), BATCH), SINGLE_PROCESS)
        source.load_state_dict({"cursor": 1_000_000})
        next(source)
        seconds.append(time.perf_counter() - start)
    return seconds
