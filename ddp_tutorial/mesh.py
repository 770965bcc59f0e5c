"""Ranks in rows and columns: which of them have one copy of the model between them, and which have the same part of it.

    replicate 2 x shard 3       row 0:  ranks 0 1 2      a copy of the model, a third on each rank
                                row 1:  ranks 3 4 5      another copy, cut alike

The ranks of a row follow one another. So where a machine has as many ranks as a row, what a row says to itself does not
leave the machine. Over a column (ranks 0 and 3) gradients are added up. With `pipeline` in place of `shard`, the parts
are stages.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from pydantic import Field

from ddp_tutorial.config import Config, ConfigError
from ddp_tutorial.world import World, require_group

Along = Literal["shard", "pipeline"]


class MeshConfig(Config):
    """How many copies of the model there are, and how many ranks have one between them. What is not given follows from
    the number of ranks; where nothing is, all of them have one copy."""

    replicate: int | None = Field(None, ge=1, examples=[2], description="copies of the model")
    shard: int | None = Field(None, ge=1, examples=[2], description="ranks of a copy: zero1, zero2, zero3, fsdp")
    pipeline: int | None = Field(None, ge=1, examples=[2], description="ranks of a copy: strategy pipeline")


class Mesh(NamedTuple):
    """`replicate` rows of `span` ranks."""

    replicate: int
    span: int

    @property
    def rows(self) -> list[list[int]]:
        return [list(range(first, first + self.span)) for first in range(0, self.replicate * self.span, self.span)]

    @property
    def columns(self) -> list[list[int]]:
        return [list(column) for column in zip(*self.rows, strict=True)]

    def row_and_place(self, rank: int) -> tuple[int, int]:
        """The row in which a rank is, and its place in that row, both from 0."""
        return divmod(rank, self.span)


def make_mesh(config: MeshConfig, world_size: int, along: Along) -> Mesh:
    """The mesh of a world of so many ranks. Raises `ConfigError` where it has more or fewer ranks than the mesh."""
    span = config.shard if along == "shard" else config.pipeline
    given = {"replicate": config.replicate, along: span}
    told = " x ".join(f"{name} {number}" for name, number in given.items() if number)
    copies, each = config.replicate or 0, span or 0
    if not copies:
        copies = world_size // each if each else 1
    mesh = Mesh(copies, each or world_size // copies)
    if mesh.replicate * mesh.span != world_size:
        whole = "" if config.replicate and span else "a whole multiple of "
        wanted = (config.replicate or 1) * (span or 1)
        ranks = "rank" if world_size == 1 else "ranks"
        raise ConfigError(
            f"the world has {world_size} {ranks}, and a mesh of {told} has {whole}{wanted}: start as many, or change "
            "'mesh'"
        )
    return mesh


def group_of(groups: Sequence[Sequence[int]], world: World) -> Any:
    """The process group of this rank among `groups` of ranks; None if it is in none. Collective: every rank of the
    world makes all of them."""
    require_group(world)
    mine = None
    for ranks in groups if world.size > 1 else ():
        group = dist.new_group(list(ranks), backend=world.backend, timeout=world.timeout)
        if world.rank in ranks:
            mine = group
    return mine
