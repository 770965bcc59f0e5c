"""Local SGD, post-local SGD and DiLoCo as strategies, which the trainer steps like any other.

Within a round the weights of the ranks differ. What a run is judged by, and what is exported, is their mean over the
ranks: at the end of a round that is what every rank has (with DiLoCo, the outer parameters); within one it is computed
for the occasion, which sends the model once more, and then each rank goes on with its own. So evaluating, and saving,
change nothing of the training. The last round of a run may be shorter: then the run's model is the mean, and DiLoCo
takes no outer step for it. The training loss is that of each rank with its own weights, over the samples of all.

Any optimizer can be the inner one. Its state is a rank's own, and never averaged.

A rank still says a few numbers in each step, so that all ranks log the same loss, stop at the same step, and hear
of a gradient that is not finite: with the loss and its metrics, some tens of bytes, behind backward; and one float
after it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategies import Part
from ddp_tutorial.collectives import broadcast_tensors
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.wrappers import DataParallel, FlatDDP
from ddp_tutorial.local_sgd.averaging import CountingLink, average
from ddp_tutorial.local_sgd.outer import OuterNesterov
from ddp_tutorial.local_sgd.rounds import LocalConfig, Rounds
from ddp_tutorial.local_sgd.state import AveragedModelState, LocalOptimizerState, LocalWeightsState
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World


class UnsyncedModel(DataParallel):
    """Begins with rank 0's weights, as any replica, and then says nothing: `.grad` is this rank's own."""

    def finish(self) -> None:
        """This rank's gradient of the mean loss over all ranks, times their number: of equal batches, that of its own
        mean. Ragged ones are weighted so that averaging after one step of SGD equals averaging the gradients."""


class LocalSGD:
    """Each rank takes `round` steps by itself; then its weights become the mean over all ranks."""

    link: Link | None

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: LocalConfig,
        link: Link,
        *,
        accumulation: int = 1,
        precision: Precision | None = None,
    ) -> None:
        self.module, self.world, self.accumulation = model, world, accumulation
        self.rounds = Rounds(config.round, config.begin)
        self.link = self.counted = CountingLink(link, world)
        self.alone = UnsyncedModel(model, world)
        self.loss = StepLoss(loss, world, precision)
        self.updates = 0  # of the weights, so far
        self._is_mean = False

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent, but for the few of the loss, its metrics, and buffers."""
        return self.counted.sent

    @property
    def micro_batches_per_rank(self) -> int:
        return self.accumulation

    @property
    def local_steps(self) -> int:
        """How many steps of a round this rank has made; 0 where all ranks have the same weights."""
        return self.rounds.local_steps(self.updates)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(lambda *_: self._updated())
        return optimizer

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        return accumulate(self.alone, self.loss, batches, stop_flags)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of this rank's own gradient, by which it is clipped; NaN on all ranks where it is not finite on one.
        Collective."""
        own = get_total_norm(gradients)
        problems = (~own.isfinite()).to(torch.float32).reshape(1)
        self.counted.all_reduce(problems, "is it finite?").wait()
        return own if float(problems) == 0 else torch.full_like(own, math.nan)

    def _updated(self) -> None:
        self.updates += 1
        if self.rounds.ends_round(self.updates):
            with phase("average"):
                self.end_round()

    def end_round(self) -> None:
        """All ranks get the same weights, and rank 0's buffers. Collective."""
        self._meet()

    def _meet(self) -> None:
        average(self.world, self.counted, self._parameters)
        broadcast_tensors(self.world, list(self.module.buffers()))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.alone.trainable]

    def sync_buffers(self) -> None:
        """Does nothing: each rank keeps its own buffers within a round, and `full_parameters` has rank 0's."""

    def evaluation_weights(self) -> AbstractContextManager[object]:
        return self.full_parameters()

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Inside, the model has the mean of the ranks' weights, and rank 0's buffers; after, this rank's own again."""
        if self._is_mean or not self.local_steps:
            yield self.module
            return
        tensors = [*self._parameters, *self.module.buffers()]
        own = [tensor.detach().clone() for tensor in tensors]
        self._meet()
        self._is_mean = True
        try:
            yield self.module
        finally:
            self._is_mean = False
            with torch.no_grad():
                for tensor, each in zip(tensors, own, strict=True):
                    tensor.copy_(each)

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        own = LocalWeightsState(self.module, self.world, self.rounds, lambda: self.local_steps)
        return {
            "model": (AveragedModelState(self.module, self.full_parameters), "replicated"),
            "local": (own, "per_rank"),  # over the mean, so after it
            "optimizer": (LocalOptimizerState(optimizer), "per_rank"),
        }

    def state_dict(self) -> Mapping[str, float]:
        return {**self.loss.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.loss.load_state_dict(state)
        self.updates = int(state["updates"])


class PostLocalSGD(LocalSGD):
    """In the first `begin` steps gradients are averaged, as with `FlatDDP`; after these it is local SGD."""

    def __init__(self, model: nn.Module, world: World, *others: Any, **named: Any) -> None:
        super().__init__(model, world, *others, **named)
        self.together = FlatDDP(model, world, self.counted, find_unused_parameters=True)

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        model = self.together if self.updates < self.rounds.begin else self.alone
        return accumulate(model, self.loss, batches, stop_flags)


class DiLoCo(LocalSGD):
    """Local SGD whose mean is not taken as it is: an outer optimizer steps from where the round began; see `outer`."""

    def __init__(
        self, model: nn.Module, world: World, loss: Loss, config: LocalConfig, *others: Any, **named: Any
    ) -> None:
        super().__init__(model, world, loss, config, *others, **named)
        self.outer = OuterNesterov(self.alone.trainable, config.outer_learning_rate, config.outer_momentum)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_pre_hook(lambda *_: None if self.local_steps else self.outer.begin())
        return super().setup_optimizer(optimizer)

    def end_round(self) -> None:
        super().end_round()
        self.outer.step()

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        return super().checkpoint_components(optimizer) | {"outer": (self.outer, "replicated")}
