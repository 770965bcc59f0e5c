"""Split a model into stages that begin at named modules.

    split_into_stages(model, ["blocks.2"])     # a GPT of four blocks: stage 1 begins with block 2

The model must be a chain, in which each module takes only the output tensor of the previous module. An `nn.Sequential`
that does not override `forward` is a chain. Any other model must define a `chain()` method that returns its modules by
name, as `training.gpt` does. Models with skip connections across a stage boundary, such as a U-Net, are not supported.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddp_tutorial.config import ConfigError, did_you_mean


class Stage(nn.Module):
    """Consecutive modules of a chain. The first stage takes the inputs of the model."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Store the modules, by name, in the order of the chain."""
        super().__init__()
        self.names = list(modules)
        self.parts = nn.ModuleList(modules.values())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the modules in order."""
        first, *others = self.parts
        x = first(*inputs, **named)
        for part in others:
            x = part(x)
        return x


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def writable(x: torch.Tensor) -> torch.Tensor:
    """Return an alias of `x` that an in-place module, such as `nn.ReLU(inplace=True)`, may modify.

    PyTorch does not allow in-place changes of a leaf tensor that requires a gradient.
    """
    alias: torch.Tensor = _Alias.apply(x)
    return alias


def chain_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a dict of the model's modules by name. Each module takes the output of the previous module.

    Raises:
        ConfigError: If the model has no `chain` method and is not an `nn.Sequential` with the default `forward`.
    """
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        modules = model.named_modules(remove_duplicate=False)  # a module may occur several times
        return {name: module for name, module in modules if name and "." not in name}
    chain = getattr(model, "chain", None)
    if chain is None:
        raise ConfigError(
            f"{type(model).__name__} cannot be split into stages. It must be an nn.Sequential that does not override "
            "forward(), or define a chain() method that returns its modules by name in forward-pass order."
        )
    parts: dict[str, nn.Module] = chain()
    return parts


def split_into_stages(model: nn.Module, names: Sequence[str]) -> list[Stage]:
    """Split `model` into stages that share the model's parameters.

    `names` contains the name of the first module in each stage except stage 0.

    Raises:
        ConfigError: If the chain has no module with a given name, or if the names are not in the order of the chain.
    """
    chain = chain_of(model)
    known = list(chain)
    begins = [0]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"a stage must begin at a module of the model, got {name!r}.{did_you_mean(name, known)} The modules "
                f"are {', '.join(known)}"
            )
        begins.append(known.index(name))
        if begins[-1] <= begins[-2]:
            raise ConfigError(
                f"each stage must begin at a later module than the previous stage, got {name!r}. The modules in order "
                f"are {', '.join(known)}"
            )
    ends = [*begins[1:], len(known)]
    return [Stage({name: chain[name] for name in known[a:b]}) for a, b in zip(begins, ends, strict=True)]


def even_splits(model: nn.Module, stages: int) -> list[str]:
    """Return the names of the modules at which to split `model` so that the largest stage is as small as possible.

    Raises:
        ConfigError: If there are more stages than modules.
    """
    chain = chain_of(model)
    return splits_of({name: sum(p.numel() for p in module.parameters()) for name, module in chain.items()}, stages)


def splits_of(costs: Mapping[str, float], stages: int) -> list[str]:
    """Return the names of the modules at which to split a chain, given the modules' costs in chain order.

    Raises:
        ConfigError: If there are more stages than modules.
    """
    if stages > len(costs):
        raise ConfigError(
            f"{stages} stages require at least {stages} modules, got {len(costs)}: {', '.join(costs)}. Use fewer stages"
        )
    names = list(costs)
    return [names[first] for first in balance(list(costs.values()), stages)]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Minimize the largest stage cost, and return the index of the first module in each stage except stage 0.

    No stage is empty.
    """
    count = len(costs)
    sums = [sum(costs[:j]) for j in range(count + 1)]
    # best[k][j]: the minimal largest stage cost for the first j modules in k stages, and the last stage's first module
    best: list[list[tuple[float, int]]] = [[(0.0 if j == 0 else float("inf"), 0) for j in range(count + 1)]]
    for k in range(1, stages + 1):
        row = [(float("inf"), 0)] * k
        row += [min((max(best[-1][i][0], sums[j] - sums[i]), i) for i in range(k - 1, j)) for j in range(k, count + 1)]
        best.append(row)
    begins, end = [], count
    for k in range(stages, 1, -1):
        end = best[k][end][1]
        begins.append(end)
    return begins[::-1]
