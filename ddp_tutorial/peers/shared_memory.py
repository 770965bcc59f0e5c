"""This package's Trainer, which sums gradients in memory that two ranks of one host share."""

from torch import nn

from ddp_tutorial.peers import ours
from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(world: World, work: Work) -> nn.Module:
    """Train with this package, with shared memory."""
    return ours.train(world, work, shared_memory=True)
