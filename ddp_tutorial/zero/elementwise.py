"""Test whether an optimizer updates each element of a parameter independently of the other elements.

Only an elementwise optimizer can update a flat shard of a parameter. SGD and Adam are elementwise. Adafactor and Muon
are not elementwise, because they use the parameter's shape. LAMB is not elementwise, because it uses a norm. No
optimizer attribute describes this property, so a trial updates a parameter as a whole and in two shards.
"""

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ddp_tutorial.compat import remove_step_hooks
from ddp_tutorial.config import ConfigError

_SHAPE, _CUT, _STEPS = (4, 6), 13, 3


def require_elementwise(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raise `ConfigError` if the update of an element depends on other elements of the same parameter."""
    if not is_elementwise(optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"strategy={strategy} updates a flat shard of each parameter on each rank, so the optimizer must update "
            f"each element independently. In a trial, {kind} did not update a matrix and its flat shards in the "
            f"same way. Use {kind} with strategy=zero1, which does not split parameters, or with strategy=ddp"
        )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether copies of `optimizer` update the flat shards of a matrix in the same way as the full matrix."""
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(1 + _STEPS, *_SHAPE, generator=generator)  # the weights, and a gradient for each step
    flat = tensors.flatten(1)
    try:
        with torch.random.fork_rng(devices=[]):
            whole, first, last = (_stepped(optimizer, each) for each in (tensors, flat[:, :_CUT], flat[:, _CUT:]))
            torch.testing.assert_close(torch.cat([first, last], dim=1), whole)
    except Exception:  # for example, Muon raises an error if a parameter is not a matrix
        return False
    return True


def _stepped(optimizer: torch.optim.Optimizer, tensors: torch.Tensor) -> torch.Tensor:
    """Return the weights after `_STEPS` steps of a copy of `optimizer`, as one flat row per parameter group."""
    copy, parameters = _copy(optimizer, tensors[0])
    for gradient in tensors[1:]:
        for parameter in parameters:
            parameter.grad = gradient.to(parameter)
        copy.step()
    return torch.stack([parameter.detach().flatten() for parameter in parameters])


def _copy(optimizer: torch.optim.Optimizer, weights: torch.Tensor) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Return a copy of `optimizer` with one parameter per nonempty group, and the list of these parameters.

    Each parameter is initialized to `weights`.
    """
    copy = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): copy}
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    parameters = []
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        first = group["params"][0]
        parameters.append(nn.Parameter(weights.to(first.device, first.dtype, copy=True)))
        memo |= {id(each): parameters[-1] for each in group["params"]}
        for key, value in optimizer.state.get(first, {}).items():  # Adagrad has state before its first step
            is_filled = key != "step" and torch.is_tensor(value) and value.numel()
            state[parameters[-1]][key] = torch.full_like(weights, value.flatten()[0]) if is_filled else deepcopy(value)
    attributes = {name: value for name, value in vars(optimizer).items() if name not in {"state", "step"}}
    vars(copy).update(deepcopy(attributes, memo), state=state)
    remove_step_hooks(copy)
    copy.param_groups = [group for group in copy.param_groups if group["params"]]
    for group, parameter in zip(copy.param_groups, parameters, strict=True):
        group["params"] = [parameter]
        if "lr" in group:  # the learning rate may be 0 at the start of a warm-up
            group["lr"] = group["lr"] * 0 + 0.1
    return copy, parameters
