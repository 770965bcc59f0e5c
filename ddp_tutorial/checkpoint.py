"""What survives: save and load the state of a run, exactly, on any number of ranks.

    checkpointer = Checkpointer(folder, {"model": Component(model), "rng": Component(rng, "per_rank")}, world)
    checkpointer.save(step)
    manifest = checkpointer.load(latest(folder))

A component is anything with `state_dict` and `load_state_dict`. Which ranks have the same of it decides who writes it:

    replicated   all have the same; rank 0 writes, after a check that it is the same indeed
    global       rank 0 has it for all
    per_rank     each has its own
    per_node     the ranks of a machine have the same
    per_group    `span` ranks after one another have the same
    sharded      each has its piece of every tensor (DTensor, as FSDP makes them), and another world other pieces

Every step of saving and loading is agreed: a rank that fails makes all raise, and the earlier checkpoints are as they
were. What is read is checked against the manifest first, and never executed: tensors and plain values only.
"""

import os
import platform
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from ddp_tutorial.collectives import all_gather, any_rank, digest, first_difference, from_rank_zero
from ddp_tutorial.files import sync, write_json
from ddp_tutorial.manifest import (
    MANIFEST,
    SCHEMA,
    CheckpointError,
    Manifest,
    Mode,
    StoredComponent,
    StoredFile,
    differences,
    folders,
    name_of,
    put_aside,
    read_manifest,
    sha256_of,
    sha256_of_json,
    to_remove,
    verify,
)
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World, require_group

Shared = Literal["replicated", "global", "per_rank", "per_node", "per_group", "sharded"]
Check = Literal["none", "quick", "tensor", "full"]
State = dict[str, Any]


class Stateful(Protocol):
    """What can be saved."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@runtime_checkable
class OtherWorld(Protocol):
    """What can also go on in a world of another size; `states` are those of all groups, the first ranks' first."""

    def load_from_other_world(self, states: Sequence[State], step: int) -> None: ...


@dataclass(frozen=True)
class Component:
    """A part of a run's state, and which ranks have the same of it. `span` is for per_group: ranks in a group."""

    thing: Stateful
    shared: Shared = "replicated"
    span: int = 1

    def ranks_alike(self, world: World) -> int:
        """How many ranks after one another share it; the first of them writes."""
        whole = {
            "replicated": world.size,
            "global": world.size,
            "per_node": world.local_size,
            "per_rank": 1,
            "sharded": 1,
        }
        span = whole.get(self.shared, self.span)
        if span < 1 or world.size % span:
            raise ValueError(f"{world.size} ranks cannot be cut into groups of {span}")
        return span


class Checkpointer:
    """Saves and loads the `components` of one run, in `folder`. All methods are collective, but `close`."""

    def __init__(
        self,
        folder: Path,
        components: Mapping[str, Component],
        world: World,
        *,
        config: Mapping[str, Any] | None = None,
        check: Check = "tensor",
        background: bool = False,
        keep_last: int = 2,
        keep_best: int = 0,
        metric: str = "eval_loss",
        mode: Mode = "min",
    ) -> None:
        require_group(world)
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: the last checkpoint is what a run goes on from, so 1 or more")
        self.folder, self.components, self.world = folder, dict(components), world
        self.config, self.check, self.background = dict(config or {}), check, background
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        self._pending: _Writing | None = None
        self._memory: list[Any] = []
        self._sweeping: threading.Thread | None = None

    def clear_up(self) -> None:
        """Remove what a run that was killed has left lying about. Claim the folder first: see `manifest.claimed`."""
        if self.world.is_main:
            _remove(list(self.folder.glob(".step_*.part")))

    def save(self, step: int, metrics: Mapping[str, float | None] | None = None) -> None:
        """Write a checkpoint of `step`; in the background, from a copy, if it was asked for.

        Raises `CheckpointError` on all ranks if one cannot, and leaves nothing behind then.
        """
        self.finish()
        self.close()
        with phase("save: copy" if self.background else "save: collect"):
            states, sharded = self._states()
        writing = _Writing(self, step, dict(metrics or {}), states)
        try:
            writing.write_sharded(sharded)
        except CheckpointError:
            writing.remove()
            raise
        self._pending = writing
        if self.background:
            writing.start()
        else:
            writing.run()
            self.finish()

    @property
    def is_writing(self) -> bool:
        """Is a background save still on its way to the disk, on this rank?"""
        return self._pending is not None and not self._pending.done

    def poll(self) -> None:
        """Put a background save into place if all ranks have written their part. Call it at each step: what went wrong
        in the background is raised here, on all ranks."""
        if self._pending is not None and not any_rank(self.world, self.is_writing):
            self.finish()

    def finish(self) -> None:
        """Wait for a background save, on all ranks, and put it into place."""
        writing, self._pending = self._pending, None
        if writing is not None:
            writing.join()
            writing.put_into_place()
            self._prune()

    def load(self, folder: Path, leave_out: Sequence[str] = ()) -> Manifest:
        """Restore all components from a checkpoint, but those that `leave_out` names.

        Raises `CheckpointError` on all ranks, before anything has been restored, where files are damaged, where a
        component is missing on either side, and where one of each rank cannot be given to another number of ranks.
        """
        with phase("load"):
            manifest, restores = agreed(self.world, lambda: self._read(folder, leave_out))
            for restore in restores:
                restore()
        checked: Manifest = manifest
        return checked

    def close(self) -> None:
        """Let what goes on in the background come to its end. A save that `finish` has not waited for gets no name."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._sweeping is not None:
            self._sweeping.join()
            self._sweeping = None

    def _states(self) -> tuple[dict[str, State], dict[str, State]]:
        """What this rank has to write of each component, checked; those that are sharded apart."""
        states = {name: dict(component.thing.state_dict()) for name, component in self.components.items()}
        agreed(self.world, lambda: _check_plain(states))
        if self.check != "none":
            for name, component in self.components.items():
                if component.shared not in {"global", "sharded"} and self.world.size > 1:
                    assert_replicated(self.world, name, states[name], component.ranks_alike(self.world), self.check)
        sharded = {name: states.pop(name) for name, part in self.components.items() if part.shared == "sharded"}
        owned = {
            name: state
            for name, state in states.items()
            if self.world.rank % self.components[name].ranks_alike(self.world) == 0
        }
        return (self._copied(owned) if self.background else owned), sharded

    def _copied(self, states: dict[str, State]) -> dict[str, State]:
        """A copy on the CPU, in the memory of the last one where it fits: new memory takes several times as long."""
        values, structure = tree_flatten(states)
        before = self._memory if len(self._memory) == len(values) else [None] * len(values)
        self._memory = [_copy(value, old) for value, old in zip(values, before, strict=True)]
        copied: dict[str, State] = tree_unflatten(self._memory, structure)
        return copied

    def _read(self, folder: Path, leave_out: Sequence[str]) -> tuple[Manifest, list[Callable[[], object]]]:
        """What this rank needs of a checkpoint, in calls that put it back."""
        manifest = read_manifest(folder)
        if unknown := set(leave_out) - set(self.components):
            raise CheckpointError(f"{sorted(unknown)[0]!r} is no component of this run: {', '.join(self.components)}")
        wanted = [name for name in self.components if name not in leave_out]
        for name in wanted:
            if name not in manifest.components:
                raise CheckpointError(f"{folder} has no {name!r}; to go on without, leave it out by name")
        for name in manifest.components:
            if name not in self.components and name not in leave_out:
                raise CheckpointError(f"{folder} has {name!r}, which this run has no use for")
        if problems := verify(folder):
            raise CheckpointError("; ".join(problems))
        return manifest, [self._restore(folder, manifest, name) for name in wanted]

    def _restore(self, folder: Path, manifest: Manifest, name: str) -> Callable[[], object]:
        """The call that puts a component back, with what it takes read already; ranks read sharded ones together."""
        component, stored = self.components[name], manifest.components[name]
        thing, alike = component.thing, component.ranks_alike(self.world)
        if stored.shared != component.shared:
            raise CheckpointError(f"{folder} has {name!r} {stored.shared}, and here it is {component.shared}")
        if stored.shared == "sharded":
            return partial(_load_sharded, folder / name, thing)
        if len(stored.files) == self.world.size // alike:
            return partial(thing.load_state_dict, _load(folder / stored.files[self.world.rank // alike].path))
        if not isinstance(thing, OtherWorld):
            raise CheckpointError(
                f"{name!r} is {stored.shared}: {folder} has it for {manifest.world_size} ranks, and it cannot be "
                f"given to {self.world.size}. To go on without, leave it out by name."
            )
        states = [_load(folder / file.path) for file in stored.files]
        return partial(thing.load_from_other_world, states, manifest.step)

    def _prune(self) -> None:
        """Remove what need not be kept, on rank 0."""
        if self.world.is_main:
            metrics = {}
            for path in folders(self.folder):
                try:
                    metrics[path] = read_manifest(path).metrics.get(self.metric)
                except CheckpointError:
                    continue  # not ours to judge, and not ours to remove
            gone = [put_aside(path) for path in to_remove(metrics, self.keep_last, self.keep_best, self.mode)]
            self._sweeping = threading.Thread(target=_remove, args=(gone,), name="sweep", daemon=True)
            self._sweeping.start()


class _Writing:
    """One checkpoint on its way to the disk. The thread writes files; only the main thread talks to other ranks."""

    def __init__(
        self, checkpointer: Checkpointer, step: int, metrics: dict[str, Any], states: dict[str, State]
    ) -> None:
        self.to, self.step, self.metrics, self.states = checkpointer, step, metrics, states
        self.path = checkpointer.folder / name_of(step)
        self.aside: Path = from_rank_zero(
            checkpointer.world, checkpointer.folder / f".{name_of(step)}.{os.getpid()}.{time.time_ns()}.part"
        )
        self.shards: dict[str, list[Path]] = {}
        self.files: dict[str, list[StoredFile]] = {}
        self.error: Exception | None = None
        self.done = False
        self._thread: threading.Thread | None = None

    def write_sharded(self, states: Mapping[str, State]) -> None:
        """Through torch's distributed checkpoint, in which all ranks take part at once, so here and now.

        As safetensors: its own format has a pickle in it, which is executed when it is read.
        """
        if not states:
            return
        import torch.distributed.checkpoint as dcp  # takes a moment

        world = self.to.world
        for name, state in states.items():
            folder = self.aside / name

            def write(folder: Path = folder, state: State = state) -> None:
                folder.mkdir(parents=True, exist_ok=True)
                writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
                dcp.save(dict(state), storage_writer=writer, no_dist=world.size == 1)

            with phase("save: write"):
                agreed(world, write)
            self.shards[name] = sorted(folder.iterdir())[world.rank :: world.size]

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        try:
            self.aside.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor() as pool:  # while one file is hashed, the next one is written
                records = [pool.submit(self._record, name, path) for name, path in self._write()]
            for record in records:
                record.result()
        except Exception as error:
            self.error = error
        self.done = True

    def _write(self) -> Iterator[tuple[str, Path]]:
        """The files of this rank, one after another; those of sharded components are there already."""
        for name, paths in self.shards.items():
            for path in paths:
                yield name, path
        world = self.to.world
        for name, state in self.states.items():
            alike = self.to.components[name].ranks_alike(world)
            with phase("save: write"):
                path = _dump(self.aside / (name if alike == world.size else f"{name}.rank_{world.rank}"), state)
            yield name, path

    def _record(self, name: str, path: Path) -> None:
        """Let a file reach the disk, and note what has to be in it."""
        with phase("save: sync"):
            sha256 = _synced_sha256(path)
        where = path.relative_to(self.aside).as_posix()
        file = StoredFile(path=where, rank=self.to.world.rank, nbytes=path.stat().st_size, sha256=sha256)
        self.files.setdefault(name, []).append(file)

    def put_into_place(self) -> None:
        """When all ranks have written: the manifest, then the name. If one has not, nothing of it is left."""
        world = self.to.world
        try:
            agreed(world, self._raise_error)
            all_files = all_gather(world, self.files)
            agreed(world, lambda: self._name(all_files) if world.is_main else None)
        finally:
            self.remove()

    def remove(self) -> None:
        """What has no name yet; nothing, if all went well."""
        if self.to.world.is_main:
            shutil.rmtree(self.aside, ignore_errors=True)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _name(self, all_files: list[dict[str, list[StoredFile]]]) -> None:
        to = self.to
        components = {
            name: StoredComponent(
                shared=component.shared,
                span=component.ranks_alike(to.world),
                files=[file for files in all_files for file in files.get(name, [])],
            )
            for name, component in to.components.items()
        }
        manifest = Manifest(
            schema_version=SCHEMA,
            step=self.step,
            world_size=to.world.size,
            versions=_versions(),
            config=to.config,
            config_sha256=sha256_of_json(to.config),
            metrics=self.metrics,
            components=components,
        )
        with phase("save: manifest"):
            write_json(self.aside / MANIFEST, manifest.sealed())
        with phase("save: rename"):
            if self.path.exists():  # of the same step, from before a restart
                _remove([put_aside(self.path)])
            self.aside.rename(self.path)
            sync(self.path.parent)


def _versions() -> dict[str, str]:
    return {
        "ddp_tutorial": version("ddp_tutorial"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def latest_valid(world: World, parent: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is as it was written, and what is wrong with those newer than it. Collective."""
    if not world.is_main:
        found: tuple[Path | None, list[str]] = from_rank_zero(world, (None, []))
        return found
    problems: list[str] = []
    for folder in reversed(folders(parent)):
        wrong = verify(folder)
        if not wrong:
            return from_rank_zero(world, (folder, problems))
        problems += wrong
    return from_rank_zero(world, (None, problems))


def stored(folder: Path, name: str) -> Any:
    """What a checkpoint has of a component that is the same on all ranks, such as "model".

    Raises `CheckpointError` where it is not there, or differs from rank to rank. That it is as it was written is for
    `verify`, or `latest_valid`, to say before.
    """
    component = read_manifest(folder).components.get(name)
    if component is None or len(component.files) != 1:
        raise CheckpointError(f"{folder} has no one {name!r} for all ranks")
    return _load(folder / component.files[0].path)


def compare(first: Path, second: Path) -> dict[str, str]:
    """Where two checkpoints differ, and how: settings, files, values. Raises `CheckpointError` for damaged ones."""
    one, other = read_manifest(first), read_manifest(second)
    for folder in (first, second):
        if problems := verify(folder):
            raise CheckpointError("; ".join(problems))
    found = {f"config {key}": f"{a!r} and {b!r}" for key, (a, b) in differences(one.config, other.config).items()}
    names = {file.path: None for manifest in (one, other) for file in manifest.files}
    for name in names:
        if not all((folder / name).is_file() for folder in (first, second)):
            found[name] = "in one of them only"
            continue
        values, others = (dict(leaves(name, _load(folder / name))) for folder in (first, second))
        for where in values | others:
            a, b = values.get(where), others.get(where)
            if (
                isinstance(a, torch.Tensor)
                and isinstance(b, torch.Tensor)
                and a.shape == b.shape
                and a.dtype == b.dtype
            ):
                if not torch.equal(a, b):
                    most = (a.double() - b.double()).abs().max().item()
                    found[where] = f"{int((a != b).sum())} of {a.numel()} elements differ, by {most:.3g} at most"
            elif _summary(a, "tensor") != _summary(b, "tensor"):
                found[where] = f"{_shown(a)} and {_shown(b)}"
    return found


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)


def agreed(world: World, work: Callable[[], Any]) -> Any:
    """What `work` returns here, if it has worked on all ranks; else raises `CheckpointError` on all of them."""
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


# --------------------------------------------------------------------------------------------------- are they equal?


def assert_replicated(world: World, what: str, state: Any, span: int, check: Check) -> None:
    """Raise `CheckpointError`, on all ranks, if a state is not the same on `span` ranks after one another. Collective.

    `check` is "quick" (names, shapes, dtypes, and plain values), "tensor" (a hash of every tensor, too, however deep)
    or "full" (all bytes cross the ranks and are compared; for those who do not trust a hash). Nothing to compare is an
    error: such a check would pass whatever happened.
    """
    values = dict(leaves(what, state))
    mine = {name: _summary(value, check) for name, value in values.items()}
    seen = all_gather(world, mine)
    if not any(seen):
        raise CheckpointError(f"{what!r} has no value to compare between ranks")
    for first in range(0, world.size, span):
        if found := first_difference(seen[first : first + span], first):
            raise CheckpointError(f"{found[0]} is not the same on all ranks: {found[1]}")


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value inside of dicts, lists and tuples, with the way to it: "optimizer['state'][0]['exp_avg']", tensor."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from leaves(f"{name}[{place}]", inner)
    else:
        yield name, value


