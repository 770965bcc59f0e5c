"""Private APIs of PyTorch and the standard library that the package uses, and names that differ between versions.

No other module of the package uses a private API of a library, so that a new PyTorch version can break this file only.
Each entry states why the private API is necessary and, where there is one, the public fallback to replace it with if
PyTorch removes it. All were tested with torch 2.13.0, by `tests/test_compat.py`.
"""

import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.variable import Variable

# A dispatch mode is documented, but its only import path is private. Fallback: none.
from torch.utils._python_dispatch import TorchDispatchMode

# Nested dicts, lists, tuples, named tuples and registered classes, as `default_collate` and `fully_shard` traverse
# them. PyTorch has no public module for it. Fallback: the package `optree`.
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

# The base class of the iterators of `DataLoader`. A patch of its `__next__` observes each wait for a batch, also of
# loaders that already exist. Fallback: patch `DataLoader.__iter__`, which misses those.
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = [
    "DataLoaderIterator",
    "TorchDispatchMode",
    "abort_process_group",
    "after_backward",
    "argument_names",
    "current_backward",
    "default_store",
    "flight_record",
    "forward_sync_buffers",
    "group_ranks",
    "hidden_worker_info",
    "import_dynamo",
    "inspection_text",
    "is_compiled",
    "is_in_backward",
    "is_profiling",
    "multiply_",
    "norms",
    "remove_step_hooks",
    "shutdown_workers",
    "sparse_values",
    "stop_forkserver",
    "storage_id",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "uncompiled",
    "worker_processes",
]


# --------------------------------------------------------------------------------------------------------- autograd


def current_backward() -> int | None:
    """Return the number of the backward pass that autograd is running in this thread, or None.

    Each backward pass has another number, also one that a reentrant activation checkpoint runs inside another.

    PyTorch has no public function for this. `torch.utils.checkpoint` uses the same private one. Fallback: none.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def is_in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread, for example to recompute activations."""
    return current_backward() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running has finished. A pass that raises does not call it.

    PyTorch has no public function for this. `fully_shard` uses the same private one. Fallback: none.
    """
    Variable._execution_engine.queue_callback(callback)


def is_profiling() -> bool:
    """Return whether a profiler records this thread.

    `record_function` is public, but it takes about 50 microseconds even if no profiler is running. Fallback: return
    True.
    """
    return torch.autograd._profiler_enabled()


# ----------------------------------------------------------------------------------- tensors, optimizers, operators


def multiply_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each of `tensors` by `factor`, in place.

    On a GPU, a loop of `mul_` starts one kernel for each tensor. The public functions, such as `clip_grad_norm_`,
    cannot multiply by an arbitrary factor. Fallback: that loop.
    """
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each of `tensors`.

    On a GPU, a loop of `vector_norm` starts one kernel for each tensor. `get_total_norm` is public, but returns only
    the norm of all tensors together. Fallback: that loop.
    """
    return list(torch._foreach_norm(list(tensors)))


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, with duplicate indices as they are.

    `values` is public, but it requires `coalesce`, which copies the tensor. Fallback: `tensor.coalesce().values()`.
    """
    return tensor._values()


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of `tensor` among all storages that are alive.

    `data_ptr` is public, but it is 0 for all tensors on the meta device. Fallback: `data_ptr`.
    """
    return int(tensor.untyped_storage()._cdata)


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments, such as those of the `func` of a dispatch mode.

    Operators have no public schema. Fallback: parse `str(operator)`.
    """
    return [argument.name for argument in operator._schema.arguments]


def remove_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Remove all hooks before and after `step` from `optimizer`.

    The handle of a hook is public, but only for the caller that has registered the hook. Fallback: none.
    """
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was applied to `module` or to a module inside it.

    PyTorch has no public function for it. Fallback: False.
    """
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in module.modules())


