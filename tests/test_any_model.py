"""Any model, data and loss: the Trainer gives the result of plain torch on any number of ranks."""

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, TensorDataset

from ddp_tutorial import (
    ConfigError,
    SourceConfig,
    TrainConfig,
    Trainer,
    TrainResult,
    World,
    launch,
    load,
    make_source,
)
from ddp_tutorial.accumulation.loss import LossError
from ddp_tutorial.collectives import digest
from ddp_tutorial.sharding.permutation import Permutation
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

STEPS, BATCH = 6, 7  # ragged: 7 samples on 2 ranks are 4 and 3, and 3 micro-batches of them differ
VARIANTS = ["naive", "flat", "bucket", "torch"]
CASES = list(product(VARIANTS, [1, 3], ["fp32", "bf16"]))


def dataset(samples: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, x[:, :1].sin() + x[:, 1:2])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))


def squared_error(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return nn.MSELoss(reduction="sum")(model(x), y), len(x)


def config_of(**settings: Any) -> TrainConfig:
    quick = {"steps": STEPS, "warmup_steps": 0, "optimizer": "sgd", "learning_rate": 0.01, "weight_decay": 0.0}
    return TrainConfig.model_validate({**quick, "log_every": 2, "eval_every": 3, "tensorboard": False, **settings})


def trainer_of(world: World, config: TrainConfig, **others: Any) -> Trainer:
    source = make_source(dataset(), BATCH, world, seed=0)
    return Trainer(make_model(), source, squared_error, world, config, validation_data=dataset(20), **others)


def by_hand(dtype: str) -> tuple[list[float], torch.Tensor]:
    """Return the result of plain torch on the same samples in one process."""
    model, data, config = make_model(), dataset(), config_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order, losses = Permutation(len(data), 0), []
    for step in range(STEPS):
        x, y = data[torch.from_numpy(order.take(step * BATCH, BATCH).copy())]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        done = step / (STEPS - 1)
        optimizer.param_groups[0]["lr"] = 0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        optimizer.step()
        losses.append(loss.item())
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def train_each(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for variant, accumulation, dtype in CASES:
        config = config_of(ddp={"variant": variant}, accumulation=accumulation, precision={"dtype": dtype})
        trainer = trainer_of(world, config)
        result = trainer.train()
        weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
        found[variant, accumulation, dtype] = result, weights
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[int], list[dict[Any, Any]]]:
    @cache
    def on(size: int) -> list[dict[Any, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return launch(train_each, size, device="cpu", threads=1, echo=False, timeout=300)

    return on


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("variant", "accumulation", "dtype"), CASES)
def test_an_ordinary_model_trains_as_in_plain_torch(
    variant: str, accumulation: int, dtype: str, size: int, trained: Callable[[int], list[dict[Any, Any]]]
) -> None:
    losses, weights = by_hand(dtype)
    close = {"rel": 1e-5, "abs": 1e-6} if dtype == "fp32" else {"rel": 3e-2, "abs": 1e-2}
    ranks = [rank[variant, accumulation, dtype] for rank in trained(size)]
    for result, found in ranks:
        assert result.losses == pytest.approx(losses, **close)
        torch.testing.assert_close(found, weights, rtol=close["rel"] * 10, atol=close["abs"])
        assert torch.equal(found, ranks[0][1])
        assert (result.losses, result.evaluations) == (ranks[0][0].losses, ranks[0][0].evaluations)
        assert sorted(result.evaluations) == [3, 6]
    start = nn.utils.parameters_to_vector(make_model().parameters()).detach()
    assert float((weights - start).norm()) > 0.05  # the weights have changed, so equality is meaningful


# ----------------------------------------------------------------------------------------------- kinds of models


class Two(nn.Module):
    """A model with a table that is used twice, a frozen layer, BatchNorm, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.next, self.length = nn.Linear(8, 11, bias=False), nn.Linear(8, 1)
        self.next.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.frozen(self.table(tokens)).tanh()
        mean = self.norm((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return self.next(hidden), self.length(mean)[:, 0]


class Sentences:
    """Rows of different lengths, each a nested structure of dicts and tuples."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = 2 + index % 5
        return {"text": torch.randint(1, 11, (length,), generator=generator), "labels": (index % 3, length)}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    text = pad_sequence([row["text"] for row in rows], batch_first=True)
    kinds, lengths = zip(*(row["labels"] for row in rows), strict=True)
    return {"text": text, "labels": (torch.tensor(kinds), torch.tensor(lengths))}


def two_losses(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """Return two losses in one sum over tokens. Both losses and an accuracy with its own count are reported."""
    text, (_, lengths) = batch["text"], batch["labels"]
    mask = (text > 0).float()
    logits, length = model(text, mask)
    here = text[:, 1:] > 0
    guess = F.cross_entropy(logits[:, :-1][here], text[:, 1:][here], reduction="sum")
    size = ((length - lengths) ** 2).sum()
    right = (logits[:, :-1].argmax(-1)[here] == text[:, 1:][here]).sum()
    count = here.sum()
    metrics = {"guess": (guess.detach(), count), "size": (size, len(text)), "accuracy": (right, count)}
    return guess + 0.1 * size, count, metrics


def groups(model: Two) -> torch.optim.Optimizer:
    """Return custom parameter groups that contain each tensor once."""
    norm, others = list(model.norm.parameters()), [model.table.weight, *model.length.parameters()]
    return torch.optim.AdamW([{"params": norm, "lr": 0.02}, {"params": others, "weight_decay": 0.1}], lr=0.01)


def train_two(world: World, name: str, steps: int, **settings: Any) -> tuple[TrainResult, str]:
    torch.manual_seed(1)
    model = Two()
    trainer = Trainer(
        model,
        make_source(Sentences(), 8, world, seed=3, collate_fn=padded),
        two_losses,
        world,
        config_of(name=name, steps=steps, checkpoint={"every": 2, "keep_last": 9}, **settings),
        validation_data=make_source(Sentences(), 8, World(), collate_fn=padded).data,
        optimizer=groups,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    )
    result = trainer.train()
    return result, digest(model.state_dict())


def test_nested_batches_padding_tied_weights_and_parameter_groups_combine() -> None:
    ranks = launch(train_two, 2, "two", 8, device="cpu", threads=1, echo=False)
    assert {weights for _, weights in ranks} == {ranks[0][1]}
    result = ranks[0][0]
    assert result.losses[-1] < result.losses[0]
    rows = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if "loss" in row)
    assert {"guess", "size", "accuracy", "samples", "samples_per_second"} <= set(step)
    evaluation = next(row for row in rows if "eval_loss" in row)
    assert {"eval_guess", "eval_size", "eval_accuracy"} <= set(evaluation)
    told = json.loads((result.run / "result.json").read_text())["metrics"]
    assert told["eval_accuracy"] == result.evaluations[8]["accuracy"]


def test_a_resumed_run_of_any_model_is_bitwise_identical() -> None:
    [(whole, weights), _] = launch(train_two, 2, "whole", 8, device="cpu", threads=1, echo=False)
    for at in (2, 4, 6):
        again = whole.run / "checkpoints" / f"step_{at:08d}"
        for result, found in launch(resumed, 2, f"again{at}", str(again), device="cpu", threads=1, echo=False):
            assert (found, result.losses, result.evaluations) == (weights, whole.losses, whole.evaluations)


def resumed(world: World, name: str, path: str) -> tuple[TrainResult, str]:
    return train_two(world, name, 8, resume=path)


class Followed(IterableDataset[Any]):
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return map(Sentences().__getitem__, range(40))


def noisy(batch: Any) -> Any:
    """Augment with random numbers."""
    return {"text": batch["text"], "scale": 1 + torch.rand(len(batch["text"]))}


def padding_counts(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the loss of all tokens, including padding. `view` requires contiguous targets."""
    logits = model(batch["text"]) * batch["scale"][:, None, None]
    targets = batch["text"].view(-1)
    return F.cross_entropy(logits.view(-1, 11), targets, reduction="sum"), targets.numel()


def padded_invariantly(world: World) -> dict[str, str]:
    weights = {}
    for kind, rows in {"sharded": Sentences(), "dispatched": Sentences(), "streamed": Followed()}.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        reading = SourceConfig.model_validate({"kind": kind, **({"streams": 4} if kind == "streamed" else {})})
        source = make_source(rows, 8, world, config=reading, collate_fn=padded, transform=noisy)
        config = config_of(strategy="invariant", micro_batches=4)
        weights[kind] = Trainer(model, source, padding_counts, world, config).train().weights
    return weights


def test_invariant_weights_do_not_depend_on_the_ranks_that_pad_batches() -> None:
    weights = [rank for size in (1, 2, 4) for rank in launch(padded_invariantly, size, device="cpu", echo=False)]
    assert weights == weights[:1] * 7
    # Rank 0 pads for all ranks, so padding does affect the weights.
    assert weights[0]["sharded"] != weights[0]["dispatched"]


def saved_by_fsdp(world: World) -> tuple[str, str]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    config = config_of(strategy="fsdp", checkpoint={"every": 3})
    result = Trainer(model, make_source(dataset(), BATCH, world), squared_error, world, config).train()
    torch.distributed.barrier()
    fresh = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return result.weights, digest(load(result.run, fresh).state_dict())


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp_saves_rows_that_do_not_divide_evenly_between_ranks(size: int) -> None:
    for trained, loaded in launch(saved_by_fsdp, size, device="cpu", threads=1, echo=False, timeout=300):
        assert trained == loaded


def classify(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    x, y = batch
    right = ((model(x) > 0) == (y > 0)).sum()
    return F.mse_loss(model(x), y, reduction="sum"), len(x), {"accuracy": (right, len(x))}


def test_the_best_model_and_early_stopping_use_a_custom_metric() -> None:
    best = {"metric": "accuracy", "mode": "max"}
    config = config_of(name="best", steps=60, eval_every=2, best=best, best_model=True, early_stopping={"patience": 4})
    source = make_source(dataset(), BATCH, World())
    result = Trainer(make_model(), source, classify, World(), config, validation_data=dataset(40)).train()
    accuracies = {step: means["accuracy"] for step, means in result.evaluations.items()}
    found = max(accuracies, key=lambda step: (accuracies[step], -step))
    told = json.loads((result.run / "result.json").read_text())
    assert told["metrics"]["best_step"] == found
    assert told["metrics"]["best_eval_accuracy"] == accuracies[found]
    assert (told["step"] < 60) == told["reason"].startswith("no improvement since")
    kept = load(result.run, make_model(), best=True)
    x, y = dataset(40).tensors
    assert float(((kept(x) > 0) == (y > 0)).float().mean()) == pytest.approx(accuracies[found])
    with pytest.raises(ConfigError, match=r"do not match the model: .* Missing key\(s\) in state_dict: \"bias\""):
        load(result.run, nn.Linear(1, 1), best=True)
    with pytest.raises(ConfigError, match="was started from a script, not from a config"):
        load(result.run)


def test_submodules_in_evaluation_mode_stay_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    Trainer(
        model, make_source(dataset(), BATCH, World()), squared_error, World(), config_of(), validation_data=dataset()
    ).train()
    assert [part.training for part in model] == [True, False, True]


# ------------------------------------------------------------------------------------------------------ bad input


def mean_alone(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1])


def mean_and_count(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1]), len(batch[0])


def no_sum(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none"), len(batch[0])


def counts_nothing(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).sum() * 0, 0


def other_metrics(model: nn.Module, batch: Any) -> Any:
    total, count = squared_error(model, batch)
    rank = torch.distributed.get_rank()
    return total, count, {f"of_rank_{rank}": (1, 1)}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(6)


def ragged_leaves(rows: list[Any]) -> Any:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])[:-1]


def start(
    world: World,
    loss: Any = squared_error,
    model: Any = None,
    collate_fn: Any = None,
    optimizer: Any = None,
    **settings: Any,
) -> Any:
    source = make_source(dataset(), BATCH, world, collate_fn=collate_fn)
    return Trainer(model or make_model(), source, loss, world, config_of(**settings), optimizer=optimizer).train()


def past_the_wrapper(world: World, **settings: Any) -> Any:
    """A loss that uses the model of its closure instead of its argument."""
    model = make_model()
    return start(world, lambda _, batch: squared_error(model, batch), model, **settings)


class ExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 2}


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1, device="meta"))


class SparseTable(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, 0].long().clamp(0, 3))


class SparseBuffer(nn.Linear):
    def __init__(self, persistent: bool) -> None:
        super().__init__(6, 1)
        self.register_buffer("links", torch.eye(6).to_sparse(), persistent=persistent)


def sparse_table() -> nn.Module:
    return nn.Sequential(SparseTable(4, 6, sparse=True), make_model())


BAD: dict[str, tuple[Callable[[World], Any], str]] = {
    "a mean alone": (
        lambda world: start(world, mean_alone),
        "LossError: on rank 0, the loss function must return a sum and",
    ),
    "a mean": (lambda world: start(world, mean_and_count), "LossError: the loss must be a sum, got a mean ("),
    "no sum": (
        lambda world: start(world, no_sum),
        "LossError: on rank 0, the loss function's first return value must be",
    ),
    "nothing counted": (
        lambda world: start(world, counts_nothing),
        "ValueError: the loss function counted no elements",
    ),
    "other metrics": (
        lambda world: start(world, other_metrics),
        "LossError: the loss function must return the same metrics on all ranks, got [loss, of_rank_0] on rank 0",
    ),
    "elsewhere": (lambda world: start(world, model=half_on_meta()), "ConfigError: the model's '1.weight' is on meta"),
    "extra state": (
        lambda world: start(world, model=ExtraState(6, 1)),
        "ConfigError: the model's state dict must contain only tensors, got dict for '_extra_state'",
    ),
    "frozen": (
        lambda world: start(world, model=make_model().requires_grad_(False)),
        "ConfigError: the model must have at least one parameter with requires_grad=True, got none",
    ),
    **{
        f"sparse buffer, {persistent=}": (
            lambda world, persistent=persistent: start(world, model=SparseBuffer(persistent)),
            "ConfigError: the model's 'links' must be a dense tensor, got a tensor with layout torch.sparse_coo. Store",
        )
        for persistent in (False, True)
    },
    **{
        f"sparse gradient with {strategy}": (
            lambda world, strategy=strategy: start(world, model=sparse_table(), strategy=strategy),
            "ConfigError: the model's '0.weight' must have a dense gradient, got SparseTable(sparse=True). Create",
        )
        for strategy in ("ddp", "zero1", "fsdp")
    },
    "foreign optimizer": (
        lambda world: start(world, optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1)),
        "ConfigError: the optimizer contains 4 tensors that are not parameters of the model",
    ),
    "half an optimizer": (
        lambda world: start(world, optimizer=lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1)),
        "ConfigError: the optimizer must contain all trainable parameters, but lacks 2 of them, starting with "
        "'2.weight'",
    ),
    **{
        f"past the wrapper, {name}": (
            lambda world, settings=settings: past_the_wrapper(world, **settings),
            "LossError: the loss function did not call the model that it received",
        )
        for name, settings in {
            "zero1": {"strategy": "zero1"},
            "accelerate": {"strategy": "accelerate"},
            **{variant: {"ddp": {"variant": variant}} for variant in VARIANTS},
        }.items()
    },
    **{
        f"{name} on {strategy}": (
            lambda world, make=make, strategy=strategy: start(world, optimizer=make, strategy=strategy),
            f"ConfigError: {message}",
        )
        for strategy in ("zero2", "zero3")
        for name, make, message in [
            ("Adafactor", lambda m: torch.optim.Adafactor(m.parameters()), f"strategy={strategy} updates a flat shard"),
            ("LBFGS", lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS requires a closure"),
        ]
    },
    "LBFGS": (
        lambda world: start(world, optimizer=lambda m: torch.optim.LBFGS(m.parameters())),
        "ConfigError: LBFGS requires a closure",
    ),
    "no length": (lambda world: make_source(Endless(), BATCH, world), "ConfigError: "),
    "ragged leaves": (lambda world: start(world, collate_fn=ragged_leaves), "SourceError: rank {rank}, "),
    "best of nothing": (
        lambda world: Trainer(
            make_model(), make_source(dataset(), BATCH, world), squared_error, world, config_of(best_model=True)
        ),
        "ConfigError: 'best_model', 'early_stopping' and 'target_loss' require validation data; pass validation_data",
    ),
    "best of what": (
        lambda world: trainer_of(world, config_of(best_model=True, best={"metric": "acuracy"})).train(),
        "ConfigError: 'best.metric' must be the name of an evaluated metric, got 'acuracy'.",
    ),
}


def told_of_each(world: World) -> dict[str, str]:
    return {name: error_of(lambda bad=bad: bad(world)) for name, (bad, _) in BAD.items()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("bad"))
        return launch(told_of_each, 2, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("name", BAD)
def test_invalid_input_raises_one_clear_message_on_all_ranks(name: str, told: list[dict[str, str]]) -> None:
    for rank, each in enumerate(told):
        assert each[name].startswith(BAD[name][1].format(rank=rank)), each[name]
    assert issubclass(LossError, ConfigError)
