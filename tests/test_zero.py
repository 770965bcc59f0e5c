"""Sharded state: the memory of each rank, and the equality of training."""

import shutil
from collections.abc import Callable
from contextlib import chdir
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from commands import call
from ddp_tutorial.accumulation.config import PrecisionConfig
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.benches.step import random_step
from ddp_tutorial.checkpoint.manifest import checkpoint_name
from ddp_tutorial.collectives import digest
from ddp_tutorial.config import ConfigError
from ddp_tutorial.debug.checks import checking
from ddp_tutorial.debug.recorder import calls
from ddp_tutorial.debug.replicas import ReplicaDrift
from ddp_tutorial.mesh import Mesh, MeshConfig, make_mesh
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig, TrainConfig
from ddp_tutorial.training.export import load
from ddp_tutorial.training.plan import memory
from ddp_tutorial.training.strategies import make_strategy
from ddp_tutorial.training.tasks import launch_training, make_trainer
from ddp_tutorial.world import World
from ddp_tutorial.zero.elementwise import is_elementwise
from ddp_tutorial.zero.gradients import ShardedGradients
from ddp_tutorial.zero.memory import DIVIDED, bytes_sent, model_state_bytes
from ddp_tutorial.zero.model import ShardedModel, Unit
from ddp_tutorial.zero.optimizer import ShardedOptimizer
from ddp_tutorial.zero.pieces import Layout, piece_of
from ddp_tutorial.zero.reductions import Reduction, Reductions
from ddp_tutorial.zero.units import units_of

STEPS, WIDTH = 5, 7
KINDS = ("zero1", "zero2", "zero3")

# ---------------------------------------------------------------------------------------------------------- pieces


@given(st.integers(0, 40), st.integers(1, 6))
def test_pieces_contain_each_element_once_as_in_torch_chunk(count: int, size: int) -> None:
    elements = torch.arange(count)
    pieces = [elements[piece_of(count, rank, size)] for rank in range(size)]
    assert torch.cat(pieces).tolist() == elements.tolist()
    assert max(map(len, pieces)) == -(-count // size)
    if count:
        chunks = torch.chunk(elements, size)
        assert [piece.tolist() for piece in pieces[: len(chunks)]] == [chunk.tolist() for chunk in chunks]


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4), st.integers(1, 5))
def test_unpacking_rows_restores_tensors_and_pieces_are_views(shapes: list[list[int]], size: int) -> None:
    layout = Layout([torch.Size(shape) for shape in shapes], size)
    tensors = [torch.randn(shape) for shape in shapes]
    rows = torch.zeros(size, layout.length)
    for index, tensor in enumerate(tensors):
        layout.pack(rows, index, tensor)
    for index, tensor in enumerate(tensors):
        unpacked = torch.empty_like(tensor)
        layout.unpack(rows, index, unpacked)
        assert torch.equal(unpacked, tensor)
        for rank in range(size):
            piece = layout.pieces(rows[rank], rank)[index]
            assert torch.equal(piece, tensor.reshape(-1)[piece_of(tensor.numel(), rank, size)])
    assert layout.length * size < sum(map(torch.numel, tensors)) + len(tensors) * size


# ---------------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """A block of uneven size whose first layer may be frozen."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH), nn.LayerNorm(WIDTH)
        self.up.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """A model with tied, frozen and unused parameters, one that only some ranks use, and a frozen unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(frozen=True), nn.Linear(WIDTH, WIDTH), Block()])
        self.blocks[2].requires_grad_(False)
        self.mix, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.mix.weight
        self.spare, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.arange(float(WIDTH)))

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        x = self.mix(x) + 0.01 * self.offset
        for block in self.blocks:
            x = block(x)
        return self.again(x + self.shift if shifted else x)


class Plain(Toy):
    """A model without scalar parameters, which torch cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        del self.shift

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        return super().forward(x, False)


def make_toy(plain: bool = False) -> Toy:
    torch.manual_seed(0)
    return Plain() if plain else Toy()


