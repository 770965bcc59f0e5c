"""Data parallelism: the ranks' gradient is that of one process on the union of their batches."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ddp_tutorial.collectives import digest, total
from ddp_tutorial.ddp import DDPConfig
from ddp_tutorial.launcher import launch
from ddp_tutorial.model import GPT
from ddp_tutorial.sharded import Share
from ddp_tutorial.strategy import Batch, DDPStrategy, next_token
from ddp_tutorial.world import World

CONTEXT = 16
VARIANTS = ["naive", "flat", "bucket", "torch"]
# How many samples each rank has in each micro-batch: ragged, not in proportion either, and for some there are none.
COUNTS = {1: [[4, 2]], 2: [[1, 3], [5, 0]], 3: [[0, 3], [4, 1], [2, 2]]}

# float32, summed in another order: a few units in the last place of the largest gradients (about 0.1)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, heads=2, width=32, context=CONTEXT)


def samples_of(rank: int, micro: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return torch.randint(256, (count, CONTEXT + 1), generator=generator)


def batches_of(rank: int, size: int, micros: int) -> list[Batch]:
    batches = []
    for micro in range(micros):
        window = samples_of(rank, micro, COUNTS[size][rank][micro])
        everywhere = sum(counts[micro] for counts in COUNTS[size])
        batches.append(Batch(window[:, :-1], window[:, 1:], everywhere * CONTEXT))
    return batches


def gradients_of(model: GPT) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def step(world: World, variant: str, micros: int) -> dict[str, Any]:
    """One backward on this rank's batches; then another, before which buckets are cut in another order."""
    model = make_model()
    strategy = DDPStrategy(model, world, DDPConfig.model_validate({"variant": variant}))
    gradients = []
    for _ in range(2):
        loss = strategy.backward(batches_of(world.rank, world.size, micros))
        gradients.append(gradients_of(model))
        model.zero_grad()
    return {
        "gradients": gradients,
        "digests": [digest(each) for each in gradients],
        "count": loss.count,
        "needs gradient": loss.sum.requires_grad,
        "loss": (total(world, loss.sum) / total(world, torch.tensor(loss.count))).item(),
    }


def all_steps(world: World) -> dict[tuple[str, int], dict[str, Any]]:
    return {(variant, micros): step(world, variant, micros) for variant in VARIANTS for micros in (1, 2)}


def by_hand(windows: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one process that has all samples in one batch."""
    model, window = make_model(), torch.cat(windows)
    loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_has_the_gradient_of_the_union_of_ragged_batches(size: int) -> None:
    ranks = [all_steps(World())] if size == 1 else launch(all_steps, size, device="cpu", echo=False)
    for variant, micros in ranks[0]:
        windows = [
            [samples_of(rank, micro, COUNTS[size][rank][micro]) for micro in range(micros)] for rank in range(size)
        ]
        loss, wanted = by_hand([window for mine in windows for window in mine])
        for rank, results in enumerate(ranks):
            found = results[variant, micros]
            for gradients in found["gradients"]:
                torch.testing.assert_close(gradients, wanted, **CLOSE)
            assert found["digests"] == ranks[0][variant, micros]["digests"]  # bit for bit the same on all ranks
            assert found["count"] == sum(COUNTS[size][rank][:micros]) * CONTEXT
            assert not found["needs gradient"]
            assert found["loss"] == pytest.approx(loss, abs=1e-5)


def test_the_mean_of_the_ranks_means_would_have_been_noticed() -> None:
    windows = [samples_of(rank, 0, COUNTS[2][rank][0]) for rank in range(2)]
    _, wanted = by_hand(windows)
    ranks = [by_hand([window])[1] for window in windows]
    wrong = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in wanted}
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, wanted, **CLOSE)


def test_two_ranks_without_a_group_raise() -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        DDPStrategy(make_model(), World(0, 2, 0, 2))


def test_targets_are_inputs_shifted_by_one() -> None:
    tokens = torch.tensor([[108, 109, 110, 111, 112], [100, 101, 102, 103, 104]], dtype=torch.uint8)
    batch = next_token(Share({"tokens": tokens}, 2, 5))
    assert batch.inputs.tolist() == [[108, 109, 110, 111], [100, 101, 102, 103]]
    assert batch.targets.tolist() == [[109, 110, 111, 112], [101, 102, 103, 104]]
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.world_tokens == 5 * 4  # of all ranks
