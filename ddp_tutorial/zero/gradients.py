"""Implement ZeRO-2, in which each rank keeps only its gradient shards and updates only its parameter shards.

An all-reduce is a reduce-scatter followed by an all-gather. ZeRO-2 runs the optimizer step between the two collectives,
so ZeRO-2 sends no more bytes than data parallelism. A full gradient exists only until its bucket is sent. Example:

    sharded = ShardedGradients(model, world)
    optimizer = torch.optim.AdamW(sharded.pieces.values())  # allocates 1/W of the optimizer state
    loss(model, batch).backward()       # reduce-scatters the buckets during the backward pass
    sharded.reduce()                    # waits for the reductions
    sharded.finish()                    # assigns the gradients, summed over ranks and backward passes
    optimizer.step()
    sharded.gather()                    # gathers all parameters on all ranks
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.buckets import MIB, assign_buckets
from ddp_tutorial.ddp.wrappers import require_frozen, sync_initial_state
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World
from ddp_tutorial.zero.pieces import mark_as_piece, piece_of
from ddp_tutorial.zero.reductions import Reduction, Reductions
from ddp_tutorial.zero.shards import Shards


class ShardedGradients:
    """A wrapper that shards the gradients of `module` and keeps the full parameters. The constructor is collective.

    The constructor checks that all ranks have the same model, and broadcasts rank 0's weights. Create the optimizer
    from `pieces.values()`, which are this rank's shards. Each shard is a view of the parameter elements that this rank
    updates. The optimizer must update each element independently, like SGD or Adam. With `fused=True`, AdamW's result
    may differ from the unsharded result in the last bit, because PyTorch rounds the last elements of a tensor
    differently.

    If a rank does not use a parameter, the rank contributes zeros. A parameter that no rank uses receives no gradient.

    The gradients of all backward passes before `finish` are summed. If a backward pass raises an error, the next
    forward pass discards the gradients of that backward pass. The error must be raised on all ranks.

    Args:
        module: The model.
        world: The participating ranks.
        bucket_cap_mb: The size of a bucket in MiB. The first bucket is at most 1 MiB.
        mesh: The number of model replicas and the number of ranks per replica. The ranks in a row of the mesh share one
            replica. The default is a single replica.

    Raises:
        ConfigError: If the model is already sharded.
    """

    def __init__(self, module: nn.Module, world: World, *, bucket_cap_mb: float = 25, mesh: Mesh | None = None) -> None:
        """Register the gradient hooks and create the shards. Collective; see the class docstring."""
        if any(parameter in other.pieces for other in _in_use for parameter in module.parameters()):
            raise ConfigError("the model is already sharded: build a new model")
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
        backwards = list(self.named.items())[::-1]  # approximately the order in which gradients arrive
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
        module.register_forward_hook(self._after_forward)
        # The autograd node of a parameter calls its hooks after all hooks of the parameter, which may change the
        # gradient. A parameter does not keep its node alive, and a node must not be copied with the module.
        nodes = _in_use[self] = {name: get_gradient_edge(parameter).node for name, parameter in self.named.items()}
        for bucket in self.buckets:
            for index, name in enumerate(bucket.names):
                arrive = partial(self.reductions.arrive, bucket, index, self.named[name])
                nodes[name].register_hook(partial(_call, arrive))

    def _before_forward(self, *_: object) -> None:
        require_frozen(self._frozen, "Unfreeze parameters before the model is sharded")
        if self.reductions.was_interrupted:
            self.reductions.discard()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.reductions.watch(output)

    def reduce(self) -> None:
        """Wait for the reductions of a backward pass. Collective. Call this method after each backward pass."""
        self.reductions.reduce()

    def finish(self) -> None:
        """Assign the summed gradients to the shards. Collective. Call this method after a step's last backward pass."""
        gradients = self.reductions.take()
        for name, parameter in self.named.items():
            self.pieces[parameter].grad = gradients.get(name)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the updated parameters on all ranks. Collective. Call this method after the optimizer step."""
        for bucket in self.buckets if self.shards.size > 1 else ():
            layout = bucket.layout
            rows = torch.zeros(self.shards.size, layout.length, dtype=bucket.dtype, device=self.shards.world.device)
            row = rows.new_zeros(layout.length)
            parameters = [self.named[name] for name in bucket.names]
            for place, parameter in zip(layout.pieces(row, self.shards.rank), parameters, strict=True):
                place.copy_(self.pieces[parameter])
            dist.all_gather_into_tensor(rows.view(-1), row, group=self.shards.inside)
            for index, parameter in enumerate(parameters):
                layout.unpack(rows, index, parameter.data)


def _call(arrive: Callable[[], None], *_: object) -> None:
    arrive()


# The autograd nodes of the parameters, by name. Each entry exists as long as its module.
_in_use: WeakKeyDictionary[ShardedGradients, dict[str, Node]] = WeakKeyDictionary()