def loss_sum(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y, shifted = batch
    return ((model(x, shifted).float() - y) ** 2).sum(), len(x)


def batches_of(step: int, rank: int, size: int, parts: int) -> list[Any]:
    """Return ragged batches of which only rank 0 uses `shift`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    counts = [1 + (2 * rank + number + step) % 4 for number in range(parts)]
    draw = [torch.randn(2, count, WIDTH, generator=generator) for count in counts]
    return [(x, y, rank == 0) for x, y in draw]


MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
    # The fused kernel computes remainders of vectors differently, and pieces end at different elements.
    "adamw, not fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=False),
}
OPTIMIZERS = ("adamw", "sgd")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def alone(
    optimizer: str, size: int, parts: int, clip: float, bf16: str = "", plain: bool = False
) -> dict[str, torch.Tensor]:
    """Train one process on all batches in plain torch. `bf16` selects autocast or cast weights."""
    master = make_toy(plain)
    stepped = MAKE[optimizer](groups_of(master))
    for step in range(STEPS):
        batches = [batch for rank in range(size) for batch in batches_of(step, rank, size, parts)]
        computing = deepcopy(master).bfloat16() if bf16 == "cast" else master
        pairs = []
        for x, y, shifted in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(bf16)):
                pairs.append(loss_sum(computing, (x.bfloat16() if bf16 == "cast" else x, y, shifted)))
        (sum(total for total, _ in pairs) / sum(count for _, count in pairs)).backward()
        if bf16 == "cast":
            for parameter, cast in zip(master.parameters(), computing.parameters(), strict=True):
                parameter.grad = None if cast.grad is None else cast.grad.float()
        clip_grad_norm_([p for p in master.parameters() if p.grad is not None], clip)
        stepped.step()
        stepped.zero_grad()
    return {name: tensor.clone() for name, tensor in master.state_dict().items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(
    world: World,
    kind: str,
    optimizer: str,
    parts: int = 1,
    clip: float = 1.0,
    dtype: str = "fp32",
    copies: int = 0,
    plain: bool = False,
) -> Any:
    """Return the weights after some steps, and the tensors of this rank. `copies` is the number of model copies."""
    config = TrainConfig.model_validate(
        {"strategy": kind, "accumulation": parts, "precision": {"dtype": dtype}}
        | ({"mesh": {"replicate": copies, "shard": world.size // copies}} if copies else {})
        | ({"ddp": {"find_unused_parameters": True, "variant": "bucket"}} if kind in {"ddp", "zero1"} else {})
    )
    model, precision = make_toy(plain), Precision(PrecisionConfig(dtype=dtype), world)  # type: ignore[arg-type]
    strategy = make_strategy(config, model, world, loss_sum, precision)
    stepped = strategy.setup_optimizer(MAKE[optimizer](groups_of(model)))
    norms = []
    with checking(world, model, stepped, [ReplicaDrift(every=1)] if clip > 1 else []) as checks:
        for step in range(STEPS):
            totals = strategy.backward(batches_of(step, world.rank, world.size, parts))
            stepping = [p for group in stepped.param_groups for p in group["params"]]
            gradients = {
                id(p.grad): local(p.grad).numel() for p in (*stepping, *model.parameters()) if p.grad is not None
            }
            norms.append(float(precision.update(stepped, clip, totals.sums["loss"], strategy.norm).norm))
    held = {
        "gradients": sum(gradients.values()),
        "parameters": sum(local(parameter).numel() for parameter in model.parameters()),
        "state": sum(
            local(value).numel() for state in stepped.state.values() for key, value in state.items() if key != "step"
        ),
    }
    with strategy.full_parameters() as whole:
        weights = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    return {"weights": weights, "norms": norms, "held": held, "drift": [each.message for each in checks.findings]}


def several(world: World, cases: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
    return {case: train(world, *case) for case in cases}


FP32 = [(kind, optimizer, parts) for kind in KINDS for optimizer in OPTIMIZERS for parts in (1, 2)]
BF16 = [(kind, "sgd", 1, 1.0, "bf16") for kind in KINDS]
UNCLIPPED = [(kind, optimizer, 1, 1e9) for kind in ("ddp", *KINDS) for optimizer in ("adamw, not fused", "sgd")]


# Four ranks: two copies of the model, each sharded over two ranks.
HYBRID = [
    (kind, optimizer, parts, 1.0, "fp32", 2, plain)
    for kind, plain in [("zero1", False), ("zero2", False), ("zero3", False), ("zero3", True), ("fsdp", True)]
    for optimizer, parts in [("adamw", 1), ("sgd", 2)]
]
COPIES = [(kind, "sgd", 1, 1.0, "fp32", 2, False) for kind in KINDS]  # on two ranks, each with its own copy


@cache
def trained(size: int) -> list[dict[tuple[Any, ...], Any]]:
    cases = [*FP32, *BF16] if size < 4 else [*(case for case in FP32 if case[2] == 1), *HYBRID]
    cases += [*UNCLIPPED, *COPIES] if size == 2 else []
    if size == 1:
        return [several(World(), cases)]
    return launch(several, size, cases, device="cpu", threads=1, echo=False, timeout=300)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the difference relative to the change of the weights."""
    start = make_toy().state_dict()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    moved = sum(float((start[name] - expected[name]).square().sum()) for name in expected)
    return (apart / moved) ** 0.5


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_stage_equals_one_process_on_all_batches(size: int) -> None:
    for rank in trained(size):
        for kind, optimizer, parts in (case for case in FP32 if case in rank):
            expected = alone(optimizer, size, parts, 1.0)
            found = rank[kind, optimizer, parts]["weights"]
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.allclose(found[name], tensor, rtol=1e-4, atol=2e-5), (kind, optimizer, parts, name)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bfloat16_with_float32_masters_follows_one_process(size: int) -> None:
    for rank in trained(size):
        for case in BF16:
            expected = alone("sgd", size, 1, 1.0, "cast" if case[0] == "zero3" else "autocast")
            found = rank[case]["weights"]
            assert all(tensor.dtype == torch.float32 for tensor in found.values())
            assert distance(found, expected) < 0.05, case
            assert distance(found, alone("sgd", size, 1, 1.0)) > 1e-4  # computed in bfloat16


def test_on_two_ranks_each_stage_is_bitwise_identical_to_ddp() -> None:
    """Two numbers have one sum, and no stage changes the computation of an element."""
    for rank in trained(2):
        for kind, optimizer, parts, clip in UNCLIPPED:
            ddp = rank["ddp", optimizer, parts, clip]["weights"]
            found = rank[kind, optimizer, parts, clip]["weights"]
            other = {name: float((found[name] - each).abs().max()) for name, each in ddp.items()}
            assert not any(other.values()), (kind, optimizer, other)


def test_pieces_are_not_reported_as_drifted_replicas() -> None:
    assert all(rank[case]["drift"] == [] for rank in trained(2) for case in UNCLIPPED)


@pytest.mark.parametrize(("size", "cases"), [(4, HYBRID), (2, COPIES)])
def test_with_model_copies_every_stage_equals_one_process(size: int, cases: list[Any]) -> None:
    first = trained(size)[0]
    for rank in trained(size):
        for case in cases:
            kind, optimizer, parts, *_, plain = case
            expected = alone(optimizer, size, parts, 1.0, plain=plain)
            for name, tensor in expected.items():
                assert torch.allclose(rank[case]["weights"][name], tensor, rtol=1e-4, atol=2e-5), (case, name)
                assert torch.equal(rank[case]["weights"][name], first[case]["weights"][name]), (case, name)
            if not plain and parts == 1:  # clipped by the norm with one copy
                assert rank[case]["norms"] == pytest.approx(rank[kind, optimizer, parts]["norms"], rel=1e-4), case


def test_a_hybrid_equals_torchs_fully_shard_on_a_2d_mesh() -> None:
    for rank in trained(4):
        for optimizer, parts in [("adamw", 1), ("sgd", 2)]:
            ours, torchs = (rank[kind, optimizer, parts, 1.0, "fp32", 2, True] for kind in ("zero3", "fsdp"))
            assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-5)
            for name, tensor in torchs["weights"].items():
                assert torch.allclose(ours["weights"][name], tensor, rtol=1e-4, atol=2e-5), (optimizer, parts, name)


