"""Check that the ranks have the same state where they must."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.collectives import all_gather, digest, first_difference
from ddp_tutorial.world import World

Check = Literal["none", "quick", "tensor", "full"]


def assert_replicated(world: World, name: str, state: Any, span: int, check: Check) -> None:
    """Raise `CheckpointError`, on all ranks, if `state` is not the same on each group of `span` consecutive ranks.

    Collective. `what` is the component's name, for the message. `check` is "quick" (names, shapes, dtypes, and values
    that are no tensors), "tensor" (also a hash of every tensor, however deep) or "full" (ranks exchange and compare all
    bytes, for those who do not trust a hash). A state without any value is an error: a check of it would always pass.
    """
    values = dict(named_leaves(name, state))
    mine = {name: summary(value, check) for name, value in values.items()}
    seen = all_gather(world, mine)
    if not any(seen):
        raise CheckpointError(f"{name!r} has no value to compare between ranks")
    for first in range(0, world.size, span):
        if found := first_difference(seen[first : first + span], first):
            raise CheckpointError(f"{found[0]} is not the same on all ranks: {found[1]}")


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value inside nested dicts, lists and tuples, with its path: "optimizer['state'][0]['exp_avg']", tensor."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_leaves(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from named_leaves(f"{name}[{place}]", inner)
    else:
        yield name, value


def summary(value: Any, check: Check) -> Any:
    """What stands for `value` in a comparison: equal for values that `check` takes for the same."""
    if not isinstance(value, torch.Tensor):
        return repr(value)  # so that NaN equals NaN
    kind = (tuple(value.shape), str(value.dtype))
    if check == "quick":
        return kind
    if check == "full":
        return kind, value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return kind, digest({"": value})
