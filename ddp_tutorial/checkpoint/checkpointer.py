"""Save and load the exact state of a run, on any number of ranks.

    checkpointer = Checkpointer(folder, {"model": Component(model), "rng": Component(rng, "per_rank")}, world)
    checkpointer.save(step)
    manifest = checkpointer.load(latest(folder))

A component is any object with `state_dict` and `load_state_dict`. `Component.shared` specifies which ranks hold the
same state, and therefore which ranks write the state:

    replicated   All ranks hold the same state. After a consistency check, rank 0 writes the state.
    global       Rank 0 holds the state for all ranks.
    per_rank     Each rank holds its own state.
    per_node     The ranks of one node hold the same state.
    per_group    Each group of `span` consecutive ranks holds the same state.
    sharded      Each rank holds a shard of every tensor (a DTensor, as in FSDP), or a subset of the full tensors. The
                 shards depend on the world size.

By default, all ranks write to the same folder. If the hosts do not share a disk, pass `shared=False` to `Checkpointer`.
With `shared=False`, rank 0 reads and writes the files of all ranks, and states are sent over the network.

All ranks synchronize at every stage of saving and loading. If one rank fails, all ranks raise an error, and earlier
checkpoints stay intact. Files are compared with the manifest before any state is restored. Only tensors and plain
values are read, so loading a checkpoint never executes code from it.
"""

import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddp_tutorial.checkpoint.components import Component, Reshardable, State, require_even_nodes, require_unsharded
from ddp_tutorial.checkpoint.config import Check
from ddp_tutorial.checkpoint.consistency import assert_replicated
from ddp_tutorial.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    SHARE,
    CheckpointError,
    Manifest,
    Mode,
    StoredComponent,
    StoredFile,
    checkpoint_name,
    read_manifest,
    read_verified,
    recover_all,
    sha256_of_json,
)
from ddp_tutorial.checkpoint.retention import Retention
from ddp_tutorial.checkpoint.storage import (
    load_shards,
    memory_of,
    read_state,
    sync_and_hash,
    to_plain,
    write_shards,
    write_state,
)
from ddp_tutorial.collectives import (
    all_gather,
    any_rank,
    decide_on_rank_zero,
    from_rank_zero,
    run_on_all_ranks,
    to_rank_zero,
)
from ddp_tutorial.compat import tree_flatten, tree_map, tree_unflatten
from ddp_tutorial.files import notify_observers, remove, replace_directory, temporary_path, without_nan, write_json
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World, require_group

Found = TypeVar("Found")
Components = dict[tuple[str, int], State]  # by component name and rank


