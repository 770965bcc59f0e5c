"""Define the interface of a loss function, and sum losses over a step's micro-batches and over all ranks.

A loss function returns a sum and a count, because the means of different micro-batches and ranks cannot be added. The
count is the number of samples or non-padding tokens. A loss function may also return a dict that maps each metric's
name to a sum and a count. To combine several losses, return their weighted sum, and report each loss as a metric.

Example:
    def loss(model, batch):
        logits, count = model(batch["pixels"]), len(batch["digit"])
        right = (logits.argmax(-1) == batch["digit"]).sum()
        return F.cross_entropy(logits, batch["digit"], reduction="sum"), count, {"accuracy": (right, count)}
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import all_gather, to_vector
from ddp_tutorial.compat import multiply_
from ddp_tutorial.config import ConfigError
from ddp_tutorial.world import World

# (model, batch) -> sum, count; or sum, count, {name: (sum, count)}
Loss = Callable[[Any, Any], tuple[Any, ...]]
Number = float | torch.Tensor

LOSS = "loss"  # the name of the loss in the totals
_EXAMPLE = "return F.cross_entropy(logits, targets, reduction='sum'), len(targets)"


class LossError(ConfigError):
    """Raised if a loss function returns an invalid result, or is used incorrectly."""


@dataclass(frozen=True)
class Totals:
    """The sum and count of the loss and of each metric, over all micro-batches of a step on all ranks."""

    sums: dict[str, float]
    counts: dict[str, float]
    stop_flags: float = 0.0  # the sum over all ranks; see `StepLoss.reduce`
    same_path: bool = True  # whether `path` was the same number on all ranks; see `StepLoss.reduce`

    def means(self) -> dict[str, float]:
        """Return the mean of the loss and of each metric, by name. A mean is NaN if its count is zero."""
        return {name: self.sums[name] / self.counts[name] if self.counts[name] else math.nan for name in self.sums}


def call_loss(loss: Loss, model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, tuple[Number, Number]]]:
    """Call the loss function and check its result.

    Returns:
        The loss tensor for the backward pass, and the detached sum and count of the loss and of each metric, by name.

    Raises:
        LossError: If `loss` does not return a sum and a count, optionally followed by metrics.
    """
    returned = loss(model, batch)
    if not (isinstance(returned, tuple) and len(returned) in {2, 3}):
        raise LossError(
            f"the loss function must return a sum and a count, as in '{_EXAMPLE}', got {_describe(returned)}"
        )
    total, count, *rest = returned
    metrics = rest[0] if rest else {}
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise LossError(
            f"the loss function's first return value must be a tensor with one element (the sum), as in '{_EXAMPLE}', "
            f"got {_describe(total)}"
        )
    if not _is_number(count):
        raise LossError(f"the loss function's second return value must be a number (the count), got {_describe(count)}")
    if not isinstance(metrics, Mapping) or LOSS in metrics:
        raise LossError(
            f"the loss function's third return value must be a dict of metrics without the key {LOSS!r}, such as "
            f"{{'accuracy': (correct, count)}}, got {_describe(metrics)}"
        )
    for name, pair in metrics.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair))):
            raise LossError(f"metric {name!r} must be a sum and a count, as in (correct, count), got {_describe(pair)}")
    pairs = {LOSS: (total, count), **metrics}
    return total, {name: (_detached(a), _detached(b)) for name, (a, b) in pairs.items()}


def require_call(is_called: bool) -> None:
    """Raise `LossError` unless the loss function called the model that it received."""
    if not is_called:
        raise LossError(
            "the loss function did not call the model that it received as its first argument. A call to the inner "
            "module bypasses the wrapper that synchronizes gradients. Define the function as 'def loss(model, batch): "
            "...', and call model, not model.module or a model from an outer scope"
        )


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _detached(value: Number) -> Number:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return f"{value!r} ({type(value).__name__})"


class StepLoss:
    """A loss that is computed for each micro-batch of a step, and summed over micro-batches and ranks.

    The mean loss is the sum over all ranks divided by the count over all ranks. However, the other ranks' counts are
    not available before the backward pass. Therefore, `forward` divides the loss by an *expected* count, and `finish`
    multiplies the gradient by the ratio of the expected count to the actual count. The expected count is the previous
    step's count, rounded to a power of two. Division by a power of two is exact, so the gradient does not depend on the
    expected count. With float16, the division keeps values in about the same range as a mean loss would.
    """

    def __init__(self, loss: Loss, world: World, precision: Precision | None = None) -> None:
        """Store the arguments. The first step determines the expected count."""
        self.loss, self.world, self.precision = loss, world, precision or Precision(world=world)
        self.names: tuple[str, ...] = ()
        self.expected = 0.0
        self._micro_batches = 1
        self._parts: dict[str, tuple[Number, Number]] = {}
        self._summed: Callable[[], list[float]] | None = None

    def begin(self, micro_batches: int) -> None:
        """Start a step with `micro_batches` micro-batches on this rank, and discard the state of a failed step."""
        self._micro_batches, self._parts, self._summed = micro_batches, {}, None

    def forward(self, model: Any, batch: Any, loss_multiplier: float = 1.0) -> torch.Tensor:
        """Return one micro-batch's contribution to the mean loss over all ranks.

        The result is multiplied by `precision.loss_scale` and by `loss_multiplier`. The first call is collective: if
        the loss is invalid on any rank, all ranks raise `LossError`.
        """
        if self.names:
            total, parts = self._call(model, batch)
        else:
            total, parts = self._first_call(model, batch)
        if tuple(parts) != self.names:
            raise LossError(
                f"the loss function must return the same metrics in every call, got [{', '.join(self.names)}] in the "
                f"first call and [{', '.join(parts)}] in this call"
            )
        before = self._parts
        self._parts = {name: _sum(before[name], pair) if before else pair for name, pair in parts.items()}
        return total * (loss_multiplier * self.precision.loss_scale / self.expected)

    def _call(self, model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, tuple[Number, Number]]]:
        with self.precision.autocast():
            return call_loss(self.loss, model, batch)

    def _first_call(self, model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, tuple[Number, Number]]]:
        total, problem = torch.empty(0), None
        parts: dict[str, tuple[Number, Number]] = {}
        try:
            total, parts = self._call(model, batch)
        except LossError as error:
            problem = str(error)
        count = float(parts[LOSS][1]) * self._micro_batches if parts else 0.0
        of_ranks = all_gather(self.world, (problem, tuple(parts), count))
        for rank, (problem, names, _) in enumerate(of_ranks):
            if problem:
                raise LossError(f"on rank {rank}, {problem}")
            if names != of_ranks[0][1]:
                raise LossError(
                    f"the loss function must return the same metrics on all ranks, got [{', '.join(of_ranks[0][1])}] "
                    f"on rank 0 and [{', '.join(names)}] on rank {rank}"
                )
        self.names = tuple(parts)
        self.expected = self.expected or _power_of_two(sum(each for _, _, each in of_ranks))
        return total, parts

    def reduce(self, stop_flags: float = 0.0, path: int = 0) -> None:
        """Start the all-reduce of the totals. Collective.

        Call this method after the last forward pass of a step. The all-reduce overlaps with the backward pass. The
        all-reduce also sums `stop_flags`, and checks whether `path`, an int below 2^16, is the same on all ranks.
        """
        numbers = [*(value for pair in self._parts.values() for value in pair), stop_flags, path, path**2]
        values = to_vector(numbers, self.world.device)
        work = dist.all_reduce(values, async_op=True) if self.world.size > 1 else None

        def summed() -> list[float]:
            if work is not None:
                work.wait()
            return list(values.tolist())

        self._summed = summed

    def finish(self, parameters: Iterable[nn.Parameter]) -> Totals:
        """Return the totals over all ranks, and correct the gradients of `parameters` if the expected count was wrong.

        Call this method after all gradients of the step have been computed.

        Raises:
            ValueError: On all ranks, if the total count is zero, because the mean would be undefined.
        """
        totals = self._receive()
        self._correct(parameters, totals.counts[LOSS])
        self._expect(totals)
        return totals

    def _receive(self) -> Totals:
        """Wait for the all-reduce that `reduce` started, and return the totals."""
        assert self._summed is not None, "call reduce before finish"
        *numbers, stop_flags, path, squares = self._summed()
        self._summed = None
        sums, counts = (dict(zip(self.names, numbers[i::2], strict=True)) for i in range(2))
        return Totals(sums, counts, stop_flags, same_path=self.world.size * squares == path**2)  # zero variance

    def _correct(self, parameters: Iterable[nn.Parameter], count: float) -> None:
        """Multiply the gradients by the ratio of the expected count to `count`, unless `count` is zero."""
        if count not in {0, self.expected}:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            multiply_(gradients, self.expected / count)

    def _expect(self, totals: Totals) -> None:
        """Set the expected count for the next step. Raise `ValueError` if the count over all ranks is zero."""
        if not totals.counts[LOSS]:
            raise ValueError(
                "the loss function counted no elements on any rank in this step, so the mean loss is undefined"
            )
        self.expected = _power_of_two(totals.counts[LOSS])

    def state_dict(self) -> dict[str, float]:
        """Return the expected count, which is the same on all ranks and affects float16 overflows."""
        return {"expected": self.expected}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the expected count."""
        self.expected = state["expected"]


def _sum(a: tuple[Number, Number], b: tuple[Number, Number]) -> tuple[Number, Number]:
    return _double(a[0]) + _double(b[0]), _double(a[1]) + _double(b[1])


def _double(value: Number) -> Number:
    return value.double() if isinstance(value, torch.Tensor) else value


def _power_of_two(count: float) -> float:
    """Return the power of two nearest to `count` on a log scale, or 1 if `count` is zero, infinite or NaN."""
    return 2.0 ** round(math.log2(count)) if 0 < count < math.inf else 1.0
