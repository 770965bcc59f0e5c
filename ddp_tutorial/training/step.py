"""One optimiser step of any model, data and loss: what the trainer repeats, and what benchmarks and experiments time.

step = TrainStep(model, source, loss, world, config)
done = step()        # data, gradient, update; the same on all ranks
done.means["loss"]
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import LOSS, Loss, LossError, Totals, call_loss
from ddp_tutorial.accumulation.micro_batches import locate_nonfinite
from ddp_tutorial.accumulation.out_of_memory import OutOfMemoryError
from ddp_tutorial.accumulation.precision import NotFiniteError, Precision
from ddp_tutorial.checkpoint.components import Component, Shared
from ddp_tutorial.collectives import any_rank
from ddp_tutorial.compat import tree_leaves, tree_map
from ddp_tutorial.config import ConfigError
from ddp_tutorial.phases import phase
from ddp_tutorial.rng import preserved_rng
from ddp_tutorial.sharding.sharded import Source
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.optimization import (
    OptimizerLike,
    OptimizerOptions,
    SchedulerLike,
    check_optimizer,
    make_optimizer,
    make_scheduler,
)
from ddp_tutorial.training.strategies import make_strategy
from ddp_tutorial.world import World, require_group

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What came of a step, the same on all ranks: the means of the loss and the metrics, how much the loss has counted,
    the norm of the gradient before clipping, the learning rate, and the votes of all ranks. `applied` is False where
    float16 overflowed: the weights are as they were. Where ranks step by themselves, as with local_sgd, the norm is
    that of this rank's own gradient."""

    means: dict[str, float]
    count: float
    grad_norm: torch.Tensor
    learning_rate: float
    applied: bool
    stop_flags: float


class TrainStep:
    """Data, gradient, update: one optimiser step each time it is called. Collective.

    `model` is moved to the rank's device and starts with rank 0's weights. `optimizer` and `scheduler` may be ready
    ones or functions, of the model and of the optimizer; by default they are as `config` says. Raises `ConfigError` for
    a model on another device, an optimizer of other parameters, and, at the first step, a loss that does not return a
    sum and a count. Raises `OutOfMemoryError`, on all ranks, where that has happened `config.oom_skips` times in a row.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        loss: Loss,
        world: World,
        config: TrainConfig,
        *,
        optimizer: OptimizerLike | None = None,
        scheduler: SchedulerLike | None = None,
    ) -> None:
        require_group(world)
        self.model = _on_device(model, world)
        self.source, self.loss, self.world, self.config = source, loss, world, config
        self.precision = Precision(config.precision, world)
        self.strategy = make_strategy(config, model, world, loss, self.precision)
        made = optimizer or make_optimizer(model, config)
        made = made if isinstance(made, torch.optim.Optimizer) else made(model)
        check_optimizer(made, model)
        self.optimizer = self.strategy.setup_optimizer(made)
        scheduled = scheduler or make_scheduler(self.optimizer, config)
        self.scheduler = scheduled(self.optimizer) if callable(scheduled) else scheduled
        self._options = OptimizerOptions.of(self.optimizer, self.scheduler)
        self.number = 0  # of steps that have been taken
        self.left_out = 0  # times that a batch was left out, since a rank ran out of memory
        self._is_checked = False

    def __call__(self, stop_flags: float = 0.0) -> StepResult:
        batches, totals = self._gradient(stop_flags)
        with phase("update"):
            norm, made = self._update(totals.sums[LOSS], batches)
            rate = float(self.optimizer.param_groups[0]["lr"])
            if made:  # else the rate would move on, and the weights have not
                self.scheduler.step()
        self.number += 1
        return StepResult(totals.means(), totals.counts[LOSS], norm, rate, made, totals.stop_flags)

    def _gradient(self, stop_flags: float) -> tuple[list[Any], Totals]:
        """The gradient of the next batch. Where a rank runs out of memory for it, all leave it out, and take the one
        after that."""
        for left in range(self.config.oom_skips, -1, -1):
            with phase("data"):
                batches = self.batches()
            if not self._is_checked:
                self._check_loss(batches[0])
            try:
                with phase("grads"):
                    return batches, self.strategy.backward(batches, stop_flags)
            except OutOfMemoryError as error:  # all ranks have it
                if not left:
                    raise
                self.optimizer.zero_grad()  # of the micro-batches before
                self.left_out += 1
                LOG.warning(
                    "step %d: %s. All ranks leave its samples out, and take the next ones", self.number + 1, error
                )
        raise AssertionError("the last try returns, or raises")

    def batches(self) -> list[Any]:
        """This rank's micro-batches of the next step."""
        return [part.samples for part in self.source.take(self.strategy.micro_batches_per_rank)]

    def _update(self, loss: float, batches: list[Any]) -> tuple[torch.Tensor, bool]:
        """Clip by the norm over all parameters, step, zero. Returns the norm before clipping, and whether the weights
        have moved.

        A step whose gradient is not finite is left out where the scale of float16 can be the reason. Else it is a bug,
        and raises `NotFiniteError` on all ranks, before it has reached the weights.
        """
        norm, made, scale_may_help = self.precision.update(self.optimizer, self.config.clip, loss, self.strategy.norm)
        if not (made or scale_may_help):
            where = locate_nonfinite(self.world, self.model, self.loss, batches, self.precision)
            raise NotFiniteError(f"step {self.number + 1}: the gradient is not finite. {where[0].upper()}{where[1:]}.")
        return norm, made

    def _check_loss(self, batch: Any) -> None:
        """Raise `LossError`, on all ranks, where the loss is a mean on some rank: its count would weigh it wrongly."""
        self._is_checked = True
        # Each rank or none: where weights are sharded, a forward is collective.
        if any_rank(self.world, not has_rows(batch)):
            return
        if any_rank(self.world, is_mean_loss(self.loss, self.model, batch, self.precision)):
            raise LossError(
                "the loss is a mean: the same samples twice gave twice the count and the same loss. Return a sum, as "
                "in F.cross_entropy(..., reduction='sum')"
            )

    def warm_up(self) -> None:
        """Forward and backward of one step, of which nothing is kept. Collective.

        After the first backward of a process, DDP cuts its buckets anew, in the order in which gradients came; and in
        other buckets, three ranks or more add up in another order. So a process that resumes a run does this first.
        """
        cursor = self.source.state_dict()
        self.strategy.backward(self.batches())
        self.optimizer.zero_grad()
        self.source.load_state_dict(cursor)

    def apply_configured_options(self) -> None:
        """After a checkpoint was loaded, update as this process was told to, not as the one that saved it."""
        self._options.restore(self.optimizer, self.scheduler)

    def components(self) -> dict[str, Component]:
        """All that a checkpoint needs of it, and who has the same of each."""
        shared_out = self.strategy.checkpoint_components(self.optimizer)
        parts = {name: Component(thing, cast("Shared", shared)) for name, (thing, shared) in shared_out.items()}
        parts |= {
            "scheduler": Component(self.scheduler),
            "source": Component(self.source),
            "strategy": Component(self.strategy),
        }
        if self.precision.scale:
            parts["precision"] = Component(self.precision)
        return parts

    def close(self) -> None:
        """Stop reading ahead."""
        self.source.close()


