"""Read the files of runs that ended in any way or are incomplete, without importing torch."""

import csv
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import call
from ddp_tutorial import files
from ddp_tutorial.commands import logs as commands
from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import FolderInUseError, is_locked, locked
from ddp_tutorial.runs import summaries as logs
from ddp_tutorial.runs.folder import load_run, read_lines
from ddp_tutorial.runs.summaries import (
    Failure,
    Values,
    differing_settings,
    find_run,
    find_runs,
    follow,
    state_of,
    summarize,
)

pytestmark = pytest.mark.usefixtures("workdir")

CONFIG: dict[str, Any] = {
    "name": "",
    "corpus": "stories",
    "model": {"layers": 1, "heads": 2, "width": 32, "context": 32},
    "nprocs": 2,
    "device": "cpu",
    "strategy": "ddp",
    "ddp": {"variant": "torch", "simulated_link": None},
    "source": {"kind": "sharded", "workers": 0},
    "precision": {"dtype": "fp32"},
    "steps": 4,
    "batch_size": 8,
    "accumulation": 1,
}


@pytest.fixture(autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def step_row(step: int, loss: float | None = 2.0, **others: Any) -> dict[str, Any]:
    row = {"step": step, "learning_rate": 0.001, "tokens": 256 * step, "loss": loss, "grad_norm": 1.0}
    seconds = {"data": 0.1, "grads": 0.8, "forward": 0.3, "backward": 0.5, "update": 0.1}
    return row | {"seconds": seconds, "tokens_per_second": 100.0 * step, "elapsed": 1.5 * step} | others


def eval_row(step: int, eval_loss: float | None, **others: Any) -> dict[str, Any]:
    return {"step": step, "eval_loss": eval_loss, "seconds": {"evaluate": 0.5}, "elapsed": 1.5 * step + 0.5} | others


ROWS = [step_row(1, 3.0), step_row(2, 2.0), eval_row(2, 2.5), step_row(3, 1.0), step_row(4, 1.5), eval_row(4, 2.25)]
RESULT: dict[str, Any] = {"schema": 1, "status": "finished", "step": 4, "world_size": 2, "metrics": {}}


def made(name: str, rows: list[dict[str, Any]] = ROWS, result: dict[str, Any] | None = RESULT, **settings: Any) -> Path:
    """Create a folder as a run would have left it."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"name": name} | settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def run(*arguments: str, module: str = "ddp_tutorial") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in done.stderr
    return done


def printed(*arguments: str) -> str:
    done = run("logs", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@contextmanager
def another_process_holds(folder: Path) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import sys, time; from pathlib import Path; from ddp_tutorial.files import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(120)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


# ----------------------------------------------------------------------------------------------------------- its state


def test_a_run_is_running_while_its_folder_is_locked() -> None:
    folder = made("mine")
    (folder / "failed.json").write_text("{}")
    with another_process_holds(folder) as holder:
        assert state_of(folder) == "running"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert state_of(folder) == "finished"


def test_a_run_that_resumes_during_a_look_is_not_reported_as_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])  # it removes the files of an earlier attempt in between
    monkeypatch.setattr("ddp_tutorial.runs.summaries.is_locked", lambda folder: next(answers))
    assert state_of(made("mine", result=None)) == "running"


@pytest.mark.parametrize(
    ("result", "failed", "state"),
    [
        (RESULT, None, "finished"),
        (RESULT | {"status": "stopped"}, None, "stopped"),
        (None, '{"rank": 1, "step": 3, "error": "ValueError: no"}', "failed"),
        (None, "cut sho", "failed"),
        (None, None, "killed"),
    ],
)
def test_states_are_distinguished(result: dict[str, Any] | None, failed: str | None, state: str) -> None:
    folder = made("mine", result=result)
    if failed is not None:
        (folder / "failed.json").write_text(failed)
    assert state_of(folder) == state
    assert printed("list").splitlines()[1].split()[0] == state


def test_looking_at_a_folder_never_prevents_a_run_from_locking_it(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_locked(tmp_path)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with locked(tmp_path):
                assert is_locked(tmp_path)
            time.sleep(0.001)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    with locked(tmp_path), pytest.raises(FolderInUseError, match="in use by another run"), locked(tmp_path):
        pass


def test_a_reader_that_is_suspended_for_a_moment_does_not_prevent_a_run_from_locking(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("wb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)  # as in `is_locked`
        resumed = threading.Timer(0.5, fcntl.flock, (reader, fcntl.LOCK_UN))
        resumed.start()
        try:
            with locked(tmp_path):
                pass
        finally:
            resumed.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_run_without_file_locks_continues_and_logs_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)  # this machine has no such file system
    with locked(tmp_path):
        assert is_locked(tmp_path), "its owner is in the file"
    assert not is_locked(tmp_path)
    [line] = caplog.messages
    assert line == (
        f"{tmp_path} is on a file system without locks ({os.strerror(number)}). Do not start two runs in one folder at "
        "the same time."
    )


# ------------------------------------------------------------ locks that the kernel keeps on one machine, or not at all


@pytest.fixture
def flock_lets_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, kind: None)
    monkeypatch.setattr(files, "_TOUCH_SECONDS", 1.0)


@pytest.mark.usefixtures("flock_lets_everybody_in")
def test_without_a_kernel_lock_the_stored_owner_excludes_others(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(FolderInUseError, match="in use by another run"), locked(tmp_path):
            pass
        assert is_locked(tmp_path), "who was refused has changed nothing"
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert not is_locked(tmp_path / "copy")
        with locked(tmp_path / "copy"):
            pass
    assert not is_locked(tmp_path)
    assert not (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass


@pytest.mark.usefixtures("flock_lets_everybody_in")
def test_a_killed_owner_is_replaced_immediately_even_as_a_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_TOUCH_SECONDS", 1000.0)
    with another_process_holds(tmp_path) as holder:
        assert is_locked(tmp_path)
        with pytest.raises(FolderInUseError), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert not is_locked(tmp_path)
        with locked(tmp_path):
            assert is_locked(tmp_path)


@contextmanager
def locked_on_another_machine(folder: Path) -> Iterator[None]:
    """Lock a folder as a process on a different machine does."""
    with pytest.MonkeyPatch.context() as there:
        there.setattr(files, "_machine", lambda: "another machine")
        with locked(folder):
            there.undo()
            yield


@pytest.mark.usefixtures("flock_lets_everybody_in")
def test_an_owner_on_a_different_machine_counts_while_it_touches_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked_on_another_machine(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(FolderInUseError), locked(tmp_path):
            pass
        left = (tmp_path / ".lock").read_bytes()
    monkeypatch.setattr(files, "_TOUCH_SECONDS", 0.05)
    for content in (left, left[:20], b"[]"):  # the owner's machine has crashed
        (tmp_path / ".lock").write_bytes(content)
        os.utime(tmp_path / ".lock", (1e9, 1e9))
        assert not is_locked(tmp_path)
        with locked(tmp_path):
            pass


@pytest.mark.usefixtures("flock_lets_everybody_in")
def test_a_process_that_is_suspended_during_the_wait_still_sees_the_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked_on_another_machine(tmp_path):
        # As if this process were suspended between any two readings of the clock.
        monkeypatch.setattr(time, "monotonic", map(float, count(step=100)).__next__)
        with pytest.raises(FolderInUseError), locked(tmp_path):
            pass


@pytest.mark.usefixtures("flock_lets_everybody_in")
def test_a_lock_that_its_owner_removes_during_the_wait_counts_as_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.setattr(files, "_machine", lambda: "another machine")
        owner = locked(tmp_path)
        owner.__enter__()
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / ".lock").unlink(missing_ok=True))
    with pytest.raises(FolderInUseError, match="Wait until it exits"), locked(tmp_path):
        pass
    owner.__exit__(None, None, None)


def test_a_process_that_has_lost_the_lock_does_not_remove_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with locked(tmp_path):
        owner = json.loads(lock.read_text()) | {"machine": "another machine"}
        lock.write_text(json.dumps(owner))  # after this process was suspended for too long
    assert json.loads(lock.read_text()) == owner


@pytest.mark.usefixtures("flock_lets_everybody_in")
def test_a_lock_that_is_removed_before_the_wait_counts_as_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_owner(fd: int) -> files._Owner:
        (tmp_path / ".lock").unlink()
        return files._Owner("another machine", 1, 0.0, 0)

    monkeypatch.setattr(files, "_read_owner", read_owner)
    monkeypatch.setattr(files, "_TOUCH_SECONDS", 0.01)
    with pytest.raises(FolderInUseError, match="Wait until it exits"), locked(tmp_path):
        pass


# ------------------------------------------------------------------------------------------------------ finding a run


def test_runs_are_found_at_any_depth_in_order_of_start() -> None:
    for age, name in enumerate(["exp/b", "a", "exp/deep/c", "a/again"]):
        config = made(name) / "config.json"
        os.utime(config, (1000 - age, 1000 - age))
    for inside in ("a/model", "a/checkpoints/step_00000004", "cache/datasets", ".aside.part", "a/.model.7.part"):
        (Path("runs") / inside).mkdir(parents=True)
        (Path("runs") / inside / "config.json").write_text(json.dumps(CONFIG))
    (Path("runs") / "exported").mkdir()
    (Path("runs") / "exported" / "config.json").write_text('{"layers": 4}')
    (Path("runs") / "broken").mkdir()
    (Path("runs") / "broken" / "config.json").write_text("{")
    assert [str(folder) for folder in find_runs()] == ["runs/a/again", "runs/exp/deep/c", "runs/a", "runs/exp/b"]


def test_a_run_is_named_by_its_path_or_its_name_under_runs() -> None:
    folder = made("exp/arm")
    assert find_run("exp/arm") == find_run("runs/exp/arm") == folder
    assert find_run(str(folder.absolute())) == folder.absolute()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("exp/arn", r"there is no run named 'exp/arn'\. Did you mean 'exp/arm'\?"),
        ("zzz", r"there is no run named 'zzz'\. Known: exp/arm\."),
        ("exp", r"'exp' is not a run, but a folder that contains runs: runs/exp/arm"),
    ],
)
def test_an_unknown_run_is_answered_with_similar_names(name: str, told: str) -> None:
    made("exp/arm")
    with pytest.raises(ConfigError, match=told):
        find_run(name)


def test_a_missing_runs_folder_is_reported() -> None:
    with pytest.raises(ConfigError, match="runs/ contains no runs"):
        find_run("mine")
    done = run("logs", "list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no runs under runs/" in done.stderr
    assert run("logs", "summary", "--all").returncode == 2
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------------- reading a log


LINES = [json.dumps(row).encode() for row in [*ROWS, step_row(5, None), {"foreign": "ü"}]]


@given(cut=st.integers(0, sum(len(line) + 1 for line in LINES)))
def test_a_truncated_log_is_read_up_to_the_last_complete_line(tmp_path_factory: Any, cut: int) -> None:
    text = b"".join(line + b"\n" for line in LINES)
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    path.write_bytes(text[:cut])
    ends = [sum(len(line) + 1 for line in LINES[: i + 1]) - 1 for i in range(len(LINES))]
    assert read_lines(path) == [json.loads(line) for line, end in zip(LINES, ends, strict=True) if end <= cut]


@given(cut=st.integers(0, sum(len(line) + 1 for line in LINES)))
def test_a_run_with_a_truncated_log_has_a_summary(tmp_path_factory: Any, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in LINES)[:cut])
    steps = [row["step"] for row in read_lines(folder / "metrics.jsonl") if "step" in row]
    assert summarize(folder).step == max(steps, default=0)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "grads"]), inner, max_size=2),
    max_leaves=4,
)
ROW_KEYS = ("step", "loss", "tokens", "tokens_per_second", "elapsed", "seconds", "ranks", "rss_mb", "data", "forward")
CONFIG_KEYS = ("steps", "nprocs", "model", "batch_size", "strategy", "ddp", "simulated_link", "source", "accumulation")
RESULT_KEYS = ("status", "step", "world_size", "metrics", "ranks", "reason", "rank", "error")


def odd(keys: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw objects with the known keys and arbitrary values."""
    return st.dictionaries(st.sampled_from(keys), ANYTHING | st.dictionaries(st.sampled_from(keys), ANYTHING))


@settings(max_examples=150)
@given(rows=st.lists(odd(ROW_KEYS)), result=odd(RESULT_KEYS), failure=odd(RESULT_KEYS), config=odd(CONFIG_KEYS))
def test_arbitrary_file_contents_still_give_a_summary(
    tmp_path_factory: Any, rows: list[Any], result: Any, failure: Any, config: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps({"steps": 4} | config))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    (folder / "failed.json").write_text(json.dumps(failure))
    found = summarize(folder)
    for show in (commands._page, commands._one_line, commands._cells):
        assert str(folder) in show(found)
    assert commands._table([found, found], commands._speedups([found, found], None)).count(str(folder)) == 2
    json.dumps([found.loss and found.loss.last, found.seconds, found.phases], allow_nan=False)


FOREIGN = [
    b"not json",
    b"\xff\xfe\x00",
    b"[1, 2]",
    b'"text"',
    b'{"step": "three", "loss": 1}',
    b'{"loss": 7}',
    b'{"step": 3, "loss": "high", "seconds": 5, "ranks": [1], "tokens": "many", "tokens_per_second": NaN}',
    b'{"step": 3, "eval_loss": Infinity, "ranks": {"rss_mb": "much", "seconds": {"data": [1, null]}}, "elapsed": "x"}',
    b'{"step": 3, "seconds": {"data": null}, "ranks": null}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("line", FOREIGN, ids=range(len(FOREIGN)))
def test_all_commands_tolerate_a_foreign_line(line: bytes) -> None:
    folder = made("mine")
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([*rows[:3], line + b"\n", *rows[3:]]))
    found = summarize(folder)
    assert found.loss is not None
    assert (found.step, found.loss.first, found.loss.last, found.loss.best) == (4, 3.0, 1.5, 1.0)
    from ddp_tutorial.figures.run_plots import LOSSES, draw_runs

    draw_runs([folder], [LOSSES, "grad_norm", "seconds.data"], "time", 2, compare=True)
    assert list(follow(folder / "metrics.jsonl", lambda: True, 100))[3] == line.decode(errors="replace")


def test_a_run_with_only_a_config_has_a_summary() -> None:
    folder = made("mine", result=None)
    (folder / "metrics.jsonl").unlink()
    found = summarize(folder)
    assert (found.state, found.step, found.steps, found.ranks) == ("killed", 0, 4, 2)
    assert (found.loss, found.seconds, found.rate, found.memory_mb) == (None, None, None, {})
    for form in ("text", "one-line", "md", "json"):
        assert "runs/mine" in printed("summary", "--format", form)
    assert printed("list").splitlines()[1].split()[:7] == ["killed", "0/4", "-", "-", "-", "2", "-"]
    assert run("logs", "tail", "mine").stdout == ""


def test_a_run_with_an_unfamiliar_config_has_a_summary() -> None:
    folder = made("mine")
    (folder / "config.json").write_text('{"steps": 4}')
    (folder / "result.json").write_text("[]")
    for form in ("text", "one-line", "md", "json"):
        assert "runs/mine" in printed("summary", "mine", "--format", form)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="does not contain a JSON object"):
        load_run(folder)


