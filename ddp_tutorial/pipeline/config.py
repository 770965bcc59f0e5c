"""Settings of a pipeline: its stages and its schedule."""

from typing import Literal

from pydantic import Field, model_validator

from ddp_tutorial.config import Config, ConfigError

Name = Literal["gpipe", "1f1b", "interleaved"]


class StagesConfig(Config):
    """The split of a model into stages and their schedule, for any number of ranks."""

    schedule: Name = Field("1f1b", description="Order of forward and backward passes.")
    micro_batches: int = Field(4, ge=1, description="Micro-batches of a step through one pipeline.")
    per_rank: int = Field(1, ge=1, description="Stages on each rank; schedule interleaved needs at least 2.")
    cuts: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=[["blocks.2"]],
        description="Modules that begin a stage, except the first; by default, stages have about equal parameters.",
    )

    def on(self, ranks: int) -> "PipelineConfig":
        """Return these settings for pipelines of `ranks` ranks.

        Raises:
            ConfigError: See `check_on`.
        """
        self.check_on(ranks)
        return PipelineConfig(ranks=ranks, **{name: getattr(self, name) for name in StagesConfig.model_fields})

    def check_on(self, ranks: int) -> None:
        """Validate the settings for pipelines of `ranks` ranks.

        Raises:
            ConfigError: If the schedule does not support `ranks` ranks, or if the number of `cuts` does not match the
                number of stages.
        """
        require_schedule(self.schedule, ranks, self.micro_batches, self.per_rank)
        stages = ranks * self.per_rank
        if self.cuts and len(self.cuts) != stages - 1:
            raise ConfigError(f"'cuts' should name {stages - 1} modules, for {stages} stages; found {self.cuts}")


class PipelineConfig(StagesConfig):
    """The split into stages, the schedule, and the number of ranks in a pipeline."""

    ranks: int = Field(2, ge=1, description="of one pipeline; the world is a whole number of them")

    @property
    def stages(self) -> int:
        """The number of stages of the full model."""
        return self.ranks * self.per_rank

    @model_validator(mode="after")
    def _is_a_schedule(self) -> "PipelineConfig":
        self.check_on(self.ranks)
        return self


def require_schedule(name: Name, ranks: int, micro_batches: int, per_rank: int = 1) -> None:
    """Validate the numbers of a schedule.

    Raises:
        ConfigError: If the schedule does not support these numbers.
    """
    if min(ranks, micro_batches, per_rank) < 1:
        raise ConfigError(
            f"a pipeline has 1 rank, 1 micro-batch and 1 stage a rank or more; found {ranks} ranks, {micro_batches} "
            f"micro-batches, {per_rank} stages a rank"
        )
    if name != "interleaved" and per_rank != 1:
        raise ConfigError(f"schedule {name!r} has one stage on each rank, found {per_rank}: use 'interleaved'")
    if name == "interleaved" and per_rank == 1:
        raise ConfigError("schedule 'interleaved' has 2 stages or more on each rank, found 1: use '1f1b'")
    if name != "gpipe" and micro_batches < ranks:
        raise ConfigError(
            f"schedule {name!r} needs as many micro-batches as ranks, {ranks}, or more; found {micro_batches}: some "
            "rank would be idle all the time. Use more micro-batches, or fewer stages"
        )
