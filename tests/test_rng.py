"""Random numbers: a seeded block depends only on its entropy and has no effect outside, as do runs and evaluations.

Every test covers the generators of Python, NumPy and torch.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ddp_tutorial.checkpoint.components import RandomState
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.rng import reseed, seed_of, seeded_rng
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "torch, normal": lambda: float(torch.randn(())),
    "numpy": np.random.random,
    "numpy, normal": lambda: float(np.random.normal()),  # generators create two numbers at a time and keep one
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
def test_draws_outside_the_block_are_unaffected(turns: list[tuple[list[str], list[str]]], nested: list[str]) -> None:
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


def test_states_are_restored_after_an_error() -> None:
    seed_all(3)
    expected = drawn(sorted(DRAWS))
    seed_all(3)
    with pytest.raises(ZeroDivisionError), seeded_rng(1):
        1 / (sum(drawn(sorted(DRAWS))) * 0)
    assert drawn(sorted(DRAWS)) == expected


def test_a_different_numpy_generator_is_restored() -> None:
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


def test_a_state_that_a_gpu_rank_saved_can_be_loaded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "set_rng_state")
    on_cpu = RandomState(torch.device("cpu"))
    saved = on_cpu.state_dict() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    first = drawn(sorted(DRAWS))
    on_cpu.load_state_dict(saved)
    assert drawn(sorted(DRAWS)) == first


def test_reseed_seeds_all_generators_and_replaces_others_of_numpy() -> None:
    before = np.random.get_bit_generator()
    try:
        reseed(1, 2)
        expected = drawn(sorted(DRAWS))
        np.random.set_bit_generator(np.random.PCG64(5))
        reseed(1, 2)
        assert drawn(sorted(DRAWS)) == expected
        reseed(1, 3)
        assert drawn(["numpy"]) != expected[:1]
        torch.manual_seed(seed_of(1, 2))
        assert drawn(["torch"]) == [expected[sorted(DRAWS).index("torch")]]
    finally:
        np.random.set_bit_generator(before)


# ------------------------------------------------------------------------------------------------------ whole runs


def noise() -> float:
    return random.random() + float(np.random.normal()) + float(torch.rand(()))


class Noise(nn.Module):
    """Multiply by random numbers in training, as dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * noise()) if self.training else x


class NoisySamples(Dataset[Any]):
    """Samples with a random transform."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((8,), index / 24) + noise(), torch.tensor([index / 24])


def noisy_loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """A loss that draws in evaluation too, and in the check that it returns a sum."""
    return (1 + 0.1 * noise()) * F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def train(world: World, name: str, strategy: str, eval_every: int, resume: str = "never") -> Any:
    random.seed()  # as in a new process
    np.random.seed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 1))
    config = TrainConfig(
        name=f"{strategy}-{name}",
        strategy=strategy,  # type: ignore[arg-type]
        steps=6,
        eval_every=eval_every,
        tensorboard=False,
        checkpoint={"every": 3, "keep_last": 2},  # type: ignore[arg-type]
        resume=resume,
    )
    source = make_source(NoisySamples(), 8, world)
    return Trainer(model, source, noisy_loss, world, config, validation_data=NoisySamples()).train()


def train_in_several_ways(world: World, strategies: list[str]) -> dict[str, dict[str, Any]]:
    return {
        strategy: {
            "first": train(world, "first", strategy, eval_every=3),
            "same config": train(world, "again", strategy, eval_every=3),
            "evaluated at each step": train(world, "often", strategy, eval_every=1),
            "resumed": train(world, "resumed", strategy, 3, f"runs/{strategy}-first/checkpoints/step_00000003"),
        }
        for strategy in strategies
    }


@pytest.mark.usefixtures("workdir")
def test_random_models_and_data_are_reproducible_and_resume_bitwise() -> None:
    strategies = ["ddp", "invariant"]
    for ways in launch(train_in_several_ways, 2, strategies, device="cpu", threads=1, echo=False, timeout=300):
        for strategy in strategies:
            first = ways[strategy]["first"]
            for way, result in ways[strategy].items():
                assert result.weights == first.weights, f"{strategy}, {way}"
                assert result.losses == first.losses
                assert {step: result.evaluations[step] for step in (3, 6)} == first.evaluations