# ----------------------------------------------------------------------------------------------------------- a summary


def in_ranks(*seconds: dict[str, list[float]], rss: tuple[float, ...] = (300.0, 310.0)) -> list[dict[str, Any]]:
    return [eval_row(i + 1, 2.0, ranks={"rss_mb": list(rss), "seconds": each}) for i, each in enumerate(seconds)]


def test_a_summary_agrees_with_the_log() -> None:
    found = summarize(made("mine"))
    assert found.loss == Values(first=3.0, last=1.5, best=1.0, best_step=3)
    assert found.eval_loss == Values(first=2.5, last=2.25, best=2.25, best_step=4)
    assert (found.count, found.seconds, found.seconds_are) == (1024, 6.5, "measured")
    assert found.rate == 300.0  # of 100, 200, 300, 400 without the first, which warms up
    assert found.phases == pytest.approx({"grads": 3.2, "evaluate": 1.0, "data": 0.4, "update": 0.4})
    assert list(found.phases) == ["grads", "evaluate", "data", "update"]  # the longest first
    assert found.inside_grads == pytest.approx({"backward": 2.0, "forward": 1.2})
    assert found.straggler is found.failure is found.reason is None


def test_a_diverged_loss_is_reported_and_the_best_is_from_before() -> None:
    found = summarize(made("mine", [step_row(1, 3.0), step_row(2, 2.0), step_row(3, None), step_row(4, None)]))
    assert found.loss == Values(first=3.0, last=None, best=2.0, best_step=2)
    assert "first 3.000, last diverged, best 2.000 at step 2" in printed("summary")
    assert " diverged " in printed("list")
    assert " loss= " in printed("summary", "--format", "one-line")


