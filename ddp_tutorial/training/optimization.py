"""The optimizer and the learning rate's schedule, by name or as somebody brings them."""

import math
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_tutorial.accumulation.precision import require_no_closure
from ddp_tutorial.config import ConfigError
from ddp_tutorial.training.config import TrainConfig

Optimizer = torch.optim.Optimizer
# Ready ones, or functions that make them of the model and of the optimizer.
OptimizerLike = Optimizer | Callable[[nn.Module], Optimizer]
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
}

# How much of the way down is left, after the part `done` of it.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return the optimizer that `config` names, for the trainable parameters.

    The optimizer is fused, unless a parameter is complex: torch has no fused kernel for complex numbers.
    """
    kind, options = OPTIMIZERS[config.optimizer]
    fused = all(parameter.is_floating_point() for parameter in model.parameters() if parameter.requires_grad)
    return kind(parameter_groups(model, config), lr=config.peak_learning_rate, fused=fused, **options)


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """The parameters that are trained, in groups for an optimizer. Decay is for matrices; norms and biases are left to
    themselves."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def make_scheduler(optimizer: Optimizer, config: TrainConfig) -> LRScheduler:
    """The schedule that `config` describes."""
    return LambdaLR(optimizer, learning_rate_factor(config))


def learning_rate_factor(config: TrainConfig) -> Callable[[int], float]:
    """A line up over the warm-up, then as `schedule` says down to `final_lr_fraction` at the last step."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, (config.schedule_steps or config.steps) - 1 - config.warmup_steps)
        low = config.final_lr_fraction
        return low + (1 - low) * SCHEDULES[config.schedule](min(1.0, done))

    return factor


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise `ConfigError` unless it has each parameter of `model` that is trained, and no others, and steps without a
    closure."""
    require_no_closure(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := held - names.keys():
        raise ConfigError(
            f"the optimizer has {len(foreign)} tensors that are no parameters of the model. Make it from the model "
            "that is trained: torch.optim.SGD(model.parameters(), ...)"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ConfigError(
            f"the optimizer lacks parameter {missing[0]!r}" + (f" and {len(missing) - 1} others" if missing[1:] else "")
            + ": add it to a group, or freeze it with requires_grad_(False)"
        )  # fmt: skip


@dataclass(frozen=True)
class OptimizerOptions:
    """What an optimizer and its schedule were made with: all but what they learn on the way."""

    groups: list[dict[str, Any]]  # of each group of parameters: weight decay, learning rate, ...
    schedule: dict[str, Any]  # its state before the first step

    @classmethod
    def of(cls, optimizer: Optimizer, scheduler: LRScheduler) -> "OptimizerOptions":
        """Those of an optimizer and a schedule that have taken no step."""
        groups = [{name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups]
        return cls(deepcopy(groups), deepcopy(scheduler.state_dict()))

    def restore(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Let an optimizer that a checkpoint was loaded into go on with these: its averages stay, and the schedule is
        stepped anew, as often as it had been."""
        steps = scheduler.last_epoch
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(deepcopy(options))
        scheduler.load_state_dict(deepcopy(self.schedule))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has not seen the optimizer step, which was in another process
            for _ in range(steps):
                scheduler.step()


_OPTIONS = ("optimizer", "learning_rate", "learning_rate_rule", "learning_rate_batch", "batch_size", "weight_decay")
_SCHEDULE = ("warmup_steps", "schedule", "final_lr_fraction")


def update_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's settings that its optimizer and schedule are made of."""
    length = settings.get("schedule_steps") or settings.get("steps")
    return {name: settings.get(name) for name in (*_OPTIONS, *_SCHEDULE)} | {"schedule_steps": length}
