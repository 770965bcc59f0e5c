"""Define the checkpoint format of sharded state.

The state consists of named tensors, and each rank writes its own part of the state. Checkpoint components in this
format are marked as "sharded". If a checkpoint is loaded on a different number of ranks, each rank reads only the
elements that it needs.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ddp_tutorial.checkpoint.components import State, StoredTensor
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World


class OptimizerState:
    """The state of an optimizer that updates one rank's parameters, with tensor names such as "head.weight.exp_avg"."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], written: Set[str] | None = None
    ) -> None:
        """Store this rank's optimizer and its parameters, by name.

        The rank reads the state of all parameters in `named`, but writes only the state of `written` (default: all).
        """
        self.optimizer, self.named = optimizer, dict(named)
        self.written = self.named.keys() if written is None else written

    def state_dict(self) -> State:
        """Return the state tensors by name.

        Raises:
            ValueError: If the state contains a value that is not a tensor.
        """
        state = {}
        for name, parameter in self.named.items():  # Adagrad also has state for frozen parameters
            values = self.optimizer.state.get(parameter, {}) if name in self.written else {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    state[f"{name}.{key}"] = self.stored(name, value)
                elif value is not None:
                    kind = type(self.optimizer).__name__
                    raise ValueError(
                        f"the state of {kind} must contain only tensors, got {type(value).__name__} for {key!r}"
                    )
        return state

    def empty(self, stored: Mapping[str, StoredTensor]) -> State:
        """Return zero tensors for the state of this rank's parameters, to be filled from a checkpoint."""
        wanted = {}
        for where, what in stored.items():
            if (name := where.rpartition(".")[0]) in self.named:
                wanted[where] = self.place(name, what)
        return wanted

    def load_state_dict(self, state: State) -> None:
        """Replace the optimizer state with `state`, which `empty` returned and a checkpoint has filled."""
        self.optimizer.state.clear()
        for where, value in state.items():
            name, _, key = where.rpartition(".")
            self.optimizer.state[self.named[name]][key] = self.taken(value)

    def stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, a state tensor of parameter `name`, in the form that is stored in a checkpoint."""
        return value

    def place(self, name: str, what: StoredTensor) -> torch.Tensor:
        """Return a zero tensor for a state tensor of parameter `name`, to be filled from a checkpoint."""
        parameter = self.named[name]
        if what.shape == parameter.shape:
            return torch.zeros_like(parameter, dtype=what.dtype)
        on_device = any(self.optimizer.defaults.get(name) for name in ("fused", "capturable"))
        return torch.zeros(what.shape, dtype=what.dtype, device=parameter.device if on_device else "cpu")

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        """Return the elements of a loaded tensor that belong to this rank's optimizer."""
        return value


class OptimizerStateOfPieces(OptimizerState):
    """The state of an optimizer that updates shards of parameters.

    State tensors that contain one value per parameter element are split in the same way as the parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: "Pieces", named: Mapping[str, torch.Tensor]) -> None:
        """Store the optimizer, and the shards that it updates, by parameter name."""
        super().__init__(optimizer, named)
        self.pieces = pieces

    def stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value` as a DTensor if it contains one value per element of the shard, and otherwise unchanged."""
        is_piece = value.dim() and value.shape == self.named[name].shape
        return self.pieces.of_whole(name, value) if is_piece else value

    def place(self, name: str, what: StoredTensor) -> torch.Tensor:
        """Return zeros for the stored state of a shard, as a DTensor unless the stored tensor is a scalar."""
        if what.shape == torch.Size():
            return super().place(name, what)
        return self.pieces.of_whole(name, torch.zeros_like(self.named[name], dtype=what.dtype))

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        """Return the local part of a DTensor, or any other tensor unchanged."""
        return value.to_local() if isinstance(value, DTensor) else value


class Pieces:
    """A converter from this rank's parameter shards to DTensors of the flattened full parameters.

    A DTensor is split evenly over the ranks of a replica. If there are several model replicas, the DTensor is
    replicated over the rows of the mesh.
    """

    def __init__(self, model: nn.Module, world: World, mesh: Mesh | None = None) -> None:
        """Record the number of elements of each parameter of the unsharded `model`. Collective."""
        self.counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.mesh: DeviceMesh | None = None
        if world.size > 1:
            self.mesh = device_mesh(world, mesh)

    def of_whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Return the shard of parameter `name` as a DTensor of the flattened parameter.

        The DTensor shares the memory of the shard, so reading a checkpoint into the DTensor updates the shard. In a
        single process, the shard itself is returned.
        """
        if self.mesh is None:
            return piece
        shape = torch.Size([self.counts[name]])
        placements = [Shard(0)] if self.mesh.ndim == 1 else [Replicate(), Shard(0)]
        return DTensor.from_local(piece, self.mesh, placements, run_check=False, shape=shape, stride=(1,))


def device_mesh(world: World, mesh: Mesh | None) -> DeviceMesh:
    """Return the mesh as a `DeviceMesh`, which is 1-D if there is only one replica of the model. Collective."""
    if mesh is None or mesh.replicate == 1:
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(world.device.type, tuple(mesh), mesh_dim_names=("replicate", "shard"))


class ModelState:
    """The parameters of a model, converted by the function `of_whole`, and the model's replicated buffers.

    Loading a checkpoint updates the parameters and buffers in place.
    """

    def __init__(self, module: nn.Module, of_whole: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Store the sharded model, and a function that converts a parameter's name and shard to a stored tensor."""
        self.module, self.of_whole = module, of_whole

    def state_dict(self) -> State:
        """Return the parameters and the persistent buffers, by name."""
        names = list(self.module.state_dict())  # first, because this call frees full parameters after an evaluation
        parameters = {name: self.of_whole(name, p.detach()) for name, p in self.module.named_parameters()}
        buffers = dict(self.module.named_buffers())
        return parameters | {name: buffers[name] for name in names if name in buffers}

    def load_state_dict(self, state: State) -> None:
        """Do nothing, because the checkpoint has already been read into the tensors returned by `state_dict`."""


class Groups:
    """The options of an optimizer's parameter groups, which are the same on all ranks.

    Schedulers change some of these options, such as the learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer."""
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return all entries of the parameter groups except the parameters."""
        groups = self.optimizer.param_groups
        return {"groups": [{name: each for name, each in group.items() if name != "params"} for group in groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the options of each parameter group."""
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(options)


def with_parameters(
    optimizer: torch.optim.Optimizer,
    of: Callable[[torch.Tensor], torch.Tensor],
    part_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the parameters and the state of an optimizer in place.

    Args:
        optimizer: An optimizer that has not taken a step.
        of: A function that returns the replacement for a parameter.
        part_of: A function that returns the replacement for a state tensor, given the parameter and the tensor.
    """
    full_state, optimizer.state = optimizer.state, defaultdict(dict)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in full_state.get(parameter, {}).items():
                is_counter = key == "step" or not torch.is_tensor(value)
                optimizer.state[of(parameter)][key] = value if is_counter else part_of(parameter, value)
        group["params"] = [of(parameter) for parameter in group["params"]]
