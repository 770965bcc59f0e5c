"""What it costs to check and to watch ranks: training steps with each detector, with the default set, and without.

The step is that of a model of 0.8 million parameters on 512 tokens a rank; a second one, of some 3 ms, has little but
overhead in it, so any cost shows. `single` has the first one's step again, and one detector at a time.

The default set is compared step by step: one without it, one with it, one without it "again", and then in the opposite
order, so what the machine does meanwhile falls on all three alike. Its cost is what the step in the middle takes beyond
the mean of its two neighbours. What is done now and then is done at the same places of each 20 steps that are checked:
of each place the median counts, and of the 20 places the mean. So an exchange in 20 steps counts for a twentieth, and
in full. `again` is compared with the other step without checks in the same way: it costs nothing, so what is found
there says how far to trust the rest. `_cpu` is the processor time of rank 0 in the same steps: it leaves out what ranks
wait for one another, and differs less from one step to the next.

The others cannot be attached for one step: they take turns of 20 steps, of which the same is taken.
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
    rounds: int = 0  # of `_STEPS` steps with the default set in a repeat, and twice as many without


_SMALL = ModelConfig(layers=4, heads=4, width=128, context=64)
_TINY = ModelConfig(layers=1, heads=1, width=16, context=64)
_IN_TURNS = ["off", "watched", "fingerprinted"]
_SIZES = {
    "small": Size(_SMALL, _IN_TURNS, turns=2, rounds=8),
    "tiny": Size(_TINY, _IN_TURNS, turns=5, rounds=10),
    "single": Size(_SMALL, ["off", *(each.name for each in default_detectors())], turns=1),  # one detector at a time
}
_BATCH = 16  # samples of all ranks in a step
_STEPS = 20  # in a turn: detectors that look now and then do so once in so many steps, or in half as many
_FIRST = 3  # before them, not timed: the first steps of a block have more to do, such as to compare names


def measure(repeats: int) -> dict[str, Any]:
    """Milliseconds of a step, two ranks with one thread each. `spread` has the lowest and the highest ratio of a single
    repeat."""
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
    found = report("debug", samples, "ms", ratios)
    single = {
        ratio: [a / b for a, b in zip(samples[above], samples[below], strict=True)]
        for ratio, (above, below) in ratios.items()
    }
    found["ratios"] |= pooled  # of all repeats together: a median of more steps
    return found | {"spread": {ratio: [min(values), max(values)] for ratio, values in single.items()}}


class Triple(NamedTuple):
    """Seconds of three steps one after another, or in the opposite order: without checks, with them, without them."""

    off: float
    default: float
    again: float


def _one_by_one(world: World, config: TaskConfig, size: Size, repeats: int) -> tuple[list[Triple], list[Triple]]:
    """Those of `size.rounds` times `_STEPS` steps with the default set, in each repeat: by the clock, and of this
    rank's processor time."""
    step, taken = make_step(config, world), list[dict[str, tuple[float, float]]]()
    number = 1 - _STEPS  # of the step with checks that comes next; up to 0 they are not counted
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
    """In `parts` of equal length."""
    length = len(several) // parts
    return [several[i * length : (i + 1) * length] for i in range(parts)]


def _compared(triples: Sequence[Triple]) -> dict[str, float]:
    """The seconds of a step: without checks, and so many more with them, and where the same is compared with itself."""
    off = _of_a_step([[(each.off + each.again) / 2 for each in turn] for turn in _turns(triples)])
    cost = _of_a_step([[each.default - (each.off + each.again) / 2 for each in turn] for turn in _turns(triples)])
    nothing = _of_a_step([[each.again - each.off for each in turn] for turn in _turns(triples)])
    return {"off": off, "default": off + cost, "again": off + nothing}


def _turns(triples: Sequence[Triple]) -> list[Sequence[Triple]]:
    return _cut(triples, len(triples) // _STEPS)


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
                seconds = [_timed(step)[0] for _ in range(_STEPS)]
            if number:  # the first turn of each is not counted: memory is allocated there
                taken[arm].append(seconds)
    step.close()
    return {arm: [_of_a_step(each) for each in _cut(turns, repeats)] for arm, turns in taken.items()}


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


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the next step, until all ranks have taken it; and those that this rank's threads have computed."""
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - worked
