"""Save and load a model's weights, in a format that executes no code when it is loaded."""

from collections.abc import Mapping
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
    """Write `model` to `folder`. An earlier model there is replaced once the new one is on the disk.

    A model with `save_pretrained`, such as Hugging Face's models and our GPT, is written by that method, which also
    stores its config. The weights and buffers of any other model are written as safetensors, tied tensors only once.
    """
    remove_temporary(folder.parent, folder.name)
    with directory_replaced_atomically(folder) as aside:
        write_model(model, aside)


def write_model(model: nn.Module, folder: Path) -> None:
    """Write the files of `save_model` to an existing folder."""
    model = uncompiled(model)
    if hasattr(model, "save_pretrained"):
        save: Any = model.save_pretrained
        save(folder)
    else:
        safetensors.torch.save_model(model, str(folder / WEIGHTS))


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the weights of a checkpoint into `model`, which has the same architecture.

    Weights that were sharded may be flat vectors in `state`, and tied weights occur only under their first name.
    """
    model = uncompiled(model)
    first = {id(tensor): name for name, tensor in reversed(list(model.state_dict(keep_vars=True).items()))}
    whole = model.state_dict(keep_vars=True)
    found = {name: state[name if name in state else first[id(tensor)]] for name, tensor in whole.items()}
    model.load_state_dict({name: tensor.view(whole[name].shape) for name, tensor in found.items()})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load weights that `save_model` wrote into `model`.

    Raises:
        ConfigError: If `folder` has no weights, or if they do not fit `model`.
    """
    path, model = folder / WEIGHTS, uncompiled(model)
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}, so it is not the folder of a model")
    try:
        safetensors.torch.load_model(model, path)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {' '.join(str(error).split())}") from None
