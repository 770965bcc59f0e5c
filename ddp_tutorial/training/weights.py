"""A model's weights in a folder that cannot execute anything when it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import directory_replaced_atomically, remove_temporary

WEIGHTS = "model.safetensors"


def save_model(model: nn.Module, folder: Path) -> None:
    """Write `model` into `folder`, in place of an earlier one there, which stays until the new one is on the disk.

    A model with `save_pretrained`, as Hugging Face's and our GPT have it, writes what it takes to load it without its
    code's arguments; of any other it is the weights and buffers, as safetensors, tied ones once.
    """
    remove_temporary(folder.parent, folder.name)
    with directory_replaced_atomically(folder) as aside:
        write_model(model, aside)


def write_model(model: nn.Module, folder: Path) -> None:
    """The files of `save_model`, into a folder that is there."""
    if hasattr(model, "save_pretrained"):
        save: Any = model.save_pretrained
        save(folder)
    else:
        safetensors.torch.save_model(model, str(folder / WEIGHTS))


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Put the weights of a checkpoint into `model`, of the same architecture.

    Those that were sharded are vectors there, and a tied one is there by its first name only.
    """
    first = {id(tensor): name for name, tensor in reversed(list(model.state_dict(keep_vars=True).items()))}
    whole = model.state_dict(keep_vars=True)
    found = {name: state[name if name in state else first[id(tensor)]] for name, tensor in whole.items()}
    model.load_state_dict({name: tensor.view(whole[name].shape) for name, tensor in found.items()})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put weights that `save_model` has written into `model`.

    Raises `ConfigError` where there are none, and where they are those of another model.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}: is it the folder of a model?")
    try:
        safetensors.torch.load_model(model, path)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {' '.join(str(error).split())}") from None
