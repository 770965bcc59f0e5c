"""Go on with a run: from which checkpoint, and are the settings the same?"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, MANIFEST, differences, folders, read_manifest, verify
from ddp_tutorial.collectives import from_rank_zero
from ddp_tutorial.config import ConfigError
from ddp_tutorial.world import World

LOG = logging.getLogger(__name__)

# Settings that may differ from those of a checkpoint, because they do not change what is computed: a name stands for
# itself and for all that is in it, as "profile" for "profile.steps".
_FREE = (
    *("name", "nprocs", "device", "resume", "resume_allow", "resume_without", "checkpoint"),
    *("log_every", "eval_every", "eval_samples", "best", "early_stopping", "best_model"),
    *("tensorboard", "memory_limit_mb", "profile"),
)


def latest_valid(world: World, parent: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `parent` whose files are as they were written, and what is wrong with newer ones.

    Collective: rank 0 looks, and all ranks get its answer.
    """
    return from_rank_zero(world, _latest_valid(parent) if world.is_main else (None, []))


def _latest_valid(parent: Path) -> tuple[Path | None, list[str]]:
    problems: list[str] = []
    for folder in reversed(folders(parent)):
        wrong = verify(folder)
        if not wrong:
            return folder, problems
        problems += wrong
    return None, problems


def find_checkpoint(
    world: World, run: Path, resume: str, config: Mapping[str, Any], allow: Sequence[str] = ()
) -> Path | None:
    """The checkpoint from which to go on, or None. Collective.

    With `resume` "auto" it is the newest valid one of `run`; damaged ones are logged and passed over. Otherwise
    `resume` is the path of a checkpoint, or of a run, whose newest valid one is taken.

    Raises `ConfigError` where that path has none, and where the checkpoint was made with other settings that change
    what is computed, unless `allow` names them ("model" allows all that is in it, such as "model.width").
    """
    if resume == "never":
        return None
    path = run if resume == "auto" else Path(resume)
    folder: Path | None = path
    if not (path / MANIFEST).is_file():
        folder, problems = latest_valid(world, path / CHECKPOINTS)
        if world.is_main:
            for problem in problems:
                LOG.info("passed over: %s", problem)
        if folder is None and resume != "auto":
            raise ConfigError(f"'resume' {resume}: there is no checkpoint, and no run that has a valid one")
    if folder is None:
        return None
    differing = {
        key: values
        for key, values in differences(read_manifest(folder).config, config).items()
        if not _covers((*_FREE, *allow), key)
    }
    if differing:
        told = "; ".join(f"{key} was {before!r}, is {now!r}" for key, (before, now) in differing.items())
        raise ConfigError(
            f"{folder} was made with other settings: {told}. Use the same, or allow them by name: "
            f"resume_allow=[{', '.join(differing)}]"
        )
    return folder


def _covers(names: Iterable[str], key: str) -> bool:
    """Is the setting `key` one of `names`, or in one of them?"""
    return any(key == name or key.startswith(f"{name}.") for name in names)
