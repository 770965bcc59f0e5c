"""A pipeline with any schedule gives the gradient of one process and of torch's pipelining, and stores the planned
activations.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ddp_tutorial.accumulation.config import PrecisionConfig
from ddp_tutorial.accumulation.loss import LossError
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.config import ConfigError, from_arguments
from ddp_tutorial.ddp.sync_bn import synchronize_batch_norm
from ddp_tutorial.pipeline import runner as runner_module
from ddp_tutorial.pipeline.config import PipelineConfig
from ddp_tutorial.pipeline.memory import rank_costs, stage_costs
from ddp_tutorial.pipeline.parallel import Pipeline, check_pipeline
from ddp_tutorial.pipeline.runner import StageRunner
from ddp_tutorial.pipeline.schedules import gpipe, interleaved, one_f_one_b, peaks, table_of
from ddp_tutorial.pipeline.stages import balance, chain_of, even_splits, split_into_stages
from ddp_tutorial.pipeline.strategy import PipelineStrategy
from ddp_tutorial.pipeline.timing import module_seconds
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.world import World

MICRO_BATCHES = 6
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
STEPS = 5
CLOSE = {"rtol": 0.0, "atol": 1e-6}


class Extra(nn.Module):
    """A layer with an unused parameter, and an integer counter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x))


