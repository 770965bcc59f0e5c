"""Settings of a run's checkpoints."""

from typing import Literal

from pydantic import Field

from ddp_tutorial.config import Config

Check = Literal["none", "quick", "tensor", "full"]


class CheckpointConfig(Config):
    """When the state of a run is saved, and what is kept."""

    every: int = Field(0, ge=0, description="Steps between checkpoints, with one after the last step; 0 saves none.")
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
