"""Define the layout of a checkpoint folder and its manifest. This module does not import torch.

    runs/NAME/checkpoints/step_00000050/
        model.safetensors  optimizer.pt  rng.rank_0.pt  rng.rank_1.pt ...
        manifest.json      step, world size, versions, config, and the size and SHA-256 of each file

A checkpoint is written to a temporary folder. The folder is renamed after all files have been flushed to disk. The
manifest is written last. Therefore, a renamed folder with a manifest is complete. `verify` checks whether the
files have been damaged since the save.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ddp_tutorial.config import FailedError
from ddp_tutorial.files import notify_observers, recover, remove, remove_temporary

SCHEMA = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # name of the folder that contains a run's checkpoints
_NAME = re.compile(r"step_(\d{8,})")
_REPLACED = re.compile(r"\.step_(\d{8,})\.old")  # the old checkpoint, during a replacement
_PIECE = 1 << 20  # bytes per read


# Advice in error messages if ranks see different folders.
SHARE = (
    "Start all ranks in the same folder, on a disk that all nodes share, or let rank 0 read and write for all "
    "ranks, with checkpoint.shared=false."
)


class CheckpointError(FailedError):
    """Raised if a checkpoint cannot be written, read, or used by this run."""


class _Record(BaseModel):
    """The base class of the records in a manifest. Unknown fields, which later versions may add, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredFile(_Record):
    """One file of a checkpoint.

    Attributes:
        path: The path relative to the checkpoint folder.
        rank: The rank that saved the state in the file.
        nbytes: The size in bytes.
        sha256: The SHA-256 hash of the file.
    """

    path: str
    rank: int
    nbytes: int
    sha256: str


class StoredComponent(_Record):
    """One component of a checkpoint.

    Attributes:
        shared: The ranks that shared the state; see `Component`.
        span: The number of consecutive ranks that shared one state.
        files: The files of the component, in rank order.
    """

    shared: str
    span: int
    files: list[StoredFile]


