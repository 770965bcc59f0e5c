"""The model of a training step: exact counts, formulas by hand, consistency, and the errors on published runs."""

import json
import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import call
from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.planning.choice import as_text, choose, run_cost
from ddp_tutorial.planning.communication import Group, all_reduce_seconds, group_of, pass_seconds
from ddp_tutorial.planning.comparison import as_text as comparison_as_text
from ddp_tutorial.planning.comparison import (
    comparison,
    fit,
    median_error,
    model_of,
)
from ddp_tutorial.planning.hardware import DEVICES, NETWORKS, REACHED, Network
from ddp_tutorial.planning.memory import memory_of
from ddp_tutorial.planning.plan import Plan, Precision, Strategy
from ddp_tutorial.planning.published import PUBLISHED_RUNS
from ddp_tutorial.planning.step import (
    data_parallel,
    estimate_step,
    overlapped,
    tokens_to_hide_communication,
    traffic,
)
from ddp_tutorial.planning.transformer import MODELS, Transformer
from ddp_tutorial.zero.memory import bytes_sent

A100, H100 = DEVICES["A100-80"], DEVICES["H100"]
DGX_A100, DGX_H100 = NETWORKS["DGX A100"], NETWORKS["DGX H100"]
SMALL, LARGE = MODELS["GPT-2"], MODELS["Llama 2 7B"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

# -------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("GPT-2", 124_439_808),
        ("GPT-2 XL", 1_557_611_200),
        ("Llama 2 7B", 6_738_415_616),
        ("Llama 2 13B", 13_015_864_320),
        ("Llama 2 70B", 68_976_648_192),
        ("Llama 3.1 8B", 8_030_261_248),
        ("Llama 3.1 70B", 70_553_706_496),
        ("Llama 3.1 405B", 405_853_388_800),
    ],
)
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_flops_are_six_per_weight_and_twelve_for_attention() -> None:
    model = MODELS["Llama 2 7B"]
    weights = model.parameters - 32000 * 4096 - 65 * 4096  # without the embeddings and the norms
    assert model.flops_per_token == 6 * weights + 12 * 32 * 4096 * 4096


def test_activations_of_a_gpt_follow_korthikanti() -> None:
    h, a, s = 12288, 96, 2048
    model = Transformer("GPT-3", 96, h, a, 51200, s, dropout=True)
    for t in (1, 8):
        assert model.activation_bytes("none", t, fused=False) == (34 * h + 5 * a * s) / t
        assert model.activation_bytes("selective", t, fused=False) == 34 * h / t
        assert model.activation_bytes("none", t) == 34 * h / t
        assert model.activation_bytes("full", t) == 2 * h / t


def test_published_models_have_the_published_number_of_parameters() -> None:
    for run in PUBLISHED_RUNS:
        assert model_of(run).parameters == pytest.approx(run.parameters, rel=1e-3)


# ------------------------------------------------------------------------------------------------------- communication


def test_groups_are_placed_on_nodes() -> None:
    assert group_of(64, 1, 8) == Group(64, nodes=8)
    assert group_of(4, 1, 8) == Group(4, nodes=1)
    assert group_of(12, 1, 8) == Group(12, nodes=2)
    assert group_of(16, 8, 8) == Group(16, nodes=16)  # data parallelism beside tensor parallelism over a node
    assert group_of(16, 2, 8) == Group(16, nodes=4)


def test_time_of_a_ring_by_hand() -> None:
    network = Network("by hand", 4, LinkModel(1, 100), LinkModel(10, 10))
    assert pass_seconds(Group(1, 1), network, 80) == 0
    assert pass_seconds(Group(4, 1), network, 80) == 3 * 1 + 60 / (0.8 * 100)
    # two nodes: 8 devices, 70 bytes at 4 cards of 10 bytes per second; 7 steps, of which one is between nodes
    assert pass_seconds(Group(8, 2), network, 80) == 6 * 1 + 10 + 70 / (0.8 * 40)
    # an all-reduce over 2 nodes uses a tree: 2 (3 + 10) seconds of latency
    assert all_reduce_seconds(Group(8, 2), network, 80) == pytest.approx(2 * 13 + 2 * 70 / (0.8 * 40))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "hsdp"])
