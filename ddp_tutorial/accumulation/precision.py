"""Implement mixed precision, loss scaling, gradient clipping, and the optimizer step, identically on every rank.

With autocast (Micikevicius et al., "Mixed precision training", 2018), matrix products are computed in 16 bits. Weights,
gradients and the optimizer state stay in float32. The largest float16 value is 65,504, and values below about 3e-8
become zero. Therefore, with float16, the loss is multiplied by a scale before the backward pass, and the gradient is
divided by the scale afterward. If the scale is too large and the gradient overflows, all ranks skip the step and halve
the scale. Loss scaling is not required for bfloat16.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddp_tutorial.accumulation.config import PrecisionConfig
from ddp_tutorial.collectives import any_rank
from ddp_tutorial.config import ConfigError
from ddp_tutorial.world import World


class NotFiniteError(RuntimeError):
    """Raised if a loss or a gradient is infinite or NaN, and a smaller loss scale would not help."""


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` if `optimizer.step` requires a closure that recomputes the loss, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} requires a closure that recomputes the gradient, but a training step "
            "computes the gradient only once. Use an optimizer whose step() requires no closure, such as "
            "torch.optim.AdamW"
        )


@dataclass
class Scale:
    """The loss scale, which is halved after an overflow and doubled after `growth_interval` steps without overflow.

    `torch.amp.GradScaler` uses the same update rule. All ranks must call `update` with the same `overflow`.
    """

    value: float
    growth_interval: int
    steady: int = 0  # steps since the last change
    overflows: int = 0

    def update(self, overflow: bool) -> None:
        """Update the scale after a step."""
        if overflow:
            self.value, self.steady, self.overflows = self.value / 2, 0, self.overflows + 1
            return
        self.steady += 1
        if self.steady >= self.growth_interval:  # the interval may be shorter than in the checkpoint
            self.value, self.steady = self.value * 2, 0


class Update(NamedTuple):
    """The gradient's norm before clipping, and whether the update has been applied to the weights.

    `scale_may_help` is true if a smaller loss scale may prevent the overflow.
    """

    norm: torch.Tensor
    applied: bool
    scale_may_help: bool


def total_norm_over(tensors: Sequence[torch.Tensor], group: Any, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the combined norm of all ranks' `tensors`, as a tensor on `device`. Collective in `group`.

    `ranks` is the size of `group`. None selects the default group. An element counts once for each rank that stores it.
    """
    squares = get_total_norm(tensors).to(device, torch.float64).square()
    if ranks > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().float()


class Precision:
    """A run's mixed-precision implementation.

    Use `autocast` in the forward pass, multiply the loss by `loss_scale`, and call `update` after the backward pass.

    With DDP, all ranks hold the same gradient and therefore compute the same norm. With a loss scale, the ranks also
    communicate whether the gradient overflowed. If only some ranks ran the update, the weights would silently diverge.
    """

    def __init__(self, config: PrecisionConfig | None = None, world: World | None = None) -> None:
        """Create the loss scale if `config` selects float16. The default precision is float32."""
        self.config, self.world = config or PrecisionConfig(), world or World()
        is_half = self.config.dtype == "fp16"
        self.scale = Scale(self.config.initial_scale, self.config.growth_interval) if is_half else None

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied before the backward pass, which is 1 except with float16."""
        return self.scale.value if self.scale else 1.0

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context manager for the forward pass and the loss."""
        if self.config.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.float16 if self.scale else torch.bfloat16)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        loss: float,
        norm_of: Callable[[Sequence[torch.Tensor]], torch.Tensor] = get_total_norm,
    ) -> Update:
        """Divide the gradient by the scale, clip it by its norm, run the optimizer step and clear the gradient.

        Collective with float16: if any rank's gradient is non-finite, all ranks skip the step. The gradient is clipped
        after the division, because `clip` is the maximum norm of the unscaled gradient.

        Args:
            optimizer: The optimizer to step.
            clip: The maximum norm of the gradient, or None to disable clipping.
            loss: The unscaled loss over all ranks, which determines whether a smaller scale may prevent an overflow.
            norm_of: A function that returns the norm of the full gradient, required if this rank stores only a shard.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.scale:
            for gradient in gradients:
                gradient.div_(self.scale.value)
        norm = norm_of(gradients)
        length = float(norm)
        overflow = not math.isfinite(length)
        scale_may_help = False
        if self.scale:
            overflow = any_rank(self.world, overflow)
            if overflow:
                scale_may_help = self.scale.value > 1 and math.isfinite(loss)
            self.scale.update(overflow)
        if not overflow:
            if clip is not None and length + 1e-6 > clip:  # otherwise, PyTorch would multiply by 1
                clip_grads_with_norm_(parameters, clip, norm)
            optimizer.step()
        for parameter in parameters:  # same effect as optimizer.zero_grad(), in a fifth of the time
            parameter.grad = None
        return Update(norm, not overflow, scale_may_help)

    def state_dict(self) -> dict[str, float | int]:
        """Return the state of the scale, which is the same on every rank, or an empty dict if there is no scale."""
        return {} if self.scale is None else {k: getattr(self.scale, k) for k in ("value", "steady", "overflows")}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore the scale. Raise `ValueError` if only one of `state` and this object contains a scale."""
        if bool(state) != bool(self.scale):
            wanted = "must not contain" if state else "must contain"
            raise ValueError(
                f"a checkpoint for precision {self.config.dtype} {wanted} a loss scale, which only fp16 uses"
            )
        for name, value in state.items():
            setattr(self.scale, name, value)
