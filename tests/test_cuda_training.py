"""Training on GPUs has the losses of training on the CPU, for every strategy, source and precision: `pytest -m cuda`.

Two ranks share a GPU over gloo, or have a GPU each over NCCL; one rank has a GPU and no process group. Without a GPU,
`make test-emulated-gpu` runs these tests.
"""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import train
from ranks import TORCHRUN

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("workdir")]

SMALL: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 16}
DEEP = {**SMALL, "layers": 2}
BASE: dict[str, Any] = {
    "corpus": "stories:300",
    "model": SMALL,
    "steps": 4,
    "batch_size": 8,
    "warmup_steps": 2,
    "eval_every": 2,
    "eval_samples": 16,
    "log_every": 1,
}

# By name: the settings that differ from BASE.
ANY_WORLD: dict[str, dict[str, Any]] = {
    "torch": {},
    "sgd": {"optimizer": "sgd"},
    "accumulation": {"accumulation": 2},
    "invariant": {"strategy": "invariant"},
    "accelerate": {"strategy": "accelerate"},
    "recompute": {"model": {**DEEP, "recompute": True}},
    "bf16": {"precision": {"dtype": "bf16"}},
    "fp16": {"precision": {"dtype": "fp16"}},
    "streamed source": {"source": {"kind": "streamed"}},
    "fast_stream source": {"source": {"kind": "fast_stream"}},
    "workers": {"source": {"workers": 1}},
    "streamed workers": {"source": {"kind": "streamed", "workers": 1}},
    "profile": {"profile": {"steps": 1, "first_step": 2, "profile_memory": True}},
    "best model": {"best_model": True, "early_stopping": {"patience": 1}},
    "out of memory": {"oom_skips": 1, "empty_cache_every": 2, "gpu_memory_limit_mb": 4000},
    "checkpoint": {"checkpoint": {"every": 2, "background": True}},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "naive": {"ddp": {"variant": "naive"}},
    "flat": {"ddp": {"variant": "flat"}},
    "bucket": {"ddp": {"variant": "bucket", "bucket_cap_mb": 0.01}},
    "small buckets of torch": {"ddp": {"bucket_cap_mb": 0.01}},
    "static graph": {"ddp": {"static_graph": True}},
    "find unused": {"ddp": {"find_unused_parameters": True}},
    "fp16 hook": {"ddp": {"hook": "fp16"}},
    "bf16 hook": {"ddp": {"hook": "bf16"}},
    "fp16 hook of bucket": {"ddp": {"variant": "bucket", "hook": "fp16"}},
    "bf16 hook of bucket": {"ddp": {"variant": "bucket", "hook": "bf16"}},
    "powersgd": {"ddp": {"variant": "bucket", "hook": "powersgd"}},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp": {"strategy": "fsdp"},
    "pipeline gpipe": {"strategy": "pipeline", "model": DEEP, "pipeline": {"schedule": "gpipe"}},
    "pipeline 1f1b": {"strategy": "pipeline", "model": DEEP},
    "local_sgd": {"strategy": "local_sgd", "local": {"round": 2}},
    "post_local_sgd": {"strategy": "post_local_sgd", "local": {"round": 2, "begin": 1}},
    "diloco": {"strategy": "diloco", "local": {"round": 2}},
    "dispatched source": {"source": {"kind": "dispatched"}},
    "dispatched workers": {"source": {"kind": "dispatched", "workers": 1}},
    "zero3 in bf16": {"strategy": "zero3", "precision": {"dtype": "bf16"}},
    "fsdp in bf16": {"strategy": "fsdp", "precision": {"dtype": "bf16"}},
    "pipeline with measured cuts": {"strategy": "pipeline", "model": DEEP, "pipeline": {"split": "measured"}},
    "pipeline in fp16": {"strategy": "pipeline", "model": DEEP, "precision": {"dtype": "fp16"}},
}
NCCL = pytest.param("nccl", marks=pytest.mark.cuda(gpus=2))


def config(name: str, settings: dict[str, Any]) -> TaskConfig:
    return TaskConfig.model_validate({**BASE, **settings, "name": name})


@cache
def losses_on_cpu(name: str, ranks: int) -> list[float]:
    settings = (ANY_WORLD | TWO_RANKS)[name]
    return launch(train, ranks, config("cpu", settings), device="cpu", echo=False, timeout=300)[0].losses


def check(name: str, ranks: int, backend: str) -> None:
    settings = (ANY_WORLD | TWO_RANKS)[name]
    options: dict[str, Any] = {"device": "cuda", "backend": backend, "echo": False, "timeout": 150}
    results = launch(train, ranks, config("gpu", settings), **options)
    rounding = 2e-2 if "bf16" in name or "fp16" in name else 1e-3
    for result in results:
        assert result.losses == pytest.approx(losses_on_cpu(name, ranks), rel=rounding)


@pytest.mark.parametrize("name", ANY_WORLD)
def test_one_rank_on_a_gpu_has_the_losses_of_the_cpu(name: str) -> None:
    check(name, 1, "auto")


@pytest.mark.parametrize("backend", ["gloo", NCCL])
@pytest.mark.parametrize("name", ANY_WORLD | TWO_RANKS)
def test_two_ranks_on_gpus_have_the_losses_of_the_cpu(name: str, backend: str) -> None:
    if name == "accelerate" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPU(s) that torch can use, found 1")
    check(name, 2, backend)


@pytest.mark.parametrize("backend", ["gloo", NCCL])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp", "pipeline", "diloco"])
def test_a_resumed_run_on_gpus_continues_with_their_random_numbers(strategy: str, backend: str) -> None:
    settings = {
        "strategy": strategy,
        "model": {**DEEP, "dropout": 0.1},
        "checkpoint": {"every": 2},
        "resume": "auto",
        "local": {"round": 2},
    }
    if strategy != "diloco":
        del settings["local"]
    options: dict[str, Any] = {"device": "cuda", "backend": backend, "echo": False, "timeout": 150}
    whole = launch(train, 2, config("whole", settings), **options)[0].losses
    shorter = config("resumed", settings | {"steps": 2, "schedule_steps": 4})
    launch(train, 2, shorter, **options)
    resumed = config("resumed", settings | {"schedule_steps": 4, "resume_allow": ("steps",)})
    assert launch(train, 2, resumed, **options)[0].losses == whole


@pytest.mark.spawned
@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_torchrun_and_the_command_line_train_on_gpus(backend: str) -> None:
    settings = ["device=cuda", f"backend={backend}", "steps=2", "model.layers=1", "model.width=16", "model.heads=2"]
    torchrun = [*TORCHRUN, "-m", "ddp_tutorial", "train", "tiny", "name=torchrun", *settings]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert call("train", "tiny", "name=command", "nprocs=2", *settings).returncode == 0
    first, second = (json.loads(Path(f"runs/{name}/result.json").read_text()) for name in ("torchrun", "command"))
    assert first["metrics"]["loss"] == second["metrics"]["loss"]
    assert first["environment"]["gpus"]


@pytest.mark.spawned
@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_checks_on_gpus_pass_and_report_an_injected_fault(backend: str) -> None:
    task = ("train", "tiny", "nprocs=2", "device=cuda", f"backend={backend}", "steps=12", "--check")
    checked = call(*task, "name=checked")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(Path("runs/checked/result.json").read_text())["checks"] == []
    broken = call(*task, "steps=25", "name=broken", "--fault", "corrupt rank=1 step=4 phase=update")
    assert broken.returncode == 1
    assert "the replicas have drifted apart" in broken.stderr
