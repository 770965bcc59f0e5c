"""Random numbers that depend on what they are for, and not on who draws them, or when."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*entropy: int) -> int:
    """A seed of 32 bits, mixed from any number of whole numbers: those of (1, 0) and (0, 1) have nothing in common.

    Do not add them up: with seed + rank, rank 1 of one run draws the same as rank 0 of the next.
    """
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def reseed(*entropy: int) -> None:
    """Seed torch (on all devices), NumPy and Python, each differently, from `entropy` alone."""
    torch.manual_seed(seed_of(*entropy))
    _reseed_numpy_and_python(*entropy)


def _reseed_numpy_and_python(*entropy: int) -> None:
    np.random.seed(seed_of(*entropy, 1))
    random.seed(seed_of(*entropy, 2))


@contextmanager
def seeded_rng(*entropy: int, device: torch.device | None = None) -> Iterator[None]:
    """In the block, what torch, NumPy and Python draw depends on `entropy` alone; after it, their states are as before.

    Torch's numbers are those of the CPU, and of `device` if that is a GPU.
    """
    before = random.getstate(), np.random.get_state()
    is_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_gpu else []):
        if is_gpu:
            reseed(*entropy)
        else:  # torch.manual_seed would seed the GPUs, too: slow, and nobody would restore their states
            torch.default_generator.manual_seed(seed_of(*entropy))
            _reseed_numpy_and_python(*entropy)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
