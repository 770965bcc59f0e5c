"""Who shares out one copy of the model, and with whom are gradients added up beyond that?

With one copy, each of W ranks has 1/W of it. In a hybrid (HSDP) there are R copies, and each of the S ranks of a copy
has 1/S: the gathers, and the larger part of adding up gradients, stay among S ranks; over the copies goes only 1/S of
the gradients. More memory than with one copy, for less on the slow links between machines.

Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel", VLDB 2023, section 3.2.2.
"""

from typing import Any

import torch

from ddp_tutorial.mesh import Mesh, group_of
from ddp_tutorial.world import World
from ddp_tutorial.zero.pieces import piece_of


class Shards:
    """The ranks that have one copy of a model between them, seen by one of them: `rank` of `size`, in group `inside`;
    `across` is the group of those which have the same piece in the other copies. None means the group of all ranks.

    Collective. By default there is one copy, and all ranks of the world share it out.
    """

    def __init__(self, world: World, mesh: Mesh | None = None) -> None:
        self.world = world
        self.mesh = mesh or Mesh(1, world.size)
        if self.mesh.replicate * self.mesh.span != world.size:
            raise ValueError(f"{self.mesh} has another number of ranks than the world, {world.size}")
        _, self.rank = self.mesh.row_and_column(world.rank)
        self.size, self.copies = self.mesh.span, self.mesh.replicate
        self.inside: Any = None
        self.across: Any = None
        if self.copies > 1:
            self.inside, self.across = group_of(self.mesh.rows, world), group_of(self.mesh.columns, world)

    def piece_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's flat piece of a tensor, in memory of its own."""
        return tensor.reshape(-1)[piece_of(tensor.numel(), self.rank, self.size)].clone()

    @property
    def device(self) -> torch.device:
        return self.world.device
