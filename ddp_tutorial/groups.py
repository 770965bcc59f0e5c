"""Create process groups that contain a subset of the ranks."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ddp_tutorial.world import World, require_group


def group_of(groups: Sequence[Sequence[int]], world: World, purpose: str = "mesh") -> Any:
    """Return this rank's process group among `groups`, or None if no group contains this rank. Collective.

    Every rank of the world must pass the complete list of groups. Two calls with the same groups and purpose return the
    same group. Use different purposes for collectives whose relative order may differ between ranks.
    """
    require_group(world)
    mine = None
    for ranks in groups if world.size > 1 else ():
        group = shared_group(ranks, purpose, backend=world.backend, timeout=world.timeout)
        if world.rank in ranks:
            mine = group
    return mine


_shared_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Any]] = WeakKeyDictionary()


def shared_group(ranks: Sequence[int], purpose: str, **options: Any) -> Any:
    """Return the process group of `ranks` for `purpose`. The first call creates the group. Collective.

    Models share groups, because each gloo group requires its own threads and sockets. The groups are destroyed together
    with the default group. `ranks` contains ranks of the default group, and `purpose` distinguishes groups with the
    same ranks. `options` are keyword arguments for `torch.distributed.new_group`.
    """
    default = dist.group.WORLD
    assert default is not None, "shared_group requires a default process group"
    groups = _shared_groups.setdefault(default, {})
    key = (purpose, *ranks)
    if key not in groups:
        groups[key] = dist.new_group(list(ranks), **options)
    return groups[key]
