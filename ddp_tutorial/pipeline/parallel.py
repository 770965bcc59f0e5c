"""Compute the gradient of an optimizer step with one pipeline or with several parallel pipelines.

    config = PipelineConfig(ranks=2, schedule="1f1b", micro_batches=4, cuts=("blocks.2",))
    pipeline = Pipeline(model, world, loss, config)     # this rank keeps its own stages of the model
    optimizer = torch.optim.AdamW(pipeline.parameters())
    totals = pipeline.backward(micro_batches)           # the same on all ranks of a pipeline
    optimizer.step(); optimizer.zero_grad()

With four ranks and two ranks per pipeline, there are two pipelines. The ranks form a 2 x 2 mesh (data x pipeline).
Ranks 0 and 1 form the first pipeline. Ranks 2 and 3 form the second pipeline, which processes different micro-batches.
Gradients are reduced over ranks 0 and 2, and over ranks 1 and 3.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.loss import LOSS, Loss, LossError, Totals
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import all_gather, to_vector
from ddp_tutorial.compat import multiply_
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.sync_bn import SyncBatchNorm
from ddp_tutorial.ddp.wrappers import sync_initial_state
from ddp_tutorial.groups import group_of
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.phases import phase
from ddp_tutorial.pipeline.config import PipelineConfig
from ddp_tutorial.pipeline.runner import StageRunner
from ddp_tutorial.pipeline.schedules import table_of
from ddp_tutorial.pipeline.stages import Stage, even_splits, split_into_stages
from ddp_tutorial.world import World, require_group


def check_pipeline(model: nn.Module, config: PipelineConfig, world_size: int) -> list[Stage]:
    """Split the model into stages, and validate the config.

    `check_pipeline` calls no collectives, so you can use it before a launch.

    Raises:
        ConfigError: If the model has fewer modules than stages, `cuts` names an unknown module, or the world size is
            not a multiple of `config.ranks`. The error is also raised if a trainable parameter belongs to no stage, or
            if a layer synchronizes BatchNorm over ranks that run different stages.
    """
    if world_size % config.ranks:
        raise ConfigError(
            f"the world size must be a multiple of the number of ranks per pipeline ({config.ranks}), got {world_size}"
            f". Use nprocs={config.ranks * max(1, world_size // config.ranks)}, or change PipelineConfig.ranks"
        )
    for name, part in model.named_modules():
        if config.ranks > 1 and isinstance(part, nn.SyncBatchNorm | SyncBatchNorm):
            raise ConfigError(
                f"{name!r} is a {type(part).__name__}, which synchronizes all ranks, but the ranks of a pipeline run "
                "different layers. Use BatchNorm"
            )
    stages = split_into_stages(model, config.cuts or even_splits(model, config.stages))
    inside = {parameter for stage in stages for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in inside:
            raise ConfigError(
                f"the chain of {type(model).__name__} must contain every trainable parameter, but does not contain "
                f"{name!r}. Return its module from chain(), or freeze the parameter"
            )
    return stages


def require_cuts(config: PipelineConfig) -> None:
    """Raise `ConfigError` if the split into stages requires a measurement that is not available yet."""
    if config.split == "measured" and config.stages > 1 and not config.cuts:
        raise ConfigError(
            "pipeline.split=measured requires a Trainer, which measures the modules. Without a Trainer, set 'cuts' to "
            "the result of pipeline.timing.measured_splits"
        )


def require_even_micro_batches(config: PipelineConfig) -> int:
    """Return the number of micro-batches that each rank reads per step.

    Raises:
        ConfigError: If the number of micro-batches is not a multiple of the number of ranks in a pipeline.
    """
    if config.micro_batches % config.ranks:
        raise ConfigError(
            "'pipeline.micro_batches' must be a multiple of the number of ranks per pipeline "
            f"({config.ranks}), got {config.micro_batches}. Each rank reads the same number of micro-batches"
        )
    return config.micro_batches // config.ranks


class Pipeline:
    """This rank's stages of a model, which compute the gradient of a step. The constructor is collective.

    The model starts with rank 0's weights. After construction, a rank needs only its own stages, and `del model` frees
    the other stages. If a parameter, such as a tied embedding, belongs to stages on several ranks, each of these ranks
    keeps a replica. Each replica receives the sum of all replicas' gradients, so the replicas stay identical.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: PipelineConfig,
        *,
        precision: Precision | None = None,
        seed: int | None = None,
    ) -> None:
        """Split the model into stages, and broadcast rank 0's weights. All ranks must pass the same model. Collective.

        With a `seed`, dropout depends only on the seed, the step, the stage, and the micro-batch; see `StageRunner`.

        Raises:
            ConfigError: If `check_pipeline` rejects the model, the config or the world size.
        """
        require_group(world)
        require_cuts(config)
        stages = check_pipeline(model, config, world.size)
        sync_initial_state(model, world)
        self.world, self.config = world, config
        mesh = Mesh(world.size // config.ranks, config.ranks)
        self.mesh = mesh.rows  # [pipelines, ranks per pipeline]
        self.number, self.place = mesh.row_and_column(world.rank)  # the indices of this pipeline and this rank
        self.stages = {s: stage for s, stage in enumerate(stages) if s % config.ranks == self.place}
        for stage in self.stages.values():
            stage.to(world.device)
        self.places = self._places(model, stages)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.named = {names[id(p)]: p for stage in self.stages.values() for p in stage.parameters()}
        tied = [name for name, p in model.named_parameters() if p.requires_grad and len(self.places[name]) > 1]
        groups = {
            name: group_of([[row[place] for place in self.places[name]] for row in self.mesh], world) for name in tied
        }
        self.shared = {name: group for name, group in groups.items() if group is not None}
        self.across = group_of(mesh.columns, world)
        self.runner = StageRunner(
            table_of(config),
            self.stages,
            loss,
            peers=self.mesh[self.number],
            place=self.place,
            precision=precision or Precision(world=world),
            seed=seed,
        )
        self._metrics: list[str] = []

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages, without duplicates."""
        return list(self.named.values())

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute the gradient of the mean loss over the micro-batches of all pipelines. Collective.

        The gradient is multiplied by the loss scale and stored in `.grad` of this rank's parameters. The micro-batches
        must be the same on all ranks of a pipeline. If there are k times as many micro-batches as the schedule
        requires, the schedule runs k times, and the gradients are summed. The totals are the same on every rank.

        Raises:
            ValueError: On all ranks, if the number of micro-batches is not a multiple of the number that the schedule
                requires. The error is also raised if the loss averages over 0 elements, whose mean is undefined.
            LossError: On the ranks of the last stage, if the loss function returns different metrics than before.
        """
        count = self.config.micro_batches
        if not batches or len(batches) % count:
            raise ValueError(
                f"the number of micro-batches per step must be a multiple of {count} ('pipeline.micro_batches'), got "
                f"{len(batches)}"
            )
        parts = [part for i in range(0, len(batches), count) for part in self.runner.run(batches[i : i + count])]
        with phase("finish"):
            for name, group in self.shared.items():  # sum the gradients of each use of a tied parameter
                _sum_gradients([self.named[name]], group, self.world.device)
            if len(self.mesh) > 1:
                _sum_gradients([p for p in self.named.values() if p.requires_grad], self.across, self.world.device)
            totals = self._totals(parts, stop_flags)
            if totals.counts[LOSS] == 0:
                raise ValueError(
                    "the loss function counted no elements on any rank in this step, so the mean loss is undefined"
                )
            gradients = [p.grad for p in self.named.values() if p.grad is not None]
            if gradients:
                multiply_(gradients, 1 / totals.counts[LOSS])
        return totals

    def _totals(self, parts: list[dict[str, Any]], stop_flags: float) -> Totals:
        """Reduce the sums and counts of the last stages over all ranks. Collective."""
        if not self._metrics:
            self._metrics = next(filter(None, all_gather(self.world, list(parts[0]) if parts else [])))
        device = self.world.device
        values = torch.zeros(2 * len(self._metrics) + 1, dtype=torch.float64, device=device)
        for part in parts:
            if list(part) != self._metrics:
                raise LossError(
                    f"the loss function must return the same metrics in every call, got [{', '.join(self._metrics)}] "
                    f"in the first call and [{', '.join(part)}] in this call"
                )
            values[:-1] += to_vector([v for name in self._metrics for v in part[name]], device)
        values[-1] = stop_flags
        if self.world.size > 1:
            dist.all_reduce(values)
        *numbers, stop_flags = values.tolist()
        sums, counts = (dict(zip(self._metrics, numbers[i::2], strict=True)) for i in range(2))
        return Totals(sums, counts, stop_flags)

    def _places(self, model: nn.Module, stages: Sequence[Stage]) -> dict[str, list[int]]:
        """Return the pipeline positions that store each parameter and buffer, by name.

        A tensor outside the chain, such as a buffer of the model itself, is stored on every rank.
        """
        names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        places: dict[str, set[int]] = {name: set() for name in names.values()}
        for number, stage in enumerate(stages):
            for tensor in [*stage.parameters(), *stage.buffers()]:
                places[names[id(tensor)]].add(number % self.config.ranks)
        return {name: sorted(of or range(self.config.ranks)) for name, of in places.items()}


def _sum_gradients(parameters: Sequence[nn.Parameter], group: Any, device: torch.device) -> None:
    """Replace each `.grad` with the sum over the ranks of the group. Collective.

    If no rank has used a parameter, its `.grad` remains None.
    """
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=device)
    dist.all_reduce(flags, group=group)
    used = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in used:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    for same in kinds.values():
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in same])
        dist.all_reduce(flat, group=group)
        for parameter, piece in zip(same, flat.split([p.numel() for p in same]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()
