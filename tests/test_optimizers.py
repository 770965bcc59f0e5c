"""Optimizers, schedules and clipping: which ones a config and a script select, and which ones are rejected."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from commands import call
from ddp_tutorial.config import ConfigError, from_arguments, load
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.runs.folder import load_run
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import TaskConfig, TrainConfig
from ddp_tutorial.training.optimization import make_optimizer
from ddp_tutorial.training.plan import optimizer_bytes
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

SGD = {"class": "torch.optim.SGD", "args": {"lr": 0.05, "momentum": 0.9}}
COSINE = {"class": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": 8}}


def squared_error(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return (model(batch[0]) - 1).square().sum(), len(batch[0])


def trainer_of(world: World, config: TrainConfig | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    source = make_source(TensorDataset(torch.randn(32, 3)), 8, world)
    return Trainer(nn.Linear(3, 2), source, squared_error, world, config or TrainConfig(steps=8), **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def rates_of(trainer: Trainer) -> list[float]:
    return [trainer.train_step().learning_rate for _ in range(8)]


# ---------------------------------------------------------------------------------------------- by import path


@pytest.mark.parametrize("below", ["adamw", "{class: torch.optim.SGD, args: {momentum: 0.5}}"])
def test_a_class_on_the_command_line_overrides_the_optimizer_of_a_file(below: str) -> None:
    Path("mine.yaml").write_text(f"extends: tiny\noptimizer: {below}\nlearning_rate: 0.02\n")
    overrides = ["optimizer.class=torch.optim.SGD", "optimizer.args.momentum=0.9", "optimizer.args.nesterov=true"]
    config = load("mine.yaml", TaskConfig, overrides)
    assert config.optimizer == {"class": "torch.optim.SGD", "args": {"momentum": 0.9, "nesterov": True}}
    [group] = make_optimizer(nn.Linear(2, 2), config).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.02, 0.9, True, 0)
    assert load("mine.yaml", TaskConfig, ["optimizer=sgd"]).optimizer == "sgd"


def test_a_given_optimizer_is_stepped_without_the_defaults_of_the_config() -> None:
    own, library = trainer_of(World(), optimizer=sgd), trainer_of(World())
    assert (own.train_step.clip, library.train_step.clip) == (None, 1.0)
    assert (own.settings["clip"], own.settings["schedule"]) == (None, "none")
    assert rates_of(own) == [0.05] * 8
    assert len(set(rates_of(library))) == 8
    explicit = [TrainConfig(steps=8, clip=1.0, warmup_steps=20), load("tiny", TaskConfig, ["steps=8"])]
    for trainer in (trainer_of(World(), config, optimizer=sgd) for config in explicit):
        assert trainer.train_step.clip == 1.0
        assert len(set(rates_of(trainer))) > 1


def test_without_clipping_and_schedule_the_update_is_the_optimizers_own() -> None:
    config = from_arguments(TaskConfig, ["steps=3", "clip=null", "schedule=none", "optimizer=sgd", "weight_decay=0"])
    trainer = trainer_of(World(), config)
    assert (config.clip, config.schedule) == (None, "none")
    parameters = list(trainer.model.parameters())
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in parameters]
        norm = float(trainer.train_step().grad_norm)
        momenta = [trainer.train_step.optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
        for was, now, momentum in zip(before, parameters, momenta, strict=True):
            torch.testing.assert_close(now, was - 3e-3 * momentum)
    assert norm > 1, "so that clipping would change it"


WRONG_OBJECTS: list[tuple[dict[str, Any], str]] = [
    (
        {"optimizer": torch.optim.SGD},
        "or a function that takes the model and returns an Optimizer, got the class SGD: pass an optimizer, as in",
    ),
    ({"optimizer": lambda model: [sgd(model)]}, "got list: use one optimizer with several parameter groups"),
    ({"optimizer": [sgd, sgd]}, "got list: use one optimizer with several parameter groups"),
    ({"optimizer": "sgd"}, "got str: pass an optimizer, as in"),
    ({"scheduler": ReduceLROnPlateau}, "ReduceLROnPlateau is not supported"),
    (
        {"scheduler": [1]},
        "must be an LRScheduler or a function that takes the optimizer and returns an LRScheduler, got list",
    ),
]


def test_a_scheduler_of_a_different_optimizer_is_rejected() -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    source = make_source(TensorDataset(torch.randn(32, 3)), 8, World())
    for strategy, given in (("ddp", None), ("zero1", optimizer)):  # zero1 wraps the optimizer
        with pytest.raises(ConfigError, match=r"as in scheduler=lambda optimizer: StepLR\(optimizer, \.\.\.\)"):
            Trainer(
                model,
                source,
                squared_error,
                World(),
                TrainConfig(steps=8, strategy=strategy),
                optimizer=given,
                scheduler=StepLR(optimizer, 1),
            )
    assert not Path("runs").exists()


def test_anything_but_one_optimizer_and_one_schedule_is_rejected() -> None:
    for options, message in WRONG_OBJECTS:
        with pytest.raises(ConfigError, match=re.escape(message)):
            trainer_of(World(), **options)
    assert not Path("runs").exists()


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("optimizer=adam",), "'optimizer' must be 'adamw', 'sgd', or the import path of a class and its arguments"),
    (("optimizer.args.momentum=0.9",), "'optimizer' must be 'adamw', 'sgd', or the import path of a class"),
    (("optimizer.class=SGD",), "'optimizer' must be 'adamw', 'sgd', or the import path of a class"),
    (("scheduler=cosine",), "'scheduler' must be the import path of a class and its arguments"),
    (("optimizer.class=torch.optim.SDG",), "does not contain 'SDG'. Did you mean 'SGD'?"),
    (("optimizer.class=torch.optimizer.SGD",), "the module 'torch.optimizer' cannot be imported: ModuleNotFoundError"),
    (("optimizer.class=exits.Mine",), "the module 'exits' cannot be imported: SystemExit: 3"),
    (("optimizer.class=lazy.Mine",), "the module 'lazy' cannot be imported: RuntimeError: no such library"),
    (("optimizer.class=torch.nn.Linear",), "must be a subclass of torch.optim.optimizer.Optimizer, got 'torch.nn.L"),
    (("optimizer.class=torch.optim.SGD", "optimizer.args.momentun=1"), "unexpected keyword argument 'momentun'"),
    (("optimizer.class=torch.optim.SGD", "optimizer.args.lr=-1"), "ValueError: Invalid learning rate: -1"),
    (("optimizer.class=torch.optim.LBFGS",), "LBFGS requires a closure that recomputes the gradient"),
    (("scheduler.class=torch.optim.lr_scheduler.StepLR",), "missing 1 required positional argument: 'step_size'"),
    (("scheduler.class=torch.optim.lr_scheduler.ReduceLROnPlateau",), "ReduceLROnPlateau is not supported"),
    (("optimizer.class=torch.optim.Adafactor", "strategy=zero2"), "strategy=zero2 updates a flat shard of each"),
    (
        ("optimizer.class=torch.optim.SGD", "optimizer.args.lr=1", "learning_rate_rule=sqrt"),
        "'optimizer.args.lr' overrides 'learning_rate', so 'learning_rate_rule' (sqrt) has no effect",
    ),
]


def test_an_invalid_class_is_rejected_in_one_line_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("exits.py").write_text("raise SystemExit(3)\n")
    lazy = "def __getattr__(name): raise (RuntimeError if name == 'Mine' else AttributeError)('no such library')\n"
    Path("lazy.py").write_text(lazy)
    for arguments, message in WRONG:
        for dry in ((), ("--dry-run",)):
            done = call("train", "tiny", *arguments, *dry)
            assert (done.returncode, done.stdout) == (2, ""), done
            assert message in done.stderr
            assert done.stderr.count("\n") == 1
    assert not Path("runs").exists()


def test_the_memory_of_an_optimizer_by_import_path_is_measured() -> None:
    kept = {"torch.optim.SGD": 0, "torch.optim.Adagrad": 4, "torch.optim.NAdam": 8}
    for path, nbytes in kept.items():
        assert optimizer_bytes(TrainConfig(optimizer={"class": path})) == nbytes


def test_an_optimizer_that_requires_sparse_gradients_is_rejected_by_a_dry_run() -> None:
    done = call("train", "tiny", "optimizer.class=torch.optim.SparseAdam", "device=cpu", "--dry-run")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert "torch.optim.SparseAdam with a dense gradient, which failed: RuntimeError: SparseAdam" in done.stderr


def by_import_path_and_by_hand(world: World) -> dict[str, Any]:
    named = TrainConfig(steps=8, name="named", optimizer=SGD, scheduler=COSINE, checkpoint={"every": 4})
    by_hand = trainer_of(
        world, TrainConfig(steps=8, clip=1.0), optimizer=sgd, scheduler=lambda o: CosineAnnealingLR(o, 8)
    )
    trained = {"named": trainer_of(world, named).train().weights, "by hand": by_hand.train().weights}
    start = {"name": "again", "resume": "runs/named/checkpoints/step_00000004"}
    trained["resumed"] = trainer_of(world, named.model_copy(update=start)).train().weights
    other = named.model_copy(update=start | {"optimizer": {"class": "torch.optim.SGD", "args": {"lr": 0.05}}})
    return trained | {"refused": error_of(lambda: trainer_of(world, other))}


def test_classes_by_import_path_train_and_resume_like_objects() -> None:
    found, same = launch(by_import_path_and_by_hand, 2, device="cpu", threads=1, echo=False)
    assert found == same
    assert found["named"] == found["by hand"] == found["resumed"]
    assert "optimizer.args.momentum" in found["refused"]


# ---------------------------------------------------------------------------------------------- models and losses

MINE = """
import torch
from torch import nn
from torch.nn import functional as F

