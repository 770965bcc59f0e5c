"""Test the scaling model's step-time predictions on simulated hosts, and compare this package's DDP with torch's.

The hosts are Linux network namespaces. The model is fitted to measurements without communication between hosts:

- the computation time of one rank and of two independent ranks, measured in alternation with the two-host steps;
- the fraction of the communication that overlaps with computation, on a simulated link;
- the cost of a message.

The link rate is the only network property that the model uses. If the link also has a delay, the expected duration of a
bare all-reduce is computed from the rate and the delay (see `delays_in`). The module `hosts` measures steps on more
hosts, where the ranks sleep instead of computing.
"""

import math
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_tutorial.benches import Samples, hosts, report
from ddp_tutorial.benches.scaling import Setup, arm_of
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.cluster.delay import parse_delay
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.experiments.arms import alternate, by_repeat, idle, run_interleaved, seconds_on_rank
from ddp_tutorial.experiments.scaling import StepModel, fit_step
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

RATES = ("1gbit", "100mbit")
BATCH, SMALL_BATCH = 32, 8  # global batch sizes
SIZES = {"1kB": 2**10, "256kB": 2**18, "1MB": 2**20, "16MB": 2**24}  # bytes of bare all-reduces
DELAYS = ("1ms", "5ms")
_PIECE = 2**20  # the maximum number of bytes per gloo message: kMaxSegmentSize in gloo/allreduce.h
_FIT_SIZES = (2**10, 2**16, 2**20, 2**24)  # bytes of all-reduces on one host
_TURNS, _STEPS = 2, 2  # turns per arm per repeat, and steps per turn
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
    """Rank 0's measurements.

    Attributes:
        steps: Each arm's step times in seconds, one per repeat.
        all_reduces: All-reduce times in seconds on a single host, by tensor size in bytes.
        nbytes: The size of the gradients in bytes.
        buckets: The number of gradient buckets.
    """

    steps: Samples
    all_reduces: dict[int, list[float]]
    nbytes: int
    buckets: int


def measure(repeats: int) -> dict[str, Any]:
    """Measure step and all-reduce times in milliseconds at each rate in `RATES`, and step times on many hosts.

    The report contains measured and predicted values.

    Raises:
        ConfigError: If a cluster cannot be created.
    """
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
                of_ranks = cluster.launch(_all_reduces, repeats, timeout=200)
                _add_all_reduces(samples, ratios, f"{rate}_{delay}", link, of_ranks)
    many, of_many = hosts.measure(repeats)
    return report("cluster", samples | many, "ms", ratios | of_many)


def _add(
    samples: Samples, ratios: dict[str, tuple[str, str]], rate: str, bandwidth: float, here: Measured, there: Measured
) -> None:
    """Add the measurements and the model's predictions at one rate to `samples` and `ratios`."""
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
    """Add the measured all-reduce times of the slower rank on a link with a delay, and the expected times."""
    for size, nbytes in SIZES.items():
        name = f"allreduce_{size}_{between}"
        samples[name] = [1e3 * max(both) for both in zip(*(taken[nbytes] for taken in of_ranks), strict=True)]
        shaped = link.seconds(nbytes, delays_in(nbytes, len(of_ranks)))
        samples[f"{name}_as_shaped"] = [1e3 * shaped] * len(samples[name])
        ratios[f"allreduce_vs_shaped_{size}_{between}"] = name, f"{name}_as_shaped"


def delays_in(nbytes: int, ranks: int) -> int:
    """Return the number of link delays that a gloo all-reduce incurs in sequence.

    Gloo splits the tensor into pieces of at most 1 MiB; see `ring` in gloo/allreduce.cc. Each rank has the same number
    of pieces, at least two. A piece is sent only after the receiver has signaled that it is ready, so each piece incurs
    the link delay twice. Two pieces are in flight at a time, so each piece sent costs one delay on average. In each of
    two rounds, a rank sends all pieces except its own. On two ranks, a tensor of up to 4 MiB incurs 4 delays, and a
    16 MiB tensor incurs 16 delays, regardless of the TCP window. The tensor must contain at least two elements per
    rank.
    """
    pieces = max(2 * ranks, math.ceil(nbytes / _PIECE))
    pieces = ranks * math.ceil(pieces / ranks)
    return 2 * (pieces - pieces // ranks)


def _model(here: Measured, there: Measured, repeat: int, bandwidth: float) -> StepModel:
    """Return the step model for one repeat.

    The model combines this repeat's computation time, the overlap and message cost on one host, and the network rate.
    """
    at = {name: there.steps[name][repeat] for name in _COMPUTING}
    all_reduces = {nbytes: median(each) for nbytes, each in here.all_reduces.items()}
    buckets = here.buckets + 1  # plus a bucket of a few bytes that marks the used parameters

    def fitted(steps: dict[str, float]) -> StepModel:
        alone = {SMALL_BATCH: steps["alone_small"], BATCH: steps["alone"]}
        trained = (BATCH, median(here.steps["slow"]))
        return fit_step(alone, (BATCH, steps["apart"]), all_reduces, trained, here.nbytes, buckets, trained_on=_SLOW)

    model = fitted({name: median(here.steps[name]) for name in _COMPUTING})
    link = LinkModel(model.link.latency, min(bandwidth, model.link.bandwidth))
    return replace(fitted(at), overlap=model.overlap, link=link)


def _measure(world: World, setups: dict[str, Setup], repeats: int) -> Measured:
    arms = {name: arm_of(setup, world) for name, setup in setups.items()}
    turns = run_interleaved(world, {name: each or idle for name, each in arms.items()}, _STEPS, repeats * _TURNS)
    steps = {name: by_repeat(taken, repeats) for name, taken in turns.items()}
    all_reduces: dict[int, list[float]] = {}
    buckets: list[int] = []
    if "slow" in setups:  # on one host, to fit the model
        calls = {nbytes: partial(dist.all_reduce, torch.zeros(nbytes // 4)) for nbytes in _FIT_SIZES}
        reduced = run_interleaved(world, calls, 1, repeats)
        all_reduces = {nbytes: [turn["step"] for turn in taken] for nbytes, taken in reduced.items()}
        slow: Any = arms["slow"]
        buckets = [bucket.buffer.nbytes for bucket in slow.step.strategy.model.buckets]
    return Measured(steps, all_reduces, sum(buckets), len(buckets))


def _all_reduces(world: World, repeats: int) -> dict[int, list[float]]:
    """Return this rank's all-reduce times in seconds, one per repeat, by tensor size in bytes. Collective."""
    calls = {nbytes: partial(dist.all_reduce, torch.zeros(nbytes // 4)) for nbytes in SIZES.values()}
    return alternate({nbytes: partial(seconds_on_rank, call) for nbytes, call in calls.items()}, repeats)
