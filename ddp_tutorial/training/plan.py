"""Describe a run without running it, for `train CONFIG --dry-run`. No files are written, and no ranks are started."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_tutorial import environment
from ddp_tutorial.accumulation import memory as activations
from ddp_tutorial.config import ConfigError, Layer, flat
from ddp_tutorial.files import RUNS
from ddp_tutorial.intervals import steps_between, times_due
from ddp_tutorial.local_sgd.config import OPTIONS as LOCAL
from ddp_tutorial.local_sgd.rounds import Rounds
from ddp_tutorial.pipeline.memory import rank_costs, stage_costs
from ddp_tutorial.pipeline.schedules import table_of
from ddp_tutorial.training.config import TaskConfig, TrainConfig
from ddp_tutorial.training.optimization import make_optimizer
from ddp_tutorial.training.strategies import mesh_of, micro_batches_per_rank, pipeline_of
from ddp_tutorial.training.tasks import check_start, loss_of, task_of
from ddp_tutorial.world import World, choose_backend, choose_device, is_launched_rank
from ddp_tutorial.zero.memory import bytes_gathered, bytes_sent, model_state_bytes

DEFAULT = "default"
OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4}  # per parameter, for two float32 moving averages (adamw) or one (sgd)


def plan(config: TaskConfig, layers: Iterable[Layer], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a plan that contains a run's memory use, communication volume, directory, and settings with their origins.

    `layers` were merged into `config`. `environ` specifies the world if torchrun or Slurm started this process.

    Raises:
        ConfigError: If the world or the device is not available, if `tasks.check_start` rejects the config, or if the
            memory use cannot be estimated.
    """
    if joins := is_launched_rank(environ):
        world = World.detect(environ, device=config.device, backend=config.backend)
        size, here, device = world.size, world.local_size, world.device
    else:
        size = here = config.nprocs
        device = choose_device(config.device, local_size=size, backend=config.backend)
    parts = micro_batches_per_rank(config, size)
    given = config
    config, per_epoch = check_start(config, size)
    evaluated = steps_between("eval_every", config.eval_every, per_epoch)
    saved = steps_between("checkpoint.every", config.checkpoint.every, per_epoch)
    samples = math.ceil(config.batch_size / size / parts)
    needed, mesh = memory(config, samples, size), mesh_of(config, size)
    stages = stages_of_ranks(config, samples, size) if config.strategy == "pipeline" else []
    task = task_of(config)
    units = config.batch_size * task.units_per_sample(config)
    return {
        "settings": settings(given, layers, config),
        "unit": task.unit,  # the unit of the loss's count
        "world": {
            "ranks": size,
            "device": device.type,
            "backend": "none" if size == 1 else choose_backend(config.backend, device),
            "started_by": "torchrun or Slurm" if joins else "train, on this machine",
        }
        | ({"copies": mesh.replicate, "ranks_per_copy": mesh.span} if mesh.span > 1 else {}),
        "batch": {
            "samples": config.batch_size,
            task.unit: units,
            "micro_batches_per_rank": parts,
            "samples_per_micro_batch": samples,
        },
        "work": {
            "steps": config.steps,
            task.unit: config.steps * units,
            "evaluations": times_due(config.steps, evaluated),
            "checkpoints": times_due(config.steps, saved),
        },
        "memory_per_rank": needed,
        "sent_per_rank_and_step": max(rank["sent"] for rank in stages)
        if stages
        else step_bytes_sent(config, needed["parameters"], size, parts),
        **({"ranks_of_a_pipeline": stages} if stages else {}),
        "memory_here": {"ranks": here, "needed": here * needed["total"], "there": total_memory(device.type, here)},
        "directory": str(RUNS / (config.name or f"(time)-{config.label}-{size}x")),
    }


