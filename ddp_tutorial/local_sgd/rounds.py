"""Determine when the ranks average their weights. This module contains only arithmetic and starts no processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """Rounds of `length` updates, after `begin` updates with averaged gradients. Updates are counted from 1."""

    length: int
    begin: int = 0

    def local_steps(self, updates: int) -> int:
        """Return the number of local steps in the current round after `updates` updates."""
        return max(0, updates - self.begin) % self.length

    def ends_round(self, update: int) -> bool:
        """Return whether the ranks average their weights after this update."""
        return update > self.begin and self.local_steps(update) == 0

    def all_reduces(self, updates: int) -> int:
        """Return the number of model-sized all-reduces in `updates` updates.

        The first `begin` updates all-reduce gradients. Each later round all-reduces weights once.
        """
        return min(updates, self.begin) + max(0, updates - self.begin) // self.length
