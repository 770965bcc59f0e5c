"""Which parameters are gathered together."""

from collections import Counter

from torch import nn


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are gathered one at a time, by name, the model itself last, as "".

    They are the members of the outermost `ModuleList`s and `Sequential`s that have parameters and share none with the
    rest of the model. What is in none of them belongs to the model itself.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    units: dict[str, nn.Module] = {}

    def look(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            inside = Counter(id(p) for _, p in child.named_parameters(remove_duplicate=False))
            is_own = inside and all(uses[each] == count for each, count in inside.items())
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and is_own:
                units[prefix + name] = child
            else:
                look(child, f"{prefix}{name}.")

    look(model, "")
    return units | {"": model}
