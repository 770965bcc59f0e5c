"""Detectors, measurements, live ranks, commands and plain scripts work on GPUs: `pytest -m cuda`."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commands import call
from ddp_tutorial.debug.checks import checking
from ddp_tutorial.debug.detector import CheckError, Detector, Finding
from ddp_tutorial.debug.hangs import CollectiveError
from ddp_tutorial.debug.memory import MemoryGrowth
from ddp_tutorial.debug.nonfinite import NonFinite
from ddp_tutorial.debug.overlap import SameRandomNumbers
from ddp_tutorial.experiments.arms import Turn, run_interleaved
from ddp_tutorial.lessons import train_script as course
from ddp_tutorial.live.pool import Ranks
from ddp_tutorial.museum.gradients import wraps_on_gpus_only
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("workdir")]

SHARED: dict[str, Any] = {"device": "cuda", "backend": "gloo", "echo": False, "timeout": 150}
NCCL = pytest.param("nccl", marks=pytest.mark.cuda(gpus=2))

# ----------------------------------------------------------------------------------------------------------- detectors


def first_finding(world: World, detector: Detector, mistake: str) -> Finding:
    """Train on the GPU with a mistake on the last rank, and return the first finding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1)).to(world.device)
    model = DistributedDataParallel(net, device_ids=[world.device.index])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(0 if mistake == "seed" else world.rank)
    kept, is_last = [], world.rank == world.size - 1
    try:
        with checking(world, model, optimizer, [detector], every=1) as checks:
            for step in range(1, 46 if mistake == "leak" else 7):
                x = torch.randn(8, 8, device=world.device)
                if mistake == "infinite" and step == 3 and is_last:
                    x[0, 0] = float("inf")
                if mistake == "leak" and is_last:
                    kept.append(torch.ones(500_000, device=world.device))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except CheckError as error:
        return error.finding
    return checks.findings[0]


def test_the_module_with_the_first_value_that_is_not_finite_is_named_on_a_gpu() -> None:
    for found in launch(first_finding, 2, NonFinite(), "infinite", **SHARED):
        assert (found.step, found.ranks) == (3, (1,))
        assert "in the output of module '0' in the forward pass" in found.message


def test_ranks_with_the_same_dropout_masks_are_reported_on_gpus() -> None:
    for found in launch(first_finding, 2, SameRandomNumbers(), "seed", **SHARED):
        assert (found.step, found.ranks) == (1, (0, 1))
        assert "draw the same random numbers" in found.message


def test_gpu_memory_that_grows_is_reported() -> None:
    for found in launch(first_finding, 2, MemoryGrowth(window=20), "leak", **SHARED):
        assert 1 in found.ranks  # rank 0 may use more host memory, which is the memory of emulated GPUs
        assert re.search(r"10 of \[500000\] float32 on cuda:\d \(20.0 MB\)", f"{found.message} {found.where}")


# -------------------------------------------------------------------------------------------------------- measurements


def interleaved(world: World) -> dict[str, list[Turn]]:
    x = torch.ones(768, 768, device=world.device)

    def multiply(count: int) -> Callable[[], None]:
        return lambda: [x @ x for _ in range(count)] and None  # type: ignore[func-returns-value]

    return run_interleaved(world, {"few": multiply(4), "many": multiply(200)}, steps=1, turns=3)


def test_measurements_of_arms_wait_for_the_gpu() -> None:
    [taken] = launch(interleaved, 1, **SHARED)
    few, many = (min(turn["step"] for turn in taken[name]) for name in ("few", "many"))
    assert many > 5 * few


def test_a_model_that_is_wrapped_on_gpus_only_is_synchronized_there() -> None:
    first, second = launch(wraps_on_gpus_only, 2, **SHARED)
    assert torch.equal(first["weights"], second["weights"])
    first, second = launch(wraps_on_gpus_only, 2, device="cpu", echo=False)
    assert not torch.equal(first["weights"], second["weights"])