def toy() -> nn.Sequential:
    """Return eight modules of different sizes; the first and one in the middle are frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 7),
        nn.Tanh(),
        Extra(7),
        nn.BatchNorm1d(7),
        nn.Linear(7, 5, bias=False),
        nn.Linear(5, 5),
        Extra(5),
        nn.Linear(5, 2),
    )
    for frozen in (model[0], model[5]):
        frozen.requires_grad_(False)
    return model


def squares(model: Any, batch: Any) -> tuple[Any, ...]:
    x, y = batch
    error = (model(x) - y).square().sum(-1)
    return (error * (y[:, 0] > 0)).sum(), (y[:, 0] > 0).sum(), {"all": (error.sum(), len(x))}


def ragged(step: int, count: int = MICRO_BATCHES) -> list[Any]:
    """Return micro-batches of 2 to 5 samples, of which some do not count."""
    draw = torch.Generator().manual_seed(step)
    sizes = torch.randint(2, 6, (count,), generator=draw).tolist()
    return [(torch.randn(n, 3, generator=draw), torch.randn(n, 2, generator=draw)) for n in sizes]


def tokens(step: int, count: int = MICRO_BATCHES) -> list[Any]:
    draw = torch.Generator().manual_seed(step)
    sizes = torch.randint(1, 4, (count,), generator=draw).tolist()
    return [{"tokens": torch.randint(0, 64, (n, 9), generator=draw)} for n in sizes]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=6, heads=2, width=16, context=8, vocab=64)


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def five_steps(strategy: Any, optimizer: torch.optim.Optimizer, batches_of: Any) -> list[dict[str, float]]:
    means = []
    for step in range(STEPS):
        means.append(strategy.backward(batches_of(step)).means())
        optimizer.step()
        optimizer.zero_grad()
    return means


def far_from_one_process(
    world: World,
    model: nn.Module,
    loss: Any,
    batches_of: Any,
    schedule: str,
    per_rank: int,
    kind: str,
    dtype: str,
    accumulation: int = 1,
) -> dict[str, float]:
    """Return the difference from one process after five steps by name, and the losses."""
    config = PrecisionConfig(dtype=dtype)
    alone, precision = World(), Precision(config, World())
    reference = DDPStrategy(one := copy.deepcopy(model), alone, loss, accumulation=MICRO_BATCHES, precision=precision)
    expected = five_steps(reference, optimizer_of(kind, one.parameters()), batches_of)
    count = MICRO_BATCHES // accumulation
    settings = PipelineConfig(ranks=world.size, schedule=schedule, micro_batches=count, per_rank=per_rank)
    pipeline = Pipeline(model, world, loss, settings, precision=Precision(config, world))
    got = five_steps(pipeline, optimizer_of(kind, pipeline.parameters()), batches_of)
    buffers = {id(b): name for name, b in model.named_buffers()}
    own = {buffers[id(b)]: b for stage in pipeline.stages.values() for b in stage.buffers()} | pipeline.named
    there = one.state_dict()
    far = {name: float((tensor - there[name]).abs().max()) for name, tensor in own.items()}
    for name in got[0]:
        far[f"mean {name}"] = max(abs(a[name] - b[name]) for a, b in zip(got, expected, strict=True))
    assert pipeline.runner.peak == peaks(table_of(settings))[world.rank]
    assert [timed.action for timed in pipeline.runner.ran] == list(table_of(settings)[world.rank])
    return far


def all_of_them(world: World) -> dict[str, dict[str, float]]:
    found = {}
    for schedule, per_rank in SCHEDULES:
        for kind, dtype in [("adamw", "fp32"), ("sgd", "fp32"), ("sgd", "bf16")]:
            if world.size * per_rank <= 8:
                name = f"toy {schedule} {kind} {dtype}"
                found[name] = far_from_one_process(world, toy(), squares, ragged, schedule, per_rank, kind, dtype)
        found[f"gpt {schedule}"] = far_from_one_process(
            world, gpt(), next_token_loss, tokens, schedule, per_rank, "sgd", "fp32"
        )
    if world.size <= 3:
        found["toy 1f1b, accumulation 2"] = far_from_one_process(
            world, toy(), squares, ragged, "1f1b", 1, "sgd", "fp32", accumulation=2
        )
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_five_steps_of_every_schedule_equal_those_of_one_process(size: int) -> None:
    """Results are bitwise identical except for tied parameters, whose gradients are summed over micro-batches first and
    then over uses.
    """
    of_ranks = launch(all_of_them, size, device="cpu", threads=1, echo=False, timeout=300)
    seen: dict[str, set[str]] = {}
    for far in of_ranks:
        for arm, distances in far.items():
            seen.setdefault(arm, set()).update(distances)
            for name, distance in distances.items():
                close = 1e-6 if arm.startswith("gpt") or name.startswith("mean") else 0.0
                assert distance <= close, (arm, name, distance)
    for arm, names in seen.items():  # each parameter is on some rank
        model = gpt() if arm.startswith("gpt") else toy()
        assert names >= {name for name, _ in model.named_parameters()}, arm


# -------------------------------------------------------------------------------------------- beside torch's own


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)))


# That without bubbles has no table of ours: it cuts each backward in two. Its gradients are those of any other.
TORCHS = [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble]


def _sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def beside_torch(world: World) -> dict[str, tuple[float, bool]]:
    """Return the difference from torch's gradients, and whether torch has the same order if it has a table."""
    far = {}
    draw = torch.Generator().manual_seed(7)
    x, y = torch.randn(16, 6, generator=draw), torch.randn(16, 6, generator=draw)
    for made, (schedule, per_rank) in zip(TORCHS, [*SCHEDULES, SCHEDULES[-1]], strict=True):
        config = PipelineConfig(ranks=world.size, schedule=schedule, micro_batches=8, per_rank=per_rank)
        ours, theirs = _plain(), _plain()
        pipeline = Pipeline(ours, world, lambda model, b: (_sum_of_squares(model(b[0]), b[1]), 1), config)
        pipeline.backward(list(zip(x.chunk(8), y.chunk(8), strict=True)))
        parts = split_into_stages(theirs, even_splits(theirs, config.stages))
        own = [
            PipelineStage(part, number, config.stages, world.device)
            for number, part in enumerate(parts)
            if number % world.size == world.rank
        ]
        options = {"n_microbatches": 8, "loss_fn": _sum_of_squares, "scale_grads": False}
        torchs = made(own[0] if per_rank == 1 else own, **options)
        if world.rank == world.size - 1:
            torchs.step(target=y, losses=[])
        elif world.rank == 0:
            torchs.step(x)
        else:
            torchs.step()
        names = dict(theirs.named_parameters())
        distances = [float((p.grad - names[name].grad / 8).abs().max()) for name, p in pipeline.named.items()]
        same = True
        if made is ScheduleInterleaved1F1B:
            order = [each for each in torchs.pipeline_order[world.rank] if each is not None]
            row = table_of(config)[world.rank]
            same = [(a.kind, a.stage, a.micro_batch) for a in row] == [
                ("F" if each.computation_type.name == "FORWARD" else "B", each.stage_index, each.microbatch_index)
                for each in order
            ]
        far[made.__name__] = max(distances), same
    return far


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_equal_those_of_torchs_pipelining(size: int) -> None:
    for far in launch(beside_torch, size, device="cpu", threads=1, echo=False, timeout=300):
        for schedule, (distance, same_order) in far.items():
            assert distance < 1e-6, (schedule, distance)
            assert same_order, f"{schedule}: another order than torch's"


# --------------------------------------------------------------------------------- several pipelines; what is kept


