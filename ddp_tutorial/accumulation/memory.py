"""Measure the memory of saved activations, and the peak memory of the forward and backward passes."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_tutorial.compat import TorchDispatchMode, storage_id, tree_leaves


@dataclass
class SavedBytes:
    """The size in bytes of each saved storage, by storage ID. A storage shared by several tensors is counted once."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The total size in bytes."""
        return sum(self.storages.values())


@contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves for the backward pass, excluding the parameters and buffers of `model`.

    Example:
        with count_saved_bytes(model) as saved:
            loss = model(inputs).sum()  # afterward, `saved.nbytes` is the number of bytes
    """
    own = {storage_id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    saved = SavedBytes()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := storage_id(tensor)) not in own:
            saved.storages[storage] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved


class PeakMemory(TorchDispatchMode):
    """A context manager that measures the peak memory of the tensors created in its block.

    Existing tensors, such as parameters, and memory that an operator allocates and frees internally are not counted.

    Example:
        with PeakMemory() as memory:
            loss_of(model, batch).backward()
        print(memory.peak_bytes)
    """

    def __init__(self) -> None:
        """Set the counters to zero."""
        super().__init__()
        self.bytes_in_use = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # bytes by storage ID, for each live storage; 0 if it existed before

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operator. Count the operator's inputs as existing memory and its results as new memory."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, is_new=True)
        return result

    def _add(self, tensor: torch.Tensor, is_new: bool) -> None:
        key = storage_id(tensor)
        if key in self._sizes:
            return
        storage = tensor.untyped_storage()
        self._sizes[key] = storage.nbytes() if is_new else 0
        self.bytes_in_use += self._sizes[key]
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.bytes_in_use -= self._sizes.pop(key)
