"""Remove old checkpoints.

Only valid checkpoints count toward `keep_last` and `keep_best`. Damaged checkpoints are never removed, so that
you can examine them. The checkpoint that was just written is always kept, even if checkpoints of later steps exist.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from ddp_tutorial.checkpoint.manifest import (
    CheckpointError,
    Mode,
    checkpoints_to_remove,
    list_checkpoints,
    read_verified,
)
from ddp_tutorial.files import remove, rename, temporary_path

LOG = logging.getLogger(__name__)


class Retention:
    """A policy that keeps the newest and best checkpoints in a folder, and removes the others. One rank applies it.

    A checkpoint that this process has written or verified counts as valid. Any other checkpoint is verified once.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: int, metric: str, mode: Mode) -> None:
        """Store the arguments; see `Checkpointer`.

        Raises:
            ValueError: If `keep_last` is less than 1.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}. A run resumes from its last checkpoint")
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self.metric, self.mode = metric, mode
        self._valid: dict[Path, float | None] = {}  # the metric of each valid checkpoint
        self._damaged: set[Path] = set()
        self._thread: threading.Thread | None = None

    def record_valid(self, checkpoint: Path, metrics: Mapping[str, float | None]) -> None:
        """Record that a checkpoint has just been written or verified."""
        self._valid[checkpoint] = metrics.get(self.metric)

    def apply(self, written: Path) -> None:
        """Remove old checkpoints in a background thread, because verifying and deleting checkpoints is slow.

        Errors are logged, and the next call retries the removal. The checkpoint that was just `written` is always kept.
        """
        self.close()
        self._thread = threading.Thread(target=self._run, args=(written,), name="remove checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, written: Path) -> None:
        try:
            self._apply(written)
        except OSError as error:
            LOG.warning("cannot search %s for old checkpoints: %s", self.folder, error)

    def _apply(self, written: Path) -> None:
        checkpoints = list_checkpoints(self.folder)
        for path in checkpoints:
            if path not in self._valid and path not in self._damaged:
                self._verify(path)
        metrics = {path: self._valid[path] for path in checkpoints if path in self._valid}
        renamed = []
        for path in checkpoints_to_remove(metrics, self.keep_last, self.keep_best, self.mode, excluded=[written]):
            aside = temporary_path(path)
            try:  # rename all checkpoints before deleting any, because renaming is fast
                rename(path, aside)
                renamed.append(aside)
            except OSError as error:
                LOG.warning("cannot remove %s: %s", path, error)
        for path in renamed:
            remove(path)

    def _verify(self, path: Path) -> None:
        try:
            self.record_valid(path, read_verified(path).metrics)
        except CheckpointError as error:
            LOG.warning("a damaged checkpoint is kept, and does not count toward keep_last: %s", error)
            self._damaged.add(path)
