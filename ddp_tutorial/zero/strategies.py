"""Implement ZeRO stages 1 to 3 as training strategies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.precision import Precision, total_norm_over
from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.accumulation.strategy import Part
from ddp_tutorial.collectives import broadcast_tensors
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.wrappers import sync_initial_state
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World
from ddp_tutorial.zero.elementwise import require_elementwise
from ddp_tutorial.zero.gradients import ShardedGradients
from ddp_tutorial.zero.model import ShardedModel
from ddp_tutorial.zero.optimizer import ShardedOptimizer, require_shardable
from ddp_tutorial.zero.path import DifferentPathsError
from ddp_tutorial.zero.shards import Shards
from ddp_tutorial.zero.state import (
    Groups,
    ModelState,
    OptimizerState,
    OptimizerStateOfPieces,
    Pieces,
    with_parameters,
)


class Zero1Strategy(DDPStrategy):
    """A strategy that all-reduces gradients like DDP and shards the optimizer state across the ranks."""

    def __init__(self, *args: Any, mesh: Mesh | None = None, **options: Any) -> None:
        """Construct a `DDPStrategy` with a `mesh` for the optimizer state. The default mesh is a single replica."""
        super().__init__(*args, **options)
        self.mesh = mesh

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap `optimizer` in a `ShardedOptimizer`. Collective."""
        return ShardedOptimizer(optimizer, self.model.world, self.mesh)

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the components of a checkpoint, with the optimizer state sharded by parameter."""
        assert isinstance(optimizer, ShardedOptimizer), "setup_optimizer() returns a ShardedOptimizer"
        rank = optimizer.shards.rank
        mine = {name: p for name, p in self.module.named_parameters() if optimizer.owner.get(p) == rank}
        components = super().checkpoint_components(optimizer) | {
            "optimizer": (OptimizerState(optimizer.mine, mine), "sharded")
        }
        return components | {"groups": (Groups(optimizer), "replicated")}


class ShardedStrategy(ABC):
    """Base class of the strategies in which each rank updates only its shard of the parameters."""

    link: Link | None = None  # gradients use torch.distributed's collectives
    loss_multiplier = 1.0  # factor of the loss; the world size if gradients are averaged over ranks instead of summed
    sharded: ShardedGradients | ShardedModel
    shards: Shards

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        accumulation: int = 1,
        precision: Precision | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Prepare the model, which must have full parameters, and the loss. Collective.

        `accumulation` is the number of micro-batches per rank and step. The default mesh is a single replica.
        """
        self.module, self.world, self.micro_batches_per_rank, self.mesh = model, world, accumulation, mesh
        self.loss = StepLoss(loss, world, precision)
        self.setup()

    @abstractmethod
    def setup(self) -> None:
        """Synchronize the weights, and create all objects that do not depend on the optimizer. Collective."""

    @property
    def execution_path(self) -> int:
        """A digest of the order in which this rank has used the sharded parameters."""
        return 0

    @abstractmethod
    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer that updates this rank's shards. `optimizer` must not have taken a step. Collective."""

    def stepped_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank's optimizer updates, by name."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    @abstractmethod
    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        """Return the model component of a checkpoint, and the state of this rank's optimizer."""

    def reduce(self) -> None:
        """Wait until this micro-batch's gradients are reduced. Collective. Call this method after the backward pass."""
        self.sharded.reduce()

    def forget_gradients(self) -> None:
        """Discard the gradients of an earlier step that failed after some of its micro-batches."""
        self.sharded.reductions.forget()

    def assign_gradients(self) -> None:
        """Assign the reduced gradients to the parameters that the optimizer updates. Collective.

        Call this method once per step, after the last micro-batch.
        """
        self.sharded.finish()

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Run the forward and backward passes of each micro-batch, and reduce the gradients. Collective.

        The gradients of each micro-batch are reduced before the next micro-batch starts. Early reductions keep the
        gradients sharded, but a step needs one reduction per micro-batch.

        Raises:
            ValueError: If `batches` is empty.
            DifferentPathsError: If the ranks used different modules, or used the same modules in a different order.
        """
        if not batches:
            raise ValueError("a step must have at least 1 micro-batch, got 0")
        self.loss.begin(len(batches))
        self.forget_gradients()
        for number, batch in enumerate(batches):
            with phase("forward"):
                part = self.loss.forward(self.module, batch, self.loss_multiplier)
            if number == len(batches) - 1:
                self.loss.reduce(stop_flags, self.execution_path)
            with phase("backward"):
                part.backward()
            with phase("finish"):
                self.reduce()
        with phase("finish"):
            self.assign_gradients()
            totals = self.loss.finish(self.stepped_parameters().values())
        if not totals.same_path:
            raise DifferentPathsError(
                "in this step, the ranks used different modules, or used the same modules in a different order"
            )
        return totals

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of the full gradient. Collective.

        The squares of this rank's `gradients` are summed over the ranks that share one replica of the model.
        """
        return total_norm_over(gradients, self.shards.inside, self.shards.size, self.world.device)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers. Collective."""
        broadcast_tensors(self.world, list(self.module.buffers()))

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Return a context manager that does nothing, because evaluation uses the model's own weights."""
        return nullcontext()

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the components of a checkpoint, each marked as "sharded" or "replicated"."""
        model, state = self.sharded_components(optimizer)
        return {"model": model, "optimizer": (state, "sharded"), "groups": (Groups(optimizer), "replicated")}

    def state_dict(self) -> Mapping[str, float]:
        """Return the state of the loss."""
        return self.loss.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of the loss."""
        self.loss.load_state_dict(state)


