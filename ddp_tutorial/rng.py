"""Random numbers that depend on what they are for, and not on who draws them, or when."""

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def seed_of(*entropy: int) -> int:
    """A seed of 32 bits, mixed from any number of whole numbers: those of (1, 0) and (0, 1) have nothing in common.

    Do not add them up: with seed + rank, rank 1 of one run draws the same as rank 0 of the next.
    """
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def reseed(*entropy: int) -> None:
    """Seed torch (on all devices), NumPy and Python, each differently, from `entropy` alone."""
    _reseed(torch.manual_seed, entropy)


def _reseed(torchs: Callable[[int], object], entropy: tuple[int, ...]) -> None:
    # Torch's seed is that of `seed_of`. One mixing for all three, since it takes longer than all else.
    for_torch, for_numpy, for_python = np.random.SeedSequence(entropy).generate_state(3).tolist()
    torchs(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)


@contextmanager
def seeded_rng(*entropy: int, device: torch.device | None = None) -> Iterator[None]:
    """In the block, what torch, NumPy and Python draw depends on `entropy` alone; after it, their states are as before.

    Torch's numbers are those of the CPU, and of `device` if that is a GPU.
    """
    if device is not None and device.type == "cuda":
        with torch.random.fork_rng(devices=[device]), _numpy_and_python_kept():
            reseed(*entropy)
            yield
        return
    # torch.manual_seed would seed the GPUs, too: slow, and nobody would restore their states.
    before = torch.default_generator.get_state()
    try:
        with _numpy_and_python_kept():
            _reseed(torch.default_generator.manual_seed, entropy)
            yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def _numpy_and_python_kept() -> Iterator[None]:
    """In the block, seed and draw as you like; after it, the states of NumPy and Python are as before."""
    before = random.getstate()
    put_back = _numpy.put_aside()
    try:
        yield
    finally:
        random.setstate(before)
        put_back()


class _NumPy:
    """NumPy's global generator, put aside while its functions draw from another one.

    NumPy's global functions are given another generator, which takes a microsecond; `np.random.get_state` and
    `set_state` take 80 each. One part of the state is not in the generator: NumPy makes normal numbers in pairs, and
    keeps the second of a pair beside it. Exchanging generators loses that number, so it is noted and put back.
    """

    _BYTES = 4 * 624 + 4  # of the state of MT19937: its words, and the place in them

    def __init__(self) -> None:
        self._other = np.random.MT19937(0)

    def put_aside(self) -> Callable[[], None]:
        """Exchange the generator; call what is returned to have it back as it was."""
        before = get_bit_generator()
        if type(before) is not np.random.MT19937 or before is self._other:  # somebody's own; a block inside of a block
            state = np.random.get_state(legacy=False)
            set_bit_generator(np.random.MT19937(0))
            return lambda: _put_back(before, state)
        address = before.ctypes.state_address
        words = ctypes.string_at(address, self._BYTES)
        second: float | None = np.random.standard_normal()
        if ctypes.string_at(address, self._BYTES) != words:  # none was waiting: a new pair has been made
            ctypes.memmove(address, words, self._BYTES)
            second = None
        set_bit_generator(self._other)
        return lambda: _put_back(before, None if second is None else {"has_gauss": 1, "gauss": second})


def _put_back(generator: np.random.BitGenerator, state: Mapping[str, Any] | None) -> None:
    set_bit_generator(generator)
    if state:
        np.random.set_state({**np.random.get_state(legacy=False), **state})


_numpy = _NumPy()
