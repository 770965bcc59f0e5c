"""Predict the step time on any number of ranks by modeling computation, communication and their overlap.

The model is fitted to measurements on one and two ranks. Strong scaling keeps the global batch size constant.
Additional ranks reduce the computation per rank but not the communication, which limits the speedup (Amdahl, 1967).
Weak scaling keeps the batch size per rank constant, so the computation per rank does not shrink (Gustafson, 1988).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddp_tutorial.ddp.config import LinkConfig
from ddp_tutorial.ddp.link import fit_link
from ddp_tutorial.ddp.link_model import LinkModel

# The fraction of computation in the backward pass, which can overlap with communication. The backward pass does about
# twice the work of the forward pass.
BACKWARD = 2 / 3
BUCKET = 25 * 2**20  # bytes: torch's default

# Assumed round numbers for the latency per message in seconds, and the bytes per second in one direction.
NETWORKS = {
    "1 Gbit/s Ethernet": LinkModel(50e-6, 0.125e9),
    "10 Gbit/s Ethernet": LinkModel(20e-6, 1.25e9),
    "100 Gbit/s, remote memory access": LinkModel(5e-6, 12.5e9),
    "400 Gbit/s, remote memory access": LinkModel(4e-6, 50e9),
    "NVLink class": LinkModel(2e-6, 300e9),  # within one NVLink domain of 8 to 72 GPUs
}


@dataclass(frozen=True)
class StepModel:
    """Performance model of an optimizer step.

    Attributes:
        fixed: Computation time per step in seconds, regardless of the number of samples.
        per_sample: Computation time per sample, in seconds.
        nbytes: Size of the gradients in bytes.
        link: The link between neighbors in the all-reduce ring.
        buckets: The number of all-reduces per step.
        overlap: The fraction of the overlappable communication that actually overlaps with the backward pass.
            The overlap cannot last longer than the backward pass.
        sharing: The factor by which computation slows down when several ranks run on the same machine.
    """

    fixed: float
    per_sample: float
    nbytes: float
    link: LinkModel
    buckets: int = 1
    overlap: float = 0.0
    sharing: float = 1.0

    def __post_init__(self) -> None:
        """Validate the fields."""
        if self.fixed < 0 or self.per_sample <= 0 or self.nbytes < 0 or self.buckets < 1:
            raise ValueError(
                f"'per_sample' must be > 0, 'fixed' and 'nbytes' must be >= 0, and 'buckets' must be >= 1, got {self}"
            )
        if not 0 <= self.overlap <= 1 or self.sharing < 1:
            raise ValueError(f"'overlap' must be between 0 and 1, and 'sharing' must be at least 1, got {self}")

    def compute(self, samples: float, ranks: int = 1) -> float:
        """Return one rank's computation time in seconds for `samples` samples, with `ranks` ranks on this machine."""
        return (self.fixed + self.per_sample * samples) * (self.sharing if ranks > 1 else 1.0)

    def communication(self, ranks: int) -> float:
        """Return the total duration in seconds of a step's all-reduces, including the overlapped part.

        In an all-reduce over p ranks, each rank sends 2 (p - 1) messages that each contain 1 / p of the bytes.
        """
        return self.buckets * self.link.ring_seconds(self.nbytes / self.buckets, ranks)

    def exposed(self, samples: float, ranks: int) -> float:
        """Return the duration in seconds of the communication that does not overlap with the backward pass."""
        sending = self.communication(ranks)
        return sending - self.overlap * min(sending, BACKWARD * self.compute(samples, ranks))

    def seconds(self, batch: int, ranks: int = 1) -> float:
        """Return the step time in seconds for a global batch of `batch` samples.

        The rank with the most samples determines the step time.
        """
        if batch < 1 or ranks < 1:
            raise ValueError(f"'batch' and 'ranks' must be at least 1, got {batch} and {ranks}")
        samples = math.ceil(batch / ranks)
        return self.compute(samples, ranks) + self.exposed(samples, ranks)

    def weak_efficiency(self, batch: int, ranks: int) -> float:
        """Return the throughput for `batch` samples per rank, as a fraction of `ranks` times one rank's throughput.

        The efficiency equals one rank's step time divided by the step time on `ranks` ranks.
        """
        return self.seconds(batch) / self.seconds(batch * ranks, ranks)

    def on(self, link: LinkModel, faster: float = 1.0, larger: float = 1.0) -> "StepModel":
        """Return the performance model of this step on a cluster with one rank per machine.

        Args:
            link: The link between the machines.
            faster: The speedup of each rank's computation.
            larger: The factor by which the number of parameters, the gradient size and the computation per sample grow.
        """
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
    trained_on: LinkConfig | None = None,
) -> StepModel:
    """Fit a `StepModel` to measurements on one rank and on two ranks.

    Args:
        alone: Dict that maps each number of samples to the step time in seconds on one rank.
        side_by_side: Tuple of the global batch size and the step time in seconds on two ranks without all-reduces.
        all_reduces: Dict that maps each number of bytes to the all-reduce time in seconds on two ranks.
        trained: Tuple of the global batch size and the step time in seconds on two ranks with all-reduces.
        nbytes: The size of the gradients in bytes.
        buckets: The number of all-reduces per step.
        trained_on: The simulated link of the `trained` measurement, or None for a real link. A slow link yields the
            best estimate of the overlap.

    Raises:
        ValueError: If no model fits the measurements.
    """
    try:  # as for a link, fit a straight line with positive coefficients
        line = fit_link([1] * len(alone), list(alone), list(alone.values()))
    except ValueError:
        raise ValueError(
            f"the step time must grow with the number of samples, got {dict(alone)}. Repeat the measurement."
        ) from None
    # In an all-reduce over two ranks, each rank sends two messages, each of which contains half of the bytes.
    link = fit_link([2] * len(all_reduces), list(all_reduces), list(all_reduces.values()))
    model = StepModel(line.latency, 1 / line.bandwidth, nbytes, link, buckets)
    batch, seconds = side_by_side
    model = replace(model, sharing=max(1.0, seconds / model.compute(batch / 2)))
    batch, seconds = trained
    there = replace(model, link=LinkModel.from_config(trained_on) if trained_on else link)
    return replace(model, overlap=_overlap(there, batch / 2, seconds))


def _overlap(model: StepModel, samples: float, seconds: float) -> float:
    """Return the fraction of the overlappable communication that overlaps, given the step time on two ranks."""
    computing, sending = model.compute(samples, 2), model.communication(2)
    hideable = min(sending, BACKWARD * computing)
    hidden = sending - (seconds - computing)
    return min(1.0, max(0.0, hidden / hideable)) if hideable else 0.0
