"""Go on with a run: from which checkpoint, and are the settings the same?"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    SHARE,
    differences,
    latest,
    list_checkpoints,
    read_manifest,
    read_verified,
    verify,
)
from ddp_tutorial.collectives import all_gather, decide_on_rank_zero
from ddp_tutorial.config import ConfigError
from ddp_tutorial.world import World

# Settings that may differ from those of a checkpoint, because they do not change what is computed: a name stands for
# itself and for all that is in it, as "profile" for "profile.steps".
_FREE = (
    *("name", "nprocs", "mesh", "device", "backend", "collective_timeout"),
    *("resume", "resume_allow", "resume_without", "checkpoint"),
    *("log_every", "eval_every", "eval_samples", "best", "early_stopping", "best_model"),
    *("tensorboard", "private", "memory_limit_mb", "oom_skips", "profile"),
)


def latest_valid(world: World, parent: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `parent` whose files are as they were written, and what is wrong with newer ones.

    Collective: rank 0 looks, and all ranks get its answer.
    """
    return decide_on_rank_zero(world, lambda: _latest_valid(parent))


def _latest_valid(parent: Path) -> tuple[Path | None, list[str]]:
    problems: list[str] = []
    for folder in reversed(list_checkpoints(parent)):
        wrong = verify(folder)
        if not wrong:
            return folder, problems
        problems += wrong
    return None, problems


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: after `step`, from `checkpoint`, which was made with `settings`; without one, from the
    beginning. `skipped` says what is wrong with newer checkpoints."""

    checkpoint: Path | None = None
    step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def find_resume_point(
    world: World, run: Path, resume: str, config: Mapping[str, Any], allow: Sequence[str] = (), *, shared: bool = True
) -> ResumePoint:
    """Where to go on, as rank 0 finds it. Collective; it reads only, so that what is refused has changed nothing.

    With `resume` "auto" it is the newest valid checkpoint of `run`. Otherwise `resume` is the path of a checkpoint, or
    of a run, whose newest valid one is taken; or "never".

    Raises `ConfigError` where that path has none; where `run` has checkpoints and none is valid; where another rank
    does not find the checkpoint; and where it was made with other settings that change what is computed, unless `allow`
    names them ("model" allows all that is in it, such as "model.width"). With `shared=False` other ranks need not find
    it, for rank 0 reads it for all; but none may have newer ones of `run` than rank 0.
    """
    if resume == "never":
        return ResumePoint()
    if not shared and resume == "auto":
        _require_newest(world, run)
    start = decide_on_rank_zero(world, lambda: _start(run, resume, config, allow))
    if start.checkpoint is not None and shared:
        _require_seen(world, start.checkpoint)
    return start


def _require_newest(world: World, run: Path) -> None:
    """Raise `ConfigError`, on all ranks, where another one has a later checkpoint of `run` on its disk than rank 0:
    rank 0 was on that host then, and would now take steps once more that have been taken. Collective."""
    newest = latest(run / CHECKPOINTS)
    of_ranks = all_gather(world, newest.name if newest is not None else "")
    later = [rank for rank, name in enumerate(of_ranks) if name > of_ranks[0]]
    if later:
        raise ConfigError(
            f"rank {later[0]} has {of_ranks[later[0]]} of {run} on its disk, and rank 0, which keeps the checkpoints "
            f"with checkpoint.shared=false, has {of_ranks[0] or 'none'}. Start rank 0 on that host, or use another "
            "name."
        )


def _require_seen(world: World, folder: Path) -> None:
    """Raise `ConfigError`, on all ranks, where one does not find the checkpoint that rank 0 has found. Collective."""
    try:
        mine = (folder / MANIFEST).read_bytes()
    except OSError:
        mine = b""
    seen = all_gather(world, hashlib.sha256(mine).hexdigest())
    others = [str(rank) for rank, each in enumerate(seen) if each != seen[0]]
    if others:
        raise ConfigError(
            f"rank {', '.join(others)} does not find {folder}, from which rank 0 would go on: these ranks share no "
            f"folder. {SHARE}"
        )


def _start(run: Path, resume: str, config: Mapping[str, Any], allow: Sequence[str]) -> ResumePoint:
    path = run if resume == "auto" else Path(resume)
    is_given = (path / MANIFEST).is_file()
    folder, problems = (path, []) if is_given else _latest_valid(path / CHECKPOINTS)
    if folder is None:
        if resume != "auto":
            damaged = f": {_in_short(problems)}" if problems else ""
            raise ConfigError(f"'resume' {resume}: there is no checkpoint, and no run that has a valid one{damaged}")
        if problems:
            there = run / CHECKPOINTS
            raise ConfigError(
                f"none of the {len(list_checkpoints(there))} checkpoints in {there} can be read: {_in_short(problems)}."
                f" To begin anew, use another name, or move {there} away."
            )
        return ResumePoint()
    manifest = read_manifest(folder)
    _require_same_settings(folder, manifest.config, config, allow)
    if is_given:
        read_verified(folder)
    return ResumePoint(folder, manifest.step, manifest.config, tuple(problems))


def _require_same_settings(
    folder: Path, before: Mapping[str, Any], config: Mapping[str, Any], allow: Sequence[str]
) -> None:
    """Raise `ConfigError` where settings that change what is computed differ, unless `allow` names them."""
    found = differences(before, config).items()
    differing = {key: values for key, values in found if not _covers((*_FREE, *allow), key)}
    if differing:
        told = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in differing.items())
        raise ConfigError(
            f"{folder} was made with other settings: {told}. Use the same, or allow them by name: "
            f"resume_allow=[{', '.join(differing)}]"
        )


def _in_short(problems: Sequence[str], limit: int = 4) -> str:
    """Some of the problems, and how many others there are."""
    return "; ".join(problems[:limit]) + (f" and {len(problems) - limit} others" if problems[limit:] else "")


def _covers(names: Iterable[str], key: str) -> bool:
    """Is the setting `key` one of `names`, or in one of them?"""
    return any(key == name or key.startswith(f"{name}.") for name in names)
