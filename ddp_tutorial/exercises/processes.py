"""Exercises of 01_processes: which rank prints, which rank builds a cache, and how ranks find one another."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_tutorial.collectives import rank_zero_first
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# -------------------------------------------------------------------------------------------------------- 1. print once


def _run_announce(world: World, answer: Answer) -> tuple[float, list[str]]:
    """Return the answer's result and the lines it printed on this rank."""
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
    task="announce(world, value, say): return the total of value over all ranks; say(text) it once, from rank 0.",
    test=_test_announce,
    solution=_announce,
    wrong={
        "prints on all ranks": _everyone_says,
        "enters the collective on rank 0 only": _collective_on_one_rank,
        "prints before the collective": _before_the_collective,
    },
    hints=(
        "Answer two different questions: which ranks take part in the all-reduce, and which rank prints?",
        "All ranks take part, so call dist.all_reduce outside the `if`.",
    ),
)

# ------------------------------------------------------------------------------------------------ 2. build a cache once


def _run_build_once(world: World, answer: Answer, folder: str) -> tuple[str, bool]:
    """Return the answer's result and whether this rank built the cache. While `build` runs, the cache is incomplete."""
    path, built = Path(folder) / "cache.txt", False

    def build() -> None:
        nonlocal built
        built = True
        path.write_text("half of it")
        time.sleep(1.0)
        path.write_text("all of it")

    dist.barrier()  # otherwise a late rank would find the complete cache without having waited for it
    return answer(world, path, build), built


def _test_build_once(answer: Answer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        stuck = "A rank waits forever. A barrier returns only when every rank has entered it."
        results = on_ranks(_run_build_once, 2, answer, folder, stuck=stuck, timeout=12)
    builders = [rank for rank, (_, built) in enumerate(results) if built]
    expect(builders == [0], f"Only rank 0 must call build(), got calls on ranks {builders}.")
    for rank, (text, _) in enumerate(results):
        expect(text == "all of it", f"Rank {rank} read {text!r}: it did not wait until the cache was complete.")
    return "Rank 0 built the cache, the other ranks waited for it, and all ranks read the same text."


def _build_once(world: World, path: Path, build: Callable[[], None]) -> str:
    with rank_zero_first(world):
        if not path.exists():  # true on rank 0 only: the other ranks enter later
            build()
    return path.read_text()


def _no_barrier(world: World, path: Path, build: Callable[[], None]) -> str:
    if world.rank == 0:
        build()
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def _everyone_builds(world: World, path: Path, build: Callable[[], None]) -> str:
    build()
    dist.barrier()
    return path.read_text()


def _barrier_on_one_side(world: World, path: Path, build: Callable[[], None]) -> str:
    if world.rank == 0:
        build()
        return path.read_text()
    dist.barrier()
    return path.read_text()


build_once = Exercise(
    task="build_once(world, path, build): rank 0 calls build(), the others wait; all return path.read_text().",
    test=_test_build_once,
    solution=_build_once,
    wrong={
        "does not wait until it is complete": _no_barrier,
        "builds on every rank": _everyone_builds,
        "calls a barrier that rank 0 never enters": _barrier_on_one_side,
    },
    hints=(
        "A file that exists may still be incomplete.",
        "dist.barrier() blocks each rank until all ranks have entered it. What must rank 0 do before it enters?",
    ),
)

# ---------------------------------------------------------------------------------------- 3. how ranks find one another


def _test_rendezvous(answer: Answer) -> str:
    for size in (2, 4):
        worlds: list[Mapping[str, str]] = [answer(rank, size, 29511) for rank in range(size)]
        for rank, environ in enumerate(worlds):
            odd = {key: value for key, value in environ.items() if not isinstance(value, str)}
            expect(not odd, f"Environment variables must be strings, got {odd} on rank {rank}.")
            lacking = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(environ)
            expect(not lacking, f"Rank {rank} lacks {', '.join(sorted(lacking))}.")
            try:
                world = World.detect(environ, device="cpu")
            except ValueError as error:
                raise WrongAnswerError(f"Rank {rank} of {size} cannot start: {error}.") from None
            expect(
                (world.rank, world.size) == (rank, size), f"Rank {rank} of {size} detects a different world: {world}."
            )
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            values = {environ[name] for environ in worlds}
            expect(len(values) == 1, f"{name} must be the same on all ranks, got {sorted(values)}.")
        port = worlds[0]["MASTER_PORT"]
        expect(port == "29511", f"MASTER_PORT must be the given port, 29511, got {port}.")
    return "Every rank knows its rank, the world size, and the address and port of the rendezvous."


def _rendezvous(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _numbers_not_text(rank: int, size: int, port: int) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _a_port_each(rank: int, size: int, port: int) -> dict[str, str]:
    return _rendezvous(rank, size, port + rank)


def _ranks_from_one(rank: int, size: int, port: int) -> dict[str, str]:
    return _rendezvous(rank + 1, size, port)


def _fixed_port(rank: int, size: int, port: int) -> dict[str, str]:
    return _rendezvous(rank, size, 29500)


def _no_address(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}


rendezvous = Exercise(
    task="rendezvous(rank, size, port): return the environment variables that this rank needs to find the others.",
    test=_test_rendezvous,
    solution=_rendezvous,
    wrong={
        "returns numbers instead of strings": _numbers_not_text,
        "gives each rank its own port": _a_port_each,
        "counts ranks from one": _ranks_from_one,
        "leaves out the address": _no_address,
        "always uses the same port": _fixed_port,
    },
    hints=(
        "There are four variables, and only one of them differs between the ranks.",
        "The variables are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
    ),
)
