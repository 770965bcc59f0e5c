"""Define DiLoCo's outer optimizer, whose gradient is the negative average weight change in a round.

    start                      the weights at the beginning of the round
    difference = start - mean  the outer gradient
    velocity = momentum * velocity + difference
    weights = start - learning_rate * (difference + momentum * velocity)        Nesterov momentum

With a learning rate of 1 and no momentum, the new weights are the mean, as in local SGD. The DiLoCo paper uses a
learning rate of 0.7 and a momentum of 0.9, with AdamW as the inner optimizer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class OuterNesterov:
    """SGD with Nesterov momentum on the outer gradient of a round.

    All ranks compute the same step from the same mean, so the step requires no communication. The state consists of the
    velocity and the weights at the beginning of the round. The state requires 8 bytes per float32 parameter.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], learning_rate: float, momentum: float) -> None:
        """Copy the current parameters as the initial weights of the first round, with a velocity of zero."""
        self.named, self.learning_rate, self.momentum = list(named), learning_rate, momentum
        self.start = {name: parameter.detach().clone() for name, parameter in named}
        self.velocity = {name: torch.zeros_like(each) for name, each in self.start.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Save the current parameters as the initial weights of a round."""
        for name, parameter in self.named:
            self.start[name].copy_(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Take an outer step at the end of a round.

        Before the call, the parameters must equal the mean over all ranks. The step replaces these parameters with the
        initial weights of the next round.
        """
        for name, parameter in self.named:
            start, velocity = self.start[name], self.velocity[name]
            difference = start - parameter
            velocity.mul_(self.momentum).add_(difference)
            parameter.copy_(start - self.learning_rate * (difference + self.momentum * velocity))

    def state_dict(self) -> dict[str, Any]:
        """Return the round's initial weights and the velocity, by parameter name."""
        return {"start": self.start, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the round's initial weights and the velocity."""
        for mine, stored in ((self.start, state["start"]), (self.velocity, state["velocity"])):
            for name, tensor in mine.items():
                tensor.copy_(stored[name])
