"""Cut a model into stages, by the names of the modules with which they begin.

    cut(model, ["blocks.2"])     # a GPT of four blocks: stage 0 ends with block 1, stage 1 begins with block 2

What can be cut is a chain: modules of which each takes one tensor, which the one before gives. An `nn.Sequential` is
one. Any other model says what its chain is, by a method `chain()` that returns its modules by name, as `training.gpt`
has it. What skips over a cut (a U-Net's long connections) does not fit in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ddp_tutorial.config import ConfigError, did_you_mean


class Stage(nn.Module):
    """Some modules of a chain, one after another; the first takes whatever the model does."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = list(modules)
        self.parts = nn.ModuleList(modules.values())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        first, *others = self.parts
        x = first(*inputs, **named)
        for part in others:
            x = part(x)
        return x


def chain_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by name, of which each takes what the one before gives. Raises `ConfigError` for a model
    that is no `nn.Sequential` and has no method `chain`."""
    if isinstance(model, nn.Sequential):
        return dict(model.named_children())
    chain = getattr(model, "chain", None)
    if chain is None:
        raise ConfigError(
            f"a {type(model).__name__} cannot be cut into stages: it is no nn.Sequential, and has no method chain() "
            "that returns its modules by name, in the order in which each takes what the one before gives"
        )
    parts: dict[str, nn.Module] = chain()
    return parts


def split_into_stages(model: nn.Module, names: Sequence[str]) -> list[Stage]:
    """The stages of `model`: one more than there are names, of the module with which each but the first begins.

    The stages share the model's parameters. Raises `ConfigError` for a name that is no module of the chain, or is not
    after the one before.
    """
    chain = chain_of(model)
    known = list(chain)
    begins = [0]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no module of the chain is called {name!r}, to begin a stage with.{did_you_mean(name, known)} It has "
                f"{', '.join(known)}"
            )
        begins.append(known.index(name))
        if begins[-1] <= begins[-2]:
            raise ConfigError(
                f"a stage that begins with {name!r} would be empty, or come before the one before; modules come in the "
                f"order {', '.join(known)}"
            )
    ends = [*begins[1:], len(known)]
    return [Stage({name: chain[name] for name in known[a:b]}) for a, b in zip(begins, ends, strict=True)]


def even_splits(model: nn.Module, stages: int) -> list[str]:
    """Where to cut so that the stage with the most parameters has as few as possible. Raises `ConfigError` for more
    stages than modules."""
    chain = chain_of(model)
    if stages > len(chain):
        raise ConfigError(
            f"{stages} stages, and only {len(chain)} modules to cut between: {', '.join(chain)}. Use fewer stages"
        )
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in chain.values()]
    names = list(chain)
    return [names[first] for first in balance(sizes, stages)]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Where each stage but the first begins, so that the dearest one costs as little as possible; none is empty.

    best[k][j] is the cost of the dearest stage when the first j modules are cut into k stages.
    """
    count = len(costs)
    sums = [sum(costs[:j]) for j in range(count + 1)]
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
