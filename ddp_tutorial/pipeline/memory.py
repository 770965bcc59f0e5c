"""What each rank of a pipeline keeps, and sends in a step: arithmetic over its schedule, without running it.

The stages are run once, on torch's meta device, to see what each leaves for its backward and gives to the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.accumulation.memory import count_saved_bytes
from ddp_tutorial.ddp.link import bytes_all_reduced
from ddp_tutorial.pipeline.parallel import PipelineConfig
from ddp_tutorial.pipeline.schedules import FORWARD, Table
from ddp_tutorial.pipeline.stages import Stage, even_splits, split_into_stages


@dataclass(frozen=True)
class StageCost:
    """What one stage costs for one micro-batch: bytes that forward keeps for backward, and bytes of what it gives to
    the next stage (0 for the last), of which a gradient comes back. `parameters`: by identity, their numbers of
    elements."""

    activations: int
    output: int
    parameters: dict[int, int]


@dataclass(frozen=True)
class RankCost:
    """What one rank of a pipeline keeps and sends: its parameters; the most bytes of activations at a time; bytes sent
    to other ranks in a step, for activations and their gradients, and for gradients (those of copies and of tied
    parameters)."""

    parameters: int
    activations: int
    sent: int


class _Through(nn.Module):
    """Calls one stage after another, and notes where the bytes that are kept, and those handed on, then stand."""

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
    """What each stage costs for one micro-batch `batch`; all on the meta device, so without computing anything."""
    stages = split_into_stages(model, config.cuts or even_splits(model, config.stages))
    with count_saved_bytes(model) as kept:
        through = _Through(stages, kept)
        loss(through, batch)
    ends = [*through.ends, kept.nbytes]  # what the loss itself keeps belongs to the last stage
    begins, outputs = [0, *ends[:-1]], [*through.outputs, 0]
    parameters = [{id(p): p.numel() for p in stage.parameters()} for stage in stages]
    return [
        StageCost(end - begin, output, own)
        for begin, end, output, own in zip(begins, ends, outputs, parameters, strict=True)
    ]


def rank_costs(costs: Sequence[StageCost], table: Table, copies: int = 1) -> list[RankCost]:
    """What each rank of a pipeline keeps and sends, as the table has it; `copies` is the number of pipelines.

    All-reduces of n bytes over W ranks send 2 n (W - 1) / W: of a stage's gradients over the pipelines, and of a tied
    parameter's over the ranks that have it. Weights and gradients are in float32; micro-batches as such are left out.
    """
    ranks = len(table)
    of_ranks: list[dict[int, int]] = [{} for _ in table]
    for number, cost in enumerate(costs):
        of_ranks[number % ranks] |= cost.parameters
    found = []
    for place, row in enumerate(table):
        now = most = sent = 0
        for action in row:
            now += costs[action.stage].activations * (1 if action.kind == FORWARD else -1)
            most = max(most, now)
            to = action.stage + (1 if action.kind == FORWARD else -1)
            if 0 <= to < len(costs) and to % ranks != place:
                sent += costs[min(action.stage, to)].output
        own = of_ranks[place]
        sent += bytes_all_reduced(4 * sum(own.values()), copies)
        for tensor, count in own.items():
            sent += bytes_all_reduced(4 * count, sum(tensor in each for each in of_ranks))
        found.append(RankCost(sum(own.values()), most, sent))
    return found
