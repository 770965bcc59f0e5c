"""Two ranks that exchange gradients, in place of a ring: the same bits, and the same errors."""

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.checkpoint.manifest import name_of
from ddp_tutorial.collectives import digest
from ddp_tutorial.config import load
from ddp_tutorial.ddp.buckets import MIB
from ddp_tutorial.ddp.exchange import Exchange
from ddp_tutorial.ddp.variants import DDPConfig, TorchDDP, data_parallel
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World
from ranks import watched

SMALL = 300 / MIB  # a bucket for every layer or two
TIMEOUT = 120


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, tuple[float, int]]]:
    return model(batch).square().sum(), len(batch), {"rows": (float(len(batch)), 1)}


def steps_of(world: World, cap: float | None, accumulation: int, *, exchange: bool) -> dict[str, Any]:
    """Weights and totals after each of four steps on ragged batches, and what the link has carried."""
    config = DDPConfig(exchange=exchange, bucket_cap_mb=cap)
    strategy = DDPStrategy(net(), world, loss, config, accumulation=accumulation)
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.01, momentum=0.9)
    transfers = watched(strategy.link) if strategy.link else []
    found = []
    for step in range(4):
        seeds = torch.Generator().manual_seed(10 * step + world.rank)
        batches = [torch.randn(1 + world.rank + part, 8, generator=seeds) for part in range(accumulation)]
        totals = strategy.backward(batches, votes=1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((digest(strategy.module.state_dict()), totals))
    return {
        "steps": found,
        "transfers": [(transfer.name, transfer.nbytes) for transfer in transfers],
        "link": type(strategy.link).__name__,
        "carries": strategy.model.carrier is not None,
    }


def compare(world: World) -> dict[Any, Any]:
    return {
        (cap, accumulation, exchange): steps_of(world, cap, accumulation, exchange=exchange)
        for cap in (None, SMALL)
        for accumulation in (1, 3)
        for exchange in (False, True)
    }


@cache
def ranks_of(size: int) -> list[dict[Any, Any]]:
    return launch(compare, size, device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=30)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("cap", [None, SMALL])
def test_an_exchange_has_the_bits_of_a_ring(cap: float | None, accumulation: int) -> None:
    for rank in ranks_of(2):
        ring, exchanged = rank[cap, accumulation, False], rank[cap, accumulation, True]
        assert exchanged["steps"] == ring["steps"]
        assert (ring["link"], exchanged["link"]) == ("NoneType", "Exchange")
        assert exchanged["carries"], "the loss and the counts travel with the gradients"
    first, second = (rank[cap, accumulation, True]["steps"] for rank in ranks_of(2))
    assert first == second


def test_each_bucket_is_sent_once_in_a_step_and_seen_by_the_observer() -> None:
    for rank in ranks_of(2):
        for accumulation in (1, 3):
            whole, cut = (rank[cap, accumulation, True]["transfers"] for cap in (None, SMALL))
            assert [name for name, _ in whole] == ["bucket 0"] * 4
            assert len({name for name, _ in cut}) > 2
            assert cut == ranks_of(2)[0][SMALL, accumulation, True]["transfers"]
            assert sum(nbytes for _, nbytes in whole) == sum(nbytes for _, nbytes in cut)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_are_not_two_do_as_without_it(size: int) -> None:
    for rank in ranks_of(size):
        for cap in (None, SMALL):
            assert rank[cap, 3, True]["link"] == "NoneType"
            assert rank[cap, 3, True]["steps"] == rank[cap, 3, False]["steps"]


class _Breaks(torch.autograd.Function):
    """Raises in backward, where it is told to."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Breaks.broken:
            raise ValueError("no gradient here")
        return gradient


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Breaks.apply(self.first(x)))


def fail_in_backward(world: World) -> bool:
    torch.manual_seed(0)
    model = data_parallel(Breaking(), world, DDPConfig(exchange=True, bucket_cap_mb=SMALL))
    for broken in (False, True, False):
        _Breaks.broken = broken
        model(torch.ones(2, 8)).sum().backward()
    return True


def test_an_error_in_backward_is_raised_as_it_is() -> None:
    with pytest.raises(RankError, match="no gradient here"):
        launch(fail_in_backward, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)


def late_or_lost(world: World, how: str) -> None:
    model = data_parallel(net(), world, DDPConfig(exchange=True))
    assert isinstance(model, TorchDDP)
    for step in range(3):
        out = model(torch.ones(2, 8)).sum()
        if world.rank == 1 and step == 2:
            if how == "lost":
                os._exit(7)
            time.sleep(60)
        out.backward()


def test_a_rank_that_is_late_is_an_error_within_the_collective_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0[\s\S]*[Tt]imed out"):
        launch(late_or_lost, 2, "late", device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=2)
    assert time.monotonic() - start < 45


def test_a_rank_that_is_lost_is_named_and_nobody_waits_for_it() -> None:
    with pytest.raises(RankError, match="rank 1"):
        launch(late_or_lost, 2, "lost", device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=60)


def train(world: World, exchange: bool, start: str) -> tuple[str, list[float]]:
    overrides = ["steps=6", "eval_every=3", "accumulation=2", "checkpoint.every=2", f"ddp.exchange={exchange}"]
    overrides += ["profile.first_step=2", "profile.steps=2", f"name=exchange-{exchange}", f"resume={start}"]
    result = make_trainer(load("tiny", TaskConfig, overrides), world).train()
    return result.weights, result.losses


def test_a_run_that_exchanges_and_one_that_goes_on_from_it_have_the_bits_of_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "echo": False, "timeout": TIMEOUT}
    ring, exchanged = (launch(train, 2, exchange, "never", **options) for exchange in (False, True))
    assert exchanged == ring
    assert launch(train, 2, True, f"runs/exchange-True/checkpoints/{name_of(4)}", **options) == ring
    assert "exchange of two ranks" in (tmp_path / "runs/exchange-True/profile/timeline.json").read_text()


@pytest.mark.parametrize(
    "beside",
    [
        {"hook": "bf16"},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"simulated_link": {"latency_ms": 1.0}},
    ],
)
def test_what_does_not_go_with_an_exchange_is_refused(beside: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"'exchange' does not go with '{next(iter(beside))}'"):
        DDPConfig.model_validate({"exchange": True, **beside})


def test_an_exchange_is_of_torchs_ddp_alone() -> None:
    with pytest.raises(ValidationError, match="'exchange' is an option of variant torch, not of bucket"):
        DDPConfig(variant="bucket", exchange=True)
    with pytest.raises(
        ValidationError, match=r"'ddp\.exchange' is an option of strategies ddp and zero1, not of zero2"
    ):
        TaskConfig.model_validate({"strategy": "zero2", "ddp": {"exchange": True}})


def test_it_is_for_two_ranks_on_cpus() -> None:
    on_gpus = World(size=2, device=torch.device("cuda", 0), backend="gloo")
    worlds = [*(World(size=size) for size in (1, 2, 3)), on_gpus]
    assert [Exchange.can_serve(world) for world in worlds] == [False, True, False, False]
