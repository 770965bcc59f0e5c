"""Define local SGD, post-local SGD, and DiLoCo as strategies for the trainer.

Within a round, the ranks' weights differ. Evaluation and export use the mean of the ranks' weights. At the end of a
round, every rank holds the mean or, with DiLoCo, the outer parameters. Within a round, the mean is computed on demand.
The weights are all-reduced, and each rank restores its own weights afterward. Therefore, evaluating and saving do not
affect training. If a run ends within a round, the final model is the mean of the ranks' weights, and DiLoCo takes no
outer step.

Any optimizer can be the inner optimizer. Each rank keeps its own optimizer state, which is never averaged.

Within a round, the ranks do not communicate at all, so the latency of the link does not matter. Each rank trains on its
own mean loss, which is also the loss that it logs. In the last step of a round, the ranks exchange the loss totals and
the stop flags during the backward pass. If a gradient is not finite, all ranks raise the same error when they average
their weights. With float16, the ranks must agree on the loss scale, so they communicate in every step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_tutorial.accumulation.loss import Loss, Totals
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.precision import NotFiniteError, Precision
from ddp_tutorial.accumulation.strategy import Part
from ddp_tutorial.collectives import all_gather, broadcast_tensors
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.wrappers import DataParallel, FlatDDP
from ddp_tutorial.local_sgd.averaging import CountingLink, average
from ddp_tutorial.local_sgd.config import LocalConfig
from ddp_tutorial.local_sgd.loss import RoundLoss
from ddp_tutorial.local_sgd.outer import OuterNesterov
from ddp_tutorial.local_sgd.rounds import Rounds
from ddp_tutorial.local_sgd.state import AveragedModelState, LocalOptimizerState, LocalWeightsState
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World


class UnsyncedModel(DataParallel):
    """A replica that starts with rank 0's weights and never synchronizes. `.grad` contains this rank's own gradient."""

    def finish(self) -> None:
        """Do nothing, because `.grad` already contains the gradient of this rank's own mean loss."""


