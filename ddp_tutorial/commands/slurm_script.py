"""Create the batch script that `python -m ddp_tutorial slurm CONFIG` prints or submits."""

import shlex
from collections.abc import Iterable

from ddp_tutorial.config import ConfigError, load
from ddp_tutorial.slurm.config import SlurmConfig
from ddp_tutorial.slurm.job import batch_script, ranks_per_node
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.strategies import micro_batches_per_rank
from ddp_tutorial.training.tasks import check_start, with_batch_size


def slurm_script(
    source: str, overrides: Iterable[str] = (), python: str = "python", kind: type[TaskConfig] = TaskConfig
) -> str:
    """Return a batch script that runs `train SOURCE OVERRIDES` on `config.nprocs` ranks.

    A run without a name is named after the job ID, so that a requeued job finds its checkpoint. `overrides` may contain
    settings of the run and of the job. "nodes=2" is short for "slurm.nodes=2".

    Raises:
        ConfigError: If the ranks cannot be divided evenly among the nodes, or if training would reject the config.
    """
    of_job, of_run = split_overrides(overrides)
    config = load(source, kind, [*of_run, *of_job])
    if config.resume not in {"never", "auto"}:
        raise ConfigError(
            f"'resume' must be 'never' or 'auto' for a Slurm job, got {config.resume!r}. A requeued job would resume "
            "from that path again. Start the run with 'train', or copy the checkpoint into the run and use resume=auto"
        )
    here = ranks_per_node(config.nprocs, config.slurm)
    micro_batches_per_rank(config, config.nprocs)
    resuming = {"resume": "auto", "name": config.name} if config.name else {"resume": "never"}
    check_start(config.model_copy(update=resuming), config.nprocs)
    slurm = config.slurm
    if config.device == "cuda" and not slurm.gpus:
        slurm = slurm.model_copy(update={"gpus": here})
    kept = [override for override in of_run if override.partition("=")[0].strip() not in {"name", "resume"}]
    words = ["-m", "ddp_tutorial", "train", source, *kept]
    batch_size = with_batch_size(config, config.nprocs).batch_size
    about = f"{batch_size} samples in an optimizer step, over all ranks"
    if not config.checkpoint.every:
        about += "\n# checkpoint.every is 0: the job saves when it is stopped, but starts over after a node failure"
    return batch_script(
        f'{shlex.join(words)} name="$run" resume=auto',
        config.nprocs,
        slurm,
        run=shlex.quote(config.name) if config.name else "slurm-$SLURM_JOB_ID",
        name=config.name.replace("/", "-") or config.label,
        about=about,
        python=python,
        timeout=config.collective_timeout,
    )


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split overrides into the job's overrides, with the prefix "slurm.", and the run's overrides."""
    of_job: list[str] = []
    of_run: list[str] = []
    for override in map(str.strip, overrides):
        key = override.partition("=")[0].strip()
        if key in SlurmConfig.model_fields:
            of_job.append(f"slurm.{override}")
        else:
            (of_job if key.partition(".")[0] == "slurm" else of_run).append(override)
    return of_job, of_run
