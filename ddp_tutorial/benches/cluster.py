"""Hosts in the kernel: is a step as long as the scaling model says, and ours as fast as torch's DDP?

The model is fitted to one host: to computing, alone and side by side, measured in the same turns as the steps between
the hosts; to the part of the communication that is hidden, on a simulated link; and to what a message costs there. Of
the network it is told the rate only. With a delay between the hosts as well, bare all-reduces have a time that follows
from the two numbers alone (see `delays_in`). More hosts, whose ranks sleep, are in `hosts`.
"""

import math
import time
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_tutorial.benches import Samples, hosts, report
from ddp_tutorial.benches.scaling import Setup, arm_of
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.cluster.delay import parse_delay
from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.ddp.wrappers import DDPConfig, LinkConfig
from ddp_tutorial.experiments.arms import by_repeat, idle, run_interleaved
from ddp_tutorial.experiments.scaling import StepModel, fit_step
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

RATES = ("1gbit", "100mbit")
BATCH, SMALL_BATCH = 32, 8  # samples of a step, over both ranks
SIZES = {"1kB": 2**10, "256kB": 2**18, "1MB": 2**20, "16MB": 2**24}  # of bare all-reduces
DELAYS = ("1ms", "5ms")
_PIECE = 2**20  # bytes, at most, that gloo sends at a time: kMaxSegmentSize in its gloo/allreduce.h
_FIT_SIZES = (2**10, 2**16, 2**20, 2**24)  # bytes of all-reduces on one host
_TURNS, _STEPS = 2, 2  # turns of an arm in a repeat, steps in a turn
_SLOW = LinkConfig(latency_ms=1, megabytes_per_second=20)
_BUCKETS = DDPConfig(variant="bucket")
_COMPUTING = {
    "alone": Setup(1, BATCH, ddp=_BUCKETS),
    "alone_small": Setup(1, SMALL_BATCH, ddp=_BUCKETS),
    "apart": Setup(2, BATCH, talk=False, ddp=_BUCKETS),
}
_BETWEEN = {"bucket": Setup(2, BATCH, ddp=_BUCKETS), "torch": Setup(2, BATCH, ddp=DDPConfig(variant="torch"))}
_HIDING = {"slow": Setup(2, BATCH, ddp=DDPConfig(variant="bucket", simulated_link=_SLOW))}


class Measured(NamedTuple):
    """On rank 0: seconds of a step of each arm in each repeat, and of all-reduces by their bytes; and the gradient. On
    several hosts all-reduces are measured for themselves."""

    steps: Samples
    all_reduces: dict[int, list[float]]
    nbytes: int
    buckets: int


def measure(repeats: int) -> dict[str, Any]:
    """Milliseconds of steps, measured and predicted, and of bare all-reduces, measured and as rate and delay have them,
    at each of `RATES`; and of steps on many hosts. Raises `ConfigError` where no cluster can be made."""
    samples: Samples = {}
    ratios: dict[str, tuple[str, str]] = {}
    with Cluster(2) as cluster:
        here = launch(_measure, 2, _COMPUTING | _HIDING, repeats, device="cpu", threads=1, echo=False)[0]
        for rate in RATES:
            cluster.set_rate(rate)
            there = cluster.launch(_measure, _COMPUTING | _BETWEEN, repeats, timeout=400)[0]
            _add(samples, ratios, rate, cluster.bytes_per_second, here, there)
    for delay in DELAYS:
        with Cluster(2, RATES[0], delay) as cluster:
            for rate in RATES:
                cluster.set_rate(rate)
                link = LinkModel(parse_delay(delay), cluster.bytes_per_second)
                told = cluster.launch(_all_reduces, repeats, timeout=200)
                _add_all_reduces(samples, ratios, f"{rate}_{delay}", link, told)
    many, of_many = hosts.measure(repeats)
    return report("cluster", samples | many, "ms", ratios | of_many)


def _add(
    samples: Samples, ratios: dict[str, tuple[str, str]], rate: str, bandwidth: float, here: Measured, there: Measured
) -> None:
    """What was measured at one rate, beside what was to be expected."""
    for name in _BETWEEN:
        samples[f"{name}_{rate}"] = [1e3 * each for each in there.steps[name]]
    repeats = range(len(there.steps["bucket"]))
    samples[f"predicted_{rate}"] = [1e3 * _model(here, there, i, bandwidth).seconds(BATCH, 2) for i in repeats]
    ratios[f"measured_vs_predicted_{rate}"] = f"bucket_{rate}", f"predicted_{rate}"
    ratios[f"bucket_vs_torch_{rate}"] = f"torch_{rate}", f"bucket_{rate}"


