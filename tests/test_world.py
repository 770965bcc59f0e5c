"""The same environment variables give the same world everywhere, and ranks without connections never train."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_tutorial.compat import abort_process_group
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import cores, describe_environment, memory
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.slurm.nodes import node_names, tasks_per_node
from ddp_tutorial.world import (
    World,
    _meeting_place,
    choose_device,
    process_group,
    require_group,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
# the variables that srun sets for task 4 of 7, the first task on the third node
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}
SLURM_TWO_NODES = {
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n1,n2",
    "SLURM_JOB_ID": "77",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, World(), id="no launcher"),
        pytest.param(TORCHRUN, World(5, 8, 1, 4), id="torchrun on two nodes"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            World(1, 2, 1, 2),
            id="set by hand on one machine",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, 1), id="torchrun with one process"),
        pytest.param(SLURM, World(4, 7, 0, 2, init_method="slurm://gpu03/slurm-1234567.0.0"), id="srun"),
        pytest.param(
            SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "3"},
            World(6, 7, 0, 1, init_method="slurm://gpu03/slurm-1234567.0.0"),
            id="srun, the last node has one task",
        ),
        pytest.param(
            SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"},
            World(4, 7, 0, 2, init_method="tcp://10.0.0.1:4000"),
            id="srun, address overridden",
        ),
        pytest.param(
            SLURM_TWO_NODES,
            World(3, 4, 1, 2, init_method="slurm://n1/slurm-77.0.3"),
            id="srun on two nodes, the job's variables",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"},
            World(),
            id="a shell of sbatch is alone",
        ),
        pytest.param(SLURM | TORCHRUN, World(5, 8, 1, 4), id="torchrun inside a Slurm job"),
    ],
)
def test_the_variables_of_each_launcher_give_its_world(environ, expected):
    assert World.detect(environ, device="cpu") == expected


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({"RANK": "0"}, r"RANK is set but WORLD_SIZE is not\. Set both, .*, or neither"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE is set but RANK is not\. Set both, .*, or neither"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
            r"WORLD_SIZE=2 requires MASTER_ADDR, .*Start the ranks with torchrun",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"WORLD_SIZE=2 requires MASTER_ADDR and MASTER_PORT, "),
        (TORCHRUN | {"WORLD_SIZE": "2"}, r"rank must be between 0 and 1, got 5 \(world size 2\)"),
        (TORCHRUN | {"RANK": "-1"}, r"rank must be between 0 and 7, got -1"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, r"local rank must be between 0 and 3, got 4"),
        (TORCHRUN | {"RANK": "two"}, r"RANK must be an integer, got 'two'"),
        (TORCHRUN | {"WORLD_SIZE": ""}, r"WORLD_SIZE must be an integer, got ''"),
        (TORCHRUN | {"LOCAL_RANK": "1.5"}, r"LOCAL_RANK must be an integer, got '1.5'"),
        (SLURM | {"SLURM_PROCID": "x"}, r"SLURM_PROCID must be an integer, got 'x'"),
        (SLURM | {"SLURM_PROCID": "7"}, r"rank must be between 0 and 6, got 7"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, r"TASKS_PER_NODE must have the form '2\(x3\),1', got '2\(3\)'"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, r"a node list must have the form .*, got ''"),
        (
            SLURM | {"SLURM_STEP_NODELIST": "gpu[03-05]"},
            r"'gpu\[03-05\]' contains 3 nodes, but .*='2\(x3\),1' specifies 4",
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, r"='2\(x4\)' specifies 8 tasks, but the step has 7"),
    ],
)
def test_contradictory_variables_are_rejected_by_name(environ, advice):
    with pytest.raises(ValueError, match=advice):
        World.detect(environ, device="cpu")


def test_a_slurm_node_outside_the_list_of_tasks_is_rejected_by_name():
    with pytest.raises(ValueError, match="SLURM_NODEID"):
        World.detect(SLURM | {"SLURM_NODEID": "4"}, device="cpu")


@pytest.mark.parametrize(
    ("text", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),3", [1, 2, 2, 3]), ("16(x1)", [16])]
)
def test_tasks_per_node_supports_slurms_short_form(text, tasks):
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu[03-05,9]", ["gpu03", "gpu04", "gpu05", "gpu9"]),
        ("gpu[9,03-05],login", ["gpu9", "gpu03", "gpu04", "gpu05", "login"]),
        ("login,gpu[1-2]", ["login", "gpu1", "gpu2"]),
        ("node-a.example.org", ["node-a.example.org"]),
        ("rack-1-[008-010]", ["rack-1-008", "rack-1-009", "rack-1-010"]),
        ("r[0-1]n[2-3]", ["r0n2", "r0n3", "r1n2", "r1n3"]),
        ("r[0-1]n[2]x,login", ["r0n2x", "r1n2x", "login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_a_node_list_is_expanded_to_hosts(nodes, names):
    assert node_names(nodes) == names


@pytest.mark.parametrize(
    ("nodes", "advice"),
    [
        ("n[3-1]", "a range in a node list must be ascending, got '3-1'"),
        ("n[1-3],n2", r"node list 'n\[1-3\],n2' contains 'n2' twice"),
        ("n[1-3,2]", "contains 'n2' twice"),
        ("n[1-", r"a node list must have the form 'node\[01-03\]', got 'n\[1-'"),
        ("n1,", "a node list must have the form"),
        ("n1 n2", "a node list must have the form"),
        ("n[a-b]", "a node list must have the form"),
    ],
)
def test_a_contradictory_node_list_is_rejected(nodes, advice):
    with pytest.raises(ConfigError, match=advice):
        node_names(nodes)


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [(0, ["cpu", "cpu"]), (1, ["cpu", "cpu"]), (2, ["cuda:0", "cuda:1"]), (3, ["cuda:0", "cuda:1"])],
)
def test_auto_gives_every_local_rank_a_gpu_or_none(gpus, devices):
    two = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    worlds = [World.detect(two | {"RANK": str(rank)}, "auto", gpus=gpus) for rank in range(2)]
    assert [str(world.device) for world in worlds] == devices
    assert [world.backend for world in worlds] == ["nccl" if "cuda" in device else "gloo" for device in devices]


def test_gpus_are_divided_between_the_ranks_of_a_machine():
    world = World.detect(TORCHRUN, "cuda", gpus=4)
    assert world.device == torch.device("cuda", 1)  # the local rank
    assert str(world) == "rank 5 of 8 on cuda:1, nccl"


def test_too_few_gpus_and_unknown_devices_are_rejected():
    with pytest.raises(ValueError, match=r"requires one GPU for each of the 4 ranks on this machine, got 3\. Use"):
        World.detect(TORCHRUN, "cuda", gpus=3)
    with pytest.raises(ValueError, match=r"device must be 'auto', 'cpu' or 'cuda', got 'tpu'"):
        choose_device("tpu")
    assert choose_device("cpu", gpus=8) == torch.device("cpu")


def test_ranks_share_a_gpu_with_gloo_or_if_nccl_permits_it(monkeypatch):
    for backend in ("gloo", "nccl"):
        if backend == "nccl":
            with pytest.raises(ValueError, match="NCCL_MULTI_RANK_GPU_ENABLE=1"):
                choose_device("cuda", 1, 2, gpus=1, backend=backend)
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        assert choose_device("cuda", 1, 2, gpus=1, backend=backend) == torch.device("cuda", 0)


def test_gloo_sends_from_the_memory_of_the_cpu():
    gpu = torch.device("cuda", 0)
    assert World(device=gpu, backend="gloo").message_device == torch.device("cpu")
    assert World(device=gpu, backend="nccl").message_device == gpu


def abort(world):
    abort_process_group()
    return world.rank


def test_a_group_that_was_aborted_inside_the_block_is_not_destroyed_again():
    assert launch(abort, 2, device="cpu", echo=False) == [0, 1]


FOUR_TASKS = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}
EACH_SEES_ONE = FOUR_TASKS | {"SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("environ", "visible", "device"),
    [
        pytest.param(FOUR_TASKS | {"SLURM_GPUS_PER_TASK": "1"}, 4, "cuda:3", id="--gpu-bind=none: all see all"),
        pytest.param(EACH_SEES_ONE | {"SLURM_GPUS_PER_TASK": "1"}, 1, "cuda:0", id="--gpus-per-task=1"),
        pytest.param(EACH_SEES_ONE | {"SLURM_GPUS_PER_TASK": "a100:1"}, 1, "cuda:0", id="--gpus-per-task=a100:1"),
        pytest.param(EACH_SEES_ONE | {"SLURM_NTASKS_PER_GPU": "1"}, 1, "cuda:0", id="--ntasks-per-gpu=1"),
        pytest.param(FOUR_TASKS | {"SLURM_GPUS_PER_TASK": "a100:1"}, 1, "cuda:0", id="a Slurm that counts no GPUs"),
        pytest.param(FOUR_TASKS | {"SLURM_GPUS_ON_NODE": "8"}, 2, "cuda:1", id="--gpus-per-task=2"),
        pytest.param(FOUR_TASKS | {"SLURM_GPUS_ON_NODE": "1"}, 1, "cpu", id="one GPU for four tasks"),
        pytest.param(
            FOUR_TASKS | {"SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS_PER_GPU": "4"}, 1, "cpu", id="--ntasks-per-gpu=4"
        ),
        pytest.param(EACH_SEES_ONE, 0, "cpu", id="none to be seen"),
        pytest.param(TORCHRUN | {"SLURM_GPUS_PER_TASK": "1"}, 4, "cuda:1", id="torchrun in such a job"),
        pytest.param(TORCHRUN | EACH_SEES_ONE | {"SLURM_GPUS_PER_TASK": "1"}, 1, "cpu", id="torchrun, too few"),
    ],
)
def test_the_gpu_of_a_rank_depends_on_the_visible_gpus(environ, visible, device):
    assert str(World.detect(environ, "auto", gpus=visible).device) == device


def test_steps_and_restarts_of_a_slurm_job_use_different_addresses():
    starts = [{"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    starts += [{"SLURM_JOB_ID": "7"}, {"SLURM_CLUSTER_NAME": "east"}]
    assert len({World.detect(SLURM | start, "cpu").init_method for start in starts}) == len(starts)


def test_device_and_backend_are_independent_and_gloo_shares_gpus():
    def found(device, backend, gpus):
        world = World.detect(TORCHRUN | {"LOCAL_RANK": "3"}, device, gpus=gpus, backend=backend)
        return str(world.device), world.backend

    assert found("cuda", "gloo", 4) == ("cuda:3", "gloo")
    assert found("cuda", "gloo", 2) == ("cuda:1", "gloo")
    assert found("cuda", "gloo", 1) == ("cuda:0", "gloo")
    assert found("cuda", "auto", 4) == found("auto", "nccl", 4) == ("cuda:3", "nccl")
    assert found("auto", "gloo", 1) == found("cpu", "auto", 4) == ("cpu", "gloo")
    with pytest.raises(
        ConfigError, match=r"requires one GPU for each of the 4 ranks .* got 2.*can share a GPU with backend='gloo'"
    ):
        found("cuda", "nccl", 2)
    with pytest.raises(ConfigError, match=r"got 0\. Use device='cpu', or start at most one rank per GPU\.$"):
        found("cuda", "gloo", 0)
    for device, gpus in (("cpu", 4), ("auto", 1)):
        with pytest.raises(ConfigError, match=r"backend='nccl' requires GPUs, but these ranks are on CPUs"):
            found(device, "nccl", gpus)
    with pytest.raises(
        ConfigError, match=r"backend must be 'auto', 'gloo' or 'nccl', got 'mpi', which PyTorch's prebuilt"
    ):
        found("cpu", "mpi", 0)


def test_a_rank_that_fails_does_not_wait_for_its_nccl_work(monkeypatch):
    """The work cannot complete. Observing NCCL itself would require two GPUs."""
    done = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda name=name, **_: done.append(name))
    monkeypatch.setattr(dist, "is_initialized", lambda: done[-1:] == ["init_process_group"])
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: done.append("abort"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    world = World(1, 2, 1, 2, device=torch.device("cuda", 1))
    with process_group(world):
        pass
    with pytest.raises(KeyError), process_group(world):
        raise KeyError
    with pytest.raises(KeyError), process_group(replace(world, backend="gloo")):
        raise KeyError
    joined = "init_process_group"
    assert done == [joined, "destroy_process_group", joined, "abort", joined, "destroy_process_group"]


def test_an_error_after_the_block_has_destroyed_the_group_is_raised_unchanged(monkeypatch):
    groups = []
    monkeypatch.setattr(dist, "init_process_group", lambda **_: groups.append("a group"))
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(groups))
    monkeypatch.setattr(dist, "destroy_process_group", groups.pop)
    with pytest.raises(KeyError), process_group(World(1, 2, 1, 2)):  # noqa: PT012
        dist.destroy_process_group()
        raise KeyError


def test_only_rank_0_is_main():
    assert [World(rank, 3, rank, 3).is_main for rank in range(3)] == [True, False, False]


def test_ranks_without_a_group_are_rejected():
    require_group(World())  # one process requires no group
    with pytest.raises(RuntimeError, match=r"2 ranks but no process group.*'with process_group\(world\):'"):
        require_group(World(1, 2, 1, 2))


def test_one_process_gets_no_group():
    world = World()
    with process_group(world) as same:
        assert same is world
        assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_an_existing_group_is_used_and_not_destroyed(monkeypatch, fails):
    """Workers of Ray Train have an existing group, which must match the environment."""
    found = {"is_initialized": True, "get_world_size": 3, "get_rank": 1, "get_backend": "gloo"}
    for name, value in found.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    here = World(1, 3, 1, 3)
    entered = []
    with pytest.raises(KeyError) if fails else nullcontext(), process_group(here) as world:
        entered.append(world)
        if fails:
            raise KeyError
    assert entered == [here]
    refused = [
        (replace(here, size=2, local_size=2), RuntimeError, "2 ranks, but the process group has 3"),
        (replace(here, rank=2), RuntimeError, "specifies rank 2, but the rank in the existing process group is 1"),
        (
            replace(here, device=torch.device("cuda", 1), backend="nccl"),
            ConfigError,
            "uses gloo, but backend='nccl'",
        ),
    ]
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for other, error, message in refused:
        with pytest.raises(error, match=message), process_group(other):
            pytest.fail("the block was entered")


@pytest.mark.parametrize("local_size", [1, 2], ids=["two hosts", "one host"])
def test_a_nonexistent_interface_is_rejected_by_name(monkeypatch, local_size):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo77")
    monkeypatch.setattr(dist, "init_process_group", lambda **_: pytest.fail("a group was started"))
    with pytest.raises(ConfigError, match="has no interface 'lo77'"), process_group(World(0, 2, 0, local_size)):
        pytest.fail("the block was entered")


def test_a_detected_world_has_the_given_timeout():
    assert World.detect({}, "cpu", timeout=timedelta(seconds=3)).timeout == timedelta(seconds=3)


def test_ranks_rendezvous_at_the_host_of_rank_0(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert _meeting_place(World()) == "node1"
    assert _meeting_place(World(init_method="tcp://node2:4000")) == "node2"
    monkeypatch.delenv("MASTER_ADDR")
    assert _meeting_place(World()) == _meeting_place(World(init_method="tcp://:4000")) == ""


@pytest.mark.parametrize(
    ("limit", "found"), [("4096\n", 4096), ("max\n", None), (str(2**60), None), (OSError(), None)], ids=str
)
def test_memory_is_the_limit_of_the_machine_or_the_container(monkeypatch, limit, found):
    def read(path):
        assert path == Path("/sys/fs/cgroup/memory.max")
        if isinstance(limit, OSError):
            raise limit
        return limit

    monkeypatch.setattr(Path, "read_text", read)
    assert memory() == (found or psutil.virtual_memory().total)


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def test_the_description_of_a_machine_is_json_with_the_thread_count():
    described = json.loads(json.dumps(describe_environment()))
    assert (described["torch"], described["cores"]) == (torch.__version__, cores())
    assert (described["threads"], len(described["gpus"])) == (torch.get_num_threads(), torch.cuda.device_count())
    assert described["processor"].strip() == described["processor"]


GROUPS = """
import os
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from ddp_tutorial.world import World, process_group, require_group

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def world(name):
    return World(rank, size, rank, size, init_method=f"file://{folder}/{name}", timeout=timedelta(seconds=20))

