"""The variants of ddp.py side by side, and how much of its communication `BucketDDP` hides behind backward."""

import statistics
from typing import Any

import torch.distributed as dist

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import CONTEXT, SAMPLES, Step, take_turns
from ddp_tutorial.ddp import DDPConfig, LinkConfig
from ddp_tutorial.launcher import launch
from ddp_tutorial.timeline import overlap, record
from ddp_tutorial.world import World

_TURNS, _STEPS = 4, 3  # turns of an arm in a repeat, steps in a turn
_VARIANTS = {
    "naive": DDPConfig(variant="naive"),
    "flat": DDPConfig(variant="flat"),
    "bucket": DDPConfig(variant="bucket"),
    "torch": DDPConfig(variant="torch"),
}
# So slow that the all-reduces take longer than backward: bandwidth-bound.
_SLOW = DDPConfig(
    variant="bucket", bucket_cap_mb=1, simulated_link=LinkConfig(latency_ms=0.1, megabytes_per_second=100)
)


def measure(repeats: int) -> dict[str, Any]:
    """Tokens per second of each variant on the link that is there, and seconds of communication that a simulated,
    bandwidth-bound link had hidden, and could have hidden. Two ranks with one thread each."""
    samples = launch(_measure, 2, repeats, device="cpu", threads=1, echo=False)[0]
    units = dict.fromkeys(_VARIANTS, "tokens/s") | {"hidden": "s", "hideable": "s"}
    ratios = {f"{name}_vs_torch": (name, "torch") for name in ("naive", "flat", "bucket")}
    return report("ddp", samples, units, ratios | {"hidden_of_hideable": ("hidden", "hideable")})


def _measure(world: World, repeats: int) -> Samples:
    arms = {name: Step(world, config) for name, config in _VARIANTS.items()}
    slow = Step(world, _SLOW)
    samples: Samples = {name: [] for name in (*arms, "hidden", "hideable")}
    for repeat in range(repeats + 1):
        seconds = take_turns(arms, _TURNS, _STEPS)
        slow()
        dist.barrier()
        with record(slow.model.link) as recorder:
            slow()
        if repeat:  # the first is not counted: buckets are rebuilt, memory is allocated
            for name in arms:
                samples[name].append(world.size * SAMPLES * CONTEXT * _STEPS / statistics.median(seconds[name]))
            of = overlap(recorder.spans)
            samples["hidden"].append(of.hidden)
            samples["hideable"].append(of.hideable)
    return samples
