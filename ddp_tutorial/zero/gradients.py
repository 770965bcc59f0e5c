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

from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.buckets import MIB, assign_buckets
from ddp_tutorial.ddp.wrappers import require_frozen, sync_initial_state
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World
from ddp_tutorial.zero.pieces import mark_as_piece, piece_of
from ddp_tutorial.zero.reductions import Reduction, Reductions
from ddp_tutorial.zero.shards import Shards


class ShardedGradients:
    """`module`, whole on every rank, with gradients of which each rank keeps a piece. Constructing is collective: the
    ranks compare their models, and start with rank 0's weights.

    `pieces` are what an optimizer is to be made of, by parameter: views of its elements that are this rank's. That is
    right for optimizers that treat each element by itself, as SGD and Adam do. (With fused=True, torch rounds the last
    elements of a tensor differently, and a piece ends where the tensor does not: there AdamW differs in the last bit.)
    Buckets hold `bucket_cap_mb` MiB, the first one at most 1. A parameter that a rank has not used counts as zero
    there; one that no rank has used gets no gradient. With a `mesh`, the ranks of a row share out a copy.

    Several gradients of one parameter before a `reduce`, as several backward passes bring them, are summed. The next
    forward pass drops the gradients of a backward pass that raised. It must have raised on all ranks alike.
    """

    def __init__(self, module: nn.Module, world: World, *, bucket_cap_mb: float = 25, mesh: Mesh | None = None) -> None:
        if any(parameter in other.pieces for other in _in_use for parameter in module.parameters()):
            raise ConfigError("the model is sharded already. A model can be sharded once: build it again")
        sync_initial_state(module, world)
        self.module, self.world, self.shards = module, world, Shards(world, mesh)
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self.pieces: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in self.named.values():
            parameter.data = parameter.data.contiguous()
            cut = piece_of(parameter.numel(), self.shards.rank, self.shards.size)
            self.pieces[parameter] = nn.Parameter(parameter.detach().view(-1)[cut])
            mark_as_piece(self.pieces[parameter])
        backwards = list(self.named.items())[::-1]  # about the order in which gradients arrive
        cuts = assign_buckets(
            [p.nbytes for _, p in backwards],
            [p.dtype for _, p in backwards],
            bucket_cap_mb * MIB,
            min(1, bucket_cap_mb) * MIB,
        )
        of_buckets = [dict(backwards[index] for index in cut) for cut in cuts]
        self.buckets = [Reduction(named, next(iter(named.values())).dtype, self.shards) for named in of_buckets]
        self.reductions = Reductions(self.buckets, world)
        module.register_forward_pre_hook(self._before_forward)
        _in_use.add(self)
        for bucket in self.buckets:
            for index, name in enumerate(bucket.names):
                self.named[name].register_post_accumulate_grad_hook(partial(self.reductions.arrive, bucket, index))

    def _before_forward(self, *_: object) -> None:
        require_frozen(self._frozen, "Unfreeze parameters before the model is sharded")
        if self.reductions.was_interrupted:
            self.reductions.discard()

    def reduce(self) -> None:
        """Wait for the reductions of a backward pass. Call it after each of them. Collective."""
        self.reductions.reduce()

    def finish(self) -> None:
        """Give the pieces their gradients, after the last backward pass of a step. Collective."""
        gradients = self.reductions.take()
        for name, parameter in self.named.items():
            self.pieces[parameter].grad = gradients.get(name)

    @torch.no_grad()
    def gather(self) -> None:
        """After the optimizer's step: all parameters for all ranks. Collective."""
        for bucket in self.buckets if self.shards.size > 1 else ():
            layout = bucket.layout
            rows = torch.zeros(self.shards.size, layout.length, dtype=bucket.dtype, device=self.shards.device)
            row = rows.new_zeros(layout.length)
            parameters = [self.named[name] for name in bucket.names]
            for place, parameter in zip(layout.pieces(row, self.shards.rank), parameters, strict=True):
                place.copy_(self.pieces[parameter])
            dist.all_gather_into_tensor(rows.view(-1), row, group=self.shards.inside)
            for index, parameter in enumerate(parameters):
                layout.unpack(rows, index, parameter.data)


_in_use: WeakSet[ShardedGradients] = WeakSet()  # each as long as its module