def uncompiled(module: nn.Module) -> nn.Module:
    """Return `module` with each `torch.compile(...)` wrapper replaced by the wrapped module.

    A module that was inside a wrapper compiles its own calls, as after `module.compile(...)`, with the options of the
    wrapper. The names of the parameters then do not contain `_orig_mod`. A wrapper publishes neither its module nor its
    options. Fallback: require `module.compile(...)` instead.
    """
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and name != "_orig_mod":
                part._modules[name] = _unwrapped(child)
    return _unwrapped(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    original = module._modules.get("_orig_mod")
    if original is None:
        return module
    if original._compiled_call_impl is None:
        wrapper, call = cast("Any", module), original._call_impl
        # PyTorch does not compile a frame of its own files: without the function, nn.Sequential would not be compiled.
        original._compiled_call_impl = wrapper.dynamo_ctx(lambda *inputs, **named: call(*inputs, **named))  # noqa: PLW0108
    return original


# -------------------------------------------------------------------------------------------------------- distributed


def default_store() -> dist.Store:
    """Return the store of the default process group. Requires a process group.

    The store is public only for a caller that has created it, and `init_process_group` or torchrun usually does.
    Fallback: create a `TCPStore` on rank 0 and broadcast its address.
    """
    return dist.distributed_c10d._get_default_store()


def group_ranks() -> dict[str, list[int]]:
    """Return the global ranks of each process group that this rank belongs to, by the name of the group.

    `get_process_group_ranks` is public, but the list of groups is not. Fallback: the default process group only.
    """
    world = dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def abort_process_group() -> None:
    """Abort the running collectives of all process groups, and destroy the groups.

    `destroy_process_group` is public, but NCCL waits in it for collectives that a failed rank never joins. Fallback:
    exit the process.
    """
    dist.distributed_c10d._abort_process_group()


def forward_sync_buffers(*, enabled: bool) -> dict[str, Any]:
    """Return the argument of `DistributedDataParallel` that enables the broadcast of buffers in the forward pass.

    PyTorch 2.13 renamed it, and warns of the old name.
    """
    parameters = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": enabled}


def flight_record(*, entries: bool = True, stacks: bool = True) -> dict[str, Any]:
    """Return the record of PyTorch's flight recorder in this process. Requires a process group.

    The record is public only as a file, which PyTorch writes when a collective of NCCL times out. Fallback:
    an empty dict; hang reports then lack the collectives.

    Args:
        entries: Include the last collectives, under "entries".
        stacks: Include the Python stack of each collective.

    Returns:
        The content of that file. "pg_status" contains the last collective of each process group.
    """
    name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name)
    record: dict[str, Any] = pickle.loads(dump(entries, entries and stacks, False))  # False: with completed ones
    return record


# ---------------------------------------------------------------------------------------------------------- processes


def import_dynamo() -> None:
    """Import `torch._dynamo` now.

    DistributedDataParallel and the first optimizer of a process import it, which takes seconds. If a process group
    exists at that time, the module keeps the group alive. No public function only imports it. Fallback: do nothing.
    """
    import torch._dynamo  # noqa: F401


def stop_forkserver() -> None:
    """Stop the server process of `multiprocessing.forkserver`.

    The public API stops it only when this process exits. Fallback: do nothing.
    """
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    server._stop()


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info` return None inside the block.

    Datasets that read it, such as those of Hugging Face, would otherwise split the rows among the workers a second
    time. `get_worker_info` is public, but there is no public function that resets it. Fallback: require that
    `num_workers` is 0.
    """
    module = torch.utils.data._utils.worker
    info, module._worker_info = module._worker_info, None
    try:
        yield
    finally:
        module._worker_info = info


def worker_processes(iterator: Any) -> list["BaseProcess"]:
    """Return the worker processes of an iterator of a `DataLoader` with `num_workers` > 0.

    The public API reports a dead worker only in the message of an error. Fallback: `multiprocessing.active_children`.
    """
    return list(iterator._workers)


def shutdown_workers(iterator: Any) -> None:
    """Stop the workers of an iterator of a `DataLoader` now.

    The public API stops them when the iterator is garbage-collected. Fallback: terminate the processes.
    """
    iterator._shutdown_workers()


# ------------------------------------------------------------------------------------------------------------ IPython


def inspection_text(value: object, name: str, detail_level: int) -> str:
    """Return what IPython prints for `name?`, or for `name??` if `detail_level` is 1.

    The public `Inspector.pinfo` prints the text instead of returning it. Tested with IPython 9. Fallback:
    `inspect.getdoc`.
    """
    from IPython.core.oinspect import Inspector, OInfo

    info = OInfo(found=True, namespace="rank", ismagic=False, isalias=False, obj=value, parent=None)
    text: str = Inspector(theme_name="nocolor")._get_info(value, name, info=info, detail_level=detail_level)[
        "text/plain"
    ]
    return text
