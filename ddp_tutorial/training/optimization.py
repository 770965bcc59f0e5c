"""Create the optimizer and the learning-rate scheduler, or accept the caller's objects."""

import math
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LRScheduler, ReduceLROnPlateau

from ddp_tutorial.accumulation.precision import require_no_closure
from ddp_tutorial.config import ConfigError
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.imported import construct
from ddp_tutorial.zero.elementwise import require_elementwise

Optimizer = torch.optim.Optimizer
# An object, or a function that creates the object from the model or from the optimizer.
OptimizerLike = Optimizer | Callable[[nn.Module], Optimizer]
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]
SomeConfig = TypeVar("SomeConfig", bound=TrainConfig)

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
}

# The remaining fraction of the decay, after the fraction `done` of the steps of the decay.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return the optimizer that `config` specifies for the trainable parameters of `model`.

    AdamW and SGD are fused, unless a parameter is complex, because torch has no fused kernel for complex numbers. A
    class that `config` specifies by import path receives only the learning rate and its own arguments.

    Raises:
        ConfigError: If the class cannot be imported, is not an optimizer, or does not accept its arguments.
    """
    if not isinstance(config.optimizer, str):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return construct("optimizer", config.optimizer, Optimizer, trained, lr=config.peak_learning_rate)
    kind, options = OPTIMIZERS[config.optimizer]
    fused = all(parameter.is_floating_point() for parameter in model.parameters() if parameter.requires_grad)
    return kind(parameter_groups(model, config), lr=config.peak_learning_rate, fused=fused, **options)


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups.

    Weight decay applies only to the first group, the matrices. The second group contains norms and biases.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def make_scheduler(optimizer: Optimizer, config: TrainConfig) -> LRScheduler:
    """Return the learning-rate scheduler that `config` describes.

    Raises:
        ConfigError: If the scheduler's class cannot be imported, is not a scheduler, or does not accept its arguments.
    """
    if config.scheduler is not None:
        scheduler = construct("scheduler", config.scheduler, LRScheduler, optimizer)
        require_no_metric(scheduler)
        return scheduler
    if config.schedule == "none":
        return ConstantLR(optimizer, factor=1.0, total_iters=0)  # never sets the learning rate
    return LambdaLR(optimizer, learning_rate_factor(config))


def config_for(optimizer: OptimizerLike | None, config: SomeConfig) -> SomeConfig:
    """Return the config. If the caller passes an `optimizer`, disable the default schedule and clipping.

    With an `optimizer`, clipping applies only if `clip` is set, and the schedule and warm-up apply only if one of their
    settings is set. A setting counts as set even if its value is the default.
    """
    if optimizer is None:
        return config
    changed: dict[str, Any] = {}
    if "clip" not in config.model_fields_set:
        changed["clip"] = None
    if config.model_fields_set.isdisjoint({"schedule_steps", *_SCHEDULE}):
        changed["schedule"] = "none"
    return config.model_copy(update=changed)


def resolve_optimizer(optimizer: OptimizerLike, model: nn.Module) -> Optimizer:
    """Return `optimizer`. If `optimizer` is a function, return the optimizer that the function creates for `model`.

    Raises:
        ConfigError: If the result is not an optimizer.
    """
    if callable(optimizer) and not isinstance(optimizer, type):
        optimizer = optimizer(model)
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, (list, tuple)):
        fix = "use one optimizer with several parameter groups, like torch.optim.SGD([{'params': ..., 'lr': ...}, ...])"
    else:
        fix = "pass an optimizer, as in torch.optim.SGD(model.parameters(), lr=0.1), or a function that constructs one"
    raise ConfigError(
        "'optimizer' must be an Optimizer or a function that takes the model and returns an Optimizer, "
        f"{_got(optimizer)}: {fix}"
    )


def resolve_scheduler(scheduler: SchedulerLike, optimizer: Optimizer) -> LRScheduler:
    """Return `scheduler`. If `scheduler` is a function, return the scheduler that the function creates for `optimizer`.

    Raises:
        ConfigError: If the result is not a scheduler, if it requires a validation loss, or if it schedules a different
            optimizer.
    """
    found = scheduler(optimizer) if callable(scheduler) else scheduler
    if not isinstance(found, LRScheduler):
        raise ConfigError(
            "'scheduler' must be an LRScheduler or a function that takes the optimizer and returns an LRScheduler, "
            f"{_got(found)}. To use several schedulers, chain them with torch.optim.lr_scheduler.SequentialLR"
        )
    require_no_metric(found)
    if found.optimizer is not optimizer:  # the scheduler would not change the run's learning rate
        raise ConfigError(
            "'scheduler' must be a scheduler for the run's optimizer, got a scheduler for a different optimizer. "
            f"Pass a function instead, as in scheduler=lambda optimizer: {type(found).__name__}(optimizer, ...)"
        )
    return found


def _got(value: object) -> str:
    return f"got the class {value.__name__}" if isinstance(value, type) else f"got {type(value).__name__}"


def require_no_metric(scheduler: LRScheduler) -> None:
    """Raise `ConfigError` for `ReduceLROnPlateau`, which depends on evaluations instead of steps."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau is not supported: it requires a validation loss, but the schedule is updated after "
            "every step. Use a schedule that depends only on the step, such as torch.optim.lr_scheduler.StepLR"
        )


def check_update(config: TrainConfig) -> None:
    """Raise `ConfigError` if the optimizer or the scheduler of `config` cannot be constructed. No model is required."""
    optimizer = make_optimizer(nn.Linear(4, 4, bias=False), config)
    require_no_closure(optimizer)
    make_scheduler(optimizer, config)
    if config.strategy in {"zero2", "zero3"}:
        require_elementwise(optimizer, config.strategy)


def learning_rate_factor(config: TrainConfig) -> Callable[[int], float]:
    """Return a function that maps a step to its learning-rate factor.

    The factor rises linearly during the warm-up. A cosine or linear schedule then decreases the factor to
    `final_lr_fraction` at the last step of the schedule.
    """

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, (config.schedule_steps or config.steps) - 1 - config.warmup_steps)
        low = config.final_lr_fraction
        return low + (1 - low) * SCHEDULES[config.schedule](min(1.0, done))

    return factor


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise `ConfigError` if `optimizer` does not fit `model`.

    The optimizer must contain all trainable parameters of the model, and only parameters of the model. The optimizer's
    `step` method must not require a closure.
    """
    require_no_closure(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := held - names.keys():
        raise ConfigError(
            f"the optimizer contains {len(foreign)} tensors that are not parameters of the model. Create the "
            "optimizer from this model's parameters: torch.optim.SGD(model.parameters(), ...)"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ConfigError(
            f"the optimizer must contain all trainable parameters, but lacks {len(missing)} of them, starting with "
            f"{missing[0]!r}: add every missing parameter to a group, or freeze it with requires_grad_(False)"
        )


@dataclass(frozen=True)
class OptimizerOptions:
    """The options of an optimizer and its scheduler, excluding the state that changes during training."""

    groups: list[dict[str, Any]]  # per parameter group: weight decay, learning rate, ...
    schedule: dict[str, Any]  # the scheduler's state before the first step

    @classmethod
    def of(cls, optimizer: Optimizer, scheduler: LRScheduler) -> "OptimizerOptions":
        """Return the options of an optimizer and a scheduler that have not yet taken a step."""
        groups = [{name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups]
        return cls(deepcopy(groups), deepcopy(scheduler.state_dict()))

    def restore(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Apply these options to an optimizer and a scheduler that were loaded from a checkpoint.

        The optimizer keeps its moving averages. The scheduler is reset, and then advanced to its current step.
        """
        steps = scheduler.last_epoch
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(deepcopy(options))
        scheduler.load_state_dict(deepcopy(self.schedule))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns because the optimizer stepped in a different process
            for _ in range(steps):
                scheduler.step()


_OPTIONS = ("optimizer", "learning_rate", "learning_rate_rule", "learning_rate_batch", "batch_size", "weight_decay")
_SCHEDULE = ("scheduler", "warmup_steps", "schedule", "final_lr_fraction")


def update_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subset of a run's `settings` that defines its optimizer and schedule."""
    length = settings.get("schedule_steps") or settings.get("steps")
    return {name: settings.get(name) for name in (*_OPTIONS, *_SCHEDULE)} | {"schedule_steps": length}
