"""Select the parameters that are gathered together."""

from collections import Counter

from torch import nn


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the units of `model` by name. The last unit is the model itself, under the name "".

    A member of an outermost `ModuleList` or `Sequential` is a unit if it has parameters and does not share them with
    the rest of the model. All other parameters belong to the unit of the model itself.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    units: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            inside = Counter(id(p) for _, p in child.named_parameters(remove_duplicate=False))
            is_own = inside and all(uses[each] == count for each, count in inside.items())
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and is_own:
                units[prefix + name] = child
            else:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return units | {"": model}
