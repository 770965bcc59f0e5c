"""What it costs to check and to watch ranks: training steps with each detector, with the default set, and without.

The step is that of a model of 0.8 million parameters on 512 tokens a rank; a second one, of some 3 ms, has little but
overhead in it, so any cost shows. `single` has the first one's step again, and one detector at a time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.debug.checks import checking, default_detectors
from ddp_tutorial.debug.fingerprints import fingerprinted
from ddp_tutorial.debug.hangs import watching
from ddp_tutorial.experiments.arms import make_step
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.step import TrainStep
from ddp_tutorial.world import World


class Size(NamedTuple):
    """What is compared with steps that nobody looks at, and in which steps."""

    model: ModelConfig
    arms: list[str]
    turns: int  # of each arm in a repeat


_SMALL = ModelConfig(layers=4, heads=4, width=128, context=64)
_TINY = ModelConfig(layers=1, heads=1, width=16, context=64)
_TOGETHER = ["off", "default", "watched", "fingerprinted"]
_SIZES = {
    "small": Size(_SMALL, _TOGETHER, turns=3),
    "tiny": Size(_TINY, _TOGETHER, turns=5),
    "single": Size(_SMALL, ["off", *(each.name for each in default_detectors())], turns=1),  # one detector at a time
}
_BATCH = 16  # samples of all ranks in a step
_STEPS = 20  # in a turn: detectors that look now and then do so once in so many steps, or in half as many
_FIRST = 3  # before them, not timed: the first steps of a block have more to do, such as to compare names


def measure(repeats: int) -> dict[str, Any]:
    """Milliseconds of a step, two ranks with one thread each."""
    samples: Samples = {}
    ratios: dict[str, tuple[str, str]] = {}
    for name, size in _SIZES.items():
        config = TaskConfig(model=size.model, batch_size=_BATCH, steps=100_000)
        taken = launch(_alternate, 2, config, size, repeats, device="cpu", threads=1, echo=False)[0]
        samples |= {f"{arm}_{name}": [1e3 * seconds for seconds in values] for arm, values in taken.items()}
        ratios |= {f"{arm}_vs_off_{name}": (f"{arm}_{name}", f"off_{name}") for arm in size.arms[1:]}
    return report("debug", samples, "ms", ratios)


def _alternate(world: World, config: TaskConfig, size: Size, repeats: int) -> Samples:
    """Seconds of a step in each repeat. Turn by turn, one arm after the other, forwards and backwards: what is attached
    is attached for its turn only."""
    step = make_step(config, world)
    attached = _attached(world, step)
    taken: dict[str, list[list[float]]] = {arm: [] for arm in size.arms}
    for number in range(repeats * size.turns + 1):
        for arm in size.arms[:: -1 if number % 2 else 1]:
            with attached(arm):
                for _ in range(_FIRST):
                    step()
                seconds = _timed(world, step)
            if number:  # the first turn of each is not counted: memory is allocated there
                taken[arm].append(seconds)
    step.close()
    return {
        arm: [_of_a_step(turns[i * size.turns : (i + 1) * size.turns]) for i in range(repeats)]
        for arm, turns in taken.items()
    }


def _of_a_step(turns: Sequence[Sequence[float]]) -> float:
    """The seconds of a step, from those of each step of some turns. Of the steps at one place in their turns, the
    median; of these, the mean. So what a detector does at one place in all turns counts in full, and what the machine
    did at some time does not."""
    return statistics.fmean(statistics.median(at_place) for at_place in zip(*turns, strict=True))


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
        # The first step that is timed has a round number: what is done now and then has the same place in all turns.
        before = step.number + _FIRST + 1 - _STEPS
        return checking(world, step.model, step.optimizer, chosen, after=lambda: step.number - before)

    return around


def _timed(world: World, step: Callable[[], object]) -> list[float]:
    """Seconds of each of the next `_STEPS` steps. In each, all ranks wait for the gradient, so they take as long."""
    dist.barrier()
    seconds = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds
