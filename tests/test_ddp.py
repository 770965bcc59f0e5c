"""With every variant, all ranks train as one process would on all of their samples.

The ranks are started once for each world size and run all cases. Each test checks a part of their results.
"""

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

from ddp_tutorial.collectives import all_reduce_mean, digest
from ddp_tutorial.compat import forward_sync_buffers
from ddp_tutorial.config import ConfigError, load
from ddp_tutorial.ddp.buckets import MIB
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.hooks import AllReduceHook
from ddp_tutorial.ddp.link import LinkModel, SimulatedLink, Transfer
from ddp_tutorial.ddp.wrappers import BucketDDP, DataParallel, TorchDDP, data_parallel
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.world import World
from ranks import error_of

VARIANTS = ["naive", "flat", "bucket", "torch"]
OURS = VARIANTS[:-1]
TIMEOUT = 300
STEPS = 5
WIDTH = 8

# float32, summed in a different order, over five steps with momentum
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


# --------------------------------------------------------------------------------------------------- the models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Toy(nn.Module):
    """Tied, frozen and nested parameters of 4 to 768 bytes; a buffer changes in place, and one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.Sequential(Block(24), Block(5))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.watch = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watch(x)  # only its buffers matter, else one process would see other statistics
        self.seen = self.seen + len(x)
        return self.last(self.frozen(self.blocks(self.first(x)))) * self.scale


class WithUnused(Toy):
    """A model with two layers that no loss depends on; the second is used on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        out = super().forward(x)
        return out + self.sometimes(x) if use else out


class Normed(Toy):
    """A model whose output depends on the statistics of each rank's batch, so no single process computes the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.watch(x)


class TwoDtypes(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.stretch = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x.double() * self.stretch + self.offset).float()


MODELS: dict[str, type[Toy]] = {each.__name__: each for each in (Toy, WithUnused, Normed, TwoDtypes)}


def count_of(step: int, rank: int, micro: int) -> int:
    """Return a number of samples that varies between steps, ranks and micro-batches."""
    return 2 + (3 * step + 5 * rank + 2 * micro) % 7


def samples_of(step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    both = torch.randn(2, count_of(step, rank, micro), WIDTH, generator=generator)
    return both[0], both[1]


def total_of(step: int, size: int, micros: int) -> int:
    return sum(count_of(step, rank, micro) for rank in range(size) for micro in range(micros))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


# ---------------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    variant: str
    model: str = "Toy"
    micros: int = 1
    cap: int | None = None  # bytes per bucket
    buckets: tuple[int, int] | None = None  # the number of buckets in the first step and afterward
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        cap = f", {self.cap} bytes a bucket" if self.cap else ""
        options = "".join(f", {name}" for name in self.options)
        return f"{self.variant}, {self.model}, {self.micros} micro{cap}{options}"

    def config(self) -> DDPConfig:
        cap = self.cap and self.cap / MIB
        unused = self.model == "WithUnused"
        return DDPConfig(variant=self.variant, bucket_cap_mb=cap, find_unused_parameters=unused, **self.options)


# Toy's 16 trainable parameters, in bytes, from the last registered to the first:
#   last.bias 32 | blocks.1: 32 160 20 20 20 160 | blocks.0: 32 768 96 96 96 768 | first: 32 256 | scale 4
# So 100 bytes a bucket are (32 32 160) (20 20 20 160) (32 768) (96 96) (96 768) (32 256) (4): seven. In backward the
# scale is the first to be ready and joins the first bucket: six. `first.weight`, tied to the last one, is ready last.
CASES = [
    *(Case(variant, model, micros=3) for variant in VARIANTS for model in MODELS),
    *(Case(variant) for variant in VARIANTS),
    Case("bucket", cap=2592, buckets=(1, 1)),
    Case("bucket", cap=1300, buckets=(2, 2)),
    Case("bucket", cap=1000, buckets=(3, 3)),
    Case("bucket", cap=300, buckets=(4, 4)),
    Case("bucket", cap=100, buckets=(7, 6)),
    Case("bucket", cap=1, buckets=(16, 16)),
    Case("bucket", cap=100, micros=3, buckets=(7, 6)),
    Case("bucket", "WithUnused", micros=3, cap=300),
    Case("bucket", "TwoDtypes", micros=3, cap=300),
    Case("torch", cap=300),
    Case("torch", options={"gradient_as_bucket_view": False}),
    Case("torch", options={"static_graph": True}),
    Case("bucket", options={"simulated_link": LinkConfig(latency_ms=0, megabytes_per_second=1e6)}),
    Case("torch", options={"simulated_link": LinkConfig(latency_ms=0, megabytes_per_second=1e6)}),
]


def train(world: World, case: Case) -> dict[str, Any]:
    torch.manual_seed(world.rank)  # ranks start with different weights; the wrapper must synchronize them
    module = MODELS[case.model]()
    model = data_parallel(module, world, case.config())
    optimizer = optimizer_of(module)
    buckets = []
    for step in range(STEPS):
        scale = world.size / total_of(step, world.size, case.micros)
        for micro in range(case.micros):
            is_last = micro == case.micros - 1
            x, y = samples_of(step, world.rank, micro)
            extra = {"use": world.rank == 0} if case.model == "WithUnused" else {}
            with nullcontext() if is_last else model.no_sync():
                (F.mse_loss(model(x, **extra), y, reduction="sum") * scale).backward()
        if isinstance(model, BucketDDP):
            buckets.append(len(model.buckets))
        model.finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # both ways
    parameters = dict(module.named_parameters())
    return {
        "parameters": {name: p.detach().clone() for name, p in parameters.items()},
        "without gradient": {name for name, p in parameters.items() if p.grad is None},
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
        "buckets": buckets,
        "tied": module.last.weight is module.first.weight,
    }


@cache
def by_one_process(model: str, micros: int, size: int) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps in plain torch, on the samples of all ranks in one batch."""
    torch.manual_seed(0)
    module = MODELS[model]()
    optimizer = optimizer_of(module)
    for step in range(STEPS):
        loss = torch.zeros(())
        for rank in range(size):
            samples = [samples_of(step, rank, micro) for micro in range(micros)]
            x, y = (torch.cat(each) for each in zip(*samples, strict=True))
            extra = {"use": rank == 0} if model == "WithUnused" else {}
            loss = loss + F.mse_loss(module(x, **extra), y, reduction="sum")
        (loss / total_of(step, size, micros)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


def everything(world: World) -> dict[str, Any]:
    heard: dict[str, Any] = {str(case): train(world, case) for case in CASES}
    if world.size in {2, 3}:
        heard |= {each.__name__: each(world) for each in SCENARIOS}
    return heard


SCENARIOS: list[Callable[[World], Any]] = []


def scenario(function: Callable[[World], Any]) -> Callable[[World], Any]:
    """Register a function that two and three ranks run."""
    SCENARIOS.append(function)
    return function


HEARD: dict[int, list[dict[str, Any]]] = {}


def heard_of(size: int) -> list[dict[str, Any]]:
    """Return the results of each of `size` ranks."""
    if size not in HEARD:
        HEARD[size] = launch(everything, size, device="cpu", threads=1, echo=False, timeout=TIMEOUT)
    return HEARD[size]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, as the ranks do. The results of the ranks are discarded at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    HEARD.clear()
    by_one_process.cache_clear()


any_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
two_or_three = pytest.mark.parametrize("size", [2, 3])
any_case = pytest.mark.parametrize("case", CASES, ids=str)


# ----------------------------------------------------------------------------------------------------------- the test


@any_size
@any_case
def test_all_ranks_have_bitwise_identical_weights(size: int, case: Case) -> None:
    ranks = [each[str(case)] for each in heard_of(size)]
    assert len(ranks) == size
    assert len({digest(each["parameters"]) for each in ranks}) == 1


@any_size
@any_case
def test_all_ranks_have_rank_zeros_buffers_even_if_replaced(size: int, case: Case) -> None:
    ranks = [each[str(case)] for each in heard_of(size)]
    seen = sum(count_of(step, 0, micro) for step in range(STEPS) for micro in range(case.micros))
    watch = nn.BatchNorm1d(WIDTH, affine=False)
    for step in range(STEPS):
        for micro in range(case.micros):
            for _ in range(2 if case.model == "Normed" else 1):
                watch(samples_of(step, 0, micro)[0])
    for rank, each in enumerate(ranks):
        if case.variant == "torch" and rank > 0:
            continue  # torch broadcasts them in the next forward pass
        torch.testing.assert_close(each["buffers"]["watch.running_mean"], watch.running_mean)
        torch.testing.assert_close(each["buffers"]["watch.running_var"], watch.running_var)
        assert each["buffers"]["watch.num_batches_tracked"] == watch.num_batches_tracked
        assert each["buffers"]["seen"] == seen
        assert digest(each["buffers"]) == digest(ranks[0]["buffers"])


@any_size
@pytest.mark.parametrize("case", [case for case in CASES if case.model != "Normed"], ids=str)
def test_every_rank_has_the_weights_of_one_process_on_all_batches(size: int, case: Case) -> None:
    wanted = by_one_process(case.model, case.micros, size)
    for each in heard_of(size):
        torch.testing.assert_close(each[str(case)]["parameters"], wanted, **CLOSE)


@any_case
def test_on_two_ranks_every_variant_is_bitwise_identical_to_torch(case: Case) -> None:
    """Two numbers have the same sum in any order, and 1/2 is exact."""
    for each in heard_of(2):
        reference = each[str(Case("torch", case.model, case.micros))]
        assert digest(each[str(case)]["parameters"]) == digest(reference["parameters"])


@any_size
@any_case
def test_tied_weights_stay_tied_and_frozen_weights_stay_unchanged(size: int, case: Case) -> None:
    torch.manual_seed(0)
    before = MODELS[case.model]().frozen
    for each in heard_of(size):
        assert each[str(case)]["tied"]
        assert torch.equal(each[str(case)]["parameters"]["frozen.weight"], before.weight)


@any_size
@pytest.mark.parametrize("case", [case for case in CASES if case.buckets], ids=str)
def test_the_cap_determines_the_number_of_buckets(size: int, case: Case) -> None:
    assert case.buckets is not None
    first, then = case.buckets
    for each in heard_of(size):
        assert each[str(case)]["buckets"] == [first] + [then] * (STEPS - 1)


@any_size
@pytest.mark.parametrize("case", [case for case in CASES if case.model == "WithUnused"], ids=str)
def test_an_unused_parameter_never_gets_a_gradient(size: int, case: Case) -> None:
    for each in heard_of(size):
        found = each[str(case)]["without gradient"]
        assert {"unused.weight", "unused.bias"} <= found


# ---------------------------------------------------------------------------------------------------- the scenarios


class Fork(nn.Module):
    """Two layers. An input passes through the given layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *layers: str) -> torch.Tensor:
        for layer in layers:
            x = torch.tanh(self.get_submodule(layer)(x))
        return x


def forked(world: World, variant: str, **options: Any) -> DataParallel:
    torch.manual_seed(world.rank)
    cap = {"bucket_cap_mb": 1 / MIB} if variant == "bucket" else {}
    return data_parallel(Fork(), world, DDPConfig(variant=variant, **cap, **options))


def inputs_of(rank: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + micro))


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def backward(model: DataParallel, *passes: tuple[str, ...]) -> None:
    """Run one micro-batch for each of `passes`, and synchronize in the last one."""
    for micro, layers in enumerate(passes):
        with nullcontext() if micro == len(passes) - 1 else model.no_sync():
            model(inputs_of(model.world.rank, micro), *layers).sum().backward()


def mean_by_hand(model: DataParallel, *passes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the mean over ranks of plain torch's gradients. A missing gradient counts as zero."""
    module = Fork()
    module.load_state_dict(model.module.state_dict())
    for micro, layers in enumerate(passes):
        module(inputs_of(model.world.rank, micro), *layers).sum().backward()
    return {
        name: all_reduce_mean(model.world, torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in module.named_parameters()
    }


@scenario
def use_in_an_earlier_micro_batch_only(world: World) -> dict[str, Any]:
    heard = {}
    for variant in VARIANTS:
        # torch's DDP must be told; ours accept a gradient from any micro-batch
        model = forked(world, variant, find_unused_parameters=variant == "torch")
        for step in range(2):
            passes = ("left", "right"), ("left",), ("right",)
            backward(model, *passes)
            model.finish()
            heard[variant, step] = gradients_of(model.module), mean_by_hand(model, *passes)
            model.module.zero_grad()
    return heard


@two_or_three
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_from_an_earlier_micro_batch_only_is_averaged(size: int, variant: str, step: int) -> None:
    for each in heard_of(size):
        found, wanted = each["use_in_an_earlier_micro_batch_only"][variant, step]
        torch.testing.assert_close(found, wanted)


@scenario
def raise_inside_no_sync(world: World) -> dict[str, Any]:
    heard = {}
    for variant in VARIANTS:
        model = forked(world, variant)
        with suppress(KeyboardInterrupt), model.no_sync():
            raise KeyboardInterrupt
        backward(model, ("left", "right"))
        model.finish()
        after_raise = gradients_of(model.module)
        model.module.zero_grad()
        with model.no_sync():
            with model.no_sync():
                pass
            model(inputs_of(world.rank), "left", "right").sum().backward()  # still inside the outer block
        inside = gradients_of(model.module)
        model.module.zero_grad()
        heard[variant] = after_raise, mean_by_hand(model, ("left", "right")), inside
    return heard


@two_or_three
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_sync_ends_with_its_block_even_after_an_error(size: int, variant: str) -> None:
    for each in heard_of(size):
        found, wanted, _ = each["raise_inside_no_sync"][variant]
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nested_no_sync_blocks_suppress_communication_until_the_outer_ends(variant: str) -> None:
    first, second = (each["raise_inside_no_sync"][variant] for each in heard_of(2))
    for name, wanted in first[1].items():
        assert not torch.equal(first[2][name], second[2][name])
        torch.testing.assert_close((first[2][name] + second[2][name]) / 2, wanted)


@scenario
def look_where_gradients_lie(world: World) -> dict[str, Any]:
    heard = {}
    for variant in ("flat", "bucket"):
        model: Any = forked(world, variant)
        for step in range(4):
            backward(model, ("left", "right"), ("left", "right"))
            model.finish()
            views = {
                name: view for bucket in model.buckets for name, view in zip(bucket.names, bucket.views, strict=True)
            }
            heard[variant, step] = {name: p.grad.data_ptr() == views[name].data_ptr() for name, p in model.trainable}
            model.module.zero_grad(set_to_none=step == 1)
    return heard


@two_or_three
@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("variant", ["flat", "bucket"])
def test_gradients_stay_views_of_the_buckets(size: int, variant: str, step: int) -> None:
    for each in heard_of(size):
        found = each["look_where_gradients_lie"][variant, step]
        assert len(found) == 4
        assert all(found.values())


# ------------------------------------------------------------------------------------------------- overlap and order


class _Slow(torch.autograd.Function):
    """An identity whose backward pass waits until the first transfer has arrived, up to a number of seconds."""

    arrived = threading.Event()
    seconds = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Slow.arrived.wait(_Slow.seconds)
        return gradient


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(4, 4)
        self.above = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(_Slow.apply(self.below(x)))


@scenario
def overlap(world: World) -> dict[str, Any]:
    heard = {}
    for link in (None, LinkConfig(latency_ms=5, megabytes_per_second=1000)):
        for variant in OURS:
            cap = {"bucket_cap_mb": 80 / MIB} if variant == "bucket" else {}
            model: Any = data_parallel(Slow(), world, DDPConfig(variant=variant, simulated_link=link, **cap))
            transfers: list[Transfer] = []

            def note(transfer: Transfer, transfers: list[Transfer] = transfers) -> None:
                transfers.append(transfer)
                _Slow.arrived.set()

            model.link.observer = note
            # The other variants send nothing during the backward pass.
            _Slow.seconds = 30 if variant == "bucket" else 0.1
            for step in range(2):
                transfers.clear()
                _Slow.arrived.clear()
                loss = model(inputs_of(world.rank)).sum()
                all_reduce_mean(world, torch.zeros(1))  # all start at the same time
                began = time.monotonic()
                loss.backward()
                ended = time.monotonic()
                model.finish()
                kind = "direct" if link is None else "simulated"
                heard[kind, variant, step] = began, ended, sorted(transfers, key=lambda transfer: transfer.issued)
                model.module.zero_grad()
    return heard


@two_or_three
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("kind", ["direct", "simulated"])
def test_the_first_bucket_arrives_during_the_backward_pass(size: int, kind: str, step: int) -> None:
    for each in heard_of(size):
        began, ended, transfers = each["overlap"][kind, "bucket", step]
        assert [transfer.name for transfer in transfers] == ["bucket 0", "bucket 1", "used parameters"]
        first, second, _ = transfers
        assert began < first.issued <= first.start < first.end
        assert first.end <= second.issued <= ended  # the previous layer was not ready before


@two_or_three
@pytest.mark.parametrize("kind", ["direct", "simulated"])
def test_naive_and_flat_wait_for_the_backward_pass(size: int, kind: str) -> None:
    for each in heard_of(size):
        for step in range(2):
            for variant, count in (("naive", 4), ("flat", 1)):
                _, ended, transfers = each["overlap"][kind, variant, step]
                assert len(transfers) == count + 1
                assert all(transfer.issued >= ended for transfer in transfers)


def started(transfers: list[Transfer]) -> list[str]:
    """Return the transfers in the order of their start.

    gloo runs two at a time, so a small one may arrive before a large one.
    """
    return [transfer.name for transfer in sorted(transfers, key=lambda transfer: transfer.issued)]


@scenario
def disagree_about_the_order(world: World) -> dict[str, Any]:
    """Use the layers in reverse order on rank 1, so that its gradients become ready in the reverse order."""
    model: Any = forked(world, "bucket")
    transfers: list[Transfer] = []
    model.link.observer = transfers.append
    heard = {}
    order = ("left", "right") if world.rank != 1 else ("right", "left")
    for step in range(3):
        transfers.clear()
        backward(model, order)
        arrived = [model.trainable[index][0] for index in model._arrived]
        buckets = [bucket.names for bucket in model.buckets]
        model.finish()
        heard[step] = {
            "arrived": arrived,
            "buckets": buckets,
            "transfers": started(transfers),
            "gradients": gradients_of(model.module),
            "wanted": mean_by_hand(model, order),
        }
        model.module.zero_grad()
    return heard


@two_or_three
@pytest.mark.parametrize("step", range(3))
def test_all_ranks_reduce_buckets_in_the_same_order(size: int, step: int) -> None:
    ranks = [each["disagree_about_the_order"][step] for each in heard_of(size)]
    assert ranks[1]["arrived"][:2] == ranks[0]["arrived"][2:]
    for each in ranks:
        assert each["transfers"] == ["bucket 0", "bucket 1", "bucket 2", "bucket 3", "used parameters"]
        assert each["buckets"] == ranks[0]["buckets"]
        torch.testing.assert_close(each["gradients"], each["wanted"])
    if step > 0:  # rebuilt in rank 0's order
        assert [name for names in ranks[0]["buckets"] for name in names] == ranks[0]["arrived"]


# ------------------------------------------------------------------------------------------------- unused parameters


@scenario
def leave_parameters_unused(world: World) -> dict[str, Any]:
    """Leave parameters unused on all ranks, then on rank 1 only. After each error, the wrapper works again."""
    heard: dict[Any, Any] = {}
    for variant in OURS:
        model = forked(world, variant)
        cases = {"everywhere": ("left",), "on rank 1": ("right",) if world.rank == 1 else ("right", "left")}
        for case, layers in cases.items():
            for step in range(2):
                backward(model, layers)
                heard[variant, case, step] = error_of(model.finish)
                model.module.zero_grad()
            backward(model, ("left", "right"))
            model.finish()
            heard[variant, case, "afterwards"] = gradients_of(model.module), mean_by_hand(model, ("left", "right"))
            model.module.zero_grad()
    return heard


def unused(size: int, case: str) -> str:
    if case == "on rank 1":
        return "on rank 1 'left.weight', 'left.bias'"
    return "; ".join(f"on rank {rank} 'right.weight', 'right.bias'" for rank in range(size))


@two_or_three
@pytest.mark.parametrize("case", ["everywhere", "on rank 1"])
@pytest.mark.parametrize("variant", OURS)
def test_every_rank_reports_unused_parameters_and_their_ranks(size: int, variant: str, case: str) -> None:
    for each in heard_of(size):
        for step in range(2):
            assert each["leave_parameters_unused"][variant, case, step] == (
                f"RuntimeError: parameters that received no gradient: {unused(size, case)}. The loss does not "
                "depend on them. Use them, freeze them with requires_grad_(False), or allow unused parameters with "
                "find_unused_parameters=True."
            )


@two_or_three
@pytest.mark.parametrize("case", ["everywhere", "on rank 1"])
@pytest.mark.parametrize("variant", OURS)
def test_the_wrapper_works_again_after_an_unused_parameter_error(size: int, variant: str, case: str) -> None:
    for each in heard_of(size):
        found, wanted = each["leave_parameters_unused"][variant, case, "afterwards"]
        torch.testing.assert_close(found, wanted)


@scenario
def fail_while_buckets_are_under_way(world: World) -> dict[str, Any]:
    """Raise an error while a slow link still carries buckets. The next step must find the buckets empty."""
    link = LinkConfig(latency_ms=20, megabytes_per_second=1000)
    model: Any = forked(world, "bucket", simulated_link=link)
    backward(model, ("right",))
    error = error_of(model.finish)
    transfers: list[Transfer] = []
    model.link.observer = transfers.append
    model.module.zero_grad()
    backward(model, ("left", "right"))
    model.finish()
    return {
        "error": error,
        "transfers": started(transfers),
        "gradients": (gradients_of(model.module), mean_by_hand(model, ("left", "right"))),
    }


@two_or_three
def test_an_error_leaves_no_pending_bucket(size: int) -> None:
    for each in heard_of(size):
        heard = each["fail_while_buckets_are_under_way"]
        assert "parameters that received no gradient" in heard["error"]
        assert heard["transfers"] == ["bucket 0", "bucket 1", "bucket 2", "bucket 3", "used parameters"]
        torch.testing.assert_close(*heard["gradients"])


@scenario
def allow_unused_parameters(world: World) -> dict[str, Any]:
    heard: dict[Any, Any] = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        model = forked(world, variant, find_unused_parameters=True)
        layers = {"here": ("left", "right") if world.rank == 0 else ("left",), "nowhere": ("left",)}
        for step in range(2):
            for case, used in layers.items():
                backward(model, used)
                model.finish()
                heard[variant, case, step] = gradients_of(model.module), mean_by_hand(model, used)
                model.module.zero_grad()
    return heard


@two_or_three
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_allowed_unused_parameter_contributes_zeros(size: int, variant: str, step: int) -> None:
    for each in heard_of(size):
        found, wanted = each["allow_unused_parameters"][variant, "here", step]
        assert wanted["right.weight"].abs().max() > 0
        torch.testing.assert_close(found, wanted)


@two_or_three
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_parameter_that_no_rank_uses_gets_no_gradient_if_allowed(size: int, variant: str, step: int) -> None:
    for each in heard_of(size):
        found, wanted = each["allow_unused_parameters"][variant, "nowhere", step]
        assert found["right.weight"] is None
        assert found["right.bias"] is None
        torch.testing.assert_close(found["left.weight"], wanted["left.weight"])


@scenario
def torch_with_unused_parameters(world: World) -> str:
    model = forked(world, "torch")
    backward(model, ("left",))
    return error_of(model.finish)


@two_or_three
def test_with_torchs_ddp_each_rank_names_its_unused_parameters(size: int) -> None:
    for rank, each in enumerate(heard_of(size)):
        assert each["torch_with_unused_parameters"].startswith(
            f"RuntimeError: parameters that received no gradient: on rank {rank} 'right.weight', 'right.bias'. The loss"
        )


# ------------------------------------------------------------------------------------------------------------ misuse


@scenario
def misuse(world: World) -> dict[str, Any]:
    heard: dict[Any, Any] = {}
    model = forked(world, "bucket")

    def recover(name: str) -> None:
        """Check that the wrapper works after `finish` and `zero_grad`, whatever went wrong before."""
        model.finish()
        model.module.zero_grad()
        backward(model, ("left", "right"))
        model.finish()
        heard[name, "recovered"] = gradients_of(model.module), mean_by_hand(model, ("left", "right"))
        model.module.zero_grad()

    loss = model(inputs_of(world.rank), "left", "right").sum()
    loss.backward(retain_graph=True)
    heard["second backward"] = error_of(loss.backward)
    recover("second backward")

    losses = [model(inputs_of(world.rank, micro), "left", "right").sum() for micro in range(2)]
    losses[0].backward()
    with model.no_sync():
        heard["backward in no_sync after one without"] = error_of(losses[1].backward)
    recover("backward in no_sync after one without")

    backward(model, ("left", "right"))
    heard["forward before finish"] = error_of(lambda: model(inputs_of(world.rank), "left"))
    with torch.no_grad():
        heard["forward without gradients"] = error_of(lambda: model(inputs_of(world.rank), "left"))
    recover("forward before finish")

    for variant in OURS:
        table = data_parallel(nn.Embedding(4, 2, sparse=True), world, DDPConfig(variant=variant))

        def look_up(table: DataParallel = table) -> None:
            table(torch.tensor([world.rank])).sum().backward()
            table.finish()

        heard["sparse", variant] = error_of(look_up)
    return heard


@two_or_three
@pytest.mark.parametrize("case", ["second backward", "backward in no_sync after one without"])
def test_a_second_gradient_before_finish_is_an_error(size: int, case: str) -> None:
    for each in heard_of(size):
        message = each["misuse"][case]
        assert message.startswith("RuntimeError: parameter 'right.")
        assert (
            "received a second gradient before finish(). Run all but the last backward pass of a step inside" in message
        )
        assert "use_reentrant=False" in message


@two_or_three
def test_a_forward_pass_before_finish_is_an_error_unless_without_gradients(size: int) -> None:
    for each in heard_of(size):
        message = each["misuse"]["forward before finish"]
        assert message.startswith("RuntimeError: a forward pass started, but finish() was not called")
        assert each["misuse"]["forward without gradients"] == "no error"


@two_or_three
@pytest.mark.parametrize("case", ["second backward", "backward in no_sync after one without", "forward before finish"])
def test_after_misuse_finish_restores_the_wrapper(size: int, case: str) -> None:
    for each in heard_of(size):
        found, wanted = each["misuse"][case, "recovered"]
        torch.testing.assert_close(found, wanted)


@two_or_three
@pytest.mark.parametrize("variant", OURS)
def test_a_sparse_gradient_is_rejected_by_name_on_every_rank(size: int, variant: str) -> None:
    for each in heard_of(size):
        assert (
            "parameter 'weight' must have a dense gradient. Create its layer with sparse=False"
            in (each["misuse"]["sparse", variant])
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("link", [None, LinkConfig()], ids=["direct", "simulated"])
def test_two_ranks_without_a_group_raise(variant: str, link: LinkConfig | None) -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        data_parallel(nn.Linear(2, 2), World(0, 2, 0, 2), DDPConfig(variant=variant, simulated_link=link))


@scenario
def wrap_again(world: World) -> dict[str, Any]:
    """Wrap one module with every pair of variants; the older wrapper is alive or garbage."""
    heard: dict[Any, Any] = {}
    for before, variant, is_kept in product(VARIANTS, VARIANTS, (True, False)):
        older: DataParallel | None = forked(world, before)
        module = older.module
        model = data_parallel(module, world, DDPConfig(variant=variant))
        if not is_kept:
            older = None
        for step in range(2):
            backward(model, ("left", "right"))
            model.finish()
            heard[before, variant, is_kept, step] = gradients_of(module), mean_by_hand(model, ("left", "right"))
            module.zero_grad()
        if older is not None:
            heard[before, variant] = error_of(lambda older=older: older(inputs_of(world.rank), "left"))
            heard[before, variant, "finish"] = error_of(older.finish) if heard[before, variant] != "no error" else ""
    return heard


pair = pytest.mark.parametrize(("before", "variant"), list(product(VARIANTS, VARIANTS)))


@two_or_three
@pair
def test_a_module_that_is_wrapped_again_has_the_mean_gradient(size: int, before: str, variant: str) -> None:
    for each in heard_of(size):
        for is_kept, step in product((True, False), range(2)):
            torch.testing.assert_close(*each["wrap_again"][before, variant, is_kept, step])


@two_or_three
@pair
def test_a_replaced_wrapper_raises_if_either_reduces_in_backward(size: int, before: str, variant: str) -> None:
    for each in heard_of(size):
        if {before, variant} <= {"naive", "flat"}:
            assert each["wrap_again"][before, variant] == "no error"
        else:
            for when in ((), ("finish",)):
                assert "Use the newest wrapper" in each["wrap_again"][before, variant, *when]


@scenario
def change_gradients_in_late_hooks(world: World) -> dict[str, Any]:
    """Change each gradient in a hook that is registered after wrapping, before the gradient is averaged."""
    heard = {}
    for variant in VARIANTS:
        model = forked(world, variant)
        for parameter in model.module.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_gradient)
        for step in range(3):
            backward(model, ("left", "right"))
            model.finish()
            heard[variant, step] = gradients_of(model.module), clamped_mean_by_hand(model)
            model.module.zero_grad()
    return heard


def clamp_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(max=0.125)


def clamped_mean_by_hand(model: DataParallel) -> dict[str, torch.Tensor]:
    module = Fork()
    module.load_state_dict(model.module.state_dict())
    module(inputs_of(model.world.rank), "left", "right").sum().backward()
    return {name: all_reduce_mean(model.world, p.grad.clamp(max=0.125)) for name, p in module.named_parameters()}


@two_or_three
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hook_registered_after_wrapping_affects_the_average(size: int, variant: str) -> None:
    for each in heard_of(size):
        for step in range(3):
            torch.testing.assert_close(*each["change_gradients_in_late_hooks"][variant, step])


class TwoLayouts(nn.Module):
    """A layer that only rank 0 uses and one that the others use, in channels_last, beside a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
        self.transposed = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        layer = self.here if rank == 0 else self.there
        return (layer(x).flatten(2).sum(2).tanh() @ self.transposed).square().sum()


def image_of(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))


@scenario
def use_several_memory_layouts(world: World) -> dict[str, Any]:
    heard = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        model = data_parallel(TwoLayouts(), world, DDPConfig(variant=variant, find_unused_parameters=True))
        alone = copy.deepcopy(model.module)
        for rank in range(world.size):
            (alone(image_of(rank), rank) / world.size).backward()
        for step in range(2):
            model(image_of(world.rank), world.rank).backward()
            model.finish()
            heard[variant, step] = gradients_of(model.module), gradients_of(alone)
            model.module.zero_grad(set_to_none=False)
    return heard


@two_or_three
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_in_any_memory_layout_are_averaged(size: int, variant: str) -> None:
    for each in heard_of(size):
        for step in range(2):
            torch.testing.assert_close(*each["use_several_memory_layouts"][variant, step])


@scenario
def change_what_is_trainable(world: World) -> dict[str, str]:
    heard = {}
    for variant in VARIANTS:
        frozen = nn.Linear(2, 2).requires_grad_(False)
        config = DDPConfig(variant=variant)
        heard[variant, "none"] = error_of(lambda frozen=frozen, config=config: data_parallel(frozen, world, config))
        model = data_parallel(nn.Sequential(frozen, nn.Linear(2, 2)), world, config)
        frozen.weight.requires_grad_(True)
        heard[variant, "unfrozen"] = error_of(lambda model=model: model(torch.ones(1, 2)))
    return heard


@two_or_three
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_unfrozen_after_wrapping_are_an_error(size: int, variant: str) -> None:
    for each in heard_of(size):
        message = each["change_what_is_trainable"][variant, "unfrozen"]
        assert message.startswith("RuntimeError: parameters that were frozen when the model was wrapped")
        assert "'0.weight'" in message


@two_or_three
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_without_trainable_parameters_is_an_error(size: int, variant: str) -> None:
    for each in heard_of(size):
        assert each["change_what_is_trainable"][variant, "none"] == (
            "RuntimeError: the model must contain at least 1 parameter that requires a gradient, got 0"
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copying_a_wrapper_raises_with_advice_to_copy_the_module(
    variant: str, duplicate: Callable[[object], object]
) -> None:
    model = data_parallel(nn.Linear(2, 2), World(), DDPConfig(variant=variant))
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: copy or save its \.module"):
        duplicate(model)


def test_by_default_only_the_first_bucket_is_small() -> None:
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)])  # each has 1 MiB
    default: Any = data_parallel(layers, World(), DDPConfig(variant="bucket"))
    assert [bucket.names for bucket in default.buckets] == [["2.weight"], ["1.weight", "0.weight"]]
    given: Any = data_parallel(layers, World(), DDPConfig(variant="bucket", bucket_cap_mb=25))
    assert [bucket.names for bucket in given.buckets] == [["2.weight", "1.weight", "0.weight"]]


# -------------------------------------------------------------------------------------------------- different models


def linear(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, **options))


def in_another_order() -> nn.Module:
    module = nn.Module()
    module.register_parameter("1", nn.Parameter(torch.zeros(2)))
    module.register_parameter("0", nn.Parameter(torch.zeros(2)))
    return module


def in_order() -> nn.Module:
    module = nn.Module()
    for name in ("0", "1"):
        module.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return module


def frozen_second() -> nn.Module:
    module = linear()
    module[1].weight.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = in_order()
    module.register_parameter("1", module.get_parameter("0"))
    return module


def normed(width: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(width, affine=False))


# The difference of the last rank's model, and the error message.
MISMATCHES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "shape": (
        linear,
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5)),
        "2 is parameter '1.weight' (float32 [4, 3]) on rank 0 and parameter '1.weight' (float32 [5, 3])",
    ),
    "transposed, so of as many elements": (
        lambda: nn.Linear(2, 3, bias=False),
        lambda: nn.Linear(3, 2, bias=False),
        "0 is parameter 'weight' (float32 [3, 2]) on rank 0 and parameter 'weight' (float32 [2, 3])",
    ),
    "one fewer": (
        linear,
        lambda: linear(bias=False),
        "3 is parameter '1.bias' (float32 [4]) on rank 0 and missing",
    ),
    "one more": (
        lambda: linear(bias=False),
        linear,
        "3 is missing on rank 0 and parameter '1.bias' (float32 [4])",
    ),
    "order": (
        in_order,
        in_another_order,
        "0 is parameter '0' (float32 [2]) on rank 0 and parameter '1' (float32 [2])",
    ),
    "dtype": (
        linear,
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4).double()),
        "2 is parameter '1.weight' (float32 [4, 3]) on rank 0 and parameter '1.weight' (float64 [4, 3])",
    ),
    "frozen": (
        linear,
        frozen_second,
        "2 is parameter '1.weight' (float32 [4, 3]) on rank 0 and frozen parameter '1.weight' (float32 [4, 3])",
    ),
    "tied": (
        in_order,
        tied,
        "1 is parameter '1' (float32 [2]) on rank 0 and missing",
    ),
    "buffer": (
        lambda: normed(3),
        lambda: normed(4),
        "0 is buffer '0.running_mean' (float32 [3]) on rank 0 and buffer '0.running_mean' (float32 [4])",
    ),
}


@scenario
def bring_different_models(world: World) -> dict[str, Any]:
    heard = {}
    for number, (name, (ours, other, _)) in enumerate(MISMATCHES.items()):
        module = other() if world.rank == world.size - 1 else ours()
        config = DDPConfig(variant=VARIANTS[number % 4])
        heard[name] = error_of(lambda module=module, config=config: data_parallel(module, world, config))
    return heard


@two_or_three
@pytest.mark.parametrize("name", MISMATCHES)
def test_different_models_raise_one_error_that_names_the_first_difference(size: int, name: str) -> None:
    told = f"the model must be the same on every rank, but parameter or buffer {MISMATCHES[name][2]} on rank {size - 1}"
    for each in heard_of(size):
        assert each["bring_different_models"][name] == f"RuntimeError: {told}"


def test_different_models_abort_a_launch_within_seconds() -> None:
    def wrap(world: World) -> None:
        data_parallel(nn.Linear(2, 2 + world.rank), world)

    began = time.monotonic()
    with pytest.raises(RankError, match="the same on every rank, but parameter or buffer 0 is parameter 'weight'"):
        launch(wrap, 2, device="cpu", threads=1, echo=False, timeout=300)
    assert time.monotonic() - began < 50  # seconds, instead of gloo's half hour


# -------------------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"variant": "naive", "bucket_cap_mb": 1.0},
            "'bucket_cap_mb' requires variant=bucket or variant=torch, got variant=naive",
        ),
        ({"variant": "flat", "hook": "fp16"}, "'hook' requires variant=bucket or variant=torch, got variant=flat"),
        ({"variant": "bucket", "static_graph": True}, "'static_graph' requires variant=torch, got variant=bucket"),
        ({"variant": "bucket", "device_ids": [0]}, "'device_ids' requires variant=torch, got variant=bucket"),
        (
            {"variant": "flat", "gradient_as_bucket_view": False},
            "'gradient_as_bucket_view' requires variant=torch, got variant=flat",
        ),
        ({"variant": "torch", "hook": "powersgd"}, "'hook' must not be powersgd with variant=torch"),
        ({"variant": "bucket", "powersgd_rank": 4}, "'powersgd_rank' requires hook=powersgd, got hook=none"),
        ({"variant": "ring"}, "'naive', 'flat', 'bucket' or 'torch'"),
        ({"bucket_cap_mb": 0}, "greater than 0"),
        ({"simulated_link": {"latency_ms": -1}}, "greater than or equal to 0"),
        ({"bucket_cap": 1}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_incompatible_options_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DDPConfig(**values)


def test_any_variant_accepts_an_option_with_its_default() -> None:
    assert DDPConfig(variant="naive", hook="none", static_graph=False, bucket_cap_mb=None).variant == "naive"


def test_a_config_from_yaml_sets_every_option(tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text(
        "variant: torch\nbucket_cap_mb: 2\nfind_unused_parameters: true\nsync_buffers: false\nhook: bf16\n"
        "static_graph: true\ngradient_as_bucket_view: false\ndevice_ids: [3]\n"
        "simulated_link:\n  latency_ms: 1\n  megabytes_per_second: 50\n"
    )
    config = load(path, DDPConfig)
    assert config == DDPConfig(
        variant="torch",
        bucket_cap_mb=2,
        find_unused_parameters=True,
        sync_buffers=False,
        hook="bf16",
        static_graph=True,
        gradient_as_bucket_view=False,
        device_ids=[3],
        simulated_link=LinkConfig(latency_ms=1, megabytes_per_second=50),
    )
    assert config.simulated_link is not None
    assert LinkModel.from_config(config.simulated_link) == LinkModel(latency=1e-3, bandwidth=50e6)
    assert load(path, DDPConfig, ["hook=none", "simulated_link.latency_ms=0"]).hook == "none"


def test_an_invalid_option_in_yaml_is_reported_in_one_line_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text("variant: bucket\nstatic_graf: true\n")
    with pytest.raises(ConfigError, match=r"ddp\.yaml: unknown key 'static_graf'\. Did you mean 'static_graph'\?"):
        load(path, DDPConfig)
    path.write_text("variant: bucket\nstatic_graph: true\n")
    with pytest.raises(ConfigError, match=r"ddp\.yaml: 'static_graph' requires variant=torch, got variant=bucket"):
        load(path, DDPConfig)


# The options for torch's DDP, and its reported settings.
TORCHS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "defaults": (
        {},
        {
            "find_unused_parameters": False,
            "static_graph": False,
            "gradient_as_bucket_view": True,
            **forward_sync_buffers(enabled=True),
            "device_ids": None,
        },
        {"bucket_cap_bytes": 25 * MIB, "gradient_as_bucket_view": True, "comm_hook": ""},
    ),
    "bucket_cap_mb": ({"bucket_cap_mb": 2}, {}, {"bucket_cap_bytes": 2 * MIB}),
    "less than a MiB": ({"bucket_cap_mb": 0.5}, {}, {"bucket_cap_bytes": MIB // 2}),
    "find_unused_parameters": (
        {"find_unused_parameters": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True},
    ),
    "static_graph": ({"static_graph": True}, {"static_graph": True}, {"static_graph": True}),
    "gradient_as_bucket_view": (
        {"gradient_as_bucket_view": False},
        {"gradient_as_bucket_view": False},
        {"gradient_as_bucket_view": False},
    ),
    "sync_buffers": ({"sync_buffers": False}, forward_sync_buffers(enabled=False), {"broadcast_buffers": False}),
    "hook": ({"hook": "fp16"}, {}, {"comm_hook": "_reduce_with"}),
    "simulated_link": ({"simulated_link": LinkConfig()}, {}, {"comm_hook": "_reduce_with"}),
}


@scenario
def ask_torch(world: World) -> dict[str, Any]:
    heard: dict[str, Any] = {}
    for name, (options, attributes, logged) in TORCHS.items():
        model = data_parallel(Toy(), world, DDPConfig(variant="torch", **options))
        assert isinstance(model, TorchDDP)
        assert model.ddp is not None
        ddp: Any = model.ddp
        for _ in range(2):
            model(samples_of(0, world.rank, 0)[0]).sum().backward()
            model.finish()
        log = ddp._get_ddp_logging_data()
        heard[name] = {each: getattr(ddp, each) for each in attributes}, {each: log.get(each, "") for each in logged}
    heard["device_ids"] = error_of(lambda: data_parallel(Toy(), world, DDPConfig(variant="torch", device_ids=[0])))
    return heard


@two_or_three
@pytest.mark.parametrize("name", TORCHS)
def test_every_option_is_passed_to_torchs_ddp(size: int, name: str) -> None:
    _, attributes, logged = TORCHS[name]
    for each in heard_of(size):
        found, log = each["ask_torch"][name]
        assert found == attributes
        assert log == logged


@two_or_three
def test_device_ids_are_passed_to_torchs_ddp_which_rejects_them_on_cpus(size: int) -> None:
    for each in heard_of(size):
        assert "but got device_ids [0]" in each["ask_torch"]["device_ids"]


@scenario
def join_unevenly(world: World) -> dict[str, Any]:
    """Run r + 1 batches on rank r. A rank without batches joins the all-reduces of the others with zeros."""
    model = data_parallel(Toy(), world, DDPConfig(variant="torch"))
    assert isinstance(model, TorchDDP)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    with Join([model.ddp]):  # type: ignore[list-item]
        for step in range(world.rank + 1):
            optimizer.zero_grad()
            model(samples_of(step, world.rank, 0)[0]).sum().backward()
            model.finish()
            optimizer.step()
    return {"steps": step + 1, "weights": digest(model.module.state_dict())}


@two_or_three
def test_torchs_join_supports_uneven_inputs(size: int) -> None:
    heard = [each["join_unevenly"] for each in heard_of(size)]
    assert [each["steps"] for each in heard] == [rank + 1 for rank in range(size)]
    assert len({each["weights"] for each in heard}) == 1


def test_the_default_is_torchs_ddp_over_the_default_link() -> None:
    assert DDPConfig() == DDPConfig(variant="torch", hook="none", simulated_link=None)
    assert isinstance(data_parallel(nn.Linear(2, 2), World()), TorchDDP)


def test_a_single_process_does_not_compress() -> None:
    model: Any = data_parallel(nn.Linear(2, 2), World(), DDPConfig(variant="bucket", hook="powersgd"))
    assert isinstance(model.hook, AllReduceHook)
    assert isinstance(data_parallel(nn.Linear(2, 2), World(), DDPConfig(variant="torch", hook="fp16")), TorchDDP)


def test_a_simulated_link_of_one_process_takes_no_time() -> None:
    link = LinkConfig(latency_ms=1000, megabytes_per_second=1e-6)
    model: Any = data_parallel(nn.Linear(2, 2), World(), DDPConfig(variant="bucket", simulated_link=link))
    assert isinstance(model.link, SimulatedLink)
    began = time.monotonic()
    model(torch.ones(1, 2)).sum().backward()
    model.finish()
    assert time.monotonic() - began < 20  # on that link, these 24 bytes would take 24 seconds
