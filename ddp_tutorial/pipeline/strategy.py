"""Implement the trainer's `pipeline` strategy, which trains a model with pipeline parallelism.

The data source distributes samples over all ranks, but the ranks of a pipeline need the same micro-batches. Therefore,
each rank sends its micro-batches to the other ranks of its pipeline. A step runs the schedule `accumulation` times,
each time with `pipeline.micro_batches` new micro-batches. Every rank reads an equal share of the new micro-batches.

Each rank stores only the weights, activations, gradients, and optimizer state of its own stages. To evaluate or export
the full model, the ranks temporarily gather the missing weights; see `weights`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, Totals
from ddp_tutorial.accumulation.precision import Precision, total_norm_over
from ddp_tutorial.accumulation.strategy import Part
from ddp_tutorial.compat import tree_map
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.groups import group_of
from ddp_tutorial.phases import phase
from ddp_tutorial.pipeline.config import PipelineConfig
from ddp_tutorial.pipeline.parallel import Pipeline, require_even_micro_batches
from ddp_tutorial.pipeline.weights import StageWeights, StageWeightsState
from ddp_tutorial.world import World
from ddp_tutorial.zero.state import Groups, OptimizerState


class PipelineStrategy:
    """A strategy in which every rank updates only its own stages.

    Dropout masks depend only on `seed`, the index of the schedule execution, the stage, and the micro-batch.
    """

    link: Link | None = None  # tensors are sent by torch's own send and receive

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: PipelineConfig,
        seed: int = 0,
        precision: Precision | None = None,
        accumulation: int = 1,
    ) -> None:
        """Split the full model, which must be the same on all ranks, into stages. Collective.

        In each step, the schedule runs `accumulation` times, each time with new micro-batches.
        """
        self.micro_batches_per_rank = accumulation * require_even_micro_batches(config)
        self.module, self.world, self.config = model, world, config
        self.pipeline = Pipeline(model, world, loss, config, precision=precision, seed=seed)
        self.group = group_of(self.pipeline.mesh, world)
        self.weights = StageWeights(model, self.pipeline, self.group)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Restrict the optimizer to the parameters of this rank's stages, and free all other parameters."""
        own = set(self.pipeline.parameters())
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in own]
        for parameter in optimizer.state.keys() - own:  # Adagrad has state before its first step
            del optimizer.state[parameter]
        self.weights.release()
        return optimizer

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute the gradient of this rank's stages, and return the loss totals of all ranks. Collective."""
        with phase("gather"):
            of_ranks: list[Any] = [batches]
            if self.group is not None and self.config.ranks > 1:
                of_ranks = [None] * self.config.ranks
                dist.all_gather_object(of_ranks, _to_device(list(batches), torch.device("cpu")), self.group)
                of_ranks = _to_device(of_ranks, self.world.device)
        with self.weights.training():
            return self.pipeline.backward([batch for of_rank in of_ranks for batch in of_rank], stop_flags)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of the full model's gradient. Collective.

        The squares of all gradient elements are summed over the ranks. A tied parameter is counted on only one rank.
        """
        once = [p.grad for name, p in self.pipeline.named.items() if p.grad is not None and self._is_first(name)]
        return total_norm_over(once, self.group, self.config.ranks, self.world.device)

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Copy the buffers of the first pipeline to the other pipelines. Collective."""
        if len(self.pipeline.mesh) > 1:
            for buffer in [buffer for stage in self.pipeline.stages.values() for buffer in stage.buffers()]:
                dist.broadcast(buffer, src=self.pipeline.mesh[0][self.pipeline.place], group=self.pipeline.across)

    def evaluation_weights(self) -> AbstractContextManager[object]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def full_parameters(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that gathers all weights on this rank. Collective."""
        return self.weights.full_parameters()

    def checkpoint_components(self, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Return the model and the optimizer state as sharded components, and the optimizer's parameter groups."""
        written = {name for name in self.weights.own if self._is_first(name)} if self.pipeline.number == 0 else set()
        state = OptimizerState(optimizer, self.pipeline.named, written)
        model = StageWeightsState(self.weights, written)
        components: dict[str, Part] = {"model": (model, "sharded"), "optimizer": (state, "sharded")}
        return components | {"groups": (Groups(optimizer), "replicated")}

    def _is_first(self, name: str) -> bool:
        return self.pipeline.places[name][0] == self.pipeline.place

    def state_dict(self) -> Mapping[str, float]:
        """Return the number of completed schedule executions. The dropout masks depend on this number."""
        return {"step": self.pipeline.runner.number}

    def load_state_dict(self, state: Any) -> None:
        """Restore the number of completed schedule executions."""
        self.pipeline.runner.number = int(state["step"])


def _to_device(batches: Any, device: torch.device) -> Any:
    """Return a nested structure with its tensors moved to `device`.

    Unpickling would restore a GPU tensor on the GPU with the sender's index, not on the receiver's GPU.
    """
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batches)