def _add_all_reduces(
    samples: Samples,
    ratios: dict[str, tuple[str, str]],
    between: str,
    link: LinkModel,
    of_ranks: list[dict[int, list[float]]],
) -> None:
    """All-reduces with a delay, beside the time that they should take: each ends when both ranks have the sum."""
    for size, nbytes in SIZES.items():
        name = f"allreduce_{size}_{between}"
        samples[name] = [1e3 * max(both) for both in zip(*(taken[nbytes] for taken in of_ranks), strict=True)]
        shaped = link.seconds(nbytes, delays_in(nbytes, len(of_ranks)))
        samples[f"{name}_as_shaped"] = [1e3 * shaped] * len(samples[name])
        ratios[f"allreduce_vs_shaped_{size}_{between}"] = name, f"{name}_as_shaped"


def delays_in(nbytes: int, ranks: int) -> int:
    """How many delays of the link follow one another in an all-reduce by gloo of a tensor of `nbytes`, which has at
    least two elements for each of the `ranks`.

    gloo cuts the tensor into pieces of at most 1 MiB, equally many for each rank and at least two (see `ring` in its
    gloo/allreduce.cc). A piece leaves only when its receiver has sent word that it is ready: two delays for each. Two
    pieces are on their way at a time, so that comes to one delay for each piece that a rank sends: all but its own, in
    two rounds. Up to 4 MiB on two ranks that are four delays; 16 MiB has 16, however large the window of TCP is.
    """
    pieces = max(2 * ranks, math.ceil(nbytes / _PIECE))
    pieces = ranks * math.ceil(pieces / ranks)
    return 2 * (pieces - pieces // ranks)


def _model(here: Measured, there: Measured, repeat: int, bandwidth: float) -> StepModel:
    """The model for one repeat: its computing, this host's hiding and cost of a message, and the rate."""
    at = {name: there.steps[name][repeat] for name in _COMPUTING}
    all_reduces = {nbytes: median(each) for nbytes, each in here.all_reduces.items()}
    buckets = here.buckets + 1  # one more, of a few bytes, says which parameters are in use

    def fitted(steps: dict[str, float]) -> StepModel:
        alone = {SMALL_BATCH: steps["alone_small"], BATCH: steps["alone"]}
        trained, slow = (BATCH, median(here.steps["slow"])), _SLOW.model()
        return fit_step(alone, (BATCH, steps["apart"]), all_reduces, trained, here.nbytes, buckets, trained_on=slow)

    model = fitted({name: median(here.steps[name]) for name in _COMPUTING})
    link = LinkModel(model.link.latency, min(bandwidth, model.link.bandwidth))
    return replace(fitted(at), overlap=model.overlap, link=link)


def _measure(world: World, setups: dict[str, Setup], repeats: int) -> Measured:
    arms = {name: arm_of(setup, world) for name, setup in setups.items()}
    turns = run_interleaved(world, {name: each or idle for name, each in arms.items()}, _STEPS, repeats * _TURNS)
    steps = {name: by_repeat(taken, repeats) for name, taken in turns.items()}
    all_reduces: dict[int, list[float]] = {}
    if "slow" in setups:  # on one host, to fit the model to
        tensors = {nbytes: torch.zeros(nbytes // 4) for nbytes in _FIT_SIZES}
        calls = {nbytes: lambda tensor=tensor: dist.all_reduce(tensor) for nbytes, tensor in tensors.items()}
        reduced = run_interleaved(world, calls, 1, repeats)
        all_reduces = {nbytes: [turn["step"] for turn in taken] for nbytes, taken in reduced.items()}
    ours: Any = arm_of(Setup(world.size, BATCH, ddp=_BUCKETS), world)
    buckets = [bucket.buffer.nbytes for bucket in ours.step.strategy.model.buckets]
    return Measured(steps, all_reduces, sum(buckets), len(buckets))


def _all_reduces(world: World, repeats: int) -> dict[int, list[float]]:
    """Bytes -> seconds of an all-reduce on this rank, in each repeat; the first is not counted."""
    tensors = {nbytes: torch.zeros(nbytes // 4) for nbytes in SIZES.values()}
    taken: dict[int, list[float]] = {nbytes: [] for nbytes in tensors}
    for _ in range(repeats + 1):
        for nbytes, tensor in tensors.items():
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            taken[nbytes].append(time.perf_counter() - began)
    return {nbytes: seconds[1:] for nbytes, seconds in taken.items()}
