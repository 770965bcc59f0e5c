"""Test the scaling model's step-time predictions on 8, 16 and 32 simulated hosts, as part of `bench cluster`.

The network is slow, and the ranks sleep instead of computing. The model is fitted to measurements on one and two hosts.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from ddp_tutorial.benches import Samples
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.experiments.arms import alternate, idle, run_interleaved, seconds_on_rank
from ddp_tutorial.experiments.scaling import StepModel, fit_step
from ddp_tutorial.experiments.sleeping import Sleeper, sleeping_step
from ddp_tutorial.sharding.sources import SINGLE_PROCESS
from ddp_tutorial.world import World

# The link must be the bottleneck. At 10 Mbit/s, a step on 32 hosts takes a second, during which all ranks together
# compute for about half a second on two cores.
RATE = "10mbit"
HOSTS = (8, 16, 32)
BATCH, SMALL_BATCH = 64, 16  # global batch sizes
SLEEPER = Sleeper(fixed=0.02, per_sample=0.01, nbytes=2**19)
_DDP = DDPConfig(variant="bucket", bucket_cap_mb=0.25)
_BUCKETS = 3  # two gradient buckets, and a bucket of a few bytes that marks the used parameters
_SIZES = (2**10, 2**16, 2**18)  # bytes of the all-reduces to which the link is fitted
_TURNS = 2


def measure(repeats: int) -> tuple[Samples, dict[str, tuple[str, str]]]:
    """Measure and predict the step time in milliseconds for each number of hosts in `HOSTS`.

    Returns:
        Each arm's values, and the two arms of each measured-to-predicted ratio.
    """
    samples: Samples = {}
    ratios = {}
    with Cluster(max(HOSTS), RATE) as cluster:
        model = _fitted(cluster.launch(_one_and_two, nodes=2, timeout=100)[0])
        for hosts in HOSTS:
            per_rank = cluster.launch(_steps, repeats, nodes=hosts, timeout=200)
            name = f"sleeping_{hosts}_hosts"
            samples[name] = [1e3 * max(of_ranks) for of_ranks in zip(*per_rank, strict=True)]
            samples[f"{name}_predicted"] = [1e3 * model.seconds(BATCH, hosts)] * repeats
            ratios[f"measured_vs_predicted_{hosts}_hosts"] = name, f"{name}_predicted"
    return samples, ratios


def _one_and_two(world: World) -> dict[str | int, float]:
    """Return step times on one and two ranks, and all-reduce times by size in bytes, all in seconds. Collective."""
    alone = world.rank == 0
    arms: dict[str | int, Callable[[], object]] = {
        "alone": sleeping_step(SLEEPER, BATCH, SINGLE_PROCESS, _DDP) if alone else idle,
        "alone_small": sleeping_step(SLEEPER, SMALL_BATCH, SINGLE_PROCESS, _DDP) if alone else idle,
        "apart": sleeping_step(SLEEPER, BATCH // 2, SINGLE_PROCESS, _DDP),
        "two": sleeping_step(SLEEPER, BATCH, world, _DDP),
    }
    for nbytes in _SIZES:
        arms[nbytes] = partial(dist.all_reduce, torch.zeros(nbytes // 4))
    return {
        name: median(turn["step"] for turn in turns) for name, turns in run_interleaved(world, arms, 1, _TURNS).items()
    }


def _fitted(at: dict[str | int, float]) -> StepModel:
    alone = {SMALL_BATCH: at["alone_small"], BATCH: at["alone"]}
    all_reduces = {nbytes: at[nbytes] for nbytes in _SIZES}
    return fit_step(alone, (BATCH, at["apart"]), all_reduces, (BATCH, at["two"]), SLEEPER.nbytes, _BUCKETS)


def _steps(world: World, repeats: int) -> list[float]:
    """Return the time in seconds until this rank has the averaged gradients, for each repeat. Collective."""
    step = sleeping_step(SLEEPER, BATCH, world, _DDP)
    return alternate({"step": partial(seconds_on_rank, step)}, repeats)["step"]