def test_accelerate_refuses_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = TaskConfig.model_validate({"strategy": "accelerate", "steps": 2, "corpus": "stories:300"})
    with pytest.raises(RankError, match=r"requires one GPU per rank|must be configured with distributed type"):
        launch(train, 2, config, **SHARED)


# ---------------------------------------------------------------------------------------------------------- live ranks


@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_live_ranks_on_gpus_recover_from_an_error_a_hang_and_an_interrupt(backend: str) -> None:
    imports = "import time, torch, torch.distributed as dist\nx = torch.ones(3, device=world.device)"
    wait = "dist.all_reduce(x.clone()); torch.cuda.synchronize()"
    with Ranks(2, device="cuda", backend=backend, wait_timeout=2.0) as ranks:
        ranks.execute(imports)
        pids = [each["pid"] for each in ranks.status()]
        with pytest.raises(RankError, match="rank 1 raised ValueError: a bad sample"):
            ranks.execute(f"if world.rank == 1:\n    raise ValueError('a bad sample')\n{wait}")
        with pytest.raises(CollectiveError, match="Rank 0 waits in all_reduce"):
            ranks.execute(f"if world.rank == 1:\n    time.sleep(60)\n{wait}")
        ranks.execute("dist.all_reduce(x)")
        assert [each.tolist() for each in ranks.get("x")] == [[2, 2, 2]] * 2
        assert [each["pid"] for each in ranks.status()] == pids


def hang(world: World) -> None:
    if world.rank == 1:
        time.sleep(200)
    dist.all_reduce(torch.ones(5, device=world.device))
    torch.cuda.synchronize()


@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_a_launch_that_times_out_names_the_rank_that_waits_on_a_gpu(backend: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(hang, 2, device="cuda", backend=backend, echo=False, timeout=45)
    of_rank_0, of_rank_1 = str(caught.value).split("\n\n")[1:3]
    assert "all_reduce of [[5]]: waiting" in of_rank_0
    assert "time.sleep(200)" in of_rank_1
    assert "no collective yet" in of_rank_1


# ------------------------------------------------------------------------------------------------ commands and scripts


@pytest.mark.spawned
def test_the_doctor_names_the_gpu_and_a_run_selects_it() -> None:
    assert torch.cuda.get_device_name(0) in call("doctor").stdout
    # A process of its own, because --devices sets CUDA_VISIBLE_DEVICES.
    selected = ["train", "tiny", "nprocs=1", "steps=2", "device=cuda", "name=selected", "--devices", "0"]
    train_command = [sys.executable, "-m", "ddp_tutorial", *selected]
    done = subprocess.run(train_command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def losses_of(folder: Path, *command: str) -> list[float]:
    """Run a script on one rank of torchrun, and return the losses that it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *command]
    done = subprocess.run(torchrun, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


@pytest.mark.spawned
def test_the_plain_example_has_the_losses_of_the_cpu(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ["-m", "ddp_tutorial.examples.plain", "steps=40"]
    on_gpu = losses_of(workdir, *example, "checkpoint=gpu.pt")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert on_gpu == pytest.approx(losses_of(workdir, *example, "checkpoint=cpu.pt"), rel=0.05)
    assert len(on_gpu) == 2


@pytest.mark.spawned
@pytest.mark.parametrize("number", ["06", "09", "12", "14", "17"])
def test_the_training_script_of_the_notebooks_has_the_losses_of_the_cpu(number: str, workdir: Path, root: Path) -> None:
    Path("train.py").write_text(course.script(number))
    options = ["train.py", f"--data={root / 'data' / 'digits'}", "--steps=16", "--every=8", "--workers=0"]
    on_gpu = losses_of(workdir, *options[:1], "gpu", *options[1:])
    assert on_gpu
    assert on_gpu == pytest.approx(losses_of(workdir, *options[:1], "cpu", *options[1:], "--cpu"), rel=0.02)
