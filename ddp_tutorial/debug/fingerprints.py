"""Collectives that do not fit together, noticed before they run: after that, some ranks may have a wrong sum already.

    with fingerprinted(world):
        train(world)

    CollectiveError: the ranks bring different tensors to one all_reduce. Rank 0 waits in all_reduce [5] float (File
    "train.py", line 5, in step); rank 1 waits in all_reduce [3] float (File "train.py", line 5, in step).

What a rank is about to enter - operation, sizes, types, root, and the line it is called from - it writes to the store
that all ranks share, and then it looks at what the others have written there. No rank has to wait for that: a
collective ends when the last rank has entered it, and the last one sees the fingerprints of all others.

torch's own TORCH_DISTRIBUTED_DEBUG=DETAIL compares too, and names no lines. With torch 2.13, gloo and
`DistributedDataParallel` it ends in a segmentation fault.
"""

import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.compat import TorchDispatchMode, argument_names, default_store, tree_leaves
from ddp_tutorial.debug.hangs import CollectiveError, RankStatus, as_json, diagnose
from ddp_tutorial.debug.recorder import Call, Line, lines_of
from ddp_tutorial.world import World, require_group

_KEPT = 2  # collectives before it that a fingerprint has with it, for the table
_OLD = 100  # collectives after which nobody asks for a fingerprint any more
_ONE_TO_ONE = {"send", "recv_", "recv_any_source_"}
# The names that torch's flight recorder has for them.
_NAMES = {"allreduce_": "all_reduce", "allgather_": "all_gather", "_allgather_base_": "_all_gather_base"}

_INPUTS = {"tensor", "tensors", "input", "input_tensor", "input_tensors"}  # as torch's schemas call them

_blocks = itertools.count()


@contextmanager
def fingerprinted(world: World) -> Iterator[None]:
    """Inside, each collective of this thread is compared with what the other ranks have entered, before it begins;
    also those that `DistributedDataParallel` starts in backward. All ranks enter it at the same place.

    Raises `CollectiveError` in the last rank to come where they differ; the others wait for it, and end with the
    launch. For debugging: every operation of torch passes through Python, and a collective asks the store.
    """
    require_group(world)
    if world.size == 1:
        yield
        return
    with _Fingerprints(world, next(_blocks)):
        yield


class _Fingerprints(TorchDispatchMode):
    """Sees every operation of torch in this thread; collectives are operations too, in the namespace c10d."""

    def __init__(self, world: World, block: int) -> None:
        super().__init__()
        self._world = world
        store: Any = default_store()  # torch's stubs do not know clone
        self._store = dist.PrefixStore(f"fingerprints {block}", store.clone())
        self._calls: dict[str, deque[Call]] = defaultdict(lambda: deque(maxlen=_KEPT))  # by group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ not in _ONE_TO_ONE:
            named = dict(zip(argument_names(func), args, strict=False))
            group = dist.ProcessGroup.unbox(named["process_group"])
            call = self._call(group.group_name, func.overloadpacket.__name__, named, lines_of(sys._getframe(1)))
            self._compare(call, dist.get_process_group_ranks(group))
        return func(*args, **(kwargs or {}))

    def _call(self, group: str, name: str, arguments: Mapping[str, Any], lines: tuple[Line, ...]) -> Call:
        """What this rank is about to enter."""
        op = _NAMES.get(name, name.strip("_"))
        if "root_rank" in arguments:
            op += f" from {arguments['root_rank']}"
        inputs = [value for key, value in arguments.items() if key in _INPUTS]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        before = self._calls[group]
        return Call(group, before[-1].number + 1 if before else 1, op, sizes, dtypes, lines, done=False)

    def _compare(self, call: Call, ranks: Sequence[int]) -> None:
        """Tell the others; raise if what one of them has told about the same collective is something else."""
        before = self._calls[call.group]
        mine = RankStatus((*before, call))
        key = f"{call.group} {call.number}"
        self._store.set(f"{key} {self._world.rank}", as_json.dump_json(mine).decode())
        here = [rank for rank in ranks if rank == self._world.rank or self._store.check([f"{key} {rank}"])]
        told = {rank: as_json.validate_json(self._store.get(f"{key} {rank}")) for rank in here}
        found = diagnose(told)
        if found.kind in {"order", "shape"}:
            raise CollectiveError(str(found))
        before.append(replace(call, done=True))
        self._store.delete_key(f"{call.group} {call.number - _OLD} {self._world.rank}")
