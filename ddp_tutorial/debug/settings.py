"""The config of a run with injected faults.

    # my.yaml
    extends: 2proc
    faults:
      - kill rank=1 step=3 phase=backward
      - {action: delay, rank: 0, step: 5, seconds: 2}

The training code does not know about faults. The caller that starts the ranks wraps the training in `inject_faults`
(see `commands.training`).
"""

from typing import Any

from pydantic import Field, field_validator

from ddp_tutorial.debug.faults import Fault, parse
from ddp_tutorial.training.config import TaskConfig


class FaultyConfig(TaskConfig):
    """The config of a run with `faults`. Each fault is a string in the format of `parse`, or a mapping of its settings.

    Faults are not part of the run's identity: config.json and the checkpoints do not contain them. A run can be resumed
    with different faults or without faults. After a restart, the faults occur again, with steps counted from the
    restart.
    """

    faults: tuple[Fault, ...] = Field(
        (),
        strict=False,
        exclude=True,
        examples=[["kill rank=1 step=3"]],
        description="Faults to inject, as text or with these settings.",
    )

    @field_validator("faults", mode="before")
    @classmethod
    def _read(cls, faults: Any) -> Any:
        if not isinstance(faults, (list, tuple)):
            return faults
        return [parse(each) if isinstance(each, str) else each for each in faults]

    @property
    def remarks(self) -> list[str]:
        """Remarks of the config, including one for each fault."""
        return [*super().remarks, *(f"a fault on purpose: {fault}" for fault in self.faults)]
