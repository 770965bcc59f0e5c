"""DiLoCo's outer optimizer: where the ranks went in a round, on average, is the gradient of one more step.

    start                      the weights with which all ranks began the round
    difference = start - mean  the outer gradient
    velocity = momentum * velocity + difference
    weights = start - learning_rate * (difference + momentum * velocity)        Nesterov's momentum

With a learning rate of 1 and no momentum the weights become the mean: local SGD. The paper has 0.7 and 0.9, and AdamW
as the inner optimizer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class OuterNesterov:
    """SGD with Nesterov's momentum on the difference that a round has made to the `named` parameters.

    All ranks compute the same from the same mean, so nothing more is sent. It keeps 8 bytes for each parameter in
    float32: where the round began, and the velocity.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], learning_rate: float, momentum: float) -> None:
        self.named, self.learning_rate, self.momentum = list(named), learning_rate, momentum
        self.start = {name: parameter.detach().clone() for name, parameter in named}
        self.velocity = {name: torch.zeros_like(each) for name, each in self.start.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round: note the parameters as they are now, as its start."""
        for name, parameter in self.named:
            self.start[name].copy_(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """End a round: take the parameters, which are the mean over ranks now, for where it has led, make the outer
        step from its start, and set them to the result, with which the next round begins."""
        for name, parameter in self.named:
            start, velocity = self.start[name], self.velocity[name]
            difference = start - parameter
            velocity.mul_(self.momentum).add_(difference)
            parameter.copy_(start - self.learning_rate * (difference + self.momentum * velocity))

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, stored in ((self.start, state["start"]), (self.velocity, state["velocity"])):
            for name, tensor in mine.items():
                tensor.copy_(stored[name])