def test_traffic_equals_the_formula_of_zero(strategy: Strategy) -> None:
    plan = Plan(strategy, 64, accumulation=3, precision=Precision(4, 4, 8))
    copies = 8 if strategy == "hsdp" else 1
    expected = bytes_sent("zero3" if strategy == "hsdp" else strategy, SMALL.parameters, 64 // copies, 3, copies)
    assert sum(traffic(SMALL, plan, DGX_A100)) == pytest.approx(expected)


def _simulated_seconds(units: int, computing: float, gather: float, reduce: float) -> float:
    """Return the seconds of a forward and a backward pass, simulated unit by unit.

    The link transfers one unit at a time. A unit is gathered before its forward pass and again before its backward
    pass, each time while the previous unit computes. Its gradient is reduced after its backward pass.
    """
    now = link = 0.0
    for part, reduced in ((1 / 3, 0.0), (2 / 3, reduce)):
        link = max(link, now) + gather
        arrived = link
        for number in range(units):
            start = max(now, arrived)
            if number + 1 < units and gather:
                link = max(link, start) + gather
                arrived = link
            now = start + part * computing / units
            if reduced:
                link = max(link, now) + reduced
    return max(now, link)


@settings(max_examples=50)
@given(
    units=st.integers(1, 40),
    computing=st.floats(0.01, 10),
    gather=st.floats(0, 1),
    reduce=st.floats(0, 1),
)
def test_overlap_equals_the_simulation_of_units(units: int, computing: float, gather: float, reduce: float) -> None:
    """A pass with only one kind of communication has a closed form."""
    forward, backward = computing / 3, 2 * computing / 3
    simulated = _simulated_seconds(units, computing, 0, reduce)
    assert simulated == pytest.approx(forward + overlapped(backward, units * reduce, units))
    both = _simulated_seconds(units, computing, gather, reduce)
    closed = overlapped(forward, units * gather, units) + overlapped(backward, units * (gather + reduce), units)
    assert both <= closed * (1 + 1e-9)  # the simulation also prefetches across the two passes
    assert both >= computing * (1 - 1e-9)


# ----------------------------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_one_device_every_strategy_equals_ddp(strategy: Strategy) -> None:
    alone, sharded = (estimate_step(SMALL, Plan(name, 1), A100, DGX_A100) for name in ("ddp", strategy))
    assert sharded.memory == alone.memory
    assert sharded.seconds == alone.seconds
    assert alone.communication == alone.bytes_inside == alone.bytes_across == 0


def test_mixed_precision_takes_16_bytes_per_parameter() -> None:
    plan = Plan("ddp", 8)
    memory = memory_of(LARGE, plan, 8)
    assert memory.weights + memory.gradients + memory.optimizer == 16 * LARGE.parameters
    sharded = memory_of(LARGE, replace(plan, strategy="zero3"), 8)
    assert sharded.weights + sharded.gradients + sharded.optimizer == 2 * LARGE.parameters


def test_each_zero_stage_needs_less_memory() -> None:
    plans = [Plan(strategy, 64) for strategy in ("ddp", "zero1", "zero2", "zero3")]
    totals = [estimate_step(LARGE, plan, H100, DGX_H100).memory.total for plan in plans]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


def test_full_recomputation_costs_a_third_of_the_computation() -> None:
    without, full = (
        estimate_step(LARGE, Plan("ddp", 1, recomputation=name), A100, DGX_A100) for name in ("none", "full")
    )
    assert full.compute == pytest.approx(without.compute * 4 / 3, rel=0.05)
    assert full.memory.activations < without.memory.activations / 5
    assert full.hfu / full.mfu == pytest.approx(4 / 3, rel=0.05)
    assert without.hfu == without.mfu


def test_bubble_of_a_pipeline() -> None:
    plan = Plan("ddp", 8, accumulation=16, pipeline=8)
    plain, interleaved = (estimate_step(LARGE, replace(plan, interleaving=chunks), A100, DGX_A100) for chunks in (1, 4))
    assert plain.bubble == pytest.approx(plain.compute * 7 / 16)
    assert interleaved.bubble == pytest.approx(plain.bubble / 4)


def test_parts_of_a_step_sum_to_the_step_time() -> None:
    plan = Plan("zero1", 64, accumulation=8, tensor=8, pipeline=4)
    found = estimate_step(LARGE, plan, H100, DGX_H100)
    parts = (found.compute, found.tensor, found.bubble, found.exposed, found.optimizer)
    assert found.seconds == sum(parts)
    assert min(parts) > 0
    assert found.exposed <= found.communication
    assert found.tokens_per_second_per_device * 64 == pytest.approx(2 * 8 * 4096 / found.seconds)
    assert found.mfu == pytest.approx(LARGE.flops_per_token * found.tokens_per_second / 64 / H100.flops)


@given(
    strategy=st.sampled_from(STRATEGIES),
    devices=st.sampled_from([8, 16, 64, 512]),
    micro_batch=st.integers(1, 8),
    accumulation=st.integers(1, 4),
    faster=st.floats(1, 10),
)
def test_better_hardware_is_never_slower(
    strategy: Strategy, devices: int, micro_batch: int, accumulation: int, faster: float
) -> None:
    plan = Plan(strategy, devices, micro_batch, accumulation)
    before = estimate_step(LARGE, plan, A100, DGX_A100).seconds
    link = DGX_A100.across
    network = replace(DGX_A100, across=LinkModel(link.latency / faster, link.bandwidth * faster))
    device = replace(A100, flops=A100.flops * faster, memory_bandwidth=A100.memory_bandwidth * faster)
    assert estimate_step(LARGE, plan, A100, network).seconds <= before * (1 + 1e-9)
    assert estimate_step(LARGE, plan, device, DGX_A100).seconds <= before * (1 + 1e-9)
    larger = estimate_step(LARGE, replace(plan, micro_batch=micro_batch + 1), A100, DGX_A100)
    assert larger.seconds > before


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan("ddp", 64, pipeline=64), r"at most 34 \(the number of layers plus 2\)"),
        (Plan("ddp", 96, tensor=3), r"'tensor' must divide the number of heads \(32\)"),
        (Plan("hsdp", 12, shard=8), r"'shard' must divide the data-parallel degree \(12\)"),
    ],
)
def test_impossible_plans_are_rejected(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_step(LARGE, plan, A100, DGX_A100)


def test_plans_with_impossible_degrees_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"multiple of tensor x pipeline \(16\), got 8"):
        Plan("ddp", 8, tensor=8, pipeline=2)
    with pytest.raises(ValueError, match="at least 1"):
        Plan("ddp", 8, micro_batch=0)
    with pytest.raises(ValueError, match="at least 1"):
        Plan("hsdp", 64, shard=-8)
    with pytest.raises(ValueError, match="use 'zero1'"):
        Plan("hsdp", 64, pipeline=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_at_the_threshold_communication_takes_as_long_as_the_matrix_products(strategy: Strategy) -> None:
    """The threshold does not depend on the model, so any model without latency confirms it."""
    network = replace(DGX_H100, inside=LinkModel(0, 450e9), across=LinkModel(0, 50e9))
    tokens = tokens_to_hide_communication(strategy, 64, H100, network)
    data = data_parallel(LARGE, Plan(strategy, 64), network)
    assert 4 * LARGE.parameters * tokens / H100.matmul_flops == pytest.approx(data.backward + data.last)
    if strategy == "zero3":
        assert 2 * LARGE.parameters * tokens / H100.matmul_flops == pytest.approx(data.forward)
    assert tokens_to_hide_communication(strategy, 1, H100, network) == 0


def test_hybrid_sharding_needs_fewer_tokens_on_a_slow_fabric() -> None:
    network = NETWORKS["AWS p4d"]
    hsdp, zero3 = (tokens_to_hide_communication(name, 64, A100, network) for name in ("hsdp", "zero3"))
    assert hsdp < zero3


# ----------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("name", "devices"), [("Llama 3.1 8B", 8), ("Llama 3.1 70B", 1024), ("Llama 3.1 405B", 10_000)]
)
def test_choice_is_sorted_and_fits(name: str, devices: int) -> None:
    found = choose(MODELS[name], H100, DGX_H100, devices, 2**24)
    fitting = [estimate for estimate in found if estimate.fits]
    assert found[: len(fitting)] == fitting
    rates = [estimate.tokens_per_second for estimate in fitting]
    assert rates == sorted(rates, reverse=True)
    assert all(estimate.tokens == pytest.approx(2**24, rel=0.1) for estimate in found)
    assert all(estimate.plan.devices == devices for estimate in found)
    assert len(as_text(found).splitlines()) == len(found) + 1