def test_in_a_hybrid_each_copy_is_split_once_between_its_ranks() -> None:
    ranks = trained(4)
    for case in HYBRID:
        kind, optimizer, _, _, _, copies, plain = case
        model, slots = make_toy(plain), 2 if optimizer == "adamw" else 1
        of_all = [p.numel() for p in model.parameters()]
        of_trained = [p.numel() for p in model.parameters() if p.requires_grad and p is not model.spare]
        held = [rank[case]["held"] for rank in ranks]
        padding = len(of_all) * WIDTH  # torch shards rows of at most this number of elements
        for row in (held[:2], held[2:]):
            assert sum(each["state"] for each in row) == slots * sum(of_trained), case
            if kind in {"zero3", "fsdp"}:
                assert sum(each["parameters"] for each in row) == sum(of_all), case
            if kind != "zero1":
                assert sum(each["gradients"] for each in row) == sum(of_trained), case
        for each in held:
            assert each["state"] <= slots * (sum(of_trained) / copies + padding), case
            if kind in {"zero3", "fsdp"}:
                assert each["parameters"] <= sum(of_all) / copies + padding, case


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_norm_of_the_full_gradient_is_equal_for_every_stage_and_rank(size: int) -> None:
    ranks = trained(size)
    for optimizer in OPTIMIZERS:
        norms = [rank[kind, optimizer, 1]["norms"] for rank in ranks for kind in KINDS]
        for other in norms[1:]:
            assert other == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_rank_stores_more_than_its_part(size: int) -> None:
    model = make_toy()
    of_all = [p.numel() for p in model.parameters()]
    of_trained = [p.numel() for p in model.parameters() if p.requires_grad and p is not model.spare]
    for rank in trained(size):
        for kind, optimizer, parts in (case for case in FP32 if case in rank):
            held, slots = rank[kind, optimizer, parts]["held"], 2 if optimizer == "adamw" else 1
            assert held["state"] <= slots * (sum(of_trained) / size + max(of_trained)), (kind, optimizer)
            padded = sum(-(-count // size) for count in of_all)
            assert held["parameters"] <= (padded if kind == "zero3" else sum(of_all))
            padded = sum(-(-count // size) for count in of_trained)
            assert held["gradients"] <= (sum(of_trained) if kind == "zero1" else padded)
    for kind, optimizer, parts in (case for case in FP32 if case in trained(size)[0]):
        held = [rank[kind, optimizer, parts]["held"] for rank in trained(size)]
        slots = 2 if optimizer == "adamw" else 1
        assert sum(each["state"] for each in held) == slots * sum(of_trained)  # nothing is stored twice
        if kind == "zero3":
            assert sum(each["parameters"] for each in held) == sum(of_all)


def test_units_are_blocks_that_share_no_parameters_and_the_rest() -> None:
    assert list(units_of(make_toy())) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3))
    tied[3].weight = tied[0].weight
    assert list(units_of(tied)) == ["2", ""]
    nested = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    assert list(units_of(nested)) == ["0", "1", ""]


# -------------------------------------------------------------------------------------------------- the optimizer


class Sized(torch.optim.Optimizer):
    """An optimizer that uses a parameter as a whole: each step has length 0.1."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["steps"] = self.state[p].get("steps", torch.zeros(())) + 1
                p.sub_(group["lr"] * p.grad / p.grad.norm())


def with_a_group_later(make: Callable[..., torch.optim.Optimizer], world: World, wrap: bool) -> dict[str, Any]:
    """Take steps, add a parameter group, and use a scheduler. Save and load in between."""
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (2, 2), (1,))]
    made = make([{"params": ps[:1]}, {"params": ps[1:2], "lr": 0.01}], lr=0.1)
    optimizer = ShardedOptimizer(made, world) if wrap else made
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        for number, p in enumerate(ps):
            p.grad = None if (step + number) % 3 == 0 else torch.sin(torch.arange(float(p.numel())) + step).view_as(p)
        optimizer.step()
        scheduler.step()
        if step == 1:
            optimizer.add_param_group({"params": ps[2:], "lr": 0.05})
            scheduler.base_lrs.append(0.05)
        if step == 2:
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
    return {"weights": [p.detach().clone() for p in ps], "state": optimizer.state_dict()["state"]}


WRAPPED = {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop, "whole": Sized}


def wrapped(world: World) -> dict[str, tuple[Any, Any]]:
    return {
        name: tuple(with_a_group_later(make, world, wrap) for wrap in (True, False)) for name, make in WRAPPED.items()
    }


def test_any_sharded_optimizer_is_bitwise_identical_to_the_unsharded_one() -> None:
    for rank in launch(wrapped, 3, device="cpu", threads=1, echo=False, timeout=300):
        for name, (found, expected) in rank.items():
            assert all(map(torch.equal, found["weights"], expected["weights"])), name
            assert found["state"].keys() == expected["state"].keys()
            for index, state in expected["state"].items():
                assert all(torch.equal(found["state"][index][key], value) for key, value in state.items()), (
                    name,
                    index,
                )


def test_an_optimizer_that_has_been_stepped_is_rejected() -> None:
    for make in (torch.optim.AdamW, torch.optim.Adagrad, partial(torch.optim.SGD, momentum=0.9)):
        p = nn.Parameter(torch.ones(2))
        optimizer = make([p])
        p.grad = torch.ones(2)
        optimizer.step()
        with pytest.raises(ValueError, match="shard it before its first step"):
            ShardedOptimizer(optimizer, World())


def test_an_optimizer_that_requires_a_closure_is_rejected() -> None:
    with pytest.raises(ConfigError, match="LBFGS requires a closure"):
        ShardedOptimizer(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]), World())


ELEMENTWISE = {
    "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD": True,
    "Adafactor LBFGS Muon SparseAdam": False,
}


def test_a_trial_detects_which_optimizers_are_elementwise() -> None:
    every = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)}
    assert every - {"Optimizer"} == set(" ".join(ELEMENTWISE).split())  # a new group must be assigned
    weight, state = nn.Parameter(torch.ones(8, 8)), torch.get_rng_state()
    for names, expected in ELEMENTWISE.items():
        for name in names.split():
            optimizer = getattr(torch.optim, name)([weight])
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # a warm-up that is already attached
            assert is_elementwise(optimizer) == expected, name
            assert all(key != "step" or value == 0 for key, value in optimizer.state[weight].items()), name
    assert not is_elementwise(Sized([weight]))
    assert is_elementwise(torch.optim.AdamW([{"params": [weight]}, {"params": []}], fused=True, amsgrad=True))
    assert torch.equal(weight, torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------------- what only some models and loops do


def inputs_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


class Recomputed(nn.Module):
    """A layer that is used twice and recomputed each time, so that autograd delivers its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return x


@dataclass
class Answer:
    hidden: torch.Tensor


class Answering(nn.Module):
    """A block that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Answer | torch.Tensor) -> Answer:
        return Answer(self.inner(x.hidden if isinstance(x, Answer) else x).tanh())


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Answering(), Answering()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)).hidden


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


class Breaking(nn.Module):
    """A model whose backward pass raises an error on request, after the gradient of the last block was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 600), nn.Linear(600, 600), nn.Linear(600, 8)])
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](Boom.apply(x) if self.breaks else x))


