"""Compiled models: the same training as without `torch.compile`, and the same names in every file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from commands import call
from ddp_tutorial import Trainer, TrainResult, World, data_parallel, launch
from ddp_tutorial.checkpoint.components import Component
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.config import CompileConfig, DDPConfig
from ddp_tutorial.debug import checking, fingerprinted, watching
from ddp_tutorial.training import compilation
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.export import load
from ddp_tutorial.training.tasks import make_trainer, model_of, samples_of, source_of, task_of, train
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

# More than 1 MiB of weights, so that PyTorch's DDP has two buckets and splits a compiled model into two graphs.
CONFIG = TaskConfig(
    corpus="stories:300",
    model=ModelConfig(layers=1, heads=1, width=128, context=8, vocab=1024),
    ddp=DDPConfig(bucket_cap_mb=1.0),
    steps=3,
    batch_size=8,
    warmup_steps=0,
    eval_samples=2,
    device="cpu",
    tensorboard=False,
)
COMPILED = CompileConfig(backend="aot_eager", fullgraph=True)
CASES: dict[str, dict[str, Any]] = {
    "torch": {},
    "naive": {"ddp": {"variant": "naive"}},
    "flat": {"ddp": {"variant": "flat"}},
    "bucket": {"ddp": {"variant": "bucket", "bucket_cap_mb": 0.2}},
    "zero1": {"strategy": "zero1"},
    "accumulation": {"accumulation": 2},
    "bf16": {"precision": {"dtype": "bf16"}},
    "recompute": {"model": CONFIG.model.model_copy(update={"recompute": True})},
}


def graphs() -> int:
    """Return the number of graphs that were compiled since the last call."""
    number = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    return number


def in_all_cases(world: World) -> dict[str, tuple[list[float], list[float], int]]:
    """Return the losses without and with compilation, and the number of compiled graphs, of each case."""
    results = {}
    for name, options in CASES.items():
        config = CONFIG.model_copy(update={**options, "name": name})
        plain = train(world, config).losses
        compiled = train(world, config.model_copy(update={"compile": COMPILED, "name": f"{name}-compiled"})).losses
        results[name] = plain, compiled, graphs()
    return results


def test_a_compiled_model_trains_equally_and_compiles_once() -> None:
    for name, (plain, compiled, number) in launch(in_all_cases, 2, device="cpu", threads=1, echo=False)[0].items():
        assert compiled == pytest.approx(plain, abs=1e-5), name
        assert number == 1, name  # neither the loss check nor an evaluation recompiles the model


# ------------------------------------------------------------------------------------------- models compiled already


def as_function(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def by_block(model: Any) -> nn.Module:
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
    return model


HOW: list[Callable[[nn.Module], nn.Module]] = [as_function, in_place, by_block]
SAVED = CONFIG.model_copy(update={"checkpoint": {"every": 1}, "best_model": True})


def trained(world: World, how: Callable[[nn.Module], nn.Module], **options: Any) -> TrainResult:
    """Train a model that was compiled before the trainer is made."""
    config = SAVED.model_copy(update=options)
    _, validation = samples_of(config, world)
    model = how(model_of(config))
    return Trainer(
        model, source_of(config, world), task_of(config).loss, world, config, validation_data=validation
    ).train()


def compiled_before(world: World) -> tuple[list[float], dict[str, tuple[list[float], int]], list[list[float]]]:
    """Return the losses of a plain run, of each way to compile a model, and of runs that resume across them."""
    plain = train(world, SAVED.model_copy(update={"name": "plain"})).losses
    graphs()
    runs = {how.__name__: (trained(world, how, name=how.__name__).losses, graphs()) for how in HOW}
    of = "runs/{}/checkpoints/step_00000002".format
    compiled = SAVED.model_copy(update={"name": "config", "compile": COMPILED, "resume": of("plain")})
    resumed = [
        train(world, compiled).losses,
        train(world, SAVED.model_copy(update={"name": "resumed", "resume": of("as_function")})).losses,
        trained(world, by_block, name="again", resume=of("in_place")).losses,
    ]
    return plain, runs, resumed


def test_models_that_are_already_compiled_train_and_resume() -> None:
    plain, runs, resumed = launch(compiled_before, 2, device="cpu", threads=1, echo=False)[0]
    for name, (losses, number) in runs.items():
        assert losses == pytest.approx(plain, abs=1e-5), name
        assert number == 1, name
    for losses in resumed:
        assert losses == pytest.approx(plain, abs=1e-5)
    written = [*Path("runs").rglob("*.safetensors"), *Path("runs").rglob("*.pt"), *Path("runs").rglob("*.json")]
    assert len(written) > 30
    assert [path for path in written if b"_orig_mod" in path.read_bytes()] == []
    weights = load("runs/by_block").state_dict()
    model = torch.compile(model_of(CONFIG), backend="eager")
    assert load("runs/plain", model) is model
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, weights[name.removeprefix("_orig_mod.")], atol=1e-5), name


# --------------------------------------------------------------------------------------------------------- wrapping


def wrapped(world: World) -> tuple[list[str], float, list[int]]:
    """Return the errors of `data_parallel`, the gradient after wrapping again, and the graphs of ragged batches."""
    own, torchs = DDPConfig(variant="bucket"), DDPConfig()
    errors = [
        error_of(lambda: data_parallel(torch.compile(nn.Linear(2, 1), backend="eager"), world, torchs, COMPILED)),
        error_of(lambda: data_parallel(nn.Linear(2, 1), world, DDPConfig(bucket_cap_mb=0.5), COMPILED)),
    ]
    module = nn.Linear(2, 1)
    for config in (torchs, own, torchs):
        model = data_parallel(module, world, config, COMPILED)
        module.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.finish()
    weight = module.weight.grad.sum().item()
    graphs()
    numbers = []
    for dynamic in (None, True, False):
        model = data_parallel(module, world, own, CompileConfig(backend="aot_eager", dynamic=dynamic))
        for rows in (3, 4, 5):
            model(torch.ones(rows, 2)).sum().backward()
            model.finish()
        numbers.append(graphs())
    return errors, weight, numbers


def test_wrapping_again_replaces_a_compiled_wrapper() -> None:
    for errors, weight, numbers in launch(wrapped, 2, device="cpu", threads=1, echo=False):
        assert "'compile' must be false for a model that is already compiled" in errors[0]
        assert "'bucket_cap_mb' must be at least 1 for a compiled model, got 0.5" in errors[1]
        assert weight == pytest.approx(2)
        assert numbers == [2, 1, 3]


def with_inductor(world: World) -> list[float]:
    """Return the gradient of a layer without and with the default backend."""
    module, gradients = nn.Linear(2, 1), []
    for compiled in (None, CompileConfig(fullgraph=True)):
        model = data_parallel(module, world, DDPConfig(), compiled)
        model(torch.full((3, 2), float(world.rank + 1))).square().sum().backward()
        model.finish()
        gradients.append(module.weight.grad.sum().item())
        module.zero_grad()
    return gradients


@pytest.mark.skipif(not compilation.has_compiler(CompileConfig(), torch.device("cpu")), reason="needs a C++ compiler")
def test_the_default_backend_compiles_on_every_rank() -> None:
    plain, compiled = launch(with_inductor, 2, device="cpu", threads=1, echo=False)[0]
    assert compiled == pytest.approx(plain, rel=1e-5)


def observed(world: World) -> dict[str, tuple[int, list[float]]]:
    """Return the number of graphs and the losses of a compiled run under each debugging tool."""
    results = {}
    graphs()
    for tool in ("watching", "fingerprinted", "checking"):
        trainer = make_trainer(CONFIG.model_copy(update={"name": tool, "compile": COMPILED}), world)
        step: Any = trainer.train_step
        with {
            "watching": lambda: watching(world, 30),
            "fingerprinted": lambda: fingerprinted(world),
            "checking": lambda: checking(world, step.strategy.model, step.optimizer, after=lambda: trainer.step_count),  # noqa: B023
        }[tool]():
            losses = trainer.train().losses
        results[tool] = graphs(), losses
    return results


def test_watching_keeps_compilation_and_checks_disable_it() -> None:
    found = launch(observed, 2, device="cpu", threads=1, echo=False)[0]
    assert {tool: number for tool, (number, _) in found.items()} == {"watching": 1, "fingerprinted": 0, "checking": 0}
    for _, losses in found.values():
        assert losses == pytest.approx(found["watching"][1], abs=1e-5)


def test_a_checkpoint_component_has_the_names_of_the_inner_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = set(model.state_dict())
    assert set(Component(torch.compile(model, backend="eager")).stateful.state_dict()) == names


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "pipeline", "invariant", "local_sgd", "accelerate"])
def test_a_strategy_that_cannot_compile_rejects_compile(strategy: str) -> None:
    refused = call("train", "tiny", "compile=true", f"strategy={strategy}")
    assert refused.returncode == 2
    assert f"'compile' requires strategy=ddp or strategy=zero1, got strategy={strategy}" in refused.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "pipeline"])
def test_a_strategy_that_splits_the_model_rejects_a_compiled_model(strategy: str) -> None:
    config = CONFIG.model_copy(update={"strategy": strategy, "ddp": DDPConfig()})
    for how in HOW:
        with pytest.raises(ConfigError, match=f"strategy={strategy} cannot train a compiled model"):
            compilation.require_compilable(how(model_of(config)), config, World())


def test_a_missing_compiler_or_backend_is_rejected_before_ranks_start() -> None:
    for setting, message in {
        "compile=true": "'compile' requires a C++ compiler on CPUs, but none was found",
        "compile.backend=aot_egaer": "unknown 'compile.backend' 'aot_egaer'. Did you mean 'aot_eager'?",
        "compile.fulgraph=true": "unknown key 'compile.fulgraph'. Did you mean 'fullgraph'?",
    }.items():
        refused = call("train", "tiny", "device=cpu", setting, CXX="no-such-compiler")
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------ the command line

OPTIONS = (
    *("num_epochs=2", "per_device_train_batch_size=8", "compile.backend=eager"),
    *("optimizer.class=torch.optim.SGD", "optimizer.args.momentum=0.9", "learning_rate=0.1", "warmup_steps=0"),
    *("corpus=stories:100", "model.layers=1", "model.heads=1", "model.width=16", "model.context=32", "eval_samples=4"),
    *("eval_every=4", "log_every=1", "device=cpu", "tensorboard=false"),
)


def test_a_compiled_run_resumes_exactly_after_a_kill_on_the_command_line() -> None:
    whole = call("train", "2proc", *OPTIONS, "name=whole", "target_loss=0.1", "--json")
    assert whole.returncode == 0, whole.stderr
    result = json.loads(whole.stdout)
    half = result["step"] // 2
    mine = ("train", "2proc", *OPTIONS, "name=mine", "target_loss=0.1", f"checkpoint.every={half}", "resume=auto")
    killed = call(*mine, "--fault", f"kill rank=1 step={half + 2}")
    assert killed.returncode == 1, killed.stdout
    resumed = call(*mine, "--json")
    assert f"resuming after step {half}," in resumed.stderr + resumed.stdout + Path("runs/mine/rank_0.log").read_text()
    assert json.loads(resumed.stdout.splitlines()[-1])["metrics"]["weights"] == result["metrics"]["weights"]
    rows = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    epochs = {row["step"]: row["epoch"] for row in rows}
    assert list(epochs) == list(range(1, result["step"] + 1))
    assert epochs[result["step"]] == pytest.approx(2, abs=0.05)
