"""Check that replicated state is identical on all ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddp_tutorial.checkpoint.config import Check
from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.collectives import all_gather, digest, first_difference
from ddp_tutorial.world import World


def assert_replicated(world: World, name: str, state: Any, span: int, check: Check) -> None:
    """Raise an error on all ranks if `state` differs within a group of consecutive ranks. Collective.

    Args:
        world: The ranks to compare.
        name: The name of the component, for the error message.
        state: The state of this rank.
        span: The number of ranks in a group. Only ranks in the same group are compared.
        check: `"quick"` compares names, shapes, dtypes, and values that are not tensors. `"tensor"` also compares a
            hash of every tensor. `"full"` compares all bytes of every tensor, without relying on a hash.

    Raises:
        CheckpointError: If the state differs between ranks, or is empty on all ranks. An empty state would always pass
            the check.
    """
    values = dict(named_leaves(name, state))
    mine = {name: summary(value, check) for name, value in values.items()}
    seen = all_gather(world, mine)
    if not any(seen):
        raise CheckpointError(f"component {name!r} contains no values to compare between ranks")
    for first in range(0, world.size, span):
        if found := first_difference(seen[first : first + span], first):
            raise CheckpointError(f"{found[0]} is not the same on all ranks: {found[1]}")


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf in nested dicts, lists, and tuples.

    A path looks like `optimizer['state'][0]['exp_avg']`.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_leaves(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from named_leaves(f"{name}[{place}]", inner)
    else:
        yield name, value


def summary(value: Any, check: Check) -> Any:
    """Return a picklable summary of `value`.

    If two summaries are equal, the values agree in all properties that `check` compares.
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)  # NaN must equal NaN
    kind = (tuple(value.shape), str(value.dtype))
    if check == "quick":
        return kind
    if check == "full":
        return kind, value.detach().cpu().to_dense().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return kind, digest({"": value})
