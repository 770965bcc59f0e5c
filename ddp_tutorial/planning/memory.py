"""Compute the memory of a device in a training step."""

from dataclasses import dataclass

from ddp_tutorial.planning.hardware import Device
from ddp_tutorial.planning.plan import Plan
from ddp_tutorial.planning.transformer import Transformer
from ddp_tutorial.zero.memory import model_state_bytes

# The fraction of a device's memory that a plan may use. The rest is for the CUDA context, communication buffers and
# fragmentation. This is an assumption.
USABLE = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs the most.

    Attributes:
        weights: Weights in the precision of the computation.
        gradients: Gradients.
        optimizer: The float32 copy of the weights and the moments.
        gathered: The weights of two layers and of the output layer, which "zero3" and "hsdp" gather temporarily.
        activations: Activations that the forward pass stores for the backward pass, including logits.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float

    @property
    def total(self) -> float:
        """The sum in bytes."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations

    def fits(self, device: Device) -> bool:
        """Return whether `USABLE` of the device's memory is sufficient."""
        return self.total <= USABLE * device.memory


def memory_of(model: Transformer, plan: Plan, shard: int) -> Memory:
    """Return the memory of a device.

    Args:
        model: The model.
        plan: The plan.
        shard: The number of devices that shard the model state, from 1.
    """
    own = plan.device_parameters(model.parameters)
    kind = "zero3" if plan.strategy == "hsdp" else plan.sharding
    precision = plan.precision
    state = model_state_bytes(kind, round(own), shard, precision.optimizer, precision.weights, precision.gradients)
    gathered = _gathered_parameters(model) / plan.tensor if kind == "zero3" and shard > 1 else 0.0
    return Memory(**state, gathered=precision.weights * gathered, activations=activation_bytes(model, plan))


def _gathered_parameters(model: Transformer) -> int:
    """Return the parameters of the units that are gathered at the same time: the output layer and two layers."""
    return model.vocabulary * model.width + min(2, model.layers) * model.layer_parameters


def activation_bytes(model: Transformer, plan: Plan) -> float:
    """Return the bytes of activations on the device that stores the most.

    The first stage of a 1F1B pipeline stores the activations of up to as many micro-batches as there are stages. The
    last one stores those of one micro-batch and the logits. Interleaving adds a factor of 1 + (p - 1) / (p v)
    (Korthikanti et al., 2022).
    """
    tokens = plan.micro_batch * model.sequence
    layer = tokens * model.activation_bytes(plan.recomputation, plan.tensor, fused=plan.fused_attention)
    if plan.recomputation == "full":  # and one layer is recomputed
        once = tokens * model.activation_bytes("none", plan.tensor, fused=plan.fused_attention)
    else:
        once = 0.0
    stage = layer * plan.stage_layers(model.layers)
    extra = 1 + (plan.pipeline - 1) / (plan.pipeline * plan.interleaving) if plan.interleaving > 1 else 1.0
    first = min(plan.pipeline, plan.accumulation) * extra * stage
    output = tokens * (4 * model.width + 4 * model.vocabulary) / plan.tensor  # final norm, input, float32 logits
    last = stage + output
    return max(first, last) + once
