"""From gradients to the next weights, in the same way on every rank: half precision, overflow, clipping, the step.

With autocast (Micikevicius et al., "Mixed precision training", 2018) matrix products are computed in 16 bits; weights,
gradients and the optimiser's state stay in float32, the master copy. bfloat16 needs nothing else. float16 ends at
65,504 and knows nothing below 6e-8, so the loss is multiplied by a scale before backward, and the gradient divided by
it after. Where the scale was too large, the gradient overflows: the step is left out, on all ranks, and the scale
halved.
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
    """A loss or a gradient is infinite or not a number, and a smaller loss scale would not help."""


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` if `optimizer.step` needs a closure that computes the loss again, as LBFGS's does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes the loss several times in one step, through a closure. A step here "
            "computes one gradient over all ranks. Use an optimizer whose step() needs no closure, such as "
            "torch.optim.AdamW"
        )


@dataclass
class Scale:
    """The factor of the loss: halved at an overflow, doubled after `growth_interval` steps without one.

    `torch.amp.GradScaler` does the same for one process; all ranks must be told the same `overflow`.
    """

    value: float
    growth_interval: int
    steady: int = 0  # steps since the last change
    overflows: int = 0

    def update(self, overflow: bool) -> None:
        """Halve the factor after an overflow, count a step without one; call it after each step."""
        if overflow:
            self.value, self.steady, self.overflows = self.value / 2, 0, self.overflows + 1
            return
        self.steady += 1
        if self.steady == self.growth_interval:
            self.value, self.steady = self.value * 2, 0


class Update(NamedTuple):
    """What became of a step: the gradient's norm before clipping, and whether the weights have moved.

    `scale_may_help` tells an overflow, which a smaller scale can cure, from a bug.
    """

    norm: torch.Tensor
    applied: bool
    scale_may_help: bool


def total_norm_over(tensors: Sequence[torch.Tensor], group: Any, ranks: int, device: torch.device) -> torch.Tensor:
    """The norm of all elements that the `ranks` ranks of `group` hold in their `tensors`, each element counted where it
    is held; the same on all of them. None is the group of all ranks. Collective."""
    squares = get_total_norm(tensors).to(device, torch.float64).square()
    if ranks > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().float()


class Precision:
    """How one run computes: `autocast` around forward, `loss_scale` as factor before backward, then `update`.

    With DDP, all ranks have the same gradient, so the same norm. Whether it has overflowed is agreed all the same where
    there is a scale: one rank that steps while another does not, and the weights differ from then on without a word.
    """

    def __init__(self, config: PrecisionConfig | None = None, world: World | None = None) -> None:
        self.config, self.world = config or PrecisionConfig(), world or World()
        is_half = self.config.dtype == "fp16"
        self.scale = Scale(self.config.initial_scale, self.config.growth_interval) if is_half else None

    @property
    def loss_scale(self) -> float:
        return self.scale.value if self.scale else 1.0

    def autocast(self) -> AbstractContextManager[None]:
        """Around forward and loss; not around backward, which takes the types of forward."""
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
        """Divide by the scale, clip by the norm over all parameters, step, zero. Collective with float16.

        Where this rank's optimizer has a part of the gradient only, `norm_of` is to find the norm of the whole.

        The order matters: clipped before it is divided, a gradient would be `scale` times too small. A step whose
        gradient is not finite on some rank is left out on all. A smaller scale cannot help where `loss`, of all ranks,
        is not finite, since it has not been scaled yet, nor when the scale is down at 1.
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
            if clip is not None and length + 1e-6 > clip:  # as torch has it; else it would multiply all gradients by 1
                clip_grads_with_norm_(parameters, clip, norm)
            optimizer.step()
        for parameter in parameters:  # as optimizer.zero_grad() does, in a fifth of its time
            parameter.grad = None
        return Update(norm, not overflow, scale_may_help)

    def state_dict(self) -> dict[str, float | int]:
        """The scale's, which is the same on every rank; empty where there is none."""
        return {} if self.scale is None else {k: getattr(self.scale, k) for k in ("value", "steady", "overflows")}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on with the scale of `state`. Raises `ValueError` where that has one and this precision none, or the other
        way round."""
        if bool(state) != bool(self.scale):
            raise ValueError(
                f"the state has {'a' if state else 'no'} scale of the loss, which does not go with "
                f"precision {self.config.dtype}: fp16 has one, the others have none"
            )
        for name, value in state.items():
            setattr(self.scale, name, value)
