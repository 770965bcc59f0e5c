"""Compare each collective across ranks before the collective runs, because a mismatch can cause wrong results.

    with fingerprinted(world):
        train(world)

    CollectiveError: the ranks pass different tensors to the same all_reduce. Rank 0 waits in all_reduce [5] float (File
    "train.py", line 5, in step); rank 1 waits in all_reduce [3] float (File "train.py", line 5, in step).

Before each collective, a rank writes a fingerprint to the shared store. The fingerprint contains the operation, the
tensor sizes and dtypes, the root rank and the calling line. The rank then compares its fingerprint with the
fingerprints that other ranks have already written. No rank waits for this comparison. No collective completes on all
ranks before the last rank enters it, and the last rank sees all other fingerprints.

PyTorch's TORCH_DISTRIBUTED_DEBUG=DETAIL also compares collectives, but does not report source lines. With PyTorch 2.13,
gloo and `DistributedDataParallel`, TORCH_DISTRIBUTED_DEBUG=DETAIL causes a segmentation fault.
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

_KEPT = 2  # number of earlier collectives in a fingerprint, for the table in the error message
_OLD = 100  # number of collectives after which a fingerprint is deleted
_ONE_TO_ONE = {"send", "recv_", "recv_any_source_"}
# Operators that have a different name in PyTorch's flight recorder.
_NAMES = {"allreduce_": "all_reduce", "allgather_": "all_gather", "_allgather_base_": "_all_gather_base"}

_INPUTS = {"tensor", "tensors", "input", "input_tensor", "input_tensors"}  # argument names in PyTorch's schemas

_blocks = itertools.count()


@contextmanager
def fingerprinted(world: World) -> Iterator[None]:
    """Check, before each collective in this thread, that all ranks enter the same collective.

    The check includes the collectives that `DistributedDataParallel` starts in the backward pass. All ranks must enter
    the context at the same point in the program. Use the context for debugging only, because every PyTorch operation
    passes through Python, and each collective accesses the store. Inside the context, compiled models run in eager
    mode. Functional collectives, such as those of a DTensor, are not checked.

    Raises:
        CollectiveError: If this rank is the last to enter a mismatched collective. The other ranks wait until `launch`
            terminates them.
    """
    require_group(world)
    if world.size == 1:
        yield
        return
    # PyTorch does not compile under a dispatch mode, and raises an error with fullgraph=True.
    with torch.compiler.set_stance("force_eager"), _Fingerprints(world, next(_blocks)):
        yield


class _Fingerprints(TorchDispatchMode):
    """Dispatch mode that intercepts this thread's PyTorch operations. Collectives belong to the c10d namespace."""

    def __init__(self, world: World, block: int) -> None:
        """Connect to the store. `block` is this block's sequence number, which must be the same on all ranks."""
        super().__init__()
        self._world = world
        store: Any = default_store()  # PyTorch's stubs lack `clone`
        self._store = dist.PrefixStore(f"fingerprints {block}", store.clone())
        self._calls: dict[str, deque[Call]] = defaultdict(lambda: deque(maxlen=_KEPT))  # group -> its last collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation. If the operation is a collective, first compare it across ranks."""
        if func.namespace == "c10d" and func.overloadpacket.__name__ not in _ONE_TO_ONE:
            named = dict(zip(argument_names(func), args, strict=False))
            group = dist.ProcessGroup.unbox(named["process_group"])
            call = self._call(group.group_name, func.overloadpacket.__name__, named, lines_of(sys._getframe(1)))
            self._compare(call, dist.get_process_group_ranks(group))
        return func(*args, **(kwargs or {}))

    def _call(self, group: str, name: str, arguments: Mapping[str, Any], lines: tuple[Line, ...]) -> Call:
        """Return the collective that this rank is about to enter."""
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
        """Publish `call`, and raise `CollectiveError` if another rank has already published a different collective."""
        before = self._calls[call.group]
        mine = RankStatus((*before, call))
        key = f"{call.group} {call.number}"
        self._store.set(f"{key} {self._world.rank}", as_json.dump_json(mine).decode())
        here = [rank for rank in ranks if rank == self._world.rank or self._store.check([f"{key} {rank}"])]
        statuses = {rank: as_json.validate_json(self._store.get(f"{key} {rank}")) for rank in here}
        found = diagnose(statuses)
        if found.kind in {"order", "shape"}:
            raise CollectiveError(str(found))
        before.append(replace(call, done=True))
        self._store.delete_key(f"{call.group} {call.number - _OLD} {self._world.rank}")
