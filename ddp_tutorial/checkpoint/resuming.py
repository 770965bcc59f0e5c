"""Find the checkpoint to resume from, and check that the run's settings match the checkpoint."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    SHARE,
    checkpoint_name,
    differences,
    latest,
    list_checkpoints,
    read_manifest,
    read_verified,
    step_of,
    verify,
)
from ddp_tutorial.collectives import all_gather, decide_on_rank_zero
from ddp_tutorial.config import ConfigError, named_ranks
from ddp_tutorial.world import World

# Settings that may differ from the checkpoint's settings, because they do not affect the computation. A name also
# covers the settings under it: "profile" covers "profile.steps".
_FREE = (
    *("name", "nprocs", "mesh", "device", "backend", "collective_timeout", "source.worker_timeout"),
    *("resume", "resume_allow", "resume_without", "checkpoint"),
    *("log_every", "eval_every", "eval_samples", "per_device_eval_batch_size"),
    *("run_test", "target_loss", "best", "early_stopping", "best_model"),
    *(
        "tensorboard",
        "private",
        "memory_limit_mb",
        "gpu_memory_limit_mb",
        "empty_cache_every",
        "oom_skips",
        "profile",
        "compile",
    ),
)


def latest_valid(world: World, parent: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint in `parent`, and the problems found in newer checkpoints. Collective.

    Only rank 0 reads the disk. All ranks receive its result.
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
    """The checkpoint from which a run resumes.

    Attributes:
        checkpoint: The folder of the checkpoint, or None if the run starts from the beginning.
        step: The step of the checkpoint.
        settings: The config of the run that saved the checkpoint.
        skipped: The problems found in newer checkpoints.
    """

    checkpoint: Path | None = None
    step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def find_resume_point(
    world: World, run: Path, resume: str, config: Mapping[str, Any], allow: Sequence[str] = (), *, shared: bool = True
) -> ResumePoint:
    """Find the checkpoint to resume from. Collective.

    Rank 0 selects the checkpoint. No files are modified, so rejecting a checkpoint has no side effects.

    Args:
        world: The ranks of the run.
        run: The run folder.
        resume: `"auto"` selects the newest valid checkpoint of `run`, and `"never"` starts from the beginning. The
            path of a checkpoint selects that checkpoint. The path of a run selects its newest valid checkpoint.
        config: The settings of this run.
        allow: Names of settings that may differ from the checkpoint's settings. A name also covers the settings under
            it: "model" covers "model.width".
        shared: Whether all ranks see the same folder. If false, rank 0 reads the checkpoint for all ranks.

    Raises:
        ConfigError: If the path contains no valid checkpoint, or if `run` contains only damaged checkpoints. The error
            is also raised if settings that affect the computation have changed. With `shared=True`, every rank must
            find the checkpoint. With `shared=False` and `resume="auto"`, no rank may find a newer checkpoint of `run`
            than rank 0.
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
    """Raise `ConfigError` on all ranks if a rank's disk contains a newer checkpoint than rank 0's disk. Collective.

    If rank 0 previously ran on a different host, resuming from its current disk would repeat completed steps.
    """
    newest = latest(run / CHECKPOINTS)
    steps = all_gather(world, -1 if newest is None else step_of(newest))
    later = [rank for rank, step in enumerate(steps) if step > steps[0]]
    if later:
        found = [checkpoint_name(step) if step >= 0 else "none" for step in steps]
        raise ConfigError(
            f"rank {later[0]} found {found[later[0]]} of {run} on its disk, but rank 0 found "
            f"{found[0]}. With checkpoint.shared=false, rank 0 writes the checkpoints. Start rank 0 on "
            f"rank {later[0]}'s host, or use a different run name."
        )


def _require_seen(world: World, folder: Path) -> None:
    """Raise `ConfigError` on all ranks unless every rank finds the same manifest as rank 0. Collective."""
    try:
        mine = (folder / MANIFEST).read_bytes()
    except OSError:
        mine = b""
    seen = all_gather(world, hashlib.sha256(mine).hexdigest())
    others = [rank for rank, each in enumerate(seen) if each != seen[0]]
    if others:
        raise ConfigError(
            f"rank 0 would resume from {folder}, which does not exist on {named_ranks(others)}. The ranks "
            f"do not share this folder. {SHARE}"
        )


def _start(run: Path, resume: str, config: Mapping[str, Any], allow: Sequence[str]) -> ResumePoint:
    path = run if resume == "auto" else Path(resume)
    is_given = (path / MANIFEST).is_file()
    folder, problems = (path, []) if is_given else _latest_valid(path / CHECKPOINTS)
    if folder is None:
        if resume != "auto":
            damaged = f": {_in_short(problems)}" if problems else ""
            raise ConfigError(
                "'resume' must be 'auto', 'never', or the path of a checkpoint or a run with a valid checkpoint, got "
                f"{resume}{damaged}"
            )
        if problems:
            there = run / CHECKPOINTS
            raise ConfigError(
                f"none of the {len(list_checkpoints(there))} checkpoints in {there} can be read: {_in_short(problems)}."
                f" To start over, use a different run name, or move {there}."
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
    """Raise an error if a setting that affects the computation has changed and is not covered by `allow`."""
    changed = differences(before, config).items()
    differing = {key: values for key, values in changed if not _covers((*_FREE, *allow), key)}
    if differing:
        changes = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, (old, new) in differing.items())
        raise ConfigError(
            f"{folder} was created with different settings: {changes}. Use the same settings, or allow the changes "
            f"with resume_allow=[{', '.join(differing)}]"
        )


def _in_short(problems: Sequence[str], limit: int = 4) -> str:
    """Join the first `limit` problems, and append the number of remaining problems."""
    return "; ".join(problems[:limit]) + (f" and {len(problems) - limit} others" if problems[limit:] else "")


def _covers(names: Iterable[str], key: str) -> bool:
    """Return whether the setting `key` is one of `names` or is nested under one of `names`."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
