"""Arrange ranks in a mesh.

The ranks in a row share one replica of the model. The ranks in a column store the same shard.

    replicate 2 x shard 3       row 0:  ranks 0 1 2      a replica of the model, one third on each rank
                                row 1:  ranks 3 4 5      a replica of the model, sharded like row 0

The ranks in a row are consecutive. If the number of ranks per machine equals the row length, the communication within a
row stays on one machine. Gradients are reduced within a column (such as ranks 0 and 3). With `pipeline`, each rank
stores pipeline stages instead of a shard.
"""

from typing import Literal, NamedTuple

from pydantic import Field

from ddp_tutorial.config import Config, ConfigError

Along = Literal["shard", "pipeline"]


class MeshConfig(Config):
    """The number of model replicas, and the number of ranks that share a replica.

    A missing number is computed from the world size. If all numbers are missing, all ranks share one replica.
    """

    replicate: int | None = Field(None, ge=1, examples=[2], description="Number of replicas of the model.")
    shard: int | None = Field(
        None, ge=1, examples=[2], description="Ranks per replica, for strategies zero1, zero2, zero3 and fsdp."
    )
    pipeline: int | None = Field(None, ge=1, examples=[2], description="Ranks per replica, for strategy pipeline.")


class Mesh(NamedTuple):
    """A mesh with `replicate` rows of `span` ranks."""

    replicate: int
    span: int

    @property
    def rows(self) -> list[list[int]]:
        """The ranks in each row."""
        return [list(range(first, first + self.span)) for first in range(0, self.replicate * self.span, self.span)]

    @property
    def columns(self) -> list[list[int]]:
        """The ranks in each column."""
        return [list(column) for column in zip(*self.rows, strict=True)]

    def row_and_column(self, rank: int) -> tuple[int, int]:
        """Return a rank's row and its position in that row, both zero-based."""
        return divmod(rank, self.span)


def make_mesh(config: MeshConfig, world_size: int, along: Along) -> Mesh:
    """Return the mesh for a world of `world_size` ranks. `along` is the dimension along which a replica is split.

    Raises:
        ConfigError: If the mesh does not contain exactly `world_size` ranks.
    """
    span = config.shard if along == "shard" else config.pipeline
    given = {"replicate": config.replicate, along: span}
    sizes = " x ".join(f"{name} {number}" for name, number in given.items() if number)
    copies, each = config.replicate or 0, span or 0
    if not copies:
        copies = world_size // each if each else 1
    mesh = Mesh(copies, each or world_size // copies)
    if mesh.replicate * mesh.span != world_size:
        whole = "" if config.replicate and span else "a multiple of "
        wanted = (config.replicate or 1) * (span or 1)
        raise ConfigError(
            f"the number of ranks must be {whole}{wanted} for mesh {sizes}, got {world_size}: start a matching number "
            "of ranks, or change 'mesh'"
        )
    return mesh
