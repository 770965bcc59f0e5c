"""A run restarted by torchrun is bitwise identical, a folder has one world at a time, and no rank is left."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_tutorial.benches.restarts import is_good, measure_restarts
from ddp_tutorial.files import locked
from ddp_tutorial.processes.process_tags import TORCHRUN, kill_torchrun
from ddp_tutorial.runs.folder import request_stop
from ddp_tutorial.world import World, attempt_store
from ranks import is_gone

ROOT = Path(__file__).parent.parent


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def one_attempt(port: int, size: int, late: int = 0) -> list[dist.Store]:
    """Let all ranks of an attempt meet in the agent's store, rank `late` after the others.

    Return the result of each rank.
    """
    found: dict[int, dist.Store] = {}

    def meet(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        time.sleep(0.2 * (rank == late))
        found[rank] = attempt_store(client, World(rank, size, rank, size, timeout=timedelta(seconds=20)))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("late", [0, 1])
def test_each_attempt_of_the_ranks_uses_a_new_prefix_of_the_store(late: int) -> None:
    agents = server()
    before: list[dist.Store] = []
    for size in (3, 3, 2, 3):
        stores = one_attempt(agents.port, size, late)
        assert not stores[0].check(["address"])
        stores[0].set("address", str(size))
        assert [store.get("address") for store in stores] == [str(size).encode()] * size
        assert all(each.get("address") == b"3" for each in before)
        before = stores if size == 3 else []


def test_a_rank_that_never_joins_is_named_after_the_timeout() -> None:
    agents = server()
    with pytest.raises(RuntimeError, match="rank 1 did not join"):
        attempt_store(agents, World(0, 2, 0, 2, timeout=timedelta(seconds=0.2)))
    with pytest.raises(RuntimeError, match="rank 0 did not join"):
        attempt_store(agents, World(1, 2, 1, 2, timeout=timedelta(seconds=0.2)))


def test_a_run_restarted_by_torchrun_is_bitwise_identical() -> None:
    """torchrun shares its store, with which most restarts would fail without the prefix."""
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ
    found = measure_restarts(1, seed=3)
    assert found["kills"] >= 1
    assert found["attempts"] == found["kills"] + found["runs"] + 1
    assert is_good(found)


@pytest.mark.parametrize(("requirement", "broken"), [("bit_equal", False), ("leftover_processes", 1)])
def test_one_violated_requirement_is_reported(requirement: str, broken: Any) -> None:
    good = {"bit_equal": True, "leftover_processes": 0}
    assert is_good(good)
    assert not is_good(good | {requirement: broken})


# ------------------------------------------------------------------------------------------- two agents, and their ends

SLOW = """
import os, time
from ddp_tutorial import TaskConfig, observe, run, train

config = TaskConfig.model_validate({"name": "mine", "corpus": "stories:200", "device": "cpu", "batch_size": 4,
    "model": {"layers": 1, "heads": 1, "width": 8, "context": 8}, "log_every": 1, "steps": 10_000, "eval_samples": 4,
    "tensorboard": False, "checkpoint": {"every": 2}, "resume": "auto"})

def main(world):
    with open(f"up.{os.getpid()}", "w"):
        pass
    with observe(lambda edge: time.sleep(0.1 * (edge.name == "forward" and edge.entered))):
        train(world, config)

run(main, device="cpu")
"""


def agent(folder: Path, port: int, log: str) -> "subprocess.Popen[Any]":
    """Start torchrun with one rank. While a different agent has the slot, it waits as a spare. Its timeout is short."""
    (folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=0"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one", "--local-addr=127.0.0.1"]
    command += ["--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5", "slow.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), TORCHRUN: str(folder)}
    with (folder / log).open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, env=environment, start_new_session=True)


def until(holds: Callable[[], object], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def steps(folder: Path) -> int:
    log = folder / "runs" / "mine" / "metrics.jsonl"
    return len(log.read_bytes().splitlines()) if log.exists() else 0


def workers(folder: Path) -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob("up.*")]


def test_two_disconnected_agents_never_write_one_folder_concurrently(workdir: Path) -> None:
    """The first agent is stopped, so that the second considers it dead and starts a rank, while the rank of the first
    still trains. The second rank must reject the folder. After the first agent is killed with its rank, the folder is
    free.
    """
    store = server()
    first = agent(workdir, store.port, "first.log")
    agents = [first]
    try:
        until(lambda: steps(workdir) > 2, "the first world trains")
        second = agent(workdir, store.port, "second.log")
        agents.append(second)
        time.sleep(2)
        [worker] = workers(workdir)  # the second is a spare
        first.send_signal(signal.SIGSTOP)
        until(lambda: "is in use by another run" in (workdir / "second.log").read_text(), "the second one refuses")
        before = steps(workdir)
        assert not is_gone(worker)
        until(lambda: steps(workdir) > before + 2, "the first world trains on")
        assert second.wait(150) != 0
        assert steps(workdir) > before
        first.kill()
        first.wait()
        until(lambda: all(map(is_gone, workers(workdir))), "no rank is left")
        with locked(workdir / "runs" / "mine"):
            pass
    finally:
        for each in agents:
            kill_torchrun(each, str(workdir))


# ------------------------------------------------------------------------------------------------- one node, two, one

ELASTIC = """
import json, os, time
from ddp_tutorial import TaskConfig, observe, run, train

