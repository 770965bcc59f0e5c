"""Compute the operators of emulated GPUs with the kernels of the CPU.

"Device" memory of an emulated GPU is host memory (see `runtime.c`). `install` replaces the CUDA kernel of every ATen
operator by a function that calls the same operator on CPU tensors over the same memory. The functions are below
autograd, autocast and dispatch modes, and they apply to all threads, such as those of autograd and of gloo.

Like CUDA, the functions refuse tensors on different devices, draw random numbers from the generator of the device, and
report synchronization with the host to `torch.cuda.set_sync_debug_mode`. Kernels that allocate memory, create views or
copy contiguous memory remain those of PyTorch, which call the CUDA runtime.
"""

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# They work on the runtime alone.
NATIVE = {
    "_local_scalar_dense",
    "empty.memory_format",
    "empty_strided",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
}
# The size of the result depends on the values, so CUDA waits for them.
SYNCHRONIZING = {"_unique2", "bincount", "equal", "masked_select", "nonzero", "repeat_interleave.Tensor", "unique_dim"}
# So does the size of a selection by a mask.
INDEXING = {"_index_put_impl_", "index.Tensor", "index.Tensor_out"}
SEEDED = torch.Tag.nondeterministic_seeded

_pending: ctypes.c_int
_wait: Callable[[ctypes.c_void_p], None]
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Replace the CUDA kernels of all ATen operators in this process."""
    global _pending, _wait
    runtime = ctypes.CDLL(None)  # LD_PRELOAD has loaded it
    _pending, _wait = ctypes.c_int.in_dll(runtime, "emulated_pending"), runtime.emulated_wait_for_stream
    torch.backends.cudnn.enabled = False
    for choice in ("flash", "mem_efficient", "cudnn"):  # attention then consists of ATen operators
        getattr(torch.backends.cuda, f"enable_{choice}_sdp")(False)
    _refuse_messages_of_gloo()
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that are replaced
        for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            namespace, name = full_name.split("::")
            if namespace == "aten" and name not in NATIVE and not _is_view(operator := _operator(name)):
                library.impl(name, _kernel(name, operator), "CUDA")
        library.impl("copy_", _copy, "CUDA")


def _refuse_messages_of_gloo() -> None:
    """Make gloo fail to send and receive tensors on GPUs, whose memory the operating system cannot read or write."""
    group = torch._C._distributed_c10d.ProcessGroup
    for name in ("send", "recv", "recv_anysource"):
        setattr(group, name, _except_from_gpus(getattr(group, name)))


def _except_from_gpus(message: Callable[..., Any]) -> Callable[..., Any]:
    def communicate(group: Any, tensors: list[torch.Tensor], *rest: Any, **options: Any) -> Any:
        if tensors[0].is_cuda and group._get_backend(tensors[0].device).name() == "gloo":
            raise RuntimeError("writev [127.0.0.1]: Bad address")
        return message(group, tensors, *rest, **options)

    return communicate


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_view(operator: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    """Return a function that computes `operator` on the CPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        device = _common_device(name, leaves)
        _wait_for_stream(device)
        if name in SYNCHRONIZING or (name in INDEXING and any(_is_mask(leaf) for leaf in leaves)):
            torch.cuda.current_stream(device).synchronize()
        originals: dict[int, torch.Tensor] = {}
        host = [_to_host(leaf, originals) for leaf in leaves]
        with _random_numbers(operator, leaves, device):
            host_args, host_kwargs = tree_unflatten(host, spec)
            results, result_spec = tree_flatten(operator(*host_args, **host_kwargs))
        return tree_unflatten([_to_device(result, originals, device) for result in results], result_spec)

    return run


def _common_device(name: str, leaves: list[Any]) -> torch.device:
    """Return the device of an operator, or refuse its arguments as CUDA does."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # CUDA accepts indices on the CPU, and numbers.
    counted = [each for each in tensors if _is_on_gpu(each) or (each.dim() and name not in INDEXING)]
    devices = list(dict.fromkeys(each.device for each in counted))
    devices.sort(key=lambda device: device.type != "cuda")
    if len(devices) > 1 and name != "_foreach_copy_":
        first, second = devices[:2]
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}! (emulated GPU, when computing aten::{name})"
        )
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and devices and leaf.device != devices[0]:
            raise RuntimeError(f"Expected a '{devices[0]}' device type for generator but found '{leaf.device}'")
    if devices and devices[0].type == "cuda":
        return devices[0]
    return torch.device("cuda", torch.cuda.current_device())


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in {torch.bool, torch.uint8}


def _wait_for_stream(device: torch.device) -> None:
    """Wait for operations that have not completed on the current stream: this kernel comes after them."""
    if _pending.value:
        _wait(ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))


def _to_host(leaf: Any, originals: dict[int, torch.Tensor]) -> Any:
    """Return the counterpart of an argument for the operator of the CPU."""
    if _is_on_gpu(leaf):
        alias = host_alias(leaf)
        originals[id(alias)] = leaf
        return alias
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(leaf, torch.Generator) else leaf


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a tensor on an emulated GPU."""
    if not tensor.numel():  # perhaps an `out` argument, which the operator resizes
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _to_device(result: Any, originals: dict[int, torch.Tensor], device: torch.device) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    moved = originals.get(id(result))
    if moved is not None and moved.numel() == result.numel():
        return moved
    if moved is None:
        moved = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    else:
        moved.resize_(result.size())
    if result.numel():
        host_alias(moved).copy_(result)
    return moved


@contextlib.contextmanager
def _random_numbers(operator: Any, leaves: list[Any], device: torch.device) -> Iterator[None]:
    """Seed the generator of the CPU from the generator of the device, and advance the latter."""
    if SEEDED not in operator.tags:
        yield
        return
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    generator = given[0] if given else torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # CUDA requires a multiple of 4
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(hash((generator.initial_seed(), offset)))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy within, to or from emulated GPUs."""
    for tensor in (target, source):
        if _is_on_gpu(tensor):
            _wait_for_stream(tensor.device)
    if _is_on_gpu(target) and _is_on_gpu(source):
        host_alias(target).copy_(host_alias(source))
    elif _is_on_gpu(target):
        fitting = source.to(target.dtype).expand(target.shape).contiguous()
        if target.is_contiguous():
            _copy_memory(target, fitting, non_blocking)
        else:
            host_alias(target).copy_(fitting)
    else:
        converted = torch.empty(target.shape, dtype=target.dtype, device=source.device)
        host_alias(converted).copy_(host_alias(source))
        if target.is_contiguous():
            _copy_memory(target, converted, non_blocking)
        else:
            received = torch.empty_like(converted, device="cpu")
            _copy_memory(received, converted, non_blocking=False)
            target.copy_(received)
    return target


def _copy_memory(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Copy contiguous tensors of the same type between the host and a device, by PyTorch's own kernel."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    torch.ops.aten.copy_.default._op_dk(key, target, source, non_blocking)
