"""Arms that take turns: the steps of the trainer, and where their time goes."""

from typing import Any

import pytest
import torch

from ddp_tutorial.arms import Arm, idle, medians, take_turns
from ddp_tutorial.config import load
from ddp_tutorial.ddp import DDPConfig
from ddp_tutorial.launcher import launch
from ddp_tutorial.sources import ALONE, SourceConfig
from ddp_tutorial.trainer import TrainConfig, Trainer
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")
TINY = load("tiny", TrainConfig, ["warmup_steps=0", "final_lr_fraction=1"])


def compared(world: World) -> tuple[list[str], dict[str, Any], bool]:
    """All arms in one world, turns of theirs, and whether they and the trainer have the same weights at the end."""
    kinds = ("sharded", "dispatched", "streamed", "fast_stream")
    ddp = DDPConfig(variant="bucket")
    arms: dict[str, Any] = {
        kind: Arm(TINY.model_copy(update={"source": SourceConfig(kind=kind), "ddp": ddp}), world) for kind in kinds
    }
    arms["alone"] = Arm(TINY, ALONE) if world.is_main else idle
    order: list[str] = []
    watched = {name: (lambda name=name: (order.append(name), arms[name]())) for name in arms}
    turns = take_turns(world, watched, steps=2, repeats=2)
    trainer = Trainer(TINY.model_copy(update={"ddp": ddp}), world)
    for _ in range(6):
        trainer.advance()
    weights = [list(each.parameters()) for each in (trainer.model, arms["sharded"].model, arms["dispatched"].model)]
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
    assert of_rank_1["alone"][0]["step"] == pytest.approx(turns["alone"][0]["step"], rel=0.5)


def test_medians_are_taken_part_by_part() -> None:
    assert medians({"a": [{"step": 1.0, "data": 3.0}, {"step": 2.0, "data": 2.0}, {"step": 9.0, "data": 1.0}]}) == {
        "a": {"step": 2.0, "data": 2.0}
    }
