"""A pipeline as a strategy, which the trainer steps like any other: `strategy: pipeline`.

Sources deal samples out to all ranks. The ranks of a pipeline need the same micro-batches, so each gives its own to the
others of its pipeline: a step has `pipeline.micro_batches` of them, of which each rank has read an equal share.

Weights, activations, gradients and the optimizer's state are those of a rank's own stages. Where the model is judged or
written as a whole, a rank gets what it lacks for as long as it needs it; see `weights`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, Totals
from ddp_tutorial.accumulation.precision import Precision, total_norm_over
from ddp_tutorial.accumulation.strategies import Part
from ddp_tutorial.checkpoint.components import State
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.mesh import group_of
from ddp_tutorial.phases import phase
from ddp_tutorial.pipeline.parallel import Pipeline, PipelineConfig, require_even_micro_batches
from ddp_tutorial.pipeline.weights import StageWeights, StageWeightsState
from ddp_tutorial.world import World
from ddp_tutorial.zero.state import Groups, OptimizerState


class PipelineStrategy:
    """Every rank steps its own stages. Dropout depends on `seed`, the step, the stage and the micro-batch."""

    link: Link | None = None  # what travels goes by torch's own send and receive

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: PipelineConfig,
        seed: int = 0,
        precision: Precision | None = None,
    ) -> None:
        self.micro_batches_per_rank = require_even_micro_batches(config)
        self.module, self.world, self.config = model, world, config
        self.pipeline = Pipeline(model, world, loss, config, precision=precision, seed=seed)
        self.group = group_of(self.pipeline.mesh, world)
        self.weights = StageWeights(model, self.pipeline, self.group)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Each group of parameters keeps those of this rank's stages. From here on, this rank has no others."""
        own = {id(parameter) for parameter in self.pipeline.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        self.weights.release()
        return optimizer

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        with phase("gather"):
            of_ranks: list[Any] = [batches]
            if self.group is not None and self.config.ranks > 1:
                of_ranks = [None] * self.config.ranks
                dist.all_gather_object(of_ranks, list(batches), group=self.group)
        with self.weights.training():
            return self.pipeline.backward([batch for of_rank in of_ranks for batch in of_rank], stop_flags)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole model's gradient: the squares of all ranks' elements add up, those of a tied parameter
        on one of its ranks only. Collective."""
        once = [p.grad for name, p in self.pipeline.named.items() if p.grad is not None and self._is_first(name)]
        return total_norm_over(once, self.group, self.config.ranks, self.world.device)

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Give every rank the buffers of its stages as they are in the first pipeline."""
        if len(self.pipeline.mesh) > 1:
            for buffer in [buffer for stage in self.pipeline.stages.values() for buffer in stage.buffers()]:
                dist.broadcast(buffer, src=self.pipeline.mesh[0][self.pipeline.place], group=self.pipeline.across)

    def evaluation_weights(self) -> AbstractContextManager[object]:
        return nullcontext()

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        return self.weights.full_parameters()

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        written = {name for name in self.weights.own if self._is_first(name)} if self.pipeline.number == 0 else set()
        state, model = _StagesState(optimizer, self.pipeline.named, written), StageWeightsState(self.weights, written)
        checkpoint_components: dict[str, Part] = {"model": (model, "sharded"), "optimizer": (state, "sharded")}
        return checkpoint_components | {"groups": (Groups(optimizer), "replicated")}

    def _is_first(self, name: str) -> bool:
        return self.pipeline.owners[name] == self.pipeline.place

    def state_dict(self) -> Mapping[str, float]:
        """How many steps have been taken, which dropout depends on."""
        return {"step": self.pipeline.runner.number}

    def load_state_dict(self, state: Any) -> None:
        self.pipeline.runner.number = int(state["step"])


class _StagesState(OptimizerState):
    """The optimizer's state for this rank's stages. A rank writes what no rank before it has, and reads all of its
    own."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], written: set[str]) -> None:
        super().__init__(optimizer, named)
        self.written = written

    def state_dict(self) -> State:
        return {
            where: value for where, value in super().state_dict().items() if where.rpartition(".")[0] in self.written
        }
