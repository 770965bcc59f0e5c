"""Seed, save, and restore the random number generators of Python, NumPy, and torch together."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def seed_of(*entropy: int) -> int:
    """Return a 32-bit seed derived from any number of integers. The seeds for (1, 0) and (0, 1) are unrelated.

    Do not use sums such as seed + rank, because rank 1 with seed 0 would draw the same numbers as rank 0 with seed 1.
    """
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def reseed(*entropy: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy, and torch from `entropy` alone.

    If `device` is a GPU, its generator is also seeded.

    The torch seed is `seed_of(*entropy)`. NumPy and Python receive different seeds. If NumPy's global generator is not
    an MT19937, it is replaced with an MT19937.
    """
    for_torch, for_numpy, for_python = np.random.SeedSequence(entropy).generate_state(3).tolist()
    # torch.manual_seed would seed every GPU. If CUDA is not initialized, it saves a stack trace, which takes 2 ms.
    torch.default_generator.manual_seed(for_torch)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(for_torch)
    if not isinstance(get_bit_generator(), np.random.MT19937):  # np.random.seed requires an MT19937
        set_bit_generator(np.random.MT19937())
    np.random.seed(for_numpy)
    random.seed(for_python)


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random number generators of Python, NumPy, and torch after the block.

    If `device` is a GPU, its generator is also restored.
    """
    python, cpu = random.getstate(), torch.get_rng_state()
    generator, numpy = get_bit_generator(), np.random.get_state(legacy=False)
    gpu = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        set_bit_generator(generator)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpu is not None and device is not None:
            torch.cuda.set_rng_state(gpu, device)


@contextmanager
def seeded_rng(*entropy: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed all generators from `entropy` for the block, and restore them afterward (see `preserved_rng`)."""
    with preserved_rng(device):
        reseed(*entropy, device=device)
        yield
