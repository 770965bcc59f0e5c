"""The emulated GPUs detect mistakes with devices, as real GPUs do: `make test-emulated-gpu`.

Each test plants a mistake that the CPU does not show, next to the correct code.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.processes.launcher import RankError, launch
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = [pytest.mark.cuda(gpus=2), pytest.mark.usefixtures("workdir")]

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture(autouse=True)
def the_first_emulated_gpu_is_current(gpus_are_there: None) -> None:
    if "EMULATED_GPU" not in os.environ:
        pytest.skip("needs emulated GPUs: some of these mistakes leave a real GPU in an unknown state")
    torch.cuda.set_device(GPU)


# ------------------------------------------------------------------------------------------------- tensors on devices


def test_a_batch_left_on_the_cpu_is_refused() -> None:
    model, batch = nn.Linear(4, 4).to(GPU), torch.ones(2, 4)
    model(batch.to(GPU)).sum().backward()
    with pytest.raises(RuntimeError, match=MIXED):
        model(batch)


def test_a_target_left_on_the_cpu_is_refused() -> None:
    logits, targets = torch.ones(2, 4, device=GPU), torch.tensor([0, 1])
    nn.functional.cross_entropy(logits, targets.to(GPU))
    with pytest.raises(RuntimeError, match=MIXED):
        nn.functional.cross_entropy(logits, targets)


def test_tokens_left_on_the_cpu_are_refused() -> None:
    embedding, tokens = nn.Embedding(4, 2).to(GPU), torch.tensor([0, 3])
    embedding(tokens.to(GPU))
    with pytest.raises(RuntimeError, match=MIXED):
        embedding(tokens)


def test_a_tensor_on_the_first_gpu_is_refused_on_the_second() -> None:
    """A rank that never calls `set_device` creates its tensors on GPU 0."""
    ours = torch.ones(2, device=OTHER)
    with pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
        ours + torch.ones(2, device="cuda")
    torch.cuda.set_device(OTHER)
    assert (ours + torch.ones(2, device="cuda")).tolist() == [2, 2]


def test_an_index_may_be_on_the_cpu_but_not_on_another_gpu() -> None:
    values, index = torch.arange(4.0, device=GPU), torch.tensor([1, 2])
    assert values[index].tolist() == values[index.to(GPU)].tolist() == [1, 2]
    with pytest.raises(RuntimeError, match=MIXED):
        values[index.to(OTHER)]


def test_a_number_may_be_on_the_cpu_but_not_on_another_gpu() -> None:
    assert (torch.ones(2, device=GPU) * torch.tensor(3.0)).tolist() == [3, 3]
    with pytest.raises(RuntimeError, match=MIXED):
        torch.ones(2, device=GPU) * torch.tensor(3.0, device=OTHER)


def test_a_gpu_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device=torch.device("cuda", torch.cuda.device_count()))


def test_new_memory_contains_nan_until_it_is_written() -> None:
    assert torch.empty(1000, device=OTHER).isnan().any()


def test_an_allocation_beyond_the_memory_of_the_gpu_is_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(torch.cuda.get_device_properties(GPU).total_memory + 1, dtype=torch.uint8, device=GPU)


def test_an_operator_without_an_emulated_kernel_is_refused() -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=r"no kernel|CPU"):
        torch.batch_norm_stats(torch.ones(2, 3, 4, device=GPU), 1e-5)


# -------------------------------------------------------------------------------------------- checkpoints and resuming


def test_a_checkpoint_loaded_without_map_location_is_on_the_gpu_that_wrote_it() -> None:
    torch.save(torch.ones(2, device=GPU), "values.pt")
    ours = torch.ones(2, device=OTHER)
    assert (ours + torch.load("values.pt", map_location=OTHER)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match=MIXED):
        ours + torch.load("values.pt")


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_optimizer_state_on_the_cpu_is_refused(options: dict[str, bool]) -> None:
    model = nn.Linear(2, 2).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 2, device=GPU)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)  # moves the state to the devices of the parameters
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].cpu()
    with pytest.raises(RuntimeError, match=MIXED):
        optimizer.step()


def test_dropout_differs_after_a_resume_that_restores_only_the_generator_of_the_cpu() -> None:
    def masks() -> list[float]:
        return nn.functional.dropout(torch.ones(50, device=GPU)).tolist()

    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state(GPU)
    first = masks()
    torch.set_rng_state(cpu)
    assert masks() != first
    torch.cuda.set_rng_state(gpu, GPU)
    assert masks() == first


def test_the_generators_of_devices_are_independent() -> None:
    torch.cuda.manual_seed_all(1)
    first = torch.rand(4, device=GPU)
    torch.manual_seed(2)
    torch.cuda.manual_seed_all(1)
    torch.rand(4)
    torch.rand(4, device=OTHER)
    assert torch.rand(4, device=GPU).tolist() == first.tolist()


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_generator_of_another_device_is_refused(device: str) -> None:
    torch.rand(2, device=GPU, generator=torch.Generator(GPU))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device=GPU, generator=torch.Generator(device))


# ------------------------------------------------------------------------------------------------------ asynchronous


def test_a_copy_to_the_host_that_does_not_block_is_not_there_before_a_wait() -> None:
    loss = torch.full((3,), 2.0, device=GPU)
    copy = loss.to("cpu", non_blocking=True)
    assert copy.tolist() != [2, 2, 2]
    torch.cuda.current_stream().synchronize()
    assert copy.tolist() == [2, 2, 2]


def test_an_event_that_was_recorded_before_a_copy_does_not_wait_for_it() -> None:
    loss, event = torch.full((3,), 3.0, device=GPU), torch.cuda.Event()
    event.record()
    copy = loss.to("cpu", non_blocking=True)
    event.synchronize()
    assert copy.tolist() != [3, 3, 3]
    event.record()
    event.synchronize()
    assert copy.tolist() == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("wait", ["item", "nonzero", "mask", "cpu", "print"])
def test_synchronization_with_the_host_is_detected(wait: str) -> None:
    values = torch.ones(3, device=GPU)
    mistakes = {
        "item": lambda: values.sum().item(),
        "nonzero": values.nonzero,
        "mask": lambda: values[values > 0],
        "cpu": values.cpu,
        "print": lambda: str(values),
    }
    torch.cuda.set_sync_debug_mode("error")
    try:
        values.mul_(2).clamp_(max=1).to("cpu", non_blocking=True)
        with pytest.raises(RuntimeError, match="synchronizing"):
            mistakes[wait]()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------------ communication


def send_between_gpus_with_gloo(world: World) -> tuple[str, float]:
    received = torch.zeros(1)
    if world.rank == 0:
        refused = error_of(lambda: dist.send(torch.ones(1, device=world.device), 1))
        dist.send(torch.ones(1, device=world.device).to(world.message_device), 1)
    else:
        refused = error_of(lambda: dist.recv(torch.ones(1, device=world.device), 0))
        dist.recv(received, 0)
    return refused, received.item()


def test_gloo_does_not_send_from_the_memory_of_a_gpu() -> None:
    options: dict[str, Any] = {"device": "cuda", "backend": "gloo", "echo": False, "timeout": 120}
    (from_0, _), (from_1, received) = launch(send_between_gpus_with_gloo, 2, **options)
    assert "Bad address" in from_0
    assert "Bad address" in from_1
    assert received == 1


def first_collective(world: World) -> float:
    start = time.monotonic()
    if world.rank == 1:
        time.sleep(1)
    dist.all_reduce(torch.ones(1, device=world.device))
    return time.monotonic() - start


def test_the_first_collective_of_nccl_returns_when_all_ranks_have_called_it() -> None:
    options: dict[str, Any] = {"device": "cuda", "backend": "nccl", "echo": False, "timeout": 120}
    assert min(launch(first_collective, 2, **options)) > 0.9


def collectives_with_mistakes(world: World, folder: str) -> dict[str, Any]:
    other = torch.device("cuda", 1 - world.rank)
    found: dict[str, Any] = {
        "on the CPU": error_of(lambda: dist.all_reduce(torch.ones(1))),
        "on the other GPU": error_of(lambda: dist.all_reduce(torch.ones(1, device=other))),
    }
    dist.all_reduce(torch.ones(1, device=world.device))  # connects the ranks, and returns when both have called it
    summed, read = torch.ones(2, device=world.device), Path(folder, "read")
    if world.rank == 1:  # joins when rank 0 has read
        while not read.exists():
            pass
    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    if world.rank == 0:
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            found["before wait"] = summed.tolist()
        read.touch()
    work.wait()
    found["after wait"] = summed.tolist()
    return found


def test_mistakes_with_nccl_are_detected(workdir: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "backend": "nccl", "echo": False, "timeout": 120}
    first, second = launch(collectives_with_mistakes, 2, str(workdir), **options)
    for found in (first, second):
        assert "No backend type associated with device type cpu" in found["on the CPU"]
        assert "not on device passed to init_process_group" in found["on the other GPU"]
        assert found["after wait"] == [2, 2]
    assert first["before wait"] == [1, 1]


def skip_a_collective(world: World) -> None:
    dist.all_reduce(torch.ones(1, device=world.device))
    if world.rank == 0:
        dist.all_reduce(torch.ones(1, device=world.device))
        torch.cuda.synchronize()
    else:
        time.sleep(200)


def test_a_collective_that_a_rank_does_not_join_times_out_in_nccl() -> None:
    options: dict[str, Any] = {"device": "cuda", "backend": "nccl", "echo": False, "timeout": 200}
    with pytest.raises(RankError, match="rank 0 was killed by SIGABRT"):  # by PyTorch's watchdog, after a minute
        launch(skip_a_collective, 2, collective_timeout=3, **options)