config = TaskConfig.model_validate({"name": "mine", "corpus": "stories:200", "device": "cpu", "batch_size": 4,
    "model": {"layers": 1, "heads": 1, "width": 8, "context": 8}, "log_every": 1, "steps": 10_000, "eval_samples": 4,
    "tensorboard": False, "checkpoint": {"every": 2}, "resume": "auto", "collective_timeout": 20})

def main(world):
    with open("worlds.jsonl", "a") as file:  # one line for each rank that joins
        joined = {"rank": world.rank, "size": world.size, "agent": os.getppid()}
        file.write(json.dumps(joined | {"restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\\n")
    with observe(lambda edge: time.sleep(0.05 * (edge.name == "forward" and edge.entered))):
        train(world, config)

run(main, device="cpu")
"""


def elastic_agent(folder: Path, port: int, log: str) -> "subprocess.Popen[Any]":
    """Start torchrun for one or two nodes, as in the user guide, with a new store for each attempt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one", "--local-addr=127.0.0.1"]
    command += ["--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), TORCHRUN: str(folder)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / log).open("w") as file:
        return subprocess.Popen(
            [*command, "elastic.py"], stdout=file, stderr=file, cwd=folder, env=environment, start_new_session=True
        )


def test_an_elastic_run_grows_and_shrinks_by_a_node(workdir: Path) -> None:
    """Every step is taken once, each rank knows its world, and an agent that is asked to stop exits cleanly."""
    (workdir / "elastic.py").write_text(ELASTIC)
    run, store, agents = workdir / "runs" / "mine", server(), []

    def read_notes() -> list[dict[str, int]]:
        path = workdir / "worlds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trains_with(size: int, attempts: int) -> bool:
        """Return whether rank 0 of such a world has taken steps after this number of ranks have started."""
        assert agents[0].poll() is None, (workdir / "first.log").read_text()[-3000:]
        now = read_notes()
        if len(now) < attempts or now[-1]["size"] != size:
            return False
        nonlocal before
        before = before or steps(workdir)
        return steps(workdir) > before + 3

    try:
        for number, (size, attempts) in enumerate([(1, 1), (2, 3), (1, 4)]):
            if number < 2:
                agents.append(elastic_agent(workdir, store.port, f"{('first', 'second')[number]}.log"))
            else:
                agents[1].kill()  # SIGTERM would be forwarded to its rank and stop the run
            before = 0
            until(lambda size=size, attempts=attempts: trains_with(size, attempts), f"a world of {size}", 180)  # type: ignore[misc]
        request_stop(run, "save")
        assert agents[0].wait(150) == 0, (workdir / "first.log").read_text()[-3000:]
    finally:
        for each in agents:
            kill_torchrun(each, str(workdir))
    first, second = (each.pid for each in agents)
    attempts = read_notes()
    assert [each["size"] for each in attempts] == [1, 2, 2, 1]
    assert {(each["agent"], each["size"]) for each in attempts} == {(first, 1), (first, 2), (second, 2)}
    assert sorted(each["rank"] for each in attempts[1:3]) == [0, 1]
    assert [each["restarts"] for each in attempts if each["agent"] == first] == [0, 0, 1], "growing is no failure"
    rows = [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert rows == list(range(1, len(rows) + 1))
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["world_size"], result["step"]) == ("stopped", 1, rows[-1])
