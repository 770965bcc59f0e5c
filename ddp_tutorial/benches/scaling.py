"""Does a second rank double the speed? One process, ranks, and processes that do the same work without talking.

All arms of a launch do the same optimiser steps on the same samples, and nothing else inside the timer: no evaluation,
no log. They live in the same ranks and take turns; while rank 0 works alone, the others sleep in a barrier.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import Training, random_text, rest, take_turns
from ddp_tutorial.collectives import assert_same
from ddp_tutorial.ddp import DDPConfig
from ddp_tutorial.environment import cores
from ddp_tutorial.launcher import launch
from ddp_tutorial.sharded import ShardedSource
from ddp_tutorial.sharding import Order, Sharding
from ddp_tutorial.sources import ALONE
from ddp_tutorial.world import World

# Samples of a step, over all that work together; in the weak arms, of each rank. With fewer, ranks meet more often for
# the same work, and have less to do between two meetings.
BATCH = 64
SAMPLES = 4096
_TURNS, _STEPS = 2, 4  # turns of an arm in a repeat, steps in a turn


class Arm(NamedTuple):
    """How one arm trains. `readers` share out each batch of `batch` samples; their gradients are averaged, as `ddp`
    says, if they `talk`. One reader is a process alone, with `threads` threads."""

    readers: int
    batch: int = BATCH
    talk: bool = True
    threads: int = 1
    ddp: DDPConfig = DDPConfig()


def two_rank_arms() -> dict[str, Arm]:
    """In a launch of two ranks."""
    return {
        "one_thread": Arm(1),
        "all_threads": Arm(1, threads=cores()),
        "two_ranks": Arm(2),
        "independent": Arm(2, talk=False),
        "two_ranks_weak": Arm(2, batch=2 * BATCH),
        "independent_weak": Arm(2, batch=2 * BATCH, talk=False),
    }


# In a launch of four. One process once more, to compare with in the same launch.
FOUR_RANK_ARMS = {"one_thread_of_four": Arm(1), "four_ranks": Arm(4), "four_independent": Arm(4, talk=False)}


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


def training_of(arm: Arm, world: World) -> Training | None:
    """This rank's part in an arm; None if it has none."""
    if world.rank >= arm.readers:
        return None
    reader = world if arm.readers > 1 else ALONE
    sharding = Sharding(Order(SAMPLES, seed=0), arm.batch, "carry", reader.size)
    source = ShardedSource(random_text(SAMPLES), sharding, reader)
    return Training(source, reader if arm.talk else ALONE, arm.ddp, arm.threads)


def race(world: World, arms: dict[str, Arm], repeats: int, turns: int = _TURNS, steps: int = _STEPS) -> Samples:
    """Samples per second of each arm in each repeat, by the median of its turns. Collective, the same on each rank but
    for what their clocks say."""
    trainings = {name: training_of(arm, world) for name, arm in arms.items()}
    calls: dict[str, Callable[[], object]] = {name: each or rest for name, each in trainings.items()}
    samples: Samples = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        seconds = take_turns(calls, turns, steps)
        if repeat:  # the first is not counted: buckets are rebuilt, memory is allocated
            for name, arm in arms.items():
                samples[name].append(arm.batch * steps / statistics.median(seconds[name]))
    for name, arm in arms.items():
        if (training := trainings[name]) and arm.talk and arm.readers > 1:
            assert_same(world, dict(training.module.named_parameters()), f"{name}: parameter")
    return samples
