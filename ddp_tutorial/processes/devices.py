"""Select the GPUs for the ranks on this machine, for `train --devices 0,1,3`."""

import os

import torch

from ddp_tutorial.config import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(devices: str, ranks: int | None) -> list[str]:
    """Return the selected GPUs as entries for CUDA_VISIBLE_DEVICES.

    Args:
        devices: The GPU numbers, such as "0,1,3". The numbers index the GPUs that are visible to this process, so a
            scheduler's CUDA_VISIBLE_DEVICES setting is respected.
        ranks: The number of ranks on this machine. None means one rank per GPU.

    Raises:
        ConfigError: If a GPU number is malformed, unknown or repeated, or if fewer GPUs than ranks are selected.
    """
    names = [name.strip() for name in devices.split(",")]
    if not all(name.isdecimal() for name in names):
        raise ConfigError(f"--devices must be GPU numbers separated by commas, such as 0,1,3, got {devices!r}")
    numbers, there = [int(name) for name in names], torch.cuda.device_count()
    if not there:
        raise ConfigError("--devices selects GPUs, but torch found none on this machine. To use CPUs, omit --devices")
    if unknown := [number for number in numbers if number >= there]:
        raise ConfigError(f"--devices {devices}: GPU numbers must be between 0 and {there - 1}, got {unknown[0]}")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--devices {devices} selects a GPU more than once, but each rank requires its own GPU")
    if ranks is not None and ranks > len(numbers):
        raise ConfigError(
            f"--devices {devices} selects {len(numbers)} GPUs for {ranks} ranks on this machine, but each rank "
            f"requires its own GPU. Use nprocs={len(numbers)}, or select {ranks} GPUs"
        )
    visible = os.environ[VISIBLE].split(",") if os.environ.get(VISIBLE) else list(map(str, range(there)))
    return [visible[number].strip() for number in numbers]


def default_nprocs(device: str, nprocs: int) -> int:
    """Return the default number of ranks, which is the GPU count if the ranks use GPUs, and `nprocs` otherwise.

    With device "auto", the ranks use GPUs if there are at least `nprocs` GPUs.
    """
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return gpus if gpus and (device == "cuda" or gpus >= nprocs) else nprocs
