"""ZeRO-3, or FSDP: each rank keeps its piece of every parameter; a whole one is there while its module computes.

    sharded = ShardedModel(model, world)                        # from here on, each parameter is this rank's piece
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch).backward()        # gathers, frees, gathers again, reduces
    sharded.reduce()                     # wait for the gradients
    sharded.finish()                     # now each piece has its gradient
    optimizer.step()

A unit is what is gathered at a time: each block of a `ModuleList` or `Sequential`, and the rest of the model. With the
letters G for a gather, F forward, B backward, R a reduction, - for freed, of a model of three blocks:

    G1 F1 -  G2 F2 -  G3 F3 -  |  G3 B3 R3 -  G2 B2 R2 -  G1 B1 R1 -

where G2 travels while F1 computes: the next unit is gathered ahead, in the order of the first forward. That is three
times the model on the wire and not two, for 1/W of the memory.

Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel", VLDB 2023.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import from_rank_zero
from ddp_tutorial.compat import is_in_backward, tree_leaves, tree_map
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.wrappers import require_frozen, sync_initial_state
from ddp_tutorial.mesh import Mesh, group_of
from ddp_tutorial.world import World
from ddp_tutorial.zero.path import ExecutionPath
from ddp_tutorial.zero.pieces import Layout, is_piece, mark_as_piece, require_no_gradient
from ddp_tutorial.zero.reductions import Reduction, Reductions
from ddp_tutorial.zero.shards import Shards
from ddp_tutorial.zero.units import units_of


class Unit:
    """The parameters that are gathered together. Between uses each of them is this rank's piece, a vector; while it is
    whole, it has its shape, in `dtype`.

    A whole parameter has memory of its own, which is freed and taken again under the same tensor: what autograd has
    saved of it for backward is that tensor, and finds the values there again. A gradient of the piece is put aside
    while the parameter is whole.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], shards: Shards, dtype: torch.dtype | None, group: Any, path: ExecutionPath
    ) -> None:
        self.parameters, self.shards, self.group, self.path = list(named.values()), shards, group, path
        kinds = {parameter.dtype: name for name, parameter in named.items()}
        if len(kinds) > 1:
            told = " and ".join(f"{name!r} of {dtype}" for dtype, name in kinds.items())
            raise ConfigError(f"parameters that are gathered together should be of one type; found {told}")
        [master] = kinds
        self.dtype = dtype or master
        self.layout = Layout([parameter.shape for parameter in self.parameters], shards.size)
        rows = torch.zeros(shards.size, self.layout.length, dtype=master, device=shards.device)
        for index, parameter in enumerate(self.parameters):
            self.layout.pack(rows, index, parameter.detach())
        self.row = rows[shards.rank].clone()  # the masters: what the optimizer steps
        self.pieces = self.layout.pieces(self.row, shards.rank)
        self.wholes = [torch.empty(p.shape, dtype=self.dtype, device=shards.device) for p in self.parameters]
        self.trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.reduction = Reduction(self.trained, master, shards)
        self.awaited = 0  # gradients that have not arrived since the last gather
        self.number = 0  # the same on all ranks, and different for each unit of a model
        for parameter in self.parameters:
            mark_as_piece(parameter)
        self.is_whole = self.in_backward = False
        self._coming: tuple[torch.Tensor, dist.Work | None] | None = None
        self._gradients: list[torch.Tensor | None] = []  # of the pieces, while the parameters are whole
        self.free()

    def start(self) -> None:
        """Begin to gather. Collective, as all ranks gather the same units in the same order."""
        if self.is_whole or self._coming is not None:
            return
        self.path.add(self.number)
        self._coming = self._gathered(self.row.to(self.dtype))

    def _gathered(self, row: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """All ranks' rows, when the work is done."""
        if self.shards.size == 1:
            return row[None], None
        rows = row.new_empty(self.shards.size, self.layout.length)
        return rows, dist.all_gather_into_tensor(rows.view(-1), row, group=self.group, async_op=True)

    @torch.no_grad()
    def gather(self) -> None:
        """Let the parameters be whole."""
        if self.is_whole:
            return
        self.start()
        assert self._coming is not None, "it has just been started"
        (rows, work), self._coming = self._coming, None
        if work is not None:
            work.wait()
        self.awaited = len(self.trained)
        self._gradients = [parameter.grad for parameter in self.parameters]
        for index, (parameter, whole) in enumerate(zip(self.parameters, self.wholes, strict=True)):
            parameter.grad = None
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            self.layout.unpack(rows, index, whole)
            parameter.data = whole
        self.is_whole = True

    @torch.no_grad()
    def show(self) -> None:
        """Let the parameters be whole in the masters' type, in memory that `free` gives up."""
        rows, work = self._gathered(self.row)
        if work is not None:
            work.wait()
        for index, parameter in enumerate(self.parameters):
            full_parameters = rows.new_empty(self.layout.shapes[index])
            self.layout.unpack(rows, index, full_parameters)
            parameter.data = full_parameters

    def free(self) -> None:
        """Let the parameters be this rank's pieces."""
        if self._coming is not None:  # gathered ahead, and not used
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
        """Take part in gathering the parameters, without using them here: other ranks may."""
        self.start()
        self.free()

    def release(self) -> None:
        """Free the parameters at the end of a pass, whether or not their gradients have arrived."""
        self.free()
        self.in_backward = False


class ShardedModel:
    """`module`, of which each rank keeps a piece of every parameter. Constructing is collective: the ranks compare
    their models, and share out rank 0's weights.

    `module` is called as before, by its `forward`, on all ranks alike: a gather is collective. `compute_dtype` is what
    whole parameters are gathered in, and floating-point inputs of a unit cast to; pieces, and the sums of gradients,
    stay in the parameters' own. A unit with frozen parameters is freed when backward has ended. With a `mesh` there are
    several copies, and each rank keeps a piece of that of its row.

    Every rank takes part in gathering every unit, in the order of rank 0's first forward pass, so ranks may use
    different units, as with a mixture of experts. A unit that is used again, or out of this order, is gathered again;
    there all ranks must do the same.

    Several backward passes before a `reduce` are summed. The next forward pass drops the gradients of a backward pass
    that raised. It must have raised on all ranks alike.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        compute_dtype: torch.dtype | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        for name, parameter in module.named_parameters():
            if is_piece(parameter):
                raise ConfigError("the model is sharded already. A model can be sharded once: build it again")
            require_no_gradient(name, parameter)
        sync_initial_state(module, world)
        self.module, self.world, self.compute_dtype = module, world, compute_dtype
        self.shards, self.path = Shards(world, mesh), ExecutionPath()
        # Gathers and reductions interleave as each rank's backward has it: two groups, each with an order of its own.
        group = group_of(self.shards.mesh.rows, world, "gather")
        self.units: list[Unit] = []  # in the order of the forward pass, the model's own unit first
        self._ahead: deque[Unit] = deque()  # the units that this pass has not come to
        self._entered: dict[Unit, None] | None = {}  # in the first forward pass, in order; None after it
        self._is_pinned = False
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        module.register_forward_pre_hook(self._begin_forward)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for submodule in units_of(module).values():
            of_it = {names[p]: p for p in submodule.parameters() if p in names}
            for parameter in of_it.values():
                names.pop(parameter)
            if of_it:
                unit = Unit(of_it, self.shards, compute_dtype, group, self.path)
                self.units.insert(0 if submodule is module else len(self.units), unit)
                self._follow(submodule, unit)
        module.register_forward_hook(self._end_forward)
        for number, unit in enumerate(self.units):
            unit.number = number
        self.reductions = Reductions(self._reductions(), world)
        for unit in self.units:
            for index, parameter in enumerate(unit.trained.values()):
                parameter.register_post_accumulate_grad_hook(partial(self._arrive, unit, index))

    def _follow(self, module: nn.Module, unit: Unit) -> None:
        """Let the unit be gathered and freed as `module` computes."""
        module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
        module.register_forward_hook(partial(self._after_forward, unit))

    def _reductions(self) -> list[Reduction]:
        """The units' reductions, in the order in which the backward pass completes them."""
        return [unit.reduction for unit in self.units[::-1] if unit.trained]

    def _reach(self, unit: Unit) -> None:
        """Gather `unit`, after the units before it in this pass, which this rank does not use. Start to gather the
        following unit."""
        if unit in self._ahead:
            while (passed := self._ahead.popleft()) is not unit:
                passed.skip()
        unit.gather()
        if self._ahead:
            self._ahead[0].start()

    def _skip_rest(self) -> None:
        """Take part in gathering the units that this pass has not come to."""
        while self._ahead:
            self._ahead.popleft().skip()

    # ------------------------------------------------------------------------------------------------------- forward

    def _begin_forward(self, *_: object) -> None:
        if self._is_pinned or is_in_backward():  # activations are recomputed
            return
        require_frozen(self._frozen, "Unfreeze parameters before the model is sharded")
        if self.reductions.was_interrupted:
            self.reductions.discard()
        for unit in self.units:
            unit.release()
        self._ahead = deque(self.units)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, named: Any) -> Any:
        if not (self._is_pinned or unit.in_backward):  # else it is whole; in backward, activations are recomputed
            self._reach(unit)
            if self._entered is not None:
                self._entered[unit] = None
        if self.compute_dtype is None:
            return None
        return tree_map(self._cast, (args, named))

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_pinned or unit.in_backward:
            return
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    self._watch(tensor, unit)
            if module is self.module:  # backward will need it at once
                return
        unit.free()

    def _watch(self, tensor: torch.Tensor, unit: Unit) -> None:
        """Let the unit be gathered when the backward pass comes to its output. A module that returns its input shares
        this tensor with the module before, whose unit is gathered after it."""
        units = vars(tensor).setdefault("units_before_backward", [])
        if not units:
            tensor.register_hook(lambda _: self._before_backward(units[::-1]))
        units.append(unit)

    def _end_forward(self, *_: object) -> None:
        if self._is_pinned or is_in_backward():
            return
        self._skip_rest()
        if self._entered is not None:
            self._set_order(list(self._entered))
            self._entered = None
        if torch.is_grad_enabled():
            self._ahead = deque(unit for unit in self.units[::-1] if not unit.is_whole)
            while self._ahead and not self._ahead[-1].trained:  # most often, no gradient goes so far back
                self._ahead.pop()

    def _set_order(self, entered: list[Unit]) -> None:
        """Let the units be in the order of rank 0's first forward pass. One that it did not use stays behind the unit
        before it. Collective."""
        for place, unit in enumerate(self.units):
            if unit not in entered:
                entered.insert(entered.index(self.units[place - 1]) + 1 if place else 0, unit)
        numbers = from_rank_zero(self.world, [unit.number for unit in entered])
        of_number = {unit.number: unit for unit in self.units}
        self.units = [of_number[number] for number in numbers]
        self.reductions.ordered = self._reductions()

    # ------------------------------------------------------------------------------------------------------ backward

    def _before_backward(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if not (self._is_pinned or unit.in_backward):
                unit.in_backward = True
                self._reach(unit)

    def _arrive(self, unit: Unit, index: int, parameter: torch.Tensor) -> None:
        """Called by autograd as soon as a gradient is complete."""
        self.reductions.arrive(unit.reduction, index, parameter)
        unit.awaited -= 1
        if not unit.awaited and len(unit.trained) == len(unit.parameters):
            unit.release()

    def reduce(self) -> None:
        """Free what is whole, and wait for the reductions, after each backward pass. Collective."""
        self._skip_rest()
        for unit in self.units:
            unit.release()
        self.reductions.reduce()

    def finish(self) -> None:
        """Give the pieces their gradients, after the last backward pass of a step. Collective."""
        gradients = self.reductions.take()
        for unit in self.units:
            for name, parameter in unit.trained.items():
                parameter.grad = gradients.get(name)

    # --------------------------------------------------------------------------------------------------------- whole

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Inside, all parameters are whole on every rank, in the masters' type, to be read. Collective."""
        for unit in self.units:
            unit.free()
            unit.show()
        self._is_pinned = True
        try:
            yield self.module
        finally:
            self._is_pinned = False
            for unit in self.units:
                unit.free()


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns: in containers that torch knows, and in dataclasses."""
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_of([getattr(leaf, field.name) for field in fields(leaf)])
