"""How fast is a step on more ranks? A model of its seconds: computing, communication, and how much of that is hidden.

It is fitted to measurements on one and two ranks. Strong scaling keeps the global batch: each rank computes less as
ranks are added, but the communication does not shrink, which limits the speed-up (Amdahl, 1967). Weak scaling keeps the
samples of each rank, so that computing does not shrink either (Gustafson, 1988).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ddp_tutorial.ddp.link import LinkModel, fit_link

# The part of computing that is backward, which can hide communication: it does about twice the work of forward.
BACKWARD = 2 / 3
BUCKET = 25 * 2**20  # bytes: torch's default

# Assumed round numbers: seconds of latency per message, and bytes per second in one direction.
NETWORKS = {
    "1 Gbit/s Ethernet": LinkModel(50e-6, 0.125e9),
    "10 Gbit/s Ethernet": LinkModel(20e-6, 1.25e9),
    "100 Gbit/s, remote memory access": LinkModel(5e-6, 12.5e9),
    "NVLink class": LinkModel(2e-6, 300e9),
}


@dataclass(frozen=True)
class StepModel:
    """Seconds of an optimiser step.

    A rank computes `fixed` seconds in a step and `per_sample` for each of its samples; `sharing` times as long if other
    ranks compute on the same machine. Then `nbytes` of gradients are summed in `buckets` all-reduces over a ring of
    `link`s. At most as much of that as backward takes can be hidden behind backward; `overlap` is the part of this most
    that is.
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
            raise ValueError(
                f"per_sample should be above 0, fixed and nbytes 0 or more, buckets 1 or more; found {self}"
            )
        if not 0 <= self.overlap <= 1 or self.sharing < 1:
            raise ValueError(f"overlap is from 0 to 1, and sharing at least 1; found {self}")

    def compute(self, samples: float, ranks: int = 1) -> float:
        """Seconds that a rank computes for `samples` samples, as one of `ranks` on this machine."""
        return (self.fixed + self.per_sample * samples) * (self.sharing if ranks > 1 else 1.0)

    def communication(self, ranks: int) -> float:
        """Seconds of a step's all-reduces, hidden or not: each 2 (p - 1) messages of a p-th of its bytes."""
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
        """The speed-up over one rank with the same global batch, divided by the number of ranks, or of cores if there
        are fewer."""
        working = min(ranks, cores or ranks)
        return self.seconds(batch) / (working * self.seconds(batch, ranks, cores))

    def weak_efficiency(self, batch: int, ranks: int, cores: int | None = None) -> float:
        """With `batch` samples for each rank: the samples per second, divided by those of one rank and by the number of
        ranks, or of cores if there are fewer."""
        working = min(ranks, cores or ranks)
        return ranks * self.seconds(batch) / (working * self.seconds(batch * ranks, ranks, cores))

    def on(self, link: LinkModel, faster: float = 1.0, larger: float = 1.0) -> "StepModel":
        """The same step on a cluster with one rank on each machine, connected by `link`. Each computes `faster` times
        as fast, and the model has `larger` times the parameters, the bytes and the work per sample."""
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
    """The model that fits measurements on one rank and on `ranks` of them. Raises `ValueError` where no model does.

    `alone`: samples -> seconds of a step of one rank. `all_reduces`: bytes -> seconds, on all ranks. `side_by_side` and
    `trained` are (global batch, seconds of a step) of all ranks, without and with all-reduces between them. How much of
    the communication is hidden shows best on a slow link: `trained_on` is the link of `trained`, if it was another one
    than that of `all_reduces`, such as a simulated one.
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
    """The part of what backward could hide that it has hidden, if a step took that many `seconds`."""
    computing, sending = model.compute(samples, ranks), model.communication(ranks)
    hideable = min(sending, BACKWARD * computing)
    hidden = sending - (seconds - computing)
    return min(1.0, max(0.0, hidden / hideable)) if hideable else 0.0


class Band(NamedTuple):
    """An estimate (`middle`) and the limits of the band in which the true value may well be."""

    low: float
    middle: float
    high: float


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = lambda values: float(np.median(values)),
    coverage: float = 0.9,
    draws: int = 2000,
) -> Band:
    """The `statistic` of `values`, with a band of what it could have been by chance (Efron, 1979): draw as many values
    from them, with replacement, `draws` times; the band has the middle `coverage` of the results."""
    if not values:
        raise ValueError("no values to draw from")
    drawn = np.random.default_rng(0).choice(np.asarray(values, dtype=float), (draws, len(values)))
    found = [statistic(row) for row in drawn]
    low, high = np.quantile(found, [(1 - coverage) / 2, (1 + coverage) / 2])
    return Band(float(low), float(statistic(values)), float(high))
