"""Predict published runs, with the same constants for all of them."""

from dataclasses import replace

from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.planning.hardware import DEVICES, NETWORKS, Network
from ddp_tutorial.planning.plan import Plan, Precision, Strategy
from ddp_tutorial.planning.published import PublishedRun
from ddp_tutorial.planning.step import Estimate, estimate_step
from ddp_tutorial.planning.transformer import Transformer

_STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")  # by ZeRO stage


def predict(run: PublishedRun) -> Estimate:
    """Return the estimate of a published run. Nothing in it is fitted to the run.

    Raises:
        ValueError: If the run uses context parallelism, which the model does not describe.
    """
    if run.context > 1:
        raise ValueError(f"context parallelism is not modeled, got {run.name} with {run.context} ranks per sequence")
    return estimate_step(model_of(run), plan_of(run), DEVICES[run.device], network_of(run))


def model_of(run: PublishedRun) -> Transformer:
    """Return the shape of a run's model."""
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
    """Return a run's plan, without its context parallelism."""
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
    """Return a run's network: NVLink of its device inside a node, and the run's fabric between nodes."""
    network = NETWORKS["DGX H100" if run.device == "H100" else "DGX A100"]
    if not run.fabric_gbit:
        return network
    return replace(network, name=run.fabric, across=LinkModel(network.across.latency, run.fabric_gbit * 1e9 / 8))