class Bigram(nn.Module):
    def __init__(self, vocab, width=8):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.tokens(tokens))

class Smoothed:
    def __init__(self, smoothing):
        self.smoothing = smoothing

    def __call__(self, model, batch):
        tokens = batch["tokens"].long()
        logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smoothing)
        return loss, len(targets)

def plain(model, batch):
    return Smoothed(0.0)(model, batch)

class Evaluations:
    def __init__(self, most):
        self.most = most

    def __call__(self, values):
        return len(values) == self.most

def is_low(values):
    return min(values.values()) < 10

NUMBER = 3
"""
BIGRAM = ("model.class=mine.Bigram", "model.args.vocab=256", "steps=4", "eval_every=4", "warmup_steps=0")


@pytest.fixture
def mine(workdir: Path) -> Iterator[None]:
    Path("mine.py").write_text(MINE)
    yield
    sys.modules.pop("mine", None)
    sys.modules.pop("sums", None)


def trained(*options: str) -> dict[str, Any]:
    done = call("train", "tiny", *BIGRAM, *options, "device=cpu", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["metrics"]


@pytest.mark.usefixtures("mine")
def test_a_local_model_and_loss_are_selected_by_import_path() -> None:
    default = trained("name=default", "nprocs=1")
    function = trained("loss=mine.plain", "name=function", "nprocs=2")
    smoothed = trained("loss.class=mine.Smoothed", "loss.args.smoothing=0.5", "nprocs=1")
    assert function["eval_loss"] == pytest.approx(default["eval_loss"], abs=1e-5)
    assert abs(smoothed["eval_loss"] - default["eval_loss"]) > 1e-4
    refused = call("evaluate", "default")
    assert (refused.returncode, "loading a run never imports code" in refused.stderr) == (2, True)
    planned = call("train", "tiny", *BIGRAM, "loss=mine.plain", "device=cpu", "--dry-run")
    assert (planned.returncode, "4,352 parameters" in planned.stdout) == (0, True), planned


@pytest.mark.usefixtures("mine")
def test_a_stopping_rule_by_import_path_ends_the_run_on_all_ranks() -> None:
    often = ("steps=40", "eval_every=2", "nprocs=2")
    rule = ("early_stopping.rule.class=mine.Evaluations", "early_stopping.rule.args.most=3")
    for name, options, step in (("object", rule, 6), ("function", ["early_stopping.rule=mine.is_low"], 2)):
        trained(f"name={name}", *often, *options)
        result = load_run(f"runs/{name}").result
        assert result is not None
        assert (result["step"], result["reason"]) == (step, "early_stopping.rule returned true")
    refused = call("train", "tiny", *BIGRAM, "early_stopping.rule=mine.is_lower", "name=refused", "device=cpu")
    assert (refused.returncode, "rule' is 'mine.is_lower'" in refused.stderr) == (2, True), refused.stderr
    assert not Path("runs/refused").exists()


TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from ddp_tutorial.sharding import as_samples
from ddp_tutorial.training.tasks import Task

def samples(config):
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return as_samples(data), as_samples(Subset(data, range(50)))

def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

SUMS = Task(
    model=lambda config: nn.Linear(3, 1),
    samples=samples,
    loss=loss,
    unit="samples",
    units_per_sample=lambda config: 1,
    batch_like=lambda config, count: [torch.zeros(count, 3), torch.zeros(count, 1)],
)
"""


