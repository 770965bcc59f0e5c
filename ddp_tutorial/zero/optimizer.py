"""ZeRO-1: each parameter has one rank that keeps its optimizer state and steps it, and gives it to the others.

    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), world)
    loss(model, batch).backward()         # with any DDP: every rank has the whole gradient
    optimizer.step()                      # each rank steps its parameters; then all have all of them

An optimizer that looks at a parameter as a whole (a norm of its update, a factorised average) is right too, since no
parameter is cut. AdamW keeps 8 bytes for each element in float32; of those a rank has about 1/W.
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
    """Raise `ValueError` for an optimizer that has been stepped, and `ConfigError` for one that needs a closure.

    Some, such as Adagrad, have a state before their first step.
    """
    require_no_closure(optimizer)
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ValueError("the optimizer has been stepped, or loaded: shard it before its first step")


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer, `of_all`, that has not been stepped yet, from now on stepping this rank's parameters only.
    `of_all` must not need a closure.

    `param_groups` are those of all parameters, for schedulers and for clipping; a group may be added later. Parameters
    are dealt out from the largest to the smallest, each to the rank that has least: so no rank has more than 1/W of all
    elements and one parameter. `step` and `state_dict` are collective. The bits are those of the unsharded optimizer.
    With a `mesh`, they are dealt out among the ranks of a row, in each row alike.
    """

    def __init__(self, of_all: torch.optim.Optimizer, world: World, mesh: Mesh | None = None) -> None:
        require_group(world)
        require_shardable(of_all)
        self.mine, self.world, self.shards = of_all, world, Shards(world, mesh)
        self.owner: dict[torch.Tensor, int] = {}  # by its place in the row
        self.elements = [0] * self.shards.size  # of each rank's parameters
        groups, of_all.param_groups = of_all.param_groups, []
        super().__init__(groups, of_all.defaults)
        own = {p: state for p, state in of_all.state.items() if self.owner[p] == self.shards.rank}
        self.mine.state = self.state = defaultdict(dict, own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
        """Step this rank's parameters, then give every rank all of them. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, mine in zip(self.param_groups, self.mine.param_groups, strict=True):
            mine.update(_options(group))  # a scheduler has changed the learning rate of all
        self.mine.step()
        if self.shards.size > 1:
            self._exchange()
        return loss

    def _exchange(self) -> None:
        """Give every rank all parameters, by one all-gather for each dtype: row r has those of rank r, one after
        another."""
        kinds: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for parameter in self.owner:
            kinds[parameter.dtype].append(parameter)
        for dtype, parameters in kinds.items():
            of_ranks = [self._owned(parameters, rank) for rank in range(self.shards.size)]
            longest = max(sum(map(torch.numel, owned)) for owned in of_ranks)
            rows = torch.zeros(self.shards.size, longest, dtype=dtype, device=self.shards.device)
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
        """What the unsharded optimizer's would be: the state of all ranks. Collective."""
        part = super().state_dict()
        of_ranks = all_gather(self.world, part["state"])
        return part | {"state": {index: state for states in of_ranks for index, state in sorted(states.items())}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of what `state_dict` returns, here or of an unsharded optimizer."""
        super().load_state_dict(state_dict)
        of_mine = {p: state for p, state in self.state.items() if self.owner[p] == self.shards.rank}
        self.mine.state = self.state = defaultdict(dict, of_mine)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group: all its entries but the parameters."""
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}
