"""Compare compiled training steps with a hand-written loop that uses PyTorch's DDP and `torch.compile`.

Arms:
    ours: A `TrainStep` without compilation.
    ours_compiled: A `TrainStep` with `compile: true`.
    bare: The hand-written loop of the module `overhead`.
    bare_compiled: The same loop with `torch.compile(DistributedDataParallel(model))`.

Every arm reads the same number of samples, clips the gradients, uses the same learning-rate schedule, and reports the
global mean loss of every step. The first step includes the compilation, either with an empty cache (`cold`) or with the
cached files of an earlier compilation (`cached`).
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.overhead import bare_loop, reporting
from ddp_tutorial.ddp.config import CompileConfig
from ddp_tutorial.environment import variables_restored
from ddp_tutorial.experiments.arms import alternate, make_step, medians, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.world import World

Step = Callable[[], object]

_MODEL = ModelConfig(layers=4, heads=4, width=128, context=64)
_CONFIG = TaskConfig(model=_MODEL, batch_size=16, steps=1000)
_COMPILED = ("ours_compiled", "bare_compiled")
_TURN, _TURNS = 10, 5  # steps of an arm in one turn, and turns per repeat


def measure(repeats: int) -> dict[str, Any]:
    """Measure the duration of the first step and of later steps on two single-threaded ranks.

    Each repeat starts new ranks. Every measurement of a first step also starts new ranks, because compiled arms in the
    same process share the compiled code. The cold first step takes the longest and is measured only once. All other
    times are measured in every repeat.
    """

    def first_step(arm: str) -> float:
        return launch(_first_step, 2, arm, device="cpu", threads=1, echo=False)[0]

    samples: Samples = {}
    for arm in _COMPILED:
        with _empty_cache():
            samples[f"{arm}_first_step_cold"] = [first_step(arm)]
    with _empty_cache():  # which the warm-up round fills
        cached = alternate({arm: partial(first_step, arm) for arm in _COMPILED}, repeats)
        steps = [launch(_alternate, 2, device="cpu", threads=1, echo=False)[0] for _ in range(repeats)]
    samples |= {f"{arm}_first_step_cached": seconds for arm, seconds in cached.items()}
    samples |= {f"{arm}_step": [each[arm] for each in steps] for arm in steps[0]}
    ratios = {
        "ours_vs_bare": ("ours_step", "bare_step"),
        "ours_compiled_vs_bare_compiled": ("ours_compiled_step", "bare_compiled_step"),
        "ours_compiled_vs_ours": ("ours_compiled_step", "ours_step"),
        "bare_compiled_vs_bare": ("bare_compiled_step", "bare_step"),
        "ours_vs_bare_first_step_cold": ("ours_compiled_first_step_cold", "bare_compiled_first_step_cold"),
        "ours_vs_bare_first_step_cached": ("ours_compiled_first_step_cached", "bare_compiled_first_step_cached"),
    }
    return report("compile", samples, "s", ratios)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Use an empty inductor cache directory for the ranks that start inside the context."""
    with tempfile.TemporaryDirectory() as folder, variables_restored("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        yield


def _make(arm: str, world: World) -> Step:
    """Return the step function of an arm. Collective."""
    is_compiled = arm.endswith("_compiled")
    if arm.startswith("bare"):
        return reporting(world, bare_loop(world, _CONFIG, compiled=is_compiled))
    return make_step(_CONFIG.model_copy(update={"compile": CompileConfig() if is_compiled else None}), world)


def _first_step(world: World, arm: str) -> float:
    """Return the duration of the first step in seconds, on the slowest rank. Collective."""
    step = _make(arm, world)
    dist.barrier()
    start = time.monotonic()
    step()
    dist.barrier()
    return time.monotonic() - start


def _alternate(world: World) -> dict[str, float]:
    """Return each arm's step time in seconds, excluding the arm's first step. Collective."""
    arms = {arm: _make(arm, world) for arm in ("ours", "bare", *_COMPILED)}
    turns = run_interleaved(world, arms, _TURN, _TURNS)
    return {arm: found["step"] for arm, found in medians(turns).items()}
