"""Measure the overhead that individual detectors and all default detectors together add to a training step.

The model has 0.8 million parameters, and each rank processes 512 tokens per step. A second, tiny model makes any
overhead visible, because its steps take about 3 ms. The `_single` arms use the first model and at most one detector.

The cost of the default detectors is measured in groups of three steps: without detectors ("off"), with the default
detectors ("default"), and again without detectors ("again"). Every other group runs in reverse order, so that
background load affects all three steps equally. The cost is the middle step's time minus the mean time of the others.

Periodic checks always run at the same positions within each block of 20 checked steps. The reported cost is the median
cost at each position, averaged over the 20 positions. A check that runs every 20 steps therefore contributes a
twentieth of its cost.

The arm `again` is compared with `off` in the same way. Both arms run without detectors, so their difference is the
measurement error. The suffix `_cpu` marks rank 0's CPU time in the steps of the arm without the suffix. CPU time
excludes waits for other ranks, and varies less between steps.

The arms `watched` and `fingerprinted` cannot alternate with `off` step by step, so they alternate in turns of 20 steps.
Their step time is also computed as the median at each position, averaged over the 20 positions.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.benches import Samples, report
from ddp_tutorial.debug.checks import checking, default_detectors
from ddp_tutorial.debug.fingerprints import fingerprinted
from ddp_tutorial.debug.hangs import watching
from ddp_tutorial.experiments.arms import alternate, make_step
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.world import World


class Size(NamedTuple):
    """A model size, its arms, and the numbers of turns and rounds."""

    model: ModelConfig
    arms: list[str]
    turns: int  # per arm per repeat
    rounds: int = 0  # per repeat, each of `_STEPS` steps with the default detectors and twice as many without


_SMALL = ModelConfig(layers=4, heads=4, width=128, context=64)
_TINY = ModelConfig(layers=1, heads=1, width=16, context=64)
_IN_TURNS = ["off", "watched", "fingerprinted"]
_SIZES = {
    "small": Size(_SMALL, _IN_TURNS, turns=2, rounds=8),
    "tiny": Size(_TINY, _IN_TURNS, turns=5, rounds=10),
    "single": Size(_SMALL, ["off", *(each.name for each in default_detectors())], turns=1),  # one detector at a time
}
_BATCH = 16  # global batch size
_STEPS = 20  # steps per turn; periodic checks run every 20 or every 10 steps
_FIRST = 3  # untimed warm-up steps per turn; the first steps include one-time checks, such as comparing names


def measure(repeats: int) -> dict[str, Any]:
    """Measure the step time in milliseconds on two single-threaded ranks.

    For each ratio, `spread` contains the lowest and the highest of the per-repeat ratios.
    """
    samples: Samples = {}
    ratios: dict[str, tuple[str, str]] = {}
    pooled: dict[str, float] = {}
    for name, size in _SIZES.items():
        config = TaskConfig(model=size.model, batch_size=_BATCH, steps=100_000)
        if size.rounds:
            by_clock = launch(_one_by_one, 2, config, size, repeats, device="cpu", threads=1, echo=False)[0]
            for clock, triples in zip(("", "_cpu"), by_clock, strict=True):
                of_repeats = [_compared(each) for each in _cut(triples, repeats)]
                together = _compared(triples)
                names = {arm: f"{arm}_{name}{clock}" for arm in together}
                samples |= {names[arm]: [1e3 * each[arm] for each in of_repeats] for arm in together}
                for arm in ("default", "again"):
                    ratios[f"{arm}_vs_off_{name}{clock}"] = names[arm], names["off"]
                    pooled[f"{arm}_vs_off_{name}{clock}"] = together[arm] / together["off"]
        taken = launch(_alternate, 2, config, size, repeats, device="cpu", threads=1, echo=False)[0]
        off = "off_in_turns" if size.rounds else "off"
        names = {arm: f"{off if arm == 'off' else arm}_{name}" for arm in size.arms}
        samples |= {names[arm]: [1e3 * seconds for seconds in values] for arm, values in taken.items()}
        ratios |= {f"{arm}_vs_off_{name}": (names[arm], names["off"]) for arm in size.arms[1:]}
    result = report("debug", samples, "ms", ratios)
    single = {
        ratio: [a / b for a, b in zip(samples[above], samples[below], strict=True)]
        for ratio, (above, below) in ratios.items()
    }
    result["ratios"] |= pooled  # over all repeats, so the medians use more steps
    return result | {"spread": {ratio: [min(values), max(values)] for ratio, values in single.items()}}


class Triple(NamedTuple):
    """The durations of three consecutive steps in seconds. The steps run in the order of the fields or in reverse."""

    off: float
    default: float
    again: float


def _one_by_one(world: World, config: TaskConfig, size: Size, repeats: int) -> tuple[list[Triple], list[Triple]]:
    """Return triples of elapsed times, and triples of this rank's CPU times, in seconds. Collective.

    Each repeat contains `size.rounds * _STEPS` steps with the default detectors.
    """
    step, taken = make_step(config, world), list[dict[str, tuple[float, float]]]()
    number = 1 - _STEPS  # the number of the next checked step; steps up to 0 are a warm-up
    with checking(world, step.model, step.optimizer, after=lambda: number + _STEPS - 1) as checks:
        while number <= repeats * size.rounds * _STEPS:
            seconds = {}
            for arm in Triple._fields[:: -1 if (number + number // _STEPS) % 2 else 1]:
                with nullcontext() if arm == "default" else checks.detached():
                    seconds[arm] = _timed(step)
            number += 1
            taken.append(seconds)
    step.close()
    passed, worked = (
        [Triple(**{arm: both[i] for arm, both in each.items()}) for each in taken[_STEPS:]] for i in (0, 1)
    )
    return passed, worked


def _cut(several: Sequence[Any], parts: int) -> list[Any]:
    """Split a sequence into `parts` parts of equal length."""
    length = len(several) // parts
    return [several[i * length : (i + 1) * length] for i in range(parts)]


def _compared(triples: Sequence[Triple]) -> dict[str, float]:
    """Return the step times in seconds without detectors, with the default detectors, and again without detectors."""
    off = _of_a_step([[(each.off + each.again) / 2 for each in turn] for turn in _turns(triples)])
    cost = _of_a_step([[each.default - (each.off + each.again) / 2 for each in turn] for turn in _turns(triples)])
    nothing = _of_a_step([[each.again - each.off for each in turn] for turn in _turns(triples)])
    return {"off": off, "default": off + cost, "again": off + nothing}


def _turns(triples: Sequence[Triple]) -> list[Sequence[Triple]]:
    return _cut(triples, len(triples) // _STEPS)


def _alternate(world: World, config: TaskConfig, size: Size, repeats: int) -> Samples:
    """Return each arm's step times in seconds, one per repeat. Collective.

    A detector is attached only during the turns of its own arm.
    """
    step = make_step(config, world)
    attached = _attached(world, step)

    def turn(arm: str) -> list[float]:
        with attached(arm):
            for _ in range(_FIRST):
                step()
            return [_timed(step)[0] for _ in range(_STEPS)]

    taken = alternate({arm: partial(turn, arm) for arm in size.arms}, repeats * size.turns)
    step.close()
    return {arm: [_of_a_step(each) for each in _cut(turns, repeats)] for arm, turns in taken.items()}


def _of_a_step(turns: Sequence[Sequence[float]]) -> float:
    """Return the median step time at each position in a turn, averaged over the positions, in seconds.

    If a check runs at the same position in every turn, the medians include the check's cost. A temporary slowdown of
    the machine hardly affects the result.
    """
    return statistics.fmean(statistics.median(at_place) for at_place in zip(*turns, strict=True))


def _attached(world: World, step: TrainStep) -> Callable[[str], AbstractContextManager[object]]:
    """Return a function that creates the context in which an arm runs its steps."""

    def around(arm: str) -> AbstractContextManager[object]:
        if arm == "off":
            return nullcontext()
        if arm == "watched":
            return watching(world, 30)
        if arm == "fingerprinted":
            return fingerprinted(world)
        chosen = [each for each in default_detectors() if arm in {"default", each.name}]
        # The number of the first timed step is a multiple of `_STEPS`, so periodic checks have fixed positions.
        before = step.number + _FIRST + 1 - _STEPS
        return checking(world, step.model, step.optimizer, chosen, after=lambda: step.number - before)

    return around


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock time until all ranks finish a step, and this rank's CPU time, in seconds. Collective."""
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - worked
