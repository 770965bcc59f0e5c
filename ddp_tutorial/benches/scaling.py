"""Does a second rank double the speed? One process, ranks, and processes that do the same work without talking.

All arms of a launch do the same optimiser steps on the same samples, and nothing else inside the timer: no evaluation,
no log. They live in the same ranks and take turns; while rank 0 works alone, the others sleep in a barrier.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import gpt_step, random_text
from ddp_tutorial.collectives import assert_same
from ddp_tutorial.ddp.wrappers import DDPConfig
from ddp_tutorial.environment import cores
from ddp_tutorial.experiments.arms import Arm, by_repeat, idle, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.sources import SINGLE_PROCESS, SourceConfig, SourceKind, make_source
from ddp_tutorial.world import World

# Samples of a step, over all that work together; in the weak arms, of each rank. With fewer, ranks meet more often for
# the same work, and have less to do between two meetings.
BATCH = 64
SAMPLES = 4096
_TURNS, _STEPS = 2, 4  # turns of an arm in a repeat, steps in a turn


class Setup(NamedTuple):
    """How one arm trains. `readers` share out each batch of `batch` samples, which a source of kind `source` gives;
    their gradients are averaged, as `ddp` says, if they `talk`. One reader is a process alone, with `threads` threads.
    """

    readers: int
    batch: int = BATCH
    talk: bool = True
    threads: int = 1
    ddp: DDPConfig = DDPConfig()
    source: SourceKind = "sharded"


def two_rank_arms() -> dict[str, Setup]:
    """In a launch of two ranks."""
    return {
        "one_thread": Setup(1),
        "all_threads": Setup(1, threads=cores()),
        "two_ranks": Setup(2),
        "independent": Setup(2, talk=False),
        "two_ranks_weak": Setup(2, batch=2 * BATCH),
        "independent_weak": Setup(2, batch=2 * BATCH, talk=False),
    }


# In a launch of four. One process once more, to compare with in the same launch.
FOUR_RANK_ARMS = {"one_thread_of_four": Setup(1), "four_ranks": Setup(4), "four_independent": Setup(4, talk=False)}


def measure(repeats: int) -> dict[str, Any]:
    """Samples per second. One process with one thread and with all; ranks with one thread each; and as many independent
    processes, each on its share of the same samples, unsynchronised. Arms called weak have as many samples for each
    rank as one process has. Ranks are checked to end with the same bits."""
    two = launch(race, 2, two_rank_arms(), repeats, device="cpu", threads=1, echo=False)[0]
    four = launch(race, 4, FOUR_RANK_ARMS, repeats, device="cpu", threads=1, echo=False)[0]
    ratios = {
        "two_ranks_vs_independent": ("two_ranks", "independent"),
        "two_ranks_vs_one_thread": ("two_ranks", "one_thread"),
        "two_ranks_vs_one_process_all_threads": ("two_ranks", "all_threads"),
        "independent_vs_one_thread": ("independent", "one_thread"),
        "two_ranks_weak_vs_independent": ("two_ranks_weak", "independent_weak"),
        "two_ranks_weak_vs_one_thread": ("two_ranks_weak", "one_thread"),
        "four_ranks_vs_independent": ("four_ranks", "four_independent"),
        "four_ranks_vs_one_thread": ("four_ranks", "one_thread_of_four"),
    }
    ranks = {name: arm.readers for name, arm in (two_rank_arms() | FOUR_RANK_ARMS).items()}
    crowded = [name for name, readers in ranks.items() if readers > cores()]
    return report("scaling", two | four, "samples/s", ratios) | {"oversubscribed": crowded}


def arm_of(setup: Setup, world: World) -> Arm | None:
    """This rank's part in an arm; None if it has none."""
    if world.rank >= setup.readers:
        return None
    reader = world if setup.readers > 1 else SINGLE_PROCESS
    source = make_source(random_text(SAMPLES), setup.batch, reader, config=SourceConfig(kind=setup.source))
    return Arm(gpt_step(source, reader if setup.talk else SINGLE_PROCESS, ddp=setup.ddp), setup.threads)


def race(world: World, setups: dict[str, Setup], repeats: int, turns: int = _TURNS, steps: int = _STEPS) -> Samples:
    """Samples per second of each arm in each repeat, by the median of its turns. Collective, the same on each rank but
    for what their clocks say."""
    arms = {name: arm_of(setup, world) for name, setup in setups.items()}
    calls: dict[str, Callable[[], object]] = {name: each or idle for name, each in arms.items()}
    taken = run_interleaved(world, calls, steps, repeats * turns)
    for name, setup in setups.items():
        if (arm := arms[name]) and setup.talk and setup.readers > 1:
            assert_same(world, dict(arm.step.model.named_parameters()), f"{name}: parameter")
    return {
        name: [setup.batch / seconds for seconds in by_repeat(taken[name], repeats)] for name, setup in setups.items()
    }
