"""Estimate the time and memory of a training step from computation, communication, overlap and the pipeline bubble.

- Computation: matrix products run at `Device.matmul_flops` and fused attention at `attention_fraction` of the peak. The
  duration of any other operation is its memory traffic divided by the memory bandwidth.
- The backward pass takes twice as long as the forward pass (2.5 times for fused attention). Recomputation repeats all
  or part of the forward pass.
- Tensor parallelism communicates twice per layer in each pass, without overlap.
- Data parallelism communicates once per layer. Communication overlaps with computation in all layers except one (see
  `overlapped`). At the end of "zero1" and "zero2" steps, the all-gather of updated weights is not overlapped.
- With p pipeline stages and m micro-batches, the idle time is (p - 1) / m of the busy time. Interleaving v chunks per
  stage divides the idle time by v, and stages communicate while they compute other chunks (Narayanan et al., 2021).
"""

from dataclasses import dataclass

from ddp_tutorial.planning.communication import (
    LINK_FRACTION,
    Group,
    all_reduce_seconds,
    group_of,
    pass_seconds,
    sent_across,
    sent_bytes,
)
from ddp_tutorial.planning.computation import Passes, hardware_flops_per_token, stage_seconds
from ddp_tutorial.planning.hardware import Device, Network
from ddp_tutorial.planning.memory import Memory, memory_of
from ddp_tutorial.planning.plan import Plan, Precision, Strategy
from ddp_tutorial.planning.transformer import Transformer


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a step. Times are in seconds per step on one device.

    Attributes:
        plan: The plan.
        tokens: The global batch size in tokens.
        compute: Computation time, including recomputation.
        tensor: Tensor-parallel communication time, which does not overlap with computation.
        bubble: Idle time of the pipeline.
        exposed: Data-parallel and pipeline communication time that does not overlap with computation.
        communication: Total data-parallel and pipeline communication time, both exposed and overlapped.
        optimizer: Duration of the optimizer's weight update.
        bytes_inside: Number of bytes that the device sends within its node.
        bytes_across: Number of bytes that the device sends to other nodes, averaged over the devices of a node.
        mfu: Model FLOPs utilization, which is the achieved model FLOP/s divided by the peak FLOP/s.
        hfu: Hardware FLOPs utilization, which also includes recomputation.
        memory: The memory required on the device.
        fits: Whether the device has enough memory.
    """

    plan: Plan
    tokens: int
    compute: float
    tensor: float
    bubble: float
    exposed: float
    communication: float
    optimizer: float
    bytes_inside: float
    bytes_across: float
    mfu: float
    hfu: float
    memory: Memory
    fits: bool

    @property
    def seconds(self) -> float:
        """The step time in seconds."""
        return self.compute + self.tensor + self.bubble + self.exposed + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """The total throughput of all devices, in tokens per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        """The throughput per device, in tokens per second."""
        return self.tokens_per_second / self.plan.devices


def estimate_step(model: Transformer, plan: Plan, device: Device, network: Network) -> Estimate:
    """Estimate a training step. A plan for fewer devices than `network.per_node` uses one node.

    Raises:
        ValueError: If the plan is invalid for the model or the network.
    """
    check(model, plan, network)
    passes, tensor = stage_seconds(model, plan, device), tensor_seconds(model, plan, network)
    forward, backward = passes.forward + tensor.forward, passes.backward + tensor.backward
    data = data_parallel(model, plan, network)
    units = plan.stage_layers(model.layers)
    each = overlapped(forward, data.forward, units) + overlapped(backward, data.backward, units)
    last = overlapped(forward, data.forward, units) + overlapped(backward, data.backward + data.last, units)
    messages = plan.accumulation * message_seconds(model, plan, network)
    waiting = messages if plan.interleaving == 1 else 0.0
    busy = plan.accumulation * (forward + backward)
    exposed = (plan.accumulation - 1) * each + last - busy + data.end + waiting
    tokens = plan.sequences * model.sequence
    optimizer = optimizer_seconds(model, plan, device, shard_size(plan, network))
    bubble = (plan.pipeline - 1) / plan.interleaving * (forward + backward)
    seconds = busy + bubble + exposed + optimizer
    peak = plan.devices * device.flops * seconds
    memory = memory_of(model, plan, shard_size(plan, network))
    bytes_inside, bytes_across = traffic(model, plan, network)
    return Estimate(
        plan=plan,
        tokens=tokens,
        compute=plan.accumulation * sum(passes),
        tensor=plan.accumulation * sum(tensor),
        bubble=bubble,
        exposed=exposed,
        communication=plan.accumulation * (data.forward + data.backward) + data.last + data.end + messages,
        optimizer=optimizer,
        bytes_inside=bytes_inside,
        bytes_across=bytes_across,
        mfu=model.flops_per_token * tokens / peak,
        hfu=hardware_flops_per_token(model, plan) * tokens / peak,
        memory=memory,
        fits=memory.fits(device),
    )


