"""Mutation testing: `python -m tests.mutate ROOM ...` changes one thing in a subpackage, and its tests must fail.

mutmut and cosmic-ray are not suitable. mutmut does not change decorated functions and module-level code, and detects
the tests that execute a function in one process only, not in ranks. cosmic-ray starts all tests in a new Python for
each mutant, which takes minutes instead of seconds.

A mutant that changes nothing observable is explained in explained.toml, and does not count.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from .operators import Mutant, mutants
from .recording import ANY, covering, recorded
from .running import Copy, Outcome, file_of, preload

_copy: Copy  # of a worker


@dataclass(frozen=True)
class Room:
    """Source files, as patterns in the package, and the test modules that must detect a change of them."""

    patterns: str
    modules: str
    package: str = "ddp_tutorial"
    root: Path = Path(__file__).parent.parent.parent

    def sources(self) -> dict[str, str]:
        """Return the text of each source file, by its path relative to the root."""
        paths = sorted(path for each in self.patterns.split() for path in (self.root / self.package).glob(each))
        return {str(path.relative_to(self.root)): path.read_text() for path in paths}

    def tests(self) -> list[str]:
        return [f"tests/test_{module}.py" for module in self.modules.split()]


ROOMS = {
    "files": Room("files.py", "files checkpoint manifest retention logs"),
    "world": Room("world.py environment.py slurm/step.py", "world restarts collectives_metrics"),
    "collectives": Room("collectives.py", "collectives_metrics world"),
    "sharding": Room("sharding/*.py", "sharding corpus data sources any_dataset unshared_storage"),
    "ddp": Room("ddp/*.py", "ddp all_reduce buckets hooks link shared_memory sync_bn"),
    "accumulation": Room("accumulation/*.py", "accumulation accelerate model out_of_memory precision ddp"),
    "checkpoint": Room(
        "checkpoint/*.py", "checkpoint manifest retention resume resume_allow rng export unshared_storage"
    ),
}


@dataclass(frozen=True)
class Result:
    """The result of a mutant: killed (by a test), survived (the tests that pass) or explained (the reason)."""

    place: str
    before: str
    after: str
    result: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Recording:
    """The tests that pass without a mutation, their durations, and the tests that execute each line."""

    seconds: dict[str, float]
    tests: dict[str, set[str]]

    def select(self, mutant: Mutant) -> list[str]:
        """Return the tests to run, by file: first the tests that execute the mutated line, the fastest first.

        Tests of a file may share a result, such as a launch: one test executes the line and a different test checks the
        result. Therefore, the other tests of the file follow.
        """
        named = self.tests.get(f"{mutant.file}:{mutant.line}", set())
        files = {file_of(test) for test in (self.seconds if ANY in named else named)}
        chosen = [test for test in self.seconds if file_of(test) in files]
        cost: Counter[str] = Counter()
        for test in chosen:
            cost[file_of(test)] += self.seconds[test]
        return sorted(
            chosen, key=lambda test: (cost[file_of(test)], file_of(test), test not in named, self.seconds[test])
        )

    def limit(self, test: str) -> float:
        """Return the timeout of a test in seconds. A test may have to repeat the setup of an earlier test."""
        slowest = max((each for name, each in self.seconds.items() if file_of(name) == file_of(test)), default=10.0)
        return 20 + 5 * slowest


def run_room(room: Room, count: int, seed: int, jobs: int) -> list[Result]:
    """Run at least `count` mutants of a room, and print those that survive."""
    sources, reasons = room.sources(), _explained(room)
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="mutate-") as folder,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _start_worker, (room, folder)) as pool,
    ):
        recording = _join(pool.map(_record, room.tests(), [sources] * len(room.tests())))
        drawn = sample(sources, count, seed)
        for result in pool.map(_judge, drawn, [recording] * len(drawn), [reasons] * len(drawn)):
            results.append(result)
            if result.result == "survived":
                print(f"{result.place}: {result.detail}\n- {result.before}\n+ {result.after}\n", flush=True)
    return results


def sample(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """Draw at least `count` mutants, from each file in proportion to its number of mutants.

    The draw hashes each mutant, so that an edit elsewhere in its file does not change the sample.
    """
    found = [mutants(file, source) for file, source in sources.items()]
    total, drawn = sum(map(len, found)), []
    for each in found:
        each.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.before} {mutant.after}".encode()).digest())
        drawn += sorted(each[: math.ceil(count * len(each) / total)], key=lambda mutant: mutant.line)
    return drawn


def _start_worker(room: Room, folder: str) -> None:
    global _copy
    _copy = Copy(room.root, room.package, Path(tempfile.mkdtemp(dir=folder)))


def _record(test: str, sources: dict[str, str]) -> tuple[list[Outcome], dict[str, set[str]]]:
    hits = _copy.folder.with_name("hits")
    hits.write_text("")
    with _copy.changed({file: recorded(source, file, str(hits)) for file, source in sources.items()}):
        return list(_copy.run([test], lambda test: 600, go_on=True)), covering(hits.read_text())


def _join(recordings) -> Recording:
    joined = Recording({}, defaultdict(set))
    for outcomes, tests in recordings:
        for outcome in outcomes:
            if outcome.result == "passed":
                joined.seconds[outcome.test] = outcome.seconds
            elif outcome.result != "skipped":
                print(f"left out: {outcome.test} {outcome.result} without a mutation", file=sys.stderr)
        for line, names in tests.items():
            joined.tests[line] |= names
    return joined


def _judge(mutant: Mutant, recording: Recording, reasons: dict[tuple[str, str, str], str]) -> Result:
    as_result = partial(Result, f"{mutant.file}:{mutant.line}", mutant.before, mutant.after)
    if reason := reasons.get((mutant.file, mutant.before, mutant.after)):
        return as_result("explained", reason)
    if not (tests := recording.select(mutant)):
        return as_result("survived", "no test executes it")
    began = time.monotonic()
    with _copy.changed({mutant.file: mutant.source}):
        *_, last = _copy.run(tests, recording.limit)
    seconds = time.monotonic() - began
    if last.result in ("failed", "timeout", "crashed"):
        return as_result("killed", f"{last.result} {last.test}", seconds)
    return as_result("survived", f"{len(tests)} tests pass", seconds)


def _explained(room: Room) -> dict[tuple[str, str, str], str]:
    """Return the reasons of explained mutants, all of which must exist."""
    path = room.root / "tests/mutate/explained.toml"
    sources = room.sources()
    entries = tomllib.loads(path.read_text())["mutant"] if path.exists() else []
    reasons = {
        (each["file"], each["before"], each["after"]): each["reason"] for each in entries if each["file"] in sources
    }
    existing = {(file, each.before, each.after) for file, text in sources.items() for each in mutants(file, text)}
    if gone := reasons.keys() - existing:
        raise SystemExit(f"{path} explains mutants that do not exist. Remove or update these: {sorted(gone)}")
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"{', '.join(ROOMS)}; all of them by default")
    parser.add_argument("--mutants", type=int, default=40, help="how many mutants to draw in each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to run at once")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.rooms) - ROOMS.keys():
        parser.error(f"unknown room: {', '.join(unknown)}; expected one of {', '.join(ROOMS)}")
    preload()
    found = {}
    for name in arguments.rooms or ROOMS:
        began = time.monotonic()
        results = run_room(ROOMS[name], arguments.mutants, arguments.seed, arguments.jobs)
        found[name] = [asdict(result) for result in results]
        counts = Counter(result.result for result in results)
        score = counts["killed"] / max(counts["killed"] + counts["survived"], 1)
        counted = ", ".join(f"{counts[kind]} {kind}" for kind in ("killed", "explained", "survived"))
        print(
            f"{name}: {counted} of {len(results)}; {score:.0%} killed in {time.monotonic() - began:.0f} s", flush=True
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