class _Held:
    """A counter of tensors that autograd keeps for the backward pass, with its peak."""

    now = most = made = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        _Held.now, _Held.made = _Held.now + 1, _Held.made + 1
        _Held.most = max(_Held.most, _Held.now)

    def __del__(self) -> None:
        _Held.now -= 1


def two_by_two(world: World) -> dict[str, Any]:
    config = PipelineConfig(ranks=2, schedule="1f1b", micro_batches=3)
    found: dict[str, Any] = {}
    for name, make, loss, batches_of in [("toy", toy, squares, ragged), ("gpt", gpt, next_token_loss, tokens)]:
        one, batches = make(), batches_of(0)
        totals = DDPStrategy(one, World(), loss, accumulation=6).backward(batches)
        pipeline = Pipeline(make(), world, loss, config)
        assert pipeline.mesh == [[0, 1], [2, 3]]
        got = pipeline.backward(batches[3 * pipeline.number :][:3], stop_flags=1.0)
        assert got.stop_flags == world.size
        assert got.means() == pytest.approx(totals.means())
        there = {each: p.grad for each, p in one.named_parameters()}
        found[name] = {
            each: float((p.grad - there[each]).abs().max()) if p.grad is not None else there[each]
            for each, p in pipeline.named.items()
        }
    return found


def kept_and_drawn(world: World) -> tuple[list[int], dict[str, dict[str, torch.Tensor]]]:
    """Return the peak number of micro-batches that autograd kept for GPipe and 1F1B, and gradients with dropout."""
    measured, drawn = [], {}
    for schedule in ("gpipe", "1f1b"):
        config = PipelineConfig(ranks=2, schedule=schedule, micro_batches=MICRO_BATCHES)
        pipeline = Pipeline(_plain(), world, lambda model, b: (_sum_of_squares(model(b), b), 1), config)
        _Held.now = _Held.most = _Held.made = 0
        with saved_tensors_hooks(_Held, lambda held: held.tensor):
            pipeline.backward([torch.ones(2, 6)] * MICRO_BATCHES)
        assert _Held.now == 0
        measured.append(_Held.most * MICRO_BATCHES // _Held.made)
        torch.manual_seed(world.rank)
        wet = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        pipeline = Pipeline(wet, world, squares, config.model_copy(update={"cuts": ("2",)}), seed=3)
        pipeline.backward(ragged(0))
        drawn[schedule] = {name: p.grad for name, p in pipeline.named.items()}
    return measured, drawn


def test_two_pipelines_of_two_equal_one_process_on_all_micro_batches() -> None:
    for far in launch(two_by_two, 4, device="cpu", threads=1, echo=False, timeout=300):
        for name, distances in far.items():
            for parameter, distance in distances.items():  # None is one that is frozen, or that nobody uses
                assert distance is None or distance < 1e-6, (name, parameter, distance)


def test_saved_activations_match_the_table_and_dropout_that_of_one_rank() -> None:
    of_ranks = launch(kept_and_drawn, 2, device="cpu", threads=1, echo=False, timeout=300)
    for rank, (measured, _) in enumerate(of_ranks):
        assert measured == [peaks(table(2, MICRO_BATCHES))[rank] for table in (gpipe, one_f_one_b)]
    torch.manual_seed(0)  # like rank 0, whose weights are used
    wet = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    stages = dict(enumerate(split_into_stages(wet, ["2"])))
    runner = StageRunner(interleaved(1, MICRO_BATCHES, 2), stages, squares, seed=3)
    counted = sum(float(part["loss"][1]) for part in runner.run(ragged(0)))
    expected = {name: p.grad / counted for name, p in wet.named_parameters()}
    for schedule in ("gpipe", "1f1b"):
        got = {name: g for _, drawn in of_ranks for name, g in drawn[schedule].items()}
        assert set(got) == set(expected)
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, expected[name], **CLOSE)


