"""Killed ranks, failing and full disks, separate nodes: no run loses anything.

The benchmark that tests this detects violations.
"""

import errno
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_tutorial.benches import attempts
from ddp_tutorial.benches.attempts import (
    PlannedFailure,
    Points,
    config_of,
    newest_valid,
    outcome,
    ranks_served,
    run_attempt,
)
from ddp_tutorial.benches.chaos import NODES, describe, is_good, measure_chaos
from ddp_tutorial.benches.small_disk import empty, fill_up, limit_files, mount_small_disk
from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, list_checkpoints
from ddp_tutorial.files import RUNS

MB = 1 << 20


def processes() -> set[psutil.Process]:
    """Return the processes that this process has started, without Python's own, which runs until the end."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # a process of an earlier test, which has just exited
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    before = processes()
    return measure_chaos(24, seed=1, fills=8, two_nodes=4) | {"left": processes() - before}


def test_runs_are_unaffected_by_kills_and_failing_or_full_disks(found: Any) -> None:
    assert found["kills"] >= 24
    assert found["failures"] >= 3
    assert found["points"] >= 20
    assert found["in_saving"] >= 5
    assert found["resumed"] >= 12
    assert found["bit_equal"] is True
    assert found["lost"] == 0
    assert found["leftover_processes"] == 0
    assert is_good(found)


def test_no_process_is_left_after_the_chaos_benchmark(found: Any) -> None:
    assert found["left"] == set()


def test_all_ranks_reject_nodes_without_a_shared_folder(found: Any) -> None:
    assert {found["attempts"][f"two nodes: {nodes}"] for nodes in NODES} == {1}
    assert found["attempts"]["two nodes"] == 4
    assert found["not_rejected"] == 0


def test_a_full_disk_made_attempts_fail(found: Any) -> None:
    full = found["full_disk"]
    assert found["attempts"].get("fill", 0) + found["attempts"].get("limit", 0) == 8
    assert full["ended"] >= 4
    if full["not_possible"]:
        assert full["by"] == "a file size limit"
        assert full["not_possible"] in describe(found)
    else:
        assert full["by"] == "a 4 MB tmpfs"


@pytest.mark.parametrize("requirement", ["bit_equal", "lost", "not_rejected", "leftover_processes"])
def test_one_violated_requirement_is_reported(requirement: str) -> None:
    good = {"bit_equal": True, "lost": 0, "not_rejected": 0, "leftover_processes": 0}
    assert is_good(good)
    assert not is_good(good | {requirement: 1 if requirement != "bit_equal" else False})


def test_the_report_says_if_there_was_no_small_disk() -> None:
    found = measure_chaos(0, fills=1, two_nodes=1, mount=_refused)
    assert (found["attempts"]["limit"], found["attempts"]["two nodes"]) == (1, 1)
    assert found["full_disk"]["by"] == "a file size limit"
    assert found["full_disk"]["not_possible"] == "a full disk was not tested: not here"
    assert is_good(found)


def _refused(folder: Path, nbytes: int) -> str:
    return "not here"


# --------------------------------------------------------------------------------------------------- one life of a run


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with ranks_served():
        yield


@pytest.fixture
def here(workdir: Path, server: None) -> Path:
    return Path.cwd()


def test_a_failure_happens_at_its_point_and_the_next_attempt_resumes(here: Path) -> None:
    first = run_attempt(config_of("mine"), {0: PlannedFailure("rename step", 2)})
    assert (first.point, first.in_saving, first.is_well, first.published) == ("rename step", True, False, 2)
    assert newest_valid(RUNS / "mine" / CHECKPOINTS) == 2
    assert outcome("mine") is None
    second = run_attempt(config_of("mine"))
    assert second.is_well
    assert second.seen[0]["+load"] == 1
    run_attempt(config_of("other"))
    assert outcome("mine") == outcome("other")


def test_an_attempt_that_fails_without_an_injected_failure_is_an_error(here: Path) -> None:
    (here / RUNS).write_text("a file where a folder should be")
    with pytest.raises(RuntimeError, match=r"mine exited with .* without an injected failure"):
        run_attempt(config_of("mine"))


def test_a_run_that_hangs_is_reported_with_its_stack(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "TIME_LIMIT", 0.1)
    with pytest.raises(RuntimeError, match=r"mine timed out after 0.1 s. Injected failures: none"):
        run_attempt(config_of("mine"))


def test_an_interrupted_attempt_leaves_no_rank(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attempts.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_attempt(config_of("mine"))
    assert active_children() == []


def test_a_process_that_outlives_its_run_is_counted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "GRACE_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=here) as process:
        assert run_attempt(config_of("mine"), {0: PlannedFailure("+forward", 1)}).left == 1
        process.kill()
    assert run_attempt(config_of("mine"), {0: PlannedFailure("+forward", 1)}).left == 0


def test_an_unreached_point_is_retried_and_each_point_is_used_once() -> None:
    points = Points(random.Random(0), {(0, "+save"): 3, (1, "fsync rng.pt"): 1, (0, "read optimizer.pt"): 1})
    taken = [points.next("kill")[:2] for _ in range(3)]
    assert sorted(taken) == sorted(points.known)
    points.put_back("kill", 0, "+save")
    assert points.next("kill")[:2] == (0, "+save")
    assert {points.next("fill")[1] for _ in range(20)} == {"fsync rng.pt", "read optimizer.pt"}


# -------------------------------------------------------------------------------------------------------- a small disk


def in_a_process(fn: Any, folder: Path) -> Any:
    """Call a function in a fork of a server without threads."""
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        return pool.submit(fn, folder).result()


def filled(folder: Path) -> Any:
    """Return the writes to a small disk, the writes beyond its capacity, and whether the disk is free afterward."""
    if why_not := mount_small_disk(folder, 2 * MB):
        return why_not
    fill_up(folder, 8192)
    told: Counter[str] = Counter()
    with (folder / "file").open("wb", buffering=0) as file:
        try:
            while True:
                told["bytes"] += file.write(bytes(1000))
        except OSError as error:
            told[errno.errorcode[error.errno or 0]] += 1
    empty(folder)
    (folder / "another").write_bytes(bytes(MB))
    return told


@pytest.mark.usefixtures("server")
def test_only_its_own_process_sees_the_small_disk(tmp_path: Path) -> None:
    told = in_a_process(filled, tmp_path)
    if isinstance(told, str):
        pytest.skip(f"the kernel does not permit namespaces: {told}")
    assert told == {"bytes": 8192, "ENOSPC": 1}
    assert list(tmp_path.iterdir()) == []


def written_with_a_limit(folder: Path) -> tuple[int, int]:
    limit_files(5000)
    with (folder / "file").open("wb", buffering=0) as file:
        written = file.write(bytes(6000))
        try:
            file.write(b"more")
        except OSError as error:
            return written, error.errno or 0
    return written, 0


@pytest.mark.usefixtures("server")
def test_without_a_mount_a_file_size_limit_truncates_a_write(tmp_path: Path) -> None:
    assert in_a_process(written_with_a_limit, tmp_path) == (5000, errno.EFBIG)


def test_earlier_checkpoints_survive_a_disk_that_becomes_full(here: Path) -> None:
    run_attempt(config_of("mine"), {0: PlannedFailure("write optimizer.pt", 2, "limit", 4000)})
    assert [newest_valid(RUNS / "mine" / CHECKPOINTS), len(list_checkpoints(RUNS / "mine" / CHECKPOINTS))] == [2, 1]
