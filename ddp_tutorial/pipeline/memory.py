"""Compute each pipeline rank's memory usage and communication volume from the schedule, without running the pipeline.

The stages run once on PyTorch's meta device, to measure the number of bytes saved for the backward pass and the size
of each output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.accumulation.memory import count_saved_bytes
from ddp_tutorial.ddp.link_model import bytes_all_reduced
from ddp_tutorial.pipeline.config import PipelineConfig
from ddp_tutorial.pipeline.schedules import FORWARD, Table
from ddp_tutorial.pipeline.stages import Stage, even_splits, split_into_stages


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage for one micro-batch.

    Attributes:
        activations: The number of bytes that the forward pass saves for the backward pass.
        output: The size in bytes of the stage's output, or 0 for the last stage. The output's gradient has the same
            size.
        parameters: Dict from a parameter's `id` to the parameter's number of elements.
        trained: The entries of `parameters` for trainable parameters only.
    """

    activations: int
    output: int
    parameters: dict[int, int]
    trained: dict[int, int]


@dataclass(frozen=True)
class RankCost:
    """The memory usage and communication volume of one rank of a pipeline.

    Attributes:
        parameters: The number of parameters.
        activations: The peak activation memory in bytes.
        sent: The number of bytes sent to other ranks per step. The bytes sent include activations, gradients of
            activations, and gradients of parameters that other pipelines or stages share.
    """

    parameters: int
    activations: int
    sent: int


class _Through(nn.Module):
    """A module that calls the stages in order, and records each stage's saved bytes and output size."""

    def __init__(self, stages: Sequence[Stage], kept: Any) -> None:
        super().__init__()
        self.stages, self.kept = nn.ModuleList(stages), kept
        self.outputs: list[int] = []
        self.ends: list[int] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        first, *others = self.stages
        x = first(*inputs, **named)
        for stage in others:
            self.outputs.append(x.nbytes)
            self.ends.append(self.kept.nbytes)
            x = stage(x)
        return x


def stage_costs(model: nn.Module, loss: Loss, batch: Any, config: PipelineConfig) -> list[StageCost]:
    """Return each stage's cost for the micro-batch `batch`.

    The stages run on the meta device, so no values are computed.
    """
    stages = split_into_stages(model, config.cuts or even_splits(model, config.stages))
    with count_saved_bytes(model) as kept:
        through = _Through(stages, kept)
        loss(through, batch)
    ends = [*through.ends, kept.nbytes]  # the last stage includes the bytes saved by the loss
    begins, outputs = [0, *ends[:-1]], [*through.outputs, 0]
    parameters = [{id(p): p.numel() for p in stage.parameters()} for stage in stages]
    trained = [{id(p): p.numel() for p in stage.parameters() if p.requires_grad} for stage in stages]
    return [
        StageCost(end - begin, output, own, own_trained)
        for begin, end, output, own, own_trained in zip(begins, ends, outputs, parameters, trained, strict=True)
    ]


def rank_costs(costs: Sequence[StageCost], table: Table, copies: int = 1, accumulation: int = 1) -> list[RankCost]:
    """Return the memory usage and communication volume of each rank of a pipeline.

    In an all-reduce of n bytes over W ranks, each rank sends 2 n (W - 1) / W bytes. The gradients of a stage are
    reduced over the pipelines. The gradients of a tied parameter are reduced over the ranks that share the parameter.
    Weights and gradients are float32. The exchange of micro-batches within a pipeline is not included. `copies` is the
    number of pipelines, and `accumulation` is the number of schedule executions per step.
    """
    ranks = len(table)
    of_ranks: list[dict[int, int]] = [{} for _ in table]
    trained: list[dict[int, int]] = [{} for _ in table]
    for number, cost in enumerate(costs):
        of_ranks[number % ranks] |= cost.parameters
        trained[number % ranks] |= cost.trained
    result = []
    for place, row in enumerate(table):
        now = most = sent = 0
        for action in row:
            now += costs[action.stage].activations * (1 if action.kind == FORWARD else -1)
            most = max(most, now)
            to = action.stage + (1 if action.kind == FORWARD else -1)
            if 0 <= to < len(costs) and to % ranks != place:
                sent += accumulation * costs[min(action.stage, to)].output
        sent += bytes_all_reduced(4 * sum(trained[place].values()), copies)
        for tensor, count in trained[place].items():
            sent += bytes_all_reduced(4 * count, sum(tensor in each for each in trained))
        result.append(RankCost(sum(of_ranks[place].values()), most, sent))
    return result
