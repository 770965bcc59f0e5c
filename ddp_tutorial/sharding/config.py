"""Define the settings that specify how samples are read."""

from typing import Literal

from pydantic import Field

from ddp_tutorial.config import Config

SourceKind = Literal["sharded", "dispatched", "streamed", "fast_stream"]
Remainder = Literal["carry", "exact", "pad", "drop"]


class SourceConfig(Config):
    """Settings for reading data. The module docstring of `sources` explains the values of `kind`."""

    kind: SourceKind = Field("sharded", description="Which rank reads which samples.")
    remainder: Remainder = Field(
        "carry", description="Policy for the last samples of an epoch if they do not fill a batch."
    )
    workers: int = Field(
        0, ge=0, description="Worker processes per rank that prefetch batches; 0 reads in the main process."
    )
    worker_timeout: float = Field(
        120, gt=0, description="Seconds that a rank waits for a worker's batch before it raises an error."
    )
    prefetch: int = Field(
        2, ge=1, description="Number of batches that each worker, or rank 0 of a dispatched source, prefetches."
    )
    window: int = Field(65536, ge=1, description="Kind fast_stream only: samples in a shuffle window.")
    streams: int | None = Field(
        None,
        ge=1,
        examples=[4],
        description="Kind streamed only: number of logical streams, which determines the sample order.",
    )
    shuffle_buffer: int = Field(1000, ge=1, description="Kind streamed only: samples in the shuffle buffer.")
