"""ZeRO-2: each rank keeps its piece of every gradient, and steps its piece of every parameter.

    sharded = ShardedGradients(model, world)
    optimizer = torch.optim.AdamW(sharded.pieces.values())      # of this rank's pieces: its state is 1/W
    loss(model, batch).backward()       # buckets are added up over the ranks meanwhile, each rank gets its row of them
    sharded.reduce()                    # wait for them
    sharded.finish()                    # now the pieces have their gradients, summed over ranks and backwards
    optimizer.step()
    sharded.gather()                    # now all ranks have all parameters

An all-reduce is a reduce-scatter and an all-gather. Here the step of the optimizer is between the two, so it sends no
more bytes than data parallelism. A gradient is whole only until its bucket has been sent.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.ddp.buckets import MIB, assign_buckets, check_dense
from ddp_tutorial.ddp.variants import sync_initial_state
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World
from ddp_tutorial.zero.pieces import Layout, mark_as_piece, piece_of
from ddp_tutorial.zero.shards import Shards


class Reduction:
    """Gradients of several parameters on their way: rows are filled, added up over the ranks of a copy of the model,
    and row r is kept by rank r; where there are other copies, it is then added up over these. Over several backwards,
    what is kept adds up."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, shards: Shards) -> None:
        self.parameters, self.dtype, self.shards = parameters, dtype, shards
        self.layout = Layout([parameter.shape for parameter in parameters], shards.size)
        self.kept: torch.Tensor | None = None  # this rank's row, the sum over ranks and backwards
        self.begin()

    def begin(self) -> None:
        """Begin a backward: no gradient has arrived."""
        self.missing = len(self.parameters)
        self._rows: torch.Tensor | None = None
        self._row: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._crossing: dist.Work | None = None

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of parameter `index`, which has arrived, into the rows."""
        self.layout.pack(self._filled(), index, gradient)
        self.missing -= 1

    def _filled(self) -> torch.Tensor:
        if self._rows is None:
            self._rows = torch.zeros(self.shards.size, self.layout.length, dtype=self.dtype, device=self.shards.device)
        return self._rows

    def start(self) -> None:
        """Begin to add up; what has not arrived is zero. Every rank starts the same reductions in the same order."""
        rows = self._filled()
        if self.shards.size == 1:
            self._row = rows[0]
        elif self.shards.world.backend == "gloo":  # its reduce-scatter is an all-reduce inside, and sends twice as much
            self._row = torch.empty_like(rows)
            flat = self._row.view(-1), rows.view(-1)
            self._work = dist.all_to_all_single(*flat, group=self.shards.inside, async_op=True)
        else:
            self._row = rows.new_empty(self.layout.length)
            self._work = dist.reduce_scatter_tensor(self._row, rows.view(-1), group=self.shards.inside, async_op=True)

    def cross(self, wait: bool) -> bool:
        """Begin to add up over the copies, once that is done within this one, or, with `wait`, when it is. True where
        it has begun, or there is one copy. All ranks cross with the same reductions, in the same order."""
        if self._crossing is None and self.shards.copies > 1:
            if self._work is not None and not (wait or self._work.is_completed()):
                return False
            self._arrive()
            self._crossing = dist.all_reduce(self._row, group=self.shards.across, async_op=True)
        return True

    def _arrive(self) -> None:
        """Wait for the sum over the ranks of this copy."""
        assert self._row is not None, "it was not started"
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._row.dim() > 1:  # rows from all ranks, this rank's of each
            self._row = self._row.sum(0)

    def wait(self) -> None:
        """Wait, and add this rank's row of the sum to what it keeps. The whole gradients are freed."""
        assert self._row is not None, "wait comes after start"
        self.cross(wait=True)
        self._arrive()
        if self._crossing is not None:
            self._crossing.wait()
        self.kept = self._row if self.kept is None else self.kept.add_(self._row)
        self.begin()

    def take(self) -> list[torch.Tensor]:
        """This rank's pieces of the sums, one for each parameter, in the order of the parameters."""
        assert self.kept is not None, "take comes after wait"
        row, self.kept = self.kept, None
        return self.layout.pieces(row, self.shards.rank)


def cross(reductions: Sequence[Reduction]) -> None:
    """Begin to add up over the copies for each reduction, from the first, that has been added up within this copy.
    Stops at the first that has not, without waiting: backward goes on meanwhile."""
    for reduction in reductions:
        if not reduction.cross(wait=False):
            return


