"""Arms that alternate: the steps of the trainer, and the time of each part."""

import time
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from ddp_tutorial.config import load
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.experiments.arms import Arm, by_repeat, idle, make_step, medians, run_interleaved
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.config import SourceConfig
from ddp_tutorial.sharding.sources import SINGLE_PROCESS
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")
TINY = load("tiny", TaskConfig, ["warmup_steps=0", "final_lr_fraction=1"])


class Step(NamedTuple):
    """A step of an arm; times are in seconds of the monotonic clock, which all ranks of a machine share."""

    arm: str
    began: float
    ended: float


def compared(world: World) -> tuple[list[Step], dict[str, Any], bool]:
    """Run all arms in one world.

    Return their steps, their turns, and whether they and the trainer have the same weights.
    """
    kinds = ("sharded", "dispatched", "streamed", "fast_stream")
    ddp = DDPConfig(variant="bucket")
    arms: dict[str, Any] = {
        kind: Arm(make_step(TINY.model_copy(update={"source": SourceConfig(kind=kind), "ddp": ddp}), world))
        for kind in kinds
    }
    arms["alone"] = Arm(make_step(TINY, SINGLE_PROCESS)) if world.is_main else idle
    steps: list[Step] = []

    def watched(name: str) -> None:
        began = time.monotonic()
        arms[name]()
        steps.append(Step(name, began, time.monotonic()))

    turns = run_interleaved(world, {name: partial(watched, name) for name in arms}, steps=2, turns=2)
    trainer = make_trainer(TINY.model_copy(update={"ddp": ddp}), world)
    for _ in range(6):
        trainer.step()
    weights = [list(each.model.parameters()) for each in (trainer, arms["sharded"].step, arms["dispatched"].step)]
    equal = all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))
    for kind in kinds:
        arms[kind].close()
    return steps, turns, equal


def test_arms_alternate_take_the_trainers_steps_and_report_each_part() -> None:
    (steps, turns, equal), (of_rank_1, waited, _) = launch(compared, 2, device="cpu", threads=1, echo=False)
    names = list(turns)
    order = [*names, *names[::-1], *names]
    assert [step.arm for step in steps] == [step.arm for step in of_rank_1] == [name for name in order for _ in "12"]
    assert equal
    for name, each in turns.items():
        assert len(each) == 2  # the first turn is not counted
        for turn in each:
            assert set(turn) == {"step", "data", "compute", "sync", "other"}
            assert turn["compute"] > 0
            assert turn["step"] == pytest.approx(sum(turn.values()) - turn["step"], rel=1e-6), name
    for last, following in zip(range(1, len(steps), 2), range(2, len(steps), 2), strict=False):
        ended = max(steps[last].ended, of_rank_1[last].ended)
        assert ended <= min(steps[following].began, of_rank_1[following].began), "a turn began before another was over"
    assert waited["alone"][0]["compute"] == 0  # rank 1 was idle
    first = order.index("alone", len(names)) * 2  # of the first counted turn
    # A busy machine may wake rank 1 late, so that it waits less.
    until = steps[first + 1].ended - of_rank_1[first].began
    assert waited["alone"][0]["step"] >= until / 2 - 1e-6, "a turn lasts until rank 0 is done"


def test_medians_are_computed_for_each_part() -> None:
    assert medians({"a": [{"step": 1.0, "data": 3.0}, {"step": 2.0, "data": 2.0}, {"step": 9.0, "data": 1.0}]}) == {
        "a": {"step": 2.0, "data": 2.0}
    }


def test_a_repeat_is_the_median_of_its_turns() -> None:
    turns = [{"step": float(seconds)} for seconds in (1, 2, 9, 4, 5, 6)]
    assert by_repeat(turns, repeats=2) == [2.0, 5.0]
    assert by_repeat(turns, repeats=3) == [1.5, 6.5, 5.5]


class Slow(NamedTuple):
    step: float  # seconds, as in `run_interleaved`
    began: float  # the start of the first counted step, on the monotonic clock
    ended: float
    all: float  # the duration of all turns in seconds, including the uncounted one
    used: float  # CPU seconds


def _slow_rank(world: World) -> Slow:
    moments = []

    def sleep() -> None:
        began = time.monotonic()
        if world.rank == 1:
            time.sleep(0.05)
        moments.append((began, time.monotonic()))

    used, start = time.process_time(), time.monotonic()
    turns = run_interleaved(world, {"sleep": sleep}, steps=4, turns=1)
    took = time.monotonic() - start
    return Slow(turns["sleep"][0]["step"], moments[4][0], moments[-1][1], took, time.process_time() - used)


def test_a_turn_lasts_until_the_slowest_rank_and_waiting_ranks_sleep() -> None:
    ranks = launch(_slow_rank, 2, device="cpu", threads=1, echo=False)
    slowest = ranks[1].ended
    for each in ranks:
        assert slowest - each.began - 1e-6 <= 4 * each.step <= each.all - 4 * 0.05, "a turn is not what it lasted"
        assert each.used < 0.1, "a rank that waits in a barrier should sleep, or it takes cores from those who work"
    assert ranks[1].step >= 0.05


def _threads(world: World) -> list[int]:
    found = []
    for threads in (2, 1):
        Arm(make_step(TINY, SINGLE_PROCESS), threads)()
        found.append(torch.get_num_threads())
    return found


def test_each_arm_sets_its_own_number_of_threads() -> None:
    assert launch(_threads, 1, device="cpu", threads=1, echo=False) == [[2, 1]]
