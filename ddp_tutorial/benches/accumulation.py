"""Measure the cost of micro-batches, and the cost of making results independent of the number of ranks."""

from typing import Any

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import CONTEXT, random_step
from ddp_tutorial.experiments.arms import by_repeat, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

SAMPLES = 16  # per rank per step
V = 4  # micro-batches per step on both ranks together, when the two strategies are compared
KS = [1, 2, 4, 8]  # micro-batches per rank, with the same batch size
_TURNS, _STEPS = 2, 2  # turns per arm per repeat, and steps per turn


def measure(repeats: int) -> dict[str, Any]:
    """Measure throughput in tokens per second on two single-threaded ranks. All arms use the same batch size."""
    samples = launch(_measure, 2, repeats, device="cpu", threads=1, echo=False)[0]
    ratios = {"invariant_vs_ddp": ("invariant", "ddp")} | {f"k{k}_vs_k1": (f"k{k}", "k1") for k in KS[1:]}
    return report("accumulation", samples, "tokens/s", ratios)


def _measure(world: World, repeats: int) -> Samples:
    arms = {f"k{k}": random_step(world, SAMPLES, accumulation=k) for k in KS}
    arms["ddp"] = random_step(world, SAMPLES, accumulation=V // world.size)
    arms["invariant"] = random_step(world, SAMPLES, strategy="invariant", micro_batches=V)
    turns = run_interleaved(world, arms, _STEPS, repeats * _TURNS)
    tokens = world.size * SAMPLES * CONTEXT
    return {name: [tokens / seconds for seconds in by_repeat(turns[name], repeats)] for name in arms}
