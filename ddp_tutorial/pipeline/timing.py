"""Split a model into stages by its modules' measured execution times, for `pipeline.split=measured`."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, call_loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.pipeline.stages import chain_of, splits_of, writable
from ddp_tutorial.rng import preserved_rng

_REPEATS = 5


def measured_splits(
    model: nn.Module, loss: Loss, batch: Any, stages: int, precision: Precision | None = None
) -> list[str]:
    """Return the names of the modules at which to split `model` so that the slowest stage is as fast as possible.

    The function measures a copy of the model, so the model's buffers and gradients do not change. The states of the
    random number generators are restored. The model and the micro-batch `batch` must be on the measured device. The
    last module's execution time includes the loss function.
    """
    return splits_of(module_seconds(model, loss, batch, precision), stages)


def module_seconds(model: nn.Module, loss: Loss, batch: Any, precision: Precision | None = None) -> dict[str, float]:
    """Return each module's combined forward and backward time in seconds, as the minimum of five measurements."""
    precision = precision or Precision()
    timed = _TimedChain(copy.deepcopy(model), precision.world.device)
    passes = []
    with preserved_rng(precision.world.device):
        for _ in range(1 + _REPEATS):
            passes.append(timed.measure(loss, batch, precision))
    return {name: min(each[name] for each in passes[1:]) for name in passes[0]}  # the first is a warm-up


class _TimedChain(nn.Module):
    """A module that calls the modules of a chain one by one on detached inputs, and records their execution times."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.chain, self.device = chain_of(model), device
        self.seconds: dict[str, float] = {}
        self.calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # module, output, next module's detached input

    def measure(self, loss: Loss, batch: Any, precision: Precision) -> dict[str, float]:
        """Return a dict from module name to the duration in seconds of one forward and backward pass."""
        self.seconds, self.calls = dict.fromkeys(self.chain, 0.0), []
        last = list(self.chain)[-1]
        with precision.autocast():
            total, _ = self._timed(last, lambda: call_loss(loss, self, batch))
        self.seconds[last] -= sum(seconds for name, seconds in self.seconds.items() if name != last)
        self._timed(last, total.backward)
        for name, out, x in reversed(self.calls):
            if out.requires_grad and x.grad is not None:
                self._timed(name, lambda out=out, x=x: out.backward(x.grad))  # type: ignore[misc]
        return self.seconds

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the modules. The loss calls this method once.

        The last module is not timed here. `measure` derives the last module's time from the duration of the loss call.
        """
        (first, module), *others = self.chain.items()
        if not others:
            return module(*inputs, **named)
        x = self._next(first, self._timed(first, lambda: module(*inputs, **named)))
        for name, part in others[:-1]:
            x = self._next(name, self._timed(name, lambda part=part, x=x: part(x)))  # type: ignore[misc]
        return others[-1][1](x)

    def _next(self, name: str, out: torch.Tensor) -> torch.Tensor:
        x = out.detach()
        if x.is_floating_point():
            x.requires_grad_()
        self.calls.append((name, out, x))
        return writable(x)

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        self._finish()
        start = time.perf_counter()
        result = work()
        self._finish()
        self.seconds[name] += time.perf_counter() - start
        return result

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
