"""Implement ZeRO-3 (FSDP), in which each rank stores a shard of every parameter and gathers full parameters for use.

A unit is a set of parameters that are gathered together. Each block of a `ModuleList` or `Sequential` is one unit, and
the rest of the model forms the root unit. Units follow the order of the first forward pass. Each unit is prefetched
while the previous unit computes. Each rank sends 50 % more bytes than with DDP, but stores only 1/W of the model state.

Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel", VLDB 2023.

The following diagram shows one step of a model with three blocks. G is a gather, F a forward pass, B a backward pass,
R a reduction, and - the release of the full parameters. G2 overlaps F1. The code runs one step.

    G1 F1 -  G2 F2 -  G3 F3 -  |  G3 B3 R3 -  G2 B2 R2 -  G1 B1 R1 -

    sharded = ShardedModel(model, world)           # replaces each parameter with this rank's shard
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch).backward()                  # gathers, frees, gathers again, reduces
    sharded.reduce()                               # waits for the reductions
    sharded.finish()                               # assigns the gradients to the shards
    optimizer.step()
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from ddp_tutorial.collectives import from_rank_zero
from ddp_tutorial.compat import current_backward, is_in_backward, tree_map
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.sync_bn import BatchNorm
from ddp_tutorial.ddp.wrappers import call_later, require_frozen, sync_initial_state
from ddp_tutorial.groups import group_of
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World
from ddp_tutorial.zero.path import ExecutionPath
from ddp_tutorial.zero.pieces import Layout, is_piece, mark_as_piece, require_no_gradient
from ddp_tutorial.zero.reductions import Reduction, Reductions, tensors_of
from ddp_tutorial.zero.shards import Shards
from ddp_tutorial.zero.units import units_of


class Unit:
    """A group of parameters that are gathered and freed together.

    Between uses, each parameter contains this rank's shard, as a 1-D tensor. After a gather, each parameter has its
    full shape and the unit's `dtype`.

    Every gather of a parameter fills the same tensor object. `free` releases the tensor's storage, and `gather`
    allocates the storage again. Autograd saves the tensor object, so the backward pass can read the regathered values.
    While a parameter is unsharded, the gradient of its shard is stored separately.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], shards: Shards, dtype: torch.dtype | None, group: Any, path: ExecutionPath
    ) -> None:
        """Pack the full parameters into rows, keep this rank's row, and free the full parameters.

        `dtype` is the dtype of the gathered parameters (None: unchanged). `group` is for the all-gathers.

        Raises:
            ConfigError: If the parameters have different dtypes.
        """
        self.parameters, self.shards, self.group, self.path = list(named.values()), shards, group, path
        kinds = {parameter.dtype: name for name, parameter in named.items()}
        if len(kinds) > 1:
            description = " and ".join(f"{name!r} with {dtype}" for dtype, name in kinds.items())
            raise ConfigError(f"parameters that are gathered together must have the same dtype, got {description}")
        [master] = kinds
        self.dtype = dtype or master
        self.layout = Layout([parameter.shape for parameter in self.parameters], shards.size)
        rows = torch.zeros(shards.size, self.layout.length, dtype=master, device=shards.world.device)
        for index, parameter in enumerate(self.parameters):
            self.layout.pack(rows, index, parameter.detach())
        self.row = rows[shards.rank].clone()  # the master weights, which the optimizer updates
        self.pieces = self.layout.pieces(self.row, shards.rank)
        self.wholes = [torch.empty(p.shape, dtype=self.dtype, device=shards.world.device) for p in self.parameters]
        self.trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.reduction = Reduction(self.trained, master, shards)
        self.reductions: Reductions  # the reductions of the model, which sets this attribute
        self._nodes: dict[str, Node] = {}
        self._awaited = 0  # number of gradients that have not arrived since the last gather
        self.number = 0  # identifies the unit within its model, the same on all ranks
        for parameter in self.parameters:
            mark_as_piece(parameter)
        self.is_whole = False
        self.backward: int | None = None  # the backward pass that has reached this unit
        self._coming: tuple[torch.Tensor, dist.Work | None] | None = None
        self._gradients: list[torch.Tensor | None] = []  # of the shards, while the parameters are full
        self.free()

    def start(self) -> None:
        """Start gathering the parameters, without waiting for the result. Collective.

        All ranks must gather the same units in the same order.
        """
        if self.is_whole or self._coming is not None:
            return
        self.path.add(self.number)
        self._coming = self._gathered(self.row.to(self.dtype))

    def _gathered(self, row: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Start the all-gather of `row`. Return the rows, which are valid when the returned work has completed."""
        if self.shards.size == 1:
            return row[None], None
        rows = row.new_empty(self.shards.size, self.layout.length)
        return rows, dist.all_gather_into_tensor(rows.view(-1), row, group=self.group, async_op=True)

    @torch.no_grad()
    def gather(self) -> None:
        """Replace the shards with the full parameters. Collective."""
        if self.is_whole:
            return
        self.start()
        assert self._coming is not None, "start() sets self._coming"
        (rows, work), self._coming = self._coming, None
        if work is not None:
            work.wait()
        self._awaited = len(self.trained)
        self._gradients = [parameter.grad for parameter in self.parameters]
        for index, (parameter, whole) in enumerate(zip(self.parameters, self.wholes, strict=True)):
            parameter.grad = None
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            self.layout.unpack(rows, index, whole)
            parameter.data = whole
        self.is_whole = True
        if not torch.is_inference_mode_enabled():
            self._follow_gradients()

    def _follow_gradients(self) -> None:
        """For each parameter, register a hook that calls `_arrive` when the gradient is final.

        The parameter's own hooks may change the gradient, so this hook is registered on the autograd node that
        accumulates the gradient. Autograd creates a new node when the parameter's dtype changes, and the parameter does
        not keep its node alive.
        """
        arrive = WeakMethod(self._arrive)
        for index, (name, parameter) in enumerate(self.trained.items()):
            if parameter.requires_grad and (node := get_gradient_edge(parameter).node) is not self._nodes.get(name):
                node.register_hook(call_later(arrive, index, parameter))
                self._nodes[name] = node

    def _arrive(self, index: int, parameter: nn.Parameter) -> None:
        """Pass a gradient to the reductions, and free the parameters after the last gradient."""
        self.reductions.arrive(self.reduction, index, parameter)
        self._awaited -= 1
        if self.is_done and current_backward() == self.backward:  # differs in a reentrant checkpoint
            self.release()

    @property
    def is_done(self) -> bool:
        """Whether all gradients have arrived.

        A unit with a frozen parameter is never done, because the parameter may still be needed.
        """
        return self._awaited <= 0 and len(self.trained) == len(self.parameters)

    @torch.no_grad()
    def show(self) -> None:
        """Replace the shards with full parameters in the master dtype. Collective.

        The full parameters use new memory, which `free` releases.
        """
        rows, work = self._gathered(self.row)
        if work is not None:
            work.wait()
        for index, parameter in enumerate(self.parameters):
            whole = rows.new_empty(self.layout.shapes[index])
            self.layout.unpack(rows, index, whole)
            parameter.data = whole

    def free(self) -> None:
        """Free the full parameters, and replace them with this rank's shards."""
        if self._coming is not None:  # prefetched but not used
            _, work = self._coming
            if work is not None:
                work.wait()
            self._coming = None
        for parameter, whole, piece in zip(self.parameters, self.wholes, self.pieces, strict=True):
            parameter.data = piece
            whole.untyped_storage().resize_(0)
        if self.is_whole:
            for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        self.is_whole = False

    def skip(self) -> None:
        """Participate in a gather that other ranks need, without using the parameters on this rank. Collective."""
        self.start()
        self.free()

    def release(self) -> None:
        """Free the parameters at the end of a pass, even if some gradients have not arrived."""
        self.free()
        self.backward = None


class ShardedModel:
    """A wrapper that shards every parameter of `module` over the ranks. The constructor is collective.

    The constructor checks that all ranks have the same model, and shards rank 0's weights. Call `module` as before, but
    on all ranks, because its forward pass gathers parameters.

    Every rank participates in the gather of every unit, in the order of rank 0's first forward pass. Ranks may
    therefore use different units, as in a mixture of experts. If a unit is used again or out of order, the unit is
    gathered again, and all ranks must use the same units. A unit with frozen parameters is freed at the end of the
    backward pass.

    The gradients of all backward passes before `finish` are summed. If a backward pass raises an error, the next
    forward pass discards the gradients of that backward pass. The error must be raised on all ranks.

    Args:
        module: The model, whose parameters must not have gradients.
        world: The participating ranks.
        compute_dtype: The dtype of the gathered parameters and of each unit's floating-point inputs. The shards and the
            summed gradients keep the dtype of the parameters.
        mesh: The number of model replicas and the number of ranks per replica. The ranks in a row of the mesh share one
            replica. The default is a single replica.

    Raises:
        ConfigError: If the model is already sharded, if a parameter has a gradient, or if the dtypes in a unit differ.
            Also raised if `compute_dtype` is set and the model contains a BatchNorm layer with running statistics.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        compute_dtype: torch.dtype | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Shard `module`. Collective; see the class docstring."""
        for name, parameter in module.named_parameters():
            if is_piece(parameter):
                raise ConfigError("the model is already sharded: build a new model")
            require_no_gradient(name, parameter)
        for name, layer in module.named_modules() if compute_dtype else ():
            if isinstance(layer, BatchNorm) and layer.affine and layer.running_mean is not None:
                raise ConfigError(
                    f"{name!r} is a {type(layer).__name__}, whose weights must have the dtype of its running "
                    f"statistics, but this strategy gathers weights in {compute_dtype}. Use strategy=fsdp, or "
                    "precision.dtype=fp32"
                )
        sync_initial_state(module, world)
        self.module, self.world, self.compute_dtype = module, world, compute_dtype
        self.shards, self.path = Shards(world, mesh), ExecutionPath()
        # All-gathers and reductions interleave differently on each rank, so each kind uses its own process group.
        group = group_of(self.shards.mesh.rows, world, "gather")
        self.units: list[Unit] = []  # in the order of the forward pass, the root unit first
        self._ahead: deque[Unit] = deque()  # the units that this pass has not reached
        self._entered: dict[Unit, None] | None = {}  # units of the first forward pass, in order; None afterwards
        self._is_pinned = False
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        module.register_forward_pre_hook(self._begin_forward)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for submodule in units_of(module).values():
            own = {names[p]: p for p in submodule.parameters() if p in names}
            for parameter in own.values():
                names.pop(parameter)
            if own:
                unit = Unit(own, self.shards, compute_dtype, group, self.path)
                self.units.insert(0 if submodule is module else len(self.units), unit)
                self._follow(submodule, unit)
        module.register_forward_hook(self._end_forward)
        module.register_state_dict_pre_hook(self._before_state_dict)
        for number, unit in enumerate(self.units):
            unit.number = number
        self.reductions = Reductions(self._reductions(), world)
        for unit in self.units:
            unit.reductions = self.reductions

    def _follow(self, module: nn.Module, unit: Unit) -> None:
        """Register forward hooks on `module` that gather `unit` before the forward pass and free it afterward."""
        module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
        module.register_forward_hook(partial(self._after_forward, unit))

    def _reductions(self) -> list[Reduction]:
        """Return the units' reductions, in the order in which the backward pass completes them."""
        return [unit.reduction for unit in self.units[::-1] if unit.trained]

    def _reach(self, unit: Unit) -> None:
        """Skip the unused units before `unit`, gather `unit`, and prefetch the next unit."""
        if unit in self._ahead:
            while (passed := self._ahead.popleft()) is not unit:
                passed.skip()
        unit.gather()
        if self._ahead:
            self._ahead[0].start()

    def _skip_rest(self) -> None:
        """Participate in the gathers of the units that this pass does not reach."""
        while self._ahead:
            self._ahead.popleft().skip()

    # ------------------------------------------------------------------------------------------------------- forward

    def _begin_forward(self, *_: object) -> None:
        if self._is_pinned or is_in_backward():  # activation checkpointing recomputes
            return
        require_frozen(self._frozen, "Unfreeze parameters before the model is sharded")
        if self.reductions.was_interrupted:
            self.reductions.discard()
        for unit in self.units:
            unit.release()
        self._ahead = deque(self.units)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, named: Any) -> Any:
        if not self._is_pinned and unit.backward is None:  # otherwise the unit is full already
            self._reach(unit)
            if self._entered is not None:
                self._entered[unit] = None
        if self.compute_dtype is None or self._is_pinned:  # `show` keeps the master dtype
            return None
        return tree_map(self._cast, (args, named))

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_pinned or unit.backward is not None:
            return
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    self._watch(tensor, unit)
            if module is self.module:  # the backward pass needs the root unit first
                return
        unit.free()

    def _watch(self, tensor: torch.Tensor, unit: Unit) -> None:
        """Gather `unit` when the backward pass reaches `tensor`, an output of the unit.

        If a module returns its input, `tensor` is also an output of the previous module, and the hook gathers the later
        unit first.
        """
        units = vars(tensor).setdefault("units_before_backward", [])
        if not units:
            tensor.register_hook(lambda _: self._before_backward(units[::-1]))
        units.append(unit)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_pinned or is_in_backward():
            return
        self._skip_rest()
        if self._entered is not None:
            self._set_order(list(self._entered))
            self._entered = None
        if torch.is_grad_enabled():
            self.reductions.watch(output)
            self._ahead = deque(unit for unit in self.units[::-1] if not unit.is_whole)
            while self._ahead and not self._ahead[-1].trained:  # the backward pass usually stops before frozen units
                self._ahead.pop()

    def _set_order(self, entered: list[Unit]) -> None:
        """Sort the units by their order in rank 0's first forward pass. Collective.

        A unit that rank 0 did not use keeps its position after its predecessor.
        """
        for place, unit in enumerate(self.units):
            if unit not in entered:
                entered.insert(entered.index(self.units[place - 1]) + 1 if place else 0, unit)
        numbers = from_rank_zero(self.world, [unit.number for unit in entered])
        of_number = {unit.number: unit for unit in self.units}
        self.units = [of_number[number] for number in numbers]
        self.reductions.ordered = self._reductions()

    # ------------------------------------------------------------------------------------------------------ backward

    def _before_backward(self, units: Sequence[Unit]) -> None:
        for unit in self.units[1:]:  # not the root unit, whose parameters are used between other units
            if unit.backward is not None and unit.is_done:
                unit.release()
        for unit in units:
            if not self._is_pinned and unit.backward is None:
                unit.backward = current_backward()
                self._reach(unit)

    def reduce(self) -> None:
        """Free all units and wait for the reductions. Collective. Call this method after each backward pass."""
        self._skip_rest()
        for unit in self.units:
            unit.release()
        self.reductions.reduce()

    def finish(self) -> None:
        """Assign the summed gradients to the shards. Collective. Call this method after a step's last backward pass."""
        gradients = self.reductions.take()
        for unit in self.units:
            for name, parameter in unit.trained.items():
                parameter.grad = gradients.get(name)

    def _before_state_dict(self, *_: object) -> None:
        """Free the units that are still full after a forward pass without a backward pass."""
        if not self._is_pinned and not is_in_backward():
            for unit in self.units:
                unit.release()

    # ----------------------------------------------------------------------------------------------- full parameters

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Yield the model with full parameters on every rank. Collective.

        The parameters are read-only and have the master dtype.
        """
        try:
            for unit in self.units:
                unit.free()
                unit.show()
            self._is_pinned = True
            yield self.module
        finally:
            self._is_pinned = False
            for unit in self.units:
                unit.free()
