"""Compare this package's sharding strategies with torch's, in steps per second and in memory use."""

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.benches import report
from ddp_tutorial.benches.step import random_step
from ddp_tutorial.experiments.arms import by_repeat, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.optimization import make_optimizer
from ddp_tutorial.world import World
from ddp_tutorial.zero.memory import DIVIDED, model_state_bytes

SAMPLES = 8  # per rank per step
_TURNS, _STEPS = 3, 2  # turns per arm per repeat, and steps per turn
_STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]


def measure(repeats: int) -> dict[str, Any]:
    """Measure the steps per second of each sharding strategy, DDP, and torch's `ZeroRedundancyOptimizer`.

    The model has about 5 million parameters and trains on two single-threaded ranks. `memory` contains the measured and
    the predicted size in bytes of each kind of tensor on rank 0.
    """
    samples, memory = launch(_measure, 2, repeats, device="cpu", threads=1, echo=False)[0]
    ratios = {
        "zero1_vs_torch": ("zero1", "torch_zero1"),
        "fsdp_vs_torch": ("zero3", "fsdp"),
        "zero2_vs_ddp": ("zero2", "ddp"),
        "zero3_vs_ddp": ("zero3", "ddp"),
    }
    return report("sharded", samples, "steps/s", ratios) | {"memory": memory}


def _measure(world: World, repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    arms = {name: random_step(world, SAMPLES, strategy=name) for name in _STRATEGIES}
    arms["torch_zero1"] = random_step(world, SAMPLES, optimizer=_zero_of_torch)
    turns = run_interleaved(world, arms, _STEPS, repeats * _TURNS)
    memory = {}
    for name in _STRATEGIES:
        parameters = sum(parameter.numel() for parameter in arms["ddp"].model.parameters())
        predicted = model_state_bytes(name, parameters, world.size)
        measured = held(arms[name])
        ratio = {each: measured[each] / predicted[each] for each in predicted}
        memory[name] = {"measured": measured, "predicted": predicted, "measured_vs_predicted": ratio}
        memory[name]["divided"] = sorted(DIVIDED[name])
    return {name: [1 / seconds for seconds in by_repeat(turns[name], repeats)] for name in arms}, memory


def _zero_of_torch(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's sharded version of the trainer's AdamW, with the same parameter groups."""
    plain = make_optimizer(model, TrainConfig(learning_rate=1e-3))
    options = {name: plain.defaults[name] for name in ("lr", "betas", "fused")}
    return ZeroRedundancyOptimizer(plain.param_groups, torch.optim.AdamW, **options)


def held(step: TrainStep) -> dict[str, int]:
    """Return the size in bytes of each kind of tensor on this rank, just before the optimizer step. Collective."""
    step.strategy.backward(step.batches())
    stepped = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
    parameters = list(step.model.parameters())
    gradients = {id(each.grad): each.grad for each in (*stepped, *parameters) if each.grad is not None}
    kept = [value for state in step.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    kinds = {"weights": parameters, "gradients": list(gradients.values()), "optimizer": kept}
    step.optimizer.zero_grad()
    return {name: sum(_local(tensor).nbytes for tensor in tensors) for name, tensors in kinds.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
