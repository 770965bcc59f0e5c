"""What it costs to check and to watch ranks: training steps with each detector, with the default set, and without.

The step is that of a model of 0.8 million parameters on 512 tokens a rank; a second one, of some 3 ms, has little but
overhead in it, so any cost shows.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.debug.checks import checking, default_detectors
from ddp_tutorial.debug.fingerprints import fingerprinted
from ddp_tutorial.debug.hangs import watching
from ddp_tutorial.experiments.arms import by_repeat, make_step
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.step import TrainStep
from ddp_tutorial.world import World

# Name -> (model, samples of all ranks in a step, turns of each arm in a repeat).
_SIZES = {
    "small": (ModelConfig(layers=4, heads=4, width=128, context=64), 16, 1),
    "tiny": (ModelConfig(layers=1, heads=1, width=16, context=64), 16, 5),
}
_STEPS = 20  # in a turn: detectors that look now and then do so once in so many steps, or in half as many


def measure(repeats: int) -> dict[str, Any]:
    """Milliseconds of a step, two ranks with one thread each."""
    samples: Samples = {}
    ratios: dict[str, tuple[str, str]] = {}
    single = [each.name for each in default_detectors()]
    for size, (model, batch, turns) in _SIZES.items():
        arms = ["off", "default", "watched", "fingerprinted", *(single if size == "small" else [])]
        config = TaskConfig(model=model, batch_size=batch, steps=100_000)
        taken = launch(_alternate, 2, config, arms, repeats, turns, device="cpu", threads=1, echo=False)[0]
        samples |= {f"{arm}_{size}": [1e3 * seconds for seconds in values] for arm, values in taken.items()}
        ratios |= {f"{arm}_vs_off_{size}": (f"{arm}_{size}", f"off_{size}") for arm in arms[1:]}
    return report("debug", samples, "ms", ratios)


def _alternate(world: World, config: TaskConfig, arms: Sequence[str], repeats: int, turns: int) -> Samples:
    """Turn by turn, one arm after the other, forwards and backwards: what is attached is attached for its turn only."""
    step = make_step(config, world)
    attached = _attached(world, step)
    taken: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(repeats * turns + 1):
        for arm in arms[:: -1 if number % 2 else 1]:
            with attached(arm):
                step()  # the first step within a block has more to do, such as to compare names
                seconds = _timed(world, step)
            if number:  # the first turn of each is not counted: memory is allocated there
                taken[arm].append({"step": seconds})
    step.close()
    return {arm: by_repeat(each, repeats) for arm, each in taken.items()}


def _attached(world: World, step: TrainStep) -> Callable[[str], AbstractContextManager[object]]:
    """What is around the steps of an arm."""

    def around(arm: str) -> AbstractContextManager[object]:
        if arm == "off":
            return nullcontext()
        if arm == "watched":
            return watching(world, 30)
        if arm == "fingerprinted":
            return fingerprinted(world)
        chosen = [each for each in default_detectors() if arm in {"default", each.name}]
        return checking(world, step.model, step.optimizer, chosen, after=lambda: step.number)

    return around


def _timed(world: World, step: Callable[[], object]) -> float:
    """Seconds of a step, until all ranks are done with `_STEPS` of them."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / _STEPS
