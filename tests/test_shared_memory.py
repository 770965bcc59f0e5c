"""Two ranks sum gradients in shared memory instead of a ring: bitwise identical results, and the same errors."""

import gc
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.checkpoint.manifest import checkpoint_name
from ddp_tutorial.cluster import Cluster, unsupported_reason
from ddp_tutorial.collectives import all_gather, digest
from ddp_tutorial.config import load
from ddp_tutorial.ddp import shared_memory
from ddp_tutorial.ddp.buckets import MIB
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.shared_memory import SharedMemory
from ddp_tutorial.ddp.wrappers import TorchDDP, data_parallel
from ddp_tutorial.debug import hangs, watching
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World
from ranks import watched

SMALL = 300 / MIB  # a bucket for every one or two layers
TIMEOUT = 300


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, tuple[float, int]]]:
    return model(batch).square().sum(), len(batch), {"rows": (float(len(batch)), 1)}


def steps_of(world: World, cap: float | None = None, accumulation: int = 1, *, shared: bool = True) -> dict[str, Any]:
    """Return weights and totals after each of four steps on ragged batches, and the transfers of the link."""
    config = DDPConfig(shared_memory=shared, bucket_cap_mb=cap)
    strategy = DDPStrategy(net(), world, loss, config, accumulation=accumulation)
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.01, momentum=0.9)
    transfers = watched(strategy.link) if strategy.link else []
    found = []
    for step in range(4):
        seeds = torch.Generator().manual_seed(10 * step + world.rank)
        batches = [torch.randn(1 + world.rank + part, 8, generator=seeds) for part in range(accumulation)]
        totals = strategy.backward(batches, stop_flags=1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((digest(strategy.module.state_dict()), totals))
    return {
        "steps": found,
        "transfers": [(transfer.name, transfer.nbytes) for transfer in transfers],
        "link": type(strategy.link).__name__,
    }


def compare(world: World) -> dict[Any, Any]:
    shared_memory.FALLBACK_SECONDS = 60  # gloo would sum the bucket of a late rank before earlier buckets
    return {
        (cap, accumulation, shared): steps_of(world, cap, accumulation, shared=shared)
        for cap in (None, SMALL)
        for accumulation in (1, 3)
        for shared in (False, True)
    }


@cache
def ranks_of(size: int) -> list[dict[Any, Any]]:
    return launch(compare, size, device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=30)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("cap", [None, SMALL])
def test_sums_in_memory_are_bitwise_identical_to_a_ring(cap: float | None, accumulation: int) -> None:
    for rank in ranks_of(2):
        ring, in_memory = rank[cap, accumulation, False], rank[cap, accumulation, True]
        assert in_memory["steps"] == ring["steps"]
        assert (ring["link"], in_memory["link"]) == ("NoneType", "SharedMemory")
    first, second = (rank[cap, accumulation, True]["steps"] for rank in ranks_of(2))
    assert first == second


def test_each_bucket_is_sent_once_per_step_and_observed() -> None:
    for rank in ranks_of(2):
        for accumulation in (1, 3):
            whole, cut = (rank[cap, accumulation, True]["transfers"] for cap in (None, SMALL))
            assert [name for name, _ in whole] == ["bucket 0"] * 4
            assert len({name for name, _ in cut}) > 2
            assert cut == ranks_of(2)[0][SMALL, accumulation, True]["transfers"]
            assert sum(nbytes for _, nbytes in whole) == sum(nbytes for _, nbytes in cut)


@pytest.mark.parametrize("size", [1, 3])
def test_other_world_sizes_do_not_use_shared_memory(size: int) -> None:
    for rank in ranks_of(size):
        for cap in (None, SMALL):
            assert rank[cap, 3, True]["link"] == "NoneType"
            assert rank[cap, 3, True]["steps"] == rank[cap, 3, False]["steps"]


class Checkpointed(nn.Module):
    """A model whose two halves run their own backward passes inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in (self.first, self.last):
            x = checkpoint(half, x, use_reentrant=True)
        return x


class OfTwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net().double(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.double()).float())


def gradients_of(world: World, make: Callable[[], nn.Module], *, shared: bool) -> list[str]:
    """Return the gradients of two models that alternate."""
    torch.manual_seed(0)
    config = DDPConfig(shared_memory=shared, bucket_cap_mb=SMALL)
    models = [data_parallel(make(), world, config) for _ in range(2)]
    for step in range(3):
        for number, model in enumerate(models):
            model.module.zero_grad()
            x = torch.full((2, 8), step + 0.3 * world.rank + 0.1 * number, requires_grad=True)
            model(x).square().sum().backward()
    return [digest({name: p.grad for name, p in model.module.named_parameters()}) for model in models]


def gradients_of_all(world: World) -> dict[str, tuple[Any, Any]]:
    shared_memory.FALLBACK_SECONDS = 60  # without a limit: nothing is sent through gloo
    found = {}
    for make in (net, Checkpointed, OfTwoTypes):
        ring = gradients_of(world, make, shared=False)
        with patch.object(dist, "all_reduce", side_effect=AssertionError("this should go through memory")):
            found[make.__name__] = ring, gradients_of(world, make, shared=True)
    return found


def test_many_kinds_of_models_have_the_gradients_of_a_ring() -> None:
    for rank in launch(gradients_of_all, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT):
        assert rank.keys() == {"net", "Checkpointed", "OfTwoTypes"}
        for ring, in_memory in rank.values():
            assert in_memory == ring
            assert len(set(ring)) == 2


def nan_of(world: World) -> list[int]:
    """Return the bits of a gradient that is a different NaN on each rank."""
    model = data_parallel(nn.Linear(1, 1, bias=False), world, DDPConfig(shared_memory=True))
    nan = torch.tensor([0x7FC00001 + world.rank], dtype=torch.int32).view(torch.float32)
    (model(torch.ones(1, 1)) * nan).sum().backward()
    return model.module.weight.grad.view(torch.int32).flatten().tolist()


def test_ranks_agree_bitwise_on_non_finite_gradients() -> None:
    first, second = launch(nan_of, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)
    assert first == second


def sparse(world: World) -> None:
    model = data_parallel(nn.Embedding(4, 2, sparse=True), world, DDPConfig(shared_memory=True))
    model(torch.tensor([1])).sum().backward()


def test_a_sparse_gradient_is_rejected_with_advice() -> None:
    with pytest.raises(RankError, match="sparse=False"):
        launch(sparse, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)


class _Breaks(torch.autograd.Function):
    """A function that raises an error in the backward pass on request."""

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
    model = data_parallel(Breaking(), world, DDPConfig(shared_memory=True, bucket_cap_mb=SMALL))
    for broken in (False, True, False):
        _Breaks.broken = broken
        model(torch.ones(2, 8)).sum().backward()
    return True


def test_an_error_in_backward_is_raised_unchanged() -> None:
    with pytest.raises(RankError, match="no gradient here"):
        launch(fail_in_backward, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)


def be_late(world: World, patience: float, steps: int) -> tuple[int, int, int]:
    """Delay ranks by about the fallback time, before and during a backward pass.

    Return the number of wrong sums, of sums by gloo, and of all sums.
    """
    shared_memory.FALLBACK_SECONDS = patience
    dist.all_reduce = Mock(wraps=dist.all_reduce)
    chance = random.Random(world.rank)

    def sleep(_: object = None) -> None:
        if chance.random() < 0.3:
            time.sleep(3 * patience * chance.random())

    def sleep_in_backward(_: object, __: object, output: torch.Tensor) -> None:
        output.register_hook(sleep)

    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for layer in layers:  # of integers, so that all sums are exact
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    of_one = torch.autograd.grad(layers(torch.ones(2, 8)).sum(), list(layers.parameters()))
    model = data_parallel(layers, world, DDPConfig(shared_memory=True, bucket_cap_mb=SMALL))
    transfers = watched(model.link)
    for layer in layers:
        layer.register_forward_hook(sleep_in_backward)
    wrong = 0
    for step in range(steps):
        layers.zero_grad()
        sleep()
        (model(torch.ones(2, 8)).sum() * (step + world.rank)).backward()
        wrong += any(
            not torch.equal(p.grad, (step + 0.5) * g) for p, g in zip(layers.parameters(), of_one, strict=True)
        )
    return wrong, dist.all_reduce.call_count, len(transfers)


@pytest.mark.parametrize("patience", [0.001, 0.01])
def test_ranks_delayed_by_about_the_timeout_agree_on_each_bucket(patience: float) -> None:
    first, second = launch(be_late, 2, patience, 150, device="cpu", threads=1, echo=False, timeout=TIMEOUT)
    assert first == second, "both take the same way for a bucket"
    wrong, by_gloo, sums = first
    assert wrong == 0
    assert 0 < by_gloo < sums, "both ways were taken"


def hang(world: World) -> None:
    hangs.ANSWER_SECONDS = 60  # a rank that is paused for longer than the default would be reported as unresponsive
    model = data_parallel(net(), world, DDPConfig(shared_memory=True))
    for step in range(4):
        output = model(torch.ones(2, 8)).sum()
        with watching(world, 1.0):
            if world.rank == 1 and step == 3:
                time.sleep(60)
            output.backward()


def test_a_rank_that_waits_is_reported_as_waiting_in_an_all_reduce() -> None:
    with pytest.raises(RankError, match="rank 1 has not entered") as caught:
        launch(hang, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=60)
    assert "Rank 0 waits in all_reduce" in str(caught.value)


def open_files(world: World) -> list[set[str]]:
    """Return the open shared-memory and eventfd files after each of three models."""
    found = []
    for _ in range(3):
        model = data_parallel(net(), world, DDPConfig(shared_memory=True))
        model(torch.ones(2, 8)).sum().backward()
        assert _memories(), "it is open now"
        del model
        gc.collect()
        found.append(_memories())
    return found


def _memories() -> set[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition("/memfd:")[2] for line in maps if "/memfd:gradients" in line}


def test_the_memory_is_freed_with_the_model() -> None:
    assert launch(open_files, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT) == [[set()] * 3] * 2


def short_memory(nbytes: int) -> list[int]:
    return memory_and_bell(nbytes // 2)


def unsealed_memory(nbytes: int) -> list[int]:
    """Return memory that its owner can truncate later."""
    memory = os.memfd_create("gradients")
    os.ftruncate(memory, nbytes)
    return [memory, os.eventfd(0)]


def two_bells(nbytes: int) -> list[int]:
    return [os.eventfd(0), os.eventfd(0)]


memory_and_bell = shared_memory._memfd_and_eventfd


def unusable_memory(world: World) -> list[tuple[str, set[str]]]:
    """Return the link and the remaining memory for each kind of memory that rank 1 offers."""
    found = []
    for make in (short_memory, unsealed_memory, two_bells, None):
        if world.rank == 1 and make is None:
            del os.memfd_create  # as in a Python built for an old libc
        with patch.object(shared_memory, "_memfd_and_eventfd", make if world.rank == 1 and make else memory_and_bell):
            model = data_parallel(net(), world, DDPConfig(shared_memory=True))
        model(torch.ones(2, 8)).sum().backward()
        found.append((type(model.link).__name__, _memories()))
    return found


def test_memory_that_one_rank_cannot_share_safely_is_not_used() -> None:
    found = launch(unusable_memory, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)
    assert found == [[("NoneType", set())] * 4] * 2


def refuses_nobody(path: str) -> bool:
    """Return whether the socket `path` rejects a process of a different user."""
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(path)
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def connect_beside_another_user(world: World) -> tuple[list[bool], bool]:
    """Let a different user try to reach both sockets while the ranks connect."""
    refused: list[bool] = []

    def gathered(world: World, thing: Any) -> list[Any]:
        things = all_gather(world, thing)
        if not refused:  # the sockets exist, but no rank has sent yet
            refused.extend(refuses_nobody(path) for path in things)
            all_gather(world, None)
        return things

    with patch.object(shared_memory, "all_gather", gathered):
        link = SharedMemory.connect(world, net().parameters())
    return refused, link is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as a second user")
def test_another_user_cannot_send_memory_to_a_rank() -> None:
    found = launch(connect_beside_another_user, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)
    assert found == [([True, True], True)] * 2


def stop_while_locked(world: World) -> None:
    model = data_parallel(net(), world, DDPConfig(shared_memory=True))
    model.link.world = replace(world, timeout=timedelta(seconds=2))  # only for the lock
    if world.rank == 1:
        with model.link._locked():
            dist.barrier()
            time.sleep(60)
    dist.barrier()
    model(torch.ones(2, 8)).sum().backward()


def test_a_rank_stopped_with_the_lock_is_named_within_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match="rank 0 raised TimeoutError: rank 1 was stopped while it held the shared-memory lock"
    ):
        launch(stop_while_locked, 2, device="cpu", threads=1, echo=False, timeout=TIMEOUT)
    assert time.monotonic() - start < 45


def test_two_hosts_of_one_machine_share_a_disk_but_no_memory(tmp_path: Path) -> None:
    if reason := unsupported_reason():
        pytest.skip(reason)
    with Cluster(2, "1gbit", folder=tmp_path) as cluster:
        for rank, one_host in zip(cluster.launch(steps_of), ranks_of(2), strict=True):
            assert rank["link"] == "NoneType"
            assert rank["steps"] == one_host[None, 1, True]["steps"]


def late_or_lost(world: World, how: str) -> None:
    model = data_parallel(net(), world, DDPConfig(shared_memory=True))
    assert isinstance(model, TorchDDP)
    for step in range(3):
        out = model(torch.ones(2, 8)).sum()
        if world.rank == 1 and step == 2:
            if how == "lost":
                os._exit(7)
            time.sleep(60)
        out.backward()


def test_a_late_rank_raises_within_the_collective_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0[\s\S]*[Tt]imed out"):
        launch(late_or_lost, 2, "late", device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=2)
    assert time.monotonic() - start < 45


def test_a_lost_rank_is_named_and_not_waited_for() -> None:
    with pytest.raises(RankError, match="rank 1"):
        launch(late_or_lost, 2, "lost", device="cpu", threads=1, echo=False, timeout=TIMEOUT, collective_timeout=60)


def train(world: World, shared: bool, start: str) -> tuple[str, list[float]]:
    overrides = ["steps=6", "eval_every=3", "accumulation=2", "checkpoint.every=2", f"ddp.shared_memory={shared}"]
    overrides += ["profile.first_step=2", "profile.steps=2", f"name=shared-{shared}", f"resume={start}"]
    result = make_trainer(load("tiny", TaskConfig, overrides), world).train()
    return result.weights, result.losses


def test_a_run_with_shared_memory_and_its_resumption_equal_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "echo": False, "timeout": TIMEOUT}
    ring, in_memory = (launch(train, 2, shared, "never", **options) for shared in (False, True))
    assert in_memory == ring
    assert launch(train, 2, True, f"runs/shared-True/checkpoints/{checkpoint_name(4)}", **options) == ring
    assert "memory of two ranks" in (tmp_path / "runs/shared-True/profile/timeline.json").read_text()


@pytest.mark.parametrize(
    "beside",
    [
        {"hook": "bf16"},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"simulated_link": {"latency_ms": 1.0}},
    ],
)
def test_options_that_conflict_with_shared_memory_are_rejected(beside: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"'shared_memory' cannot be combined with '{next(iter(beside))}'"):
        DDPConfig.model_validate({"shared_memory": True, **beside})


def test_only_torchs_ddp_supports_shared_memory() -> None:
    with pytest.raises(ValidationError, match="'shared_memory' requires variant=torch, got variant=bucket"):
        DDPConfig(variant="bucket", shared_memory=True)
    with pytest.raises(
        ValidationError, match=r"'ddp\.shared_memory' requires strategy=ddp or strategy=zero1, got strategy=zero2"
    ):
        TaskConfig.model_validate({"strategy": "zero2", "ddp": {"shared_memory": True}})


def test_shared_memory_requires_two_ranks_on_cpus() -> None:
    on_gpus = World(size=2, device=torch.device("cuda", 0), backend="gloo")
    for world in (World(), World(size=3), on_gpus):  # without a group, so that communication would raise
        assert SharedMemory.connect(world, net().parameters()) is None


def test_each_bucket_is_aligned_to_64_bytes() -> None:
    assert [shared_memory._aligned(nbytes) for nbytes in (0, 1, 64, 65, 640)] == [0, 64, 64, 128, 640]
