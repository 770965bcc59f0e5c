"""Numbers that travel with the gradients: they come whole, and gradients and model are as without them."""

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from ddp_tutorial.accumulation.loss import StepLoss, Totals
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.ddp.carrier import Carrier, _in_parts
from ddp_tutorial.ddp.variants import DDPConfig, data_parallel
from ddp_tutorial.debug.checks import checking
from ddp_tutorial.debug.detector import Detector
from ddp_tutorial.debug.taps import Seen
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World
from ranks import error_of

METRICS = {"whole": (2.0**25 + 1, 7), "part": (-1e-9, 0.1), "large": (1e12, 3)}
MANY = {f"metric {number}": (float(number), 1) for number in range(40)}  # more than there is room for
CONFIGS: dict[str, dict[str, Any]] = {
    "torch": {},
    "unused": {"find_unused_parameters": True},
    "fp16": {"hook": "fp16"},
    "bucket": {"variant": "bucket", "hook": "bf16"},
}


def make_model(kind: type[nn.Module] = nn.Tanh, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), kind(), nn.Linear(5, 2)).to(dtype)


def gradients_of(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def strategy_of(world: World, metrics: dict[str, tuple[float, float]] | None = None, **config: Any) -> DDPStrategy:
    """Its counts are such as float32 does not tell apart."""

    def loss(model: nn.Module, number: int) -> tuple[torch.Tensor, int, dict[str, tuple[float, float]]]:
        total = model(torch.full((1, 3), 1.0 + world.rank)).square().sum()
        return total, 2**24 + 1 + 10 * world.rank + number, METRICS if metrics is None else metrics

    return DDPStrategy(make_model(), world, loss, DDPConfig.model_validate(config), accumulation=3)


def a_few_steps(strategy: DDPStrategy) -> list[tuple[Totals, list[torch.Tensor | None]]]:
    found = []
    for votes in (1.0, 0.0, 4.0):
        totals = strategy.backward([0, 1, 2], votes=votes)
        found.append((totals, [None if g is None else g.clone() for g in gradients_of(strategy.module)]))
        strategy.module.zero_grad()
    return found


class Failing(nn.Module):
    """It raises at its second forward, once."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("out of luck")
        return inputs


def after_an_error(world: World, room: int) -> tuple[Totals, list[torch.Tensor | None]]:
    """A step after one of which one micro-batch failed."""
    model = data_parallel(make_model(Failing), world, room=room)
    loss = StepLoss(lambda model, batch: (model(batch).sum(), len(batch)), world)
    batches = [torch.full((1 + world.rank, 3), float(number)) for number in range(3)]
    with pytest.raises(ValueError, match="out of luck"):
        accumulate(model, loss, batches)
    model.module.zero_grad()
    totals = accumulate(model, loss, batches)
    return totals, gradients_of(model.module)


def all_reduces_of(strategy: DDPStrategy) -> int:
    """How many does Python begin in a step?"""
    strategy.backward([0, 1, 2])
    strategy.module.zero_grad()
    real, begun = dist.all_reduce, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **named: begun.append(1) or real(*args, **named))
        strategy.backward([0, 1, 2])
    return len(begun)


class Losses(Detector):
    """What the checks see backward being called on."""

    name, size, sights = "losses", 1, frozenset({"losses"})

    def say(self, seen: Seen) -> list[float]:
        self.found = seen.loss
        return [0.0]


def loss_seen(world: World, strategy: DDPStrategy) -> float:
    optimizer, losses = torch.optim.SGD(strategy.module.parameters(), lr=0.1), Losses()
    with checking(world, strategy.module, optimizer, [losses]):
        strategy.backward([0, 1, 2])
        optimizer.step()
    return losses.found


def rounded(world: World, hook: Any) -> str:
    strategy = strategy_of(world)
    strategy.model.ddp.register_comm_hook(None, hook)
    return error_of(lambda: strategy.backward([0, 1, 2]))


def work(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {name: a_few_steps(strategy_of(world, **config)) for name, config in CONFIGS.items()}
    found["many"] = a_few_steps(strategy_of(world, MANY))
    found["carries"] = {
        name: strategy_of(world, **config).model.carrier is not None for name, config in CONFIGS.items()
    }
    found["carries"]["static"] = strategy_of(world, static_graph=True).model.carrier is not None
    double = data_parallel(make_model(dtype=torch.float64), world, room=8)
    found["carries"]["float64"] = double.carrier is not None
    found["after an error"] = [after_an_error(world, room) for room in (0, 8)]
    found["all-reduces"] = {name: all_reduces_of(strategy_of(world, **CONFIGS[name])) for name in ("torch", "unused")}
    found["seen"] = {name: loss_seen(world, strategy_of(world, **CONFIGS[name])) for name in ("torch", "unused")}
    found["names"] = list(strategy_of(world).module.state_dict())
    found["rounded"] = rounded(world, fp16_compress_hook)
    return found


@cache
def ranks_of(size: int) -> list[dict[str, Any]]:
    return launch(work, size, device="cpu", threads=1, echo=False, timeout=120)


each_size = pytest.mark.parametrize("size", [2, 3])


@each_size
@pytest.mark.parametrize("name", CONFIGS)
def test_sums_counts_and_votes_come_whole(size: int, name: str) -> None:
    count = sum(2**24 + 1 + 10 * rank + number for rank in range(size) for number in range(3))
    for rank in ranks_of(size):
        for (totals, _), votes in zip(rank[name], (1, 0, 4), strict=True):
            assert (totals.counts["loss"], totals.votes) == (count, votes * size)
            assert (totals.sums["whole"], totals.counts["whole"]) == (3 * size * (2**25 + 1), 21 * size)
            assert (totals.sums["large"], totals.counts["part"]) == pytest.approx((3e12 * size, 0.3 * size), rel=1e-13)
            assert totals.sums["part"] == pytest.approx(-3e-9 * size, rel=1e-13)


@each_size
def test_gradients_and_losses_are_those_of_a_step_without_a_carrier(size: int) -> None:
    for rank in ranks_of(size):
        for (totals, mine), (expected, theirs) in zip(rank["torch"], rank["unused"], strict=True):
            assert totals.means() == pytest.approx(expected.means(), rel=1e-13)
            for gradient, other in zip(mine, theirs, strict=True):
                # Two ranks add up a + b; three begin each part of a bucket with another rank.
                torch.testing.assert_close(
                    gradient, other, rtol=0 if size == 2 else 1e-6, atol=0 if size == 2 else 1e-7
                )


@each_size
def test_more_metrics_than_there_is_room_for_travel_by_themselves(size: int) -> None:
    for totals, _ in ranks_of(size)[0]["many"]:
        assert totals.sums == {"loss": totals.sums["loss"]} | {
            name: 3 * size * each for name, (each, _) in MANY.items()
        }


@each_size
def test_only_torchs_own_float32_takes_numbers_along(size: int) -> None:
    expected = {name: name == "torch" for name in [*CONFIGS, "static", "float64"]}
    assert [rank["carries"] for rank in ranks_of(size)] == [expected] * size
    assert ranks_of(size)[0]["all-reduces"] == {"torch": 0, "unused": 1}
    assert ranks_of(size)[0]["names"] == list(make_model().state_dict()), "the model knows nothing of it"


@each_size
def test_checks_see_the_loss_also_where_numbers_travel_with_it(size: int) -> None:
    for rank in ranks_of(size):
        assert math.isfinite(rank["seen"]["unused"])
        assert rank["seen"]["torch"] == rank["seen"]["unused"]


@each_size
def test_nothing_is_left_of_a_step_that_failed(size: int) -> None:
    for rank in ranks_of(size):
        (expected, theirs), (totals, mine) = rank["after an error"]
        assert totals.counts == expected.counts
        assert totals.means() == pytest.approx(expected.means(), rel=1e-13)
        for gradient, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-7)


@each_size
def test_a_hook_that_rounds_is_refused_on_all_ranks(size: int) -> None:
    for rank in ranks_of(size):
        assert rank["rounded"].startswith("RuntimeError: a communication hook of the DistributedDataParallel rounds")


@given(st.floats(-1e30, 1e30))
def test_a_number_is_the_sum_of_its_parts_the_first_two_of_12_bits(number: float) -> None:
    parts = _in_parts(number)
    assert math.fsum(parts) == number
    assert torch.stack(_in_parts(torch.tensor(number, dtype=torch.float64))).tolist() == parts
    for part in parts[:2]:
        mantissa, _ = math.frexp(part)
        assert (mantissa * 2**12).is_integer()


def test_a_number_that_float32_does_not_hold_is_no_number_in_the_end_and_no_warning() -> None:
    carrier = Carrier(room=2, ranks=1, device=torch.device("cpu"))
    carrier.load([1e300, 5.0])
    carrier.backward(torch.ones((), requires_grad=True))
    huge, other = carrier.sums()
    assert not math.isfinite(huge)
    assert other == 5


def test_ranks_for_which_a_mean_times_their_number_is_another_number_are_left_alone() -> None:
    model = nn.Linear(1, 1)
    assert [ranks for ranks in range(1, 17) if not Carrier.can_serve(model, ranks)] == [7, 13, 14, 15]
    assert all(Carrier.can_serve(model, 2**power) for power in range(12))
    assert not Carrier.can_serve(nn.Linear(1, 1, dtype=torch.float64), 2)
