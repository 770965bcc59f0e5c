"""Measure the speedup from additional ranks.

The benchmark compares one process, synchronized ranks, and independent processes on the same work. All arms of a launch
take the same number of optimizer steps. Only the weak arms use more samples. The timer excludes evaluation and logging.
The arms alternate on the same ranks. While rank 0 trains alone, all other ranks sleep in a barrier.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import gpt_step, random_text
from ddp_tutorial.collectives import assert_same
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.environment import cores
from ddp_tutorial.experiments.arms import Arm, by_repeat, idle, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.sources import SINGLE_PROCESS, make_source
from ddp_tutorial.world import World

# The global batch size, or in the weak arms, the batch size per rank. With a smaller batch, ranks synchronize more
# often for the same work.
BATCH = 64
SAMPLES = 4096
_TURNS, _STEPS = 2, 4  # turns per arm per repeat, and steps per turn


class Setup(NamedTuple):
    """The configuration of one arm.

    Attributes:
        readers: The number of ranks that read data and train. With one reader, a single process trains alone.
        batch: The global batch size.
        talk: Whether the ranks average their gradients.
        threads: The number of torch threads per rank.
        ddp: The DDP configuration.
    """

    readers: int
    batch: int = BATCH
    talk: bool = True
    threads: int = 1
    ddp: DDPConfig = DDPConfig()


def two_rank_arms() -> dict[str, Setup]:
    """Return the arms of a launch with two ranks."""
    return {
        "one_thread": Setup(1),
        "all_threads": Setup(1, threads=cores()),
        "two_ranks": Setup(2),
        "independent": Setup(2, talk=False),
        "two_ranks_weak": Setup(2, batch=2 * BATCH),
        "independent_weak": Setup(2, batch=2 * BATCH, talk=False),
    }


# The arms of a launch with four ranks. A single process is included as the baseline in the same launch.
FOUR_RANK_ARMS = {"one_thread_of_four": Setup(1), "four_ranks": Setup(4), "four_independent": Setup(4, talk=False)}


def measure(repeats: int) -> dict[str, Any]:
    """Measure each arm's samples per second.

    The arms are a single-threaded process, a process with all threads, single-threaded ranks, and independent
    processes. The independent processes train on the ranks' shards without synchronization. In the weak arms, each rank
    uses the single process's batch size. All synchronized ranks must finish with bitwise identical parameters.
    """
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
    """Return this rank's training step in an arm, or None if the rank does not train."""
    if world.rank >= setup.readers:
        return None
    reader = world if setup.readers > 1 else SINGLE_PROCESS
    source = make_source(random_text(SAMPLES), setup.batch, reader)
    return Arm(gpt_step(source, reader if setup.talk else SINGLE_PROCESS, ddp=setup.ddp), setup.threads)


def race(world: World, setups: dict[str, Setup], repeats: int, turns: int = _TURNS, steps: int = _STEPS) -> Samples:
    """Return each arm's samples per second in each repeat, computed from the repeat's median turn. Collective.

    The values differ between ranks only because each rank uses its own clock.
    """
    arms = {name: arm_of(setup, world) for name, setup in setups.items()}
    calls: dict[str, Callable[[], object]] = {name: each or idle for name, each in arms.items()}
    taken = run_interleaved(world, calls, steps, repeats * turns)
    for name, setup in setups.items():
        if (arm := arms[name]) and setup.talk and setup.readers > 1:
            assert_same(world, dict(arm.step.model.named_parameters()), f"{name}: parameter")
    return {
        name: [setup.batch / seconds for seconds in by_repeat(taken[name], repeats)] for name, setup in setups.items()
    }
