"""Wrap private APIs of PyTorch and other libraries, and names that differ between library versions.

Only this module uses private library APIs, so a change to such an API can break only this file. Each entry states why
the private API is necessary and, if possible, which public fallback could replace it.
`tests/test_compat.py` tests all entries with PyTorch 2.13.0.
"""

import inspect
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.variable import Variable

# Dispatch modes are documented, but their only import path is private. Fallback: none.
from torch.utils._python_dispatch import TorchDispatchMode

# These functions traverse nested dicts, lists, tuples, named tuples and registered classes, as `default_collate` and
# `fully_shard` do. PyTorch has no public module for this. Fallback: the package `optree`.
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

# The base class of `DataLoader` iterators. Patching its `__next__` makes each wait for a batch observable, even in
# existing iterators. Fallback: patch `DataLoader.__iter__`, which misses existing iterators.
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
    "monitored_workers",
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
    "unmonitored_workers",
    "used_groups",
    "worker_processes",
]

_PATCHING = threading.RLock()  # held while a function of PyTorch is replaced

# --------------------------------------------------------------------------------------------------------- autograd


def current_backward() -> int | None:
    """Return the ID of the backward pass that autograd is running in this thread, or None outside a backward pass.

    Each backward pass has a different ID, even if reentrant activation checkpointing runs one pass inside another.

    PyTorch has no public function that returns the ID. `torch.utils.checkpoint` uses the same private function.
    Fallback: none.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def is_in_backward() -> bool:
    """Return whether this thread is running a backward pass, including any recomputation of activations."""
    return current_backward() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass finishes without an exception.

    No public function registers such a callback. `fully_shard` uses the same private method. Fallback: none.
    """
    Variable._execution_engine.queue_callback(callback)


def is_profiling() -> bool:
    """Return whether a profiler is recording this thread.

    `record_function` is public, but it takes about 50 microseconds even if no profiler is running. Fallback: return
    True.
    """
    return torch.autograd._profiler_enabled()


# ----------------------------------------------------------------------------------- tensors, optimizers, operators


def multiply_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each tensor by `factor`, in place.

    On a GPU, calling `mul_` in a loop launches one kernel per tensor. The public functions, such as `clip_grad_norm_`,
    cannot multiply by an arbitrary factor. Fallback: the loop.
    """
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor.

    On a GPU, calling `vector_norm` in a loop launches one kernel per tensor. `get_total_norm` is public, but it returns
    only the combined norm of all tensors. Fallback: the loop.
    """
    return list(torch._foreach_norm(list(tensors)))


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, without summing the values of duplicate indices.

    `values` is public, but it requires `coalesce`, which copies the tensor. Fallback: `tensor.coalesce().values()`.
    """
    return tensor._values()


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of `tensor` among all storages that currently exist.

    `data_ptr` is public, but it is 0 for all tensors on the meta device. Fallback: `data_ptr`.
    """
    return int(tensor.untyped_storage()._cdata)


def argument_names(operator: Any) -> list[str]:
    """Return the argument names of an operator, such as the operator `func` that a dispatch mode receives.

    An operator's schema is not public. Fallback: parse `str(operator)`.
    """
    return [argument.name for argument in operator._schema.arguments]


def remove_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Remove all step pre-hooks and step post-hooks from `optimizer`.

    A hook's handle can remove the hook, but only the caller that registered the hook holds the handle. Fallback: none.
    """
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was applied to `module` or to one of its submodules.

    PyTorch has no public function that detects compiled modules. Fallback: return False.
    """
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in module.modules())