def test_choice_needs_at_least_one_sequence_per_replica() -> None:
    with pytest.raises(ValueError, match="no plan has a global batch of about 1,024 tokens on 64 devices"):
        choose(LARGE, H100, DGX_H100, 64, 1024)


def test_cost_of_a_run() -> None:
    estimate = estimate_step(LARGE, Plan("zero3", 64), H100, DGX_H100)
    cost = run_cost(estimate, 1e12, 2.5)
    assert cost.seconds == pytest.approx(1e12 / estimate.tokens * estimate.seconds)
    assert cost.price == pytest.approx(2.5 * 64 * cost.seconds / 3600)


# ------------------------------------------------------------------------------------------------------ published runs


def test_median_error_on_published_runs_is_at_most_15_percent() -> None:
    rows = comparison()
    assert len(rows) == len(PUBLISHED_RUNS) >= 12
    assert median_error([row.error for row in rows]) <= 0.15
    assert median_error([row.left_out for row in rows]) <= 0.15
    assert all(math.isfinite(row.error) for row in rows)
    text = comparison_as_text(rows)
    assert all(run.name in text for run in PUBLISHED_RUNS)


def test_the_only_fitted_constant_is_the_best_one_for_all_runs() -> None:
    assert fit() == REACHED


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_plans_and_the_cost_of_a_run() -> None:
    done = call(
        "plan", "llama-2-7b", "sequence=2048", "--devices", "16", "--tokens", "1e11", "--price", "2", "--top", "3"
    )
    assert done.returncode == 0, done.stderr
    title, header, *rows = done.stdout.splitlines()
    assert title == "Llama 2 7B, 6,738,415,616 parameters, 16 x H100, DGX H100"
    assert header.split()[0] == "plan"
    assert len(rows) == 5
    assert all(row.endswith("yes") for row in rows[:3])
    assert rows[3].startswith("the first plan trains on 100,000,000,000 tokens in ")
    assert rows[4].startswith("at 2 per device hour, this costs ")


