"""A simulated link takes the time of its model while the ranks compute; both kinds of links report their transfers.

No test requires a busy machine to be fast: times have an exact lower bound and a generous upper bound.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ddp_tutorial.collectives import all_reduce_mean
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp import link as link_module
from ddp_tutorial.ddp.link import DirectLink, LinkModel, SimulatedLink, Transfer
from ddp_tutorial.groups import group_of
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.dispatched import DispatchedSource
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation
from ddp_tutorial.sharding.samples import as_samples
from ddp_tutorial.sharding.sharded import ShardedSource
from ddp_tutorial.world import World
from ranks import error_of, watched

SLACK = 30.0  # seconds for which a busy machine may pause a rank
EARLY = 2e-3  # a sleep may end slightly early


def together(world: World) -> None:
    all_reduce_mean(world, torch.zeros(1))


# ------------------------------------------------------------------------------------------------- the ranks at work

# 100,000 floats take, on 2 ranks, 2 x 20 ms + 400 kB / (5 MB/s) = 120 ms; on 3, 4 x 20 + 4/3 x 80 = 187 ms.
MODEL = LinkModel(latency=0.02, bandwidth=5e6)
ELEMENTS = 100_000
TAKES = {2: 0.12, 3: 0.08 + 0.32 / 3}


def sum_one(world: World) -> dict[str, Any]:
    link = SimulatedLink(world, MODEL)
    transfers = watched(link)
    tensor = torch.full((ELEMENTS,), float(world.rank + 1))
    together(world)
    began = time.monotonic()
    value = link.all_reduce(tensor, "gradients").wait()
    seconds = time.monotonic() - began
    return {
        "seconds": seconds,
        "transfers": transfers,
        "sum": (tensor[0].item(), tensor[-1].item()),
        "value is the tensor": value is tensor,
        "name": str(link),
    }


def sum_three(world: World) -> list[Transfer]:
    link = SimulatedLink(world, MODEL)
    transfers = watched(link)
    together(world)
    futures = [link.all_reduce(torch.ones(ELEMENTS), f"number {number}") for number in range(3)]
    for future in reversed(futures):
        future.wait()
    return transfers


def join_late(world: World) -> dict[str, Any]:
    """Let the last rank join 0.3 s after the others."""
    link = SimulatedLink(world, MODEL)
    transfers = watched(link)
    together(world)
    began = time.monotonic()
    if world.rank == world.size - 1:
        time.sleep(0.3)
    link.all_reduce(torch.ones(ELEMENTS)).wait()
    return {"began": began, "transfers": transfers}


def compute_meanwhile(world: World) -> dict[str, Any]:
    """Compute during a transfer. The transfer takes its time, and does not end before the computation."""
    computed = threading.Event()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        computed.wait(60)

    link = SimulatedLink(world, LinkModel(latency=0.5 / (2 * (world.size - 1)), bandwidth=1e12))
    weight = torch.ones(20, 20)
    together(world)
    began = time.monotonic()
    with patch.object(link_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)):
        future = link.all_reduce(torch.ones(4))
        is_under_way = not future.done()
        for _ in range(100):
            weight @ weight
        is_under_way_still = not future.done()
        computed.set()
        future.wait()
    return {"under way": (is_under_way, is_under_way_still), "seconds": time.monotonic() - began}


def fail_in_the_thread(world: World) -> dict[str, Any]:
    link = SimulatedLink(world, LinkModel(0.0, 1e9))
    wrong = error_of(lambda: link.all_reduce(torch.ones(3, dtype=torch.int16)).wait())  # gloo cannot sum these
    tensor = torch.ones(3)
    link.all_reduce(tensor).wait()
    return {"error": wrong, "afterwards": tensor.tolist()}


def connect_what_it_cannot(world: World) -> dict[str, str]:
    far = World(world.rank, world.size, 0, 1)
    gpu = World(world.rank, world.size, world.rank, world.size, device=torch.device("cuda", world.rank))
    return {
        "two machines": error_of(lambda: SimulatedLink(far, MODEL)),
        "GPUs": error_of(lambda: SimulatedLink(gpu, MODEL)),
    }


def sum_directly(world: World) -> dict[str, Any]:
    link = DirectLink(world)
    transfers = watched(link)
    tensor = torch.full((2, 3), float(world.rank + 1))
    before = time.monotonic()
    value = link.all_reduce(tensor, "gradients").wait()
    reported = list(transfers)  # immediately: a transfer is reported before its future completes
    after = time.monotonic()
    link.observer = None
    link.all_reduce(torch.ones(1)).wait()
    return {
        "sum": tensor.tolist(),
        "value is the tensor": value is tensor,
        "transfers": reported,
        "between": (before, after),
        "later": len(transfers),
        "name": str(link),
    }


def use_both_at_once(world: World) -> list[float]:
    """Use the main thread's collectives and the link in different orders on each rank. They do not interfere."""
    link, direct = SimulatedLink(world, LinkModel(0.01, 1e9)), DirectLink(world)
    slow, quick = torch.ones(1000), torch.ones(1000) * 10
    if world.rank == 0:
        future = link.all_reduce(slow)
        direct.all_reduce(quick).wait()
    else:
        direct.all_reduce(quick).wait()
        future = link.all_reduce(slow)
    future.wait()
    return [slow[0].item(), quick[0].item()]


