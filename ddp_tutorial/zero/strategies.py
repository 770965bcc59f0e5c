"""The three stages of ZeRO as strategies, which the trainer steps like any other."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.precision import Precision, total_norm_over
from ddp_tutorial.accumulation.strategies import DDPStrategy, Part
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
    """Gradients are averaged as with DDP; each rank has the optimizer's state of its parameters."""

    def __init__(self, *args: Any, mesh: Mesh | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mesh = mesh

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return ShardedOptimizer(optimizer, self.model.world, self.mesh)

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        assert isinstance(optimizer, ShardedOptimizer), "it is the one that setup_optimizer has returned"
        rank = optimizer.shards.rank
        mine = {name: p for name, p in self.module.named_parameters() if optimizer.owner.get(p) == rank}
        checkpoint_components = super().checkpoint_components(optimizer) | {
            "optimizer": (OptimizerState(optimizer.mine, mine), "sharded")
        }
        return checkpoint_components | {"groups": (Groups(optimizer), "replicated")}


class ShardedStrategy(ABC):
    """What is the same for all strategies by which each rank steps its part of the parameters, with its part of the
    gradient."""

    link: Link | None = None  # gradients travel by torch's own collectives
    times = 1.0  # the factor of the loss, where gradients are averaged over ranks and not added up
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
        self.module, self.world, self.accumulation, self.mesh = model, world, accumulation, mesh
        self.loss = StepLoss(loss, world, precision)
        self.setup()

    @abstractmethod
    def setup(self) -> None:
        """Give all ranks the same weights, and make what there is to make before an optimizer. Collective."""

    @property
    def micro_batches_per_rank(self) -> int:
        return self.accumulation

    @property
    def execution_path(self) -> int:
        """A digest of the order in which this rank used the sharded parameters so far."""
        return 0

    @abstractmethod
    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer: ...

    def stepped_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps, by name."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    @abstractmethod
    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        """What a checkpoint keeps of the model, and the state of this rank's optimizer."""

    @abstractmethod
    def reduce(self) -> None:
        """Wait for this micro-batch's gradients to be added up over the ranks. Called after each backward.
        Collective."""

    @abstractmethod
    def assign_gradients(self) -> None:
        """Give what the optimizer steps its gradients. Called once, after the last micro-batch of a step."""

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Each micro-batch's gradient is shared out before the next one's is computed: that is what keeps them small,
        and costs as many reductions as there are micro-batches."""
        if not batches:
            raise ValueError("a step has 1 micro-batch or more, found 0")
        self.loss.begin(len(batches))
        for number, batch in enumerate(batches):
            with phase("forward"):
                part = self.loss.forward(self.module, batch, self.times)
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
            raise DifferentPathsError("the ranks used different modules of the model in this step, or in another order")
        return totals

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole gradient: the squares of all elements are added up over the ranks of a copy.
        Collective."""
        return total_norm_over(gradients, self.shards.inside, self.shards.size, self.world.device)

    def sync_buffers(self) -> None:
        broadcast_tensors(self.world, list(self.module.buffers()))

    def evaluation_weights(self) -> AbstractContextManager[object]:
        return nullcontext()

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        model, state = self.sharded_components(optimizer)
        return {"model": model, "optimizer": (state, "sharded"), "groups": (Groups(optimizer), "replicated")}

    def state_dict(self) -> Mapping[str, float]:
        return self.loss.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loss.load_state_dict(state)


class Zero2Strategy(ShardedStrategy):
    """Every rank has the whole model, and its piece of each gradient and of the optimizer's state."""

    def setup(self) -> None:
        self.sharded = ShardedGradients(self.module, self.world, mesh=self.mesh)
        self.pieces = Pieces(self.module, self.world, self.mesh)
        self.shards = self.sharded.shards

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        require_shardable(optimizer)
        require_elementwise(optimizer, "zero2")
        pieces: Mapping[Any, torch.Tensor] = self.sharded.pieces
        with_parameters(
            optimizer,
            lambda parameter: pieces.get(parameter, parameter),  # a frozen one is whole
            lambda parameter, value: self.shards.piece_of(value) if parameter in pieces else value,
        )
        optimizer.register_step_post_hook(lambda *_: self.sharded.gather())
        return optimizer

    def stepped_parameters(self) -> dict[str, nn.Parameter]:
        return {name: self.sharded.pieces[parameter] for name, parameter in self.sharded.named.items()}

    def reduce(self) -> None:
        self.sharded.reduce()

    def assign_gradients(self) -> None:
        self.sharded.finish()

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)

    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        return (self.module, "replicated"), OptimizerStateOfPieces(optimizer, self.pieces, self.stepped_parameters())


class Zero3Strategy(ShardedStrategy):
    """Every rank has its piece of each parameter, of its gradient, and of the optimizer's state.

    With precision bf16, parameters are gathered in bfloat16, and computed with as such: half the bytes of a gather.
    """

    def setup(self) -> None:
        self.compute_dtype = torch.bfloat16 if self.loss.precision.config.dtype == "bf16" else None
        self.pieces = Pieces(self.module, self.world, self.mesh)
        # now, so that an optimizer is made of the same weights on all ranks
        sync_initial_state(self.module, self.world)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """From here on the parameters are pieces, the optimizer's too: they are the same."""
        require_shardable(optimizer)
        require_elementwise(optimizer, "zero3")
        self.sharded = ShardedModel(self.module, self.world, compute_dtype=self.compute_dtype, mesh=self.mesh)
        self.shards = self.sharded.shards
        with_parameters(optimizer, lambda parameter: parameter, lambda _, value: self.shards.piece_of(value))
        return optimizer

    @property
    def execution_path(self) -> int:
        return self.sharded.path.digest

    def reduce(self) -> None:
        self.sharded.reduce()

    def assign_gradients(self) -> None:
        self.sharded.finish()

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        return self.sharded.full_parameters()

    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        model = ModelState(self.module, self.pieces.of_whole)
        return (model, "sharded"), OptimizerStateOfPieces(optimizer, self.pieces, self.stepped_parameters())
