"""Compare predictions with published runs.

The performance model's only fitted constant is the fraction of the achievable matrix FLOP/s that training reaches
(`hardware.REACHED`). `fit` chooses this constant once for all runs, by minimizing the sum of |log(predicted MFU /
published MFU)|. `Comparison.left_out` is a run's prediction error if the fit excludes that run.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.planning.hardware import DEVICES, NETWORKS, REACHED, Network
from ddp_tutorial.planning.plan import Plan, Precision, Strategy
from ddp_tutorial.planning.published import PUBLISHED_RUNS, PublishedRun
from ddp_tutorial.planning.step import Estimate, estimate_step
from ddp_tutorial.planning.transformer import Transformer

_STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")  # by ZeRO stage
GRID = tuple(number / 100 for number in range(40, 101))  # the values of `REACHED` that `fit` tries


@dataclass(frozen=True)
class Comparison:
    """A published run and its prediction.

    Attributes:
        run: The published run.
        estimate: The prediction.
        published: The published MFU, with FLOPs counted as in `transformer`.
        left_out: The relative error of the prediction if the constant is fitted without this run.
    """

    run: PublishedRun
    estimate: Estimate
    published: float
    left_out: float

    @property
    def error(self) -> float:
        """The relative error of the predicted MFU, such as 0.1 if the prediction is 10 % too high."""
        return self.estimate.mfu / self.published - 1


def comparison(runs: Sequence[PublishedRun] = PUBLISHED_RUNS) -> list[Comparison]:
    """Compare each run with its prediction, and return the results in the order of `runs`."""
    logarithms = [_logarithms(run) for run in runs]
    left_out = [
        logarithms[number][_best([*logarithms[:number], *logarithms[number + 1 :]])] for number in range(len(runs))
    ]
    return [
        Comparison(run, predict(run), published_mfu(run), math.expm1(error))
        for run, error in zip(runs, left_out, strict=True)
    ]


def fit(runs: Sequence[PublishedRun] = PUBLISHED_RUNS) -> float:
    """Return the value of `REACHED`, chosen from `GRID`, that fits `runs` best."""
    return GRID[_best([_logarithms(run) for run in runs])]


def median_error(errors: Sequence[float]) -> float:
    """Return the median of the absolute relative errors."""
    return statistics.median(map(abs, errors))


def predict(run: PublishedRun, reached: float = REACHED) -> Estimate:
    """Return the estimate for a published run, using `reached` as the fitted constant.

    Raises:
        ValueError: If the run uses context parallelism, which the model does not support.
    """
    if run.context > 1:
        raise ValueError(f"context parallelism is not modeled, but {run.name} uses {run.context} ranks per sequence")
    device = replace(DEVICES[run.device], reached=reached)
    return estimate_step(model_of(run), plan_of(run), device, network_of(run))


def published_mfu(run: PublishedRun) -> float:
    """Return the MFU that corresponds to the published throughput."""
    return run.tokens_per_second * model_of(run).flops_per_token / DEVICES[run.device].flops


def _logarithms(run: PublishedRun) -> list[float]:
    """Return log(predicted MFU / published MFU) for each value in `GRID`."""
    published = published_mfu(run)
    return [math.log(predict(run, reached).mfu / published) for reached in GRID]


def _best(logarithms: Sequence[Sequence[float]]) -> int:
    """Return the index in `GRID` that minimizes the sum of the absolute logarithms over all runs."""
    return min(range(len(GRID)), key=lambda position: sum(abs(each[position]) for each in logarithms))


# -------------------------------------------------------------------------------- conversion of a run to model and plan


def model_of(run: PublishedRun) -> Transformer:
    """Return the model of a published run."""
    return Transformer(
        run.name,
        run.layers,
        run.width,
        run.heads,
        run.vocabulary,
        run.sequence,
        kv_heads=run.kv_heads,
        feed_forward=run.feed_forward,
        gated=run.gated,
        tied=run.tied,
    )


def plan_of(run: PublishedRun) -> Plan:
    """Return the plan of a published run, excluding context parallelism."""
    return Plan(
        _STRATEGIES[run.zero],
        run.devices // run.context,
        micro_batch=run.micro_batch,
        accumulation=run.micro_batches,
        tensor=run.tensor,
        pipeline=run.pipeline,
        interleaving=run.chunks,
        recomputation=run.recompute,
        fused_attention=run.flash_attention,
        precision=Precision(gradients=run.gradient_bytes),
    )


def network_of(run: PublishedRun) -> Network:
    """Return a run's network, with the device's NVLink within a node and the run's fabric between nodes."""
    network = NETWORKS["DGX H100" if run.device == "H100" else "DGX A100"]
    if not run.fabric_gbit:
        return network
    return replace(network, name=run.fabric, across=LinkModel(network.across.latency, run.fabric_gbit * 1e9 / 8))


# --------------------------------------------------------------------------------------------------------------- table


def as_text(rows: Sequence[Comparison]) -> str:
    """Return a text table with one row per run, followed by the median errors."""
    width = max(len(row.run.name) for row in rows)
    lines = [f"{'run':{width}}  published  predicted  error  left out  software"]
    for row in rows:
        figures = f"{row.published:9.1%}  {row.estimate.mfu:9.1%}  {row.error:+5.0%}  {row.left_out:+8.0%}"
        lines.append(f"{row.run.name:{width}}  {figures}  {row.run.software}")
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: Sequence[Comparison]) -> str:
    """Return the median errors as a sentence."""
    return (
        f"{len(rows)} runs, MFU. Median absolute error: {median_error([row.error for row in rows]):.1%}; "
        f"{median_error([row.left_out for row in rows]):.1%} if each run is left out of the fit."
    )
