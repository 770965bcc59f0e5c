"""What cutting a step into micro-batches costs, and what it costs to have the same bits on any number of ranks."""

import statistics
from typing import Any

import torch

from ddp_tutorial.accumulation import Batch, next_token, split
from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import take_turns
from ddp_tutorial.ddp import DDPConfig, LinkConfig
from ddp_tutorial.invariant import InvariantStrategy
from ddp_tutorial.launcher import launch
from ddp_tutorial.model import GPT
from ddp_tutorial.sharded import Share
from ddp_tutorial.strategy import DDPStrategy, Strategy
from ddp_tutorial.world import World

CONTEXT, SAMPLES = 64, 16  # tokens of a sample, samples of a rank in a step
V = 4  # micro-batches of a step over both ranks, in the comparison of the two strategies
KS = [1, 2, 4, 8]  # micro-batches of a rank, at the same batch
_TURNS, _STEPS = 2, 2  # turns of an arm in a repeat, steps in a turn


def measure(repeats: int) -> dict[str, Any]:
    """Tokens per second, two ranks with one thread each. The same samples in each step of all arms."""
    samples = launch(_measure, 2, repeats, device="cpu", threads=1, echo=False)[0]
    ratios = {"invariant_vs_ddp": ("invariant", "ddp")} | {f"k{k}_vs_k1": (f"k{k}", "k1") for k in KS[1:]}
    return report("accumulation", samples, "tokens/s", ratios)


class _Step:
    """A model of about 5 million parameters, an optimiser, and one step of them each time it is called."""

    def __init__(self, world: World, parts: int, invariant: bool = False, link: LinkConfig | None = None) -> None:
        torch.manual_seed(0)
        model = GPT(layers=6, heads=4, width=256, context=CONTEXT)
        config = DDPConfig(variant="torch", simulated_link=link)
        self.strategy: Strategy = (
            InvariantStrategy(model, world, parts * world.size) if invariant else DDPStrategy(model, world, config)
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(world.rank))
        share = Share({"tokens": tokens}, SAMPLES, SAMPLES * world.size)
        self.batches: list[Batch] = [next_token(part) for part in split(share, parts, world)]

    def __call__(self) -> None:
        self.strategy.backward(self.batches)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _measure(world: World, repeats: int) -> Samples:
    arms = {f"k{k}": _Step(world, k) for k in KS}
    arms["ddp"], arms["invariant"] = _Step(world, V // world.size), _Step(world, V // world.size, invariant=True)
    samples: Samples = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        seconds = take_turns(arms, _TURNS, _STEPS)
        if repeat:  # the first is not counted: buckets are rebuilt, memory is allocated
            for name in arms:
                samples[name].append(world.size * SAMPLES * CONTEXT * _STEPS / statistics.median(seconds[name]))
    return samples
