"""Keep only the weights of this rank's stages, and gather the other weights on demand.

    weights = StageWeights(model, pipeline, group)
    weights.release()                      # after the optimizer has been created
    with weights.full_parameters() as model: ...   # all weights on every rank, read-only
    model(batch)                         # on all ranks: each unit is gathered while it computes

For evaluation, every rank calls the full model with its own samples. The missing weights are then gathered block by
block, as in ZeRO-3. Weights that do not belong to a block are gathered for the whole forward pass. Training never
gathers weights.
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
    """A model's parameters and buffers. This rank keeps only the tensors of its own stages.

    All methods except `release` are collective over the ranks of the pipeline.
    """

    def __init__(self, model: nn.Module, pipeline: Pipeline, group: Any) -> None:
        """Register the hooks that gather each unit's weights over `group` for the forward pass and then free them."""
        self.model, self.pipeline, self.group = model, pipeline, group
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.own = {name for name, places in pipeline.places.items() if pipeline.place in places}
        self.is_training = False  # during training, a rank calls only its own stages
        self._is_pinned = False
        self._is_free = False
        left = {id(tensor): name for name, tensor in self.tensors.items()}
        for unit in units_of(model).values():
            inside = [left.pop(id(t)) for t in [*unit.parameters(), *unit.buffers()] if id(t) in left]
            unit.register_forward_pre_hook(partial(self._before, inside))
            unit.register_forward_hook(partial(self._after, inside))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers, by name.

        The dict is not cached, because an assignment such as `self.count = self.count + 1` replaces a buffer.
        """
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])

    def release(self) -> None:
        """Free the weights of other ranks' stages."""
        self._is_free = True
        self._free(self.shapes)

    def _free(self, names: Iterable[str]) -> None:
        tensors = self.tensors
        for name in names:
            if name not in self.own and tensors[name].numel():
                tensors[name].data = tensors[name].new_empty(0)

    @torch.no_grad()
    def _gather(self, names: Iterable[str]) -> None:
        """Broadcast each named tensor from the pipeline's first rank that stores the tensor. Collective.

        All ranks of the pipeline must pass the same names.
        """
        tensors = self.tensors
        for name in names:
            tensor, shape = tensors[name], self.shapes[name]
            if name not in self.own:
                tensor.data = tensor.new_empty(shape)
            if shape.numel() and self.group is not None:
                source = self.pipeline.mesh[self.pipeline.number][self.pipeline.places[name][0]]
                # Without contiguous(), the memory order of a channels_last tensor would differ between ranks.
                dist.broadcast(tensor.detach().contiguous(), src=source, group=self.group)

    def _before(self, names: list[str], *_: Any) -> None:
        if self._is_free and not (self.is_training or self._is_pinned):
            self._gather(names)

    def _after(self, names: list[str], *_: Any) -> None:
        """Free other ranks' weights after a module's forward pass, unless a backward pass will need them."""
        if self._is_free and not (self.is_training or self._is_pinned or torch.is_grad_enabled()):
            self._free(names)

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Gather all weights and buffers for the duration of the block. Collective."""
        try:
            if self._is_free:
                self._gather(self.shapes)
            self._is_pinned = True
            yield self.model
        finally:
            self._is_pinned = False
            if self._is_free:
                self._free(self.shapes)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Disable gathering for the duration of the block, because a rank calls only its own stages."""
        if self._is_free:
            self._free(self.shapes)
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False


class StageWeightsState:
    """A checkpoint component that contains a pipeline's weights.

    Each tensor is written once. In the first pipeline, the first rank that stores a tensor writes it. All ranks that
    store the tensor read it.
    """

    def __init__(self, weights: StageWeights, written: set[str]) -> None:
        """Store the weights of this rank's stages, and the names of the tensors that this rank writes."""
        self.weights, self.written = weights, written

    def _own(self) -> dict[str, torch.Tensor]:
        model = self.weights.model
        kept = {*model.state_dict(), *dict(model.named_parameters())}  # without non-persistent buffers
        return {name: t for name, t in self.weights.tensors.items() if name in self.weights.own and name in kept}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank writes."""
        return {name: tensor.detach() for name, tensor in self._own().items() if name in self.written}

    def empty(self, stored: Any) -> dict[str, torch.Tensor]:
        """Return this rank's own tensors, to be filled in place from a checkpoint."""
        return {name: tensor.detach() for name, tensor in self._own().items()}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing, because the checkpoint has already been read into the tensors returned by `empty`."""
