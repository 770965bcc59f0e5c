"""Train with this package and `ddp.shared_memory`, which sums the gradients of two ranks in shared memory."""

from torch import nn

from ddp_tutorial.peers import ours
from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(world: World, work: Work) -> nn.Module:
    """Train with this package and shared memory."""
    return ours.train(world, work, shared_memory=True)
