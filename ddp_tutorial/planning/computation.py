"""Compute a device's computation time for the forward and backward passes of a micro-batch.

Three kinds of work take time: matrix products, attention, and memory access to activations. Memory traffic is
counted for normalization, rotation of queries and keys, activation functions, residual additions, the scores of unfused
attention, and the loss. In a layer, each operation counts as a separate kernel with 16-bit values.
"""

from typing import NamedTuple

from ddp_tutorial.planning.hardware import Device
from ddp_tutorial.planning.plan import Plan
from ddp_tutorial.planning.transformer import Transformer

# Bytes per token per vocabulary entry for the loss in the forward pass: logits are written and read in 16 bits, written
# in 32 bits, and read again by the loss.
LOGITS = 12
# Bytes per score in the forward pass of attention without a fused kernel: scores are written, read by the softmax,
# written, read and written by dropout, and read by the product with the values. The dropout mask adds one byte.
SCORES = 13
# FlashAttention computes five matrix products in the backward pass and two in the forward pass.
FUSED_BACKWARD = 2.5


class Passes(NamedTuple):
    """The durations of the forward and backward passes, in seconds."""

    forward: float
    backward: float


def stage_seconds(model: Transformer, plan: Plan, device: Device) -> Passes:
    """Return a pipeline stage's computation time per micro-batch. The backward pass includes recomputation.

    The result applies to the stage with the most layers. The output layer's time is divided equally among the stages.
    """
    tokens = plan.micro_batch * model.sequence / plan.tensor
    dense, attention = _dense(model, device), _attention(model, plan, device)
    again = {
        "none": 0.0,
        "selective": 0.0 if plan.fused_attention else attention,
        "half": dense - model.layer_matrices / device.matmul_flops,
        "full": dense + attention,
    }[plan.recomputation]
    twice = FUSED_BACKWARD if plan.fused_attention else 2.0
    layers, output = plan.stage_layers(model.layers), _output(model, device) / plan.pipeline
    forward = layers * (dense + attention) + output
    backward = layers * (2 * dense + twice * attention + again) + 2 * output
    return Passes(tokens * forward, tokens * backward)


def _dense(model: Transformer, device: Device) -> float:
    """Return the time, in seconds per token, of a layer's forward pass, excluding attention."""
    return 2 * model.layer_matrices / device.matmul_flops + _layer_traffic(model) / device.memory_bandwidth


def _layer_traffic(model: Transformer) -> int:
    """Return a layer's memory traffic between matrix products in the forward pass, in bytes per token."""
    norms = 2 * 4 * model.width
    residuals = 2 * 6 * model.width
    rotation = 4 * (model.width + 2 * model.kv_width)
    activation = (6 if model.gated else 4) * model.inner
    return norms + residuals + rotation + activation


def _attention(model: Transformer, plan: Plan, device: Device) -> float:
    """Return the attention time per layer, in seconds per token. A fused kernel skips the masked half of the scores."""
    flops = 4 * model.sequence * model.width
    if plan.fused_attention:
        return flops / 2 / (device.flops * device.attention_fraction)
    return flops / device.matmul_flops + SCORES * model.heads * model.sequence / device.memory_bandwidth


def _output(model: Transformer, device: Device) -> float:
    """Return the time, in seconds per token, of the output layer and the loss in the forward pass."""
    return (
        2 * model.vocabulary * model.width / device.matmul_flops + LOGITS * model.vocabulary / device.memory_bandwidth
    )


def hardware_flops_per_token(model: Transformer, plan: Plan) -> float:
    """Return the FLOPs per token, including all recomputation except recomputation inside fused kernels."""
    again = {
        "none": 0,
        "selective": 0 if plan.fused_attention else model.attention_flops,
        "half": model.layers * model.layer_matrices,
        "full": 2 * model.layers * model.layer_matrices + model.attention_flops,
    }[plan.recomputation]
    return model.flops_per_token + again
