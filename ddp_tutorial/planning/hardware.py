"""Devices and networks, with the source of each number.

A network has two levels: a fast domain (a node, with NVLink or PCIe) and the fabric between the domains. All numbers
are in SI units: FLOP/s, bytes, bytes per second, seconds. Bandwidths are per device and in one direction.
"""

from dataclasses import dataclass

from ddp_tutorial.ddp.link_model import LinkModel

# The fraction of a device's achievable matrix FLOP/s that the matrix products of a training step reach. This fraction
# is the model's only fitted constant: `comparison.fit` fits it once over all published runs, not per run or device.
REACHED = 0.7


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: The name of the device.
        flops: Peak FLOP/s of dense matrix products in bfloat16.
        memory: The memory size in bytes.
        memory_bandwidth: The memory bandwidth in bytes per second.
        achievable: The fraction of `flops` that the best matrix product reaches in a benchmark (`MATMULS`).
        attention_fraction: The fraction of `flops` that a fused attention kernel reaches (`ATTENTION`).
        source: The URL of the data sheet.
        reached: The fraction of the achievable FLOP/s that the matrix products of a training step reach.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    achievable: float
    attention_fraction: float
    source: str
    reached: float = REACHED

    @property
    def matmul_flops(self) -> float:
        """The FLOP/s that the matrix products of a training step reach."""
        return self.flops * (self.achievable * self.reached)


@dataclass(frozen=True)
class Network:
    """A two-level network.

    Attributes:
        name: The name of the network.
        per_node: The number of devices in a fast domain.
        inside: The link from a device to other devices in its domain.
        across: The link from a device to other domains, with an equal share of the node's bandwidth.
        source: The URL of the specification.
    """

    name: str
    per_node: int
    inside: LinkModel
    across: LinkModel
    source: str = ""


GIB = 2**30  # data sheets write GB for the memory of a device, but these are GiB

# Achievable and peak matrix TFLOP/s: 271.2 of 312 on A100, 794.5 of 989 on H100, and 1,745 of 2,250 on B200.
MATMULS = "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops"
# FlashAttention-2: 50 to 73 % of the peak on A100 (https://arxiv.org/abs/2307.08691), 35 % on H100. FlashAttention-3
# reaches up to 75 % on H100, but most published runs are older.
ATTENTION = "https://arxiv.org/abs/2407.08608"

DEVICES = {
    device.name: device
    for device in (
        Device("A100-40", 312e12, 40 * GIB, 1.555e12, 0.869, 0.5, "https://www.nvidia.com/en-us/data-center/a100/"),
        Device("A100-80", 312e12, 80 * GIB, 2.039e12, 0.869, 0.5, "https://www.nvidia.com/en-us/data-center/a100/"),
        Device("H100", 989e12, 80 * GIB, 3.35e12, 0.803, 0.35, "https://www.nvidia.com/en-us/data-center/h100/"),
        Device("H200", 989e12, 141 * GIB, 4.8e12, 0.803, 0.35, "https://www.nvidia.com/en-us/data-center/h200/"),
        Device("B200", 2250e12, 180 * GIB, 8e12, 0.776, 0.35, "https://www.nvidia.com/en-us/data-center/dgx-b200/"),
    )
}

# The seconds per ring step in NCCL's own model of the Simple protocol: `hwLat` in
# https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
NVLINK_LATENCY, PCIE_LATENCY, FABRIC_LATENCY = 3.4e-6, 5.7e-6, 9.6e-6

NETWORKS = {
    network.name: network
    for network in (
        Network(
            "DGX A100",  # 600 GB/s of NVLink bandwidth (sum of both directions), 8 network cards of 200 Gbit/s
            8,
            LinkModel(NVLINK_LATENCY, 300e9),
            LinkModel(FABRIC_LATENCY, 25e9),
            "https://www.nvidia.com/en-us/data-center/dgx-a100/",
        ),
        Network(
            "DGX H100",  # 900 GB/s of NVLink bandwidth (sum of both directions), 8 network cards of 400 Gbit/s
            8,
            LinkModel(NVLINK_LATENCY, 450e9),
            LinkModel(FABRIC_LATENCY, 50e9),
            "https://www.nvidia.com/en-us/data-center/dgx-h100/",
        ),
        Network(
            "DGX B200",  # 1,800 GB/s of NVLink bandwidth (sum of both directions), 8 network cards of 400 Gbit/s
            8,
            LinkModel(NVLINK_LATENCY, 900e9),
            LinkModel(FABRIC_LATENCY, 50e9),
            "https://www.nvidia.com/en-us/data-center/dgx-b200/",
        ),
        Network(
            "AWS p4d",  # 400 Gbit/s per node
            8,
            LinkModel(NVLINK_LATENCY, 300e9),
            LinkModel(FABRIC_LATENCY, 6.25e9),
            "https://aws.amazon.com/ec2/instance-types/p4/",
        ),
        Network(
            "AWS p5",  # 3,200 Gbit/s per node
            8,
            LinkModel(NVLINK_LATENCY, 450e9),
            LinkModel(FABRIC_LATENCY, 50e9),
            "https://aws.amazon.com/ec2/instance-types/p5/",
        ),
        Network(
            "PCIe, 100 Gbit/s",  # PCIe 4.0 with 16 lanes, one network card for 8 devices
            8,
            LinkModel(PCIE_LATENCY, 32e9),
            LinkModel(FABRIC_LATENCY, 12.5e9 / 8),
        ),
    )
}
