"""What a checkpoint keeps of ranks whose weights differ within a round: the mean of all, and each rank's own.

The mean is what `load`, `sample` and `export` find. Each rank's own is what goes on to the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ddp_tutorial.checkpoint.components import State
from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.local_sgd.rounds import Rounds
from ddp_tutorial.world import World


class AveragedModelState:
    """The weights that `full_parameters` shows, the same on all ranks. `state_dict` is collective."""

    def __init__(self, module: nn.Module, whole: Callable[[], AbstractContextManager[nn.Module]]) -> None:
        self.module, self.full_parameters = module, whole

    def state_dict(self) -> State:
        with self.full_parameters() as module:
            return deepcopy(dict(module.state_dict()))  # the copies of tied weights are tied

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)


class LocalWeightsState:
    """Within a round, this rank's weights and buffers; at its end nothing, for they are those that all ranks have.

    `alone` says how many steps of a round this rank has made.
    """

    def __init__(self, module: nn.Module, world: World, rounds: Rounds, alone: Callable[[], int]) -> None:
        self.module, self.world, self.rounds, self.alone = module, world, rounds, alone

    def state_dict(self) -> State:
        alone = self.alone()
        weights = dict(self.module.state_dict()) if alone else {}
        return {"alone": alone, "length": self.rounds.length, "begin": self.rounds.begin, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` within a round of another length, which would end elsewhere."""
        if state["alone"] and Rounds(state["length"], state["begin"]) != self.rounds:
            raise CheckpointError(
                f"the checkpoint is {state['alone']} steps into a round of {state['length']}, begun after step "
                f"{state['begin']} or a whole number of rounds later: go on with the same 'local.round' and "
                "'local.begin', or from the end of a round"
            )
        if state["alone"]:
            self.module.load_state_dict(state["weights"])

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        """At the end of a round there is nothing to restore. Raises `CheckpointError` within one: each rank's own
        weights fit no other number of ranks."""
        if alone := states[0]["alone"]:
            length, ranks = states[0]["length"], len(states)
            raise CheckpointError(
                f"step {step} is {alone} steps into a round of {length}, and each of {ranks} ranks has weights of its "
                f"own, which cannot be given to {self.world.size}. Go on with {ranks} ranks, or from the end of a "
                "round; or leave 'local' out, to go on with the mean of the weights"
            )


class LocalOptimizerState:
    """The state of this rank's optimizer, which is never averaged. Another number of ranks begins with the mean over
    those that there were: of momentum and of Adam's averages; of what is one number, such as the step, the first."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> State:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        of_ranks = [state["state"] for state in states]
        merged: dict[int, dict[str, Any]] = {}
        for index in sorted({index for each in of_ranks for index in each}):
            having = [each[index] for each in of_ranks if index in each]  # a rank may never have used a parameter
            merged[index] = {key: _mean([each[key] for each in having]) for key in having[0]}
        self.optimizer.load_state_dict({**states[0], "state": merged})


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim() and first.is_floating_point():
        return torch.stack(list(values)).mean(0)
    return first
