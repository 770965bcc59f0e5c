"""Exercises on printing once, building one cache per node, and a small torchrun, for notebook 01_processes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ddp_tutorial.exercises import Answer, Exercise, expect, on_ranks
from ddp_tutorial.world import World

# -------------------------------------------------------------------------------------------------------- 1. print once


def _run_announce(world: World, answer: Answer) -> tuple[float, list[str]]:
    """Return the answer's result and the lines that the answer printed on this rank."""
    printed: list[str] = []
    result = answer(world, float(world.rank + 1), printed.append)
    return result, printed


def _test_announce(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the collective."
    results = on_ranks(_run_announce, 3, answer, stuck=stuck, timeout=12)
    for rank, (result, _) in enumerate(results):
        expect(result == 6.0, f"The ranks hold 1, 2 and 3, so the total must be 6, got {result} on rank {rank}.")
    lines = [line for _, printed in results for line in printed]
    expect(len(lines) == 1, f"All ranks together must print one line, got {len(lines)}: {lines}")
    expect(bool(results[0][1]), "Print the line on rank 0, the only rank that exists at every world size.")
    expect("6" in str(lines[0]), f"The line must contain the total, 6, got {lines[0]!r}.")
    return "All ranks return the total, and rank 0 prints it."


def _announce(world: World, value: float, say: Callable[[str], None]) -> float:
    summed = torch.tensor(value)
    dist.all_reduce(summed)  # on all ranks
    if world.rank == 0:  # print once
        say(f"total {summed.item()}")
    return float(summed)


def _everyone_says(world: World, value: float, say: Callable[[str], None]) -> float:
    summed = torch.tensor(value)
    dist.all_reduce(summed)
    say(f"total {summed.item()}")
    return float(summed)


def _collective_on_one_rank(world: World, value: float, say: Callable[[str], None]) -> float:
    summed = torch.tensor(value)
    if world.rank == 0:
        dist.all_reduce(summed)
        say(f"total {summed.item()}")
    return float(summed)


def _before_the_collective(world: World, value: float, say: Callable[[str], None]) -> float:
    summed = torch.tensor(value)
    if world.rank == 0:
        say(f"total {summed.item()}")
    dist.all_reduce(summed)
    return float(summed)


announce = Exercise(
    task="announce(world, value, say): return the sum of value over all ranks, and report the sum once, with "
    "say(text) on rank 0.",
    test=_test_announce,
    solution=_announce,
    wrong={
        "prints on all ranks": _everyone_says,
        "enters the collective on rank 0 only": _collective_on_one_rank,
        "prints before the collective": _before_the_collective,
    },
    hints=(
        "Answer two different questions. Which ranks participate in the all-reduce, and which rank prints?",
        "All ranks participate, so call dist.all_reduce outside the `if`.",
    ),
)

# --------------------------------------------------------------------------------------- 2. build a cache once per node


def _run_build_once(world: World, answer: Answer, folder: str) -> tuple[str, bool]:
    """Return the answer's result and whether this rank built the cache. While `build` runs, the cache is incomplete.

    Ranks 0 and 1 are on node 0, and ranks 2 and 3 are on node 1. At the start, only node 1 has the cache.
    """
    node, local_rank = divmod(world.rank, 2)
    path, built = Path(folder) / f"node{node}.txt", False

    def build() -> None:
        nonlocal built
        built = True
        path.write_text("half of it")
        time.sleep(1.0)
        path.write_text("all of it")

    if world.rank == 2:
        path.write_text("all of it")
    dist.barrier()  # otherwise a late rank would find the complete cache without having waited for it
    return answer(replace(world, local_rank=local_rank, local_size=2), path, build), built


def _test_build_once(answer: Answer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        stuck = "A rank waits forever. A barrier returns only when every rank has entered it."
        results = on_ranks(_run_build_once, 4, answer, folder, stuck=stuck, timeout=20)
    builders = [rank for rank, (_, built) in enumerate(results) if built]
    expect(2 not in builders, "Rank 2 called build(), although its node already has the cache.")
    expect(builders == [0], f"On node 0, only local rank 0 must call build(), got calls on ranks {builders}.")
    for rank, (text, _) in enumerate(results):
        expect(text == "all of it", f"Rank {rank} read {text!r}, because it did not wait until the cache was complete.")
    return "Node 0 built its cache once, node 1 used the existing one, and all ranks read a complete cache."


def _build_once(world: World, path: Path, build: Callable[[], None]) -> str:
    if world.local_rank == 0 and not path.exists():
        build()
    dist.barrier()  # outside the `if`, because all ranks on all nodes must enter it
    return path.read_text()


def _no_barrier(world: World, path: Path, build: Callable[[], None]) -> str:
    if world.local_rank == 0 and not path.exists():
        build()
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def _everyone_builds(world: World, path: Path, build: Callable[[], None]) -> str:
    missing = not path.exists()
    dist.barrier()  # every rank has checked for the cache before one of them builds it
    if missing:
        build()
    dist.barrier()
    return path.read_text()


def _always_builds(world: World, path: Path, build: Callable[[], None]) -> str:
    if world.local_rank == 0:
        build()
    dist.barrier()
    return path.read_text()


def _barrier_on_one_node(world: World, path: Path, build: Callable[[], None]) -> str:
    if not path.exists():
        if world.local_rank == 0:
            build()
        dist.barrier()
    return path.read_text()


build_once = Exercise(
    task=(
        "build_once(world, path, build): if path does not exist, local rank 0 of the node calls build(), and the "
        "other ranks wait. All ranks return path.read_text()."
    ),
    test=_test_build_once,
    solution=_build_once,
    wrong={
        "does not wait until it is complete": _no_barrier,
        "builds on every rank": _everyone_builds,
        "builds although the cache exists": _always_builds,
        "enters the barrier on one node only": _barrier_on_one_node,
    },
    hints=(
        "world.local_rank is 0 on one rank of each node. A file that exists may still be incomplete.",
        "dist.barrier() blocks each rank until all ranks of all nodes have entered it.",
        "Some nodes have the file and others do not. Which lines must run on all nodes?",
    ),
)

# ------------------------------------------------------------------------------------------------- 3. a small torchrun

# A worker records its environment, waits for the other workers of its attempt, and follows the plan. `plan[attempt]`
# is the rank that exits with code 3, or null. If a rank fails, the other ranks keep running; rank 0 ignores SIGTERM.
_WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder, plan, wait, busy = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]
found = {name: os.environ.get(name) for name in names}
attempt, rank = int(found["TORCHELASTIC_RESTART_COUNT"] or 0), found["RANK"]
fails = plan[attempt] if attempt < len(plan) else None
if fails is not None and rank == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
part = folder / f"{os.getpid()}.part"
part.write_text(json.dumps(found | {"pid": os.getpid()}))
part.rename(folder / f"{attempt}-{rank}-{os.getpid()}.json")
deadline = time.monotonic() + wait
while len(list(folder.glob(f"{attempt}-*.json"))) < int(found["WORLD_SIZE"] or 1):
    if time.monotonic() > deadline:
        sys.exit(4)
    time.sleep(0.02)
if fails is not None:
    if rank == str(fails):
        sys.exit(3)
    time.sleep(busy)
    (folder / f"survivor {rank}").touch()
"""
_TORCH_WORKER = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
number = torch.ones(1)
dist.all_reduce(number)
assert number.item() == 2
dist.destroy_process_group()
"""
_WAIT, _BUSY = 5, 5  # seconds to wait for the other workers, and to keep running after a peer has failed
_JOIN = 30.0  # timeout of init_process_group, in seconds


def _test_mini_torchrun(answer: Answer) -> str:
    codes, found = _workers(answer, 3, [None])
    _check_environments(found, 3)
    expect(codes == [0, 0, 0], f"All three workers exited with code 0, so return [0, 0, 0], got {codes}.")

    codes, found = _workers(answer, 2, [1, 1, 1])
    expect(len(found) == 2, f"With max_restarts=0, both workers must be started once, got {len(found)} starts.")
    expect(
        codes[1] == 3 and codes[0] != 0,
        f"Rank 1 exited with code 3 and rank 0 was stopped, but your function returned {codes}.",
    )

    codes, found = _workers(answer, 2, [1, 1, None], max_restarts=3)
    attempts = sorted(int(each["TORCHELASTIC_RESTART_COUNT"]) for each in found)
    expect(
        attempts == [0, 0, 1, 1, 2, 2],
        "After a failure, all ranks must be restarted with TORCHELASTIC_RESTART_COUNT=1, then 2, because the surviving "
        "ranks still wait for the failed process. Do not restart ranks after a success. With max_restarts=3 and two "
        "failures, the restart counts of the started workers must be [0, 0, 1, 1, 2, 2], got "
        f"{attempts}.",
    )
    expect(codes == [0, 0], f"The third attempt succeeded on both ranks, so return [0, 0], got {codes}.")

    codes = list(answer([sys.executable, "-c", _TORCH_WORKER, str(_JOIN)], 2))
    expect(
        codes == [0, 0],
        f"Two workers that call init_process_group and all_reduce must exit with code 0, got codes {codes}.",
    )
    return "The ranks find each other, a failure stops all ranks, and a restart starts all ranks."


def _workers(answer: Answer, nprocs: int, plan: list[int | None], **options: int) -> tuple[list[int], list[Any]]:
    """Run the answer on test workers. Return the answer's result and the environment of each started worker."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        with suppress(OSError):  # a different program may use the port already
            stack.enter_context(socket.create_server(("127.0.0.1", 29500)))
        settings = [json.dumps(each) for each in (plan, _WAIT, _BUSY)]
        codes = answer([sys.executable, "-c", _WORKER, folder, *settings], nprocs, **options)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        survivors = sorted(path.name for path in Path(folder).glob("survivor*"))
    lacking = sorted({name for each in found for name, value in each.items() if value is None})
    expect(bool(found), "No worker was started.")
    expect(not lacking, f"The workers lack the environment variables {', '.join(lacking)}.")
    expect(
        4 not in list(codes),
        f"A worker waited {_WAIT} seconds for the other workers, and then exited with code 4. Start all workers "
        "before you wait for any of them. Only these ranks were started: "
        f"{sorted({int(each['RANK']) for each in found})}.",
    )
    expect(
        not survivors,
        "Rank 1 exited with code 3, but rank 0 kept running until it finished by itself. Stop rank 0 with SIGTERM, "
        "and with SIGKILL if it has not exited one second later.",
    )
    alive = [each["RANK"] for each in found if _is_running(each["pid"])]
    expect(not alive, f"When your function returns, no worker may be running, but ranks {alive} still are.")
    return list(codes), found


def _check_environments(found: list[dict[str, str]], size: int) -> None:
    ranks = sorted(int(each["RANK"]) for each in found)
    expect(ranks == list(range(size)), f"The ranks must be {list(range(size))}, got {ranks}.")
    for each in found:
        rank = each["RANK"]
        expect(each["LOCAL_RANK"] == rank, f"On one node, LOCAL_RANK must equal RANK, got {each}.")
        expect(each["WORLD_SIZE"] == str(size), f"WORLD_SIZE must be {size}, got {each['WORLD_SIZE']} on rank {rank}.")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        values = sorted({each[name] for each in found})
        expect(len(values) == 1, f"{name} must be the same on all ranks, got {values}.")
    port = found[0]["MASTER_PORT"]
    expect(port != "29500", "Port 29500 is in use. Let the operating system choose a free port, as this notebook does.")


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _mini_torchrun(command: list[str], nprocs: int, max_restarts: int = 0) -> list[int]:
    codes: list[int] = []
    for attempt in range(max_restarts + 1):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(nprocs):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nprocs, "MASTER_PORT": port}
                own |= {"TORCHELASTIC_RESTART_COUNT": attempt}
                environ = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
                ranks.append(subprocess.Popen(command, env=os.environ | environ))
            while not any(process.poll() for process in ranks) and None in [process.poll() for process in ranks]:
                time.sleep(0.05)
        finally:  # runs also if the user interrupts the cell
            for process in ranks:
                process.terminate()  # has no effect on a process that has exited
            deadline = time.monotonic() + 1
            while None in [process.poll() for process in ranks] and time.monotonic() < deadline:
                time.sleep(0.05)
            for process in ranks:
                process.kill()
            codes = [process.wait() for process in ranks]
        if not any(codes):
            break
    return codes


def _wrong_torchrun(
    sequential: bool = False, port: int = 0, stop: str = "all", restart: str = "once", world_size: int = 0
) -> Answer:
    """Return a variant of the solution with one mistake. By default, the variant restarts at most once."""

    def start(command: list[str], rank: int, nprocs: int, attempt: int, chosen: int) -> "subprocess.Popen[bytes]":
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size or nprocs, "MASTER_PORT": port or chosen}
        own |= {"TORCHELASTIC_RESTART_COUNT": attempt}
        environ = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen(command, env=os.environ | environ)

    def attempt_all(command: list[str], nprocs: int, attempt: int, chosen: int) -> list["subprocess.Popen[bytes]"]:
        ranks = []
        for rank in range(nprocs):
            ranks.append(start(command, rank, nprocs, attempt, chosen))
            if sequential and ranks[-1].wait():
                break
        while not any(process.poll() for process in ranks) and None in [process.poll() for process in ranks]:
            time.sleep(0.05)
        return ranks

    def stop_all(ranks: list["subprocess.Popen[bytes]"]) -> list[int]:
        for process in ranks:
            if stop != "nothing":
                process.terminate()
        if stop == "all":
            time.sleep(1.0)
            for process in ranks:
                process.kill()
        return [process.wait() for process in ranks]

    def mini_torchrun(command: list[str], nprocs: int, max_restarts: int = 0) -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            chosen = probe.getsockname()[1]
        ranks = attempt_all(command, nprocs, 0, chosen)
        if max_restarts and restart == "failed":
            ranks = [
                start(command, rank, nprocs, 1, chosen) if process.poll() else process
                for rank, process in enumerate(ranks)
            ]
            return [process.wait() for process in ranks]
        codes = stop_all(ranks)
        for attempt in range(1, 1 + {"nothing": 0, "once": min(1, max_restarts)}.get(restart, max_restarts)):
            if any(codes) or restart == "always":
                codes = stop_all(attempt_all(command, nprocs, attempt, chosen))
        return codes

    return mini_torchrun


mini_torchrun = Exercise(
    task=(
        "mini_torchrun(command, nprocs, max_restarts=0): start nprocs processes of command (a list for "
        "subprocess.Popen), each with the environment variables of its rank. If a process fails, stop the other "
        "processes and restart all of them, at most max_restarts times. Return the exit codes of the last attempt, "
        "in rank order."
    ),
    test=_test_mini_torchrun,
    solution=_mini_torchrun,
    wrong={
        "starts a rank after the previous one has exited": _wrong_torchrun(sequential=True),
        "always uses the same port": _wrong_torchrun(port=29500),
        "passes a wrong WORLD_SIZE": _wrong_torchrun(world_size=2),
        "lets the other ranks run after a failure": _wrong_torchrun(stop="nothing"),
        "relies on SIGTERM": _wrong_torchrun(stop="SIGTERM"),
        "does not restart": _wrong_torchrun(restart="nothing"),
        "restarts at most once": _wrong_torchrun(),
        "restarts after a success": _wrong_torchrun(restart="always"),
        "restarts the failed rank only": _wrong_torchrun(restart="failed"),
    },
    hints=(
        "Each rank needs six variables: the four in this notebook, LOCAL_RANK, and TORCHELASTIC_RESTART_COUNT, "
        "which is the index of the attempt, starting at 0. All values are strings.",
        "Start all ranks, then poll all of them every 0.05 s. Popen.poll() returns None while a process runs, and "
        "its exit code afterward.",
        "Stop ranks with terminate() (SIGTERM). A rank may ignore SIGTERM, so call kill() (SIGKILL) one second later.",
        "Stop the ranks in a `finally` block, so that no rank keeps running if you interrupt the cell.",
    ),
)