class Checkpointer:
    """An object that saves and loads the components of one run. All methods except `close` are collective."""

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
        shared: bool = True,
    ) -> None:
        """Store the arguments. Collective.

        Args:
            folder: The checkpoint folder.
            components: The components of the run's state, by name.
            world: The ranks of the run.
            config: The settings that the manifest records.
            check: The method for comparing replicated state between ranks; see `assert_replicated`.
            background: Whether a thread writes the files while training continues.
            keep_last: The number of newest valid checkpoints to keep.
            keep_best: The number of checkpoints with the best `metric` to keep, regardless of age; see `Retention`.
            metric: The name of the metric.
            mode: `"min"` if lower values of the metric are better, and `"max"` otherwise.
            shared: Whether all ranks share `folder`. If false, only rank 0 accesses `folder`.

        Raises:
            ConfigError: If `shared` is false, a component is sharded, and there is more than one rank.
            ValueError: If a component's `shared` is `"per_node"` and the number of ranks differs between nodes.
        """
        require_group(world)
        if not shared:
            require_unsharded(world, components)
        require_even_nodes(world, components)
        self.folder, self.components, self.world = folder, dict(components), world
        self.config, self.check, self.background, self.shared = dict(config or {}), check, background, shared
        self.retention = Retention(folder, keep_last, keep_best, metric, mode)
        self._pending: _Writer | None = None
        self._memory: list[Any] = []

    def recover(self) -> None:
        """Clean up after a killed run. Collective.

        Remove unfinished checkpoints, and restore checkpoints whose replacement was interrupted. The caller must
        ensure that no other process saves to the folder, for example with `files.locked`.
        """
        decide_on_rank_zero(self.world, lambda: recover_all(self.folder))

    def save(self, step: int, metrics: Mapping[str, float | None] | None = None) -> None:
        """Write a checkpoint for `step`. With `background`, a thread writes a copy of the state.

        The manifest records the metrics. NaN and infinite metrics are stored as None, which counts as worse than any
        number.

        Raises:
            CheckpointError: On all ranks, if any rank cannot write its files. The partial checkpoint is removed.
        """
        self.finish()
        self.close()
        with phase("save: copy" if self.background else "save: collect"):
            parts, sharded = self._parts()
        writer = _Writer(self, step, without_nan(metrics or {}), parts)
        try:
            writer.write_sharded(sharded)
        except BaseException:
            writer.remove()
            raise
        self._pending = writer
        if self.background:
            writer.start()
        else:
            writer.run()
            self.finish()

    @property
    def is_writing(self) -> bool:
        """Whether a background save is still in progress on this rank."""
        return self._pending is not None and not self._pending.done

    def poll(self) -> None:
        """Publish a background save if all ranks have already written their files. Call this method after each step.

        Raises:
            CheckpointError: On all ranks, if the background save failed on any rank.
        """
        if self._pending is not None and not any_rank(self.world, self.is_writing):
            self.finish()

    def finish(self) -> None:
        """Wait for a background save on all ranks, publish it, and remove old checkpoints.

        Raises:
            CheckpointError: On all ranks, if the background save failed on any rank.
        """
        writer, self._pending = self._pending, None
        if writer is not None:
            writer.join()
            writer.publish()
            if self.world.is_main:
                self.retention.record_valid(writer.path, writer.metrics)
                self.retention.apply(written=writer.path)

    def load(self, folder: Path, exclude: Sequence[str] = ()) -> Manifest:
        """Restore all components, except those in `exclude`, from the checkpoint in `folder`. Return its manifest.

        Raises:
            CheckpointError: On all ranks, if a file is damaged, the components do not match the run, or a component
                does not support this number of ranks. The error is raised before any state is restored, unless it
                concerns a sharded tensor or comes from `Reshardable.load_resharded`.
        """
        with phase("load"):
            manifest, restores = run_on_all_ranks(self.world, lambda: self._read(folder, exclude), CheckpointError)
            for restore in restores:
                restore()
        self.retention.record_valid(folder, manifest.metrics)
        return manifest

    def close(self) -> None:
        """Wait for this rank's background threads. A background save is not published unless `finish` is called."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        self.retention.close()

    def _parts(self) -> tuple[Components, dict[str, State]]:
        """Run the consistency checks. Return the unsharded states that this rank writes, and the sharded states."""
        found = {name: dict(component.stateful.state_dict()) for name, component in self.components.items()}
        states: dict[str, State] = run_on_all_ranks(
            self.world, lambda: {name: to_plain(name, state) for name, state in found.items()}, CheckpointError
        )
        if self.check != "none":
            for name, component in self.components.items():
                if component.shared not in {"global", "sharded"} and self.world.size > 1:
                    assert_replicated(self.world, name, states[name], component.ranks_alike(self.world), self.check)
        sharded = {name: states.pop(name) for name, part in self.components.items() if part.shared == "sharded"}
        rank = self.world.rank
        parts = {
            (name, rank): state
            for name, state in states.items()
            if rank % self.components[name].ranks_alike(self.world) == 0
        }
        if not self.shared:
            parts = self._at_rank_zero(parts)
        return (self._copied(parts) if self.background else parts), sharded

    def _at_rank_zero(self, parts: Components) -> Components:
        """Gather the states of all ranks on rank 0. Return an empty dict on the other ranks."""
        sent = {} if self.world.is_main else tree_map(lambda value: _copy(value, None), parts)
        of_others = to_rank_zero(self.world, sent)
        return {key: state for each in (parts, *of_others) for key, state in each.items()} if of_others else {}

    def _copied(self, parts: Components) -> Components:
        """Copy the states to CPU memory. Tied tensors are copied once.

        If the shapes and dtypes match, the previous copy is overwritten. Overwriting is several times faster than
        copying to newly allocated memory.
        """
        values, structure = tree_flatten(parts)
        if len(self._memory) != len(values):
            self._memory = [None] * len(values)
        copies: dict[object, Any] = {}
        copied = []
        for place, value in enumerate(values):
            key = memory_of(value)
            if key is None or key not in copies:
                copies[key] = self._memory[place] = _copy(value, self._memory[place])
            copied.append(copies[key])
        return tree_unflatten(copied, structure)

    def _read(self, folder: Path, exclude: Sequence[str]) -> tuple[Manifest, list[Callable[[], object]]]:
        """Verify the checkpoint and read this rank's states. Return the manifest and all restore functions."""
        manifest = self._on_reading_rank(lambda: read_manifest(folder))
        known = {**self.components, **manifest.components}
        if unknown := set(exclude) - set(known):
            raise CheckpointError(f"a component to exclude must be one of {', '.join(known)}, got {min(unknown)!r}")
        wanted = [name for name in self.components if name not in exclude]
        for name in wanted:
            if name not in manifest.components:
                raise CheckpointError(
                    f"{folder} does not contain {name!r}. To resume without it, set resume_without=[{name}], or pass "
                    f"exclude=[{name!r}] to Checkpointer.load"
                )
        for name in manifest.components:
            if name not in self.components and name not in exclude:
                raise CheckpointError(
                    f"{folder} contains {name!r}, but this run has no such component. To resume without it, set "
                    f"resume_without=[{name}], or pass exclude=[{name!r}] to Checkpointer.load"
                )
        self._on_reading_rank(lambda: read_verified(folder))  # last, because it takes the longest
        return manifest, [self._restore(folder, manifest, name) for name in wanted]

    def _on_reading_rank(self, read: Callable[[], Found]) -> Found:
        """Return the result of `read`.

        If only rank 0 can access the folder, rank 0 calls `read` for all ranks, and the method is collective.
        """
        return read() if self.shared else decide_on_rank_zero(self.world, read)

    def _restore(self, folder: Path, manifest: Manifest, name: str) -> Callable[[], object]:
        """Return a function that restores one component.

        The component's files are read immediately, before any state is restored. The returned function reads sharded
        tensors itself, because that read is collective.
        """
        component, stored = self.components[name], manifest.components[name]
        thing, alike = component.stateful, component.ranks_alike(self.world)
        if stored.shared != component.shared:
            raise CheckpointError(
                f"component {name!r} must have shared={stored.shared!r}, as in {folder}, got {component.shared!r}"
            )
        if stored.shared == "sharded":
            return partial(load_shards, folder / name, thing, self.world)
        if len(stored.files) == self.world.size // alike:
            [state] = self._states(folder, stored, [self.world.rank // alike])
            return partial(thing.load_state_dict, state)
        if not isinstance(thing, Reshardable):
            raise CheckpointError(
                f"component {name!r} is {stored.shared}: its state in {folder} was saved by {manifest.world_size} "
                f"ranks and cannot be loaded on {self.world.size} ranks. To resume without this component, set "
                f"resume_without=[{name}], or pass exclude=[{name!r}] to Checkpointer.load"
            )
        states = self._states(folder, stored, range(len(stored.files)))
        return partial(thing.load_resharded, states, manifest.step)

    def _states(self, folder: Path, stored: StoredComponent, wanted: Sequence[int]) -> list[State]:
        """Read a component's files, and return the states at the `wanted` positions.

        If rank 0 reads for all ranks, it sends one file at a time, and each rank keeps only its own states.
        """
        read = [partial(read_state, folder / file.path) for file in stored.files]
        if self.shared:
            return [read[place]() for place in wanted]
        states = ((place, self._on_reading_rank(each)) for place, each in enumerate(read))
        return [state for place, state in states if place in wanted]


class _Writer:
    """A writer for one checkpoint. Each rank writes its files into a temporary folder, which `publish` renames.

    The method `run` calls no collectives, because it may run in a background thread. `write_sharded` and `publish` call
    collectives in the main thread.
    """

    def __init__(self, checkpointer: Checkpointer, step: int, metrics: dict[str, Any], parts: Components) -> None:
        """Choose a temporary folder that is the same on all ranks. Collective."""
        self.checkpointer, self.world = checkpointer, checkpointer.world
        self.step, self.metrics, self.parts = step, metrics, parts
        self.path = checkpointer.folder / checkpoint_name(step)
        self.temporary: Path = from_rank_zero(self.world, temporary_path(self.path))
        self.shards: dict[str, list[Path]] = {}
        self.files: dict[str, list[StoredFile]] = {}
        self.error: BaseException | None = None
        self.done = False
        self._thread: threading.Thread | None = None

    def write_sharded(self, states: Mapping[str, State]) -> None:
        """Write the sharded components immediately, even in a background save, because the write is collective."""
        for name, state in states.items():
            folder = self.temporary / name
            with phase("save: write"):
                run_on_all_ranks(self.world, partial(write_shards, folder, state, self.world), CheckpointError)
            paths = sorted(folder.iterdir())
            if len({tuple(names) for names in all_gather(self.world, [path.name for path in paths])}) > 1:
                raise CheckpointError(
                    f"the ranks see different files in {self.path}, so they do not share this folder. Start all ranks "
                    "in the same folder, on a disk that all nodes share."
                )
            self.shards[name] = paths[self.world.rank :: self.world.size]

    def start(self) -> None:
        """Start a thread that calls `run`."""
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread if it was started."""
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Write this rank's files and flush them to disk. After a failure or interrupt, `publish` raises the error."""
        try:
            if self.world.is_main or self.checkpointer.shared:
                notify_observers("write", self.temporary)
                self.temporary.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor() as pool:  # hash one file while the next one is being written
                records = [(name, pool.submit(self._record, rank, path)) for name, rank, path in self._write()]
            for name, record in records:
                self.files.setdefault(name, []).append(record.result())
        except BaseException as error:  # an interrupted save must not be published either
            self.error = error
        self.done = True

    def _write(self) -> Iterator[tuple[str, int, Path]]:
        """Write this rank's files, and yield the component name, the rank, and the path of each file.

        The shards have already been written by `write_sharded`.
        """
        for name, paths in self.shards.items():
            for path in paths:
                yield name, self.world.rank, path
        for (name, rank), state in self.parts.items():
            alike = self.checkpointer.components[name].ranks_alike(self.world)
            stem = name if alike == self.world.size else f"{name}.rank_{rank}"
            with phase("save: write"):
                path = write_state(self.temporary / stem, state)
            yield name, rank, path

    def _record(self, rank: int, path: Path) -> StoredFile:
        """Flush a file to disk, and return its entry in the manifest."""
        with phase("save: sync"):
            sha256 = sync_and_hash(path)
        where = path.relative_to(self.temporary).as_posix()
        return StoredFile(path=where, rank=rank, nbytes=path.stat().st_size, sha256=sha256)

    def publish(self) -> None:
        """After all ranks have finished writing, add the manifest and rename the folder. Collective.

        Raises:
            CheckpointError: On all ranks, if any rank failed. After a failure, all files of the checkpoint are removed.
        """
        try:
            run_on_all_ranks(self.world, self._raise_error, CheckpointError)
            files_of_ranks = all_gather(self.world, self.files)
            decide_on_rank_zero(self.world, lambda: self._require_files(files_of_ranks))
            run_on_all_ranks(
                self.world, lambda: self._rename(files_of_ranks) if self.world.is_main else None, CheckpointError
            )
        finally:
            self.remove()

    def remove(self) -> None:
        """Delete the temporary folder on every rank, because ranks may see different disks.

        After a successful `publish`, the folder has a different name, so nothing is deleted.
        """
        remove(self.temporary)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _require_files(self, files_of_ranks: list[dict[str, list[StoredFile]]]) -> None:
        """Raise an error unless this rank sees the files of all ranks.

        Raises:
            CheckpointError: If a file is missing, or its size is not the recorded size.
        """
        for file in (file for files in files_of_ranks for each in files.values() for file in each):
            path = self.temporary / file.path
            if not path.is_file() or path.stat().st_size != file.nbytes:
                raise CheckpointError(
                    f"rank {self.world.rank} cannot read {file.path}, which rank {file.rank} wrote for {self.path}. "
                    f"A checkpoint requires a folder that all ranks share. {SHARE}"
                )

    def _rename(self, files_of_ranks: list[dict[str, list[StoredFile]]]) -> None:
        with phase("save: manifest"):
            write_json(self.temporary / MANIFEST, self._manifest(files_of_ranks).sealed())
        with phase("save: rename"):
            replace_directory(self.temporary, self.path)

    def _manifest(self, files_of_ranks: list[dict[str, list[StoredFile]]]) -> Manifest:
        config = self.checkpointer.config
        components = {
            name: StoredComponent(
                shared=component.shared,
                span=component.ranks_alike(self.world),
                files=[file for files in files_of_ranks for file in files.get(name, [])],
            )
            for name, component in self.checkpointer.components.items()
        }
        return Manifest(
            schema_version=SCHEMA,
            step=self.step,
            world_size=self.world.size,
            versions={"ddp_tutorial": _version(), "torch": torch.__version__, "python": platform.python_version()},
            config=config,
            config_sha256=sha256_of_json(config),
            metrics=self.metrics,
            components=components,
        )


def _version() -> str:
    """Return the version of the installed package, or "unknown" if the package is only on PYTHONPATH."""
    try:
        return version("ddp_tutorial")
    except PackageNotFoundError:
        return "unknown"


def _copy(value: Any, memory: Any) -> Any:
    """Copy a tensor to the CPU. Reuse `memory` if its shape and dtype match. Return any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(memory, torch.Tensor) and memory.shape == value.shape and memory.dtype == value.dtype:
        return memory.copy_(value.detach())
    return value.detach().to("cpu", copy=True)
