"""Measure the activations that the forward pass saves for the backward pass. They grow with the micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_tutorial.compat import storage_id


@dataclass
class SavedBytes:
    """The bytes of each saved storage, by its identity. A storage that several tensors share is counted once."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The total number of bytes."""
        return sum(self.storages.values())


@contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves for backward, without the parameters and buffers of `model`.

    with count_saved_bytes(model) as saved:
        loss = model(inputs).sum()
    print(saved.nbytes)
    """
    own = {storage_id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    saved = SavedBytes()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := storage_id(tensor)) not in own:
            saved.storages[storage] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved
