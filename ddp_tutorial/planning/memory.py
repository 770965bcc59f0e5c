"""Compute the memory that a training step requires on a device."""

from dataclasses import dataclass

from ddp_tutorial.planning.hardware import Device
from ddp_tutorial.planning.plan import Plan
from ddp_tutorial.planning.transformer import Transformer
from ddp_tutorial.zero.memory import model_state_bytes

# The fraction of a device's memory that a plan may use. The rest is reserved for the CUDA context, communication
# buffers and fragmentation. The fraction is an assumption.
USABLE = 0.9


@dataclass(frozen=True)
class Memory:
    """Memory in bytes on the device that requires the most memory.

    Attributes:
        weights: Weights, in the dtype of the computation.
        gradients: Gradients.
        optimizer: The optimizer's moments and the float32 copy of the weights.
        gathered: With "zero3" and "hsdp", the temporarily all-gathered weights of two layers and the output layer.
        activations: Activations that the forward pass stores for the backward pass, including logits.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float

    @property
    def total(self) -> float:
        """The total memory in bytes."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations

    def fits(self, device: Device) -> bool:
        """Return whether the total is at most the fraction `USABLE` of the device's memory."""
        return self.total <= USABLE * device.memory


def memory_of(model: Transformer, plan: Plan, shard: int) -> Memory:
    """Return the memory that a plan requires on a device if `shard` devices shard the model state."""
    own = plan.device_parameters(model.parameters)
    kind = "zero3" if plan.strategy == "hsdp" else plan.sharding
    precision = plan.precision
    state = model_state_bytes(kind, round(own), shard, precision.optimizer, precision.weights, precision.gradients)
    gathered = _gathered_parameters(model) / plan.tensor if kind == "zero3" and shard > 1 else 0.0
    return Memory(**state, gathered=precision.weights * gathered, activations=activation_bytes(model, plan))


def _gathered_parameters(model: Transformer) -> int:
    """Return the total number of parameters in two layers and the output layer, which are gathered simultaneously."""
    return model.vocabulary * model.width + min(2, model.layers) * model.layer_parameters


def activation_bytes(model: Transformer, plan: Plan) -> float:
    """Return the size of the activations, in bytes, on the device that stores the most activations.

    In a 1F1B pipeline of p stages, the first stage stores the activations of up to p micro-batches. The last stage
    stores the activations and logits of one micro-batch. With v chunks per stage, interleaving multiplies the
    activation memory by 1 + (p - 1) / (p v) (Korthikanti et al., 2022).
    """
    tokens = plan.micro_batch * model.sequence
    layer = tokens * model.activation_bytes(plan.recomputation, plan.tensor, fused=plan.fused_attention)
    if plan.recomputation == "full":  # one recomputed layer is stored as well
        once = tokens * model.activation_bytes("none", plan.tensor, fused=plan.fused_attention)
    else:
        once = 0.0
    stage = layer * plan.stage_layers(model.layers)
    extra = 1 + (plan.pipeline - 1) / (plan.pipeline * plan.interleaving) if plan.interleaving > 1 else 1.0
    first = min(plan.pipeline, plan.accumulation) * extra * stage
    output = tokens * (4 * model.width + 4 * model.vocabulary) / plan.tensor  # final norm, input, float32 logits
    last = stage + output
    return max(first, last) + once