class ShardedGradients:
    """`module`, whole on every rank, with gradients of which each rank keeps a piece. Constructing is collective: the
    ranks compare their models, and start with rank 0's weights.

    `pieces` are what an optimizer is to be made of, by parameter: views of its elements that are this rank's. That is
    right for optimizers that treat each element by itself, as SGD and Adam do. (With fused=True, torch rounds the last
    elements of a tensor differently, and a piece ends where the tensor does not: there AdamW differs in the last bit.)
    Buckets hold `bucket_cap_mb` MiB, the first one at most 1. A parameter that a rank has not used counts as zero
    there; one that no rank has used gets no gradient. With a `mesh`, the ranks of a row share out a copy.
    """

    def __init__(self, module: nn.Module, world: World, *, bucket_cap_mb: float = 25, mesh: Mesh | None = None) -> None:
        sync_initial_state(module, world)
        self.module, self.world, self.shards = module, world, Shards(world, mesh)
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.pieces: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in self.named.values():
            parameter.data = parameter.data.contiguous()
            cut = piece_of(parameter.numel(), self.shards.rank, self.shards.size)
            self.pieces[parameter] = nn.Parameter(parameter.detach().view(-1)[cut])
            mark_as_piece(self.pieces[parameter])
        backwards = list(self.named.values())[::-1]  # about the order in which gradients arrive
        cuts = assign_buckets(
            [p.nbytes for p in backwards],
            [p.dtype for p in backwards],
            bucket_cap_mb * MIB,
            min(1, bucket_cap_mb) * MIB,
        )
        of_buckets = [[backwards[index] for index in cut] for cut in cuts]
        self.buckets = [Reduction(parameters, parameters[0].dtype, self.shards) for parameters in of_buckets]
        self._used: set[str] = set()
        self._started = 0
        self._names = {parameter: name for name, parameter in self.named.items()}
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                arrive = partial(self._arrive, bucket, index, self._names[parameter])
                parameter.register_post_accumulate_grad_hook(arrive)

    def _arrive(self, bucket: Reduction, index: int, name: str, parameter: torch.Tensor) -> None:
        """Called by autograd as soon as a gradient is complete: into its bucket, and the buckets that are full and
        whose turn has come are sent."""
        check_dense(name, parameter.grad)
        assert parameter.grad is not None, "autograd has just added to it"
        bucket.put(index, parameter.grad)
        parameter.grad = None
        self._used.add(name)
        while self._started < len(self.buckets) and not self.buckets[self._started].missing:
            self._start()

    def _start(self) -> None:
        self.buckets[self._started].start()
        self._started += 1
        cross(self.buckets[: self._started])

    def reduce(self) -> None:
        """After each backward: send what has not been sent, and wait. Collective."""
        while self._started < len(self.buckets):
            self._start()
        self._started = 0
        for bucket in self.buckets:
            bucket.wait()

    def finish(self) -> None:
        """After the last backward of a step: give the pieces their gradients. Collective."""
        used = used_somewhere(self.world, list(self.named), self._used)
        self._used.clear()
        for bucket in self.buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.take(), strict=True):
                is_given = self._names[parameter] in used and len(gradient)
                self.pieces[parameter].grad = gradient if is_given else None

    @torch.no_grad()
    def gather(self) -> None:
        """After the optimizer's step: all parameters for all ranks. Collective."""
        for bucket in self.buckets if self.shards.size > 1 else ():
            layout = bucket.layout
            rows = torch.zeros(self.shards.size, layout.length, dtype=bucket.dtype, device=self.shards.device)
            row = rows.new_zeros(layout.length)
            for place, parameter in zip(layout.pieces(row, self.shards.rank), bucket.parameters, strict=True):
                place.copy_(self.pieces[parameter])
            dist.all_gather_into_tensor(rows.view(-1), row, group=self.shards.inside)
            for index, parameter in enumerate(bucket.parameters):
                layout.unpack(rows, index, parameter.data)


def used_somewhere(world: World, names: list[str], used: set[str]) -> set[str]:
    """Those of `names` that some rank has used. Collective: one all-reduce of a number for each."""
    if world.size == 1:
        return set(used)
    counts = torch.tensor([name in used for name in names], dtype=torch.int32, device=world.device)
    dist.all_reduce(counts)
    return {name for name, count in zip(names, counts.tolist(), strict=True) if count}
