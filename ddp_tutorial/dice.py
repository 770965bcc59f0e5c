"""Random numbers that depend on what they are for, and not on who draws them, or when."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*entropy: int) -> int:
    """A seed of 32 bits, mixed from any number of whole numbers: (1, 0) and (0, 1) have nothing in common.

    Not their sum: seed + rank makes rank 1 of one run the same as rank 0 of the next.
    """
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def reseed(*entropy: int) -> None:
    """Let torch, NumPy and Python draw from here on what depends on `entropy` alone, each something of its own."""
    torch.manual_seed(seed_of(*entropy))
    np.random.seed(seed_of(*entropy, 1))
    random.seed(seed_of(*entropy, 2))


@contextmanager
def dice_of(*entropy: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside, random numbers of torch, NumPy and Python depend on `entropy` alone. Outside, nothing has happened."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device and device.type == "cuda" else []):
        reseed(*entropy)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
