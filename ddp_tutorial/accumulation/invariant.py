"""Train with bitwise identical results on 1, 2, 4, ... ranks.

The result of a floating-point sum depends on the order of the operands. In this module, the order does not depend on
the number of ranks. A step contains V micro-batches, where V is a power of two. The micro-batches are numbered as in
`sharding.permutation.shard_micro_batches`. The micro-batch gradients are summed in a binary tree. In a round that
starts with n gradients, gradient v + n / 2 is added to gradient v, for all v < n / 2.

    V = 4      0   1   2   3
                \\   \\ /   /            0 + 2 and 1 + 3: each within one rank, if there are two ranks
                 0   1                 0 + 1: between the two ranks.

With W ranks, rank r processes the micro-batches r, r + W, r + 2 W, ... Therefore, the first rounds run within each
rank. In each of the last log2 W rounds, pairs of ranks exchange sums (recursive doubling). Both ranks of a pair compute
bitwise identical sums, because a + b equals b + a. Dropout's random numbers depend on the micro-batch, not the rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategies import ReplicatedStrategy
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.wrappers import sync_initial_state
from ddp_tutorial.phases import phase
from ddp_tutorial.rng import seeded_rng
from ddp_tutorial.world import World, require_group


class InvariantStrategy(ReplicatedStrategy):
    """A strategy whose gradients do not depend on the number of ranks.

    The number of ranks must divide `micro_batches`. Runs are bitwise identical only with the same processor type,
    PyTorch version and micro-batch size. On CPUs, sums also depend on the number of threads. The constructor limits the
    process to one thread, and `Trainer.train` restores the original limit. A model with buffers, such as BatchNorm's
    running statistics, is rejected, because buffers depend on the assignment of samples to ranks.
    """

    link: Link | None = None  # gradients are sent by torch's collectives

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        micro_batches: int,
        seed: int = 0,
        precision: Precision | None = None,
    ) -> None:
        """Broadcast rank 0's weights, and limit this process to one thread.

        `micro_batches` is the number of micro-batches per step, summed over all ranks, and must be a power of two.
        `seed` is the seed for dropout.

        Raises:
            ConfigError: If the model contains buffers, or if `micro_batches` is invalid for the number of ranks.
        """
        require_group(world)
        require_even_shares(micro_batches, world.size)
        if any(True for _ in model.buffers()):
            names = ", ".join(repr(name) for name, _ in model.named_buffers())
            raise ConfigError(
                f"the model must not have buffers, because ranks would update them differently; got {names}"
            )
        sync_initial_state(model, world)
        torch.set_num_threads(1)
        super().__init__(model, world)
        self.micro_batches_per_rank, self.seed = micro_batches // world.size, seed
        self.loss = StepLoss(loss, world, precision)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.step = 0

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Set `.grad`, and return the totals over all ranks. `batches` contains this rank's micro-batches, in order."""
        if len(batches) != self.micro_batches_per_rank:
            raise ValueError(
                f"a step must have {self.micro_batches_per_rank} micro-batches on each rank, got {len(batches)}"
            )
        tree = _Tree()
        self.loss.begin(self.micro_batches_per_rank)
        for number in bit_reversed(self.micro_batches_per_rank):
            tree.add(self._gradient(batches[number], self.world.rank + self.world.size * number))
        self.loss.reduce(stop_flags)
        with phase("finish"):
            self._assign_grads(add_across_ranks(self.world, tree.sum()))
            totals = self.loss.finish(self.parameters)
        self.step += 1
        return totals

    def _gradient(self, batch: Any, number: int) -> torch.Tensor:
        """Return one micro-batch's gradient as a vector, followed by one flag per parameter.

        A flag is 1 if the micro-batch used the parameter, and 0 otherwise.
        """
        self.module.zero_grad(set_to_none=True)
        with seeded_rng(self.seed, self.step, number, device=self.world.device):
            with phase("forward"):
                loss = self.loss.forward(self.module, batch)
            with phase("backward"):
                loss.backward()
        used = [parameter.grad is not None for parameter in self.parameters]
        pieces = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in self.parameters]
        return torch.cat([*pieces, torch.tensor(used, dtype=pieces[0].dtype, device=pieces[0].device)])

    def sync_buffers(self) -> None:
        """Do nothing, because models with buffers are rejected."""

    def state_dict(self) -> Mapping[str, float]:
        """Return the step number, on which dropout's random numbers depend, and the loss state."""
        return {"step": self.step, **super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Restore a state that `state_dict` returned."""
        self.step = int(state["step"])
        super().load_state_dict(state)

    def _assign_grads(self, total: torch.Tensor) -> None:
        """Set each parameter's `.grad` to its part of the sum, or to None if no rank used the parameter."""
        *pieces, used = total.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for parameter, piece, count in zip(self.parameters, pieces, used.tolist(), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype) if count else None


class _Tree:
    """A running sum of vectors. Two partial sums are added as soon as they contain the same number of vectors."""

    def __init__(self) -> None:
        self.partial: list[tuple[int, torch.Tensor]] = []  # the number of vectors, and their sum

    def add(self, vector: torch.Tensor) -> None:
        count = 1
        while self.partial and self.partial[-1][0] == count:
            _, before = self.partial.pop()
            vector, count = before.add_(vector), 2 * count
        self.partial.append((count, vector))

    def sum(self) -> torch.Tensor:
        [(_, total)] = self.partial  # one partial sum is left, because the number of vectors is a power of two
        return total


def bit_reversed(count: int) -> list[int]:
    """Return the integers 0 to `count` - 1 in bit-reversed order, such as 0, 2, 1, 3.

    `count` must be a power of two.
    """
    order = [0]
    while len(order) < count:
        order = [2 * each for each in order] + [2 * each + 1 for each in order]
    return order


def add_across_ranks(world: World, vector: torch.Tensor) -> torch.Tensor:
    """Sum `vector` over all ranks in place, in the order of the tree, and return `vector`. Collective.

    The number of ranks must be a power of two.
    """
    theirs = torch.empty_like(vector, device=world.message_device)
    distance = world.size
    while distance > 1:
        distance //= 2
        other = world.rank ^ distance
        ours = vector.to(world.message_device)
        sends_and_receives = [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, ours, other)]
        for work in dist.batch_isend_irecv(sends_and_receives):
            work.wait()
        vector += theirs.to(vector.device)
    return vector


def require_even_shares(micro_batches: int, ranks: int) -> None:
    """Raise `ConfigError` unless `micro_batches` is a power of two and a multiple of the number of ranks."""
    if micro_batches < 1 or micro_batches & (micro_batches - 1):
        raise ConfigError(f"'micro_batches' must be a power of two, such as 4, got {micro_batches}")
    if micro_batches % ranks:
        raise ConfigError(
            f"the number of ranks must be a power of two and at most 'micro_batches' ({micro_batches}), got {ranks}"
        )
