"""What is kept of one run, as one context manager: its folder, its log, what each rank says and uses, how it failed.

record = RunRecord(world, folder, config)
with record.exclusive():  # the folder is locked; check here whether the run can resume, and raise if it cannot
    with record:
        record.reopen()
        record.log.add(...)
        record.write_result({...})
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint.manifest import SHARE
from ddp_tutorial.collectives import all_gather, decide_on_rank_zero
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import RUNS, locked, notify_observers, remove, remove_temporary, temporary_path, write_json
from ddp_tutorial.phases import Stopwatch, observe
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.runs.rank_logs import rank_log, record_failure
from ddp_tutorial.runs.step_log import StepLog
from ddp_tutorial.runs.usage import Usage
from ddp_tutorial.world import World

_MARK = "shared"  # the name, for an instant, of the file by which ranks see that they share a folder


def open_folder(
    world: World, name: str, label: str, *, resuming: bool, shared: bool = False, private: bool = True
) -> RunFolder:
    """One folder for the run, made by rank 0 and known to all: if each made its own, clocks would decide. Collective.
    It is empty; `RunRecord.exclusive` makes it the folder of a run.

    It is called `name`, or by the time and `label`. With `again` it is the folder of that name, whoever made it; else a
    name that is taken gets a number. Where it has to be `shared`, as checkpoints do, and some rank does not see it, or
    sees another one of that name, raises `ConfigError` on all ranks, and there is no new folder.

    If `private`, nobody but its owner can read a new folder. Otherwise the umask decides, as it does about the folders
    that the new one is in, such as runs/.
    """
    label = f"{label}-{world.size}x"
    folder, is_new = decide_on_rank_zero(world, lambda: _made_folder(name, label, resuming, private))
    others = _not_seeing(world, folder.path) if shared else []
    if others:
        if is_new and world.is_main:
            shutil.rmtree(folder.path)
            with suppress(OSError):  # others are in it
                RUNS.rmdir()
        raise ConfigError(
            f"rank {', '.join(others)} does not see {folder.path}, where checkpoints are to be saved: these ranks "
            f"share no folder. {SHARE} To save none, use checkpoint.every=0."
        )
    return folder


def require_rank_zeros(world: World, name: str) -> None:
    """Raise `ConfigError`, on all ranks, where the folder of that name on rank 0's disk has been that of another rank:
    the run, and its checkpoints, are on another host. Collective."""

    def look() -> None:
        folder = RunFolder(RUNS / name)
        if not folder.exists() and any(folder.path.glob("rank_*.log")):
            raise ConfigError(
                f"{folder.path} has logs of other ranks, and nothing of rank 0: it was on another host, whose disk has "
                "the checkpoints. Start rank 0 there, or use another name."
            )

    decide_on_rank_zero(world, look)


def _not_seeing(world: World, folder: Path) -> list[str]:
    """The ranks that do not find in `folder` what rank 0 has just put there. That there is one of its name says little:
    each node may have its own, of an earlier run. Collective."""
    if world.size == 1:
        return []
    mark = decide_on_rank_zero(world, lambda: _marked(folder))
    try:
        return [str(rank) for rank, sees in enumerate(all_gather(world, mark.exists())) if not sees]
    finally:
        if world.is_main:
            remove(mark)


def _marked(folder: Path) -> Path:
    """Make an empty file in `folder`, under a name that no other has, and return its path."""
    mark = temporary_path(folder / _MARK)
    notify_observers("write", mark)
    mark.touch(exist_ok=False)
    return mark


def _made_folder(name: str, label: str, again: bool, private: bool) -> tuple[RunFolder, bool]:
    """Create the folder of a run (see `open_folder`); return it, and whether it is new."""
    path = RUNS / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{label}")
    folder = RunFolder(path, mode=0o700 if private else 0o777)
    return (folder, folder.create()) if again else (folder.create_numbered(), True)


class RunRecord:
    """What is kept of a run, on one rank: of one with the settings of `config`. Enter it once, inside of `alone`, for
    the length of the run.

    Inside, what the rank says goes to its log, phases are timed, and an exception leaves a note.
    """

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        config: Mapping[str, Any],
        *,
        unit: str = "samples",
        events: bool = False,
        memory_limit_mb: float = 0,
    ) -> None:
        self.world, self.folder, self.config = world, folder, config
        self.log = StepLog(world, folder.metrics, unit, events=events)
        self.usage = Usage(world, memory_limit_mb)
        self.watch = Stopwatch(world.device)
        self.step = 0  # that a failure came after
        self._inside = ExitStack()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, no other run may use the folder. One that is new has its config by now; in that of an earlier life
        nothing has been touched yet. Raises `FolderInUseError`, on all ranks, where another run uses it. Collective.

        First it is locked: whoever sees the config or the log of a run that has just begun, sees that it is running.
        """
        with ExitStack() as stack:
            stack.callback(self.log.close_file)  # also when a step fails

            def begin() -> None:
                stack.enter_context(locked(self.folder.path))
                if not self.folder.exists():
                    write_json(self.folder.config, self.config)
                self.log.open()

            decide_on_rank_zero(self.world, begin)
            yield

    def __enter__(self) -> "RunRecord":
        with ExitStack() as stack:
            stack.enter_context(rank_log(self.world, self.folder))
            stack.enter_context(record_failure(self.world, self.folder, lambda: self.step))
            stack.enter_context(observe(self.watch))
            if self.world.is_main:  # how an earlier attempt has ended
                self.folder.failure.unlink(missing_ok=True)
            self._inside = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.__exit__(*error)

    def reopen(self) -> None:
        """The run goes on: what an earlier life of it has come to is not its result any more."""
        if self.world.is_main:
            remove_temporary(self.folder.path, _MARK)
            self.folder.result.unlink(missing_ok=True)

    def record_step(self, number: int) -> dict[str, float]:
        """The seconds of a step by phase, for the log; they are added up for the usage of ranks."""
        self.step = number
        seconds = self.watch.take()
        self.usage.add(seconds)
        return seconds

    def write_result(self, content: Mapping[str, Any]) -> None:
        """`result.json`, the last thing that a run writes, with the environment; on rank 0."""
        if self.world.is_main:
            write_json(self.folder.result, {"schema": 1, **content, "environment": describe_environment()})
