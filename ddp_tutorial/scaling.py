"""How fast on more ranks? A model of a step, fitted on one and two ranks: computing, sending, and what hides what.

The law behind it is old: what every rank does alone shrinks as ranks are added, what they do together does not (Amdahl,
1967); unless each rank keeps as much to do as before (Gustafson, 1988). Strong scaling is the first: one global batch,
shared out. Weak scaling is the second: as many samples for each rank, whatever their number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ddp_tutorial.link import LinkModel, fit_link

# The part of computing that is backward, and can hide communication. It does about twice the work of forward.
BACKWARD = 2 / 3
BUCKET = 25 * 2**20  # bytes: torch's default

# Assumptions, in round numbers: latency of a message in seconds, bytes a second in one direction.
NETWORKS = {
    "1 Gbit/s Ethernet": LinkModel(50e-6, 0.125e9),
    "10 Gbit/s Ethernet": LinkModel(20e-6, 1.25e9),
    "100 Gbit/s, remote memory access": LinkModel(5e-6, 12.5e9),
    "NVLink class": LinkModel(2e-6, 300e9),
}


@dataclass(frozen=True)
class StepModel:
    """Seconds of an optimiser step.

    A rank computes `fixed` seconds a step and `per_sample` for each of its samples; `sharing` times that if others
    compute beside it on the same machine. Then `nbytes` of gradients are summed over a ring of `link`s, in `buckets`
    messages. Backward could hide as much of that as backward takes; `overlap` says what part of this it does.
    """

    fixed: float
    per_sample: float
    nbytes: float
    link: LinkModel
    buckets: int = 1
    overlap: float = 0.0
    sharing: float = 1.0

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.per_sample <= 0 or self.nbytes < 0 or self.buckets < 1:
            raise ValueError(f"a step takes some time for a sample, and no part of it less than nothing; found {self}")
        if not 0 <= self.overlap <= 1 or self.sharing < 1:
            raise ValueError(f"overlap is from 0 to 1, and sharing at least 1; found {self}")

    def compute(self, samples: float, ranks: int = 1) -> float:
        """Seconds that a rank computes, of several on this machine or alone."""
        return (self.fixed + self.per_sample * samples) * (self.sharing if ranks > 1 else 1.0)

    def communication(self, ranks: int) -> float:
        """Seconds of the all-reduces of a step, hidden or not: 2 (p - 1) / p of the bytes, 2 (p - 1) messages each."""
        return self.buckets * self.link.ring_seconds(self.nbytes / self.buckets, ranks)

    def exposed(self, samples: float, ranks: int) -> float:
        """Seconds that a rank waits for communication which backward does not hide."""
        sending = self.communication(ranks)
        return sending - self.overlap * min(sending, BACKWARD * self.compute(samples, ranks))

    def seconds(self, batch: int, ranks: int = 1, cores: int | None = None) -> float:
        """A step of `batch` samples over `ranks` ranks. The rank with the most samples decides.

        With `cores`, all ranks share a machine that has so many. Where these are fewer than the ranks, they take turns
        with computing and with sending, which on one machine is copying.
        """
        if batch < 1 or ranks < 1 or (cores is not None and cores < 1):
            raise ValueError(f"batch, ranks and cores are at least 1; found {batch}, {ranks} and {cores}")
        samples = math.ceil(batch / ranks)
        turns = max(1.0, ranks / cores) if cores else 1.0
        return turns * (self.compute(samples, ranks) + self.exposed(samples, ranks))

    def strong_efficiency(self, batch: int, ranks: int, cores: int | None = None) -> float:
        """The speed-up over one rank with the same global batch, by the number of ranks, or of cores if these are
        fewer."""
        working = min(ranks, cores or ranks)
        return self.seconds(batch) / (working * self.seconds(batch, ranks, cores))

    def weak_efficiency(self, batch: int, ranks: int, cores: int | None = None) -> float:
        """Samples a second over those of one rank, by the number of ranks (or cores), with `batch` samples for each."""
        working = min(ranks, cores or ranks)
        return ranks * self.seconds(batch) / (working * self.seconds(batch * ranks, ranks, cores))

    def on(self, link: LinkModel, faster: float = 1.0, larger: float = 1.0) -> "StepModel":
        """The same step in a cluster of one rank a machine, on this link. The machines compute so many times faster,
        and the model has so many times the parameters: as many times the bytes, and the work for each sample."""
        nbytes, work = self.nbytes * larger, larger / faster
        return replace(
            self,
            fixed=self.fixed * work,
            per_sample=self.per_sample * work,
            nbytes=nbytes,
            link=link,
            buckets=max(self.buckets, math.ceil(nbytes / BUCKET)),
            sharing=1.0,
        )


def fit_step(
    alone: Mapping[int, float],
    side_by_side: tuple[int, float],
    all_reduces: Mapping[int, float],
    trained: tuple[int, float],
    nbytes: float,
    buckets: int = 1,
    ranks: int = 2,
    trained_on: LinkModel | None = None,
) -> StepModel:
    """The model that explains what was measured on one rank and on `ranks`.

    `alone`: samples -> seconds of a step of one rank. `all_reduces`: bytes -> seconds. And global batches with the
    seconds of a step: `side_by_side`, of all ranks without talking; `trained`, with all-reduces. What of these is
    hidden shows best on a slow link, simulated for example: `trained_on`, if it is not that of `all_reduces`.
    """
    try:  # a straight line with both numbers positive, as a link is
        line = fit_link([1] * len(alone), list(alone), list(alone.values()))
    except ValueError:
        raise ValueError(f"a step does not take longer for more samples: {dict(alone)}. Measure once more.") from None
    rounds = 2 * (ranks - 1)
    link = fit_link([rounds] * len(all_reduces), [rounds * n / ranks for n in all_reduces], list(all_reduces.values()))
    model = StepModel(line.latency, 1 / line.bandwidth, nbytes, link, buckets)
    batch, seconds = side_by_side
    model = replace(model, sharing=max(1.0, seconds / model.compute(batch / ranks)))
    batch, seconds = trained
    there = replace(model, link=trained_on or link)
    return replace(model, overlap=_overlap(there, batch / ranks, ranks, seconds))


def _overlap(model: StepModel, samples: float, ranks: int, seconds: float) -> float:
    """The part of what backward could hide that it must have hidden, if a step took that long."""
    computing, sending = model.compute(samples, ranks), model.communication(ranks)
    hideable = min(sending, BACKWARD * computing)
    hidden = sending - (seconds - computing)
    return min(1.0, max(0.0, hidden / hideable)) if hideable else 0.0


class Band(NamedTuple):
    """A value, and where it may well lie."""

    low: float
    middle: float
    high: float


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = lambda values: float(np.median(values)),
    coverage: float = 0.9,
    draws: int = 2000,
) -> Band:
    """How far could the `statistic` of these values have come out otherwise? Draw as many of them again, with
    repetition, many times; the middle `coverage` of what comes out is the band (Efron, 1979)."""
    if not values:
        raise ValueError("no values to draw from")
    drawn = np.random.default_rng(0).choice(np.asarray(values, dtype=float), (draws, len(values)))
    found = [statistic(row) for row in drawn]
    low, high = np.quantile(found, [(1 - coverage) / 2, (1 + coverage) / 2])
    return Band(float(low), float(statistic(values)), float(high))
