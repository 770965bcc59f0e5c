"""The rendezvous of torchrun's agents, static and c10d: a node that is late or never joins, and a port in use.

Agents on separate hosts are tested in test_cluster.py, and restarted ranks in test_restarts.py.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_tutorial.processes.process_tags import TORCHRUN, kill_torchrun, tagged_processes
from ranks import free_port

MARK = f"test_rendezvous of {os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert tagged_processes(TORCHRUN, MARK.__eq__) == []


def meeting(how: str, port: int, node: int, **options: float) -> list[str]:
    """Return the rendezvous options of two nodes: static at the first node, or c10d with the first node as host."""
    conf = ",".join(f"{name}={value:g}" for name, value in options.items())
    if how == "static":
        place = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    else:
        conf = f"is_host={int(node == 0)},{conf}".strip(",")
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    return [*place, "--local-addr=127.0.0.1", *([f"--rdzv-conf={conf}"] if conf else [])]


def agent(folder: Path, nodes: int, where: list[str], script: str = "never_started.py") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={nodes}",
            "--nproc-per-node=1",
            *where,
            script,
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", TORCHRUN: MARK},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def failed(agents: dict[str, "subprocess.Popen[str]"]) -> dict[str, str]:
    """Return the errors of the agents, which exit by themselves without having started a rank."""
    said = {}
    try:
        for how, each in agents.items():
            out, said[how] = each.communicate(timeout=300)
            assert (each.returncode, out) == (1, ""), said[how]
    finally:
        for each in agents.values():
            kill_torchrun(each, MARK)
            each.communicate()  # close the pipes
    return said


def test_a_node_that_never_joins_is_not_waited_for_beyond_the_timeout(workdir: Path) -> None:
    said = failed(
        {
            "static": agent(workdir, 2, meeting("static", free_port(), 0, timeout=3)),
            "c10d": agent(workdir, 2, meeting("c10d", free_port(), 0, join_timeout=3)),
        }
    )
    assert re.search(r"Timed out after \d+ seconds waiting for clients. 1/2", said["static"]), said["static"]
    assert "RendezvousTimeoutError" in said["c10d"]


def test_a_port_in_use_is_reported_immediately(workdir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failed(
            {
                "static": agent(workdir, 1, meeting("static", port, 0)),
                "c10d": agent(workdir, 1, meeting("c10d", port, 0, read_timeout=3)),
            }
        )
    assert re.search("EADDRINUSE.*address already in use", said["static"])
    assert "connection to the C10d store has failed" in said["c10d"]


TOLD = """
import json, os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
names.append("MASTER_PORT")
told = [int(os.environ[name]) for name in names]
open(f"{os.environ['TORCHELASTIC_RUN_ID']}.{told[0]}", "w").write(json.dumps(told))
"""


def test_a_late_node_is_waited_for_and_all_ranks_see_the_same_world(workdir: Path) -> None:
    """The second agent starts some time after the first agent and its store."""
    (workdir / "told.py").write_text(TOLD)
    ports = {"static": free_port(), "c10d": free_port()}
    agents = {}
    try:
        for node in (0, 1):
            for how, port in ports.items():
                agents[how, node] = agent(workdir, 2, meeting(how, port, node), "told.py")
            for port in ports.values() if node == 0 else ():
                wait_for(port)
            time.sleep(1 - node)
            assert not list(workdir.glob("*.[01]")) or node, "a rank has started without the other"
        said = {which: each.communicate(timeout=300) for which, each in agents.items()}
    finally:
        for each in agents.values():
            kill_torchrun(each, MARK)
            each.communicate()  # close the pipes
    assert {which: each.returncode for which, each in agents.items()} == dict.fromkeys(agents, 0), said
    for names in (("none.0", "none.1"), ("test.0", "test.1")):  # the job's id, which --rdzv-id sets, and the rank
        told = [json.loads((workdir / name).read_text()) for name in names]
        assert [each[:-1] for each in told] == [[rank, 0, 2, rank, 2, 0] for rank in (0, 1)]
        assert told[0][-1] == told[1][-1], "they would meet at different ports"


def wait_for(port: int) -> None:
    """Wait until a process listens at the port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens at {port}"
            time.sleep(0.05)
