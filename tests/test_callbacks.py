"""Callbacks of `Trainer`: when ranks call them, and what happens if one raises an exception."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.callbacks import Callback, check_callbacks
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")


def squared_error(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return (model(batch[0]) - 1).square().sum(), len(batch[0])


def train(world: World, *callbacks: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    config = TrainConfig(steps=4, eval_every=2, checkpoint={"every": 3})
    source = make_source(data, 8, world)
    trainer = Trainer(nn.Linear(3, 2), source, squared_error, world, config, validation_data=data, callbacks=callbacks)
    return trainer.train()


class Recorder(Callback):
    """Records each call. `on_step` uses a collective, as all ranks call it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_step(self, trainer: Trainer, result: Any) -> None:
        ranks = all_reduce_sum(trainer.world, torch.ones(1)).item()
        self.calls.append(("step", trainer.step_count, result.means["loss"], ranks))

    def on_evaluate(self, trainer: Trainer, step: int, means: dict[str, float]) -> None:
        self.calls.append(("evaluate", step, means["loss"]))
        means.clear()

    def on_save(self, trainer: Trainer, step: int) -> None:
        self.calls.append(("save", step, (trainer.run.checkpoints / f"step_{step:08d}").is_dir()))

    def on_end(self, trainer: Trainer, result: Any) -> None:
        self.calls.append(("end", result.weights, trainer.run.result.exists()))


class Raises(Callback):
    def on_evaluate(self, trainer: Trainer, step: int, means: dict[str, float]) -> None:
        if trainer.world.rank == 1:
            raise ValueError(f"no more at step {step}")


def record_and_reject(world: World) -> dict[str, Any]:
    recorder = Recorder()
    result = train(world, recorder)
    wrong: dict[str, Any] = {
        "class": [Recorder],
        "function": [print],
        "one rank": [Recorder()] if world.is_main else [],
        "raises": [Raises()],
    }
    errors = {name: error_of(lambda each=each: train(world, *each)) for name, each in wrong.items()}
    return {"calls": recorder.calls, "result": result, "errors": errors}


def test_every_rank_calls_the_callbacks_and_all_ranks_fail_together() -> None:
    ranks = launch(record_and_reject, 2, device="cpu", threads=1, echo=False)
    for rank, found in enumerate(ranks):
        result, errors = found["result"], found["errors"]
        assert [call[:2] for call in found["calls"]] == [
            *(("step", 1), ("step", 2), ("evaluate", 2), ("step", 3), ("save", 3)),
            *(("step", 4), ("evaluate", 4), ("save", 4), ("end", result.weights)),
        ]
        assert [call[2] for call in found["calls"] if call[0] == "step"] == result.losses
        assert all(call[3] == 2 for call in found["calls"] if call[0] == "step")
        assert {call[1]: call[2] for call in found["calls"] if call[0] == "evaluate"} == result.eval_losses
        assert all(call[2] for call in found["calls"] if call[0] in {"save", "end"})
        assert errors["class"].endswith(
            "must contain objects of type Callback, got Recorder: pass an instance, such as Recorder()"
        )
        assert errors["function"].endswith("got builtin_function_or_method: subclass ddp_tutorial.Callback")
        assert "must be the same on all ranks, got ['Recorder'] on rank 0 and [] on rank 1" in errors["one rank"]
        told = "CallbackError: a callback raised an exception on rank 1: ValueError: " if rank == 0 else "ValueError: "
        assert errors["raises"] == f"{told}no more at step 2"


def test_callbacks_from_a_generator_are_called() -> None:
    recorder = Recorder()
    assert check_callbacks(World(), (each for each in [recorder])) == [recorder]  # type: ignore[arg-type]


def test_a_callback_that_raises_aborts_the_run_with_its_error() -> None:
    with pytest.raises(RankError, match="no more at step 2"):
        launch(train, 2, Raises(), device="cpu", threads=1, echo=False)
