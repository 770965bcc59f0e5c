"""What it costs to watch ranks: training steps with `watching` around them, against the same steps without."""

from contextlib import nullcontext
from typing import Any

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.debug.hangs import watching
from ddp_tutorial.experiments.arms import by_repeat, make_step, take_turns
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.world import World

_STEPS = 20  # in a turn
_TURNS = 5  # of each arm in a repeat


def measure(repeats: int) -> dict[str, Any]:
    """Seconds of a step, two ranks with one thread each: a step of some 3 ms, which any cost shows in."""
    model = ModelConfig(layers=1, heads=1, width=16, context=64)
    config = TaskConfig(model=model, batch_size=16, steps=100_000)
    samples = launch(_alternate, 2, config, repeats, device="cpu", threads=1, echo=False)[0]
    milliseconds = {name: [1e3 * value for value in values] for name, values in samples.items()}
    return report("debug", milliseconds, "ms", {"watched_vs_not": ("watched", "not")})


def _alternate(world: World, config: TaskConfig, repeats: int) -> Samples:
    """Turn by turn, one arm after the other: a watch begins with its turn and ends with it."""
    step = make_step(config, world)
    turns: dict[str, list[dict[str, float]]] = {"watched": [], "not": []}
    for number in range(2 * repeats * _TURNS):
        name = list(turns)[(number + number // 2) % 2]  # forwards, backwards
        with watching(world, 30) if name == "watched" else nullcontext():
            turns[name] += take_turns(world, {name: step}, _STEPS, 1)[name]
    step.close()
    return {name: by_repeat(each, repeats) for name, each in turns.items()}
