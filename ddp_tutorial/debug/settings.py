"""What a config says for a run that is looked at from outside: the run, and what is to go wrong in it on purpose.

    # my.yaml
    extends: 2proc
    faults:
      - kill rank=1 step=3 phase=backward
      - {action: delay, rank: 0, step: 5, seconds: 2}

Training knows nothing of it: whoever starts the ranks puts `inject_faults` around the training (see
`commands.training`).
"""

from typing import Any

from pydantic import Field, field_validator

from ddp_tutorial.debug.faults import Fault, parse
from ddp_tutorial.training.config import TaskConfig


class FaultyConfig(TaskConfig):
    """A run, and its `faults`, each of the form that `parse` reads or with a line for each setting.

    They are no part of what the run is: they are not in its config.json or its checkpoints, and a run is resumed with
    others, or without, as if they were not there. They strike in every life of a run, at the steps of that life.
    """

    faults: tuple[Fault, ...] = Field(
        (), strict=False, exclude=True, examples=[["kill rank=1 step=3"]], description="Faults to inject."
    )

    @field_validator("faults", mode="before")
    @classmethod
    def _read(cls, faults: Any) -> Any:
        if not isinstance(faults, (list, tuple)):
            return faults
        return [parse(each) if isinstance(each, str) else each for each in faults]

    @property
    def remarks(self) -> list[str]:
        return [*super().remarks, *(f"a fault on purpose: {fault}" for fault in self.faults)]