def test_help_lists_the_models() -> None:
    text = " ".join(call("plan", "--help").stdout.split())
    listed = text.partition("Models: ")[2].rstrip(".").split(", ")
    assert {name.replace("-", " ") for name in listed} == {name.lower().replace("-", " ") for name in MODELS}
    assert call("plan", "no-model").stderr.count(listed[-1]) == 1


def test_the_command_prints_json() -> None:
    done = call("plan", "gpt-2", "--device", "a100-40", "--network", "aws-p4d", "--tokens", "1e9", "--json")
    plans = json.loads(done.stdout)["plans"]
    assert plans[0]["memory"]["total"] < DEVICES["A100-40"].memory
    assert plans[0]["run"]["device_hours"] == pytest.approx(plans[0]["run"]["seconds"] * 8 / 3600)
    slow = json.loads(call("plan", "gpt-2", "--devices", "64", "--node-gbit", "1", "--json").stdout)["plans"]
    fast = json.loads(call("plan", "gpt-2", "--devices", "64", "--json").stdout)["plans"]
    assert min(plan["seconds"] for plan in slow) > min(plan["seconds"] for plan in fast)


def test_the_command_prints_the_comparison() -> None:
    assert call("plan", "--published").stdout.rstrip() == comparison_as_text(comparison())
    found = json.loads(call("plan", "--published", "--json").stdout)
    assert len(found["runs"]) == len(PUBLISHED_RUNS)
    assert found["median_error"] <= 0.15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: a model is required: specify one of gpt-2, "),
        (("gpt-5",), "error: the model must be one of gpt-2, "),
        (("gpt-2", "depth=3"), "error: a shape setting must be NAME=VALUE, where NAME is one of "),
        (("gpt-2", "layers=0"), "error: 'layers' must be a whole number of at least 1, got '0'"),
        (("gpt-2", "gated=3"), "error: 'gated' must be true or false, got '3'"),
        (("gpt-2", "heads=7"), "error: 'width' must be a multiple of 'heads'"),
        (("gpt-2", "--batch", "inf"), "error: '--batch' must be a finite number, got inf"),
        (("gpt-2", "--tokens", "nan"), "error: '--tokens' must be a finite number, got nan"),
        (("gpt-2", "--devices", "512", "--batch", "1024"), "error: no plan has a global batch of about 1,024 tokens"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = call("plan", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
