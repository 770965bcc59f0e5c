"""Tests that require a GPU: `pytest -m cuda`. Two ranks share one GPU over gloo, so one GPU is enough for most of them.

They run on emulated GPUs with `make test-emulated-gpu`, and were run once on a real GPU (book/gpus.md).
"""

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_tutorial.collectives import all_gather, all_reduce_sum, from_rank_zero
from ddp_tutorial.ddp.link import DirectLink
from ddp_tutorial.phases import Stopwatch, observe, phase
from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.rng import seeded_rng
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.tasks import make_trainer, train
from ddp_tutorial.world import World
from ranks import watched

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("workdir")]

SMALL = TaskConfig(
    corpus="stories:300",
    model=ModelConfig(layers=1, heads=2, width=16, context=16),
    steps=6,
    batch_size=6,
    warmup_steps=2,
    checkpoint={"every": 3},  # type: ignore[arg-type]
)
EMULATED = "EMULATED_GPU" in os.environ  # its operators run at once, on the CPU
SHARED: dict[str, Any] = {"device": "cuda", "backend": "gloo", "echo": False, "timeout": 150}


def talk(world: World) -> tuple[float, list[int], str]:
    added = all_reduce_sum(world, torch.tensor(world.rank + 1.0, device=world.device))
    return float(added), all_gather(world, world.rank), from_rank_zero(world, f"{world.backend} {added.device.type}")


def test_two_ranks_share_a_gpu_over_gloo() -> None:
    assert launch(talk, 2, **SHARED) == [(3.0, [0, 1], "gloo cuda")] * 2


def test_a_gpu_run_has_the_losses_of_a_cpu_run_and_can_resume() -> None:
    [on_cpu] = launch(train, 1, SMALL, device="cpu", echo=False)
    for ranks in (1, 2):
        named = SMALL.model_copy(update={"name": f"gpu-{ranks}", "resume": "auto"})
        first = named.model_copy(update={"steps": 3, "schedule_steps": 6})
        launch(train, ranks, first, **SHARED)
        again = named.model_copy(update={"schedule_steps": 6, "resume_allow": ("steps",)})
        assert launch(train, ranks, again, **SHARED)[0].losses == pytest.approx(on_cpu.losses, rel=1e-3)
        assert Path(f"runs/gpu-{ranks}/result.json").exists()


def test_phases_measure_gpu_time_instead_of_launch_time() -> None:
    device = torch.device("cuda", 0)
    size = 512 if EMULATED else 4096
    x = torch.randn(size, size, device=device)
    torch.cuda.synchronize()
    with observe(Stopwatch(device)) as watch:
        start = time.perf_counter()
        with phase("work"):
            for _ in range(50):
                x = x @ x / size
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        done = time.perf_counter() - start
    assert watch.take()["work"] == pytest.approx(done, rel=0.3)
    assert launched < done


def test_seeding_without_a_device_does_not_affect_gpus() -> None:
    before = torch.cuda.get_rng_state()
    with seeded_rng(1):
        torch.rand(1)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def waits_in_ten_steps(world: World) -> int:
    config = SMALL.model_copy(
        update={"steps": 100, "log_every": 10, "checkpoint": SMALL.checkpoint.model_copy(update={"every": 0})}
    )
    trainer = make_trainer(config, world)
    for _ in range(4):
        trainer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(10):
            trainer.step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in caught)


def test_a_step_waits_for_the_gpu_three_times_for_its_totals_norm_and_log() -> None:
    [waits] = launch(waits_in_ten_steps, 1, **SHARED)
    assert waits <= 3 * 10


def transfers(world: World) -> list[float]:
    link, tensor = DirectLink(world), torch.ones(1 << (22 if EMULATED else 26), device=world.device)
    seen = watched(link)
    torch.cuda.synchronize()
    start = time.monotonic()
    link.all_reduce(tensor).wait()
    torch.cuda.synchronize()
    took = time.monotonic() - start
    while not seen and time.monotonic() < start + 10:
        time.sleep(0.01)
    return [took, seen[0].end - seen[0].start]


@pytest.mark.cuda(gpus=2)
def test_an_nccl_transfer_ends_when_it_completes_not_when_it_is_enqueued() -> None:
    for took, told in launch(transfers, 2, device="cuda", echo=False, timeout=300):
        assert told == pytest.approx(took, rel=0.5)


def fail_in_flight(world: World) -> None:
    if world.rank == 1:
        raise ValueError("on purpose")
    torch.distributed.all_reduce(torch.ones(1 << 20, device=world.device), async_op=True)
    torch.cuda.synchronize()


@pytest.mark.cuda(gpus=2)
def test_a_failed_rank_terminates_ranks_that_wait_in_nccl() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: on purpose"):
        launch(fail_in_flight, 2, device="cuda", echo=False, timeout=300)
    assert time.monotonic() - start < 60
