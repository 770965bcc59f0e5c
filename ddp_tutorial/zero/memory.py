"""What each strategy keeps on a rank, and what it sends: arithmetic, without running anything.

With Adam in float32 a parameter takes 4 bytes, its gradient 4, and its two averages 8 (Rajbhandari et al., 2020). Data
parallelism has them on each of W ranks; each stage of ZeRO divides one more of the three by W.
"""

from collections.abc import Mapping

from torch import nn

from ddp_tutorial.ddp.link import bytes_all_reduced
from ddp_tutorial.zero.units import units_of

# What is divided by W.
DIVIDED: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "invariant": frozenset(),
    "accelerate": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "weights"}),
    "fsdp": frozenset({"optimizer", "gradients", "weights"}),
}


def model_state_bytes(strategy: str, parameters: int, ranks: int, optimizer: int = 8) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on one rank, before the optimizer step.

    Activations, gathered weights and padding are not included.

    Args:
        strategy: A key of `DIVIDED`.
        parameters: The number of parameters of the model.
        ranks: The number of ranks that shard it.
        optimizer: Bytes of optimizer state for each parameter. A parameter and its gradient take 4 bytes each.
    """
    full_parameters: Mapping[str, int] = {"weights": 4, "gradients": 4, "optimizer": optimizer}
    divided = DIVIDED[strategy]
    return {name: parameters * each // (ranks if name in divided else 1) for name, each in full_parameters.items()}


def bytes_gathered(strategy: str, model: nn.Module) -> int:
    """The most that is whole at a time, of weights that are divided: the model's own unit, and of the others the
    largest and the next one that is gathered ahead of its use."""
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
    """Bytes that one rank sends in a step, for gradients and weights in float32. `micro_batches` are those of a rank,
    `ranks` those of one of the `copies` of the model.

    A reduce-scatter or an all-gather of n bytes sends n (W - 1) / W, and an all-reduce is one of each. Where gradients
    are divided, each micro-batch has a reduction of its own; where weights are, two gathers too. With several copies
    (HSDP), a rank's piece of the gradient is added up over them after each reduction; what is not divided is added up
    over all ranks at once. With invariant, a rank sends all of its sums in each of log2 W rounds. On gloo,
    fsdp sends more: torch's reduce-scatter is an all-reduce there.
    """
    nbytes, k, world = 4 * parameters, micro_batches, ranks * copies
    if strategy == "invariant":
        return nbytes * (world.bit_length() - 1)
    full_parameters = nbytes * (ranks - 1) // ranks  # of a gather, or a reduce-scatter, within a copy
    over_copies = bytes_all_reduced(nbytes // ranks, copies)
    match strategy:
        case "ddp" | "accelerate":
            return bytes_all_reduced(nbytes, world)
        case "zero1":
            return bytes_all_reduced(nbytes, world) + full_parameters
        case "zero2":
            return k * (full_parameters + over_copies) + full_parameters
        case "zero3" | "fsdp":
            return k * (3 * full_parameters + over_copies)
    raise ValueError(f"strategy {strategy!r} is not one of {', '.join(DIVIDED)}")
