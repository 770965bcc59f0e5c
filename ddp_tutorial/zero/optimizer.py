"""Implement ZeRO-1, in which each parameter has one owner rank that updates it and stores its optimizer state.

Parameters are not split, so optimizers that use the whole parameter are supported. Such optimizers include LAMB, which
uses the norm of the update, and Adafactor, which uses a factorized average. AdamW stores 8 bytes for each float32
element, and each rank stores about 1/W of this state. Example:

    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), world)
    loss(model, batch).backward()         # works with any DDP: every rank has the full gradient
    optimizer.step()                      # updates this rank's parameters, then gathers all parameters
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.accumulation.precision import require_no_closure
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.world import World, require_group
from ddp_tutorial.zero.shards import Shards


def require_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Check that `optimizer` can be sharded.

    Optimizers that have state before their first step, such as Adagrad, are accepted.

    Raises:
        ValueError: If the optimizer has taken a step.
        ConfigError: If the optimizer requires a closure.
    """
    require_no_closure(optimizer)
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ValueError(
            "the optimizer has already taken a step: shard it before its first step, and before load_state_dict"
        )


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer wrapper in which each rank updates only its own parameters. The constructor is collective.

    `param_groups` contains the groups of all parameters, for schedulers and clipping. You can add groups later.
    Parameters are assigned in order of decreasing size, always to the rank with the fewest elements. Therefore, no rank
    owns more than 1/W of all elements plus one parameter. The updated parameters are bitwise identical to those of the
    unsharded optimizer.

    Args:
        of_all: An optimizer for all parameters. It must not have taken a step and must not require a closure.
        world: The participating ranks.
        mesh: The number of model replicas and the number of ranks per replica. Each row of the mesh shards the
            parameters in the same way. The default is a single replica.

    Raises:
        ValueError: If `of_all` has taken a step.
        ConfigError: If `of_all` requires a closure.
    """

    def __init__(self, of_all: torch.optim.Optimizer, world: World, mesh: Mesh | None = None) -> None:
        """Assign the parameters to ranks. Collective; see the class docstring."""
        require_group(world)
        require_shardable(of_all)
        self.mine, self.world, self.shards = of_all, world, Shards(world, mesh)
        self.owner: dict[torch.Tensor, int] = {}  # parameter -> its owner's position in the row
        self.elements = [0] * self.shards.size  # number of elements that each rank owns
        groups, of_all.param_groups = of_all.param_groups, []
        super().__init__(groups, of_all.defaults)
        own = {p: state for p, state in of_all.state.items() if self.owner[p] == self.shards.rank}
        self.mine.state = self.state = defaultdict(dict, own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and assign its parameters to ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in sorted(group["params"], key=torch.numel, reverse=True):
            rank = self.elements.index(min(self.elements))
            self.owner[parameter] = rank
            self.elements[rank] += parameter.numel()
        self.mine.add_param_group(_options(group) | {"params": self._owned(group["params"], self.shards.rank)})

    def _owned(self, parameters: Iterable[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [parameter for parameter in parameters if self.owner[parameter] == rank]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, and then gather all parameters on every rank. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, mine in zip(self.param_groups, self.mine.param_groups, strict=True):
            mine.update(_options(group))  # a scheduler changes the options in self.param_groups
        self.mine.step()
        if self.shards.size > 1:
            self._exchange()
        return loss

    def _exchange(self) -> None:
        """Gather all parameters on every rank, with one all-gather per dtype. Collective.

        Row r of the gathered tensor contains the concatenated parameters of rank r.
        """
        by_dtype: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for parameter in self.owner:
            by_dtype[parameter.dtype].append(parameter)
        for dtype, parameters in by_dtype.items():
            of_ranks = [self._owned(parameters, rank) for rank in range(self.shards.size)]
            longest = max(sum(map(torch.numel, owned)) for owned in of_ranks)
            rows = torch.zeros(self.shards.size, longest, dtype=dtype, device=self.shards.world.device)
            mine = [parameter.reshape(-1) for parameter in of_ranks[self.shards.rank]]
            row = rows.new_zeros(longest)
            if mine:
                torch.cat(mine, out=row[: sum(map(len, mine))])
            dist.all_gather_into_tensor(rows.view(-1), row, group=self.shards.inside)
            for rank, owned in enumerate(of_ranks):
                pieces = rows[rank].split([*map(torch.numel, owned), longest - sum(map(torch.numel, owned))])
                for parameter, piece in zip(owned, pieces, strict=False) if rank != self.shards.rank else ():
                    parameter.copy_(piece.view(parameter.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, in the format of the unsharded optimizer. Collective."""
        part = super().state_dict()
        of_ranks = all_gather(self.world, part["state"])
        return part | {"state": {index: state for states in of_ranks for index, state in sorted(states.items())}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a state dict from a `ShardedOptimizer` or an unsharded optimizer."""
        super().load_state_dict(state_dict)
        of_mine = {p: state for p, state in self.state.items() if self.owner[p] == self.shards.rank}
        self.mine.state = self.state = defaultdict(dict, of_mine)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, which are all entries except the parameters and their names."""
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}
