"""The table of published training runs is consistent with itself and with the figures of its sources."""

import re
import statistics

import pytest

from ddp_tutorial.planning.comparison import predict
from ddp_tutorial.planning.published import CONTEXT_PARALLEL_RUNS, PUBLISHED_RUNS, PublishedRun

RUNS = PUBLISHED_RUNS + CONTEXT_PARALLEL_RUNS
PEAK = {"A100-40": 312e12, "A100-80": 312e12, "H100": 989e12}
# Sources whose MFU counts something else than 6 FLOPs per weight and 12 for the attention scores.
OTHER_FLOPS = {
    "Llama 3 8B, 64 A100": "it counts the embedding, which is only looked up",
    "Nemotron-4 340B, 1,024 H100": "its formula ignores that only 8 of 96 heads have keys and values",
}


def mfu(run: PublishedRun) -> float:
    """Return the model FLOPs utilization in percent, by the conventions of PaLM."""
    looked_up = 0 if run.tied else run.vocabulary * run.width
    flops = 6 * (run.parameters - looked_up) + 12 * run.layers * run.width * run.sequence
    return 100 * run.tokens_per_second * flops / PEAK[run.device]


def test_table_covers_many_kinds_of_runs() -> None:
    """At least twelve runs, from several groups, on 8 to more than 10,000 devices, with every kind of plan."""
    assert len(PUBLISHED_RUNS) >= 12
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert len({run.software for run in PUBLISHED_RUNS}) >= 6
    assert min(run.devices for run in PUBLISHED_RUNS) == 8
    assert max(run.devices for run in PUBLISHED_RUNS) >= 10_000
    assert {run.zero for run in PUBLISHED_RUNS} == {0, 1, 2, 3}
    assert {run.tensor > 1 for run in PUBLISHED_RUNS} == {run.pipeline > 1 for run in PUBLISHED_RUNS} == {True, False}
    assert all(run.context == 1 for run in PUBLISHED_RUNS)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_run_names_its_source(run: PublishedRun) -> None:
    """Each run has a URL and a place in the source, and its name contains the number of devices."""
    assert re.fullmatch(r"https://\S+", run.source)
    assert run.where
    assert f"{run.devices:,}" in run.name or str(run.devices) in run.name
    assert run.micro_batches >= 1


@pytest.mark.parametrize("run", [run for run in RUNS if run.mfu], ids=lambda run: run.name)
def test_published_throughput_agrees_with_published_mfu(run: PublishedRun) -> None:
    """The throughput, the shape and the published MFU agree, which a wrong shape or row would not."""
    assert run.mfu is not None
    if run.name in OTHER_FLOPS:
        assert run.mfu - mfu(run) > 1.0
    else:
        assert mfu(run) == pytest.approx(run.mfu, abs=0.7)


def test_impossible_plan_is_rejected() -> None:
    """Degrees that do not multiply to the number of devices raise an error."""
    fields = {name: getattr(PUBLISHED_RUNS[0], name) for name in PublishedRun.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"must equal 'devices' \(8\), got 16"):
        PublishedRun(**(fields | {"tensor": 2}))
    with pytest.raises(ValueError, match="batch_tokens must be a multiple of"):
        PublishedRun(**(fields | {"batch_tokens": 1000}))


def test_median_error_of_the_predictions_is_at_most_15_percent() -> None:
    """The model predicts the throughput of all runs with the same constants."""
    errors = [predict(run).tokens_per_second_per_device / run.tokens_per_second - 1 for run in PUBLISHED_RUNS]
    assert statistics.median(map(abs, errors)) <= 0.15
    assert sum(abs(error) <= 0.15 for error in errors) >= 12


@pytest.mark.parametrize("run", PUBLISHED_RUNS, ids=lambda run: run.name)
def test_prediction_is_of_the_published_plan(run: PublishedRun) -> None:
    """The estimate has the batch, the devices and the parameters of the run."""
    estimate = predict(run)
    assert estimate.tokens == run.batch_tokens
    assert estimate.plan.devices == run.devices
    assert estimate.plan.data == run.data


def test_context_parallel_run_is_rejected() -> None:
    """The model does not describe context parallelism."""
    with pytest.raises(ValueError, match="context parallelism is not modeled, but"):
        predict(CONTEXT_PARALLEL_RUNS[0])
