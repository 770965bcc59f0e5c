"""The same training run, bit for bit, on 1, 2, 4 ... ranks.

Floating-point sums depend on the order of adding. Here the order is fixed before anybody knows the number of ranks: a
step has V micro-batches (a power of two), numbered as in `sharding.order.shard_micro_batches`, and their gradients are
added up in one binary tree. With n left, number v is added to number v + n / 2:

    V = 4      0   1   2   3
                \\   \\ /   /            0 + 2 and 1 + 3: on one rank where two ranks have 0, 2 and 1, 3
                 0   1                 0 + 1: between the two

With W ranks, rank r has numbers r, r + W, r + 2 W, ...: the first rounds happen inside a rank, the last log2 W between
ranks, which exchange what they have with one other rank in each (recursive doubling). a + b has the bits of b + a, so
both have the same. Dropout is drawn for the micro-batch, not for the rank.
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
    """Gradients that do not depend on the number of ranks, as long as it divides `micro_batches`.

    Same bits need the same arithmetic in each micro-batch, so the same kind of processor, torch, and size of
    micro-batch. On CPUs a sum also depends on the number of threads: the constructor sets it to one for this process,
    and `Trainer.train` restores it. A model with running statistics (BatchNorm) depends on which rank saw which sample,
    and is refused.
    """

    link: Link | None = None  # gradients travel by torch's own collectives

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        micro_batches: int,
        seed: int = 0,
        precision: Precision | None = None,
    ) -> None:
        require_group(world)
        require_even_shares(micro_batches, world.size)
        if any(True for _ in model.buffers()):
            names = ", ".join(repr(name) for name, _ in model.named_buffers())
            raise ConfigError(f"the model has buffers, which each rank would change by itself: {names}")
        sync_initial_state(model, world)
        torch.set_num_threads(1)
        super().__init__(model, world)
        self.micro_batches, self.seed = micro_batches, seed
        self.loss = StepLoss(loss, world, precision)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.step = 0

    @property
    def micro_batches_per_rank(self) -> int:
        """Micro-batches of each rank."""
        return self.micro_batches // self.world.size

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Fill `.grad`; return the totals of all ranks. `batches` are the rank's, in their order."""
        if len(batches) != self.micro_batches_per_rank:
            raise ValueError(
                f"a step has {self.micro_batches_per_rank} micro-batches on each rank, found {len(batches)}"
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
        """The gradient of one micro-batch in one long vector, then a 1 for each parameter that was used, else a 0."""
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
        """Does nothing: a model with buffers is refused."""

    def state_dict(self) -> Mapping[str, float]:
        """The step, which the random numbers depend on, and what the loss keeps."""
        return {"step": self.step, **super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.step = int(state["step"])
        super().load_state_dict(state)

    def _assign_grads(self, total: torch.Tensor) -> None:
        """Let each `.grad` be a view of the sum; a parameter that no rank used has none."""
        *pieces, used = total.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for parameter, piece, count in zip(self.parameters, pieces, used.tolist(), strict=True):
            parameter.grad = piece.view_as(parameter) if count else None


class _Tree:
    """Adds up vectors that come one by one, in pairs of equal weight, keeping no more than log2 of them."""

    def __init__(self) -> None:
        self.partial: list[tuple[int, torch.Tensor]] = []  # how many are in it, and their sum

    def add(self, vector: torch.Tensor) -> None:
        count = 1
        while self.partial and self.partial[-1][0] == count:
            _, before = self.partial.pop()
            vector, count = before.add_(vector), 2 * count
        self.partial.append((count, vector))

    def sum(self) -> torch.Tensor:
        [(_, total)] = self.partial  # one is left of a power of two
        return total


def bit_reversed(count: int) -> list[int]:
    """0 to `count` - 1, a power of two, in the order in which neighbours are those half of the rest apart: 0 2 1 3."""
    order = [0]
    while len(order) < count:
        order = [2 * each for each in order] + [2 * each + 1 for each in order]
    return order


def add_across_ranks(world: World, vector: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, a power of two, in the fixed tree, on every rank. In place."""
    theirs = torch.empty_like(vector)
    distance = world.size
    while distance > 1:
        distance //= 2
        other = world.rank ^ distance
        sends_and_receives = [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, vector, other)]
        for work in dist.batch_isend_irecv(sends_and_receives):
            work.wait()
        vector += theirs
    return vector


def require_even_shares(micro_batches: int, ranks: int) -> None:
    """Raise `ConfigError` where sums over micro-batches could not be added up alike on every number of ranks."""
    if micro_batches < 1 or micro_batches & (micro_batches - 1):
        raise ConfigError(f"micro_batches={micro_batches}: should be a power of two, such as 4")
    if micro_batches % ranks:
        raise ConfigError(
            f"{micro_batches} micro-batches cannot be shared out evenly to {ranks} ranks. Use 1, 2, 4 ... of up to as "
            "many ranks."
        )
