"""Settings of a Slurm job."""

import re
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ddp_tutorial.config import Config, ConfigError
from ddp_tutorial.slurm.nodes import node_names

_UNITS = r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?"
_CLOCK = r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)"


class SlurmConfig(Config):
    """Settings of a job, such as its nodes and its time limit. The run's `nprocs` specifies the number of ranks."""

    nodes: int = Field(1, ge=1, description="Number of nodes; each node runs the same number of ranks.")
    nodelist: str = Field(
        "", examples=["node01"], description="Nodes to use, such as node[01-03]; by default, Slurm chooses them."
    )
    starter: Literal["srun", "torchrun"] = Field(
        "srun", description="One task per rank (srun), or one torchrun per node."
    )
    partition: str = Field("", examples=["gpu"], description="Partition of the job.")
    account: str = Field("", examples=["project1"], description="Account of the job.")
    time: str = Field("1h", examples=["90min"], description="Time limit: 90min, 2h, 1d12h, 1:30:00 or 1-12:00:00.")
    warning: int = Field(120, ge=1, description="Seconds before the time limit at which the ranks save and stop.")
    cpus: int = Field(1, ge=1, description="Cores and threads per rank.")
    gpus: int = Field(0, ge=0, description="GPUs per node; with device cuda, the default is one per rank.")
    options: tuple[str, ...] = Field((), strict=False, examples=[["--mem=32G"]], description="Further sbatch options.")
    setup: tuple[str, ...] = Field(
        (), strict=False, examples=[["module load cuda"]], description="Shell commands to run before the ranks start."
    )

    @property
    def seconds(self) -> int:
        """The time limit in seconds."""
        return parse_time(self.time)

    @field_validator("time")
    @classmethod
    def _has_a_unit(cls, time: str) -> str:
        parse_time(time)
        return time

    @field_validator("partition", "account", "nodelist")
    @classmethod
    def _is_one_word(cls, word: str, info: ValidationInfo) -> str:
        if not re.fullmatch(r"[^\s#'\"]*", word):
            raise ValueError(f"'slurm.{info.field_name}' must be one word, got {word!r}")
        return word

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.fullmatch(r"--?\w\S*", option):
                raise ValueError(f"'slurm.options' must contain sbatch options, such as --mem=32G, got {option!r}")
        return options

    @model_validator(mode="after")
    def _is_warned_in_time(self) -> "SlurmConfig":
        if self.warning >= self.seconds:
            raise ValueError(
                f"'slurm.warning' must be shorter than 'slurm.time' ({self.time}), got {self.warning} seconds"
            )
        return self

    @model_validator(mode="after")
    def _nodes_are_those_listed(self) -> "SlurmConfig":
        listed = node_names(self.nodelist) if self.nodelist else []
        if listed and len(listed) != self.nodes:
            raise ValueError(
                f"'slurm.nodes' must be {len(listed)}, the number of nodes in 'slurm.nodelist' ({self.nodelist}), "
                f"got {self.nodes}"
            )
        return self


def parse_time(time: str) -> int:
    """Convert a time limit, such as "90min", "1d12h", "1:30:00" or "1-12:00:00", to seconds.

    Raises:
        ConfigError: If the time is invalid or ambiguous, such as Slurm's "90" and "90:00".
    """
    match = re.fullmatch(_UNITS, time) or re.fullmatch(_CLOCK, time)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    found = seconds + 60 * (minutes + 60 * (hours + 24 * days))
    if not found:
        raise ConfigError(
            f"'slurm.time' must be a duration, such as 90min, 2h, 1d12h, 1:30:00 or 1-12:00:00, got {time!r}"
        )
    return found