def settings(config: TaskConfig, layers: Iterable[Layer], used: TaskConfig | None = None) -> dict[str, dict[str, Any]]:
    """Return the value and the origin of each setting, by dotted name.

    The origin of a setting is the last of `layers` that sets the value. `used` is `config` with the computed `steps`
    and `batch_size`. The origin of a computed value is the setting from which it was computed, such as `num_epochs`.
    """
    set_by: dict[str, str] = {}
    for origin, values in layers:
        set_by |= dict.fromkeys(flat(values), origin)
    values = flat(config.model_dump(mode="json"))
    for name, alternative in config.alternatives if used else ():
        if values[alternative] is not None:
            values[name], set_by[name] = getattr(used, name), alternative
    return {name: {"value": value, "from": set_by.get(name, DEFAULT)} for name, value in values.items()}


def memory(config: TaskConfig, samples: int, ranks: int = 1) -> dict[str, int]:
    """Estimate the memory that one rank needs, in bytes. `samples` is the number of samples in a micro-batch.

    The estimate includes four bytes per parameter, four bytes per gradient element, the optimizer state, and
    temporarily gathered weights. The size of a sharded component is divided by the number of ranks per replica. The
    size of the saved activations is measured on torch's meta device, which allocates no memory. Attention may need less
    memory than estimated. On a CPU, Python and torch need about 300 MB of additional memory.

    Returns:
        The memory in bytes by purpose, and the `total`. For a pipeline, the values are those of the rank that requires
        the most memory. `parameters` is the number of parameters of the full model.
    """
    task = task_of(config)
    with _meta_device():
        model, batch = task.model(config), task.batch_like(config, samples)
        with activations.count_saved_bytes(model) as kept:
            loss_of(config)(model, batch)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.strategy == "pipeline":
        held = max(
            (rank["memory"] for rank in stages_of_ranks(config, samples, ranks)), key=lambda held: sum(held.values())
        )
    else:
        span = mesh_of(config, ranks).span
        # with local steps, each rank also stores the full model
        kind = "ddp" if config.strategy in LOCAL else config.strategy
        held = model_state_bytes(kind, parameters, span, optimizer_bytes(config))
        held |= {"gathered": bytes_gathered(kind, model) if span > 1 else 0, "activations": kept.nbytes}
    if config.strategy == "diloco":
        held["outer"] = 8 * parameters  # the weights at the start of the round, and the velocity
    return {"parameters": parameters, **held, "total": sum(held.values())}


def stages_of_ranks(config: TaskConfig, samples: int, ranks: int) -> list[dict[str, Any]]:
    """Return each pipeline rank's parameter count, memory by purpose, and number of bytes sent per step.

    `samples` is the number of samples in a micro-batch. Memory is in bytes.
    """
    task, stages = task_of(config), pipeline_of(config, ranks)
    with _meta_device():
        costs = stage_costs(task.model(config), loss_of(config), task.batch_like(config, samples), stages)
    found = []
    for cost in rank_costs(costs, table_of(stages), ranks // stages.ranks, config.accumulation):
        held = model_state_bytes("ddp", cost.parameters, 1, optimizer_bytes(config))
        held |= {"gathered": 0, "activations": cost.activations}
        found.append({"parameters": cost.parameters, "memory": held, "sent": cost.sent})
    return found


@contextmanager
def _meta_device() -> Iterator[None]:
    """Create tensors on the meta device. Raise `ConfigError` if the model or the loss requires tensor values."""
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():  # "meta tensors", "Meta kernel"
            raise
        raise ConfigError(
            "the memory estimate runs the model and the loss on torch's meta device, whose tensors have no values "
            f"({' '.join(str(error).split())}). Return metrics as tensors, without item(), or omit --dry-run"
        ) from None


def optimizer_bytes(config: TrainConfig) -> int:
    """Return the optimizer state's size in bytes per parameter. An imported class is measured on a small matrix.

    Raises:
        ConfigError: If the imported class cannot update a matrix with a dense gradient.
    """
    if isinstance(config.optimizer, str):
        return OPTIMIZER_BYTES[config.optimizer]
    model = nn.Linear(64, 64, bias=False)
    optimizer = make_optimizer(model, config)
    model.weight.grad = torch.ones_like(model.weight)
    try:
        optimizer.step()
    except Exception as error:  # e.g. SparseAdam
        raise ConfigError(
            f"the memory estimate runs a step of {config.optimizer['class']} with a dense gradient, which failed: "
            f"{type(error).__name__}: {' '.join(str(error).split())}. Use a different optimizer, or omit --dry-run"
        ) from None
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in kept) // model.weight.numel()


