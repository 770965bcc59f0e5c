"""What a checkpoint keeps of sharded state: tensors by name, of which each rank writes its part, as components that are
"sharded". On another number of ranks each reads what belongs to its own part then."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ddp_tutorial.checkpoint.components import State, StoredTensor
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World


class OptimizerState:
    """The state of an optimizer each of whose parameters belongs to one rank: "head.weight.exp_avg" and so on.

    `named` are this rank's parameters, as the optimizer has them. Raises `ValueError` for state that is no tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> None:
        self.optimizer, self.named = optimizer, dict(named)

    def state_dict(self) -> State:
        names = {parameter: name for name, parameter in self.named.items()}
        state = {}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    state[f"{names[parameter]}.{key}"] = self.stored(parameter, value)
                elif value is not None:
                    kind = type(self.optimizer).__name__
                    raise ValueError(f"{kind} keeps {key!r} of type {type(value).__name__}: only tensors can be shared")
        return state

    def empty(self, stored: Mapping[str, StoredTensor]) -> State:
        """Where the stored tensors of this rank's parameters are to be read into."""
        wanted = {}
        for where, what in stored.items():
            if (parameter := self.named.get(where.rpartition(".")[0])) is not None:
                wanted[where] = self.place(parameter, what)
        return wanted

    def load_state_dict(self, state: State) -> None:
        self.optimizer.state.clear()
        for where, value in state.items():
            name, _, key = where.rpartition(".")
            self.optimizer.state[self.named[name]][key] = self.taken(value)

    def stored(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The tensor that a checkpoint is given for `value`, which the optimizer keeps for `parameter`."""
        return value

    def place(self, parameter: torch.Tensor, what: StoredTensor) -> torch.Tensor:
        """A tensor of zeros into which the stored one is read, for the state of `parameter`."""
        if what.shape == parameter.shape:
            return torch.zeros_like(parameter, dtype=what.dtype)
        on_device = any(self.optimizer.defaults.get(name) for name in ("fused", "capturable"))
        return torch.zeros(what.shape, dtype=what.dtype, device=parameter.device if on_device else "cpu")

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        """The part of what has been read that belongs into this rank's optimizer."""
        return value


class OptimizerStateOfPieces(OptimizerState):
    """The state of an optimizer that steps pieces: what has a number for each element is in pieces too."""

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: "Pieces", named: Mapping[str, torch.Tensor]) -> None:
        super().__init__(optimizer, named)
        self.pieces = pieces

    def stored(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        names = {id(each): name for name, each in self.named.items()}
        is_piece = value.dim() and value.shape == parameter.shape
        return self.pieces.of_whole(names[id(parameter)], value) if is_piece else value

    def place(self, parameter: torch.Tensor, what: StoredTensor) -> torch.Tensor:
        if what.shape == torch.Size():
            return super().place(parameter, what)
        names = {id(each): name for name, each in self.named.items()}
        return self.pieces.of_whole(names[id(parameter)], torch.zeros_like(parameter, dtype=what.dtype))

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        return value.to_local() if isinstance(value, DTensor) else value


class Pieces:
    """Says of a rank's piece of a parameter which part of the whole it is: as a DTensor, a vector cut evenly; where
    there are copies of the model, each row of the mesh has it."""

    def __init__(self, model: nn.Module, world: World, mesh: Mesh | None = None) -> None:
        """`model` has all its parameters whole, as before it is sharded: their numbers of elements are noted."""
        self.counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.mesh: DeviceMesh | None = None
        if world.size > 1:
            self.mesh = device_mesh(world, mesh)

    def of_whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The piece of parameter `name` as a DTensor of the whole, a vector; in one process, the piece itself. It
        shares the piece's memory, so what a checkpoint reads into it is in the piece."""
        if self.mesh is None:
            return piece
        shape = torch.Size([self.counts[name]])
        placements = [Shard(0)] if self.mesh.ndim == 1 else [Replicate(), Shard(0)]
        return DTensor.from_local(piece, self.mesh, placements, run_check=False, shape=shape, stride=(1,))


def device_mesh(world: World, mesh: Mesh | None) -> DeviceMesh:
    """The mesh as torch's `DeviceMesh`; of one dimension where there is one copy of the model. Collective."""
    if mesh is None or mesh.replicate == 1:
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(world.device.type, tuple(mesh), mesh_dim_names=("replicate", "shard"))


class ModelState:
    """The parameters of a model, as `of_whole` shows this rank's part of each, and its buffers, which all ranks have.
    They are read in place."""

    def __init__(self, module: nn.Module, of_whole: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self.module, self.of_whole = module, of_whole

    def state_dict(self) -> State:
        names = list(self.module.state_dict())  # first: torch's FSDP lets go here of what an evaluation left whole
        sharded_components = {name: self.of_whole(name, p.detach()) for name, p in self.module.named_parameters()}
        buffers = dict(self.module.named_buffers())
        return sharded_components | {name: buffers[name] for name in names if name in buffers}

    def load_state_dict(self, state: State) -> None:
        """Does nothing: the tensors of `state_dict` have been read in place."""


class Groups:
    """The options of an optimizer's groups, such as the learning rate, which schedules change; the same on all
    ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        return {"groups": [{name: each for name, each in group.items() if name != "params"} for group in groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(options)


def with_parameters(
    optimizer: torch.optim.Optimizer,
    of: Callable[[torch.Tensor], torch.Tensor],
    part_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace each parameter p of an optimizer that has not been stepped by `of(p)`, and each tensor t that it keeps
    for the elements of p by `part_of(p, t)`."""
    full_parameters, optimizer.state = optimizer.state, defaultdict(dict)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in full_parameters.get(parameter, {}).items():
                is_counter = key == "step" or not torch.is_tensor(value)
                optimizer.state[of(parameter)][key] = value if is_counter else part_of(parameter, value)
        group["params"] = [of(parameter) for parameter in group["params"]]
