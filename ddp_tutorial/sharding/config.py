"""Define the settings that specify how samples are read."""

from typing import Literal

from pydantic import Field

from ddp_tutorial.config import Config

SourceKind = Literal["sharded", "dispatched", "streamed", "fast_stream"]
Remainder = Literal["carry", "exact", "pad", "drop"]


class SourceConfig(Config):
    """Settings for reading data. The module docstring of `sources` explains the values of `kind`."""

    kind: SourceKind = Field("sharded", description="Kind of source; see ddp_tutorial/sharding/sources.py.")
    remainder: Remainder = Field(
        "carry", description="Policy for the last samples of an epoch if they do not fill a batch."
    )
    workers: int = Field(
        0,
        ge=0,
        description="Number of worker processes per rank that prefetch batches; 0 means that the main process reads.",
    )
    worker_timeout: float = Field(120, gt=0, description="Timeout, in seconds, for a batch from a worker process.")
    prefetch: int = Field(
        2, ge=1, description="Number of batches that each worker, or rank 0 of a dispatched source, prefetches."
    )
    window: int = Field(65536, ge=1, description="Kind fast_stream only: number of samples in a shuffle window.")
    streams: int | None = Field(
        None,
        ge=1,
        examples=[4],
        description="Kind streamed only: number of logical streams, which determines the sample order.",
    )
    shuffle_buffer: int = Field(1000, ge=1, description="Kind streamed only: number of samples in the shuffle buffer.")