before = dict(os.environ)
assert not dist.is_initialized()
with process_group(world("first")) as here:
    require_group(here)
    try:
        require_group(World(rank, size + 1, rank, size + 1))
    except RuntimeError as error:
        assert f"{size + 1} ranks, but the process group has {size}" in str(error), error
    else:
        raise AssertionError("a world of another size was accepted")
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    print("total", number.item(), dist.get_world_size(), dist.get_backend(), flush=True)
assert not dist.is_initialized()

try:
    with process_group(world("second")):
        dist.barrier()
        raise KeyError("passes through")
except KeyError:
    assert not dist.is_initialized()

print("in haste", flush=True)
for again in range(12):
    with process_group(world(f"short{again}")):
        pass  # whoever is up first leaves at once
assert os.environ == before, os.environ
print("done", flush=True)
"""


# The group of one rank could be up, and gone again, while another is still connecting to it. That one would fail with
# "Gloo connectFullMesh failed with Connection closed by peer".
def test_a_group_exists_only_inside_the_block(tmp_path):
    interface = next(name for _, name in socket.if_nameindex() if name in {"lo", "lo0"})
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUPS, str(rank), "3", str(tmp_path)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    slow = ranks[-1]
    try:
        said = [slow.stdout.readline(), slow.stdout.readline()]
        while slow.poll() is None:  # a rank on a very busy machine, which all other ranks precede
            slow.send_signal(signal.SIGSTOP)
            time.sleep(0.03)
            slow.send_signal(signal.SIGCONT)
            time.sleep(0.002)
        for rank in ranks:
            out, err = rank.communicate(timeout=300)
            assert rank.returncode == 0, err
            if rank is slow:
                out = "".join([*said, out])
            assert out.splitlines() == ["total 6.0 3 gloo", "in haste", "done"]  # 1 + 2 + 3
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