class BreakingOutside(Breaking):
    """A model whose backward pass raises an error after the inner pass of a reentrant checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = Boom.apply(x) if self.breaks else x
        return checkpoint(lambda x: self.blocks[2](self.blocks[1](x)), x, use_reentrant=True)


class Experts(nn.Module):
    """A model in which each rank uses the expert of its first sample; experts have different sizes."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, w), nn.Linear(w, 8)) for w in widths), nn.Linear(8, 8)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x).tanh()
        return self.blocks[3](x + self.blocks[1 + int(x[0, 0] > 0)](x))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def once(model: nn.Module, rank: int) -> None:
    square(model, inputs_of(rank)).backward()


def twice(model: nn.Module, rank: int) -> None:
    once(model, rank)
    square(model, inputs_of(rank, 1)).backward()


def broken_before(model: nn.Module, rank: int) -> None:
    """Run a loop that catches the error of one batch and continues with the next batch."""
    model.breaks = True
    with pytest.raises(ValueError, match="boom"):
        square(model, inputs_of(rank, 1)).backward()
    model.breaks = False
    model.zero_grad()
    once(model, rank)


Loop = Callable[[nn.Module, int], None]
# The steps of a rank, and the equivalent steps of one process.
LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop, Loop]] = {
    "a shared layer, recomputed": (Recomputed, once, once),
    "two backward passes": (Answers, twice, twice),
    "a backward pass that raised": (Breaking, broken_before, once),
    "a backward pass that raised after a recomputed one": (BreakingOutside, broken_before, once),
    "different experts": (lambda: Experts((5, 7)), once, once),
}


def wrong_by(
    world: World,
    make: Callable[[], nn.Module],
    loop: Loop,
    expected_of: Loop,
    kind: type[Any],
    mesh: Mesh | None = None,
) -> float:
    """Return the largest error of this rank's pieces of the gradient in a second step, which keeps gradients."""
    torch.manual_seed(0)
    model = make().double()
    alone = deepcopy(model)
    sharded = kind(model, world, mesh=mesh)
    for step in range(2):
        loop(model, world.rank + 5 * step)
        sharded.reduce()
        sharded.finish()
        pieces = sharded.pieces if kind is ShardedGradients else {p: p for p in model.parameters()}
        errors = []
        alone.zero_grad()
        for rank in range(world.size):
            expected_of(alone, rank + 5 * step)
        for (name, own), p in zip(alone.named_parameters(), pieces, strict=True):
            expected = torch.zeros_like(own) if own.grad is None else own.grad
            cut = expected.flatten()[piece_of(own.numel(), sharded.shards.rank, sharded.shards.size)]
            found = pieces[p].grad
            assert (found is None) == (own.grad is None or not len(cut)), name
            errors.append(0.0 if found is None else float((found - cut).abs().max() / expected.abs().max()))
        for piece in pieces.values():
            if piece.grad is not None:
                piece.grad.zero_()  # as with zero_grad(set_to_none=False)
    return max(errors)


def apart(world: World, kind: str, widths: tuple[int, int], steps: int) -> str:
    """Return the error of strategy `kind` if ranks use different experts in the last step."""
    torch.manual_seed(0)
    model = Experts(widths).double()
    config = TrainConfig.model_validate({"strategy": kind})
    strategy = make_strategy(config, model, world, lambda m, x: (m(x).square().sum(), len(x)))
    strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():  # the sign of the first element of tanh(x), negated on rank 1
        first = inputs_of(0)
    try:
        for step in range(steps):
            x = -4 * first if world.rank and step == steps - 1 else 4 * first
            strategy.backward([x])
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class BreakingRecomputed(Recomputed):
    """A model whose backward pass raises an error on request, before the gradients of its shared layer arrive."""

    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return Boom.apply(x) if self.breaks else x


def retried(world: World, kind: type[Any]) -> float:
    """Return the largest error of this rank's pieces if the second of three backward passes of a step raises."""
    torch.manual_seed(0)
    model = BreakingRecomputed().double()
    alone = deepcopy(model)
    sharded = kind(model, world)
    once(model, world.rank)
    sharded.reduce()
    broken_before(model, world.rank)  # its second backward pass succeeds
    sharded.reduce()
    sharded.finish()
    for rank in range(world.size):
        twice_the_same(alone, rank)
    pieces = sharded.pieces if kind is ShardedGradients else {p: p for p in model.parameters()}
    cuts = [piece_of(p.numel(), sharded.shards.rank, sharded.shards.size) for p in alone.parameters()]
    return max(
        float((pieces[p].grad - own.grad.flatten()[cut]).abs().max())
        for p, own, cut in zip(pieces, alone.parameters(), cuts, strict=True)
    )


def twice_the_same(model: nn.Module, rank: int) -> None:
    once(model, rank)
    once(model, rank)


def failed_and_repeated(world: World, kind: str) -> bool:
    """Return whether a step has the same gradient if its first attempt failed after one micro-batch."""
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Answers()
        config = TrainConfig.model_validate({"strategy": kind, "accumulation": 2})
        strategy = make_strategy(config, model, world, lambda m, x: (m(x).square().sum(), len(x)))
        optimizer = strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if fails:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                strategy.backward([inputs_of(world.rank).float(), torch.ones(2, 3)])
            optimizer.zero_grad()
        strategy.backward([inputs_of(world.rank, micro).float() for micro in range(2)])
        optimizer.step()
        with strategy.full_parameters() as whole:
            found.append(torch.cat([p.detach().flatten() for p in whole.parameters()]))
    return torch.equal(*found)


