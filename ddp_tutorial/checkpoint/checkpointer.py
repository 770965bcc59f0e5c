"""What survives: save and load the state of a run, exactly, on any number of ranks.

    checkpointer = Checkpointer(folder, {"model": Component(model), "rng": Component(rng, "per_rank")}, world)
    checkpointer.save(step)
    manifest = checkpointer.load(latest(folder))

A component is anything with `state_dict` and `load_state_dict`. Which ranks have the same of it decides who writes it:

    replicated   all ranks have the same; rank 0 writes it, after a check that it really is the same
    global       rank 0 has it for all
    per_rank     each rank has its own
    per_node     the ranks of one machine have the same
    per_group    each group of `span` consecutive ranks has the same
    sharded      each rank has a piece of every tensor (DTensor, as FSDP makes them), or some of the tensors whole; in a
                 world of another size it has other ones

Each writes into the same folder. Where ranks are on hosts that share no disk, rank 0 writes and reads for all, with
`shared=False`: states go to it, and from it, over the network.

All ranks agree on every step of saving and loading: if one fails, all raise, and the earlier checkpoints stay as they
were. Files are compared with the manifest before anything is restored, and only tensors and plain values are read:
nothing in a checkpoint is executed.
"""

import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddp_tutorial.checkpoint.components import Component, Reshardable, State, require_even_nodes, require_unsharded
from ddp_tutorial.checkpoint.consistency import Check, assert_replicated
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
    check_plain,
    load_shards,
    read_state,
    sync_and_hash,
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
Components = dict[tuple[str, int], State]  # the component's name and the rank whose state it is


