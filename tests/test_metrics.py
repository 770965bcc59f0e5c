"""Validation metrics with a state: the value does not depend on the number of ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.samples import as_samples
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.training.evaluation import evaluate
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")


class AUC:
    """The area under the ROC curve: the probability that a positive sample has a higher score than a negative one."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []
        self.labels: list[torch.Tensor] = []

    def update(self, model: nn.Module, batch: Any) -> None:
        assert not torch.is_grad_enabled()
        assert not model.training
        self.scores.append(model(batch[0]).squeeze(1))
        self.labels.append(batch[1])

    def state(self) -> dict[str, torch.Tensor]:
        return {"scores": torch.cat(self.scores), "labels": torch.cat(self.labels)}

    def compute(self, states: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        scores, labels = (torch.cat([state[name] for state in states]) for name in ("scores", "labels"))
        return (scores[labels == 1][:, None] > scores[labels == 0]).double().mean()


class NotANumber(AUC):
    def compute(self, states: Any) -> Any:
        return "high"


def logistic(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    logits = model(batch[0]).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch[1], reduction="sum"), len(logits)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    return TensorDataset(x, (x[:, 0] + torch.randn(40, generator=generator) > 0).float())


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def auc_of(model: nn.Module, count: int) -> float:
    x, labels = (tensor[:count] for tensor in samples().tensors)
    scores = model(x).squeeze(1)
    pairs = [(a > b).item() for a in scores[labels == 1] for b in scores[labels == 0]]
    return sum(pairs) / len(pairs)


def trainer_of(world: World, **options: Any) -> Trainer:
    config = TrainConfig(steps=4, eval_every=2, strategy="zero3", best={"metric": "auc", "mode": "max"})
    source = make_source(samples(), 8, world)
    return Trainer(new_model(), source, logistic, world, config, **({"validation_data": samples()} | options))


def evaluations(world: World) -> dict[str, Any]:
    data, metrics = as_samples(samples()), {"auc": AUC}
    found: dict[str, Any] = {
        # 2 samples leave a rank of 3 without any; with 7 samples, rank 0 has the most batches
        str(count): evaluate(world, new_model(), logistic, data, count, 2, metrics=metrics)["auc"]
        for count in (2, 7, 40)
    }
    found["trained"] = trainer_of(world, metrics=metrics).train().evaluations
    found["not a number"] = error_of(trainer_of(world, metrics={"auc": NotANumber}).train)
    found["twice"] = error_of(trainer_of(world, metrics={"loss": AUC}).train)
    if world.size > 1:
        found["one rank"] = error_of(lambda: trainer_of(world, metrics=metrics if world.is_main else {}))
    return found


def test_a_metric_with_a_state_is_exact_on_one_two_and_three_ranks() -> None:
    for size in (1, 2, 3):
        ranks = [evaluations(World())] if size == 1 else launch(evaluations, size, device="cpu", threads=1, echo=False)
        for found in ranks:
            assert [found[str(count)] for count in (2, 7, 40)] == [auc_of(new_model(), n) for n in (2, 7, 40)]
            assert found["trained"] == ranks[0]["trained"]
            assert set(found["trained"][4]) == {"loss", "auc"}
            assert found["not a number"] == "ConfigError: compute() of metric 'auc' must return a number, got str"
            assert found["twice"].startswith(
                "ConfigError: the loss function and 'metrics' both define a metric named 'loss'"
            )
            if size > 1:
                assert "'metrics' must be the same on all ranks, got ['auc'] on rank 0 and []" in found["one rank"]


def test_metrics_without_validation_data_or_as_objects_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"got an object of type AUC as 'auc': pass the class, as in \{'auc': AUC\}"):
        trainer_of(World(), metrics={"auc": AUC()})
    with pytest.raises(ConfigError, match="'metrics' requires validation data; pass validation_data to Trainer"):
        trainer_of(World(), metrics={"auc": AUC}, validation_data=None)
