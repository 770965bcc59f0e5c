"""How a component's state is written to files and read from them.

Tensors by name become a safetensors file, anything else a `.pt` file of plain values, which torch reads without
executing anything. Sharded tensors are written and read by torch's distributed checkpoint, as safetensors too.
"""

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist

from ddp_tutorial.checkpoint.components import LazyState, State, Stateful, StoredTensor
from ddp_tutorial.checkpoint.consistency import named_leaves
from ddp_tutorial.checkpoint.manifest import CheckpointError, read_manifest, sha256_of
from ddp_tutorial.files import notify_observers, sync
from ddp_tutorial.world import World

_PLAIN = (torch.Tensor, bool, int, float, str, bytes, type(None))


def check_plain(states: Mapping[str, State]) -> None:
    """Raise `CheckpointError` for a value that could not be loaded without executing code.

    Checked when it is saved, so that nobody finds out only when the checkpoint is needed.
    """
    for where, value in (leaf for name, state in states.items() for leaf in named_leaves(name, state)):
        if not isinstance(value, _PLAIN):
            raise CheckpointError(
                f"{where} is of type {type(value).__name__}, which cannot be loaded without executing code. State is "
                "tensors, numbers, text, None, and dicts, lists and tuples of them."
            )


def write_state(stem: Path, state: State) -> Path:
    """Write `state` to `stem` with the ending that its format has, and return that path."""
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        path = stem.with_name(f"{stem.name}.safetensors")
        notify_observers("write", path)
        tensors, aliases = _without_aliases(state)
        safetensors.torch.save_file(tensors, path, metadata=aliases)
        return path
    path = stem.with_name(f"{stem.name}.pt")
    notify_observers("write", path)
    torch.save(state, path)
    return path


def _without_aliases(state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once, by its first name, and for the other names of tied weights the first one.

    safetensors refuses tensors that share memory; the second part goes into the file's metadata.
    """
    first: dict[Any, str] = {}
    tensors, aliases = {}, {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().contiguous()
    return tensors, aliases


def read_state(path: Path) -> State:
    """The state in a file that `write_state` has written, on the CPU. Raises `CheckpointError` if it cannot be read."""
    try:
        notify_observers("read", path)
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
                return tensors | {alias: tensors[name] for alias, name in (file.metadata() or {}).items()}
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def stored(folder: Path, name: str) -> Any:
    """The state of one component of the checkpoint in `folder`, of which there is one for all ranks, such as "model".
    Tensors of which each rank has written a piece are put together: of strategy zero3, as vectors.

    Raises `CheckpointError` where there is no such component, or one for each rank. The file is not compared with its
    checksum: call `verify` or `latest_valid` first.
    """
    component = read_manifest(folder).components.get(name)
    if component is not None and component.shared == "sharded":
        return read_full(folder / name)
    if component is None or len(component.files) != 1:
        raise CheckpointError(f"{folder} has no one {name!r} for all ranks")
    return read_state(folder / component.files[0].path)


def write_shards(folder: Path, state: State, world: World) -> None:
    """Write the pieces of sharded tensors into `folder`: all ranks at once, each its own.

    As safetensors: the default format of torch's distributed checkpoint has a pickle in it, which reading executes.
    """
    import torch.distributed.checkpoint as dcp  # slow to import, and only needed here

    notify_observers("write", folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _as_checkpoint_error():
        dcp.save(dict(state), storage_writer=writer, no_dist=world.size == 1)
    sync(folder)  # so that the names of the files are on the disk; the files themselves follow in `sync_and_hash`


def load_shards(folder: Path, stateful: Stateful) -> None:
    """Restore sharded tensors: each rank reads what belongs to its own pieces, however many ranks have written."""
    import torch.distributed.checkpoint as dcp

    state = dict(stateful.empty(_tensors_in(folder)) if isinstance(stateful, LazyState) else stateful.state_dict())
    with _as_checkpoint_error():
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    stateful.load_state_dict(state)


def read_full(folder: Path) -> State:
    """The sharded tensors in `folder`, each whole, in this process alone, however many ranks have written."""
    import torch.distributed.checkpoint as dcp

    state: State = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in _tensors_in(folder).items()}
    with _as_checkpoint_error():
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Raise `CheckpointError` in place of torch's `CheckpointException`, which is not an `Exception`.

    Also hide torch's warning that there is no process group: one process may read alone.
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
    """What sharded tensors a folder has."""
    import torch.distributed.checkpoint as dcp

    metadata: dict[str, Any] = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: StoredTensor(each.size, each.properties.dtype) for name, each in metadata.items()}


def sync_and_hash(path: Path) -> str:
    """Wait until a file has reached the disk, and return its sha256. At the same time, as each takes a while."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        syncing = pool.submit(sync, path)
        sha256 = sha256_of(path)
        syncing.result()  # raises, if the disk has failed
    return sha256