@pytest.mark.usefixtures("mine")
def test_a_task_with_its_own_data_is_trained_by_its_import_path() -> None:
    Path("sums.py").write_text(TASK)
    options = ("train", "tiny", "task=sums.SUMS", "num_epochs=1", "learning_rate=0.1", "device=cpu", "name=sums")
    planned = call(*options, "--dry-run")
    assert (planned.returncode, "63 steps, 504 samples" in planned.stdout) == (0, True), planned
    done = call(*options, "nprocs=2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["step"], result["metrics"]["eval_loss"] < 0.1) == (63, True)
    refused = call("evaluate", "sums")
    assert (refused.returncode, "loading a run never imports code" in refused.stderr) == (2, True)
    few = "task 'sums.SUMS' contains 500 training samples and 50 validation samples, too few for one batch of 501"
    for task, message in (
        ("sums.SUM", "Did you mean 'SUMS'?"),
        ("sums.loss", "must be the import path of a Task"),
        ("sums.SUMS", few),
    ):
        wrong = call("train", "tiny", f"task={task}", "batch_size=501", "--dry-run", "device=cpu")
        assert (wrong.returncode, message in wrong.stderr) == (2, True), wrong


WRONG_CLASSES: list[tuple[tuple[str, ...], str]] = [
    (("model.class=mine.Trigram",), "does not contain 'Trigram'. Did you mean 'Bigram'?"),
    (("model.class=mine.Smoothed",), "'model.class' must be a subclass of torch.nn.modules.module.Module"),
    (("model.class=mine.Bigram",), "'model': mine.Bigram does not accept 'args': TypeError: missing a required argum"),
    (("model.class=Bigram",), "'model' must be the import path of a class and its arguments"),
    (("model.args.vocab=3",), "'model.args' requires 'model.class', which is not set"),
    (("loss=plain",), "'loss' must be the import path of a class and its arguments"),
    (("loss=mine.NUMBER",), "'loss' must be the import path of a function, but 'mine.NUMBER' is of type int"),
    (("loss=mine.Smoothed",), "'loss' must be the import path of a function, but 'mine.Smoothed' is of type type"),
    (("loss.class=mine.Bigram",), "'loss': mine.Bigram does not accept 'args': TypeError"),
]


@pytest.mark.usefixtures("mine")
def test_an_invalid_model_or_loss_is_rejected_before_ranks_start() -> None:
    for arguments, message in WRONG_CLASSES:
        done = call("train", "tiny", *arguments, "device=cpu")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        assert message in done.stderr
    assert not Path("runs").exists()