def step_bytes_sent(config: TaskConfig, parameters: int, ranks: int, micro_batches: int) -> int:
    """Return the average number of bytes that one rank sends per step for gradients and weights."""
    mesh = mesh_of(config, ranks)
    if config.strategy not in LOCAL:
        return bytes_sent(config.strategy, parameters, mesh.span, micro_batches, mesh.replicate)
    rounds = Rounds(config.local.round, config.local.begin)
    return bytes_sent("ddp", parameters, ranks) * rounds.all_reduces(config.steps) // config.steps


def total_memory(device: str, ranks: int) -> int:
    """Return the size in bytes of this machine's main memory or, for device `cuda`, of the memory of `ranks` GPUs."""
    if device == "cuda":
        return sum(
            torch.cuda.get_device_properties(number).total_memory
            for number in range(min(ranks, torch.cuda.device_count()))
        )
    return environment.memory()


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text, such as "19.4 MB" or "1.2 GB"."""
    units = iter(("B", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while nbytes >= 999.95 and unit != "PB":
        nbytes, unit = nbytes / 1000, next(units)
    return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"


def as_text(found: Mapping[str, Any]) -> str:
    """Return a plan as readable text."""
    settings = found["settings"]
    shown = {f"{name}: {json.dumps(each['value'])}": each["from"] for name, each in settings.items()}
    width = max(map(len, shown))
    lines = [f"{line:{width}}  # {origin}" for line, origin in shown.items()]
    unit = found["unit"]
    world, batch, work, memory = (found[key] for key in ("world", "batch", "work", "memory_per_rank"))
    ranks = "1 rank" if world["ranks"] == 1 else f"{world['ranks']} ranks"
    mesh = f"; model replicas: {world['copies']}, on {world['ranks_per_copy']} ranks each" if "copies" in world else ""
    parts, samples = batch["micro_batches_per_rank"], batch["samples_per_micro_batch"]
    micro = f"{samples} samples" if parts == 1 else f"{parts} micro-batches of {samples} samples"
    here, stages = found["memory_here"], found.get("ranks_of_a_pipeline")
    who, most = ("the rank that needs the most", "at most") if stages else ("each rank", "about")
    lines += [
        "",
        f"world    {ranks} on {world['device']}, {world['backend']}, started by {world['started_by']}{mesh}",
        f"batch    {batch['samples']} samples, {batch[unit]:,} {unit}; on each rank {micro}",
        f"work     {work['steps']:,} steps, {work[unit]:,} {unit}, {work['evaluations']} evaluations, "
        f"{work['checkpoints']} checkpoints",
        f"memory   about {format_bytes(memory['total'])} for {who}: {memory['parameters']:,} parameters, "
        f"{format_bytes(memory['activations'])} of activations; this machine has {format_bytes(here['there'])}",
        f"sends    {most} {format_bytes(found['sent_per_rank_and_step'])} from each rank in each step",
        f"writes   {found['directory']}/ (not written in a dry run)",
    ]
    if stages:
        of_ranks = [
            f"rank {place}: {rank['parameters']:,} parameters, {format_bytes(sum(rank['memory'].values()))}, sends "
            f"{format_bytes(rank['sent'])}"
            for place, rank in enumerate(stages)
        ]
        lines.insert(-1, f"stages   {'; '.join(of_ranks)}")
    if here["needed"] > here["there"]:
        who = "its rank" if here["ranks"] == 1 else f"its {here['ranks']} ranks"
        lines.append(
            f"warning  this machine has {format_bytes(here['there'])}, and {who} would need about "
            f"{format_bytes(here['needed'])}: use a smaller model or batch_size, more "
            "accumulation, or model.recompute=true"
        )
    return "\n".join(lines)
