"""Settings of how the samples are read."""

from typing import Literal

from pydantic import Field

from ddp_tutorial.config import Config

SourceKind = Literal["sharded", "dispatched", "streamed", "fast_stream"]
Remainder = Literal["carry", "exact", "pad", "drop"]


class SourceConfig(Config):
    """How the data are read; see the module docstring for `kind`."""

    kind: SourceKind = Field("sharded", description="Which rank reads which samples.")
    remainder: Remainder = Field(
        "carry", description="What happens to the last samples of an epoch that do not fill a batch."
    )
    workers: int = Field(0, ge=0, description="Worker processes that read ahead, per rank; 0 reads in the rank.")
    worker_timeout: float = Field(
        120, gt=0, description="Seconds that a rank waits for a batch of a worker before it raises an error."
    )
    prefetch: int = Field(
        2, ge=1, description="Batches that each worker, or rank 0 of a dispatched source, reads ahead."
    )
    window: int = Field(65536, ge=1, description="Kind fast_stream only: samples in a shuffle window.")
    streams: int | None = Field(
        None, ge=1, examples=[4], description="Kind streamed only: number of logical streams; it determines the order."
    )
    shuffle_buffer: int = Field(1000, ge=1, description="Kind streamed only: samples in the shuffle buffer.")