def test_a_log_without_times_uses_the_times_of_its_phases() -> None:
    rows = [{key: value for key, value in row.items() if key != "elapsed"} for row in ROWS]
    found = summarize(made("old", rows))
    assert found.seconds == pytest.approx(4 * 1.0 + 2 * 0.5)  # forward and backward are in grads
    assert found.seconds_are == "sum of phases"
    assert "5.0 s in phases: grads 64 %" in printed("summary")


def test_elapsed_time_continues_after_a_resume() -> None:
    rows = [{"step": 1, "elapsed": 10.0}, {"step": 2, "elapsed": 20.0}]
    resumed = [{"step": 3, "elapsed": 2.0}, {"step": 4, "elapsed": 4.0}]
    assert logs.elapsed_seconds([*rows, *resumed]) == [10.0, 20.0, 22.0, 24.0]
    assert logs.elapsed_seconds([*rows, *resumed, {"step": 5, "elapsed": 1.0}]) == [10.0, 20.0, 22.0, 24.0, 25.0]
    assert logs.elapsed_seconds([*rows, {"step": 2, "elapsed": 19.9}]) == [10.0, 20.0, 20.0]
    old = [{"step": 1, "seconds": {"data": 1.0, "grads": 3.0, "forward": 2.0, "save": 1.0, "save: write": 0.5}}]
    assert logs.elapsed_seconds([*old, {"step": 2, "elapsed": 0.5}, {"step": 3, "elapsed": 1.0}]) == [5.0, 5.5, 6.0]


