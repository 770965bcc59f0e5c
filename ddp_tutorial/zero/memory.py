"""Calculate the memory usage and the communication volume of each strategy, without training a model.

With Adam in float32, a parameter occupies 4 bytes, its gradient 4 bytes, and its two moments 8 bytes (Rajbhandari et
al., 2020). Data parallelism stores the parameters, gradients, and moments on each of W ranks. Each ZeRO stage shards
one more of these three components, so that each rank stores 1/W of the component.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_tutorial.ddp.link_model import bytes_all_reduced

if TYPE_CHECKING:  # the formulas do not need torch
    from torch import nn

# The parts of the model state that each strategy divides by the number of ranks W.
DIVIDED: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "invariant": frozenset(),
    "accelerate": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "weights"}),
    "fsdp": frozenset({"optimizer", "gradients", "weights"}),
}


def model_state_bytes(
    strategy: str, parameters: int, ranks: int, optimizer: int = 8, weights: int = 4, gradients: int = 4
) -> dict[str, int]:
    """Return the sizes, in bytes, of one rank's weights, gradients, and optimizer state before the optimizer step.

    Activations, gathered weights, and padding are not included. `ranks` is the number of ranks that shard the model.
    `optimizer`, `weights`, and `gradients` are numbers of bytes per parameter.
    """
    undivided: Mapping[str, int] = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    divided = DIVIDED[strategy]
    return {name: parameters * nbytes // (ranks if name in divided else 1) for name, nbytes in undivided.items()}


def bytes_gathered(strategy: str, model: "nn.Module") -> int:
    """Return the peak memory of the gathered float32 weights, in bytes.

    The peak consists of the root unit and the two largest other units, because one unit computes while the next unit is
    prefetched. The result is 0 if the strategy does not shard the weights.
    """
    from ddp_tutorial.zero.units import units_of

    if "weights" not in DIVIDED[strategy]:
        return 0
    seen: set[int] = set()
    sizes = []
    for module in units_of(model).values():
        own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        sizes.append(4 * sum(parameter.numel() for parameter in own))
    *blocks, rest = sizes
    return rest + sum(sorted(blocks)[-2:])


def bytes_sent(strategy: str, parameters: int, ranks: int, micro_batches: int = 1, copies: int = 1) -> int:
    """Return the number of bytes that one rank sends in a step, with gradients and weights in float32.

    A reduce-scatter or an all-gather of n bytes sends n (W - 1) / W bytes, and an all-reduce sends twice this number. A
    strategy that shards the gradients reduces them in each micro-batch. A strategy that shards the weights also gathers
    the weights twice in each micro-batch. With several replicas (HSDP), each reduction is followed by an all-reduce of
    the rank's shard across the replicas. Unsharded gradients are reduced in a single all-reduce over all ranks. The
    strategy "invariant" sends all partial sums in each of log2 W rounds. With gloo, "fsdp" sends more bytes, because
    PyTorch implements reduce-scatter as all-reduce.

    Args:
        strategy: The name of the strategy, which must be a key of `DIVIDED`.
        parameters: The number of parameters in the model.
        ranks: The number of ranks that shard one replica of the model.
        micro_batches: The number of micro-batches per rank.
        copies: The number of model replicas.

    Raises:
        ValueError: If the strategy is unknown.
    """
    nbytes, k, world = 4 * parameters, micro_batches, ranks * copies
    if strategy == "invariant":
        return nbytes * (world.bit_length() - 1)
    within_copy = nbytes * (ranks - 1) // ranks  # for one all-gather or reduce-scatter within a replica
    over_copies = bytes_all_reduced(nbytes // ranks, copies)
    match strategy:
        case "ddp" | "accelerate":
            return bytes_all_reduced(nbytes, world)
        case "zero1":
            return bytes_all_reduced(nbytes, world) + within_copy
        case "zero2":
            return k * (within_copy + over_copies) + within_copy
        case "zero3" | "fsdp":
            return k * (3 * within_copy + over_copies)
    raise ValueError(f"strategy must be one of {', '.join(DIVIDED)}, got {strategy!r}")
