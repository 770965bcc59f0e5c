"""Settings that may differ on resume: the new settings apply, and the optimizer's state is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from ddp_tutorial.checkpoint.storage import stored
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.optimization import learning_rate_factor
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")

HALF, STEPS = 4, 8
FIRST = Path(f"runs/first/checkpoints/step_{HALF:08d}")


def squared_error(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return (model(batch[0]) - 1).square().sum(), len(batch[0])


def config_of(name: str, **values: Any) -> TrainConfig:
    base = {"steps": STEPS, "warmup_steps": 2, "log_every": 1, "checkpoint": {"every": HALF, "keep_last": 9}}
    return TrainConfig.model_validate(base | {"name": name} | values)


def trainer_of(config: TrainConfig, **options: Any) -> Trainer:
    torch.manual_seed(0)
    rows = torch.randn(32, 3)
    return Trainer(
        nn.Linear(3, 2), make_source(TensorDataset(rows), 8, World()), squared_error, World(), config, **options
    )


def rates_of(run: Path) -> list[float]:
    return [json.loads(line)["learning_rate"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def resumed(*, of: str = "first", options: dict[str, Any] | None = None, **values: Any) -> Trainer:
    """Return a trainer that resumed from the middle of the first run with other settings, before its first step."""
    start = f"runs/{of}/checkpoints/step_{HALF:08d}"
    trainer = trainer_of(config_of("second", resume=start, resume_allow=list(values), **values), **(options or {}))
    trainer.resume()
    return trainer


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 0.01, "weight_decay": 0.5},
        {"schedule": "constant", "learning_rate": 0.02},
        {"steps": STEPS + 4},
        {"warmup_steps": 6, "final_lr_fraction": 0.5},
    ],
    ids=str,
)
def test_learning_rates_after_a_resume_follow_the_new_settings(values: dict[str, Any]) -> None:
    first = trainer_of(config_of("first")).train()
    again = resumed(**values).train()
    config = config_of("", **values)
    wanted = [config.learning_rate * learning_rate_factor(config)(step) for step in range(HALF, config.steps)]
    assert rates_of(again.run) == wanted
    assert again.losses[: HALF + 1] == first.losses[: HALF + 1], "of step 5, before its update"
    assert again.losses[HALF + 1 : STEPS] != first.losses[HALF + 1 :]


def test_new_optimizer_options_apply_and_its_momentum_is_kept() -> None:
    trainer_of(config_of("first")).train()
    trainer = resumed(weight_decay=0.5)
    matrices, vectors = trainer.train_step.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)
    state, saved = trainer.train_step.optimizer.state_dict()["state"], stored(FIRST, "optimizer")["state"]
    assert state[0]["exp_avg"].abs().sum() > 0
    for parameter, averages in saved.items():
        for name, value in averages.items():
            assert torch.equal(state[parameter][name], value)
    trainer.log.close()


def test_changes_during_a_run_persist_if_optimizer_settings_are_equal() -> None:
    trainer = trainer_of(config_of("first", steps=HALF, schedule_steps=STEPS))
    trainer.train_step.optimizer.param_groups[0]["weight_decay"] = 0.7  # by user code
    trainer.train()
    again = resumed(steps=STEPS, schedule_steps=STEPS, clip=2.0)
    assert again.train_step.optimizer.param_groups[0]["weight_decay"] == 0.7
    again.log.close()


def test_a_custom_schedule_continues_from_the_new_rate() -> None:
    def options(rate: float) -> dict[str, Any]:
        return {
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
            "scheduler": lambda optimizer: ExponentialLR(optimizer, 0.5),
        }

    trainer_of(config_of("first", learning_rate=1.0), **options(1.0)).train()
    again = resumed(learning_rate=3.0, options=options(3.0)).train()
    assert rates_of(again.run) == [3.0 * 0.5**step for step in range(HALF, STEPS)]