class Zero2Strategy(ShardedStrategy):
    """A strategy that keeps full parameters on every rank and shards gradients and optimizer state (ZeRO-2)."""

    sharded: ShardedGradients

    def setup(self) -> None:
        """Shard the gradients. Collective."""
        self.sharded = ShardedGradients(self.module, self.world, mesh=self.mesh)
        self.pieces = Pieces(self.module, self.world, self.mesh)
        self.shards = self.sharded.shards

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Assign this rank's shards to the optimizer, and add a hook that gathers all parameters after each step."""
        require_shardable(optimizer)
        require_elementwise(optimizer, "zero2")
        pieces: Mapping[Any, torch.Tensor] = self.sharded.pieces
        with_parameters(
            optimizer,
            lambda parameter: pieces.get(parameter, parameter),  # a frozen parameter is not sharded
            lambda parameter, value: self.shards.piece_of(value) if parameter in pieces else value,
        )
        optimizer.register_step_post_hook(lambda *_: self.sharded.gather())
        return optimizer

    def stepped_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's shards of the trained parameters, by name."""
        return {name: self.sharded.pieces[parameter] for name, parameter in self.sharded.named.items()}

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields the model, whose parameters are never sharded."""
        return nullcontext(self.module)

    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        """Return the model, which every rank stores in full, and the optimizer state for this rank's shards."""
        return (self.module, "replicated"), OptimizerStateOfPieces(optimizer, self.pieces, self.stepped_parameters())


class Zero3Strategy(ShardedStrategy):
    """A strategy that shards the parameters, the gradients, and the optimizer state (ZeRO-3).

    With precision bf16, parameters are gathered and used in bfloat16, which halves the size of each all-gather.
    """

    sharded: ShardedModel

    def setup(self) -> None:
        """Synchronize the weights; `setup_optimizer` shards them. Collective."""
        self.compute_dtype = torch.bfloat16 if self.loss.precision.config.dtype == "bf16" else None
        self.pieces = Pieces(self.module, self.world, self.mesh)
        # before the optimizer is created, so that all ranks create it from the same weights
        sync_initial_state(self.module, self.world)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shard the model and the optimizer's state. Collective.

        The optimizer keeps the same `Parameter` objects, which become this rank's shards.
        """
        require_shardable(optimizer)
        require_elementwise(optimizer, "zero3")
        self.sharded = ShardedModel(self.module, self.world, compute_dtype=self.compute_dtype, mesh=self.mesh)
        self.shards = self.sharded.shards
        with_parameters(optimizer, lambda parameter: parameter, lambda _, value: self.shards.piece_of(value))
        return optimizer

    @property
    def execution_path(self) -> int:
        """A digest of the order in which this rank has gathered the units."""
        return self.sharded.path.digest

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields the model with full parameters on every rank. Collective."""
        return self.sharded.full_parameters()

    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        """Return the sharded model and the optimizer state for this rank's shards."""
        model = ModelState(self.module, self.pieces.of_whole)
        return (model, "sharded"), OptimizerStateOfPieces(optimizer, self.pieces, self.stepped_parameters())
