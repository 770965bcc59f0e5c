"""A few numbers that the ranks add up together with their gradients, so that they cost no all-reduce of their own.

For torch's DDP they are the gradient of one parameter more, of which the model knows nothing. Gradients are float32
and come back as their mean, so each number [float64] goes in three parts that add up to it, W times as large for W
ranks. The first two have 12 bits of 24: what ranks of about equal numbers add up there is exact.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ddp_tutorial.collectives import as_vector

Number = TypeVar("Number", float, torch.Tensor)

_NAME = "_numbers_of_the_carrier"
_PARTS = 3
_SPLIT = 2.0**41 + 1  # of 53 bits, 12 are before the cut
_MARK = 1 + 2**-12  # what rounds gradients to 16 bits makes 1 of it


class Carrier:
    """Up to `room` numbers for each backward in which the ranks of a `DistributedDataParallel` talk.

    carrier = Carrier(room=64, ranks=world.size)
    carrier.join(module)
    ddp = DistributedDataParallel(module)      # it takes the parameter for one of the model's
    carrier.leave(module)

    carrier.load(numbers)
    carrier.backward(loss(ddp(batch)))
    carrier.sums()                             # of all ranks
    """

    def __init__(self, room: int, ranks: int, device: torch.device) -> None:
        self.room, self.ranks = room, ranks
        self._parameter = nn.Parameter(torch.zeros(1 + _PARTS * room, device=device))
        self._gradient = torch.zeros_like(self._parameter, requires_grad=False)
        self._gradient[0] = _MARK * ranks
        self._on_cpu = self._gradient.numpy() if device.type == "cpu" else None  # the same memory
        self._count = 0

    @staticmethod
    def can_serve(module: nn.Module, ranks: int) -> bool:
        """Would the numbers share a bucket with the gradients, and come back whole?

        DDP has one bucket or more for each dtype. And it divides by multiplying with 1 / ranks, which is rounded: of 7
        times a number, a seventh may be another number.
        """
        if any(p.dtype != torch.float32 for p in module.parameters() if p.requires_grad):
            return False
        numbers = torch.arange(2**11, 2**12, dtype=torch.float32)
        return torch.equal(numbers * ranks * (1.0 / ranks), numbers)

    def join(self, module: nn.Module) -> None:
        """Register this carrier's parameter with `module`, so that DDP finds it among the model's."""
        module.register_parameter(_NAME, self._parameter)

    def leave(self, module: nn.Module) -> None:
        """Take the parameter out of `module` again, so that its state dict and its optimizer are without it."""
        del module._parameters[_NAME]  # delattr would ask the inner module of a compiled one

    def load(self, numbers: Sequence[float | torch.Tensor]) -> None:
        """Take `numbers` along with the next `backward`, as float64."""
        self._count = len(numbers)
        here = slice(1, 1 + _PARTS * len(numbers))
        if self._on_cpu is not None:  # a tenth of the time that operations take, on tensors so small
            with np.errstate(over="ignore"):  # what float32 does not hold is an infinity, as on a GPU
                self._on_cpu[here] = [part * self.ranks for number in numbers for part in _in_parts(float(number))]
        elif numbers:
            parts = torch.stack(_in_parts(as_vector(numbers, self._gradient.device)), dim=1)
            self._gradient[here] = parts.flatten() * self.ranks

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, in which the ranks talk, from one more tensor on: the parameter, whose gradient the
        numbers are."""
        self._parameter.grad = None  # of a step before
        torch.autograd.backward([loss, self._parameter], [None, self._gradient])

    def sums(self) -> list[float]:
        """The sums over all ranks of the numbers that `load` was given, after that backward.

        Raises `RuntimeError` where a communication hook has rounded them.
        """
        assert self._parameter.grad is not None, "sums come after backward"
        mark, *parts = self._parameter.grad[: 1 + _PARTS * self._count].tolist()
        if not abs(mark - _MARK * self.ranks) < 2**-14 * self.ranks:
            raise RuntimeError(
                "a communication hook of the DistributedDataParallel rounds what travels with the gradients. Name it "
                "in the config (ddp.hook) instead of registering it"
            )
        return [sum(parts[first : first + _PARTS]) for first in range(0, len(parts), _PARTS)]


def _in_parts(number: Number) -> list[Number]:
    """Three that add up to `number`, or to each of a tensor of float64: twice its next 12 bits, then the rest."""
    first = _twelve_bits(number)
    second = _twelve_bits(number - first)
    return [first, second, number - first - second]


def _twelve_bits(number: Number) -> Number:
    """The upper ones, rounded (Dekker, 1971)."""
    scaled = number * _SPLIT
    return scaled - (scaled - number)
