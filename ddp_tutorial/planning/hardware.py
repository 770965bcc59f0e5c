"""Devices and networks, with the source of each number.

A network has two levels: a fast domain (a node, with NVLink or PCIe) and the fabric between the domains. All numbers
are in SI units: FLOP/s, bytes, bytes per second, seconds. Bandwidths are per device and in one direction.
"""

from dataclasses import dataclass

from ddp_tutorial.ddp.link_model import LinkModel


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: The name of the device.
        flops: Peak FLOP/s of dense matrix products in bfloat16 (V100: float16).
        memory: Bytes of memory.
        memory_bandwidth: Bytes per second to and from the memory.
        matmul_fraction: The fraction of `flops` that the matrix products of a training step reach.
        attention_fraction: The fraction of `flops` that a fused attention kernel (FlashAttention) reaches.
        source: The address of the data sheet.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    matmul_fraction: float
    attention_fraction: float
    source: str


@dataclass(frozen=True)
class Network:
    """A network with two levels.

    Attributes:
        name: The name of the network.
        per_node: The number of devices in a fast domain.
        inside: The link of a device to the other devices of its domain.
        across: The link of a device to other domains: the bandwidth of a node's network cards divided by its devices.
        source: The address of the specification.
    """

    name: str
    per_node: int
    inside: LinkModel
    across: LinkModel
    source: str = ""


_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_HOPPER = "https://www.nvidia.com/en-us/data-center/h100/"

DEVICES = {
    device.name: device
    for device in (
        Device("V100", 125e12, 32e9, 0.9e12, 0.7, 0.3, "https://www.nvidia.com/en-us/data-center/v100/"),
        Device("A100-40", 312e12, 40e9, 1.555e12, 0.7, 0.5, _A100),
        Device("A100-80", 312e12, 80e9, 2.039e12, 0.7, 0.5, _A100),
        Device("H100", 989e12, 80e9, 3.35e12, 0.6, 0.35, _HOPPER),
        Device("H200", 989e12, 141e9, 4.8e12, 0.6, 0.35, "https://www.nvidia.com/en-us/data-center/h200/"),
        Device("B200", 2250e12, 180e9, 8e12, 0.6, 0.35, "https://www.nvidia.com/en-us/data-center/dgx-b200/"),
        Device("TPU v4", 275e12, 32e9, 1.2e12, 0.7, 0.5, "https://cloud.google.com/tpu/docs/v4"),
    )
}

# NCCL's own model of a ring with the Simple protocol: seconds per step. `hwLat` in
# https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
NVLINK_LATENCY, PCIE_LATENCY, FABRIC_LATENCY = 3.4e-6, 5.7e-6, 9.6e-6

NETWORKS = {
    network.name: network
    for network in (
        Network(
            "DGX A100",  # 600 GB/s of NVLink in both directions, 8 network cards of 200 Gbit/s
            8,
            LinkModel(NVLINK_LATENCY, 300e9),
            LinkModel(FABRIC_LATENCY, 25e9),
            "https://www.nvidia.com/en-us/data-center/dgx-a100/",
        ),
        Network(
            "DGX H100",  # 900 GB/s of NVLink in both directions, 8 network cards of 400 Gbit/s
            8,
            LinkModel(NVLINK_LATENCY, 450e9),
            LinkModel(FABRIC_LATENCY, 50e9),
            "https://www.nvidia.com/en-us/data-center/dgx-h100/",
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
