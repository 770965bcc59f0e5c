"""Whose weights are where: each rank of a pipeline keeps those of its own stages, the others have no elements.

    weights = StageWeights(model, pipeline, group)
    weights.release()                      # after an optimizer was made of the model
    with weights.full_parameters() as model: ...   # all weights on every rank, to be read
    model(batch)                         # on all ranks alike: unit by unit, whole while it computes

The model as such is still called where it is judged, on every rank with samples of its own. Then what a rank lacks is
gathered as in ZeRO-3: a block at a time, and around the whole forward what is in no block. Training never does that.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.pipeline.parallel import Pipeline
from ddp_tutorial.zero.units import units_of


class StageWeights:
    """The parameters and buffers of `model`, of which this rank keeps those of its stages in `pipeline`; `group` has
    the ranks of this pipeline. All methods but `free` are collective over them."""

    def __init__(self, model: nn.Module, pipeline: Pipeline, group: Any) -> None:
        self.model, self.pipeline, self.group = model, pipeline, group
        self.tensors: dict[str, torch.Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        stages = pipeline.stages.values()
        self.own = {names[id(t)] for stage in stages for t in [*stage.parameters(), *stage.buffers()]}
        self.is_training = False  # then stages are called, and each rank has what it needs
        self._is_pinned = False
        self._is_free = False
        left = dict(names)
        for unit in units_of(model).values():
            inside = [left.pop(id(t)) for t in [*unit.parameters(), *unit.buffers()] if id(t) in left]
            unit.register_forward_pre_hook(partial(self._before, inside))
            unit.register_forward_hook(partial(self._after, inside))

    @property
    def elements(self) -> int:
        """How many of the model's parameters this rank has, right now."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def release(self) -> None:
        """Give up what belongs to other ranks."""
        self._is_free = True
        self._give_up(self.tensors)

    def _give_up(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.own and self.tensors[name].numel():
                self.tensors[name].data = self.tensors[name].new_empty(0)

    @torch.no_grad()
    def _gather(self, names: Iterable[str]) -> None:
        """Broadcast each named tensor from the first rank of the pipeline that has it. Collective: all ranks ask for
        the same."""
        for name in names:
            tensor, shape = self.tensors[name], self.shapes[name]
            if name not in self.own:
                tensor.data = tensor.new_empty(shape)
            if shape.numel() and self.group is not None:
                source = self.pipeline.mesh[self.pipeline.number][self.pipeline.owners[name]]
                dist.broadcast(tensor.detach(), src=source, group=self.group)

    def _before(self, names: list[str], *_: Any) -> None:
        if self._is_free and not (self.is_training or self._is_pinned):
            self._gather(names)

    def _after(self, names: list[str], *_: Any) -> None:
        """After a module's forward: give up what other ranks have, unless a backward is to come, which will need it."""
        if self._is_free and not (self.is_training or self._is_pinned or torch.is_grad_enabled()):
            self._give_up(names)

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Inside, this rank has all weights and buffers."""
        if self._is_free:
            self._gather(self.tensors)
        self._is_pinned = True
        try:
            yield self.model
        finally:
            self._is_pinned = False
            if self._is_free:
                self._give_up(self.tensors)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, nothing is gathered around a forward: a rank calls its own stages only, whose weights it has."""
        if self._is_free:
            self._give_up(self.tensors)
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False


class StageWeightsState:
    """What a checkpoint keeps of a pipeline's weights: each tensor once, written by the first rank that has it, in the
    first pipeline, and read by all ranks that have it."""

    def __init__(self, weights: StageWeights, written: set[str]) -> None:
        kept = weights.model.state_dict()  # no buffers that are not to be kept
        parameters = dict(weights.model.named_parameters())
        self.own = {name: t.detach() for name, t in weights.tensors.items() if name in weights.own}
        self.own = {name: t for name, t in self.own.items() if name in parameters or name in kept}
        self.written = written

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.own.items() if name in self.written}

    def empty(self, stored: Any) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint is read into: this rank's own, in place."""
        return self.own

    def load_state_dict(self, state: Any) -> None:
        """Does nothing: the tensors of `empty` have been read in place."""
