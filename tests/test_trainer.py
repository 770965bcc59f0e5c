"""Training: equal results on one and many processes, and the files of a run."""

import errno
import json
import math
import os
import re
import signal
import stat
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ddp_tutorial.collectives import digest
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import Operation, final_name, observe_disk
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.runs.rank_logs import rank_log
from ddp_tutorial.sharding.corpus import load_corpus
from ddp_tutorial.sharding.permutation import Permutation
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import ModelConfig, TaskConfig, TrainConfig
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.training.optimization import learning_rate_factor, make_optimizer
from ddp_tutorial.training.tasks import launch_training, make_trainer, train, with_batch_size
from ddp_tutorial.training.trainer import Trainer, TrainResult, with_steps
from ddp_tutorial.world import World
from disk import failing
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

TINY = ModelConfig(layers=1, heads=2, width=32, context=32)
QUICK = TaskConfig(
    corpus="stories",
    model=TINY,
    nprocs=2,
    device="cpu",
    steps=12,
    warmup_steps=3,
    batch_size=6,
    log_every=4,
    eval_every=6,
)


def changed(config: TaskConfig, **values: Any) -> TaskConfig:
    return TaskConfig(**(config.model_dump() | values))


def run_on(size: int, config: TaskConfig) -> list[TrainResult]:
    """Return the results of all ranks. A single process runs in this process."""
    return [train(World(), config)] if size == 1 else launch(train, size, config, device="cpu", echo=False)


