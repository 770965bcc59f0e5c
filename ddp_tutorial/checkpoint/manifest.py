"""What a checkpoint is on the disk: a folder with a manifest, which is written last. Never imports torch.

    runs/NAME/checkpoints/step_00000050/
        model.safetensors  optimizer.pt  rng.rank_0.pt  rng.rank_1.pt ...
        manifest.json      step, world size, versions, config, and for each file its size and its sha256

A checkpoint is written under another name and renamed when everything in it has reached the disk. So a folder with this
name and a manifest is complete; `verify` finds out whether its files have been damaged since.
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
from ddp_tutorial.files import notify_observers, recover, remove_temporary, rename, temporary_path

SCHEMA = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # the folder, in that of a run, where its checkpoints are
_NAME = re.compile(r"step_(\d{8,})")
_REPLACED = re.compile(r"\.step_(\d{8,})\.old")  # until the one that replaces it has the name
_PIECE = 1 << 20  # bytes that are read at a time


# What to do where ranks see different folders.
SHARE = (
    "Start all ranks in the same folder, on a disk that all nodes share, or let rank 0 write and read for all: "
    "checkpoint.shared=false."
)


class CheckpointError(FailedError):
    """A checkpoint cannot be written, read, or used here."""


class _Record(BaseModel):
    """A part of a manifest, frozen. Fields of a later version that this one does not know are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredFile(_Record):
    """One file of a checkpoint: its path in the folder, the rank whose state it is, its size and its sha256."""

    path: str
    rank: int
    nbytes: int
    sha256: str


class StoredComponent(_Record):
    """One component: how ranks shared it (see `Component`), and its files in the order of their ranks."""

    shared: str
    span: int
    files: list[StoredFile]


class Manifest(_Record):
    """What a checkpoint says about itself."""

    schema_version: int
    step: int
    world_size: int
    versions: dict[str, str]
    config: dict[str, Any]
    config_sha256: str
    metrics: dict[str, float | None]
    components: dict[str, StoredComponent]

    def sealed(self) -> dict[str, Any]:
        """The content of the file: all fields, and a checksum of them."""
        content = self.model_dump()
        return content | {"sha256": sha256_of_json(content)}

    @property
    def files(self) -> list[StoredFile]:
        return [file for component in self.components.values() for file in component.files]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step_{step:08}"


def list_checkpoints(parent: Path) -> list[Path]:
    """The checkpoints in `parent`, lowest step first. A folder without a manifest is none; no file is opened.

    One that was about to be replaced, by a run killed at that moment, counts where the new one has not got the name.
    """
    there = [path for path in (parent.iterdir() if parent.is_dir() else ()) if _has_manifest(path)]
    found = {
        int(match[1]): path for name in (_REPLACED, _NAME) for path in there if (match := name.fullmatch(path.name))
    }
    return [found[step] for step in sorted(found)]


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).is_file()
    except OSError:  # nobody can tell: it is for `verify` to say why
        return True


def recover_all(parent: Path) -> None:
    """Remove what a killed process has left unfinished in `parent`, and end what it was replacing.

    Only where no other process is saving.
    """
    for path in parent.glob(".step_*.old"):
        if match := _REPLACED.fullmatch(path.name):
            recover(parent / checkpoint_name(int(match[1])))
    remove_temporary(parent, "step_*")


def latest(parent: Path) -> Path | None:
    """The checkpoint with the highest step, whatever its date. Whether it is valid is for `verify` to say."""
    return next(reversed(list_checkpoints(parent)), None)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: If `folder` is not a checkpoint, or its manifest is damaged or of a newer version, or lists
            files that are not in the folder.
    """
    path = folder / MANIFEST
    try:
        notify_observers("read", path)
        manifest = _parsed(path.read_bytes(), folder)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: there is no {MANIFEST} in it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: objects nested thousands deep
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return manifest


def _parsed(content: bytes, folder: Path) -> Manifest:
    """Return the manifest of `folder` in `content`.

    Raises:
        CheckpointError: If it is of a newer version.
        ValueError, RecursionError: If it is damaged.
    """
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004, the content is wrong, not a type
    version, seal = fields.get("schema_version"), fields.pop("sha256", None)
    if isinstance(version, int) and version > SCHEMA:
        raise CheckpointError(
            f"{folder} was written by a newer version (schema {version}; this one knows up to {SCHEMA}). "
            "Update ddp_tutorial to read it."
        )
    if seal != sha256_of_json(fields):
        raise ValueError("its checksum is not the one in it")
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if outside := [file.path for file in manifest.files if not _is_inside(folder, file.path)]:
        raise ValueError(f"it names a file outside of its folder, {outside[0]!r}")
    return manifest


def _is_inside(folder: Path, path: str) -> bool:
    """Return whether `path`, on any operating system, names a file in `folder`, not through a link that leaves it."""
    names = PureWindowsPath(path)  # which splits at both kinds of slashes, and knows drives
    if names.anchor or ".." in names.parts or "\0" in path:
        return False
    return Path(os.path.realpath(folder / path)).is_relative_to(os.path.realpath(folder))


def verify(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; an empty list if all is as it was written."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    return _problems(folder, manifest)


def read_verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as they were written. Raises `CheckpointError` if they are not."""
    manifest = read_manifest(folder)
    if problems := _problems(folder, manifest):
        raise CheckpointError("; ".join(problems))
    return manifest


def _problems(folder: Path, manifest: Manifest) -> list[str]:
    return [problem for file in manifest.files if (problem := _problem(folder, file))]


def _problem(folder: Path, file: StoredFile) -> str | None:
    path = folder / file.path
    try:
        if not stat.S_ISREG((found := path.stat()).st_mode):  # reading a pipe would wait forever
            return f"{path} is not a file"
        if (nbytes := found.st_size) != file.nbytes:
            return f"{path} has {nbytes:,} bytes and should have {file.nbytes:,}"
        if sha256_of(path) != file.sha256:
            return f"{path} is damaged: its checksum is not the one in the manifest"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:  # the disk, or a lack of permission
        return f"{path} cannot be read: {error.strerror}"
    return None


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    notify_observers("read", path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def sha256_of_json(content: Mapping[str, Any]) -> str:
    """The sha256 of `content` as JSON; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Settings that differ: by dotted name, the value in `before` and the one in `now`, None where it is missing."""
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
    """Which checkpoints to remove: all but the last `keep_last`, the `keep_best` best by their metric, and `spared`.

    `metrics` has the value of each checkpoint, in the order of their steps. None and NaN are worse than any number.
    """
    last = list(metrics)[-keep_last:] if keep_last else []
    sign = 1 if mode == "min" else -1
    numbers = {path: value for path, value in metrics.items() if value is not None and not math.isnan(value)}
    best = sorted(numbers, key=lambda path: sign * numbers[path])[:keep_best]
    stay = {*last, *best, *excluded}
    return [path for path in metrics if path not in stay]


def unpublish(folder: Path) -> Path:
    """Rename a checkpoint so that it is none any more, and return its new path: quick, where deleting may be slow."""
    path = temporary_path(folder)
    rename(folder, path)
    return path