def adagrad(world: World, kind: str) -> dict[str, torch.Tensor]:
    config = TrainConfig.model_validate({"strategy": kind, "ddp": {"variant": "bucket"} if kind == "zero1" else {}})
    torch.manual_seed(0)
    model = Answers()
    made = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
    strategy = make_strategy(config, model, world, lambda m, x: (m(x).square().sum(), len(x)))
    optimizer = strategy.setup_optimizer(made)
    for step in range(3):
        strategy.backward([inputs_of(world.rank, step).float()])
        optimizer.step()
        optimizer.zero_grad()
    with strategy.full_parameters() as whole:
        return {name: tensor.clone() for name, tensor in whole.state_dict().items()}


def saved_of_frozen(world: World, kind: str) -> set[str]:
    """Return the names of the Adagrad state that a checkpoint contains if a parameter is frozen."""
    config = TrainConfig.model_validate({"strategy": kind})
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    strategy = make_strategy(config, model, world, lambda m, x: (m(x).square().sum(), len(x)))
    optimizer = strategy.setup_optimizer(torch.optim.Adagrad(model.parameters()))
    return set(strategy.checkpoint_components(optimizer)["optimizer"][0].state_dict())


def rims(world: World) -> dict[str, Any]:
    return {
        "errors": {
            (name, kind.__name__): wrong_by(world, *loop, kind)
            for name, loop in LOOPS.items()
            for kind in (ShardedGradients, ShardedModel)
        },
        "retried": {kind.__name__: retried(world, kind) for kind in (ShardedGradients, ShardedModel)},
        "repeated": {kind: failed_and_repeated(world, kind) for kind in ("zero2", "zero3", "fsdp")},
        "adagrad": {kind: adagrad(world, kind) for kind in ("zero1", "zero2", "zero3", "fsdp")},
        "frozen": {kind: saved_of_frozen(world, kind) for kind in ("zero2", "zero3", "fsdp")},
        "first step": apart(world, "fsdp", (5, 7), 1),
        "third step": apart(world, "fsdp", (5, 5), 3),
        "zero3": apart(world, "zero3", (5, 7), 3),
    }


@cache
def at_the_rim() -> list[dict[str, Any]]:
    return launch(rims, 2, device="cpu", threads=1, echo=False, timeout=300)


def test_late_repeated_and_partial_gradients_are_summed() -> None:
    for rank in at_the_rim():
        assert len(rank["errors"]) == 2 * len(LOOPS)
        for case, error in rank["errors"].items():
            assert error < 1e-12, case


def test_a_failed_backward_pass_keeps_the_late_gradients_of_earlier_ones() -> None:
    for rank in at_the_rim():
        assert all(error < 1e-12 for error in rank["retried"].values()), rank["retried"]


def test_a_repeated_step_does_not_include_gradients_of_the_failed_attempt() -> None:
    for rank in at_the_rim():
        assert all(rank["repeated"].values()), rank["repeated"]


def broken_hybrid(world: World) -> dict[str, float]:
    """Recover from an error after only the first replica has started to sum over the replicas."""
    cross = Reduction.cross

    def at_once_or_late(self: Reduction, wait: bool) -> bool:
        return (wait or world.rank < 2) and cross(self, wait=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "cross", at_once_or_late)
        loop = Breaking, broken_before, once
        return {kind.__name__: wrong_by(world, *loop, kind, Mesh(2, 2)) for kind in (ShardedGradients, ShardedModel)}


def test_all_replicas_complete_the_reductions_of_a_backward_pass_that_raised() -> None:
    for rank in launch(broken_hybrid, 4, device="cpu", threads=1, echo=False, timeout=90):
        for kind, error in rank.items():
            assert error < 1e-12, kind


def test_with_nccl_the_order_of_the_reductions_does_not_depend_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []

    def order(is_completed: bool) -> list[tuple[str, int]]:
        work = SimpleNamespace(is_completed=lambda: is_completed, wait=lambda: None)
        for kind in ("reduce_scatter_tensor", "all_reduce"):
            monkeypatch.setattr(dist, kind, lambda row, *_, kind=kind, **__: started.append((kind, len(row))) or work)
        started.clear()
        world: Any = SimpleNamespace(backend="nccl", device=torch.device("cpu"))
        shards: Any = SimpleNamespace(rank=0, size=2, copies=2, inside=None, across=None, world=world)
        parameters = [nn.Parameter(torch.ones(2 * count)) for count in (1, 2, 3)]
        each = [Reduction({"p": parameter}, torch.float32, shards) for parameter in parameters]
        reductions = Reductions(each, world)
        for reduction, parameter in zip(each, parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(reductions.arrive, reduction, 0))
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        reductions.reduce()
        return list(started)

    assert order(is_completed=True) == order(is_completed=False)
    assert len(started) == 6


def test_an_optimizer_with_initial_state_can_be_sharded() -> None:
    torch.manual_seed(0)
    model = Answers()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
    for step in range(3):
        (sum(square(model, inputs_of(rank, step).float()) for rank in range(2)) / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in at_the_rim():
        for kind, weights in rank["adagrad"].items():
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5, msg=f"{kind}, {name}")


def test_initial_state_of_a_frozen_parameter_is_not_saved() -> None:
    names = {f"{name}.{key}" for name in ("0.weight", "1.weight", "1.bias") for key in ("sum", "step")}
    for rank in at_the_rim():
        assert rank["frozen"] == dict.fromkeys(("zero2", "zero3", "fsdp"), names)


def test_fsdp_names_the_modules_that_differ_and_zero3_trains() -> None:
    for rank in at_the_rim():
        assert rank["zero3"] == "no error"
        assert "DifferentPathsError: in the first forward pass, rank 0 reached module 'blocks." in rank["first step"]
        assert rank["third step"].startswith("DifferentPathsError: in this step, the ranks used different modules")
        assert "Use strategy=zero2" in rank["third step"]


# --------------------------------------------------------------------------------------------------- the trainer


