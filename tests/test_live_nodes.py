"""Live ranks on simulated hosts: they use a link of a known rate, survive the same failures as local ranks, and leave
no network.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddp_tutorial import cluster as clusters
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.config import ConfigError
from ddp_tutorial.debug.hangs import CollectiveError
from ddp_tutorial.live.pool import Ranks
from ddp_tutorial.live.script import ScriptStep, launch_command, make_script
from ddp_tutorial.processes.errors import RankError
from kernel import Kernel
from ranks import wait_until
from test_live_ranks import are_together, gone, interrupt_after

IMPORTS = "import os, signal, socket, time, torch, torch.distributed as dist"
MBIT = 100
NUMBERS = 250_000  # float32 numbers in an all-reduce: one megabyte


@pytest.fixture(scope="module")
def allowed() -> None:
    if reason := clusters.unsupported_reason():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(2, f"{MBIT}mbit", folder=tmp_path_factory.mktemp("shared")) as two:
        yield two


@pytest.fixture(scope="module")
def one_pool(cluster: Cluster) -> Iterator[Ranks]:
    with Ranks(2, cluster=cluster, threads=1, wait_timeout=1.0) as ranks:
        yield ranks
        pids = [each["pid"] for each in ranks.status()]
    assert gone(pids), "stopped, and yet there"
    assert cluster.is_up, "a cluster that was up is left so"


@pytest.fixture
def ranks(one_pool: Ranks) -> Ranks:
    """Return working ranks, whatever the previous test did to them."""
    if any(each["state"] != "ready" for each in one_pool.status()):
        one_pool.restart()
    one_pool.execute(IMPORTS)
    return one_pool


def network_of(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def processes_in(networks: set[str]) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if network_of(each.name) in networks:
                found.append(int(each.name))
    return found


def nobody_is_in(networks: set[str]) -> bool:
    return wait_until(lambda: not processes_in(networks))


# ------------------------------------------------------------------------------------------------------- where they are


def here(world: Any) -> tuple[Any, ...]:
    import socket

    of_torchrun = [int(os.environ[name]) for name in ("RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK")]
    return socket.gethostname(), world.rank, world.local_rank, world.local_size, world.size, of_torchrun


def test_ranks_are_distributed_to_nodes_and_know_their_local_ranks(cluster: Cluster, ranks: Ranks) -> None:
    assert ranks.run(here) == [("n0", 0, 0, 1, 2, [0, 0, 2, 0]), ("n1", 1, 0, 1, 2, [1, 1, 2, 0])]
    with Ranks(4, cluster=cluster, threads=1) as four:
        assert [each[:4] for each in four.run(here)] == [
            ("n0", 0, 0, 2),
            ("n0", 1, 1, 2),
            ("n1", 2, 0, 2),
            ("n1", 3, 1, 2),
        ]
        assert [each["node"] for each in four.status()] == ["n0", "n0", "n1", "n1"]
        four.execute("import torch, torch.distributed as dist; x = torch.tensor(world.rank); dist.all_reduce(x)")
        assert [each.item() for each in four.get("x")] == [6] * 4
        with pytest.raises(CollectiveError, match="rank 3 is idle"):
            four.execute("if world.rank < 3: dist.barrier()")
        assert four.run(here)[0][:2] == ("n0", 0), "woken, on one node and across two, and not killed"
        assert [each["state"] for each in four.status()] == ["ready"] * 4
    assert are_together(ranks), "another pool on the same nodes has come and gone"


def test_ranks_rendezvous_inside_their_network_without_outside_listeners(ranks: Ranks) -> None:
    networks = {network_of(each["pid"]) for each in ranks.status()}
    assert len(networks) == 2
    assert network_of("self") not in networks
    assert ranks.get("world.backend") == ["gloo", "gloo"]
    for each in psutil.Process().net_connections("inet"):
        assert each.status != "LISTEN" or each.laddr.ip in {"127.0.0.1", "::1"}, each


# ------------------------------------------------------------------------------------------------------------- the link


def seconds_of_an_all_reduce(ranks: Ranks) -> float:
    """Return the longer time of both ranks, because the data may already be there for the rank that starts last."""
    ranks.execute(f"x = torch.full(({NUMBERS},), 1.0 + world.rank)\ndist.barrier()")
    ranks.execute("began = time.perf_counter()\ndist.all_reduce(x)\nseconds = time.perf_counter() - began")
    assert all(x.equal(torch.full((NUMBERS,), 3.0)) for x in ranks.get("x"))
    return float(max(ranks.get("seconds")))


def test_an_all_reduce_takes_at_least_the_time_of_the_link(cluster: Cluster, ranks: Ranks) -> None:
    """In a ring of two, each rank receives as many bytes as the tensor has: half to sum, and half as the sum."""
    on_the_wire = (
        4 * NUMBERS * 8 / (MBIT * 1e6)
    )  # 80 ms; a little less may come, as a bucket of tokens is full at first
    at_first = seconds_of_an_all_reduce(ranks)
    assert at_first > 0.9 * on_the_wire
    cluster.set_rate(f"{MBIT / 4:g}mbit")
    try:
        assert seconds_of_an_all_reduce(ranks) > 4 * 0.9 * on_the_wire
    finally:
        cluster.set_rate(f"{MBIT}mbit")


def test_an_unplugged_cable_is_reported_and_ranks_reconnect_afterward(cluster: Cluster, ranks: Ranks) -> None:
    ranks.execute("kept = world.rank")
    cluster.disconnect(1)
    try:
        with pytest.raises(CollectiveError, match=r"the cable of n1 is unplugged: all ranks have entered") as caught:
            ranks.execute("dist.all_reduce(torch.ones(1))")
        assert "form one at the first call after the cable is plugged in" in str(caught.value)
        with pytest.raises(RankError, match=r"no process group\s+the cable of n1 is unplugged"):
            ranks.execute("1")
        assert ranks.get("kept", on=[1]) == [1], "one rank alone needs no group"
    finally:
        cluster.reconnect(1)
    assert are_together(ranks)
    assert ranks.get("kept") == [0, 1]


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("source", ["time.sleep(60)", "dist.barrier() if world.rank == 0 else time.sleep(60)"])
def test_an_interrupt_stops_the_call_and_keeps_the_ranks(ranks: Ranks, source: str) -> None:
    ranks.execute("kept = world.rank")
    before = [each["pid"] for each in ranks.status()]
    with interrupt_after(1.0, ranks), pytest.raises(KeyboardInterrupt, match=r"rank 1 was at call \d+, line 1"):
        ranks.execute(source)
    assert [each["pid"] for each in ranks.status()] == before
    assert ranks.get("kept") == [0, 1]
    assert are_together(ranks)


def test_an_error_and_a_hang_are_reported_with_rank_and_line(ranks: Ranks) -> None:
    ranks.execute("kept = world.rank")
    with pytest.raises(RankError, match="rank 1 raised ValueError: a bad sample") as failed:
        ranks.execute("x = torch.ones(1)\nif world.rank == 1:\n    raise ValueError('a bad sample')")
    assert re.search(r"call \d+, line 3, in <module>\n +raise ValueError", str(failed.value))
    with pytest.raises(CollectiveError, match=r"Rank 0 waits in barrier \(call \d+, line 1"):
        ranks.execute("if world.rank == 0: dist.barrier()")
    assert ranks.get("kept") == [0, 1]
    assert are_together(ranks)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_reported_and_restart_replaces_it(ranks: Ranks, dead: int) -> None:
    ranks.execute("kept = world.rank")
    with pytest.raises(RankError, match=f"rank {dead} was killed by SIGKILL"):
        ranks.execute(f"if world.rank == {dead}: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert [each["state"] for each in ranks.status()][dead] == "was killed by SIGKILL"
    assert ranks.restart() == [dead]
    assert are_together(ranks)
    assert ranks.get("kept", on=[1 - dead]) == [1 - dead]
    with pytest.raises(RankError, match="NameError"):
        ranks.get("kept", on=[dead])
    assert [each["node"] for each in ranks.status()] == ["n0", "n1"]


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("n", "nodes", "more", "said"),
    [
        (3, 2, {}, "the number of ranks must be a multiple of the number of nodes (2), got 3"),
        (1, 2, {}, "must be a multiple of the number of nodes (2), got 1"),
        (2, 2, {"device": "cuda"}, "'device' must be 'cpu' or 'auto' on a cluster"),
    ],
)
def test_unsupported_options_on_nodes_are_rejected_in_one_line(
    n: int, nodes: int, more: dict[str, Any], said: str
) -> None:
    cluster = Cluster(nodes)
    with pytest.raises(ConfigError, match=re.escape(said)) as told:
        Ranks(n, cluster=cluster, **more)
    assert "\n" not in str(told.value)
    assert not cluster.is_up


def test_a_number_is_not_a_cluster() -> None:
    with pytest.raises(ConfigError, match="'cluster' must be a Cluster"):
        Ranks(2, cluster=2)  # type: ignore[arg-type]


def test_without_namespaces_one_line_is_printed_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match="the cluster cannot be started: the kernel does not permit namespaces"
    ) as told:
        Ranks(2, cluster=Cluster(2), threads=1)
    assert "\n" not in str(told.value)
    assert set(psutil.Process().children()) <= set(before)


# --------------------------------------------------------------------------------------------------------- a script


def test_cells_become_a_script_for_torchrun_on_each_node(cluster: Cluster) -> None:
    steps = [
        ScriptStep("import socket\nimport torch\nimport torch.distributed as dist"),
        ScriptStep(
            "x = torch.tensor(world.rank + 1)\ndist.all_reduce(x)\nsocket.gethostname(), world.local_size, x.item()"
        ),
    ]
    text = make_script(steps, "out.py", 2, 1, "cpu", "gloo", nodes=2)
    (cluster.folders[0] / "out.py").write_text(text)
    command = launch_command("out.py", 2, nodes=2)
    assert "--nnodes 2 --nproc-per-node 1" in command
    assert command in text.partition("import")[0], "its first lines say how it is run"
    line = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    ended = cluster.run(*line, env={"OMP_NUM_THREADS": "1"}, timeout=90)
    assert [each.code for each in ended] == [0, 0], ended
    said = sorted(line for each in ended for line in each.output.splitlines() if line.startswith("[rank"))
    assert said == ["[rank 0] n0 1 3", "[rank 1] n1 1 3"]


# --------------------------------------------------------------------------------------------------- in a notebook


def test_magics_on_nodes_leave_no_process_or_network_after_the_kernel(allowed: None, tmp_path: Path) -> None:
    notebook = Kernel(tmp_path)
    try:
        notebook.run("%load_ext ddp_tutorial")
        for line, said in (
            ("-n 3 --nodes 2", "must be a multiple of the number of nodes (2)"),
            ("-n 2 --nodes 0", "'nodes' must be an integer from 1"),
            ("-n 2 --nodes two", "invalid int value: 'two'"),
            ("-n 2 --nodes 2 --rate 100", "'rate' must be a number with a unit"),
            ("-n 2 --nodes 2 --rate 1gbit --delay 1", "'delay' must be a number with a unit"),
            ("-n 2 --rate 1gbit", "add, for example, --nodes 2"),
        ):
            error = notebook.run(f"%ranks start {line}")["error"]
            assert said in error
            assert "\n" not in error.strip(), error
        start = "%ranks start -n 2 --threads 1 --nodes 2 --rate 100mbit"
        assert notebook.run(start)["printed"] == "2 ranks on cpu, gloo, on 2 nodes, 100mbit links\n"
        status = notebook.run("%ranks status")["printed"].splitlines()
        assert [line.partition(",")[0] for line in status] == ["rank 0 on n0: ready", "rank 1 on n1: ready", "2 nodes"]
        cell = "%%ranks\nimport torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx"
        assert notebook.run(cell)["result"] == "all ranks: tensor([2.])"
        assert notebook.run("%ranks rate 20mbit")["printed"] == "20mbit links\n"
        assert "such as '1gbit'" in notebook.run("%ranks rate 20")["error"]
        assert "--nnodes 2 --nproc-per-node 1" in notebook.run("%ranks script out.py")["printed"]
        kernel = psutil.Process(notebook.manager.provisioner.process.pid)
        networks = {network_of(each.pid) for each in kernel.children(recursive=True)} - {network_of("self")}
        assert len(networks) == 3, "of two nodes, and of the bridge between them"
        kernel.kill()
        # The network disappears with its last process.
        assert nobody_is_in(networks), "ranks have outlived their kernel"
    finally:
        notebook.end()


def test_a_killed_cluster_is_restarted_but_a_host_without_power_is_not(allowed: None, tmp_path: Path) -> None:
    """The pool has started the cluster, so the cluster stops with the pool."""
    cluster = Cluster(2, "1gbit", folder=tmp_path)
    with Ranks(2, cluster=cluster, threads=1) as ranks:
        assert cluster.is_up
        networks = {network_of(each["pid"]) for each in ranks.status()}
        box = psutil.Process(cluster._box.pid).children()[0]
        box.kill()
        wait_until(lambda: all(each["state"] != "ready" for each in ranks.status()), 120)
        assert ranks.restart() == [0, 1]
        assert are_together(ranks)
        networks |= {network_of(each["pid"]) for each in ranks.status()}
        ranks.execute("kept = world.rank")
        cluster.kill(1)
        with pytest.raises(RankError, match=r"rank 1 is dead: the process was killed by SIGKILL"):
            ranks.execute("1")
        with pytest.raises(ConfigError, match="n1 has been killed, so its ranks cannot be restarted"):
            ranks.restart()
        assert ranks.get("kept", on=[0]) == [0], "a restart that was refused has changed nothing"
    assert not cluster.is_up
    assert nobody_is_in(networks)
    with pytest.raises(RuntimeError, match="have been stopped"):
        ranks.execute("1")
