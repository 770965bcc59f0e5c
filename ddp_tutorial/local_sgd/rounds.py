"""Compute when the ranks average their weights. This is pure arithmetic, without processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """Rounds of `length` updates, after `begin` updates with averaged gradients. Updates are counted from 1."""

    length: int
    begin: int = 0

    def local_steps(self, updates: int) -> int:
        """Return the number of updates since all ranks last had the same weights, after `updates` updates in total."""
        return max(0, updates - self.begin) % self.length

    def ends_round(self, update: int) -> bool:
        """Return whether the ranks average their weights after this update."""
        return update > self.begin and self.local_steps(update) == 0

    def all_reduces(self, updates: int) -> int:
        """Return the number of all-reduces of model size in `updates` updates.

        There is one all-reduce of gradients per update until `begin`, and then one of weights per round.
        """
        return min(updates, self.begin) + max(0, updates - self.begin) // self.length