def test_the_straggler_is_the_rank_that_costs_the_others_most() -> None:
    slow = {"data": [0.1, 0.1, 0.9], "forward": [1.6, 1.0, 1.0], "grads": [4.0, 4.0, 3.2]}
    found = summarize(made("slow", in_ranks(slow, slow, rss=(1.0, 2.0, 3.0)), result=None))
    assert found.straggler == {"rank": 2, "phase": "data", "times": 9.0, "seconds": 1.6}
    assert found.ranks == 3
    text = printed("summary", "slow")
    assert "  slowest     rank 2, in data: 9 times as slow as the other ranks, which waited 1.6 s" in text
    assert "rank 0 1 MB, rank 1 2 MB, rank 2 3 MB" in text


@pytest.mark.parametrize(
    "seconds",
    [
        {"data": [0.1, 0.1], "forward": [1.0, 1.4], "grads": [4.0, 3.9]},  # less than 1.5 times as long
        {"data": [0.001, 0.009], "grads": [4.0, 4.0]},  # nine times as long, but negligible
        {"data": [0.1, 0.1], "grads": [4.0, 2.0]},  # rank 0 waits in grads, so it is not the straggler
        {"data": [0.1], "grads": [4.0]},  # no rank waits
        {},
    ],
)
def test_a_rank_that_delays_no_other_rank_is_not_a_straggler(seconds: dict[str, list[float]]) -> None:
    assert summarize(made("even", in_ranks(seconds))).straggler is None


def test_the_result_provides_rank_usage_that_the_log_lacks() -> None:
    ranks = {"rss_mb": [400.0, 500.0], "seconds": {"data": [3.0, 1.0], "grads": [3.0, 5.0]}}
    found = summarize(made("a", result=RESULT | {"ranks": ranks}))
    assert found.memory_mb == {"rss": [400.0, 500.0]}
    assert found.straggler == {"rank": 0, "phase": "data", "times": 3.0, "seconds": 2.0}
    peaks = summarize(made("b", in_ranks({}, rss=(450.0, 300.0)), result=RESULT | {"ranks": ranks}))
    assert peaks.memory_mb == {"rss": [450.0, 500.0]}


def test_a_reason_is_shown_with_the_state() -> None:
    made("mine", result=RESULT | {"step": 3, "reason": "no improvement since step 2"})
    assert "  state       finished after step 3 of 4: no improvement since step 2 (began " in printed("summary")


