"""Compare the step times of pipelines with predictions from their schedules.

The stages sleep, so that only the schedule determines the step time. For each micro-batch, a rank's stages sleep 20 ms
in total in the forward pass and 40 ms in the backward pass. The prediction is the makespan of the schedule, excluding
communication time. PyTorch's own schedules run the same stages on the same ranks.

The benchmark also reports results for a GPT. The step time of real stages also depends on the cores, the caches and the
balance of the stages. The prediction for a GPT step uses the stage durations measured in that step.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.experiments.arms import run_interleaved
from ddp_tutorial.pipeline.config import Name, PipelineConfig
from ddp_tutorial.pipeline.parallel import Pipeline
from ddp_tutorial.pipeline.schedules import Timed, simulate, table_of
from ddp_tutorial.pipeline.stages import even_splits, split_into_stages
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.world import World

FORWARD, BACKWARD = 0.020, 0.040  # seconds per micro-batch in all stages of a rank
MICRO_BATCHES = 8
SCHEDULES: list[tuple[Name, int]] = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]  # name, stages per rank
ROWS = 2  # samples per micro-batch
_TORCHS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class SleepingLayer(nn.Module):
    """A layer that adds a weight to its input and sleeps for a fixed time."""

    def __init__(self, forward: float, backward: float) -> None:
        """Set the durations of the forward and the backward pass, in seconds."""
        super().__init__()
        self.seconds, self.weight = (forward, backward), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, and return `x` plus the weight."""
        slept: torch.Tensor = _Sleep.apply(x + self.weight, *self.seconds)
        return slept


def measure(repeats: int) -> dict[str, Any]:
    """Measure the step time in seconds, from a barrier until the last rank is done, on 2 and 4 ranks.

    The report contains predicted times, measured times, and the times of torch's schedules.
    """
    samples: Samples = {}
    for size in (2, 4):
        samples |= launch(_sleeping, size, repeats, device="cpu", threads=1, echo=False)[0]
    samples |= launch(_real, 2, repeats, device="cpu", threads=1, echo=False)[0]
    arms = [name.removesuffix("_measured") for name in samples if name.endswith("_measured")]
    sleeping = [arm for arm in arms if arm.startswith("sleeping_")]
    ratios = {
        f"measured_vs_predicted_{arm.removeprefix('sleeping_')}": (f"{arm}_measured", f"{arm}_predicted")
        for arm in sleeping
    }
    ratios |= {f"{arm}_measured_vs_predicted": (f"{arm}_measured", f"{arm}_predicted") for arm in arms[len(sleeping) :]}
    ratios |= {
        f"torch_vs_ours_{arm.removeprefix('sleeping_')}": (f"{arm}_torch", f"{arm}_measured") for arm in sleeping
    }
    return report("pipeline", samples, "s", ratios)


def _loss(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).square().sum(), len(x)


def _sleeping(world: World, repeats: int) -> Samples:
    samples: Samples = {}
    calls: dict[str, Callable[[], object]] = {}
    batches = [torch.ones(ROWS, 4) for _ in range(MICRO_BATCHES)]
    for schedule, per_rank in SCHEDULES:
        config = PipelineConfig(ranks=world.size, schedule=schedule, per_rank=per_rank, micro_batches=MICRO_BATCHES)
        costs = FORWARD / per_rank, BACKWARD / per_rank
        arm = f"sleeping_{schedule}_on_{world.size}"
        pipeline = Pipeline(_sleepers(config.stages, costs), world, _loss, config)
        calls[f"{arm}_measured"] = lambda pipeline=pipeline: pipeline.backward(batches)  # type: ignore[misc]
        calls[f"{arm}_torch"] = _torchs(world, schedule, config.stages, costs)
        samples[f"{arm}_predicted"] = [simulate(table_of(config), *costs).makespan] * repeats
    turns = run_interleaved(world, calls, 1, repeats)
    return samples | {name: [turn["step"] for turn in taken] for name, taken in turns.items()}


def _sleepers(stages: int, costs: tuple[float, float]) -> nn.Sequential:
    return nn.Sequential(*(SleepingLayer(*costs) for _ in range(stages)))


def _torchs(world: World, schedule: str, stages: int, costs: tuple[float, float]) -> Callable[[], object]:
    """Return a function that runs the `_measured` arm's step with `torch.distributed.pipelining`.

    Torch 2.13 raises an error when it sends a gradient that is not contiguous, such as the gradient of a plain sum.
    Therefore, the loss is a sum of squares.
    """
    model = _sleepers(stages, costs)
    own = [
        PipelineStage(part, number, stages, world.device)
        for number, part in enumerate(split_into_stages(model, even_splits(model, stages)))
        if number % world.size == world.rank
    ]
    made = _TORCHS[schedule](
        own if schedule == "interleaved" else own[0],
        MICRO_BATCHES,
        loss_fn=lambda y, _: y.square().sum(),
        scale_grads=False,
    )
    x = torch.ones(MICRO_BATCHES * ROWS, 4)
    if world.rank == world.size - 1:
        return lambda: made.step(target=x, losses=[])
    return (lambda: made.step(x)) if world.rank == 0 else made.step


def _real(world: World, repeats: int) -> Samples:
    """Return measured and predicted step times of an eight-block GPT whose stages have similar parameter counts.

    The prediction uses the measured duration of each stage.
    """
    draw = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(0, 256, (4, 65), generator=draw)} for _ in range(MICRO_BATCHES)]
    pipelines: dict[str, Pipeline] = {}
    for schedule, per_rank in SCHEDULES:
        torch.manual_seed(0)
        config = PipelineConfig(ranks=world.size, schedule=schedule, per_rank=per_rank, micro_batches=MICRO_BATCHES)
        model = GPT(layers=8, heads=4, width=128, context=64)
        pipelines[f"real_{schedule}_on_{world.size}"] = Pipeline(model, world, next_token_loss, config)
    ran: dict[str, list[list[Timed]]] = {arm: [] for arm in pipelines}

    def step(arm: str) -> None:
        pipelines[arm].backward(batches)
        ran[arm].append(pipelines[arm].runner.ran)

    turns = run_interleaved(world, {arm: partial(step, arm) for arm in pipelines}, 1, repeats)
    samples: Samples = {}
    for arm, pipeline in pipelines.items():
        steps = ran[arm][1:]  # the first step is a warm-up
        samples[f"{arm}_predicted"] = [_predicted(world, pipeline.config, timed) for timed in steps]
        samples[f"{arm}_measured"] = [turn["step"] for turn in turns[arm]]
    return samples


def _predicted(world: World, config: PipelineConfig, ran: list[Timed]) -> float:
    """Return the schedule's makespan for the median duration of each stage's passes in one step. Collective."""
    timed = [each for rank in all_gather(world, ran) for each in rank]
    forward, backward = (
        [
            statistics.median(t.end - t.start for t in timed if t.action[:2] == (kind, stage))
            for stage in range(config.stages)
        ]
        for kind in "FB"
    )
    return simulate(table_of(config), forward, backward).makespan