BASE: dict[str, Any] = {
    "corpus": "stories:300",
    "model": {"layers": 2, "heads": 2, "width": 16, "context": 16},
    "device": "cpu",
    "steps": 6,
    "batch_size": 5,
    "warmup_steps": 2,
    "eval_every": 3,
    "eval_samples": 5,
    "checkpoint": {"every": 2, "keep_last": 100},
    "tensorboard": False,
}
FLAVOURS: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "accumulation": 2, "optimizer": "sgd", "best_model": True},
    "zero3": {"strategy": "zero3", "checkpoint": {**BASE["checkpoint"], "background": True}},
    "zero3-bf16": {
        "strategy": "zero3",
        "precision": {"dtype": "bf16"},
        "model": {**BASE["model"], "recompute": True, "dropout": 0.1},
    },
    "zero3-fp16": {"strategy": "zero3", "precision": {"dtype": "fp16", "initial_scale": 2.0**24}},
}
RESHARDED = ["zero1", "zero2", "zero3"]


def run(world: World, flavour: str, **values: Any) -> dict[str, Any]:
    config = TaskConfig.model_validate(BASE | (FLAVOURS | OF_TORCH | HYBRIDS)[flavour] | values)
    result = make_trainer(config, world).train()
    saved = safetensors.torch.load_file(result.run / "model/model.safetensors") if world.is_main else {}
    return {
        "weights": result.weights,
        "losses": result.losses,
        "eval": result.eval_losses,
        "shapes": {name: tuple(tensor.shape) for name, tensor in saved.items()},
    }


def uninterrupted_and_resumed(world: World, flavours: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run to the end, and again from the first checkpoint in a copy of the folder, as a kill leaves it."""
    found = {}
    for flavour in flavours:
        found[flavour] = [run(world, flavour, name=flavour)]
        again = Path("runs") / f"{flavour}-again"
        if world.is_main:
            shutil.copytree(Path("runs") / flavour, again)
            for later in (4, 6):
                shutil.rmtree(again / "checkpoints" / checkpoint_name(later))
            (again / "result.json").unlink()
            shutil.rmtree(again / "model")
        found[flavour].append(run(world, flavour, name=again.name, resume="auto"))
    return found


def resharded(world: World, step: int, source: str, flavours: list[str]) -> dict[str, Any]:
    """Resume a checkpoint of a different number of ranks."""
    return {
        flavour: run(
            world,
            flavour,
            name=f"{flavour}-on-{world.size}",
            resume=f"runs/{flavour}{source}/checkpoints/{checkpoint_name(step)}",
        )
        for flavour in flavours
    }


OF_TORCH = {"fsdp": {"strategy": "fsdp", "best_model": True}}
HYBRIDS: dict[str, dict[str, Any]] = {
    f"{kind}-2x2": {"strategy": kind, "mesh": {"replicate": 2, "shard": 2}} for kind in ("zero1", "zero3", "fsdp")
}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return all_lives(tmp_path_factory.mktemp("lives"), list(FLAVOURS), RESHARDED)


def lives_of_hybrids(world: World) -> dict[str, Any]:
    """Run on four ranks; then from step 2 on a mesh with one copy, and from its step 4 on one with four."""
    found = uninterrupted_and_resumed(world, list(HYBRIDS))
    for flavour in ("zero3-2x2", "fsdp-2x2"):
        source, step = flavour, 2
        for name, mesh in {"one-copy": {"replicate": 1}, "four-copies": {"replicate": 4}}.items():
            where = f"runs/{source}/checkpoints/{checkpoint_name(step)}"
            source, step = f"{flavour}-{name}", 4
            found[source] = [run(world, flavour, name=source, resume=where, mesh=mesh)]
    return found


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "echo": False, "timeout": 200}
    with chdir(tmp_path_factory.mktemp("hybrids")):
        of_four = launch(lives_of_hybrids, 4, **options)
        shutil.rmtree("runs/zero3-2x2/model")  # as if the run had not finished
        unfinished = digest(load("runs/zero3-2x2").state_dict())
        of_one = run(
            World(), "zero3-2x2", name="alone", resume=f"runs/zero3-2x2/checkpoints/{checkpoint_name(2)}", mesh={}
        )
    return {4: of_four, 1: of_one, "unfinished": unfinished}


@pytest.fixture(scope="module")
def lives_of_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return all_lives(tmp_path_factory.mktemp("lives"), ["fsdp"], ["fsdp"])


def all_lives(folder: Path, flavours: list[str], over: list[str]) -> dict[Any, Any]:
    """Run 2 ranks from the start, 4 ranks from their step 2, and 1 rank from the 4 ranks' step 4."""
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "echo": False, "timeout": 200}
    with chdir(folder):
        of_two = launch(uninterrupted_and_resumed, 2, flavours, **options)
        of_four = launch(resharded, 4, 2, "", over, **options)
        of_one = launch(resharded, 1, 4, "-on-4", over, **options)
        shutil.rmtree(f"runs/{over[-1]}-on-4/model")  # as if the run had not finished
        unfinished = load(f"runs/{over[-1]}-on-4").state_dict()
    return {2: of_two, 4: of_four, 1: of_one, "unfinished": digest(unfinished)}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_killed_and_resumed_run_is_bitwise_identical(lives: dict[Any, Any], flavour: str) -> None:
    first, *others = [of_run for rank in lives[2] for of_run in rank[flavour]]
    for other in others:
        assert {**other, "shapes": {}} == {**first, "shapes": {}}


