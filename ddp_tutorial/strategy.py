"""How the ranks come to agree on a gradient: one method, `backward`, from the micro-batches of one step."""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from ddp_tutorial.accumulation import Batch, accumulate
from ddp_tutorial.ddp import DDPConfig, data_parallel
from ddp_tutorial.link import Link
from ddp_tutorial.metrics import Mean
from ddp_tutorial.precision import Precision
from ddp_tutorial.world import World


class Strategy(Protocol):
    """After `backward`, every rank holds the gradient of the mean loss over the tokens of all ranks, times the scale of
    its `Precision`."""

    link: Link | None  # what carries the gradients, where Python sees it

    def backward(self, batches: Sequence[Batch]) -> Mean:
        """Fill `.grad`; return this rank's loss, as a sum and a count."""
        ...


class DDPStrategy:
    """Every rank has the whole model and a part of the batch; the gradients are averaged as `config` says."""

    def __init__(
        self, model: nn.Module, world: World, config: DDPConfig | None = None, precision: Precision | None = None
    ) -> None:
        self.model = data_parallel(model, world, config)
        self.link = self.model.link
        self.precision = precision or Precision()

    def backward(self, batches: Sequence[Batch]) -> Mean:
        return accumulate(self.model, batches, self.precision)
