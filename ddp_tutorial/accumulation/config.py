"""Define the precision settings, and the DDP options that are passed to Accelerate."""

from typing import Literal

from pydantic import Field

from ddp_tutorial.config import Config

# The options of `DDPConfig` that `strategy=accelerate` passes to Accelerate.
FORWARDED_OPTIONS = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


class PrecisionConfig(Config):
    """The data type of matrix products, and the float16 loss-scaling settings."""

    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Data type of matrix products; weights, gradients and optimizer state stay in float32."
    )
    initial_scale: float = Field(65536.0, ge=1, description="fp16 only: initial loss scale.")
    growth_interval: int = Field(
        2000, ge=1, description="fp16 only: steps without overflow after which the loss scale doubles."
    )
