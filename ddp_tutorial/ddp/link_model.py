"""Define the alpha-beta model of a link. This module does not import torch.

Sending n bytes takes alpha + n / beta seconds, where alpha is the latency and beta is the bandwidth (Hockney, 1994).
"""

import math
from dataclasses import dataclass

from ddp_tutorial.ddp.config import LinkConfig


@dataclass(frozen=True)
class LinkModel:
    """The alpha-beta model of a link, with `latency` in seconds per message and `bandwidth` in bytes per second."""

    latency: float
    bandwidth: float

    @classmethod
    def from_config(cls, config: LinkConfig) -> "LinkModel":
        """Return the model of the link that `config` describes."""
        return cls(config.latency_ms / 1e3, config.megabytes_per_second * 1e6)

    def __str__(self) -> str:
        """Return the latency and the bandwidth as text."""
        return f"{self.latency * 1e3:g} ms, {self.bandwidth / 1e6:g} MB/s"

    def seconds(self, nbytes: float, rounds: float = 1) -> float:
        """Return the time in seconds for `rounds` consecutive messages that contain `nbytes` bytes in total."""
        return rounds * self.latency + nbytes / self.bandwidth

    def ring_seconds(self, nbytes: float, size: int) -> float:
        """Return the time in seconds of a ring all-reduce with 2 (`size` - 1) rounds of `nbytes` / `size` bytes."""
        rounds = 2 * (size - 1)
        return self.seconds(rounds * nbytes / size, rounds)

    def tree_seconds(self, nbytes: float, size: int) -> float:
        """Return the time in seconds of a tree all-reduce with 2 ceil(log2 `size`) rounds of `nbytes` bytes."""
        rounds = 2 * math.ceil(math.log2(size))
        return self.seconds(rounds * nbytes, rounds)


def bytes_all_reduced(nbytes: int, size: int) -> int:
    """Return the number of bytes that each rank sends in a ring all-reduce over N = `size` ranks.

    A rank sends 2 (N - 1) chunks of `nbytes` / N bytes.
    """
    return 2 * nbytes * (size - 1) // size
