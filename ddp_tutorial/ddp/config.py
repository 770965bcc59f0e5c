"""Define the settings of the DDP wrappers and of a simulated link."""

from typing import Literal

from pydantic import Field, model_validator

from ddp_tutorial.config import Config, ConfigError


class LinkConfig(Config):
    """The latency and the bandwidth of a simulated link; see `SimulatedLink`."""

    latency_ms: float = Field(0.1, ge=0, description="Latency of a message in milliseconds.")
    megabytes_per_second: float = Field(100.0, gt=0, description="Bandwidth in MB/s.")


class CompileConfig(Config):
    """Options for `torch.compile`, with the same names as in PyTorch."""

    backend: str = Field("inductor", description="Compiler backend.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None, examples=["reduce-overhead"], description="Optimization mode of backend inductor."
    )
    fullgraph: bool = Field(False, description="Raise an error at a graph break.")
    dynamic: bool | None = Field(
        None,
        examples=[True],
        description="Compile for dynamic shapes; by default, once a shape changes. If false, recompile for each shape.",
    )

    @model_validator(mode="after")
    def _modes_belong_to_inductor(self) -> "CompileConfig":
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"'mode' requires backend=inductor, got backend={self.backend}")
        return self


class DDPConfig(Config):
    """The DDP variant and its options. Options that also exist in PyTorch's DDP have the same names here."""

    variant: Literal["naive", "flat", "bucket", "torch"] = Field(
        "torch", description="Which DDP implementation averages the gradients."
    )
    bucket_cap_mb: float | None = Field(
        None,
        gt=0,
        examples=[25.0],
        description="Bucket size in MiB; by default, 1 for the first bucket and 25 for the others.",
    )
    find_unused_parameters: bool = Field(False, description="Allow parameters without a gradient in a step.")
    sync_buffers: bool = Field(
        True, description="Broadcast rank 0's buffers, such as those of BatchNorm, in each step."
    )
    hook: Literal["none", "fp16", "bf16", "powersgd"] = Field("none", description="Compression of the buckets.")
    powersgd_rank: int = Field(2, ge=1, description="Rank of the PowerSGD approximation.")
    static_graph: bool = Field(False, description="Variant torch only: every step uses the same parameters.")
    gradient_as_bucket_view: bool = Field(
        True, description="Variant torch only: gradients are views of the buckets; always true for variant bucket."
    )
    device_ids: list[int] | None = Field(
        None, examples=[[0]], description="Variant torch only: the GPU to use; by default, the rank's own GPU."
    )
    shared_memory: bool = Field(
        False, description="Variant torch only: two ranks of one Linux machine sum gradients in shared memory."
    )
    simulated_link: LinkConfig | None = Field(
        None, examples=[{"latency_ms": 0.1}], description="Slow the all-reduces down to the speed of a simulated link."
    )

    @model_validator(mode="after")
    def _options_belong_to_the_variant(self) -> "DDPConfig":
        changed = {
            name for name in self.model_fields_set if getattr(self, name) != type(self).model_fields[name].default
        }
        for options, variants in _ONLY.items():
            for name in sorted(changed & options):
                if self.variant not in variants:
                    known = " or ".join(f"variant={each}" for each in variants)
                    raise ValueError(f"'{name}' requires {known}, got variant={self.variant}")
        if "powersgd_rank" in changed and self.hook != "powersgd":
            raise ValueError(f"'powersgd_rank' requires hook=powersgd, got hook={self.hook}")
        if self.variant == "torch" and self.hook == "powersgd":
            raise ValueError(
                "'hook' must not be powersgd with variant=torch. PowerSGD starts a second all-reduce when the first "
                "one completes, and all ranks must start the all-reduces in the same order. variant=torch with gloo "
                "does not guarantee that order. Use variant=bucket"
            )
        beside = sorted(changed & {"hook", "simulated_link", "find_unused_parameters", "static_graph"})
        if self.shared_memory and beside:
            raise ValueError(f"'shared_memory' cannot be combined with '{beside[0]}': remove one of them")
        return self

    def require_compilable(self) -> None:
        """Raise `ConfigError` if PyTorch cannot split a compiled model at the bucket boundaries."""
        if self.variant == "torch" and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            raise ConfigError(
                f"'bucket_cap_mb' must be at least 1 for a compiled model, got {self.bucket_cap_mb}. PyTorch "
                "compiles one graph per bucket, and the first bucket is 1 MiB. Use bucket_cap_mb=1, or variant=bucket"
            )


_ONLY = {
    frozenset({"static_graph", "gradient_as_bucket_view", "device_ids", "shared_memory"}): ("torch",),
    frozenset({"bucket_cap_mb", "hook", "powersgd_rank"}): ("bucket", "torch"),
}
