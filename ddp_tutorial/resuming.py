"""Go on with a run: from which checkpoint, and may it?"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint import agreed, latest_valid
from ddp_tutorial.config import ConfigError
from ddp_tutorial.manifest import CHECKPOINTS, MANIFEST, CheckpointError, claimed, differences, read_manifest
from ddp_tutorial.rank_logs import LOG
from ddp_tutorial.world import World

# Settings that may differ from those of a checkpoint: they do not change what is computed.
_FREE = (
    *("name", "nprocs", "device", "resume", "resume_allow", "resume_without", "checkpoint"),
    *("log_every", "eval_", "early_stopping", "best_model", "tensorboard", "memory_limit_mb", "profile"),
)


def find_checkpoint(
    world: World, run: Path, resume: str, config: Mapping[str, Any], allow: Sequence[str] = ()
) -> Path | None:
    """Where to go on from, or None. Collective.

    With `resume` auto, the newest checkpoint of the run that is as it was written; damaged ones are named and passed
    over. With a path, that checkpoint, or the newest of that run. Raises `ConfigError` where there is none, and where
    the checkpoint was made with settings that change what is computed, unless `allow` names them.
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
    allowed = (*_FREE, *allow)
    differing = {
        key: values
        for key, values in differences(read_manifest(folder).config, config).items()
        if not key.startswith(allowed)
    }
    if differing:
        told = "; ".join(f"{key} was {before!r}, is {now!r}" for key, (before, now) in differing.items())
        raise ConfigError(
            f"{folder} was made with other settings: {told}. Use the same, or allow them by name: "
            f"resume_allow=[{', '.join(differing)}]"
        )
    return folder


@contextmanager
def claimed_by_rank_zero(world: World, run: Path) -> Iterator[None]:
    """The folder of a run is one run's, while that lasts. Raises `ConfigError`, on all ranks, if it is another's."""
    with ExitStack() as stack:
        try:
            agreed(world, lambda: stack.enter_context(claimed(run)) if world.is_main else None)
        except CheckpointError as error:
            raise ConfigError(str(error).removeprefix("rank 0: ")) from None
        yield
