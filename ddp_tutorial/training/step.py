"""Build a `TrainStep` from a config."""

import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.compat import uncompiled
from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.training.compilation import require_compilable
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.optimization import (
    OptimizerLike,
    SchedulerLike,
    check_optimizer,
    config_for,
    make_optimizer,
    make_scheduler,
    resolve_optimizer,
    resolve_scheduler,
)
from ddp_tutorial.training.strategies import make_strategy
from ddp_tutorial.world import World, require_group


def make_train_step(
    model: nn.Module,
    source: Source,
    loss: Loss,
    world: World,
    config: TrainConfig,
    *,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike | None = None,
) -> TrainStep:
    """Return the training step that `config` describes. Collective.

    This function moves `model` to this rank's device and broadcasts rank 0's weights.

    Args:
        model: The model, on the CPU or on this rank's device.
        source: The source of micro-batches.
        loss: A function that returns a sum and a count; see `accumulation.loss`.
        world: The ranks.
        config: Settings that specify the strategy and, unless passed as arguments, the optimizer and the scheduler.
        optimizer: An optimizer of `model`, or a function that takes the model and returns an optimizer. If `optimizer`
            is passed, the schedule and clipping of `config` apply only if `config` sets them explicitly.
        scheduler: A learning-rate scheduler, or a function that takes the optimizer and returns a scheduler.

    Raises:
        ConfigError: If the model is on the wrong device, cannot be compiled or has a sparse embedding, or if the
            optimizer does not fit the model.
    """
    require_group(world)
    config = config_for(optimizer, config)
    require_compilable(model, config, world)
    model = _on_device(uncompiled(model), world)
    _require_dense_gradients(model)
    precision = Precision(config.precision, world)
    strategy = make_strategy(config, model, world, loss, precision)
    made = make_optimizer(model, config) if optimizer is None else resolve_optimizer(optimizer, model)
    check_optimizer(made, model)
    stepped = strategy.setup_optimizer(made)
    scheduled = make_scheduler(stepped, config) if scheduler is None else resolve_scheduler(scheduler, stepped)
    return TrainStep(
        model,
        source,
        loss,
        world,
        strategy,
        stepped,
        scheduled,
        precision=precision,
        clip=config.clip,
        oom_skips=config.oom_skips,
    )


def _on_device(model: nn.Module, world: World) -> nn.Module:
    """Move `model` to this rank's device.

    Raises:
        ConfigError: If the model is frozen or on the wrong device, or if its state is not stored in dense tensors.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"the model's state dict must contain only tensors, got {type(value).__name__} for {name!r}. Return a "
                "tensor from get_extra_state, or remove this method"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model must have at least one parameter with requires_grad=True, got none")
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"the model's {name!r} must be a dense tensor, got a tensor with layout {tensor.layout}. Store the "
                "indices and the values as dense buffers, and create the sparse tensor from them in forward"
            )
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return model.to(world.device)
    for name, tensor in tensors.items():
        if tensor.device != world.device:
            raise ConfigError(
                f"the model's {name!r} is on {tensor.device}, but rank {world.rank} computes on {world.device}. Leave "
                "the model on the CPU, or move it with model.to(world.device)"
            )
    return model


def _require_dense_gradients(model: nn.Module) -> None:
    """Raise `ConfigError` if an embedding's gradient is sparse, because torch cannot compute such a gradient's norm."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            weight = f"{name}.weight" if name else "weight"
            raise ConfigError(
                f"the model's {weight!r} must have a dense gradient, got {type(part).__name__}(sparse=True). Create "
                "the layer with sparse=False"
            )
