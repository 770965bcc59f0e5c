"""Have the ranks the same state where they should? And `agreed`: where one rank fails, all raise."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.collectives import all_gather, digest, first_difference
from ddp_tutorial.world import World

Check = Literal["none", "quick", "tensor", "full"]


def assert_replicated(world: World, what: str, state: Any, span: int, check: Check) -> None:
    """Raise `CheckpointError`, on all ranks, if `state` is not the same on each group of `span` consecutive ranks.

    Collective. `what` is the component's name, for the message. `check` is "quick" (names, shapes, dtypes, and values
    that are no tensors), "tensor" (also a hash of every tensor, however deep) or "full" (ranks exchange and compare all
    bytes, for those who do not trust a hash). A state without any value is an error: a check of it would always pass.
    """
    values = dict(leaves(what, state))
    mine = {name: summary(value, check) for name, value in values.items()}
    seen = all_gather(world, mine)
    if not any(seen):
        raise CheckpointError(f"{what!r} has no value to compare between ranks")
    for first in range(0, world.size, span):
        if found := first_difference(seen[first : first + span], first):
            raise CheckpointError(f"{found[0]} is not the same on all ranks: {found[1]}")


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value inside nested dicts, lists and tuples, with its path: "optimizer['state'][0]['exp_avg']", tensor."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from leaves(f"{name}[{place}]", inner)
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


def agreed(world: World, work: Callable[[], Any]) -> Any:
    """Run `work` on every rank and return its result, if it succeeded on all of them. Collective.

    If it raised on some rank, raises `CheckpointError` on all ranks, with the ranks and their errors in the message.
    """
    result, problem = None, None
    try:
        result = work()
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = all_gather(world, problem)
    if len(set(problems)) == 1 and problems[0]:
        raise CheckpointError(problems[0])
    if told := "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(problems) if each):
        raise CheckpointError(told)
    return result