def _on_device(model: nn.Module, world: World) -> nn.Module:
    """`model` on this rank's device. Raises `ConfigError` where parts of it are on another one, or nothing is to be
    trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has no parameter that is trained: all are frozen, or there are none")
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return model.to(world.device)
    for name, tensor in tensors.items():
        if tensor.device != world.device:
            raise ConfigError(
                f"the model's {name!r} is on {tensor.device}, and rank {world.rank} computes on {world.device}. Leave "
                "the model on the CPU, or move it with model.to(world.device)"
            )
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is in evaluation mode; after, each module is in the mode in which it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def has_rows(batch: Any) -> bool:
    """Is `batch` a tree of tensors with as many rows each, and at least one?"""
    rows = {len(leaf) if torch.is_tensor(leaf) and leaf.dim() else 0 for leaf in tree_leaves(batch)}
    return len(rows) == 1 and rows != {0}


def is_mean_loss(loss: Loss, model: nn.Module, batch: Any, precision: Precision) -> bool:
    """Does `loss` give the same for some samples as for the same samples twice, while it counts twice as many?

    `batch` is a tree of tensors with a row for each sample, of which there is one. False where the loss fails.
    """
    few = tree_map(lambda leaf: leaf[:2], batch)
    twice = tree_map(lambda leaf: torch.cat([leaf, leaf]), few)
    with preserved_rng(tree_leaves(batch)[0].device), torch.no_grad(), evaluating(model), precision.autocast():
        try:
            pairs = [call_loss(loss, model, each)[1][LOSS] for each in (few, twice)]
        except Exception:  # what is wrong with the loss will be told where it is used
            return False
    (sum_1, count_1), (sum_2, count_2) = ((float(total), float(count)) for total, count in pairs)
    return count_2 == 2 * count_1 != 0 and sum_1 != 0 and abs(sum_2 - sum_1) < 1e-3 * abs(sum_1)


def format_values(values: Mapping[str, float]) -> str:
    """Metrics for people: "loss 0.1234, accuracy 0.9711"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
