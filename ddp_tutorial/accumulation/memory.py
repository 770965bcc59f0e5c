"""Measure the activations that the forward pass saves for the backward pass. They grow with the micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class SavedBytes:
    """The bytes of each saved storage, by its identity. A storage that several tensors share counts once."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.storages.values())


@contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves for backward, without the parameters and buffers of `model`.

    with count_saved_bytes(model) as saved:
        loss = model(inputs).sum()
    print(saved.nbytes)
    """
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    saved = SavedBytes()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # not the address, which is 0 for all tensors on the meta device
            saved.storages[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved
