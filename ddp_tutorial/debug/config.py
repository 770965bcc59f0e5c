"""Define the config of a run with injected faults.

    # my.yaml
    extends: 2proc
    faults:
      - kill rank=1 step=3 phase=backward
      - {action: delay, rank: 0, step: 5, seconds: 2}

The training code does not depend on faults. The code that starts the ranks wraps the training in `inject_faults` (see
`commands.training`).
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from ddp_tutorial.config import Config, ConfigError, check, parse_yaml
from ddp_tutorial.training.config import TaskConfig

Action = Literal["kill", "raise", "hang", "delay", "corrupt", "nan", "skip", "leak", "fill_disk", "oom", "kill_worker"]
# All phases of this package, in the order in which a run enters them. Only some strategies use "gather" and "average".
PhaseName = Literal[
    "load", "data", "grads", "forward", "backward", "finish", "gather", "update", "average", "evaluate", "save",
    "save: collect", "save: copy", "save: write", "save: sync", "save: manifest", "save: rename", "callbacks",
    "profile", "result",
]  # fmt: skip


class Fault(Config):
    """A fault that occurs on one rank, in one step, at the start of a phase.

    The actions are:

    - `kill`: Send SIGKILL to the rank.
    - `raise`: Raise `InjectedError`.
    - `hang`: Sleep forever.
    - `delay`: Sleep for `seconds`.
    - `corrupt`: Change one element of this rank's first gradient. Use a phase that follows gradient averaging.
    - `nan`: Make the gradient of this rank's first parameter NaN before the gradients are reduced.
    - `skip`: Skip this rank's next call to `torch.distributed.all_reduce`.
    - `leak`: In this and every later step, allocate `megabytes` MiB of memory without freeing it.
    - `oom`: Run out of memory at the start of the phase. If the phase is "forward", run out of memory at the end of the
      forward pass instead.
    - `kill_worker`: Send SIGKILL to one of this rank's data-loading workers.
    - `fill_disk`: Make all later durable writes on this rank fail.
    """

    action: Action = Field(description="Action to perform; see the user guide.")
    rank: int = Field(0, ge=0, description="Rank on which the fault occurs.")
    step: int = Field(1, ge=1, description="Step in which the fault occurs, counted from 1.")
    phase: PhaseName = Field("grads", description="The fault occurs at the start of this phase.")
    seconds: float = Field(1.0, gt=0, description="Duration of a delay in seconds.")
    megabytes: float = Field(10.0, gt=0, description="Megabytes that a leak allocates in each step.")

    def __str__(self) -> str:
        """Return a description of the action, rank, step and phase."""
        return f"{self.action} on rank {self.rank} in step {self.step}, at {self.phase}"


def parse(text: str) -> Fault:
    """Parse a fault such as "kill rank=1 step=3 phase=backward".

    Raises:
        ConfigError: If `text` is not a valid fault.
    """
    action, *settings = text.split() or [""]
    values: dict[str, object] = {"action": action}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"fault {text!r}: a setting must have the form name=value, got {setting!r}")
        values[name] = parse_yaml(value, f"fault {text!r}")
    return check(Fault, values, f"fault {text!r}")


class FaultyConfig(TaskConfig):
    """The config of a run with `faults`. Each fault is a string for `parse` or a mapping of the fault's settings.

    Faults are not part of the run's identity, so config.json and the checkpoints do not contain faults. A run can be
    resumed with different faults or without faults. After a restart, the faults occur again, with steps counted from
    the restart.
    """

    faults: tuple[Fault, ...] = Field(
        (),
        strict=False,
        exclude=True,
        examples=[["kill rank=1 step=3"]],
        description="Faults to inject, each as a string or as a mapping of these settings.",
    )

    @field_validator("faults", mode="before")
    @classmethod
    def _read(cls, faults: Any) -> Any:
        if not isinstance(faults, (list, tuple)):
            return faults
        return [parse(each) if isinstance(each, str) else each for each in faults]

    @property
    def remarks(self) -> list[str]:
        """The config's remarks, including a remark for each fault."""
        return [*super().remarks, *(f"injected fault: {fault}" for fault in self.faults)]