def test_all_stages_have_the_same_losses(lives: dict[Any, Any]) -> None:
    expected = lives[2][0]["zero1"][0]
    assert lives[2][0]["zero3"][0]["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert lives[2][0]["zero3"][0]["eval"] == pytest.approx(expected["eval"], rel=1e-4)


@pytest.mark.parametrize("flavour", RESHARDED)
def test_checkpoints_of_2_and_4_ranks_resume_on_4_and_1(lives: dict[Any, Any], flavour: str) -> None:
    expected = lives[2][0][flavour][0]
    for size in (4, 1):
        assert len(lives[size]) == size
        for rank in lives[size]:
            assert rank[flavour]["losses"] == pytest.approx(expected["losses"], rel=1e-4)
            assert rank[flavour]["eval"] == pytest.approx(expected["eval"], rel=1e-4)
            assert rank[flavour]["weights"] == lives[size][0][flavour]["weights"]


def test_an_exported_or_loaded_model_has_full_tensors(lives: dict[Any, Any]) -> None:
    shapes = [of_run["shapes"] for runs in lives[2][0].values() for of_run in runs]
    assert shapes[0]["head.weight"] == (256, 16)
    assert "tokens.weight" not in shapes[0]  # tied, so it is written once
    assert all(other == shapes[0] for other in shapes)
    assert lives["unfinished"] == lives[4][0]["zero3"]["weights"]


def test_a_hybrid_resumes_bitwise_identically_and_on_a_different_mesh(
    lives: dict[Any, Any], hybrids: dict[Any, Any]
) -> None:
    expected = lives[2][0]["zero3"][0]
    for rank in hybrids[4]:
        for flavour, runs in rank.items():
            for each in runs:
                assert each["losses"] == pytest.approx(expected["losses"], rel=1e-4), flavour
                assert each["eval"] == pytest.approx(expected["eval"], rel=1e-4), flavour
                assert each["weights"] == hybrids[4][0][flavour][0]["weights"], flavour  # resumed, and on all ranks
    assert hybrids[4][0]["fsdp-2x2"][0]["shapes"] == expected["shapes"]
    assert hybrids[1]["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert hybrids["unfinished"] == hybrids[4][0]["zero3-2x2"][0]["weights"]


@pytest.mark.parametrize("kind", ["zero2", "zero3", "invariant"])
def test_an_option_that_the_strategy_lacks_is_rejected(kind: str) -> None:
    with pytest.raises(ValueError, match=f"'ddp.hook' requires strategy=ddp or strategy=zero1, got strategy={kind}"):
        TrainConfig.model_validate({"strategy": kind, "ddp": {"hook": "fp16"}})


def test_different_types_of_parameters_in_one_unit_are_rejected() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).bfloat16()})
    with pytest.raises(ConfigError, match=r"'a\.bias' with torch\.float32 and 'b\.bias' with torch\.bfloat16"):
        ShardedModel(model, World())


def test_batch_norm_weights_cannot_be_gathered_in_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match=r"'1' is a BatchNorm1d.* gathers weights in torch.bfloat16. Use strategy="):
        ShardedModel(model, World(), compute_dtype=torch.bfloat16)
    ShardedModel(model, World())


def test_full_parameters_compute_in_float32() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    sharded = ShardedModel(model, World(), compute_dtype=torch.bfloat16)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    with sharded.full_parameters() as full:
        assert full(torch.ones(1, 2)).dtype == torch.float32


def test_a_checkpoint_after_a_forward_pass_without_a_backward_pass_contains_shards() -> None:
    config, model = TrainConfig.model_validate({"strategy": "zero3"}), nn.Linear(2, 2)
    strategy = make_strategy(config, model, World(), lambda m, x: (m(x).square().sum(), len(x)))
    optimizer = strategy.setup_optimizer(torch.optim.SGD(model.parameters()))
    out = model(torch.ones(1, 2))
    saved = strategy.checkpoint_components(optimizer)["model"][0].state_dict()
    assert [tensor.dim() for tensor in saved.values()] == [1, 1]
    out.sum().backward()  # gathers the weights again


def test_a_failed_gather_of_the_full_parameters_leaves_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded, show = ShardedModel(model, World()), Unit.show
    monkeypatch.setattr(Unit, "show", lambda unit: show(unit) if unit is sharded.units[0] else 1 / 0)
    with pytest.raises(ZeroDivisionError), sharded.full_parameters():
        pass
    assert [parameter.dim() for parameter in model.parameters()] == [1, 1, 1, 1]


def test_fsdp_trains_equally_resumes_bitwise_and_is_resharded(
    lives: dict[Any, Any], lives_of_torch: dict[Any, Any]
) -> None:
    ours, first = lives[2][0]["zero3"][0], lives_of_torch[2][0]["fsdp"][0]
    for rank in lives_of_torch[2]:
        assert all({**other, "shapes": {}} == {**first, "shapes": {}} for other in rank["fsdp"])
    for size in (2, 4, 1):
        found = first if size == 2 else lives_of_torch[size][0]["fsdp"]
        assert found["losses"] == pytest.approx(ours["losses"], rel=1e-4)
        assert found["eval"] == pytest.approx(ours["eval"], rel=1e-4)
        assert found["shapes"] == ours["shapes"]
    assert lives_of_torch["unfinished"] == lives_of_torch[4][0]["fsdp"]["weights"]


# -------------------------------------------------------------------------------------------------- what it comes to


def test_each_stage_divides_one_more_part_by_the_number_of_ranks() -> None:
    """7.5 billion parameters on 64 ranks, as in the paper's first figure, but in float32: 16 bytes per parameter."""
    psi, ranks = 7_500_000_000, 64
    found = {name: sum(model_state_bytes(name, psi, ranks).values()) / 1e9 for name in DIVIDED}
    assert found == pytest.approx(
        {
            "ddp": 120,
            "invariant": 120,
            "accelerate": 120,
            "zero1": 60.9375,
            "zero2": 31.40625,
            "zero3": 1.875,
            "fsdp": 1.875,
        }
    )
    assert [bytes_sent(name, 1000, 4) for name in ("ddp", "zero1", "zero2", "zero3")] == [6000, 9000, 6000, 9000]
    assert bytes_sent("zero2", 1000, 4, micro_batches=2) == 9000
    assert bytes_sent("ddp", 1000, 1) == bytes_sent("zero3", 1000, 1) == 0
    # two copies of two ranks: half of 4,000 bytes in a pass within a copy; 2,000 over the copies, there and back
    assert bytes_sent("zero3", 1000, 2, copies=2) == 3 * 2000 + 2000
    assert bytes_sent("zero2", 1000, 2, micro_batches=2, copies=2) == 3 * 2000 + 2 * 2000
    assert bytes_sent("zero1", 1000, 2, copies=2) == 6000 + 2000
    assert bytes_sent("zero3", 1000, 1, copies=4) == bytes_sent("ddp", 1000, 4)