def make_many(world: World) -> dict[str, int]:
    """Return the number of files and threads that ten more objects of each kind leave behind."""

    def make_link() -> None:
        SimulatedLink(world, LinkModel(0.0, 1e12)).all_reduce(torch.ones(4)).wait()

    def make_mesh() -> None:
        group_of([[rank] for rank in range(world.size)], world)

    def make_source() -> None:
        samples = as_samples(torch.utils.data.TensorDataset(torch.arange(64.0)))
        source = DispatchedSource(
            lambda: ShardedSource(samples, GlobalBatchSampler(Permutation(64, 0), 8), World()), world
        )
        next(source)
        source.close()

    def held() -> int:
        return len([*Path("/proc/self/fd").glob("*"), *Path("/proc/self/task").glob("*")])  # requires /proc

    left = {}
    for make in (make_link, make_mesh, make_source):
        make()
        before = held()
        for _ in range(10):
            make()
        left[make.__name__] = held() - before
    return left


def lose_the_others(world: World) -> dict[str, str] | None:
    """Let all ranks except rank 0 exit. Runs last."""
    links = {"direct": DirectLink(world), "simulated": SimulatedLink(world, LinkModel(0.0, 1e9))}
    observed = {name: watched(link) for name, link in links.items()}
    together(world)
    if world.rank > 0:
        dist.destroy_process_group()
        time.sleep(1.0)
        return None
    time.sleep(0.3)
    heard = {name: error_of(lambda link=link: link.all_reduce(torch.ones(4)).wait()) for name, link in links.items()}
    return heard | {"observed": str(sum(map(len, observed.values())))}


ALL = [
    sum_one,
    sum_three,
    join_late,
    compute_meanwhile,
    fail_in_the_thread,
    connect_what_it_cannot,
    sum_directly,
    use_both_at_once,
    make_many,
    lose_the_others,
]


def everything(world: World) -> dict[str, Any]:
    return {each.__name__: each(world) for each in ALL}


@pytest.fixture(scope="module", params=[2, 3])
def nprocs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def heard(nprocs: int) -> Iterator[list[dict[str, Any]]]:
    """Return the results of each rank. The ranks are started once for all tests."""
    return launch(everything, nprocs, device="cpu", threads=1, echo=False, timeout=300)


