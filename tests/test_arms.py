"""Arms that take turns: the steps of the trainer, and where their time goes."""

import time
from typing import Any

import pytest
import torch

from ddp_tutorial.config import load
from ddp_tutorial.ddp.variants import DDPConfig
from ddp_tutorial.experiments.arms import Arm, by_repeat, idle, make_step, medians, take_turns
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.sources import ALONE, SourceConfig
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")
TINY = load("tiny", TaskConfig, ["warmup_steps=0", "final_lr_fraction=1"])


def compared(world: World) -> tuple[list[str], dict[str, Any], bool]:
    """All arms in one world, turns of theirs, and whether they and the trainer have the same weights at the end."""
    kinds = ("sharded", "dispatched", "streamed", "fast_stream")
    ddp = DDPConfig(variant="bucket")
    arms: dict[str, Any] = {
        kind: Arm(make_step(TINY.model_copy(update={"source": SourceConfig(kind=kind), "ddp": ddp}), world))
        for kind in kinds
    }
    arms["alone"] = Arm(make_step(TINY, ALONE)) if world.is_main else idle
    order: list[str] = []
    watched = {name: (lambda name=name: (order.append(name), arms[name]())) for name in arms}
    turns = take_turns(world, watched, steps=2, turns=2)
    trainer = make_trainer(TINY.model_copy(update={"ddp": ddp}), world)
    for _ in range(6):
        trainer.step()
    weights = [list(each.model.parameters()) for each in (trainer, arms["sharded"].step, arms["dispatched"].step)]
    equal = all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))
    for kind in kinds:
        arms[kind].close()
    return order, turns, equal


def test_arms_take_turns_take_the_trainers_steps_and_tell_where_the_time_went() -> None:
    (order, turns, equal), (_, of_rank_1, _) = launch(compared, 2, device="cpu", threads=1, echo=False)
    names = list(turns)
    assert order[::2] == [*names, *names[::-1], *names]
    assert equal
    for name, each in turns.items():
        assert len(each) == 2  # the first is not counted
        for turn in each:
            assert set(turn) == {"step", "data", "compute", "sync", "other"}
            assert turn["compute"] > 0
            assert turn["step"] == pytest.approx(sum(turn.values()) - turn["step"], rel=1e-6), name
    assert of_rank_1["alone"][0]["compute"] == 0  # it was idle
    assert of_rank_1["alone"][0]["step"] >= turns["alone"][0]["compute"] * 0.9  # until rank 0 was done


def test_medians_are_taken_part_by_part() -> None:
    assert medians({"a": [{"step": 1.0, "data": 3.0}, {"step": 2.0, "data": 2.0}, {"step": 9.0, "data": 1.0}]}) == {
        "a": {"step": 2.0, "data": 2.0}
    }


def test_a_repeat_is_the_median_of_its_turns() -> None:
    turns = [{"step": float(seconds)} for seconds in (1, 2, 9, 4, 5, 6)]
    assert by_repeat(turns, repeats=2) == [2.0, 5.0]
    assert by_repeat(turns, repeats=3) == [1.5, 6.5, 5.5]


def _slow_rank(world: World) -> tuple[float, float]:
    def sleep() -> None:
        if world.rank == 1:
            time.sleep(0.05)

    used = time.process_time()
    turns = take_turns(world, {"sleep": sleep}, steps=4, turns=1)
    return turns["sleep"][0]["step"], time.process_time() - used


def test_a_turn_lasts_until_the_slowest_rank_is_done_and_waiting_takes_no_core() -> None:
    for seconds, used in launch(_slow_rank, 2, device="cpu", threads=1, echo=False):
        assert 0.05 <= seconds < 0.5
        assert used < 0.1, "a rank that waits in a barrier should sleep, or it takes cores from those who work"


def _threads(world: World) -> list[int]:
    found = []
    for threads in (2, 1):
        Arm(make_step(TINY, ALONE), threads)()
        found.append(torch.get_num_threads())
    return found


def test_each_arm_sets_its_own_number_of_threads() -> None:
    assert launch(_threads, 1, device="cpu", threads=1, echo=False) == [[2, 1]]
