"""Choose a training plan for a given model, network, and number of devices, and compute a run's duration and cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddp_tutorial.planning.hardware import Device, Network
from ddp_tutorial.planning.plan import Plan, Strategy
from ddp_tutorial.planning.step import Estimate, estimate_step, shard_size
from ddp_tutorial.planning.transformer import Recomputation, Transformer

BATCH_TOLERANCE = 0.1  # a plan's global batch size may differ by this fraction, because it must be divisible
LARGEST_MICRO_BATCH = 64  # sequences
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "half", "full")


def choose(model: Transformer, device: Device, network: Network, devices: int, batch_tokens: float) -> list[Estimate]:
    """Return the best plan of each kind, sorted by step time per token. Plans that do not fit into memory come last.

    Plans are of the same kind if they have the same strategy and the same degrees of tensor and pipeline parallelism.
    The best plan of a kind is the fastest plan that fits or, if no plan fits, the plan that requires the least memory.
    A plan's global batch size differs from `batch_tokens` by at most `BATCH_TOLERANCE` times `batch_tokens`.

    Raises:
        ValueError: If no plan's global batch size is within `BATCH_TOLERANCE` of `batch_tokens`.
    """
    best: dict[tuple[Strategy, int, int], Estimate] = {}
    for plan in candidates(model, network, devices, batch_tokens / model.sequence):
        kind = (plan.strategy, plan.tensor, plan.pipeline)
        estimate = estimate_step(model, plan, device, network)
        if kind not in best or _order(estimate) < _order(best[kind]):
            best[kind] = estimate
    if not best:
        raise ValueError(
            f"no plan has a global batch of about {batch_tokens:,.0f} tokens on {devices:,} devices: increase the "
            f"batch to at least {model.sequence:,} tokens per replica, or use fewer devices"
        )
    return sorted(best.values(), key=_order)


def _order(estimate: Estimate) -> tuple[bool, float]:
    """Return a sort key. Plans that fit are sorted by time per token. The other plans follow, sorted by memory."""
    return not estimate.fits, 1 / estimate.tokens_per_second if estimate.fits else estimate.memory.total


def candidates(model: Transformer, network: Network, devices: int, sequences: float) -> Iterator[Plan]:
    """Yield the plans to compare.

    The degree of tensor parallelism is a power of two, and at most the number of devices per node. The number of
    pipeline stages divides the number of tensor-parallel groups. "zero2", "zero3" and "hsdp" are not combined with a
    pipeline. A plan's global batch size differs from `sequences` by at most `BATCH_TOLERANCE` times `sequences`.
    """
    for tensor in _powers(min(network.per_node, model.heads)):
        if devices % tensor or model.heads % tensor:
            continue
        for pipeline in _divisors(devices // tensor, model.layers):
            data = devices // (tensor * pipeline)
            for micro_batch in _powers(LARGEST_MICRO_BATCH):
                for interleaving in (1, 2, 4) if pipeline > 1 else (1,):
                    # the interleaved schedule requires a multiple of p micro-batches (Narayanan et al., 2021)
                    multiple = pipeline if interleaving > 1 else 1
                    accumulation = multiple * max(1, round(sequences / (data * micro_batch * multiple)))
                    actual = data * micro_batch * accumulation
                    if abs(actual / sequences - 1) > BATCH_TOLERANCE or pipeline * interleaving > model.layers:
                        continue
                    plan = Plan("ddp", devices, micro_batch, accumulation, tensor, pipeline, interleaving)
                    yield from _variants(plan, network)


def _variants(plan: Plan, network: Network) -> Iterator[Plan]:
    """Yield one variant of `plan` for each permitted combination of strategy and recomputation."""
    strategies: tuple[Strategy, ...] = ("ddp", "zero1")
    if plan.pipeline == 1:
        strategies = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    for strategy in strategies:
        for recomputation in RECOMPUTATIONS:
            variant = replace(plan, strategy=strategy, recomputation=recomputation)
            shard = shard_size(variant, network)
            if plan.data % shard == 0 and (strategy != "hsdp" or 1 < shard < plan.data):
                yield variant


def _powers(largest: int) -> list[int]:
    """Return the powers of two up to `largest`."""
    return [2**exponent for exponent in range(largest.bit_length())]


def _divisors(number: int, largest: int) -> list[int]:
    """Return the divisors of `number` up to `largest`."""
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


@dataclass(frozen=True)
class RunCost:
    """The time and cost of a run.

    Attributes:
        seconds: The run time in seconds, excluding failures, restarts, checkpoints and evaluations.
        device_hours: The run time in hours, multiplied by the number of devices.
        price: The cost of the device hours.
    """

    seconds: float
    device_hours: float
    price: float


def run_cost(estimate: Estimate, tokens: float, price_per_device_hour: float) -> RunCost:
    """Return the duration and cost of a run that trains on `tokens` tokens with the plan in `estimate`."""
    seconds = tokens / estimate.tokens_per_second
    device_hours = seconds * estimate.plan.devices / 3600
    return RunCost(seconds, device_hours, device_hours * price_per_device_hour)


def as_text(estimates: Sequence[Estimate]) -> str:
    """Return a text table with one row per plan."""
    width = max(len(estimate.plan.label) for estimate in estimates)
    lines = [f"{'plan':{width}}  micro-batches  chunks      step    MFU    HFU  idle   memory  fits"]
    for estimate in estimates:
        plan = estimate.plan
        idle = (estimate.exposed + estimate.tensor + estimate.bubble) / estimate.seconds
        lines.append(
            f"{plan.label:{width}}  {plan.accumulation:5,} x {plan.micro_batch:<5}  {plan.interleaving:6}  "
            f"{estimate.seconds:6.2f} s  "
            f"{estimate.mfu:5.1%}  {estimate.hfu:5.1%}  {idle:4.0%}  {estimate.memory.total / 1e9:4.0f} GB  "
            f"{'yes' if estimate.fits else 'no'}"
        )
    return "\n".join(lines)
