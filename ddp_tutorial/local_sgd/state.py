"""Save the state of ranks whose weights differ within a round.

A checkpoint contains the averaged weights, which `load`, `sample`, and `export` use. The checkpoint also contains each
rank's own weights, so that a resumed run is bitwise identical to an uninterrupted run.
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
    """The averaged weights, which are the same on all ranks."""

    def __init__(self, module: nn.Module, whole: Callable[[], AbstractContextManager[nn.Module]]) -> None:
        """Store the model. Within the context manager that `whole` returns, the model contains the averaged weights."""
        self.module, self.full_parameters = module, whole

    def state_dict(self) -> State:
        """Return a copy of the averaged weights. Collective."""
        with self.full_parameters() as module:
            return deepcopy(dict(module.state_dict()))  # copies of tied weights stay tied

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the averaged weights into the model."""
        self.module.load_state_dict(state)


class LocalWeightsState:
    """This rank's weights and buffers within a round, as a checkpoint component.

    At the end of a round, the state contains no weights, because all ranks hold the averaged weights.
    """

    def __init__(self, module: nn.Module, world: World, rounds: Rounds, alone: Callable[[], int]) -> None:
        """Store the arguments. `alone` returns the number of steps that this rank has taken in the current round."""
        self.module, self.world, self.rounds, self.alone = module, world, rounds, alone

    def state_dict(self) -> State:
        """Return this rank's weights and its position in the round."""
        alone = self.alone()
        weights = dict(self.module.state_dict()) if alone else {}
        return {"alone": alone, "length": self.rounds.length, "begin": self.rounds.begin, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's weights if the checkpoint was saved within a round.

        Raises:
            CheckpointError: If the checkpoint was saved within a round that would end at a different step with this
                run's settings.
        """
        if state["alone"] and Rounds(state["length"], state["begin"]) != self.rounds:
            raise CheckpointError(
                f"the checkpoint was saved after {state['alone']} of the {state['length']} steps of a round. Resume "
                f"with local.round={state['length']} and local.begin={state['begin']}, or from a checkpoint at the end "
                "of a round"
            )
        if state["alone"]:
            self.module.load_state_dict(state["weights"])

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        """Do nothing if the checkpoint was saved at the end of a round, when all ranks hold the averaged weights.

        Raises:
            CheckpointError: If the checkpoint was saved within a round. The ranks' different weights cannot be loaded
                on a different number of ranks.
        """
        if alone := states[0]["alone"]:
            length, ranks = states[0]["length"], len(states)
            raise CheckpointError(
                f"the checkpoint from step {step} was saved after {alone} of the {length} steps of a round. Its "
                f"{ranks} ranks have different weights, which cannot be loaded on {self.world.size} ranks. Resume "
                f"with {ranks} ranks, or from a checkpoint at the end of a round. To resume from the averaged weights, "
                "use resume_without=[local]"
            )


class LocalOptimizerState:
    """The state of this rank's optimizer, which is never averaged during training."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer."""
        self.optimizer = optimizer

    def state_dict(self) -> State:
        """Return the state of this rank's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of this rank's optimizer."""
        self.optimizer.load_state_dict(state)

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        """Set each state tensor, such as momentum or Adam's moving averages, to its mean over the saved ranks.

        Scalars, such as the step, are taken from the first rank.
        """
        of_ranks = [state["state"] for state in states]
        merged: dict[int, dict[str, Any]] = {}
        for index in sorted({index for each in of_ranks for index in each}):
            having = [each[index] for each in of_ranks if index in each]  # a rank may not have used a parameter
            merged[index] = {key: _mean([each[key] for each in having]) for key in having[0]}
        self.optimizer.load_state_dict({**states[0], "state": merged})


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim() and first.is_floating_point():
        return torch.stack(list(values)).mean(0)
    return first