# ------------------------------------------------------------------------------------------------ cutting, refusing


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.data())
def test_stages_are_balanced_optimally(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    begins = balance(costs, stages)
    assert len(begins) == stages - 1
    assert [0, *begins] == sorted({0, *begins})  # no stage is empty

    def dearest(cuts: Sequence[int]) -> int:
        ends = [*cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip([0, *cuts], ends, strict=True))

    def every(count: int, after: int) -> Any:
        if count == 0:
            yield []
        for first in range(after, len(costs) - count + 1) if count else ():
            yield from ([first, *rest] for rest in every(count - 1, first + 1))

    assert dearest(begins) == min(map(dearest, every(stages - 1, 1)))


def test_the_predicted_communication_excludes_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    config = PipelineConfig(micro_batches=2, cuts=("1",)).on(2)
    sent = []
    for trained in (True, False):
        model[1].requires_grad_(trained)
        costs = stage_costs(model, output_squares, torch.ones(3, 4), config)
        sent.append([(cost.parameters, cost.sent) for cost in rank_costs(costs, table_of(config), copies=2)])
    messages = 2 * 3 * 4 * 4  # two micro-batches of three rows of four float32 numbers
    assert sent == [[(16, messages + 4 * 16)] * 2, [(16, messages + 4 * 16), (16, messages)]]


def test_the_chain_of_the_gpt_equals_its_forward_pass() -> None:
    inputs = torch.randint(0, 64, (2, 8))
    for recompute in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=2, heads=2, width=16, context=8, vocab=64, recompute=recompute)
        x = inputs
        for module in chain_of(model).values():
            x = module(x)
        assert torch.equal(x, model(inputs))
        assert {id(p) for m in chain_of(model).values() for p in m.parameters()} == {id(p) for p in model.parameters()}
        x.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "world_size", "said"),
    [
        (["ranks=9", "micro_batches=9"], 9, "9 stages require at least 9 modules, got 8: 0, 1, 2, 3, 4, 5, 6, 7"),
        (["ranks=2", "cuts=[blocks]"], 2, "a stage must begin at a module of the model, got 'blocks'"),
        (["ranks=3", "cuts=['4', '4']"], 3, "than the previous stage, got '4'"),
        (["ranks=3", "cuts=['4', '2']"], 3, "than the previous stage, got '2'"),
        (["ranks=2", "cuts=['0']"], 2, "than the previous stage, got '0'"),
        (["ranks=2", "cuts=['2', '4']"], 2, "'cuts' must name 1 modules for 2 stages"),
        (["ranks=2"], 3, r"a multiple of the number of ranks per pipeline \(2\), got 3. Use nprocs=2"),
        (["ranks=4", "micro_batches=3"], 4, r"at least 4 micro-batches \(one per rank\), got 3"),
        (["ranks=2", "schedule=interleaved"], 2, "at least 2 stages per rank, got 1"),
    ],
)
def test_an_impossible_pipeline_is_reported_in_one_line_before_start(
    arguments: list[str], world_size: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("'[", "'\\[")) as error:
        check_pipeline(toy(), from_arguments(PipelineConfig, arguments), world_size)
    assert "\n" not in str(error.value)


class Scaled(nn.Module):
    """A chain of two layers, with a buffer and a frozen layer that no stage contains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.other = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 5.0))

    def chain(self) -> dict[str, nn.Module]:
        return {"first": self.first, "second": self.second}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Counting(nn.Module):
    """A layer that replaces its buffer in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count = self.count + 1
        return x


def output_squares(model: Any, batch: Any) -> tuple[Any, ...]:
    return model(batch).square().sum(), len(batch)


