"""Compare the DDP variants, and measure how much communication `BucketDDP` overlaps with the backward pass."""

from typing import Any

import torch.distributed as dist

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import CONTEXT, random_step
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.timeline import overlap, record
from ddp_tutorial.experiments.arms import by_repeat, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

SAMPLES = 8  # per rank per step
_TURNS, _STEPS = 4, 3  # turns per arm per repeat, and steps per turn
_VARIANTS = {
    "naive": DDPConfig(variant="naive"),
    "flat": DDPConfig(variant="flat"),
    "bucket": DDPConfig(variant="bucket"),
    "torch": DDPConfig(variant="torch"),
}
# Bandwidth-bound: the all-reduces take longer than the backward pass.
_SLOW = DDPConfig(
    variant="bucket", bucket_cap_mb=1, simulated_link=LinkConfig(latency_ms=0.1, megabytes_per_second=100)
)


def measure(repeats: int) -> dict[str, Any]:
    """Measure the variants on two single-threaded ranks.

    The report contains each variant's tokens per second without a simulated link. For a simulated slow link, the report
    also contains two durations in seconds: the communication that overlaps with the backward pass, and its upper bound.
    """
    samples = launch(_measure, 2, repeats, device="cpu", threads=1, echo=False)[0]
    units = dict.fromkeys(_VARIANTS, "tokens/s") | {"hidden": "s", "hideable": "s"}
    ratios = {f"{name}_vs_torch": (name, "torch") for name in ("naive", "flat", "bucket")}
    return report("ddp", samples, units, ratios | {"hidden_of_hideable": ("hidden", "hideable")})


def _measure(world: World, repeats: int) -> Samples:
    arms = {name: random_step(world, SAMPLES, ddp=config) for name, config in _VARIANTS.items()}
    turns = run_interleaved(world, arms, _STEPS, repeats * _TURNS)
    tokens = world.size * SAMPLES * CONTEXT
    samples = {name: [tokens / seconds for seconds in by_repeat(turns[name], repeats)] for name in arms}
    slow = random_step(world, SAMPLES, ddp=_SLOW)
    slow()  # rebuilds the buckets
    samples |= {"hidden": [], "hideable": []}
    for _ in range(repeats):
        slow()
        dist.barrier()
        with record(slow.strategy.link) as recorder:
            slow()
        of = overlap(recorder.spans)
        samples["hidden"].append(of.hidden)
        samples["hideable"].append(of.hideable)
    return samples
