"""Group the ranks that share one replica of the model, and the ranks that store the same shard of each replica.

With a single replica, each of W ranks stores 1/W of the model. Hybrid sharding (HSDP) keeps R replicas, and shards each
replica across S ranks. All-gathers and reduce-scatters run within groups of S ranks. Each rank all-reduces only 1/S of
the gradients across replicas. HSDP trades additional memory for less data over slow links between machines.

Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel", VLDB 2023, section 3.2.2.
"""

from typing import Any

import torch

from ddp_tutorial.groups import group_of
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World
from ddp_tutorial.zero.pieces import piece_of


class Shards:
    """The ranks that share one replica of a model, from the perspective of one of these ranks.

    Attributes:
        rank: The position of this rank in its replica.
        size: The number of ranks that share a replica.
        copies: The number of replicas.
        inside: The process group of the ranks that share this replica. None means all ranks.
        across: The process group of the ranks that hold the same shard in each replica, or None if there is only one
            replica.
    """

    def __init__(self, world: World, mesh: Mesh | None = None) -> None:
        """Create the process groups. By default, all ranks share one replica. Collective.

        Raises:
            ValueError: If the number of ranks in the mesh is not the world size.
        """
        self.world = world
        self.mesh = mesh or Mesh(1, world.size)
        if self.mesh.replicate * self.mesh.span != world.size:
            raise ValueError(f"the number of ranks in {self.mesh} must equal the world size ({world.size})")
        _, self.rank = self.mesh.row_and_column(world.rank)
        self.size, self.copies = self.mesh.span, self.mesh.replicate
        self.inside: Any = None
        self.across: Any = None
        if self.copies > 1:
            self.inside, self.across = group_of(self.mesh.rows, world), group_of(self.mesh.columns, world)

    def piece_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's flat shard of a tensor."""
        return tensor.reshape(-1)[piece_of(tensor.numel(), self.rank, self.size)].clone()