def uncompiled(module: nn.Module) -> nn.Module:
    """Return `module` with each `torch.compile(...)` wrapper replaced by the wrapped module.

    The wrapped module stays compiled with the wrapper's options, as after `module.compile(...)`. The returned module's
    parameter names do not contain `_orig_mod`. A wrapper does not expose its module or options publicly. Fallback:
    require `module.compile(...)` instead.
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
        # PyTorch does not compile frames from its own files. Without the lambda, nn.Sequential would not be compiled.
        original._compiled_call_impl = wrapper.dynamo_ctx(lambda *inputs, **named: call(*inputs, **named))  # noqa: PLW0108
    return original


# -------------------------------------------------------------------------------------------------------- distributed


def default_store() -> dist.Store:
    """Return the store of the default process group. Requires a process group.

    The store is accessible through the public API only if the caller created it. Usually, `init_process_group` or
    torchrun creates the store. Fallback: create a `TCPStore` on rank 0 and broadcast its address.
    """
    return dist.distributed_c10d._get_default_store()


def group_ranks() -> dict[str, list[int]]:
    """Return the name and the global ranks of each process group that contains this rank.

    `get_process_group_ranks` is public, but the list of groups is not. Fallback: return only the default group.
    """
    world = dist.distributed_c10d._world
    names = dict(world.pg_names)  # a copy, because a different thread may be creating a group
    return {name: sorted(world.pg_group_ranks[group]) for group, name in names.items() if group in world.pg_group_ranks}


def used_groups() -> set[str]:
    """Return the names of the process groups that this rank may have used for a collective.

    Groups whose backend does not count collectives are included. Neither the list of groups nor the number of
    collectives is public. Fallback: return the names of all groups.
    """
    used: set[str] = set()
    for group, name in dict(dist.distributed_c10d._world.pg_names).items():
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]  # the stubs lack a method
        try:
            if any(each._get_sequence_number_for_group() for each in backends):
                used.add(name)
        except RuntimeError:
            used.add(name)
    return used


def abort_process_group() -> None:
    """Abort the running collectives of all process groups, and destroy the groups.

    `destroy_process_group` is public, but with NCCL, it waits for collectives that a failed rank never joins. Fallback:
    exit the process.
    """
    dist.distributed_c10d._abort_process_group()


def forward_sync_buffers(*, enabled: bool) -> dict[str, Any]:
    """Return the `DistributedDataParallel` argument that determines whether the forward pass broadcasts buffers.

    PyTorch 2.13 renamed the argument and warns about the old name.
    """
    parameters = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": enabled}


def flight_record(*, entries: bool = True, stacks: bool = True) -> dict[str, Any]:
    """Return this process's record from PyTorch's flight recorder. Requires a process group.

    The public API provides the record only as a file, which PyTorch writes when an NCCL collective times out. Fallback:
    return an empty dict, and omit collectives from hang reports.

    Args:
        entries: Whether to include the most recent collectives, under the key "entries".
        stacks: Whether to include the Python stack of each collective.

    Returns:
        The record as a dict, in which "pg_status" contains the last collective of each process group.
    """
    name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name)
    record: dict[str, Any] = pickle.loads(dump(entries, entries and stacks, False))
    return record


# ---------------------------------------------------------------------------------------------------------- processes


def import_dynamo() -> None:
    """Import `torch._dynamo` now.

    DistributedDataParallel and a process's first optimizer import `torch._dynamo`. The import takes seconds, and keeps
    any existing process group alive. PyTorch has no public function that imports only `torch._dynamo`. Fallback: do
    nothing.
    """
    import torch._dynamo  # noqa: F401


def stop_forkserver() -> None:
    """Stop the server process of `multiprocessing.forkserver`.

    The public API stops the server only when this process exits. Fallback: do nothing.
    """
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    server._stop()


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info` return None inside the block.

    Datasets that call `get_worker_info`, such as Hugging Face datasets, would otherwise split the rows among the
    workers a second time. `get_worker_info` is public, but no public function resets the worker info. Fallback: require
    `num_workers=0`.
    """
    module = torch.utils.data._utils.worker
    info, module._worker_info = module._worker_info, None
    try:
        yield
    finally:
        module._worker_info = info


def worker_processes(iterator: Any) -> list["BaseProcess"]:
    """Return the worker processes of a `DataLoader` iterator with `num_workers` > 0.

    The public API reports a dead worker only in an error message. Fallback: `multiprocessing.active_children`.
    """
    return list(iterator._workers)


@contextmanager
def unmonitored_workers() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD from raising errors about workers that start inside the block.

    When a worker is killed, the handler raises RuntimeError in the main thread, at any line, for example inside an
    optimizer step. No public API changes this. Fallback: restore the previous handler of SIGCHLD after the block.
    """
    module = torch.utils.data._utils.signal_handling
    with _PATCHING:
        register = module._set_worker_pids
        module._set_worker_pids = lambda key, child_pids: register(key, ())
        try:
            yield
        finally:
            module._set_worker_pids = register


@contextmanager
def monitored_workers(iterator: Any) -> Iterator[None]:
    """Raise RuntimeError inside the block when a worker of a `DataLoader` iterator is killed, or has been killed.

    Outside the main thread, this function has no effect. Fallback: none, because `next` detects a dead worker when it
    times out.
    """
    if threading.current_thread() is not threading.main_thread():  # the handler would interrupt the main thread
        yield
        return
    module, key = torch.utils.data._utils.signal_handling, id(iterator._workers)  # `id(iterator)` is torch's own key
    module._set_worker_pids(key, tuple(process.pid for process in iterator._workers))
    try:
        module._error_if_any_worker_fails()
        yield
    finally:
        module._remove_worker_pids(key)


def shutdown_workers(iterator: Any) -> None:
    """Stop the workers of a `DataLoader` iterator now.

    The public API stops the workers only when the iterator is garbage-collected. Fallback: terminate the processes.
    """
    iterator._shutdown_workers()


# ------------------------------------------------------------------------------------------------------------ IPython


def inspection_text(value: object, name: str, detail_level: int) -> str:
    """Return the text that IPython prints for `name?`, or for `name??` if `detail_level` is 1.

    The public `Inspector.pinfo` prints the text instead of returning it. This function is tested with IPython 9.
    Fallback: `inspect.getdoc`.
    """
    from IPython.core.oinspect import Inspector, OInfo

    info = OInfo(found=True, namespace="rank", ismagic=False, isalias=False, obj=value, parent=None)
    text: str = Inspector(theme_name="nocolor")._get_info(value, name, info=info, detail_level=detail_level)[
        "text/plain"
    ]
    return text
