"""The gradient of an optimiser step from a pipeline, or from several side by side.

    config = PipelineConfig(ranks=2, schedule="1f1b", micro_batches=4, cuts=("blocks.2",))
    pipeline = Pipeline(model, world, loss, config)     # this rank keeps its own stages of the model
    optimizer = torch.optim.AdamW(pipeline.parameters())
    totals = pipeline.backward(micro_batches)           # the same on all ranks of a pipeline
    optimizer.step(); optimizer.zero_grad()

With four ranks and pipelines of two there are two pipelines, a mesh of data 2 x pipeline 2: ranks 0 and 1 are one,
ranks 2 and 3 the other, which has micro-batches of its own. Gradients are added up over ranks 0 and 2, and 1 and 3.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import nn

from ddp_tutorial.accumulation.loss import LOSS, Loss, Totals
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.compat import multiply_
from ddp_tutorial.config import Config, ConfigError
from ddp_tutorial.ddp.wrappers import sync_initial_state
from ddp_tutorial.mesh import Mesh, group_of
from ddp_tutorial.phases import phase
from ddp_tutorial.pipeline.runner import StageRunner
from ddp_tutorial.pipeline.schedules import Name, Table, make_table
from ddp_tutorial.pipeline.stages import Stage, even_splits, split_into_stages
from ddp_tutorial.world import World, require_group


class StagesConfig(Config):
    """How a model is cut into stages, and what they do in which order, on any number of ranks."""

    schedule: Name = Field("1f1b", description="Order of forward and backward passes.")
    micro_batches: int = Field(4, ge=1, description="Micro-batches of a step through one pipeline.")
    per_rank: int = Field(1, ge=1, description="Stages on each rank; schedule interleaved needs at least 2.")
    cuts: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=[["blocks.2"]],
        description="Modules that begin a stage, except the first; by default, stages have about equal parameters.",
    )

    def on(self, ranks: int) -> "PipelineConfig":
        """These settings for pipelines of `ranks` ranks. Raises `ConfigError` as `check_on` does."""
        self.check_on(ranks)
        return PipelineConfig(ranks=ranks, **{name: getattr(self, name) for name in StagesConfig.model_fields})

    def check_on(self, ranks: int) -> None:
        """Raise `ConfigError` where the schedule cannot have `ranks` ranks, or `cuts` are not one fewer than their
        stages."""
        make_table(self.schedule, ranks, self.micro_batches, self.per_rank)
        stages = ranks * self.per_rank
        if self.cuts and len(self.cuts) != stages - 1:
            raise ConfigError(f"'cuts' should name {stages - 1} modules, for {stages} stages; found {self.cuts}")


class PipelineConfig(StagesConfig):
    """The stages, and on how many ranks they are."""

    ranks: int = Field(2, ge=1, description="of one pipeline; the world is a whole number of them")

    @property
    def stages(self) -> int:
        """How many stages the whole model has."""
        return self.ranks * self.per_rank

    @model_validator(mode="after")
    def _is_a_schedule(self) -> "PipelineConfig":
        self.check_on(self.ranks)
        return self

    def table(self) -> Table:
        """What each rank does, in order. Raises `ConfigError` for numbers that the schedule cannot have."""
        return make_table(self.schedule, self.ranks, self.micro_batches, self.per_rank)


def check_pipeline(model: nn.Module, config: PipelineConfig, world_size: int, backend: str = "gloo") -> list[Stage]:
    """The stages, or `ConfigError` for what cannot be: a model with fewer modules than stages, a name that is none of
    them, a world that is no whole number of pipelines. Needs no ranks, so it can be asked before any are started."""
    if world_size % config.ranks:
        raise ConfigError(
            f"a world of {world_size} ranks is no whole number of pipelines of {config.ranks}: start "
            f"{config.ranks * max(1, world_size // config.ranks)}, or change the number of ranks in a pipeline"
        )
    if backend == "nccl":
        raise ConfigError(
            "the pipeline's sends wait for nobody, as gloo's do; NCCL's would wait for one another. Use backend gloo, "
            "or torch.distributed.pipelining"
        )
    return split_into_stages(model, config.cuts or even_splits(model, config.stages))


def require_even_micro_batches(config: PipelineConfig) -> int:
    """How many micro-batches each rank reads. Raises `ConfigError` where they cannot be shared out."""
    if config.micro_batches % config.ranks:
        raise ConfigError(
            f"'pipeline.micro_batches' {config.micro_batches} should be a multiple of the {config.ranks} ranks of a "
            "pipeline: each of them reads as many"
        )
    return config.micro_batches // config.ranks


class Pipeline:
    """This rank's stages of a model, and the gradient of a step for them. Collective.

    All ranks give the same model, which starts with rank 0's weights; once it is built, a rank needs its own stages
    only (`del model` frees the others). A parameter in stages of several ranks (tied embeddings) is kept by each of
    them, and gets the sum of their gradients, so the copies stay equal. `seed` makes dropout depend on (seed, step,
    stage, micro-batch), and on nothing else. Raises `ConfigError` as `check_pipeline` does.
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
        require_group(world)
        stages = check_pipeline(model, config, world.size, world.backend)
        sync_initial_state(model, world)
        self.world, self.config = world, config
        mesh = Mesh(world.size // config.ranks, config.ranks)
        self.mesh = mesh.rows  # [pipelines, ranks of each]
        self.number, self.place = mesh.row_and_column(world.rank)  # of this pipeline, and of this rank in it
        self.stages = {s: stage for s, stage in enumerate(stages) if s % config.ranks == self.place}
        for stage in self.stages.values():
            stage.to(world.device)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.named = {names[id(p)]: p for stage in self.stages.values() for p in stage.parameters()}
        self.shared = self._groups_of_shared(stages, names)
        self.owners = self._owners(model, stages)
        self.across = group_of(mesh.columns, world)
        self.runner = StageRunner(
            config.table(),
            self.stages,
            loss,
            peers=self.mesh[self.number],
            place=self.place,
            precision=precision or Precision(world=world),
            seed=seed,
        )
        self._metrics: list[str] = []

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return list(self.named.values())

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Fill `.grad` of this rank's parameters with the gradient of the mean loss over the micro-batches of all
        pipelines, times the scale of the precision. Returns the totals of all, on every rank.

        Raises `ValueError`, on all ranks, where the loss counts nothing.
        """
        parts = self.runner.run(batches)
        with phase("finish"):
            for name, group in self.shared.items():  # the sum of what each use of a tied parameter gives
                _add_up([self.named[name]], group)
            if len(self.mesh) > 1:
                _add_up([p for p in self.named.values() if p.requires_grad], self.across)
            totals = self._totals(parts, stop_flags)
            if totals.counts[LOSS] == 0:
                raise ValueError("the loss has counted nothing in this step, on any rank: there is no mean of nothing")
            gradients = [p.grad for p in self.named.values() if p.grad is not None]
            if gradients:
                multiply_(gradients, 1 / totals.counts[LOSS])
        return totals

    def _totals(self, parts: list[dict[str, Any]], stop_flags: float) -> Totals:
        """Sums and counts, which the last stages know, for all ranks."""
        if not self._metrics:
            self._metrics = next(filter(None, all_gather(self.world, list(parts[0]) if parts else [])))
        values = torch.zeros(2 * len(self._metrics) + 1, dtype=torch.float64)
        for part in parts:
            values[:-1] += torch.tensor([float(v) for name in self._metrics for v in part[name]], dtype=torch.float64)
        values[-1] = stop_flags
        if self.world.size > 1:
            dist.all_reduce(values)
        *numbers, stop_flags = values.tolist()
        sums, counts = (dict(zip(self._metrics, numbers[i::2], strict=True)) for i in range(2))
        return Totals(sums, counts, stop_flags)

    def _owners(self, model: nn.Module, stages: Sequence[Stage]) -> dict[str, int]:
        """The first place in a pipeline that has each parameter and each buffer, by its name."""
        names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        owners: dict[str, int] = {}
        for number, stage in enumerate(stages):
            for tensor in [*stage.parameters(), *stage.buffers()]:
                owners.setdefault(names[id(tensor)], number % self.config.ranks)
        return owners

    def _groups_of_shared(self, stages: Sequence[Stage], names: dict[int, str]) -> dict[str, Any]:
        """For each parameter of this rank that others of its pipeline have too: the group of those that do."""
        places: dict[str, set[int]] = {}
        for number, stage in enumerate(stages):
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    places.setdefault(names[id(parameter)], set()).add(number % self.config.ranks)
        groups = {
            name: group_of([[row[place] for place in sorted(of)] for row in self.mesh], self.world)
            for name, of in places.items()
            if len(of) > 1
        }
        return {name: group for name, group in groups.items() if group is not None}


def _add_up(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Let each `.grad` be the sum over the ranks of the group; one that none of them has used has none."""
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
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
