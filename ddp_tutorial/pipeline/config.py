"""Define the settings for a pipeline's stages and schedule."""

from typing import Literal

from pydantic import Field, model_validator

from ddp_tutorial.config import Config, ConfigError

Name = Literal["gpipe", "1f1b", "interleaved"]


class StagesConfig(Config):
    """Settings for the schedule and the split into stages, without the number of ranks in a pipeline."""

    schedule: Name = Field("1f1b", description="Order of forward and backward passes.")
    micro_batches: int = Field(4, ge=1, description="Micro-batches per pipeline in one run of the schedule.")
    per_rank: int = Field(1, ge=1, description="Stages on each rank; schedule interleaved requires at least 2.")
    cuts: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=[["blocks.2"]],
        description="First module of each stage except stage 0. By default, `split` determines the stages.",
    )
    split: Literal["parameters", "measured"] = Field(
        "parameters",
        description="Without `cuts`, balance the stages by parameters, or by module times measured on rank 0.",
    )

    def on(self, ranks: int) -> "PipelineConfig":
        """Return these settings as a `PipelineConfig` for pipelines of `ranks` ranks.

        Raises:
            ConfigError: If `check_on` rejects the settings.
        """
        self.check_on(ranks)
        return PipelineConfig(ranks=ranks, **{name: getattr(self, name) for name in StagesConfig.model_fields})

    def check_on(self, ranks: int) -> None:
        """Validate the settings for pipelines of `ranks` ranks.

        Raises:
            ConfigError: If the schedule does not support `ranks` ranks, or if the number of `cuts` does not match the
                number of stages.
        """
        name, micro_batches, per_rank = self.schedule, self.micro_batches, self.per_rank
        if name != "interleaved" and per_rank != 1:
            raise ConfigError(f"schedule {name!r} requires 1 stage per rank, got {per_rank}: use 'interleaved'")
        if name == "interleaved" and per_rank == 1:
            raise ConfigError("schedule 'interleaved' requires at least 2 stages per rank, got 1: use '1f1b'")
        if name != "gpipe" and micro_batches < ranks:
            raise ConfigError(
                f"schedule {name!r} requires at least {ranks} micro-batches (one per rank), got {micro_batches}. "
                "With fewer micro-batches, some ranks are always idle. Use more micro-batches, or fewer ranks per "
                "pipeline"
            )
        stages = ranks * self.per_rank
        if self.cuts and len(self.cuts) != stages - 1:
            raise ConfigError(f"'cuts' must name {stages - 1} modules for {stages} stages, got {self.cuts}")


class PipelineConfig(StagesConfig):
    """Settings for the schedule and the split into stages, and the number of ranks in a pipeline."""

    ranks: int = Field(2, ge=1, description="Ranks in a pipeline; the world size must be a multiple of this number.")

    @property
    def stages(self) -> int:
        """The number of stages of the full model."""
        return self.ranks * self.per_rank

    @model_validator(mode="after")
    def _is_a_schedule(self) -> "PipelineConfig":
        self.check_on(self.ranks)
        return self
