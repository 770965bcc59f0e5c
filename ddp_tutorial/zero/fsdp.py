"""Implement ZeRO-3 with PyTorch's `fully_shard` (FSDP2), for comparison and for use on GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from ddp_tutorial.accumulation.strategy import Part
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.wrappers import sync_initial_state
from ddp_tutorial.zero.optimizer import require_shardable
from ddp_tutorial.zero.path import ExecutionPath, require_same_unit
from ddp_tutorial.zero.pieces import require_no_gradient
from ddp_tutorial.zero.state import ModelState, OptimizerState, device_mesh, with_parameters
from ddp_tutorial.zero.strategies import ShardedStrategy
from ddp_tutorial.zero.units import units_of


class FSDPStrategy(ShardedStrategy):
    """A strategy that shards every parameter by row as a DTensor, with the same units as `ShardedModel`.

    With precision bf16, parameters are gathered in float32, and autocast casts them as it does with DDP. Every rank
    must use the same units in the same order. The strategy checks the order for each unit in the first
    forward pass, and then once per step. With a single rank, nothing is sharded.
    """

    def setup(self) -> None:
        """Check that the model can be sharded, and synchronize its weights. Collective.

        Raises:
            ConfigError: If the model is already sharded, or if a parameter has a gradient or is a scalar.
        """
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, DTensor):
                raise ConfigError("the model is already sharded: build a new model")
            require_no_gradient(name, parameter)
        self.used, self._is_first_pass = ExecutionPath(), True
        self.loss_multiplier = float(self.world.size)  # fully_shard averages gradients
        if scalars := [name for name, parameter in self.module.named_parameters() if not parameter.dim()]:
            raise ConfigError(f"strategy=fsdp shards by row, but {scalars[0]!r} is a scalar: use strategy=zero3")
        sync_initial_state(self.module, self.world)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shard the model, and replace the optimizer's parameters and state with DTensors. Collective."""
        require_shardable(optimizer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        parameters = self.module.named_parameters(remove_duplicate=False)
        self.tied = {name: names[id(parameter)] for name, parameter in parameters if name != names[id(parameter)]}
        self.unsharded = self.module
        if self.world.size > 1:
            self.unsharded = deepcopy(self.module).to("meta")  # without storage, for `full_parameters`
            mesh = device_mesh(self.world, self.mesh)
            for number, (name, unit) in enumerate(units_of(self.module).items()):
                fully_shard(unit, mesh=mesh)
                # Prepended, to run before PyTorch's hook that gathers the unit.
                unit.register_forward_pre_hook(partial(self._use, number, f"module {name!r}"), prepend=True)
            self.module.register_forward_hook(self._end_first_pass)
        sharded = dict(self.module.named_parameters())

        def rows_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            rows = sharded[names[id(parameter)]]
            return distribute_tensor(value, rows.device_mesh, rows.placements) if isinstance(rows, DTensor) else value

        with_parameters(optimizer, lambda parameter: sharded[names[id(parameter)]], rows_of)
        if isinstance(optimizer, torch.optim.SGD):  # DTensor does not support fused SGD
            for group in optimizer.param_groups:
                group["fused"] = False
        return optimizer

    @property
    def execution_path(self) -> int:
        """A digest of the order in which this rank has used the units."""
        return self.used.digest

    def _use(self, number: int, name: str, *_: object) -> None:
        self.used.add(number)
        if self._is_first_pass:
            require_same_unit(self.world, name)

    def _end_first_pass(self, *_: object) -> None:
        if self._is_first_pass:
            require_same_unit(self.world, "the end")
            self._is_first_pass = False

    def reduce(self) -> None:
        """Do nothing, because PyTorch's backward pass returns only after all gradients have been reduced."""

    def forget_gradients(self) -> None:
        """Do nothing, because all gradients are in `.grad`, which `TrainStep` clears after a failure."""

    def assign_gradients(self) -> None:
        """Do nothing, because PyTorch's backward pass has already assigned the gradients."""

    def norm(self, gradients: Any) -> torch.Tensor:
        """Return the norm of the full gradient. Collective."""
        norm = get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Yield a copy of the model with full parameters. Collective."""
        if self.unsharded is self.module:
            yield self.module
            return
        tensors = self.module.state_dict()
        state = {name: _full(each) if isinstance(each, DTensor) else each for name, each in tensors.items()}
        model = deepcopy(self.unsharded)
        model.load_state_dict(state, assign=True)
        for name, first in self.tied.items():
            where, _, own = name.rpartition(".")
            setattr(model.get_submodule(where), own, model.get_parameter(first))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        for name in dict(model.named_buffers(remove_duplicate=False)) | buffers:  # including non-persistent buffers
            where, _, own = name.rpartition(".")
            setattr(model.get_submodule(where), own, buffers.get(name))
        yield model

    def sharded_components(self, optimizer: torch.optim.Optimizer) -> tuple[Part, Any]:
        """Return the sharded model and the optimizer state for this rank's rows."""
        return (ModelState(self.module, lambda _, own: own), "sharded"), OptimizerState(
            optimizer, self.stepped_parameters()
        )


def _full(tensor: DTensor) -> torch.Tensor:
    """Return the full tensor in unpadded memory. Collective.

    If the rows cannot be split evenly, PyTorch returns a view of padded memory, which safetensors cannot write.
    """
    full = tensor.full_tensor()
    return full if full.untyped_storage().nbytes() == full.nbytes else full.clone()
