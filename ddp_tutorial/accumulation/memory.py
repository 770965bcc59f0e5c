"""What forward keeps in memory for backward: the activations, which grow with the micro-batch; weights do not."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class Kept:
    """Storages by identity, and their bytes: each counts once, however many tensors share it."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.storages.values())


@contextmanager
def bytes_kept(model: nn.Module) -> Iterator[Kept]:
    """Count the bytes that autograd keeps for backward, without those of the model, which are there anyway.

    with bytes_kept(model) as kept:
        loss = model(inputs).sum()
    print(kept.nbytes)
    """
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    kept = Kept()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # an address would not do: on torch's meta device, all are 0
            kept.storages[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
