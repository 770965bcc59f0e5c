"""How the ranks come to agree on a gradient: one method, `backward`, from the micro-batches of one step."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import nn

from ddp_tutorial.accumulation.invariant import InvariantStrategy, require_even_shares
from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import broadcast_tensors
from ddp_tutorial.ddp.hooks import PowerSGD
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.variants import DDPConfig, data_parallel
from ddp_tutorial.world import World

Kind = Literal["ddp", "invariant"]


class Strategy(Protocol):
    """After `backward`, every rank holds the gradient of the mean loss over the micro-batches of all ranks, times the
    scale of its `Precision`."""

    link: Link | None  # what carries the gradients, where Python sees it
    kept: PowerSGD | None  # what each rank keeps of its own from one step to the next; the rest is the same on all

    @property
    def per_rank(self) -> int:
        """How many micro-batches of a step each rank computes."""
        ...

    def backward(self, batches: Sequence[Any], votes: float = 0.0) -> Totals:
        """Fill `.grad`; return the sums and counts of the loss and the metrics, and of `votes`, over all ranks."""
        ...

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers, before the model is judged or saved. Collective."""
        ...

    def state_dict(self) -> Mapping[str, float]:
        """What it needs to go on with the same bits; the same on all ranks."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


class DDPStrategy:
    """Every rank has the whole model and a part of the batch; the gradients are averaged as `config` says."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: DDPConfig | None = None,
        *,
        accumulation: int = 1,
        precision: Precision | None = None,
    ) -> None:
        self.model = data_parallel(model, world, config)
        self.link, self.kept, self.accumulation = self.model.link, self.model.kept, accumulation
        self.loss = StepLoss(loss, world, precision)

    @property
    def per_rank(self) -> int:
        return self.accumulation

    def backward(self, batches: Sequence[Any], votes: float = 0.0) -> Totals:
        return accumulate(self.model, self.loss, batches, votes)

    def sync_buffers(self) -> None:
        # As the variants do within a step. After the last one, each rank's BatchNorm has statistics of its own.
        broadcast_tensors(self.model.world, list(self.model.module.buffers()))

    def state_dict(self) -> Mapping[str, float]:
        return self.loss.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loss.load_state_dict(state)


def make_strategy(
    kind: Kind,
    model: nn.Module,
    world: World,
    loss: Loss,
    *,
    ddp: DDPConfig,
    accumulation: int,
    micro_batches: int,
    seed: int,
    precision: Precision,
) -> Strategy:
    """The strategy that a config names, with its settings from there. Collective."""
    if kind == "invariant":
        return InvariantStrategy(model, world, loss, micro_batches, seed, precision=precision)
    return DDPStrategy(model, world, loss, ddp, accumulation=accumulation, precision=precision)


def micro_batches_per_rank(kind: Kind, world_size: int, *, accumulation: int, micro_batches: int) -> int:
    """How many micro-batches of a step each rank computes, known without a model. Raises `ConfigError` where they
    cannot be shared out."""
    if kind != "invariant":
        return accumulation
    require_even_shares(micro_batches, world_size)
    return micro_batches // world_size
