"""Write the state of a component to files, and read it back.

If a state is a flat dict of tensors that the safetensors format supports, it is written as a safetensors file. Any
other state is written as a `.pt` file of plain values, which torch loads without executing code.
`torch.distributed.checkpoint` writes and reads sharded tensors as safetensors files.
"""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ddp_tutorial.checkpoint.components import LazyState, State, Stateful, StoredTensor
from ddp_tutorial.checkpoint.manifest import CheckpointError, read_manifest, sha256_of
from ddp_tutorial.files import notify_observers, sync
from ddp_tutorial.world import World

# Types that torch reads with `weights_only=True`. Subclasses, such as a namedtuple, are not read.
_PLAIN = {bool, int, float, str, bytes, type(None)}
_MAPPINGS = {dict, OrderedDict, Counter}
_SEQUENCES = {list, tuple, torch.Size}


def to_plain(name: str, value: Any) -> Any:
    """Return a copy of `value` that can be loaded without executing code. Tensors are not copied.

    Instances of subclasses of `int` and `float` are converted to the base class. For example, a schedule that uses
    NumPy produces a learning rate of type `numpy.float64`.

    Unsupported values are rejected when the state is saved, not when the checkpoint is loaded.

    Raises:
        CheckpointError: If a value is not a tensor, a number, a string, bytes, None, or a container of these values.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if type(value) in _MAPPINGS:
        items = value.items()
        return type(value)({to_plain(f"a key of {name}", key): to_plain(f"{name}[{key!r}]", it) for key, it in items})
    if type(value) in _SEQUENCES:
        return type(value)([to_plain(f"{name}[{place}]", inner) for place, inner in enumerate(value)])
    raise CheckpointError(
        f"{name} is of type {type(value).__name__}, which cannot be loaded without executing code. A state must "
        "contain only tensors, numbers, strings, bytes, None, and dicts, lists and tuples of these values."
    )


def write_state(stem: Path, state: State) -> Path:
    """Write `state` to a file, and return its path.

    The path is `stem` with the extension `.safetensors` if all values are tensors that the format supports, or `.pt`
    otherwise.
    """
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        path = stem.with_name(f"{stem.name}.safetensors")
        notify_observers("write", path)
        # TypeError: a name is not a string; KeyError: complex128; RuntimeError: sparse, or the tensors overlap
        with suppress(TypeError, KeyError, RuntimeError):
            tensors, aliases = _without_aliases(state)
            safetensors.torch.save_file(tensors, path, metadata=aliases)
            return path
    path = stem.with_name(f"{stem.name}.pt")
    notify_observers("write", path)
    torch.save(state, path)
    return path


def _without_aliases(state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without duplicates, and a dict from each alias of a tied weight to the weight's first name.

    `safetensors` rejects tensors that share memory, so the file contains each tensor once, and the metadata contains
    the aliases.
    """
    first: dict[Any, str] = {}
    tensors, aliases = {}, {}
    for name, tensor in state.items():
        key = memory_of(tensor)
        if key in first:
            aliases[name] = first[key]
        else:
            tensors[name] = tensor.detach().contiguous()
            if key is not None:
                first[key] = name
    return tensors, aliases


def memory_of(value: Any) -> tuple[object, ...] | None:
    """Return a key that is the same for tied tensors, or None if `value` is not a dense tensor with elements."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.numel():
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def read_state(path: Path) -> State:
    """Return the state from a file that `write_state` wrote. The tensors are on the CPU.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    try:
        notify_observers("read", path)
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
                return tensors | {alias: tensors[name] for alias, name in (file.metadata() or {}).items()}
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} cannot be read: {reason}") from None


def stored(folder: Path, name: str) -> Any:
    """Return the state of one component of a checkpoint.

    Sharded tensors are assembled from the shards of all ranks. Tensors from the zero3 strategy are returned as flat
    vectors. The files are not compared with their checksums; call `verify` or `latest_valid` first.

    Raises:
        CheckpointError: If there is no such component, or if the component has several states, such as one per rank.
    """
    component = read_manifest(folder).components.get(name)
    if component is not None and component.shared == "sharded":
        return read_full(folder / name)
    if component is None or len(component.files) != 1:
        found = "none" if component is None else f"{len(component.files)} files"
        raise CheckpointError(f"{folder} must contain exactly one {name!r} file, shared by all ranks, got {found}")
    return read_state(folder / component.files[0].path)


def write_shards(folder: Path, state: State, world: World) -> None:
    """Write this rank's shards to `folder`. Collective.

    The files are in the safetensors format. The default format of torch's distributed checkpoint contains a pickle,
    which can execute code when it is read.

    Raises:
        CheckpointError: If torch cannot write the shards.
    """
    import torch.distributed.checkpoint as dcp  # slow to import

    notify_observers("write", folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _as_checkpoint_error():
        dcp.save(dict(state), storage_writer=writer, no_dist=world.size == 1)
    sync(folder)  # flush the directory entries; `sync_and_hash` flushes the files


def load_shards(folder: Path, stateful: Stateful, world: World) -> None:
    """Restore sharded tensors. Collective.

    Each rank reads only the data of its own shards. The checkpoint may have been saved on a different number of ranks.

    Raises:
        CheckpointError: If torch cannot read the shards.
    """
    import torch.distributed.checkpoint as dcp

    state = dict(stateful.empty(_tensors_in(folder)) if isinstance(stateful, LazyState) else stateful.state_dict())
    with _as_checkpoint_error():
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1)
    stateful.load_state_dict(state)


def read_full(folder: Path) -> State:
    """Return the full tensors of the sharded component in `folder`.

    A single process reads the shards of all ranks, without collectives.

    Raises:
        CheckpointError: If torch cannot read the shards.
    """
    import torch.distributed.checkpoint as dcp

    state: State = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in _tensors_in(folder).items()}
    with _as_checkpoint_error():
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Convert torch's `CheckpointException`, which is not an `Exception`, to `CheckpointError`.

    Also suppress torch's warning about a missing process group, because a single process may read a checkpoint.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            failures = sorted(error.failures.items())
            raise CheckpointError(
                "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures)
            ) from error


def _tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """Return the shape and dtype of each sharded tensor stored in `folder`, by name."""
    import torch.distributed.checkpoint as dcp

    metadata: dict[str, Any] = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: StoredTensor(each.size, each.properties.dtype) for name, each in metadata.items()}


def sync_and_hash(path: Path) -> str:
    """Flush a file to disk and return its SHA-256 hash as a hexadecimal string.

    Both operations are slow, so they run in parallel.

    Raises:
        OSError: If the file cannot be flushed or read.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        syncing = pool.submit(sync, path)
        sha256 = sha256_of(path)
        syncing.result()  # raises if the flush failed
    return sha256