def test_memory_is_the_maximum_of_each_rank_at_the_last_world_size() -> None:
    rows = [*in_ranks({}, rss=(900.0, 900.0, 900.0, 900.0)), *in_ranks({}, rss=(300.0, 200.0))]
    rows += in_ranks({}, rss=(100.0, 250.0))
    assert summarize(made("mine", rows)).memory_mb == {"rss": [300.0, 250.0]}


def test_a_failure_names_the_rank_the_step_and_the_error() -> None:
    folder = made("mine", ROWS[:3], result=None)
    error = "Traceback of rank 1\n  in step\nValueError: no"
    (folder / "failed.json").write_text(json.dumps({"rank": 1, "step": 3, "error": error}))
    assert summarize(folder).failure == Failure(1, 3, error)
    text = printed("summary")
    assert "  state       failed after step 3 of 4, rank 1 first (began " in text
    indent = 14 * " "
    assert f"\n  error       Traceback of rank 1\n{indent}  in step\n{indent}ValueError: no\n  text " in text
    [line] = printed("summary", "--format", "one-line").splitlines()
    assert " state=failed step=3/4 " in line
    assert line.endswith('failed_rank=1 error="Traceback of rank 1"')


def test_settings_that_some_versions_lack_do_not_count_as_different() -> None:
    link = {"latency_ms": 2, "megabytes_per_second": 50}
    made("a", steps=10, resume="never")
    made("b", steps=20, ddp={"variant": "flat", "simulated_link": link}, resume="auto")
    old = {key: value for key, value in CONFIG.items() if key not in {"source", "precision"}}
    (made("c") / "config.json").write_text(json.dumps(old | {"steps": 10}))
    made("d", steps=10, result=RESULT | {"world_size": 3})  # under torchrun, the config does not contain the number
    found = differing_settings([summarize(Path("runs") / name) for name in "abcd"])
    assert found == {
        "nprocs": [2, 2, 2, 3],
        "ddp.variant": ["torch", "flat", "torch", "torch"],
        "steps": [10, 20, 10, 10],
        "ddp.simulated_link.latency_ms": [None, 2, None, None],
        "ddp.simulated_link.megabytes_per_second": [None, 50, None, None],
    }


# -------------------------------------------------------------------------------------------------------- the commands


def test_list_prints_one_line_per_run() -> None:
    made("first")
    os.utime("runs/first/config.json", (1000, 1000))
    made("exp/second", ROWS[:2], result=None)
    head, *lines = printed("list").splitlines()
    assert head.split() == ["state", "step", "loss", "validation", "rate", "ranks", "took", "began", "run"]
    assert [line.split()[0] for line in lines] == ["finished", "killed"]
    assert [line.split()[-1] for line in lines] == ["runs/first", "runs/exp/second"]
    assert lines[0].split()[1:7] == ["4/4", "1.500", "2.250", "300", "tokens/s", "2"]
    assert len({len(line) - len(line.split()[-1]) for line in lines}) == 1  # columns


def test_a_summary_on_one_line_can_be_searched() -> None:
    made("a")
    made("b", ROWS[:2], result=None, strategy="invariant")
    lines = printed("summary", "--all", "--format", "one-line").splitlines()
    assert lines[0] == (
        "runs/a state=finished step=4/4 loss=1.5000 eval_loss=2.2500 best_eval_loss=2.2500 tokens_per_second=300 "
        "ranks=2 seconds=6.5 corpus=stories strategy=ddp:torch source=sharded batch_size=8"
    )
    assert lines[1].startswith("runs/b state=killed step=2/4 loss=2.0000 eval_loss= best_eval_loss= ")


def test_a_markdown_summary_has_columns_for_different_settings() -> None:
    made("a")
    made("b", batch_size=16, corpus="text:a|b")
    head, rule, first, second = printed("summary", "a", "b", "--format", "md").splitlines()
    assert head.startswith("| run | corpus | batch_size | state | ")
    assert first.startswith(
        "| runs/a | stories | 8 | finished | 4/4 | 1.500 | 2.250 | 2.250 | 300 tokens/s | 2 | 6.5 s |"
    )
    assert second.startswith("| runs/b | text:a\\|b | 16 |")
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") - 1


def with_rate(name: str, ranks: int, rate: float, **settings: Any) -> None:
    result = RESULT | {"world_size": ranks, "metrics": {"tokens_per_second": rate}}
    made(name, result=result, nprocs=ranks, **settings)


def test_tables_contain_the_speedup_over_the_baseline() -> None:
    with_rate("four", 4, 300.0)
    with_rate("two", 2, 200.0, strategy="fsdp")
    made("killed", [], result=None, nprocs=1)
    head, _, *rows = printed("summary", "four", "two", "killed", "--format", "md").splitlines()
    assert head.endswith("| ranks | took | speedup | efficiency |")
    assert [row.split(" | ")[-2:] for row in rows] == [["1.50", "75% |"], ["1.00", "100% |"], ["-", "- |"]]
    with_rate("other", 1, 100.0, batch_size=16, steps=9)
    done = run("logs", "summary", "two", "other", "--format", "csv", "--baseline", "four")
    assert (
        done.stderr
        == "the speedup over runs/four is not defined for runs with different settings: runs/other (batch_size)\n"
    )
    two, other = csv.DictReader(done.stdout.splitlines())
    assert [two[key] for key in ("run", "ranks", "throughput", "unit")] == ["runs/two", "2", "200.0", "tokens/s"]
    assert [float(two["speedup"]), float(two["efficiency"])] == pytest.approx([2 / 3, 4 / 3])
    assert other["speedup"] == other["efficiency"] == ""
    [alone] = json.loads(printed("summary", "other", "--format", "json"))
    assert alone["speedup"] is None