def test_links_meshes_and_sources_leave_no_files_or_threads(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        assert each["make_many"].keys() == {"make_link", "make_mesh", "make_source"}
        assert all(left < 10 for left in each["make_many"].values()), each["make_many"]


# ---------------------------------------------------------------------------------------------------- simulated link


def test_a_simulated_all_reduce_is_correct_and_takes_the_modeled_time(heard: list[dict[str, Any]], nprocs: int) -> None:
    for each in heard:
        said = each["sum_one"]
        assert said["sum"] == (nprocs * (nprocs + 1) / 2,) * 2
        assert said["value is the tensor"]
        assert TAKES[nprocs] - EARLY <= said["seconds"] < TAKES[nprocs] + SLACK
        [transfer] = said["transfers"]
        assert (transfer.name, transfer.nbytes) == ("gradients", 4 * ELEMENTS)
        assert transfer.issued <= transfer.start < transfer.end
        assert TAKES[nprocs] - EARLY <= transfer.end - transfer.start < TAKES[nprocs] + SLACK


def test_the_description_mentions_the_simulation(heard: list[dict[str, Any]]) -> None:
    assert {each["sum_one"]["name"] for each in heard} == {"simulated link: 20 ms, 5 MB/s"}


def test_transfers_are_queued(heard: list[dict[str, Any]], nprocs: int) -> None:
    issued = [max(transfer.issued for transfer in same) for same in zip(*(h["sum_three"] for h in heard), strict=True)]
    for each in heard:
        transfers = each["sum_three"]
        assert [transfer.name for transfer in transfers] == ["number 0", "number 1", "number 2"]
        first, second, third = transfers
        # A transfer waits in the queue for the previous one, unless a rank was paused before it joined.
        assert first.start == issued[0]
        assert second.start == pytest.approx(max(issued[1], first.start + TAKES[nprocs]), abs=1e-9)
        assert third.start == pytest.approx(max(issued[2], second.start + TAKES[nprocs]), abs=1e-9)
        assert 3 * TAKES[nprocs] - EARLY <= third.end - first.start < 3 * TAKES[nprocs] + SLACK


def test_all_ranks_agree_on_the_start_and_end_of_each_transfer(heard: list[dict[str, Any]], nprocs: int) -> None:
    for name, transfers_of in {
        "sum_one": lambda said: said["transfers"],
        "sum_three": lambda said: said,
        "join_late": lambda said: said["transfers"],
    }.items():
        for same in zip(*(transfers_of(each[name]) for each in heard), strict=True):
            assert len({transfer.start for transfer in same}) == 1
            assert all(transfer.end >= same[0].start + TAKES[nprocs] - EARLY for transfer in same)
            assert max(transfer.end for transfer in same) < min(transfer.end for transfer in same) + SLACK


def test_a_transfer_starts_when_the_last_rank_joins(heard: list[dict[str, Any]], nprocs: int) -> None:
    issued = [each["join_late"]["transfers"][0].issued for each in heard]
    assert issued[-1] >= heard[-1]["join_late"]["began"] + 0.3 - EARLY
    for each in heard:
        [transfer] = each["join_late"]["transfers"]
        assert transfer.start == max(issued)
        assert transfer.end >= max(issued) + TAKES[nprocs] - EARLY


def test_computation_continues_during_a_transfer(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        said = each["compute_meanwhile"]
        assert said["under way"] == (True, True), "all_reduce should return at once, and not when it is done"
        assert said["seconds"] >= 0.5 - EARLY


def test_a_thread_error_is_raised_at_the_wait_and_the_link_continues(heard: list[dict[str, Any]], nprocs: int) -> None:
    for each in heard:
        said = each["fail_in_the_thread"]
        assert said["error"].startswith("RuntimeError: ")
        assert "scalar type" in said["error"]
        assert said["afterwards"] == [nprocs] * 3


def test_gpus_and_several_machines_are_rejected(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        for refused in each["connect_what_it_cannot"].values():
            assert refused.startswith(
                "ConfigError: with a simulated link, all ranks must run on the CPU of one machine, got"
            )


def test_a_gpu_is_rejected_on_a_single_process_too() -> None:
    with pytest.raises(ConfigError, match="on the CPU of one machine, got rank 0 of 1 on cuda, nccl"):
        SimulatedLink(World(device=torch.device("cuda")), MODEL)


@pytest.mark.parametrize(
    "link",
    [
        SimulatedLink(World(), LinkModel(3600.0, 1e-6)),
        DirectLink(World()),
        DirectLink(World(device=torch.device("cuda", 0), backend="nccl")),
    ],
    ids=["simulated", "direct", "direct on a GPU"],
)
def test_a_link_of_one_process_takes_no_time(link: Any) -> None:
    transfers = watched(link)
    tensor = torch.arange(3.0)
    began = time.monotonic()
    assert link.all_reduce(tensor).wait() is tensor
    assert time.monotonic() - began < SLACK
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert transfers == []


# ------------------------------------------------------------------------------------------------------------- both


def test_the_direct_link_sums_and_reports_each_transfer(heard: list[dict[str, Any]], nprocs: int) -> None:
    for each in heard:
        said = each["sum_directly"]
        assert said["sum"] == [[nprocs * (nprocs + 1) / 2] * 3] * 2
        assert said["value is the tensor"]
        assert said["name"] == "direct link"
        [transfer] = said["transfers"]
        assert (transfer.name, transfer.nbytes) == ("gradients", 24)
        before, after = said["between"]
        assert before <= transfer.issued == transfer.start <= transfer.end <= after
        assert said["later"] == 1  # the second transfer had no observer


def test_links_do_not_interfere_with_each_other(heard: list[dict[str, Any]], nprocs: int) -> None:
    for each in heard:
        assert each["use_both_at_once"] == [nprocs, 10 * nprocs]


def test_an_all_reduce_that_loses_its_peer_raises_and_is_not_recorded(heard: list[dict[str, Any]]) -> None:
    said = heard[0]["lose_the_others"]
    for name in ("direct", "simulated"):
        assert said[name].startswith("RuntimeError: ")
        assert "by peer" in said[name] or "roken pipe" in said[name]
    assert said["observed"] == "0"


@pytest.mark.parametrize("make", [DirectLink, lambda world: SimulatedLink(world, MODEL)], ids=["direct", "simulated"])
def test_two_ranks_without_a_group_raise(make: Callable[[World], object]) -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        make(World(0, 2, 0, 2))