def check(model: Transformer, plan: Plan, network: Network) -> None:
    """Raise `ValueError` if the plan is invalid for the model or the network."""
    chunks = model.layers + 2  # the embedding and the output layer can be separate chunks, as in Llama 3 405B
    if plan.pipeline * plan.interleaving > chunks:
        raise ValueError(
            f"'pipeline' x 'interleaving' must be at most {chunks} (the number of layers plus 2), got "
            f"{plan.pipeline} x {plan.interleaving}"
        )
    if model.heads % plan.tensor:
        raise ValueError(f"'tensor' must divide the number of heads ({model.heads}), got {plan.tensor}")
    if plan.data % shard_size(plan, network):
        raise ValueError(f"'shard' must divide the data-parallel degree ({plan.data}), got {shard_size(plan, network)}")


def shard_size(plan: Plan, network: Network) -> int:
    """Return the number of devices over which model state is sharded. Some strategies shard only part of the state."""
    if plan.strategy != "hsdp":
        return plan.data
    return plan.shard or min(plan.data, max(1, network.per_node // plan.tensor))


def overlapped(compute: float, communication: float, units: int) -> float:
    """Return the total duration if computation and communication overlap in all but one of `units` equal parts.

    A layer's gradients are reduced while the next layer computes. Therefore, the first layer computes without
    communication, and the last layer's reduction is exposed. For all-gathers of weights, the order is reversed.
    """
    return max(compute + communication / units, communication + compute / units)


# ------------------------------------------------------------------------------------------------------- communication


@dataclass(frozen=True)
class DataParallel:
    """Data-parallel communication time, in seconds.

    Attributes:
        forward: Time in the forward pass of each micro-batch.
        backward: Time in the backward pass of each micro-batch.
        last: Time in the backward pass of the last micro-batch only.
        end: Time after the backward pass, without overlap.
    """

    forward: float = 0.0
    backward: float = 0.0
    last: float = 0.0
    end: float = 0.0


def data_parallel(model: Transformer, plan: Plan, network: Network) -> DataParallel:
    """Return the data-parallel communication time on a device. Each layer starts its own collectives."""
    units = plan.stage_layers(model.layers)
    own = plan.device_parameters(model.parameters)
    weights, gradients = own * plan.precision.weights / units, own * plan.precision.gradients / units
    whole, shard, copies = _groups(plan, network)
    gather, reduce = (units * pass_seconds(shard, network, nbytes) for nbytes in (weights, gradients))
    all_reduce = units * all_reduce_seconds(whole, network, gradients)
    over_copies = units * all_reduce_seconds(copies, network, gradients / shard.size)
    match plan.sharding:
        case "ddp":
            return DataParallel(last=all_reduce)
        case "zero1":
            return DataParallel(last=reduce, end=gather)
        case "zero2":
            return DataParallel(backward=reduce, end=gather)
    return DataParallel(forward=gather, backward=gather + reduce + over_copies)


def _groups(plan: Plan, network: Network) -> tuple[Group, Group, Group]:
    """Return the group of all data-parallel devices, a group that shards a replica, and a group with the same shard."""
    shard = shard_size(plan, network)
    return (
        group_of(plan.data, plan.tensor, network.per_node),
        group_of(shard, plan.tensor, network.per_node),
        group_of(plan.data // shard, plan.tensor * shard, network.per_node),
    )


def traffic(model: Transformer, plan: Plan, network: Network) -> tuple[float, float]:
    """Return the numbers of bytes per step that a device sends within its node and to other nodes, in that order."""
    own = plan.device_parameters(model.parameters)
    weights, gradients = own * plan.precision.weights, own * plan.precision.gradients
    whole, shard, copies = _groups(plan, network)
    times = plan.accumulation
    passes = {
        "ddp": [(whole, 2 * gradients)],
        "zero1": [(whole, gradients + weights)],
        "zero2": [(whole, times * gradients + weights)],
    }.get(
        plan.sharding,
        [(shard, times * (2 * weights + gradients)), (copies, times * 2 * gradients / shard.size)],
    )
    activations = 2 * plan.micro_batch * model.sequence * model.width * times
    layers = plan.stage_layers(model.layers)
    passes.append((group_of(plan.tensor, 1, network.per_node), _tensor_passes(plan) * layers * activations))
    sent = sum(sent_bytes(group, nbytes) for group, nbytes in passes)
    across = sum(sent_across(group, nbytes) for group, nbytes in passes)
    messages = 2 * plan.interleaving * activations / plan.tensor if plan.pipeline > 1 else 0.0
    if plan.devices > network.per_node:
        return sent - across, across + messages
    return sent + messages, 0.0


def _tensor_passes(plan: Plan) -> int:
    """Return the number of tensor-parallel reduce-scatters and all-gathers per layer. Each pass performs four."""
    return 12 if plan.recomputation == "full" else 8


def tensor_seconds(model: Transformer, plan: Plan, network: Network) -> Passes:
    """Return the tensor-parallel communication time of a micro-batch on a stage.

    Each layer performs two all-reduces of the activations in the forward pass and two in the backward pass. With
    sequence parallelism, each all-reduce becomes a reduce-scatter and an all-gather, with the same total time.
    """
    group = group_of(plan.tensor, 1, network.per_node)
    nbytes = 2 * plan.micro_batch * model.sequence * model.width
    forward = plan.stage_layers(model.layers) * 4 * pass_seconds(group, network, nbytes)
    return Passes(forward, forward * (_tensor_passes(plan) / 4 - 1))


def message_seconds(model: Transformer, plan: Plan, network: Network) -> float:
    """Return the time that a stage takes to send a micro-batch's activations and gradients to its neighbors."""
    if plan.pipeline == 1:
        return 0.0
    link = network.inside if plan.devices <= network.per_node else network.across
    nbytes = 2 * plan.micro_batch * model.sequence * model.width / plan.tensor
    return 2 * plan.interleaving * link.seconds(nbytes / LINK_FRACTION)


def optimizer_seconds(model: Transformer, plan: Plan, device: Device, shard: int) -> float:
    """Return the time to read the gradients, to read and write the optimizer state, and to write the weights."""
    own = plan.device_parameters(model.parameters) / (1 if plan.strategy == "ddp" else shard)
    precision = plan.precision
    return own * (2 * precision.optimizer + precision.gradients + precision.weights) / device.memory_bandwidth


# ----------------------------------------------------------------------------------------------------------- threshold


def tokens_to_hide_communication(
    strategy: Strategy, devices: int, device: Device, network: Network, precision: Precision | None = None
) -> float:
    """Return the minimum number of tokens per device per micro-batch that hides communication behind computation.

    Let P be the number of parameters, T the number of tokens, F the FLOP/s that matrix products reach, and B the ring
    bandwidth.

        DDP    backward 4 P T / F >= all-reduce of g bytes per gradient 2 g P / B          =>  T >= g F / (2 B)
        ZeRO-3 forward  2 P T / F >= all-gather of w bytes per weight w P / B              =>  T >= w F / (2 B)
               backward 4 P T / F >= all-gather and reduce-scatter (w + g) P / B           =>  T >= (w + g) F / (4 B).

    P cancels out, so the threshold does not depend on the size of the model. In a ring, each of W devices sends
    (W - 1) / W of the bytes. The threshold ignores latency and the additional computation of attention.

    "zero1" and "zero2" send half as many bytes as "ddp" in the backward pass. With "zero1" and "zero2", the all-gather
    at the end of the step is never hidden. "hsdp" is treated as "zero3" within a node.
    """
    precision = precision or Precision()
    weights, gradients = precision.weights, precision.gradients
    group = group_of(min(devices, network.per_node) if strategy == "hsdp" else devices, 1, network.per_node)
    if group.size == 1:
        return 0.0
    speed = device.matmul_flops
    per_byte = speed * sent_bytes(group, 1) / group.bandwidth(network)  # FLOPs computed while one byte is sent
    match strategy:
        case "ddp":
            return gradients * per_byte / 2
        case "zero1" | "zero2":
            return gradients * per_byte / 4
    return max(weights / 2, (weights + gradients) / 4) * per_byte