def test_a_summary_in_json_is_a_list_of_objects() -> None:
    made("a")
    [found] = json.loads(printed("summary", "runs/a", "--format", "json"))
    assert found["config"]["batch_size"] == 8
    assert found["loss"] == {"first": 3.0, "last": 1.5, "best": 1.0, "best_step": 3}
    assert (found["path"], found["state"], found["seconds"]) == ("runs/a", "finished", 6.5)


def test_a_summary_without_a_name_is_that_of_the_newest_run() -> None:
    made("newest")
    made("older")
    os.utime("runs/older/config.json", (1000, 1000))
    page = printed("summary").splitlines()
    assert page[0] == "runs/newest"
    assert page[1].startswith("  state       finished after step 4 of 4 (began 20")
    assert "  loss        first 3.000, last 1.500, best 1.000 at step 3" in page
    shares = "grads 49 % (backward 31 %, forward 18 %), evaluate 15 %, data 6 %, update 6 %, other 23 %"
    assert f"  time        6.5 s: {shares}" in page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plot", "mine", "--metrics", "los"), "unknown metric 'los'. Did you mean 'loss'? Known: learning_rate,"),
        (("plot", "mine", "--metrics", "zzz"), "unknown metric 'zzz'. Known: learning_rate, loss, grad_norm,"),
        (("plot", "mine", "--metrics", "loss,step"), "unknown metric 'step'."),
        (("plot", "mien"), "there is no run named 'mien'. Did you mean 'mine'?"),
        (("plot", "mine", "empty", "gone"), "there is no run named 'gone'."),
        (("plot", "empty"), "no steps have been logged yet in runs/empty"),
        (
            ("plot", "timeless", "--metrics", "loss", "--x", "time"),
            "runs/timeless contains no step times; use --x step",
        ),
        (("plot", "mine", "-o", "figure.gif"), "'-o' must end in one of .png, .svg, .pdf"),
        (("plot", "mine", "-o", "figure"), "'-o' must end in one of .png, .svg, .pdf"),
        (("plot", "mine", "-o", "gone/figure.png"), "'-o' gone/figure.png: the folder 'gone' does not exist"),
        (("summary", "mien"), "there is no run named 'mien'. Did you mean 'mine'?"),
        (("plot", "mine", "--all"), "specify run names or --all, not both"),
        (("summary", "mine", "--all"), "specify run names or --all, not both"),
        (("summary", "mine", "--baseline", "mine"), "--baseline requires --format md, csv or json, got --format text"),
        (
            ("summary", "mine", "--format", "md", "--baseline", "mien"),
            "there is no run named 'mien'. Did you mean 'mine'?",
        ),
        (
            ("summary", "mine", "--format", "md", "--baseline", "empty"),
            "the baseline run runs/empty did not log its throughput",
        ),
        (("tail", "mien"), "there is no run named 'mien'. Did you mean 'mine'?"),
        (("tail", "mine", "--rank", "5"), "runs/mine contains no log from rank 5; it contains logs from ranks 0 and 1"),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_nothing_is_written(arguments: tuple[str, ...], told: str) -> None:
    folder = made("mine")
    for rank in (0, 1):
        (folder / f"rank_{rank}.log").touch()
    made("empty", [])
    made("timeless", [{"step": 1, "loss": 2.0}])
    before = sorted(Path().rglob("*"))
    done = run("logs", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert sorted(Path().rglob("*")) == before


def test_tail_shows_a_ranks_log_and_the_end_of_the_run() -> None:
    folder = made("mine")
    for rank in (0, 1):
        (folder / f"rank_{rank}.log").write_text("".join(f"10:00:0{i} info {i} of {rank}\n" for i in range(5)))
    done = run("logs", "tail", "mine", "-n", "2")
    assert done.stdout == "10:00:03 info 3 of 0\n10:00:04 info 4 of 0\n"
    assert done.stderr.startswith("finished after step 4 of 4")
    assert run("logs", "tail", "mine", "-n", "1", "--rank", "1").stdout == "10:00:04 info 4 of 1\n"
    assert run("logs", "tail", "mine", "-n", "0").stdout == ""
    rows = run("logs", "tail", "mine", "-n", "2", "--metrics").stdout.splitlines()
    assert rows == [
        "step 4: loss 1.500, grad norm 1.000, learning rate 0.001, 400 tokens/s",
        "step 4: validation loss 2.250",
    ]


def test_tail_follows_a_run_until_it_has_ended() -> None:
    folder = made("mine", result=None)
    log = folder / "rank_0.log"
    log.write_text("one\ntwo\n")
    with another_process_holds(folder) as holder:
        command = [sys.executable, "-m", "ddp_tutorial", "logs", "tail", "mine", "-n", "1"]
        tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert tail.stdout is not None
        assert tail.stdout.readline() == "two\n"
        with log.open("a") as file:
            file.write("three\nfo")
        assert tail.stdout.readline() == "three\n"
        with log.open("a") as file:
            file.write("ur\nthe end")
        assert tail.stdout.readline() == "four\n"
        assert tail.poll() is None
        holder.kill()
        rest, told = tail.communicate(timeout=300)
    assert (tail.returncode, rest) == (0, "the end\n")
    assert told.startswith("killed after step 4 of 4")


def test_a_replaced_log_is_followed_from_its_beginning() -> None:
    path = Path("log")
    path.write_text("1\n2\n3\n")
    calls = iter([False, False, True])
    lines = follow(path, lambda: next(calls), last=2, pause=0)
    assert [next(lines), next(lines)] == ["2", "3"]
    Path("aside").write_text("1\n2\n")
    Path("aside").replace(path)
    assert [next(lines), next(lines)] == ["1", "2"]
    assert list(lines) == []


def test_an_interrupted_tail_does_not_mention_ranks() -> None:
    folder = made("mine", result=None)
    (folder / "rank_0.log").write_text("one\n")
    with another_process_holds(folder):
        # a background job, such as these tests may be, hands SIGINT on ignored
        code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        code += "runpy.run_module('ddp_tutorial', run_name='__main__')"
        command = [sys.executable, "-c", code, "logs", "tail", "mine"]
        tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert tail.stdout is not None
        assert tail.stdout.readline() == "one\n"
        tail.send_signal(signal.SIGINT)
        assert tail.communicate(timeout=300) == ("", "")
        assert tail.returncode == 130


# ------------------------------------------------------------------------------------------------------------- figures


def test_figures_have_the_format_of_their_extension_and_are_deterministic() -> None:
    made("a")
    for ending, begins in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        assert printed("plot", "a", "--metrics", "loss", "-o", f"figure{ending}") == f"figure{ending}\n"
        first = Path(f"figure{ending}").read_bytes()
        assert first.startswith(begins)
        printed("plot", "a", "--metrics", "loss", "-o", f"figure{ending}")
        assert Path(f"figure{ending}").read_bytes() == first
    assert sorted(path.name for path in Path().iterdir()) == ["figure.pdf", "figure.png", "figure.svg", "runs"]


def test_a_glob_over_runs_skips_and_counts_paths_that_are_not_runs() -> None:
    made("a")
    made("b")
    made("sweeps/s/point")
    Path("runs/cache").mkdir()
    Path("runs/plot-a-b.png").touch()
    names = sorted(map(str, Path("runs").iterdir()))
    for command in (["plot", "--compare"], ["summary"]):
        done = run("logs", *command, *names)
        assert (done.returncode, done.stderr) == (0, "skipped 3 of 5 paths, because they are not runs\n")
    assert [line for line in done.stdout.splitlines() if line.startswith("runs/")] == ["runs/a", "runs/b"]
    assert run("logs", "plot", "runs/cache", "runs/plot-a-b.png").returncode == 2
    assert run("logs", "plot", "a", "gone").returncode == 2


def test_a_figure_without_a_name_shows_the_newest_run() -> None:
    made("newest")
    made("older")
    os.utime("runs/older/config.json", (1000, 1000))
    assert printed("plot") == "runs/plot-newest.png\n"


def test_all_runs_are_drawn_and_the_figure_or_the_log_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made("a")
    (made("b") / "rank_0.log").touch()
    viewer = Path("viewer").absolute()
    viewer.write_text('#!/bin/sh\necho "$@" >> opened.txt\n')
    viewer.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{viewer} %s")
    monkeypatch.setenv("EDITOR", str(viewer))
    monkeypatch.delenv("VISUAL", raising=False)
    assert printed("plot", "--all", "-e") == "runs/plot-a-b.png\n"
    assert printed("tail", "b", "-e") == ""
    assert Path("opened.txt").read_text().split() == [
        Path("runs/plot-a-b.png").absolute().as_uri(),
        "runs/b/rank_0.log",
    ]
    monkeypatch.setenv("BROWSER", "false %s")
    done = run("logs", "plot", "a", "-e")
    assert (done.returncode, done.stdout) == (1, "runs/plot-a.png\n")
    assert done.stderr.startswith("error: no viewer was found for runs/plot-a.png.")


def test_a_figure_without_a_name_is_written_under_runs() -> None:
    made("exp/a")
    made("b")
    assert printed("plot", "exp/a", "b", "--compare") == "runs/plot-exp-a-b.png\n"
    assert Path("runs/plot-exp-a-b.png").is_file()
    new = Path.cwd() / "new" / "runs"
    assert printed("plot", "runs/b/../b/.", "--runs-dir", "new/runs") == f"{new}/plot-b.png\n"
    with chdir("runs/b"):
        assert printed("plot", ".") == "runs/plot-b.png\n"


def drawn(
    *names: str, panels: tuple[str, ...] = ("loss",), axis: Any = "step", window: int = 1, compare: bool = False
) -> Any:
    from ddp_tutorial.figures.run_plots import draw_runs

    return draw_runs([Path("runs") / name for name in names], panels, axis, window, compare)


def test_compared_runs_share_axes_and_differences_are_in_the_title() -> None:
    made("a")
    made("b", batch_size=16)
    figure = drawn("a", "b", panels=("loss", "grad_norm"), compare=True)
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert figure.get_suptitle() == "2 runs compared\nDifferent settings: batch_size (8, 16)"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["runs/a (batch_size 8)", "runs/b (batch_size 16)"]
    looks = {(line.get_color(), line.get_linestyle(), line.get_linewidth()) for line in figure.axes[0].lines}
    assert len(looks) == 2


def test_runs_that_are_not_compared_have_one_column_each_and_one_scale() -> None:
    made("a")
    made("b", [step_row(1, 9.0), step_row(2, 8.0)], result=None)
    figure = drawn("a", "b", panels=("loss", "eval_loss"))
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [4, 2, 2, 0]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.axes[0].get_title("left") == "runs/a: finished, step 4 of 4"
    assert [text.get_text() for text in figure.axes[3].texts] == ["not logged"]


@pytest.mark.parametrize(
    ("axis", "xs", "eval_xs"),
    [
        ("step", [1, 2, 3, 4], [2, 4]),
        ("time", [1.5, 3.0, 4.5, 6.0], [3.5, 6.5]),
        ("tokens", [256, 512, 768, 1024], [512, 1024]),
    ],
)
def test_loss_curves_are_two_in_one_panel_over_any_axis(axis: str, xs: list[float], eval_xs: list[float]) -> None:
    from ddp_tutorial.figures.run_plots import LOSSES

    made("a")
    training, held_out = drawn("a", panels=(LOSSES,), axis=axis).axes[0].lines
    assert (list(training.get_xdata()), list(training.get_ydata())) == (xs, [3.0, 2.0, 1.0, 1.5])
    assert (list(held_out.get_xdata()), list(held_out.get_ydata())) == (eval_xs, [2.5, 2.25])


def test_smoothing_shows_values_as_a_shade_and_keeps_gaps() -> None:
    made("a", [step_row(1, 4.0), step_row(2, 2.0), step_row(3, None), step_row(4, 6.0)])
    shade, line = drawn("a", window=2).axes[0].lines
    assert shade.get_alpha() < 1
    assert [str(y) for y in shade.get_ydata()] == ["4.0", "2.0", "nan", "6.0"]
    assert [str(y) for y in line.get_ydata()] == ["4.0", "3.0", "nan", "4.0"]
    [rate] = drawn("a", panels=("learning_rate",), window=2).axes[0].lines
    assert list(rate.get_ydata()) == [0.001] * 4


# -------------------------------------------------------------------------------------------- at once, and for real


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["list"], {"torch", "matplotlib", "numpy", "datasets"}),
        (["summary", "--all"], {"torch", "matplotlib", "numpy", "datasets"}),
        (["tail", "mine"], {"torch", "matplotlib", "numpy", "datasets"}),
        (["plot", "mine", "--compare", "--loss-curves"], {"torch", "datasets"}),
    ],
)
def test_commands_about_logs_load_no_large_module(arguments: list[str], without: set[str]) -> None:
    made("mine")
    code = (
        "import sys; from ddp_tutorial.__main__ import cli\n"
        f"cli({['logs', *arguments]!r}, standalone_mode=False)\n"
        f"print('loaded', sorted({without!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stderr


def test_commands_about_logs_start_fast() -> None:
    """They take 0.2 s of CPU time, which other programs hardly affect. torch alone would take longer."""
    made("mine")

    def cpu_seconds(*arguments: str) -> float:
        began = os.times()
        printed(*arguments)
        ended = os.times()
        return ended.children_user + ended.children_system - began.children_user - began.children_system

    for arguments in (("list",), ("summary",), ("summary", "--format", "json")):
        assert min(cpu_seconds(*arguments) for _ in range(3)) < 1.0


def train(*arguments: str) -> None:
    done = call("train", "tiny", "device=cpu", *arguments)
    assert done.returncode == 0, done.stderr


def test_the_summary_of_a_real_run_agrees_with_its_result() -> None:
    train("name=exp/real", "steps=6", "eval_every=3", "log_every=2", "checkpoint.every=3")
    result = json.loads(Path("runs/exp/real/result.json").read_text())
    found = summarize(find_run("exp/real"))
    assert (found.state, found.step, found.steps, found.ranks) == ("finished", 6, 6, 2)
    assert found.loss is not None
    assert found.eval_loss is not None
    assert found.loss.last == result["metrics"]["loss"]
    assert found.eval_loss.last == result["metrics"]["eval_loss"]
    assert found.rate == result["metrics"]["tokens_per_second"]
    assert [Path(path).name for path in found.checkpoints] == ["step_00000003", "step_00000006"]
    assert {"data", "grads", "update", "evaluate"} <= set(found.phases)
    assert len(printed("list").splitlines()) == 2  # not the saved model
    printed("plot", "exp/real", "--loss-curves", "--x", "time", "-o", "real.png")
    assert Path("real.png").is_file()


def test_a_real_run_is_running_until_it_is_killed() -> None:
    command = [sys.executable, "-m", "ddp_tutorial", "train", "tiny", "device=cpu", "name=mine", "steps=100000"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not read_lines(Path("runs/mine/metrics.jsonl")):
            assert training.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert printed("list").splitlines()[1].split()[0] == "running"
        assert "  state       running at step " in printed("summary")
    finally:
        training.kill()
        training.wait()
    while state_of(Path("runs/mine")) == "running":  # its ranks exit shortly after it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = summarize(Path("runs/mine"))
    assert found.state == "killed"
    assert 0 < found.step < 100000
    assert f"killed after step {found.step:,} of 100,000" in run("logs", "tail", "mine").stderr