class Counted:
    """A counter of the bytes that a rank sends in torch's collectives, for the algorithms that send the least."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        for name, passes, of in [
            ("reduce_scatter_tensor", 1, lambda out, into, **_: into),
            ("all_gather_into_tensor", 1, lambda out, into, **_: out),
            ("all_to_all_single", 1, lambda out, into, **_: into),
            ("all_reduce", 2, lambda tensor, *_, **__: tensor),
        ]:
            patch.setattr(dist, name, self._counting(getattr(dist, name), passes, of))

    def _counting(self, inner: Any, passes: int, of: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            size = dist.get_world_size(named.get("group"))
            self.nbytes += passes * of(*args, **named).nbytes * (size - 1) // size
            return inner(*args, **named)

        return call


def sent_in_a_step(world: World) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Return the bytes that were sent, and the reported bytes."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        for kind, copies, parts in [(kind, n, k) for kind in KINDS[1:] for n in (1, 2, 4) for k in (1, 2)]:
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
            mesh, loss = {"replicate": copies}, lambda model, x: (model(x).square().sum(), len(x))
            config = TrainConfig.model_validate({"strategy": kind, "mesh": mesh, "accumulation": parts})
            strategy = make_strategy(config, model, world, loss, Precision(world=world))
            optimizer = strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                counted.nbytes = 0
                strategy.backward([torch.ones(2, 64)] * parts)
                optimizer.step()
                optimizer.zero_grad()
            told = bytes_sent(kind, 8 * 64 * 64, world.size // copies, parts, copies)
            found[kind, copies, parts] = counted.nbytes, told
    return found


def test_reported_traffic_equals_the_bytes_sent() -> None:
    """A few bytes are excluded: losses, counts, and flags of used parameters."""
    for rank in launch(sent_in_a_step, 4, device="cpu", threads=1, echo=False, timeout=300):
        for case, (sent, told) in rank.items():
            assert told <= sent <= 1.01 * told + 200, (case, sent, told)


def test_a_world_that_does_not_fit_the_mesh_is_rejected_before_start(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ddp_tutorial.processes.starting", "ddp_tutorial.training.tasks"):
        monkeypatch.setattr(f"{module}.launch", lambda *_, **__: pytest.fail("ranks were started"))
    wrong = [
        (
            ["strategy=zero3", "mesh.replicate=2", "mesh.shard=2"],
            "the number of ranks must be 4 for mesh replicate 2 x shard 2, got 3",
        ),
        (["strategy=fsdp", "mesh.shard=2"], "number of ranks must be a multiple of 2 for mesh shard 2, got 3: start a"),
        (["strategy=pipeline", "mesh.pipeline=2"], "the number of ranks must be a multiple of 2 for mesh pipeline 2"),
        (["strategy=ddp", "mesh.shard=2"], "'mesh.shard' requires strategy=zero1, zero2, zero3 or fsdp, got"),
    ]
    for options, said in wrong:
        done = call("train", "tiny", "device=cpu", "nprocs=3", *options)
        assert done.returncode == 2, (options, done)
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    with pytest.raises(ConfigError, match=r"number of ranks must be 4 for mesh .*, got 2"):
        launch_training(TaskConfig.model_validate(BASE | HYBRIDS["zero3-2x2"] | {"nprocs": 2}))
    assert list(workdir.iterdir()) == []


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_mesh_contains_each_rank_once_in_a_row_and_once_in_a_column(copies: int, span: int) -> None:
    mesh, ranks = make_mesh(MeshConfig(replicate=copies, shard=span), copies * span, "shard"), range(copies * span)
    assert mesh == make_mesh(MeshConfig(shard=span), copies * span, "shard")
    assert mesh == make_mesh(MeshConfig(replicate=copies), copies * span, "shard")
    for groups in (mesh.rows, mesh.columns):
        assert sorted(rank for group in groups for rank in group) == list(ranks)
    for rank in ranks:
        row, place = mesh.row_and_column(rank)
        assert mesh.rows[row][place] == mesh.columns[place][row] == rank
    assert make_mesh(MeshConfig(), copies * span, "shard") == (1, copies * span)


def recorded_in_a_step(world: World) -> dict[str, tuple[int, float, float]]:
    """Return the number of parameters, of those outside blocks, and of bytes that this rank sends, from torch's flight
    recorder.

    An all-reduce sends each byte twice except the rank's own part; other collectives send it once.
    """
    found = {}
    for kind in ("ddp", *KINDS):
        step = random_step(world, 1, ModelConfig(layers=3, heads=2, width=48, context=64), strategy=kind)
        whole = random_step(world, 1, ModelConfig(layers=3, heads=2, width=48, context=64)).model
        step()  # DDP rebuilds its buckets after this step
        before = len(calls(10_000))
        step()
        times = {"all_reduce": 2 / world.size, "all_to_all": 1 / world.size, "all_gather": 1.0}
        floats = [call for call in calls(10_000)[before:] if call.dtypes == ("Float",)]
        sent = sum(4 * (world.size - 1) * times[call.op] * torch.Size(call.sizes[0]).numel() for call in floats)
        counts = [sum(p.numel() for p in each.parameters()) for each in (whole, whole.blocks)]
        found[kind] = counts[0], counts[0] - counts[1], sent
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_sends_the_bytes_of_the_formula(size: int) -> None:
    """On gloo too, whose own reduce-scatter sends the bytes of an all-reduce."""
    for rank in launch(recorded_in_a_step, size, device="cpu", threads=1, echo=False):
        for kind, (parameters, rest, sent) in rank.items():
            expected = bytes_sent(kind, parameters, size)
            # Parameters outside blocks stay gathered from forward to backward, so they are gathered once.
            if kind == "zero3":
                expected -= bytes_sent("zero1", rest, size) // 3
            assert sent == pytest.approx(expected, rel=0.03), kind


def test_a_dry_run_reports_the_memory_and_traffic_of_the_strategy() -> None:
    config = TaskConfig.model_validate(BASE | {"strategy": "zero3"})
    one, four = memory(config, 1), memory(config, 1, ranks=4)
    assert one["gathered"] == 0
    assert four["weights"] == one["weights"] // 4
    assert four["optimizer"] == one["optimizer"] // 4
    assert four["gathered"] == one["weights"]  # of two blocks and the rest, all
    assert four["activations"] == one["activations"]
    hybrid = memory(TaskConfig.model_validate(BASE | HYBRIDS["zero3-2x2"]), 1, ranks=4)
    assert [hybrid[name] for name in ("weights", "gradients", "optimizer")] == [
        one[name] // 2 for name in ("weights", "gradients", "optimizer")
    ]
