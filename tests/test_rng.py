"""Random numbers: what a block draws depends on its entropy alone, and nobody outside notices that there was one."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.rng import seeded_rng

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "torch, normal": lambda: float(torch.randn(())),
    "numpy": np.random.random,
    "numpy, normal": lambda: float(np.random.normal()),  # two are made together, and one is kept
    "numpy, whole": lambda: float(np.random.randint(10)),
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
}
draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=6)


def drawn(names: list[str]) -> list[float]:
    return [DRAWS[name]() for name in names]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@given(st.lists(st.tuples(draws, draws), min_size=1, max_size=5), draws)
def test_draws_outside_are_those_without_any_block(turns: list[tuple[list[str], list[str]]], nested: list[str]) -> None:
    seed_all(0)
    expected = [drawn(outside) for outside, _ in turns]
    seed_all(0)
    for number, (outside, inside) in enumerate(turns):
        assert drawn(outside) == expected[number]
        with seeded_rng(1, number):
            first = drawn(inside)
            with seeded_rng(2, number):
                drawn(nested)
            rest = drawn(inside)
        with seeded_rng(1, number):
            assert drawn(inside + inside) == first + rest, "in a block, they depend on its entropy alone"


def test_after_an_error_the_states_are_as_before() -> None:
    seed_all(3)
    expected = drawn(sorted(DRAWS))
    seed_all(3)
    with pytest.raises(ZeroDivisionError), seeded_rng(1):
        1 / (sum(drawn(sorted(DRAWS))) * 0)
    assert drawn(sorted(DRAWS)) == expected


def test_another_generator_of_numpy_is_put_back() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        expected = np.random.normal(size=5).tolist()
        np.random.set_bit_generator(np.random.PCG64(5))
        found = [np.random.normal()]
        with seeded_rng(1):
            np.random.normal()
        found += np.random.normal(size=4).tolist()
        assert found == expected
    finally:
        np.random.set_bit_generator(before)