class Checkpointer:
    """Saves and loads the `components` of one run, in `folder`. All methods but `close` are collective.

    Keeps the `keep_last` newest valid checkpoints and the `keep_best` best by `metric` (see `Retention`); `check` is
    how thoroughly replicated state is compared between ranks (see `assert_replicated`), `config` what the manifest
    records of the run. With `shared=False` the folder is rank 0's alone, and others need not see it; raises
    `ConfigError` then for components that are sharded.
    """

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
        """Settle what a killed run has left: remove what it had not finished, and where it was about to replace a
        checkpoint, give the old one back its name. Lock the folder first: see `files.locked`."""
        if self.world.is_main:
            recover_all(self.folder)

    def save(self, step: int, metrics: Mapping[str, float | None] | None = None) -> None:
        """Write a checkpoint of `step`. With `background`, only copy the state, and let a thread write the copy.

        The manifest keeps `metrics`; one that is NaN or infinite as None, which is worse than any number.
        Raises `CheckpointError` on all ranks if one rank cannot write its part; then nothing of it is left behind.
        """
        self.finish()
        self.close()
        with phase("save: copy" if self.background else "save: collect"):
            parts, sharded = self._parts()
        writer = _Writer(self, step, without_nan(metrics or {}), parts)
        try:
            writer.write_sharded(sharded)
        except CheckpointError:
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
        """Is a background save still being written, on this rank?"""
        return self._pending is not None and not self._pending.done

    def poll(self) -> None:
        """Publish a background save if all ranks have written their part. Call it after each step.

        An error of the background is raised here, on all ranks.
        """
        if self._pending is not None and not any_rank(self.world, self.is_writing):
            self.finish()

    def finish(self) -> None:
        """Wait for a background save on all ranks, publish it, and remove the checkpoints that need not be kept."""
        writer, self._pending = self._pending, None
        if writer is not None:
            writer.join()
            writer.publish()
            if self.world.is_main:
                self.retention.record_valid(writer.path, writer.metrics)
                self.retention.apply(written=writer.path)

    def load(self, folder: Path, exclude: Sequence[str] = ()) -> Manifest:
        """Restore all components from the checkpoint in `folder`, except those that `exclude` names.

        Raises `CheckpointError` on all ranks, before anything has been restored, where files are damaged, where a
        component is missing in the checkpoint or in this run, and where a component saved on another number of ranks
        cannot be restored on this one.
        """
        with phase("load"):
            manifest, restores = run_on_all_ranks(self.world, lambda: self._read(folder, exclude), CheckpointError)
            for restore in restores:
                restore()
        self.retention.record_valid(folder, manifest.metrics)
        checked: Manifest = manifest
        return checked

    def close(self) -> None:
        """Wait for this rank's background threads. A save that `finish` has not waited for is not published."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        self.retention.close()

    def _parts(self) -> tuple[Components, dict[str, State]]:
        """The states that this rank has to write, after the checks; those of sharded components apart."""
        states = {name: dict(component.stateful.state_dict()) for name, component in self.components.items()}
        run_on_all_ranks(self.world, lambda: check_plain(states), CheckpointError)
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
        """The parts of all ranks on rank 0, which has most of them anyway, and none elsewhere."""
        sent = {} if self.world.is_main else tree_map(lambda value: _copy(value, None), parts)
        of_others = to_rank_zero(self.world, sent)
        return {key: state for each in (parts, *of_others) for key, state in each.items()} if of_others else {}

    def _copied(self, parts: Components) -> Components:
        """A copy on the CPU, in the memory of the last copy where it fits: new memory takes several times as long."""
        values, structure = tree_flatten(parts)
        before = self._memory if len(self._memory) == len(values) else [None] * len(values)
        self._memory = [_copy(value, old) for value, old in zip(values, before, strict=True)]
        copied: Components = tree_unflatten(self._memory, structure)
        return copied

    def _read(self, folder: Path, exclude: Sequence[str]) -> tuple[Manifest, list[Callable[[], object]]]:
        """Check the checkpoint and read what this rank needs of it; returns the calls that restore it."""
        manifest = self._seen(lambda: read_manifest(folder))
        known = {**self.components, **manifest.components}
        if unknown := set(exclude) - set(known):
            raise CheckpointError(f"{sorted(unknown)[0]!r} is no component of this run: {', '.join(known)}")
        wanted = [name for name in self.components if name not in exclude]
        for name in wanted:
            if name not in manifest.components:
                raise CheckpointError(f"{folder} has no {name!r}; to go on without, leave it out by name")
        for name in manifest.components:
            if name not in self.components and name not in exclude:
                raise CheckpointError(
                    f"{folder} has {name!r}, which this run has no use for; to go on without, leave it out by name"
                )
        self._seen(lambda: read_verified(folder))  # which takes longer than all that could be wrong so far
        return manifest, [self._restore(folder, manifest, name) for name in wanted]

    def _seen(self, read: Callable[[], Found]) -> Found:
        """What `read` finds on this rank's disk, or, where only rank 0 has the folder, on rank 0's: collective then."""
        return read() if self.shared else decide_on_rank_zero(self.world, read)

    def _restore(self, folder: Path, manifest: Manifest, name: str) -> Callable[[], object]:
        """The call that restores one component. Its file is read already; sharded tensors are read by the call itself,
        because all ranks read them together."""
        component, stored = self.components[name], manifest.components[name]
        thing, alike = component.stateful, component.ranks_alike(self.world)
        if stored.shared != component.shared:
            raise CheckpointError(f"{folder} has {name!r} {stored.shared}, and here it is {component.shared}")
        if stored.shared == "sharded":
            return partial(load_shards, folder / name, thing)
        if len(stored.files) == self.world.size // alike:
            [state] = self._states(folder, stored, [self.world.rank // alike])
            return partial(thing.load_state_dict, state)
        if not isinstance(thing, Reshardable):
            raise CheckpointError(
                f"{name!r} is {stored.shared}: {folder} has it for {manifest.world_size} ranks, and it cannot be "
                f"given to {self.world.size}. To go on without, leave it out by name."
            )
        states = self._states(folder, stored, range(len(stored.files)))
        return partial(thing.load_resharded, states, manifest.step)

    def _states(self, folder: Path, stored: StoredComponent, wanted: Sequence[int]) -> list[State]:
        """The states in those files of a component, by their places in the list. What rank 0 reads for all comes one
        file at a time, and each rank keeps what it wants."""
        read = [partial(read_state, folder / file.path) for file in stored.files]
        if self.shared:
            return [read[place]() for place in wanted]
        states = ((place, self._seen(each)) for place, each in enumerate(read))
        return [state for place, state in states if place in wanted]


class _Writer:
    """Writes one checkpoint: this rank's files into a temporary folder, which gets the checkpoint's name at the end.

    `run` may be in a thread, so it enters no collective; `write_sharded` and `publish` do, in the main thread.
    """

    def __init__(self, checkpointer: Checkpointer, step: int, metrics: dict[str, Any], parts: Components) -> None:
        self.checkpointer, self.world = checkpointer, checkpointer.world
        self.step, self.metrics, self.parts = step, metrics, parts
        self.path = checkpointer.folder / checkpoint_name(step)
        self.temporary: Path = from_rank_zero(self.world, temporary_path(self.path))
        self.shards: dict[str, list[Path]] = {}
        self.files: dict[str, list[StoredFile]] = {}
        self.error: Exception | None = None
        self.done = False
        self._thread: threading.Thread | None = None

    def write_sharded(self, states: Mapping[str, State]) -> None:
        """Write the sharded components now, also of a background save: ranks write them together."""
        for name, state in states.items():
            folder = self.temporary / name
            with phase("save: write"):
                run_on_all_ranks(self.world, partial(write_shards, folder, state, self.world), CheckpointError)
            paths = sorted(folder.iterdir())
            if len({tuple(names) for names in all_gather(self.world, [path.name for path in paths])}) > 1:
                raise CheckpointError(f"the ranks see different files of {self.path}: they share no folder. {SHARE}")
            self.shards[name] = paths[self.world.rank :: self.world.size]

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Write this rank's files, and wait until they have reached the disk. `publish` raises the error, if any."""
        try:
            if self.world.is_main or self.checkpointer.shared:
                notify_observers("write", self.temporary)
                self.temporary.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor() as pool:  # while one file is hashed, the next one is written
                records = [(name, pool.submit(self._record, rank, path)) for name, rank, path in self._write()]
            for name, record in records:
                self.files.setdefault(name, []).append(record.result())
        except Exception as error:
            self.error = error
        self.done = True

    def _write(self) -> Iterator[tuple[str, int, Path]]:
        """The component's name, the rank whose state it is and the path of each of this rank's files, as soon as it is
        written; shards have been written before."""
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
        """Wait until a file has reached the disk, and return what the manifest says of it."""
        with phase("save: sync"):
            sha256 = sync_and_hash(path)
        where = path.relative_to(self.temporary).as_posix()
        return StoredFile(path=where, rank=rank, nbytes=path.stat().st_size, sha256=sha256)

    def publish(self) -> None:
        """When all ranks have written: add the manifest, then rename the folder. If one has failed, remove it all."""
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
        """Delete the temporary folder, on each rank, as each may have its own. After a successful `publish` it has
        another name, and nothing is deleted."""
        remove(self.temporary)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _require_files(self, files_of_ranks: list[dict[str, list[StoredFile]]]) -> None:
        """Raise `CheckpointError` where this rank does not see a file as another one has written it."""
        for file in (file for files in files_of_ranks for each in files.values() for file in each):
            path = self.temporary / file.path
            if not path.is_file() or path.stat().st_size != file.nbytes:
                raise CheckpointError(
                    f"rank {self.world.rank} does not see {file.path}, which rank {file.rank} has written for "
                    f"{self.path}: these ranks share no folder, and a checkpoint needs one. {SHARE}"
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
            versions=_versions(),
            config=config,
            config_sha256=sha256_of_json(config),
            metrics=self.metrics,
            components=components,
        )


def _versions() -> dict[str, str]:
    return {
        "ddp_tutorial": version("ddp_tutorial"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _copy(value: Any, memory: Any) -> Any:
    """A tensor's copy on the CPU, in `memory` if that has its shape and dtype; any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(memory, torch.Tensor) and memory.shape == value.shape and memory.dtype == value.dtype:
        return memory.copy_(value.detach())
    return value.detach().to("cpu", copy=True)