class Manifest(_Record):
    """The metadata of a checkpoint."""

    schema_version: int
    step: int
    world_size: int
    versions: dict[str, str]
    config: dict[str, Any]
    config_sha256: str
    metrics: dict[str, float | None]
    components: dict[str, StoredComponent]

    def sealed(self) -> dict[str, Any]:
        """Return the content of the manifest file, which consists of all fields and their checksum."""
        content = self.model_dump()
        return content | {"sha256": sha256_of_json(content)}

    @property
    def files(self) -> list[StoredFile]:
        """All files of the checkpoint."""
        return [file for component in self.components.values() for file in component.files]

    @property
    def nbytes(self) -> int:
        """The total size of the files in bytes."""
        return sum(file.nbytes for file in self.files)


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint folder for a step."""
    return f"step_{step:08}"


def step_of(checkpoint: Path) -> int:
    """Return the step from a checkpoint folder's name, such as `step_00000050` or `.step_00000050.old`."""
    return int(re.sub(r"\D", "", checkpoint.name))


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the checkpoints in `parent`, sorted by step.

    Folders without a manifest are ignored. No files are opened. If a run was killed while it was replacing a
    checkpoint, the old checkpoint is listed unless the new checkpoint is already in place.
    """
    folders = [path for path in (parent.iterdir() if parent.is_dir() else ()) if _has_manifest(path)]
    by_step = {
        int(match[1]): path for name in (_REPLACED, _NAME) for path in folders if (match := name.fullmatch(path.name))
    }
    return [by_step[step] for step in sorted(by_step)]


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).is_file()
    except OSError:  # unknown; `verify` reports the reason
        return True


def recover_all(parent: Path) -> None:
    """Remove a killed process's unfinished checkpoints from `parent`, and finish or undo interrupted replacements.

    If the new checkpoint of a replacement is damaged and the old checkpoint is intact, the old checkpoint is restored.
    Call this function only if no other process is saving to `parent`.
    """
    for old in parent.glob(".step_*.old"):
        if match := _REPLACED.fullmatch(old.name):
            new = parent / checkpoint_name(int(match[1]))
            if new.exists() and verify(new) and not verify(old):
                remove(new)
            recover(new)
    remove_temporary(parent, "step_*")


def latest(parent: Path) -> Path | None:
    """Return the checkpoint with the highest step, or None. The checkpoint may be damaged; see `verify`."""
    return next(reversed(list_checkpoints(parent)), None)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: If `folder` is not a checkpoint, or if its manifest is damaged, was written by a newer version,
            or lists files outside the folder.
    """
    path = folder / MANIFEST
    try:
        notify_observers("read", path)
        return _parsed(path.read_bytes(), folder)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it does not contain {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: objects nested thousands deep
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _parsed(content: bytes, folder: Path) -> Manifest:
    """Parse and validate the `content` of the manifest in `folder`.

    Raises:
        CheckpointError: If a newer version wrote the manifest.
        ValueError, RecursionError: If the manifest is damaged.
    """
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError("the content is not a JSON object")  # noqa: TRY004, the content is wrong, not a type
    version, seal = fields.get("schema_version"), fields.pop("sha256", None)
    if isinstance(version, int) and version > SCHEMA:
        raise CheckpointError(
            f"{folder} was written by a newer version (schema {version}; this version supports schemas up to "
            f"{SCHEMA}). Update ddp_tutorial to read it."
        )
    if seal != sha256_of_json(fields):
        raise ValueError("the content does not match the checksum")
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if outside := [file.path for file in manifest.files if not _is_inside(folder, file.path)]:
        raise ValueError(f"the manifest lists {outside[0]!r}, which is outside the folder")
    return manifest


def _is_inside(folder: Path, path: str) -> bool:
    """Return whether `path` stays inside `folder` on every operating system, after resolving symbolic links."""
    names = PureWindowsPath(path)  # splits at both kinds of slashes and recognizes drives
    if names.anchor or ".." in names.parts or "\0" in path:
        return False
    return Path(os.path.realpath(folder / path)).is_relative_to(os.path.realpath(folder))


def verify(folder: Path) -> list[str]:
    """Return a description of each damaged file in a checkpoint. The list is empty if all files are intact."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    return _problems(folder, manifest)


def read_verified(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after verifying all of its files.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    manifest = read_manifest(folder)
    if problems := _problems(folder, manifest):
        raise CheckpointError("; ".join(problems))
    return manifest


def _problems(folder: Path, manifest: Manifest) -> list[str]:
    return [problem for file in manifest.files if (problem := _problem(folder, file))]


def _problem(folder: Path, file: StoredFile) -> str | None:
    path = folder / file.path
    try:
        if not stat.S_ISREG((found := path.stat()).st_mode):  # reading a pipe would block forever
            return f"{path} is not a file"
        if (nbytes := found.st_size) != file.nbytes:
            return f"{path} must have {file.nbytes:,} bytes, got {nbytes:,}"
        if sha256_of(path) != file.sha256:
            return f"{path} is damaged: its checksum does not match the manifest"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:  # a disk error, or no permission
        return f"{path} cannot be read: {error.strerror}"
    return None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hash of a file as a hexadecimal string."""
    notify_observers("read", path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def sha256_of_json(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 hash of `content` serialized as JSON. The order of the keys does not affect the hash."""
    stored = json.loads(json.dumps(content))  # a file contains all keys as strings, which sort differently
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return a dict from the dotted name of each changed setting to the setting's values in `before` and `now`.

    The value of a missing setting is None.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


Mode = Literal["min", "max"]


def checkpoints_to_remove(
    metrics: Mapping[Path, float | None], keep_last: int, keep_best: int, mode: Mode, excluded: Iterable[Path] = ()
) -> list[Path]:
    """Return the checkpoints to remove according to the retention settings; see `Checkpointer`.

    `metrics` contains the metric of each checkpoint, in increasing order of step. None and NaN count as worse than any
    number. The `excluded` checkpoints are always kept.
    """
    last = list(metrics)[-keep_last:]
    sign = 1 if mode == "min" else -1
    numbers = {path: value for path, value in metrics.items() if value is not None and not math.isnan(value)}
    best = sorted(numbers, key=lambda path: sign * numbers[path])[:keep_best]
    stay = {*last, *best, *excluded}
    return [path for path in metrics if path not in stay]
