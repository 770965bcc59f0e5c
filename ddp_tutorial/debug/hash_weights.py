"""Generate random weights for tensor hashes.

The tensor's bits are read as 64-bit integers. The hash is the dot product of these integers and the weights.
"""

from functools import cache

import torch


@cache
def hash_weights(length: int, device: torch.device = torch.device("cpu")) -> torch.Tensor:
    """Return `length` random odd integers, the same on all ranks.

    Multiplication by an odd integer is invertible modulo 2**64, so no bit is lost.
    """
    generator = torch.Generator().manual_seed(length)
    return (torch.randint(1 << 62, (length,), generator=generator) * 2 + 1).to(device)
