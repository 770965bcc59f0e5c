"""Run one optimizer step with any model, data and loss.

Example:
    step = make_train_step(model, source, loss, world, config)  # see training/step.py
    step().means["loss"]  # runs a step, and is the same on all ranks
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_tutorial.accumulation.loss import LOSS, Loss, Totals
from ddp_tutorial.accumulation.loss_check import require_sum
from ddp_tutorial.accumulation.nonfinite import locate_nonfinite
from ddp_tutorial.accumulation.out_of_memory import OutOfMemoryError
from ddp_tutorial.accumulation.precision import NotFiniteError, Precision
from ddp_tutorial.accumulation.strategy import Part, Strategy
from ddp_tutorial.phases import phase
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.world import World

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The result of a step. Except within a round of local SGD, the result is the same on all ranks.

    Attributes:
        means: The mean of the loss and of each metric, by name.
        count: The number of elements in the loss (samples or tokens), summed over all ranks.
        grad_norm: The norm of the gradient (in local SGD, of this rank's gradient) before clipping.
        learning_rate: The learning rate of the step.
        applied: Whether the step changed the weights; false if a float16 gradient overflowed.
        stop_flags: The sum of all ranks' stop flags.
    """

    means: dict[str, float]
    count: float
    grad_norm: torch.Tensor
    learning_rate: float
    applied: bool
    stop_flags: float


class TrainStep:
    """A training step. Each call reads a batch, computes its gradient and updates the weights. Collective.

    Args:
        model: The model, on this rank's device.
        source: The source of micro-batches.
        loss: A function that returns a sum and a count; see `accumulation.loss`.
        world: The ranks of the run.
        strategy: The strategy that computes the gradient of `model`.
        optimizer: The optimizer that `strategy.setup_optimizer` returned.
        scheduler: The learning-rate scheduler of `optimizer`.
        precision: The `Precision` that was passed to `strategy`.
        clip: The maximum norm of the gradient, or None to disable clipping.
        oom_skips: The maximum number of consecutive batches to skip if a rank runs out of memory in its forward pass.

    Raises:
        LossError: In the first step, if the loss is a mean.
        OutOfMemoryError: On all ranks, if ranks run out of memory in more than `oom_skips` consecutive batches.
        NotFiniteError: On all ranks, if the gradient is not finite and a smaller loss scale would not help.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        loss: Loss,
        world: World,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        *,
        precision: Precision,
        clip: float | None = 1.0,
        oom_skips: int = 0,
    ) -> None:
        """Start at step 0."""
        self.model, self.source, self.loss, self.world = model, source, loss, world
        self.strategy, self.optimizer, self.scheduler = strategy, optimizer, scheduler
        self.precision, self.clip, self.oom_skips = precision, clip, oom_skips
        self.number = 0  # completed steps
        self.left_out = 0  # batches that were skipped because a rank ran out of memory
        self._is_checked = False

    def __call__(self, stop_flags: float = 0.0) -> StepResult:
        """Run one step, and sum `stop_flags` over all ranks."""
        batches, totals = self._gradient(stop_flags)
        with phase("update"):
            norm, made = self._update(totals.sums[LOSS], batches)
            rate = float(self.optimizer.param_groups[0]["lr"])
            if made:  # otherwise the schedule would be a step ahead of the weights
                self.scheduler.step()
        self.number += 1
        return StepResult(totals.means(), totals.counts[LOSS], norm, rate, made, totals.stop_flags)

    def _gradient(self, stop_flags: float) -> tuple[list[Any], Totals]:
        """Compute the gradient of the next batch. If a rank runs out of memory, all ranks skip that batch."""
        for left in range(self.oom_skips, -1, -1):
            with phase("data"):
                batches = self.batches()
            if not self._is_checked:
                self._is_checked = True
                require_sum(self.world, self.loss, self.model, batches[0], self.precision)
            try:
                with phase("grads"):
                    return batches, self.strategy.backward(batches, stop_flags)
            except BaseException as error:
                self.optimizer.zero_grad()  # gradients of earlier micro-batches, which the next step would include
                if not (left and isinstance(error, OutOfMemoryError)):  # raised on all ranks
                    raise
                self.left_out += 1
                LOG.warning(
                    "step %d: %s. All ranks skip this batch and continue with the next batch", self.number + 1, error
                )
        raise AssertionError("unreachable: the last attempt returns a result or raises an error")

    def batches(self) -> list[Any]:
        """Return this rank's micro-batches for the next step."""
        return [part.samples for part in self.source.take(self.strategy.micro_batches_per_rank)]

    def _update(self, loss: float, batches: list[Any]) -> tuple[torch.Tensor, bool]:
        """Clip the gradient, run the optimizer step, and clear the gradient.

        Returns:
            The gradient's norm before clipping, and whether the weights have changed.
        """
        norm, made, scale_may_help = self.precision.update(self.optimizer, self.clip, loss, self.strategy.norm)
        if not (made or scale_may_help):
            where = locate_nonfinite(self.world, self.model, self.loss, batches, self.precision)
            raise NotFiniteError(f"step {self.number + 1}: the gradient is not finite. {where[0].upper()}{where[1:]}.")
        return norm, made

    def warm_up(self) -> None:
        """Run the forward and backward passes of one step, and discard the gradient. Collective.

        After the first backward pass of a process, DDP rebuilds its buckets in the order in which gradients became
        ready. With at least three ranks, a different bucket layout changes the order of summation. Therefore, a process
        that resumes a run calls this method first.
        """
        cursor = self.source.state_dict()
        self.strategy.backward(self.batches())
        self.optimizer.zero_grad()
        self.source.load_state_dict(cursor)

    def checkpoint_components(self) -> dict[str, Part]:
        """Return the checkpoint components by name. Each component specifies which ranks hold the same state."""
        components = self.strategy.checkpoint_components(self.optimizer)
        components |= {name: (getattr(self, name), "replicated") for name in ("scheduler", "source", "strategy")}
        if self.precision.scale:
            components["precision"] = (self.precision, "replicated")
        return components

    def close(self) -> None:
        """Stop prefetching."""
        self.source.close()
