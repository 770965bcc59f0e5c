"""Generate random weights for tensor hashes.

A tensor's hash is the dot product of the weights and the tensor's bits, read as 64-bit integers.
"""

from functools import cache

import torch


@cache
def hash_weights(length: int, device: torch.device = torch.device("cpu")) -> torch.Tensor:
    """Return `length` random odd integers that are the same on all ranks.

    Multiplication by an odd integer is invertible modulo 2**64, so every bit affects the hash.
    """
    generator = torch.Generator().manual_seed(length)
    return (torch.randint(1 << 62, (length,), generator=generator) * 2 + 1).to(device)
