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

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.buckets import check_dense
from ddp_tutorial.ddp.variants import sync_initial_state
from ddp_tutorial.mesh import Mesh, group_of
from ddp_tutorial.world import World
from ddp_tutorial.zero.gradients import Reduction, cross, used_somewhere
from ddp_tutorial.zero.pieces import Layout, mark_as_piece
from ddp_tutorial.zero.shards import Shards
from ddp_tutorial.zero.units import units_of


class Unit:
    """The parameters that are gathered together. Between uses each of them is this rank's piece, a vector; while it is
    whole, it has its shape, in `dtype`.

    A whole parameter has memory of its own, which is freed and taken again under the same tensor: what autograd has
    saved of it for backward is that tensor, and finds the values there again.
    """

    def __init__(self, named: dict[str, nn.Parameter], shards: Shards, dtype: torch.dtype | None, group: Any) -> None:
        self.parameters, self.shards, self.group = list(named.values()), shards, group
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
        self.reduction = Reduction(list(self.trained.values()), master, shards)
        for parameter in self.parameters:
            mark_as_piece(parameter)
        self.is_whole = self.in_backward = False
        self._coming: tuple[torch.Tensor, dist.Work | None] | None = None
        self.free()

    def start(self) -> None:
        """Begin to gather. Collective, as all ranks gather the same units in the same order."""
        if self.is_whole or self._coming is not None:
            return
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
        for index, (parameter, whole) in enumerate(zip(self.parameters, self.wholes, strict=True)):
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
            whole = rows.new_empty(self.layout.shapes[index])
            self.layout.unpack(rows, index, whole)
            parameter.data = whole

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
        self.is_whole = False


class ShardedModel:
    """`module`, of which each rank keeps a piece of every parameter. Constructing is collective: the ranks compare
    their models, and share out rank 0's weights.

    `module` is called as before, by its `forward`, on all ranks alike: a gather is collective. `compute_dtype` is what
    whole parameters are gathered in, and floating-point inputs of a unit cast to; pieces, and the sums of gradients,
    stay in the parameters' own. A unit with frozen parameters is freed when backward has ended. With a `mesh` there are
    several copies, and each rank keeps a piece of that of its row.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        compute_dtype: torch.dtype | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        sync_initial_state(module, world)
        self.module, self.world, self.compute_dtype = module, world, compute_dtype
        self.shards = Shards(world, mesh)
        # Gathers and reductions interleave as each rank's backward has it: two groups, each with an order of its own.
        group = group_of(self.shards.mesh.rows, world, "gather")
        self.names = [name for name, _ in module.named_parameters()]
        self.units: list[Unit] = []
        self._is_pinned = False
        self._order: list[Unit] = []  # of the first forward
        self._is_recorded = False
        self._started = 0
        self._used: set[str] = set()
        names = {parameter: name for name, parameter in module.named_parameters()}
        for submodule in units_of(module).values():
            of_it = {names[p]: p for p in submodule.parameters() if p in names}
            for parameter in of_it.values():
                names.pop(parameter)
            if of_it:
                self._add(submodule, Unit(of_it, self.shards, compute_dtype, group))
        module.register_forward_hook(self._recorded)
        self._turns = self.units[::-1]

    def _add(self, module: nn.Module, unit: Unit) -> None:
        self.units.append(unit)
        module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
        module.register_forward_hook(partial(self._after_forward, unit))
        for index, (name, parameter) in enumerate(unit.trained.items()):
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, unit, index, name))

    # ------------------------------------------------------------------------------------------------------- forward

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, named: Any) -> Any:
        if not (self._is_pinned or unit.in_backward):  # else it is whole; in backward, activations are recomputed
            unit.gather()
            if not self._is_recorded:
                self._order.append(unit)
            self._start_next(unit, 1)
        if self.compute_dtype is None:
            return None
        return tree_map(self._cast, (args, named))

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_pinned or unit.in_backward:
            return
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if torch.is_tensor(tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
            if module is self.module:  # backward will need it at once
                return
        unit.free()

    def _recorded(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self._is_recorded or self._is_pinned):
            self._is_recorded = True
            self._order = list(dict.fromkeys(self._order))
            self._turns = [*self._order[::-1], *(unit for unit in self.units if unit not in self._order)]

    def _start_next(self, unit: Unit, direction: int) -> None:
        """Begin to gather the unit that is needed after this one."""
        following = self._order.index(unit) + direction if self._is_recorded and unit in self._order else -1
        if 0 <= following < len(self._order):
            self._order[following].start()

    # ------------------------------------------------------------------------------------------------------ backward

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not (self._is_pinned or unit.in_backward):
            unit.in_backward = True
            unit.gather()
            self._start_next(unit, -1)

    def _arrive(self, unit: Unit, index: int, name: str, parameter: torch.Tensor) -> None:
        """Called by autograd as soon as a gradient is complete."""
        check_dense(name, parameter.grad)
        assert parameter.grad is not None, "autograd has just added to it"
        unit.reduction.put(index, parameter.grad)
        parameter.grad = None
        self._used.add(name)
        if not unit.reduction.missing and len(unit.trained) == len(unit.parameters):
            unit.free()
        while self._started < len(self._turns) and not self._turns[self._started].reduction.missing:
            self._start()

    def _start(self) -> None:
        if (unit := self._turns[self._started]).trained:
            unit.reduction.start()
        self._started += 1
        cross([unit.reduction for unit in self._turns[: self._started] if unit.trained])

    def reduce(self) -> None:
        """After each backward: reduce what has not been reduced, wait, and free what is whole. Collective."""
        while self._started < len(self._turns):
            self._start()
        self._started = 0
        for unit in self._turns:
            unit.free()
            unit.in_backward = False
            if unit.trained:
                unit.reduction.wait()

    def finish(self) -> None:
        """After the last backward of a step: give the pieces their gradients. Collective."""
        used = used_somewhere(self.world, self.names, self._used)
        self._used.clear()
        for unit in (unit for unit in self.units if unit.trained):
            for (name, parameter), gradient in zip(unit.trained.items(), unit.reduction.take(), strict=True):
                parameter.grad = gradient if name in used and len(gradient) else None

    # --------------------------------------------------------------------------------------------------------- whole

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
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