def log_of(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


# ------------------------------------------------------------------------------- the same work for every world size


def test_loss_and_evaluation_do_not_depend_on_the_split_of_a_batch() -> None:
    found = {
        (parts, size): run_on(size, changed(QUICK, batch_size=7, steps=6, accumulation=parts))
        for parts, size in [(1, 1), (2, 1), (9, 1), (1, 2), (3, 2), (2, 3)]
    }
    [whole] = found[1, 1]
    for results in found.values():
        for result in results:
            assert result.losses == pytest.approx(whole.losses, rel=2e-5)
            assert result.eval_losses == pytest.approx(whole.eval_losses, rel=2e-5)


def losses_by_hand(config: TaskConfig) -> list[float]:
    """Return the losses of plain torch on the same samples, with the trainer's optimizer settings."""
    tokens = load_corpus(config.corpus).train
    context = config.model.context
    torch.manual_seed(config.seed)
    model = GPT(**config.model.size)
    optimizer = make_optimizer(model, config)
    factor = learning_rate_factor(config)
    order = Permutation((len(tokens) - 1) // context, config.seed)
    losses = []
    for step in range(config.steps):
        indices = order.take(step * config.batch_size, config.batch_size)
        window = torch.stack([tokens[i * context : (i + 1) * context + 1] for i in indices.tolist()]).long()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_two_and_three_ranks_agree_on_the_first_20_losses() -> None:
    model = ModelConfig(layers=2, heads=4, width=64, context=64)
    config = TaskConfig(model=model, device="cpu", steps=20, batch_size=16, learning_rate=1e-3, eval_samples=37)
    wanted = losses_by_hand(config)
    assert wanted[0] == pytest.approx(math.log(256), abs=0.3)  # 5.545: a uniform guess
    assert wanted[-1] < wanted[0] - 0.5  # the loss falls, so equality is meaningful
    for size in (1, 2, 3):  # 16 samples on three ranks are 6, 5 and 5
        results = run_on(size, config)
        for result in results:
            assert result.losses == pytest.approx(wanted, rel=0, abs=1e-5)
            assert result.losses == results[0].losses  # bitwise identical on every rank
            assert result.eval_losses == results[0].eval_losses
            assert (result.run, result.weights) == (results[0].run, results[0].weights)
        assert results[0].eval_losses.keys() == {20}


def train_each(world: World, configs: list[TaskConfig]) -> list[TrainResult]:
    return [train(world, config) for config in configs]


def test_the_same_config_and_world_size_are_bitwise_reproducible() -> None:
    dropout = ModelConfig(**(TINY.model_dump() | {"dropout": 0.1}))
    configs = [QUICK, changed(QUICK, model=dropout)]
    for size in (1, 2):
        for first, second in zip(
            *(launch(train_each, size, configs, device="cpu", echo=False)[0] for _ in range(2)), strict=True
        ):
            assert first.losses == second.losses
            assert first.eval_losses == second.eval_losses
            assert first.weights == second.weights
            assert first.run != second.run


def train_with_each_variant(world: World, config: TaskConfig) -> dict[str, str]:
    variants = ("naive", "flat", "bucket", "torch")
    return {variant: train(world, changed(config, ddp={"variant": variant})).weights for variant in variants}


def test_on_two_ranks_every_averaging_method_is_bitwise_identical() -> None:
    """The order of two summands does not matter, so a different result would be a different average."""
    for weights in launch(train_with_each_variant, 2, changed(QUICK, steps=5), device="cpu", echo=False):
        assert weights == dict.fromkeys(weights, weights["torch"])


def train_from_each_source(world: World, config: TaskConfig) -> dict[str, list[TrainResult]]:
    kinds = ("sharded", "dispatched", "fast_stream", "streamed")
    return {kind: [train(world, changed(config, source={"kind": kind})) for _ in range(2)] for kind in kinds}


def test_all_sources_train_reproducibly_and_dispatched_equals_sharded() -> None:
    ranks = launch(train_from_each_source, 2, changed(QUICK, steps=6), device="cpu", echo=False)
    for results in ranks:
        for kind, (first, second) in results.items():
            assert first.losses == second.losses, kind
            assert first.weights == second.weights == ranks[0][kind][0].weights
            assert first.losses[-1] < first.losses[0]
        weights = {kind: first.weights for kind, [first, _] in results.items()}
        assert weights["dispatched"] == weights["sharded"]
        assert len(set(weights.values())) == 3  # streams have a different order


def test_epochs_are_converted_to_steps_and_logged() -> None:
    config = changed(QUICK, corpus="stories:40", num_epochs=1.5, batch_size=64, log_every=1)
    config = config.model_copy(update={"eval_every": 5})
    samples = len(load_corpus("stories:40").train) // TINY.context
    results = run_on(2, TaskConfig.model_validate(config.model_dump(exclude={"steps"})))
    steps = math.ceil(1.5 * samples / 64)
    assert [len(result.losses) for result in results] == [steps, steps]
    rows = log_of(results[0].run)
    assert [row["epoch"] for row in rows] == [round(row["step"] * 64 / samples, 4) for row in rows]
    assert rows[-1]["epoch"] == pytest.approx(1.5, abs=0.1)
    saved = json.loads((results[0].run / "config.json").read_text())
    assert (saved["steps"], saved["num_epochs"]) == (steps, None)


@pytest.mark.parametrize(
    ("values", "ranks", "batch_size"),
    [
        ({}, 2, 6),
        ({"accumulation": 2}, 3, 18),
        ({"strategy": "invariant", "micro_batches": 4}, 2, 12),
        ({"strategy": "pipeline", "pipeline": {"micro_batches": 2}, "mesh": {"replicate": 2}}, 4, 12),
    ],
)
def test_the_batch_size_per_device_is_converted_to_that_of_a_step(
    values: dict[str, Any], ranks: int, batch_size: int
) -> None:
    given = {"per_device_train_batch_size": 3, **values}
    assert with_batch_size(TaskConfig(**given), ranks).batch_size == batch_size
    assert with_batch_size(TaskConfig(**given, batch_size=batch_size), ranks).batch_size == batch_size
    message = error_of(lambda: with_batch_size(TaskConfig(**given, batch_size=100), ranks))
    assert f"= {batch_size} samples per step, but 'batch_size' is 100" in message


def test_contradictory_epochs_and_streams_without_length_are_rejected() -> None:
    assert with_steps(TrainConfig(num_epochs=2, steps=9), 4.5).steps == 9
    message = error_of(lambda: with_steps(TrainConfig(num_epochs=2, steps=10), 4.5))
    assert "'num_epochs' 2 x 4.5 steps per epoch = 9 steps, but 'steps' is 10" in message
    streamed = changed(QUICK, source={"kind": "streamed"}, num_epochs=1)
    assert "requires data of known length" in error_of(lambda: run_on(1, streamed))
    assert not Path("runs").exists() or not list(Path("runs").glob("stories-*"))


def test_all_ranks_stop_at_the_target_loss_and_resume_as_finished() -> None:
    config = changed(QUICK, target_loss=5.0, eval_every=2, name="target", resume="auto", learning_rate=0.1)
    first, second = run_on(2, config)
    assert len(first.losses) == len(second.losses) == max(first.evaluations) < QUICK.steps
    assert first.eval_losses[max(first.evaluations)] <= 5.0
    assert all(loss > 5.0 for step, loss in first.eval_losses.items() if step < len(first.losses))
    summary = json.loads((first.run / "result.json").read_text())
    assert summary["reason"] == f"the validation loss reached target_loss=5 at step {len(first.losses)}"
    assert summary["status"] == "finished"


def test_evaluation_uses_all_samples_and_its_own_batch_size() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        sizes.extend([] if torch.is_grad_enabled() else [len(batch[0])])
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    data = TensorDataset(torch.randn(300, 2), torch.randn(300, 1))
    config = TrainConfig(steps=2, eval_samples=None, per_device_eval_batch_size=128)
    source = make_source(data, 8, World())
    trainer = Trainer(nn.Linear(2, 1), source, loss, World(), config, validation_data=data)
    trainer.evaluate()
    assert sizes == [128, 128, 44]


def test_a_different_seed_gives_a_different_run() -> None:
    assert train(World(), QUICK).weights != train(World(), changed(QUICK, seed=1)).weights


def draw_and_evaluate(world: World, config: TaskConfig) -> dict[str, Any]:
    """Return the weights, the next random numbers and the evaluation of an untrained trainer."""
    trainer = make_trainer(config, world)
    weights = digest(trainer.model.state_dict())
    noise = F.dropout(torch.ones(64), 0.5).tolist()
    said = {"weights": weights, "noise": noise, "loss": trainer.evaluate()["loss"], "training": trainer.model.training}
    trainer.log.close()
    return said


def test_ranks_start_with_equal_weights_and_different_dropout() -> None:
    config = changed(QUICK, eval_samples=37)
    tokens, context = load_corpus("stories").valid, TINY.context
    torch.manual_seed(config.seed)
    model = GPT(**TINY.size)
    windows = [tokens[i * context : (i + 1) * context + 1].long()[None] for i in range(37)]
    by_hand = [F.cross_entropy(model(window[:, :-1])[0], window[0, 1:]).item() for window in windows]
    wanted = sum(by_hand) / 37
    for size in (1, 2, 3):  # 37 samples on two ranks are 19 and 18, on three 13, 12 and 12
        ranks = (
            [draw_and_evaluate(World(), config)]
            if size == 1
            else launch(draw_and_evaluate, size, config, device="cpu", echo=False)
        )
        for rank in ranks:
            assert rank["weights"] == digest(model.state_dict())
            assert rank["loss"] == pytest.approx(wanted, rel=0, abs=1e-5)
            assert rank["loss"] == ranks[0]["loss"]
            assert rank["training"]
        assert len({str(rank["noise"]) for rank in ranks}) == size


def test_fewer_validation_samples_than_ranks_can_be_evaluated() -> None:
    config = changed(QUICK, eval_samples=1)
    losses = [rank["loss"] for rank in launch(draw_and_evaluate, 2, config, device="cpu", echo=False)]
    assert losses == pytest.approx([draw_and_evaluate(World(), config)["loss"]] * 2, rel=0, abs=1e-5)


# ------------------------------------------------------------------------------------------- what a run leaves behind


def files_of(run: Path) -> set[str]:
    """Return the files of a run. TensorBoard's file name contains the time and the host."""
    return {path.name if "tfevents" not in path.name else "events.out.tfevents" for path in run.iterdir()}


def test_a_run_writes_its_config_every_step_the_model_and_its_result() -> None:
    config = changed(QUICK, name="mine", steps=14, learning_rate=1e-3)
    result = launch_training(config, echo=False)
    run = Path("runs/mine")
    assert result.run == run
    logs = {"metrics.jsonl", "rank_0.log", "rank_1.log", "events.out.tfevents"}
    assert files_of(run) == {"config.json", "model", "result.json"} | logs
    assert TaskConfig(**json.loads((run / "config.json").read_text())) == config

    lines = log_of(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert [line["loss"] for line in steps] == result.losses
    for line in steps:
        measured = {"loss", "grad_norm", "tokens_per_second", "seconds", "elapsed"}
        assert set(line) == {"step", "tokens", "epoch", "learning_rate", "loss_scale"} | measured
        assert set(line["seconds"]) >= {"data", "grads", "update"}
        assert all(value >= 0 for value in line["seconds"].values())
        assert line["tokens"] == line["step"] * 6 * 32  # 6 samples of 32 tokens per step
        assert line["tokens_per_second"] > 0
        assert line["grad_norm"] > 0
        assert line["learning_rate"] == pytest.approx(1e-3 * learning_rate_factor(config)(line["step"] - 1))
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert evaluations == result.eval_losses
    assert list(evaluations) == [6, 12, 14]  # every 6 and at the end
    assert len(lines) == 14 + 3

    summary = json.loads((run / "result.json").read_text())
    told = {"schema", "status", "reason", "step", "parameters", "world_size", "environment", "metrics", "ranks"}
    assert set(summary) == told | {"epoch"}
    assert summary["reason"] == ""
    assert (summary["schema"], summary["status"], summary["world_size"]) == (1, "finished", 2)
    assert summary["step"] == 14
    assert summary["parameters"] == config.model_dump(mode="json")
    assert {"python", "torch", "cores", "threads"} <= set(summary["environment"])
    assert summary["metrics"] == {
        "loss": result.losses[-1],
        "eval_loss": result.eval_losses[14],
        "best_eval_loss": min(result.eval_losses.values()),
        "best_step": min(result.eval_losses, key=result.eval_losses.__getitem__),
        "tokens_per_second": round(result.rate, 1),
        "weights": result.weights,
    }
    assert digest(GPT.from_pretrained(run / "model").state_dict()) == result.weights


def finish(world: World, config: TaskConfig) -> dict[str, Any]:
    """Return whether the result exists when a rank returns while rank 0's disk is slow, and the error if that disk is
    full.
    """

    def slow(operation: Operation, path: Path) -> None:
        if final_name(path) == "result.json":
            time.sleep(0.3)

    with observe_disk(slow):
        is_there = (train(world, config).run / "result.json").exists()
    with observe_disk(failing(("write", "result.json"), errno.ENOSPC)):
        return {"is there": is_there, "full": error_of(lambda: train(world, config))}


def test_no_rank_returns_before_rank_0_has_written_the_result() -> None:
    for rank in launch(finish, 2, changed(QUICK, steps=1), device="cpu", threads=1, echo=False, timeout=300):
        assert rank == {"is there": True, "full": "OSError: [Errno 28] No space left on device"}


def samples_of_forwards(world: World, ways: list[dict[str, Any]]) -> list[dict[str, set[int]]]:
    """Return the numbers of samples in forward passes of training and evaluation for each strategy."""
    found: list[dict[str, set[int]]] = []

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        found[-1]["training" if torch.is_grad_enabled() else "evaluation"].add(len(batch[0]))
        return model(batch[0]).square().sum(), len(batch[0])

    data = TensorDataset(torch.rand(64, 8, generator=torch.Generator().manual_seed(0)))
    for way in ways:
        found.append({"training": set(), "evaluation": set()})
        config = TrainConfig(steps=1, tensorboard=False, **way)
        Trainer(nn.Linear(8, 1), make_source(data, 16, world), loss, world, config, validation_data=data).train()
    return found


def test_evaluation_uses_no_larger_forward_passes_than_training() -> None:
    ways = [
        {},
        {"accumulation": 3},
        {"strategy": "invariant", "micro_batches": 8},
        {"strategy": "zero2", "accumulation": 4},
    ]
    for rank in launch(samples_of_forwards, 2, ways, device="cpu", threads=1, echo=False, timeout=300):
        assert [each["training"] for each in rank] == [{8}, {2, 3}, {2}, {2}]
        # 2 and 4 are those of the check that the loss is a sum.
        assert [each["evaluation"] for each in rank] == [{2, 4, 8}, {2, 4}, {2, 4}, {2, 4}]


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize(
    ("umask", "private", "mode"), [(0o022, True, 0o700), (0o077, False, 0o700), (0o027, False, 0o750)]
)
def test_only_its_owner_can_read_a_run_by_default(umask: int, private: bool, mode: int, resume: str) -> None:
    before = os.umask(umask)
    try:
        trainer = make_trainer(changed(QUICK, name="group/mine", resume=resume, private=private), World())
    finally:
        os.umask(before)
    found = [stat.S_IMODE(path.stat().st_mode) for path in (trainer.run.path, Path("runs/group"), Path("runs"))]
    assert found == [mode, 0o777 & ~umask, 0o777 & ~umask]


def test_a_name_that_exists_gets_a_number() -> None:
    config = changed(QUICK, name="mine", steps=1)
    assert [train(World(), config).run for _ in range(3)] == [
        Path("runs") / name for name in ("mine", "mine-2", "mine-3")
    ]
    unnamed = train(World(), changed(QUICK, steps=1)).run.name
    assert unnamed.endswith("-stories-1x")


def train_until_killed(world: World, config: TaskConfig) -> None:
    """Simulate a power failure in the middle of step 8."""
    steps = 0

    def kill(edge: PhaseEvent) -> None:
        nonlocal steps
        steps += edge.name == "update" and edge.entered
        if steps == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    with observe(kill):
        train(world, config)


def test_a_killed_run_leaves_complete_lines_and_no_result() -> None:
    config = changed(QUICK, name="killed", log_every=2, eval_every=100)
    with pytest.raises(RankError, match="SIGKILL"):
        launch(train_until_killed, 2, config, device="cpu", echo=False)
    run = Path("runs/killed")
    written = {"config.json", "metrics.jsonl", "rank_0.log", "rank_1.log", "events.out.tfevents"}
    assert files_of(run) == written | {".lock"}, "a killed owner cannot remove its lock file, which locks nothing now"
    lines = log_of(run)
    # seven steps were done; flushed after 2, 4 and 6
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_workers_exit_if_training_in_this_process_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(changed(QUICK, nprocs=1, source={"workers": 1}), World())

    def fail() -> None:
        assert workers() == 1
        raise ValueError("boom")

    def workers() -> int:
        return sum(each.name() == "pt_data_worker" for each in psutil.Process().children(recursive=True))

    monkeypatch.setattr(trainer, "evaluate", fail)
    with pytest.raises(ValueError, match="boom"):
        trainer.train()
    assert workers() == 0


def error_of_training(world: World, config: TaskConfig) -> str:
    return error_of(lambda: train(world, config))


def test_divergence_is_reported_with_step_weight_and_rank() -> None:
    told = r"step \d+: the gradient is not finite\. On rank 0, (parameter|the (loss|gradient)) .*; on rank 1, "
    config = changed(QUICK, name="wild", learning_rate=1e30)
    for error in launch(error_of_training, 2, config, device="cpu", echo=False):
        assert re.search(told, error)
    assert files_of(Path("runs/wild")) == {"config.json", "metrics.jsonl", "rank_0.log", "rank_1.log", "failed.json"}


# --------------------------------------------------------------------------------------------------------- one step


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    factor = learning_rate_factor(TaskConfig(steps=9, warmup_steps=4, final_lr_fraction=0.1))
    # 1/4, 2/4, 3/4, 4/4 of the way up; then from 1 down to 0.1 at the last step, half way between at step 6
    assert [factor(step) for step in (0, 1, 2, 3, 4, 6, 8)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.55, 0.1])
    rates = [factor(step) for step in range(4, 9)]
    assert rates == sorted(rates, reverse=True)
    assert factor(100) == pytest.approx(0.1)  # the rate stays there


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_the_schedule_is_selected_by_name(schedule: str, middle: float, last: float) -> None:
    config = TaskConfig(steps=9, warmup_steps=4, final_lr_fraction=0.1, schedule=schedule)
    factor = learning_rate_factor(config)
    assert [factor(step) for step in (3, 6, 8, 100)] == pytest.approx([1.0, middle, last, last])
    # half a run with the full schedule equals the first half of a run
    half = learning_rate_factor(changed(config, steps=5, schedule_steps=9))
    assert [half(step) for step in range(5)] == [factor(step) for step in range(5)]
    if schedule == "linear":
        steps = [factor(step) for step in range(4, 9)]
        assert [a - b for a, b in pairwise(steps)] == pytest.approx([0.225] * 4)


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizer_is_selected_by_name_and_decays_matrices_only(name: str, kind: type) -> None:
    optimizer = make_optimizer(GPT(**TINY.size), changed(QUICK, optimizer=name, weight_decay=0.25))
    assert type(optimizer) is kind
    assert optimizer.defaults["fused"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert all(p.dim() >= 2 for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizer_of_complex_parameters_is_not_fused(name: str) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = make_optimizer(model, changed(QUICK, optimizer=name))
    model(torch.ones(2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("rule", "rate"), [("fixed", 0.001), ("linear", 0.004), ("sqrt", 0.002)])
def test_the_learning_rate_is_scaled_to_the_batch_and_logged(
    rule: str, rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(QUICK, learning_rate=0.001, learning_rate_rule=rule, learning_rate_batch=2, batch_size=8)
    trainer = make_trainer(changed(config, warmup_steps=0), World())
    assert trainer.train_step.scheduler.get_last_lr() == pytest.approx([rate, rate])
    trainer.log.close()
    with rank_log(World(), trainer.run):
        trainer.log_start()
    said = capsys.readouterr().err
    assert said == (
        ""
        if rule == "fixed"
        else f"learning rate {rate:g}: 0.001, scaled from batch_size 2 to 8 by the rule '{rule}'\n"
    )


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (1, 20), (2, 1), (5, 5), (5, 20)])
def test_the_schedule_has_no_gap_at_odd_lengths(steps: int, warmup_steps: int) -> None:
    factor = learning_rate_factor(TaskConfig(steps=steps, warmup_steps=warmup_steps))
    assert all(0 < factor(step) <= 1 for step in range(steps + 2))


def test_the_update_uses_the_clipped_gradient_and_the_log_the_full_norm() -> None:
    trainer = make_trainer(changed(QUICK, clip=0.01), World())
    # plain descent by the gradient itself, so that the way it went is the gradient that it used
    step = trainer.train_step
    step.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    weights = list(trainer.model.parameters())
    before = [weight.detach().clone() for weight in weights]
    batches = step.batches()
    totals = step.strategy.backward(batches)
    norm = math.sqrt(sum(weight.grad.square().sum().item() for weight in weights if weight.grad is not None))
    logged = step._update(totals.sums["loss"], batches)[0].item()
    went = math.sqrt(sum((new - old).square().sum().item() for new, old in zip(weights, before, strict=True)))
    assert norm > 0.1
    assert logged == pytest.approx(norm, rel=1e-4)
    assert went == pytest.approx(0.01, rel=1e-3)
    assert all(weight.grad is None for weight in weights)
    trainer.log.close()


def test_decay_applies_to_matrices_and_every_weight_is_in_one_group() -> None:
    model = GPT(**TINY.size)
    matrices, vectors = make_optimizer(model, changed(QUICK, weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(weight.dim() == 2 for weight in matrices["params"])
    assert all(weight.dim() == 1 for weight in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_evaluation_uses_eval_mode_and_counts_each_sample_once() -> None:
    model = ModelConfig(**(TINY.model_dump() | {"dropout": 0.5}))
    trainer = make_trainer(changed(QUICK, corpus="stories:20", model=model, eval_samples=10_000), World())
    assert trainer.evaluate() == trainer.evaluate()
    assert trainer.validation_data is not None
    tokens = trainer.validation_data.fetch(np.arange(len(trainer.validation_data)))["tokens"].long()
    trainer.model.eval()
    wanted = F.cross_entropy(trainer.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert trainer.best.evaluations[0]["loss"] == pytest.approx(wanted, rel=0, abs=1e-5)
    trainer.log.close()


# ------------------------------------------------------------------------------------------------------ bad starts


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"corpus": "stories:2", "batch_size": 1000}, "too few for one batch of 1000"),
        ({"corpus": "text:gone"}, "there is no file or folder 'gone'"),
        (
            {"corpus": "text:short.txt", "batch_size": 1},
            "0 validation samples, too few for one batch of 1 ",
        ),
        ({"corpus": "text:empty.txt"}, "is empty"),
    ],
)
def test_an_impossible_start_is_reported_and_leaves_nothing(values: dict[str, Any], told: str) -> None:
    Path("short.txt").write_text("a" * 200)  # of which 10 are validation samples
    Path("empty.txt").touch()
    with pytest.raises(ConfigError, match=told):
        make_trainer(changed(QUICK, **values), World())
    assert not Path("runs").exists()


def test_a_batch_smaller_than_the_world_is_rejected_on_every_rank() -> None:
    with pytest.raises(RankError, match="ConfigError: rank 1 of 2 has no samples: "):
        launch_training(changed(QUICK, batch_size=1), echo=False)
    assert not Path("runs").exists()


def test_two_ranks_without_a_group_raise() -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        make_trainer(QUICK, World(0, 2, 0, 2))
    assert not Path("runs").exists()
