"""Computed costs of strategies equal values computed by hand, and are close to measurements of sleeping ranks."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_tutorial import cluster as clusters
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.benches.pipeline import SleepingLayer
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.experiments.choices import (
    Choice,
    Network,
    Work,
    as_text,
    choices_for,
    compare,
    cost,
    overlapped,
    simulated,
)
from ddp_tutorial.experiments.scaling import NETWORKS, StepModel
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.strategies import make_strategy
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------------ by hand

# 8 bytes of weights at 2 bytes a second and no latency; 3 seconds of computing for a sample, 1 forward and 2 backward.
WORK = Work(parameters=2, per_sample=3, activations=10, handed_on=4)
FOUR = Network(4, LinkModel(0, 2))


@pytest.mark.parametrize(
    ("choice", "network", "seconds"),
    [
        (Choice("ddp"), Network(1, LinkModel(0, 2)), 12.0),  # four samples on one rank, without communication
        (Choice("ddp"), FOUR, 3 + 6),  # an all-reduce of 8 bytes: 2 * 3/4 of them
        (Choice("zero1"), FOUR, 3 + 6 + 3),  # and an all-gather
        (Choice("zero2"), FOUR, 3 + 3 + 3),
        (Choice("zero3"), FOUR, 3 + 3 + 3 + 3),  # with one unit, nothing overlaps
        (Choice("zero3", copies=2), FOUR, 3 + 3 * 2 + 2),  # half of 8 bytes in a pass; over copies, 4 bytes: 2 * 1/2
        (Choice("zero3", copies=4), FOUR, 3 + 6),  # as ddp
        (Choice("local"), FOUR, 3 + 6),
        (Choice("local", round=6), FOUR, 3 + 1),
        (Choice("diloco", round=6), FOUR, 3 + 1),
        (Choice("zero2"), Network(4, LinkModel(0, 2), scatter=2), 3 + 6 + 3),
        (Choice("ddp"), Network(4, LinkModel(0.5, 2)), 9 + 3),  # 6 messages
        # a quarter of a micro-batch's 3 seconds on each stage: (4 + 3) * 0.75, and 3 messages of 4 bytes each way
        (Choice("pipeline", micro_batches=4, schedule="gpipe"), FOUR, 7 * 0.75 + 12),
        (Choice("pipeline", micro_batches=4), Network(4, LinkModel(0, 1e9)), 7 * 0.75),
        (Choice("pipeline", copies=2, micro_batches=2), Network(4, LinkModel(0, 1e9)), 3 * 1.5),
    ],
)
def test_step_times_equal_values_computed_by_hand(choice: Choice, network: Network, seconds: float) -> None:
    assert cost(choice, WORK, network, batch=4).seconds == pytest.approx(seconds, rel=1e-6)


def test_memory_and_traffic_equal_values_computed_by_hand() -> None:
    work = Work(parameters=1000, per_sample=1, activations=10, handed_on=100, units=4)

    def of(kind: Any, **options: int) -> tuple[float, float]:
        found = cost(Choice(kind, **options), work, FOUR, batch=16)
        return found.memory, found.sent

    assert of("ddp") == (16_000 + 40, 6000)  # four samples per rank
    assert of("zero1") == (8_000 + 2_000 + 40, 9000)
    assert of("zero2") == (4_000 + 3_000 + 40, 6000)
    assert of("zero3") == (4_000 + 2_000 + 40, 9000)  # two of four units are gathered at a time
    assert of("zero3", copies=2) == (8_000 + 2_000 + 40, 3 * 2000 + 2000)
    assert of("pipeline", micro_batches=4) == (4_000 + 4 * 10 * 4 / 4, 2 * 4 * 4 * 100)  # 4 samples per micro-batch
    assert of("local", round=10) == (16_000 + 40, 600)
    assert of("diloco", round=10) == (24_000 + 40, 600)


def test_overlapped_communication_adds_no_time() -> None:
    assert overlapped(1, 3, 0, 5) == 8
    # The first unit's all-reduce overlaps with the second unit's backward pass of one second.
    assert overlapped(2, 3, 0, 1) == 4
    assert overlapped(2, 3, 0, 9) == 2 + 18  # the link is the bottleneck: it starts with the first gradient
    assert overlapped(3, 9, 1, 0) == 9 + 2  # only the first gather of a pass is exposed


@given(st.integers(1, 20), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_overlap_is_between_no_overlap_and_the_longer_of_the_two_parts(
    units: int, computing: float, gather: float, reduce: float
) -> None:
    sending = units * (2 * gather + reduce)
    assert max(computing, sending) <= overlapped(units, computing, gather, reduce) * (1 + 1e-9) + 1e-12
    assert overlapped(units, computing, gather, reduce) <= (computing + sending) * (1 + 1e-9) + 1e-12


def test_flows_that_leave_a_machine_share_its_bandwidth() -> None:
    inside, between = LinkModel(0, 100), LinkModel(0, 8)
    network = Network(64, between, per_machine=8, inside=inside)
    assert network.row(8) == inside
    assert network.row(16) == network.row(64) == between
    assert network.column(Mesh(8, 8)) == LinkModel(0, 1)
    assert network.column(Mesh(32, 2)) == LinkModel(0, 4)
    assert network.column(Mesh(64, 1)) == between
    assert Network(8, between, 8, inside).column(Mesh(4, 2)) == inside


def test_strategies_on_64_gpus_differ_by_memory_network_and_traffic() -> None:
    work = Work(parameters=7e9, per_sample=0.5, activations=4e9, handed_on=3e7, units=32)
    rows = {}
    for name in ("10 Gbit/s Ethernet", "100 Gbit/s, remote memory access"):
        network = Network(64, NETWORKS[name], per_machine=8, inside=NETWORKS["NVLink class"])
        rows[name] = {row["strategy"]: row for row in compare(work, network, batch=512, memory=80e9)}
    slow, fast = rows.values()
    assert {name for name, row in slow.items() if not row["fits"]} >= {"ddp", "local SGD, H=16", "DiLoCo, H=100"}
    assert slow["zero3"]["memory"] < slow["zero3 8 x 8"]["memory"] < slow["ddp"]["memory"]
    assert slow["zero3 8 x 8"]["seconds"] < slow["zero3"]["seconds"]  # little data leaves a machine
    assert slow["DiLoCo, H=100"]["efficiency"] > 0.9 > slow["ddp"]["efficiency"]
    assert all(fast[name]["seconds"] <= slow[name]["seconds"] for name in slow)
    assert all(0 < row["efficiency"] <= 1 for each in rows.values() for row in each.values())
    text = as_text(list(slow.values()))
    assert text.startswith("computed")
    assert text.count("does not fit") == sum(not row["fits"] for row in slow.values())


def test_choices_fit_the_ranks_and_impossible_choices_are_rejected() -> None:
    for ranks, per_machine in [(1, 1), (2, 1), (6, 4), (64, 8), (7, 8)]:
        network = Network(ranks, LinkModel(0, 1), per_machine)
        for choice in choices_for(network, units=5):
            assert cost(choice, WORK, network, batch=64).seconds > 0
    with pytest.raises(ValueError, match="cannot run on 4 ranks"):
        cost(Choice("zero3", copies=3), WORK, FOUR, 4)
    with pytest.raises(ValueError, match="units at least 1"):
        Work(parameters=1, per_sample=1, units=0)
    step = StepModel(fixed=1, per_sample=2, nbytes=40, link=LinkModel(0, 1))
    assert Work.of(step, units=3) == Work(parameters=10, per_sample=2, fixed=1, units=3, overlap=0)


def test_partial_overlap_is_between_full_and_no_overlap() -> None:
    def seconds(kind: Any, overlap: float) -> float:
        work = Work(parameters=2, per_sample=3, units=2, overlap=overlap)
        return cost(Choice(kind), work, FOUR, batch=4).seconds

    assert seconds("ddp", 0) == 3 + 6
    # The first unit's all-reduce starts one second before the end of the backward pass.
    assert seconds("ddp", 1) == 2 + 6
    assert seconds("ddp", 0.25) == 8.75
    for kind in ("ddp", "zero1", "zero2", "zero3"):
        assert seconds(kind, 0.25) == pytest.approx(0.75 * seconds(kind, 0) + 0.25 * seconds(kind, 1))
    with pytest.raises(ValueError, match="overlap must be between 0 and 1"):
        Work(parameters=2, per_sample=3, overlap=1.5)


FITTED = StepModel(fixed=0.004, per_sample=0.004, nbytes=3.3e6, link=LinkModel(1e-4, 1e9), buckets=4, overlap=0.6)
KINDS: list[Any] = ["ddp", "zero1", "zero2", "zero3", "pipeline", "local", "diloco"]


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_fitted_model_one_rank_is_plain_and_efficiency_is_at_most_1(kind: Any) -> None:
    assert simulated(kind, FITTED, 1, 32).seconds == pytest.approx(FITTED.seconds(32))
    for ranks in (2, 8, 64):
        for samples in (1, 32):
            weak = simulated(kind, FITTED, ranks, samples * ranks, handed_on=1e4).seconds
            assert weak > FITTED.seconds(samples) * (1 - 1e-9), (ranks, samples)
            strong = simulated(kind, FITTED, ranks, samples, handed_on=1e4).seconds
            assert ranks * strong > FITTED.seconds(samples) * (1 - 1e-9), (ranks, samples)


def test_data_parallelism_agrees_with_the_fitted_model() -> None:
    """The last bucket is an exception, because no computation can hide it."""
    for network in NETWORKS.values():
        step = FITTED.on(network)
        for ranks in (2, 64, 1024):
            assert simulated("ddp", step, ranks, 32 * ranks).seconds == pytest.approx(
                step.seconds(32 * ranks, ranks), rel=0.15
            )


def test_a_pipeline_has_one_micro_batch_per_sample_and_one_per_stage() -> None:
    def slots(batch: int) -> float:  # of one sample on one of two stages
        step = StepModel(fixed=0, per_sample=1, nbytes=8, link=LinkModel(0, 1e12), buckets=2)
        return 2 * simulated("pipeline", step, 2, batch).seconds

    assert slots(2) == pytest.approx(2 + 1)
    assert slots(8) == slots(1) + 6 == pytest.approx(8 + 1)
    assert slots(16) == pytest.approx(2 * (8 + 1))
    with pytest.raises(ValueError, match="'pipeline' cannot run on 3 ranks"):
        simulated("pipeline", FITTED, 3, 32)


# --------------------------------------------------------------------------------------------------- and measured

UNITS, WIDTH, SAMPLES, RATE = 4, 256, 4, "200mbit"
FORWARD, BACKWARD = 0.02, 0.04  # seconds that a unit sleeps for any computation
PARTS = 4  # micro-batches of a pipeline, and its stages sleep for a quarter as long


def sleepy(parts: int) -> nn.Sequential:
    """Return units of weights that sleep instead of computing."""
    torch.manual_seed(0)
    units = []
    for _ in range(UNITS):
        sleeper = SleepingLayer(FORWARD / parts, BACKWARD / parts)
        sleeper.weight = nn.Parameter(torch.zeros(WIDTH))
        units.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), sleeper))
    return nn.Sequential(*units)


def squares(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).square().sum(), len(x)


CASES: dict[str, tuple[dict[str, Any], Choice]] = {
    "ddp": ({"ddp": {"variant": "bucket", "bucket_cap_mb": 0.27}}, Choice("ddp")),
    "zero1": ({"ddp": {"variant": "bucket", "bucket_cap_mb": 0.27}}, Choice("zero1")),
    "zero2": ({}, Choice("zero2")),
    "zero3": ({}, Choice("zero3")),
    "hybrid": ({"strategy": "zero3", "mesh": {"replicate": 2}}, Choice("zero3", copies=2)),
    "pipeline": ({"pipeline": {"micro_batches": PARTS}}, Choice("pipeline", micro_batches=PARTS)),
    "pipelines": (
        {"strategy": "pipeline", "mesh": {"replicate": 2}, "pipeline": {"micro_batches": PARTS}},
        Choice("pipeline", copies=2, micro_batches=PARTS),
    ),
}


def measured(world: World) -> dict[str, float]:
    """Return the seconds of a step of each case and of an empty all-reduce: the median of three after a warm-up."""
    calls: dict[str, Callable[[], object]] = {}
    for name, (values, choice) in CASES.items():
        pipelined = choice.kind == "pipeline"
        model = sleepy(PARTS if pipelined else 1)
        config = TrainConfig.model_validate({"strategy": name} | values)
        strategy: Any = make_strategy(config, model, world, squares, Precision(world=world))
        optimizer = strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        batches = [torch.ones(SAMPLES, WIDTH)] * strategy.micro_batches_per_rank

        def step(strategy: Any = strategy, optimizer: Any = optimizer, batches: Any = batches) -> None:
            strategy.backward(batches)
            optimizer.step()
            optimizer.zero_grad()

        calls[name] = step
    little = torch.zeros(1)
    calls["empty"] = lambda: dist.all_reduce(little)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(6):
        for name, call in calls.items():
            dist.barrier()
            start = time.monotonic()
            call()
            seconds = torch.tensor(time.monotonic() - start)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            taken[name].append(float(seconds))
    return {name: min(each[1:]) for name, each in taken.items()}  # a busy machine can only increase a time


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := clusters.unsupported_reason():
        pytest.skip(reason)
    with Cluster(4, RATE, folder=tmp_path_factory.mktemp("shared")) as four:
        yield four


def test_ranks_that_sleep_take_the_predicted_time_on_a_slow_network(slow: Cluster) -> None:
    """The network has four hosts at 200 Mbit/s. The prediction uses its rate and the time of an empty all-reduce."""
    found = slow.launch(measured, timeout=120)[0]
    network = Network(4, LinkModel(found["empty"] / 6, slow.bytes_per_second), scatter=2)
    work = Work(UNITS * WIDTH * (WIDTH + 2), per_sample=UNITS * (FORWARD + BACKWARD) / SAMPLES, units=UNITS)
    for name, (_, choice) in CASES.items():
        each = work
        if choice.kind == "pipeline":
            each = Work(work.parameters, work.per_sample / PARTS, handed_on=4 * WIDTH, units=UNITS)
        batch = SAMPLES * (PARTS * choice.copies if choice.kind == "pipeline" else 4)
        told = cost(choice, each, network, batch).seconds
        print(f"{name:10} {found[name]:.3f} s measured, {told:.3f} s computed, {found[name] / told:.2f}")
        assert 0.75 < found[name] / told < 4, (name, found[name], told)
