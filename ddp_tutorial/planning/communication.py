"""Compute the duration and the traffic of collectives on a two-level network.

A ring over all devices in a group passes through each node once. Steps within a node have the latency of the fast
domain, and steps between nodes have the latency of the fabric. NCCL runs one ring per network card, so a group can
use the network cards of all its devices simultaneously. An all-reduce can also use a tree, whose latency grows with the
logarithm of the number of nodes. NCCL itself uses these formulas to choose the faster algorithm (src/graph/tuning.cc in
https://github.com/NVIDIA/nccl).
"""

import math
from dataclasses import dataclass

from ddp_tutorial.planning.hardware import Network

# The fraction of a link's bandwidth that collectives reach: NCCL's ring on NVLink reaches 370 of 450 GB/s on H100
# (https://github.com/NVIDIA/nccl-tests/issues/212) and at most 235 of 300 GB/s on A100 (tuning.cc).
LINK_FRACTION = 0.8


@dataclass(frozen=True)
class Group:
    """The devices in a collective.

    Attributes:
        size: The number of devices.
        nodes: The number of nodes. Each node contains the same number of the group's devices.
    """

    size: int
    nodes: int

    @property
    def local(self) -> float:
        """The number of the group's devices on each node."""
        return self.size / self.nodes

    def bandwidth(self, network: Network) -> float:
        """Return the bandwidth of a ring's slowest link, in bytes per second."""
        across = self.local * network.across.bandwidth if self.nodes > 1 else math.inf
        return LINK_FRACTION * min(network.inside.bandwidth if self.local > 1 else math.inf, across)


def group_of(size: int, stride: int, per_node: int) -> Group:
    """Return the group of `size` devices whose indices are `stride` apart, on nodes of `per_node` devices."""
    return Group(size, math.ceil(size / max(1, per_node // stride)))


def pass_seconds(group: Group, network: Network, nbytes: float) -> float:
    """Return the duration of a ring reduce-scatter or all-gather over W devices (W - 1 steps of `nbytes` / W bytes)."""
    if group.size == 1:
        return 0.0
    latency = group.nodes * (group.local - 1) * network.inside.latency + (group.nodes - 1) * network.across.latency
    return latency + sent_bytes(group, nbytes) / group.bandwidth(network)


def all_reduce_seconds(group: Group, network: Network, nbytes: float) -> float:
    """Return the duration of an all-reduce of `nbytes` bytes over a ring or a tree, whichever has the lower latency."""
    if group.size == 1:
        return 0.0
    tree = 2 * ((group.local - 1) * network.inside.latency + math.log2(group.nodes) * network.across.latency)
    ring = 2 * pass_seconds(group, network, 0)
    return min(tree, ring) + 2 * sent_bytes(group, nbytes) / group.bandwidth(network)


def sent_bytes(group: Group, nbytes: float) -> float:
    """Return the number of bytes that a device sends in a reduce-scatter or all-gather of `nbytes` bytes."""
    return nbytes * (group.size - 1) / group.size


def sent_across(group: Group, nbytes: float) -> float:
    """Return the number of bytes that leave a node, divided by the number of the group's devices on the node."""
    return sent_bytes(group, nbytes) / group.local if group.nodes > 1 else 0.0
