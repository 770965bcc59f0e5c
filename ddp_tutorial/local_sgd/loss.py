"""Compute each rank's loss. After the first step, the ranks exchange losses only at the end of a round."""

from collections.abc import Iterable

from torch import nn

from ddp_tutorial.accumulation.loss import LOSS, Loss, Number, StepLoss, Totals
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.world import World


class RoundLoss(StepLoss):
    """A `StepLoss` that, after the first call of `forward`, communicates only if `exchanges` is true.

    If `exchanges` is false, the totals are this rank's own totals multiplied by the number of ranks. Stop flags are
    stored until the next exchange.

    Attributes:
        exchanges: Whether the ranks sum their totals and stop flags in this step.
        is_local: Whether to compute the gradient of this rank's own mean loss instead of the global mean loss.
    """

    def __init__(self, loss: Loss, world: World, precision: Precision | None = None) -> None:
        """Initialize the loss with `exchanges` and `is_local` set to true."""
        super().__init__(loss, world, precision)
        self.exchanges, self.is_local = True, True
        self._stop_flags = 0.0  # the largest value since the last exchange

    def reduce(self, stop_flags: float = 0.0, path: int = 0) -> None:
        """Start the all-reduce of the totals and the stop flags. Collective if `exchanges` is true."""
        self._stop_flags = max(self._stop_flags, stop_flags)
        if self.exchanges:
            super().reduce(self._stop_flags, path)
            self._stop_flags = 0.0
            return
        parts: list[Number] = [value for pair in self._parts.values() for value in pair]
        self._summed = lambda: [*(self.world.size * float(value) for value in parts), 0.0, 0.0, 0.0]

    def finish(self, parameters: Iterable[nn.Parameter]) -> Totals:
        """Return the totals, and correct the gradients of `parameters` if the expected count was wrong.

        Raises:
            ValueError: On all ranks, if `exchanges` is true and the count over all ranks is zero.
        """
        if not self.is_local:
            return super().finish(parameters)
        self._correct(parameters, self.world.size * float(self._parts[LOSS][1]))
        totals = self._receive()
        if self.exchanges:
            self._expect(totals)
        return totals
