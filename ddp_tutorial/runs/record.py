"""Manage a run's folder, metrics, rank logs, resource usage and failure record with one context manager.

record = RunRecord(world, folder, config)
with record.exclusive():  # locks the folder; check here whether the run can resume, and raise an error if it cannot
    with record:
        record.reopen()
        record.log.add(...)
        record.write_result({...})
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint.manifest import SHARE
from ddp_tutorial.collectives import all_gather, decide_on_rank_zero
from ddp_tutorial.config import ConfigError, named_ranks
from ddp_tutorial.environment import describe_environment
from ddp_tutorial.files import (
    RUNS,
    locked,
    new_directory,
    notify_observers,
    remove,
    remove_temporary,
    temporary_path,
    write_json,
)
from ddp_tutorial.phases import Stopwatch, observe
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.runs.rank_logs import LOG, rank_log, record_failure
from ddp_tutorial.runs.step_log import StepLog
from ddp_tutorial.runs.usage import Usage
from ddp_tutorial.world import World

_MARK = "shared"  # name of the temporary file that shows whether ranks share a folder


def open_folder(
    world: World, name: str, label: str, *, resuming: bool, shared: bool = False, private: bool = True
) -> RunFolder:
    """Create or open a run folder on rank 0, and return it on all ranks. Collective.

    A new folder is empty until `RunRecord.exclusive` writes the config.

    Args:
        world: This rank's world.
        name: Name of the folder. The default name consists of the time, `label` and the world size.
        label: Suffix of the default name.
        resuming: Whether to use an existing folder with this name. Otherwise, a number is appended to the name if the
            folder exists.
        shared: Whether all ranks must see the folder. Checkpoints require a shared folder.
        private: Whether only the owner can read a new folder. Otherwise, the umask determines the folder's permissions.
            The umask also determines the permissions of new parent folders, such as runs/.

    Raises:
        ConfigError: If the folder must be shared, but a rank does not see it or sees a different folder with the same
            name. The error is raised on all ranks, and a newly created folder is removed.
    """
    label = f"{label}-{world.size}x"
    folder, is_new = decide_on_rank_zero(world, lambda: _create_folder(name, label, resuming, private))
    others = _ranks_without(world, folder.path) if shared else []
    if others:
        if is_new and world.is_main:
            shutil.rmtree(folder.path)
            with suppress(OSError):  # contains other runs
                RUNS.rmdir()
        raise ConfigError(
            f"all ranks must share the checkpoint folder {folder.path}, but {named_ranks(others)} cannot access "
            f"rank 0's folder. {SHARE} To disable checkpoints, use checkpoint.every=0."
        )
    return folder


def require_rank_zeros(world: World, name: str) -> None:
    """Raise an error if rank 0 of the earlier run `name` used a different disk. Collective.

    Raises:
        ConfigError: On all ranks, if the folder contains logs of other ranks but no config. In that case, the run and
            its checkpoints are stored on a different host.
    """

    def check() -> None:
        folder = RunFolder(RUNS / name)
        if not folder.exists() and any(folder.path.glob("rank_*.log")):
            raise ConfigError(
                f"{folder.path} contains logs from other ranks, but not from rank 0. Rank 0 ran on a different host "
                "and saved the checkpoints there. Start rank 0 on that host, or use a different run name."
            )

    decide_on_rank_zero(world, check)


def _ranks_without(world: World, folder: Path) -> list[int]:
    """Return the ranks that do not see a new file that rank 0 creates in `folder`. Collective.

    Checking that the folder exists is not sufficient, because each node may have its own folder with that name from an
    earlier run.
    """
    if world.size == 1:
        return []
    mark = decide_on_rank_zero(world, lambda: _create_marker(folder))
    try:
        return [rank for rank, sees in enumerate(all_gather(world, mark.exists())) if not sees]
    finally:
        if world.is_main:
            remove(mark)


def _create_marker(folder: Path) -> Path:
    """Create an empty file with a unique name in `folder`, and return its path."""
    mark = temporary_path(folder / _MARK)
    notify_observers("write", mark)
    mark.touch(exist_ok=False)
    return mark


def _create_folder(name: str, label: str, again: bool, private: bool) -> tuple[RunFolder, bool]:
    """Create or open a run folder (see `open_folder`), and return the folder and whether it is new."""
    path = RUNS / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{label}")
    folder = RunFolder(path, mode=0o700 if private else 0o777)
    if again:
        return folder, folder.create()
    return replace(folder, path=new_directory(path.parent, path.name, folder.mode)), True


class RunRecord:
    """One rank's record of a run.

    Enter the record once, inside `exclusive`, for the duration of the run. Inside the block, messages are written to
    the rank's log, phases are timed, and an exception is recorded as the run's failure.
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
        gpu_memory_limit_mb: float = 0,
    ) -> None:
        """Create the record of a run. No file is opened yet.

        `unit` and `events` configure `StepLog`, and the memory limits configure `Usage`. If the package `tensorboardX`
        is not installed, a warning is logged instead of events.
        """
        self.world, self.folder, self.config = world, folder, config
        self._lacks_package = events and find_spec("tensorboardX") is None
        self.log = StepLog(world, folder.metrics, unit, events=events and not self._lacks_package)
        self.usage = Usage(world, memory_limit_mb, gpu_memory_limit_mb)
        self.watch = Stopwatch(world.device)
        self.step = 0  # last recorded step, for the failure record
        self._inside = ExitStack()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Prevent other runs from using the folder while the block is active. Collective.

        The config is written into a new folder before the block starts. A folder of an earlier attempt is not modified.
        The folder is locked first, so a reader that sees the config or the log also sees that the run is active.

        Raises:
            FolderInUseError: On all ranks, if a different run uses the folder.
        """
        with ExitStack() as stack:
            stack.callback(self.log.close_file)  # also if a step fails

            def begin() -> None:
                stack.enter_context(locked(self.folder.path))
                if not self.folder.exists():
                    write_json(self.folder.config, self.config)
                self.log.open()

            decide_on_rank_zero(self.world, begin)
            yield

    def __enter__(self) -> "RunRecord":
        """Start logging, timing and recording failures."""
        with ExitStack() as stack:
            stack.enter_context(rank_log(self.world, self.folder))
            stack.enter_context(record_failure(self.world, self.folder, lambda: self.step))
            stack.enter_context(observe(self.watch))
            if self.world.is_main and self._lacks_package:
                LOG.warning(
                    "no TensorBoard events are written, because the package tensorboardX is not installed. Set "
                    "tensorboard=false, or run: pip install 'ddp-tutorial[logging]'"
                )
            if self.world.is_main:  # written by an earlier attempt
                self.folder.failure.unlink(missing_ok=True)
            self._inside = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """Stop logging, and record the exception if the block raised one."""
        return self._inside.__exit__(*error)

    def reopen(self) -> None:
        """Remove an earlier attempt's result before training starts or resumes."""
        if self.world.is_main:
            remove_temporary(self.folder.path, _MARK)
            self.folder.result.unlink(missing_ok=True)

    def record_step(self, number: int) -> dict[str, float]:
        """Return the duration of each phase of the step in seconds, and add the durations to the rank's usage."""
        self.step = number
        seconds = self.watch.take()
        self.usage.add(seconds)
        return seconds

    def write_result(self, content: Mapping[str, Any]) -> None:
        """On rank 0, write `content` and the environment to `result.json`, the last file that a run writes."""
        if self.world.is_main:
            write_json(self.folder.result, {"schema": 1, **content, "environment": describe_environment()})
