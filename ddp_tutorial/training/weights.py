"""Save and load a model's weights in a format that cannot execute code when it is loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ddp_tutorial.compat import uncompiled
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import directory_replaced_atomically, remove_temporary

WEIGHTS = "model.safetensors"


def save_model(model: nn.Module, folder: Path) -> None:
    """Write `model` to `folder`. A previous model in `folder` is replaced only after the new model is complete.

    If the model has a `save_pretrained` method, as Hugging Face models and this package's `GPT` do, this method writes
    the weights and the config. The weights and buffers of other models are written as safetensors. Tied tensors are
    written once.
    """
    remove_temporary(folder.parent, folder.name)
    with directory_replaced_atomically(folder) as aside:
        write_model(model, aside)


def write_model(model: nn.Module, folder: Path) -> None:
    """Write the same files as `save_model` to an existing folder."""
    model = uncompiled(model)
    if hasattr(model, "save_pretrained"):
        save: Any = model.save_pretrained
        save(folder)
    else:
        safetensors.torch.save_model(model, str(folder / WEIGHTS))


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Load `state`, the weights of the checkpoint at `path`, into `model`.

    `state` may contain sharded weights as flat vectors, and contains tied weights only under their first name.

    Raises:
        ConfigError: If the weights do not fit `model`.
    """
    model = uncompiled(model)
    whole = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(whole.items())}
    found = dict(state)
    for name, tensor in whole.items():
        value = state.get(name, state.get(first[id(tensor)]))
        if value is not None:
            is_flat = value.dim() == 1 and value.numel() == tensor.numel()
            found[name] = value.view(tensor.shape) if is_flat else value
    with _weights_must_fit(path):
        model.load_state_dict(found)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load weights into `model` from a `folder` that `save_model` wrote.

    Raises:
        ConfigError: If `folder` does not contain weights, or if the weights do not fit `model`.
    """
    path, model = folder / WEIGHTS, uncompiled(model)
    if not path.is_file():
        raise ConfigError(
            f"{folder} must be a model folder, but does not contain {WEIGHTS}. Pass the folder of a saved model"
        )
    with _weights_must_fit(path):
        safetensors.torch.load_model(model, path)


@contextmanager
def _weights_must_fit(path: Path) -> Iterator[None]:
    """Convert the error that torch or safetensors raises for mismatched weights to a `ConfigError`."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(f"the weights in {path} do not match the model: {' '.join(str(error).split())}") from None