class LocalSGD:
    """A strategy in which each rank takes `round` local steps before all ranks average their weights."""

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
        """Broadcast rank 0's weights. `link` all-reduces the weights at the end of each round. Collective."""
        self.module, self.world, self.micro_batches_per_rank = model, world, accumulation
        self.rounds = Rounds(config.round, config.begin)
        self.link = self.counted = CountingLink(link, world)
        self.alone = UnsyncedModel(model, world)
        self.loss = RoundLoss(loss, world, precision)
        self.updates = 0  # weight updates
        self.exchanges_each_step = self.loss.precision.scale is not None
        self._problem = ""  # describes this rank's first non-finite gradient in this round
        self._is_mean = False

    @property
    def sent(self) -> int:
        """The number of bytes that this rank has sent, excluding losses, metrics, and buffers."""
        return self.counted.sent

    @property
    def local_steps(self) -> int:
        """The number of steps that this rank has taken in the current round.

        The number is 0 if all ranks have the same weights.
        """
        return self.rounds.local_steps(self.updates)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Register a hook that counts the updates and averages the weights at the end of a round."""
        optimizer.register_step_post_hook(lambda *_: self._updated())
        return optimizer

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute the gradient of this rank's mean loss.

        Collective in the first call, in the last step of a round, and, with float16, in every step.

        Returns:
            With float16 or in the last step of a round, the totals of all ranks; otherwise, this rank's totals
            multiplied by the number of ranks.
        """
        self.loss.is_local = True
        self.loss.exchanges = self.exchanges_each_step or self.rounds.ends_round(self.updates + 1)
        return accumulate(self.alone, self.loss, batches, stop_flags)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of this rank's own gradient, for clipping.

        A non-finite gradient and its norm are replaced with zeros. All ranks raise an error when they next average
        their weights.
        """
        own = get_total_norm(gradients)
        if self.exchanges_each_step or own.isfinite():
            return own
        first = next(
            (name for name, p in self.alone.trainable[::-1] if p.grad is not None and not _is_finite(p.grad)), ""
        )
        where = f"first in the backward pass for parameter {first!r}" if first else "because its norm overflowed"
        self._problem = self._problem or (
            f"step {self.updates + 1}: the gradient on rank {self.world.rank} is not finite, {where}"
        )
        for gradient in gradients:
            gradient.zero_()
        return torch.zeros_like(own)

    def _updated(self) -> None:
        self.updates += 1
        if self.rounds.ends_round(self.updates):
            with phase("average"):
                self.end_round()

    def end_round(self) -> None:
        """Load the averaged weights and rank 0's buffers on all ranks. Collective.

        Raises:
            NotFiniteError: On all ranks, if a rank has had a non-finite gradient since the weights were last averaged.
        """
        self._average_weights()

    def _average_weights(self) -> None:
        parameters = self._parameters
        problems = parameters[0].new_full((1,), float(bool(self._problem)))
        average(self.world, self.counted, [*parameters, problems])
        if problems.item():
            descriptions = [each for each in all_gather(self.world, self._problem) if each]
            raise NotFiniteError(
                f"{'; '.join(descriptions)}. The ranks compare gradients when they average their weights"
            )
        broadcast_tensors(self.world, list(self.module.buffers()))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.alone.trainable]

    def sync_buffers(self) -> None:
        """Do nothing, because buffers are not synchronized within a round. `full_parameters` uses rank 0's buffers."""

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Return a context manager that loads the averaged weights into the model."""
        return self.full_parameters()

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Load the averaged weights and rank 0's buffers into the model for the duration of the block. Collective.

        After the block, this rank's own weights and buffers are restored.
        """
        if self._is_mean or not self.local_steps:
            yield self.module
            return
        tensors = [*self._parameters, *self.module.buffers()]
        own = [tensor.detach().clone() for tensor in tensors]
        try:
            self._average_weights()
            self._is_mean = True
            yield self.module
        finally:
            self._is_mean = False
            with torch.no_grad():
                for tensor, each in zip(tensors, own, strict=True):
                    tensor.copy_(each)

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the averaged weights, this rank's own weights, and the optimizer state."""
        own = LocalWeightsState(self.module, self.world, self.rounds, lambda: self.local_steps)
        return {
            "model": (AveragedModelState(self.module, self.full_parameters), "replicated"),
            "local": (own, "per_rank"),  # after "model", because "local" overwrites the mean
            "optimizer": (LocalOptimizerState(optimizer), "per_rank"),
        }

    def state_dict(self) -> Mapping[str, float]:
        """Return the loss state and the number of updates."""
        return {**self.loss.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        """Restore the loss state and the number of updates."""
        self.loss.load_state_dict(state)
        self.updates = int(state["updates"])


class PostLocalSGD(LocalSGD):
    """Local SGD that averages gradients in the first `begin` steps, like `FlatDDP`, and weights in later rounds."""

    def __init__(self, model: nn.Module, world: World, *others: Any, **named: Any) -> None:
        """Accept the same arguments as `LocalSGD`. Collective."""
        super().__init__(model, world, *others, **named)
        self.together = FlatDDP(model, world, self.counted, find_unused_parameters=True)

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute the gradient. The first `begin` steps average the gradient over all ranks and are collective."""
        if self.updates >= self.rounds.begin:
            return super().backward(batches, stop_flags)
        self.loss.is_local, self.loss.exchanges = False, True
        return accumulate(self.together, self.loss, batches, stop_flags)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of the gradient. In the first `begin` steps, the gradient is the same on all ranks."""
        return get_total_norm(gradients) if self.updates < self.rounds.begin else super().norm(gradients)


class DiLoCo(LocalSGD):
    """Local SGD with an outer optimizer, which steps from the round's initial weights toward the mean; see `outer`."""

    def __init__(
        self, model: nn.Module, world: World, loss: Loss, config: LocalConfig, *others: Any, **named: Any
    ) -> None:
        """Accept the same arguments as `LocalSGD`. Collective."""
        super().__init__(model, world, loss, config, *others, **named)
        self.outer = OuterNesterov(self.alone.trainable, config.outer_learning_rate, config.outer_momentum)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Register the hook of `LocalSGD`, and a hook that saves the parameters at the beginning of each round."""
        optimizer.register_step_pre_hook(lambda *_: None if self.local_steps else self.outer.begin())
        return super().setup_optimizer(optimizer)

    def end_round(self) -> None:
        """Average the weights, and take an outer step. Collective."""
        super().end_round()
        self.outer.step()

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the components of `LocalSGD` and the state of the outer optimizer."""
        return super().checkpoint_components(optimizer) | {"outer": (self.outer, "replicated")}


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())