class Length:
    """An object that affects the shapes of activations, and whose text is the same for all values."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __repr__(self) -> str:
        return "Length"


def start_of_rows(model: Any, batch: Any) -> tuple[Any, ...]:
    tokens, length = batch
    end = length.length if isinstance(length, Length) else len(length) if isinstance(length, str) else length[0]
    return output_squares(model, tokens[:, :end])


def unusual(world: World) -> dict[str, Any]:
    """Train one step of each model, and return what a checkpoint and an evaluation would contain."""
    found: dict[str, Any] = {}
    counting = nn.Sequential(nn.Linear(3, 3), Counting(), nn.Linear(3, 2), Counting())
    for model in (Scaled(), counting):
        strategy = PipelineStrategy(model, world, output_squares, PipelineConfig(micro_batches=2))
        optimizer = strategy.setup_optimizer(torch.optim.Adagrad(model.parameters()))
        strategy.backward([torch.ones(2, 3)])
        optimizer.step()
        components = strategy.checkpoint_components(optimizer)
        with strategy.full_parameters() as full:
            evaluated = {name: tensor.clone() for name, tensor in full.named_buffers()}
        found[type(model).__name__] = {
            "model": {name: tensor.clone() for name, tensor in components["model"][0].state_dict().items()},
            "optimizer": set(components["optimizer"][0].state_dict()),
            "buffers": evaluated,
        }
    embedding = nn.Sequential(nn.Flatten(), nn.Embedding(5, 2))
    pipeline = Pipeline(embedding, world, output_squares, PipelineConfig(micro_batches=2, cuts=("1",)))
    tokens = torch.tensor([[1, 2], [3, 4]])
    found["dtypes"] = [pipeline.backward([tokens.to(kind)] * 2).means() for kind in (torch.int64, torch.int32)]
    pipeline = Pipeline(embedding, world, start_of_rows, PipelineConfig(micro_batches=2, cuts=("1",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "_MOST_KEYS", 2)
        found["lengths"] = [
            [pipeline.backward([(tokens, make(length))] * 2).means() for length in (1, 2, 1, 2, 1, 2)]
            for make in (Length, lambda length: "ab"[:length], lambda length: np.array([length]))
        ]
        for number in range(18):
            pipeline.backward([(tokens, f"{number // 2}.")] * 2)
        found["keys"] = len(pipeline.runner._seen)
    convolutions = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strategy = PipelineStrategy(convolutions, world, output_squares, PipelineConfig(micro_batches=2))
    initial = copy.deepcopy(convolutions.state_dict())
    strategy.setup_optimizer(torch.optim.SGD(convolutions.parameters(), lr=0.1))
    with strategy.full_parameters() as full:
        found["channels_last"] = initial, copy.deepcopy(full.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError), strategy.full_parameters():
            pass
    found["elements"] = sum(parameter.numel() for parameter in convolutions.parameters())
    return found


@cache
def unusual_ranks() -> list[dict[str, Any]]:
    return launch(unusual, 2, device="cpu", threads=1, echo=False, timeout=300)


def test_tensors_outside_the_chain_stay_on_every_rank_and_are_saved_once() -> None:
    first, second = (rank["Scaled"] for rank in unusual_ranks())
    assert set(first["model"]) == {"first.weight", "first.bias", "scale", "other.weight", "other.bias"}
    assert set(second["model"]) == {"second.weight", "second.bias"}
    assert first["model"]["scale"].tolist() == first["buffers"]["scale"].tolist() == [5.0, 5.0]
    assert second["buffers"]["scale"].tolist() == [5.0, 5.0]


def test_buffers_that_a_forward_pass_replaces_are_saved_and_evaluated() -> None:
    saved: dict[str, torch.Tensor] = {}
    for rank in unusual_ranks():
        saved |= rank["Sequential"]["model"]
        assert rank["Sequential"]["buffers"] == {"1.count": 2, "3.count": 2}
    assert saved["1.count"] == saved["3.count"] == 2


def test_gathered_weights_do_not_depend_on_their_memory_format() -> None:
    for rank in unusual_ranks():
        initial, gathered = rank["channels_last"]
        assert all(torch.equal(gathered[name], weight) for name, weight in initial.items())


def test_a_failed_gather_keeps_only_the_weights_of_own_stages() -> None:
    assert [rank["elements"] for rank in unusual_ranks()] == [3 * 2 * 9 + 3, 2 * 3 * 9 + 2]


def test_initial_optimizer_state_of_other_stages_is_dropped() -> None:
    for rank in unusual_ranks():
        for each in (rank["Scaled"], rank["Sequential"]):
            trained = {name for name in each["model"] if name.rpartition(".")[2] in {"weight", "bias"}}
            trained -= {"other.weight", "other.bias"}
            assert each["optimizer"] == {f"{name}.{key}" for name in trained for key in ("sum", "step")}


def test_ranks_learn_the_new_dtype_of_a_batch() -> None:
    for rank in unusual_ranks():
        assert rank["dtypes"][0] == rank["dtypes"][1]


def test_ranks_learn_the_shape_that_an_object_or_text_in_a_batch_causes() -> None:
    for rank in unusual_ranks():
        objects, texts, arrays = rank["lengths"]
        assert objects == texts == arrays == objects[:2] * 3
        assert objects[0] != objects[1]
        assert rank["keys"] <= 3


def test_the_loss_draws_the_same_numbers_on_the_first_and_the_last_stage() -> None:
    def denoise(model: Any, batch: Any) -> tuple[Any, ...]:
        noise = torch.randn_like(batch)
        return (model(batch + noise) - (batch + noise)).square().sum(), 1

    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3, bias=False))
    nn.init.eye_(model[1].weight)
    runner = StageRunner(interleaved(1, 2, 2), dict(enumerate(split_into_stages(model, ["1"]))), denoise, seed=0)
    assert [float(part["loss"][0]) for part in runner.run([torch.ones(2, 3)] * 2)] == pytest.approx([0, 0], abs=1e-9)


def assert_two_stages_compute_the_gradients(model: nn.Sequential, second: str) -> None:
    """Compare the gradients of two stages, of which the second begins at module `second`, with those of the model."""
    runner = StageRunner(interleaved(1, 1, 2), dict(enumerate(split_into_stages(model, [second]))), output_squares)
    runner.run([torch.ones(2, 3)])
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    output_squares(model, torch.ones(2, 3))[0].backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, **CLOSE)


def test_a_module_that_occurs_twice_is_called_twice() -> None:
    torch.manual_seed(0)
    relu, layer = nn.ReLU(), nn.Linear(3, 3)
    model = nn.Sequential(layer, relu, nn.Linear(3, 3), relu, layer, nn.Linear(3, 2))
    assert list(chain_of(model).values()) == list(model)
    assert_two_stages_compute_the_gradients(model, "2")


def test_a_stage_may_change_its_input_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    assert_two_stages_compute_the_gradients(model, "1")
    assert set(module_seconds(model, output_squares, torch.ones(2, 3))) == {"0", "1", "2"}


def test_a_model_that_stages_cannot_train_is_rejected() -> None:
    unfrozen, synced = Scaled(), toy()
    unfrozen.other.requires_grad_()
    synced.append(synchronize_batch_norm(nn.BatchNorm1d(2), World()))
    for model, said in [
        (unfrozen, r"the chain of Scaled must contain every trainable parameter, .* 'other.weight'. Return its"),
        (synced, "'8' is a SyncBatchNorm, which synchronizes all ranks, but the ranks of a pipeline run different"),
    ]:
        with pytest.raises(ConfigError, match=said):
            check_pipeline(model, PipelineConfig(), 2)


class Skipping(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_a_model_without_a_chain_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Extra cannot be split into stages. It must be an nn.Sequential"):
        check_pipeline(Extra(2), PipelineConfig(), 2)
    with pytest.raises(ConfigError, match="Skipping cannot be split into stages"):
        check_pipeline(Skipping(nn.Linear(2, 2), nn.Linear(2, 2)), PipelineConfig(), 2)


def test_a_loss_must_call_its_model_once() -> None:
    def twice(model: Any, batch: Any) -> tuple[Any, ...]:
        return model(batch).sum() + model(batch).sum(), 1

    def never(model: Any, batch: Any) -> tuple[Any, ...]:
        return batch.sum(), 1

    stages = dict(enumerate(split_into_stages(_plain(), ["4"])))
    for loss, said in [(twice, "exactly once, got 2 calls"), (never, "exactly once, but it did not call the model")]:
        runner = StageRunner(interleaved(1, 1, 2), stages, loss)
        with pytest.raises(LossError, match=said):
            runner.run([torch.ones(2, 6)])
    with pytest.raises(ValueError, match="requires 1 micro-batches, got 2"):
        runner.run([torch.ones(2, 6)] * 2)


@pytest.mark.parametrize("metrics", [["accuracy", "error"], ["accuracy"], ["error", "accuracy"]])
def test_a_loss_must_return_the_same_metrics_in_every_micro_batch(metrics: list[str]) -> None:
    def loss(model: Any, batch: Any) -> tuple[Any, ...]:
        names = ["error"] if batch.sum() > 0 else metrics
        return model(batch).sum(), 1, dict.fromkeys(names, (1, 1))

    pipeline = Pipeline(_plain(), World(), loss, PipelineConfig(ranks=1, micro_batches=2))
    with pytest.raises(LossError, match=rf"got \[loss, error\] .* and \[loss, {', '.join(metrics)}\] in this call"):
        pipeline.backward([torch.ones(2, 6), torch.zeros(2, 6)])


def nothing_counts(world: World) -> str:
    def loss(model: Any, batch: Any) -> tuple[Any, ...]:
        return model(batch).sum(), 0

    pipeline = Pipeline(_plain(), world, loss, PipelineConfig(micro_batches=2))
    with pytest.raises(ValueError, match="the mean loss is undefined"):
        pipeline.backward([torch.ones(2, 6)] * 2)
    for count in (0, 3):
        with pytest.raises(ValueError, match=rf"a multiple of 2 \('pipeline\.micro_batches'\), got {count}"):
            pipeline.backward([torch.ones(2, 6)] * count)
    dist.barrier()
    return "all ranks raised"


def test_a_step_without_counted_elements_is_rejected_on_all_ranks() -> None:
    assert launch(nothing_counts, 2, device="cpu", threads=1, echo=False, timeout=300) == ["all ranks raised"] * 2