def _summary(value: Any, check: Check) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)  # NaN is equal to itself here
    kind = (tuple(value.shape), str(value.dtype))
    if check == "quick":
        return kind
    if check == "full":
        return kind, value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return kind, digest({"": value})


# ------------------------------------------------------------------------------------------------------- on the disk

_PLAIN = (torch.Tensor, bool, int, float, str, bytes, type(None))


def _check_plain(states: Mapping[str, State]) -> None:
    """What cannot be loaded without executing it is refused when it is saved, not when it is needed."""
    for where, value in (leaf for name, state in states.items() for leaf in leaves(name, state)):
        if not isinstance(value, _PLAIN):
            raise CheckpointError(
                f"{where} is of type {type(value).__name__}, which cannot be loaded without executing code. State is "
                "tensors, numbers, text, None, and dicts, lists and tuples of them."
            )


def _copy(value: Any, memory: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(memory, torch.Tensor) and memory.shape == value.shape and memory.dtype == value.dtype:
        return memory.copy_(value.detach())
    return value.detach().to("cpu", copy=True)


def _dump(stem: Path, state: State) -> Path:
    """Tensors by name as safetensors, anything else as torch writes it. Returns the path."""
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        path = stem.with_name(f"{stem.name}.safetensors")
        tensors, aliases = _without_aliases(state)
        safetensors.torch.save_file(tensors, path, metadata=aliases)
        return path
    path = stem.with_name(f"{stem.name}.pt")
    torch.save(state, path)
    return path


def _without_aliases(state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tied weights are one tensor with two names: safetensors keeps the first, and the metadata say who else has it."""
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


def _load(path: Path) -> State:
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
                return tensors | {alias: tensors[name] for alias, name in (file.metadata() or {}).items()}
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def _load_sharded(folder: Path, thing: Stateful) -> None:
    """Each rank reads what belongs to its pieces, however many ranks have written."""
    import torch.distributed.checkpoint as dcp

    state = dict(thing.state_dict())
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    thing.load_state_dict(state)


def _synced_sha256(path: Path) -> str:
    """The disk takes its time, and so does the hash: both at once."""
    syncing = threading.Thread(target=sync, args=(path,))
    syncing.start()
    try:
        return sha256_of(path)
    finally:
        syncing.join()


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------- ready components


@dataclass(frozen=True)
class StateOf:
    """A component from two functions, for what has other names for them."""

    get: Callable[[], Mapping[str, Any]]
    put: Callable[[State], object]

    def state_dict(self) -> Mapping[str, Any]:
        return self.get()

    def load_state_dict(self, state: State) -> None:
        self.put(state)


class RandomState:
    """The generators of Python, NumPy, and torch on the CPU and on this rank's GPU, as a component."""

    def __init__(self, device: torch.device, reseed: Callable[[int], None] | None = None) -> None:
        self.device, self.reseed = device, reseed

    def state_dict(self) -> State:
        """Plain values and tensors."""
        python_version, numbers, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        state: State = {
            "python": (python_version, numbers, gauss),
            "numpy": (
                kind,
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ),
            "torch": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: State) -> None:
        """Go on drawing where the state was taken."""
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def load_from_other_world(self, states: Sequence[State], step: int) -> None:
        """A generator cannot be shared out to more ranks, or fewer: all begin anew, from numbers of their own."""
        if self.reseed is None:
            raise CheckpointError("the random numbers of another number of ranks need a 'reseed'")
        self.reseed(step)
