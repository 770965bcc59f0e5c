"""Define the checkpoint settings of a run."""

from typing import Any, Literal

from pydantic import Field, field_validator

from ddp_tutorial.config import Config
from ddp_tutorial.intervals import Interval, check_interval

Check = Literal["none", "quick", "tensor", "full"]


class CheckpointConfig(Config):
    """Settings that specify when checkpoints are saved and how many checkpoints are kept."""

    every: Interval = Field(
        0,
        description="Steps between checkpoints, `epoch`, or `N epochs`; the last step is also saved. 0 saves none.",
    )
    keep_last: int = Field(2, ge=1, description="Number of checkpoints to keep.")
    check: Check = Field(
        "tensor", description="How thoroughly the replicas are compared before a checkpoint is written."
    )
    background: bool = Field(
        False, description="Write checkpoints in a background thread; training only waits for a copy in memory."
    )
    shared: bool = Field(
        True, description="All ranks share the run directory; if false, rank 0 reads and writes for all ranks."
    )

    @field_validator("every", mode="before")
    @classmethod
    def _every_is_an_interval(cls, value: Any) -> Any:
        return check_interval(value, least=0)
