"""A launch returns every rank's result, or names the rank that failed and why; no process is left in either case.

The ranks are real. Functions are defined inside the tests, so that they are pickled by value, like those of a cell.
"""

import asyncio
import gc
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import connection, resource_tracker
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import forked
from ddp_tutorial.collectives import RankZeroFailedError, rank_zero_first
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import cores
from ddp_tutorial.processes import process_tags
from ddp_tutorial.processes.console import Console
from ddp_tutorial.processes.errors import Raised, RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import GRACE_SECONDS, START_SECONDS, _Ranks, launch
from ddp_tutorial.processes.rank import _exit_with_parent, progress
from ddp_tutorial.processes.spawn import exit_descriptor
from ranks import is_gone, wait_until

LOCK = threading.Lock()  # cannot be pickled


def children():
    # No ranks are multiprocessing's resource tracker, one for the whole life of this process, and the servers from
    # which the ranks of other tests are forked
    others = {resource_tracker._resource_tracker._pid, *forked.servers()}
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in others]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    assert wait_until(lambda: not children()), f"still there: {children()}"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)


@pytest.fixture
def start_python(_nothing_is_left_behind):
    """Start a new Python, which is killed at the end of the test."""
    started = []

    def start(*arguments, **options):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, *map(str, arguments)], **pipes, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


# --- results ----------------------------------------------------------------------------------------------------


@pytest.mark.spawned
def test_every_rank_has_its_results_place_and_environment():
    def look(world, base, *, names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_WAIT_POLICY", "MASTER_ADDR")):
        total = torch.tensor([float(base + world.rank)])
        dist.all_reduce(total)
        return {
            "world": (world.rank, world.size, world.local_rank, world.local_size, world.device),
            "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
            "total": total,
            "threads": torch.get_num_threads(),
            "unsearched": gc.get_freeze_count(),
            "environment": [os.environ[name] for name in names],
        }

    first, second = launch(look, 2, 10, device="cpu")

    cpu = torch.device("cpu")
    assert first["world"] == (0, 2, 0, 2, cpu)
    assert second["world"] == (1, 2, 1, 2, cpu)
    assert first["group"] == (0, 2, "gloo")
    assert second["group"] == (1, 2, "gloo")
    assert first["environment"] == ["0", "2", "0", "PASSIVE", "127.0.0.1"]
    assert second["environment"] == ["1", "2", "1", "PASSIVE", "127.0.0.1"]
    for result in (first, second):
        assert torch.equal(result["total"], torch.tensor([21.0]))  # 10 + 11
        assert result["unsearched"] > 50_000  # torch's objects, which garbage collection ignores
        assert result["threads"] == max(1, cores() // 2)


def test_a_lambda_with_a_closure_runs_on_three_ranks_in_order():
    offset = 100
    results = launch(lambda world, step: (dist.get_world_size(), world.rank, offset + step), 3, 7, device="cpu")
    assert results == [(3, 0, 107), (3, 1, 107), (3, 2, 107)]


def test_four_ranks_return_instances_of_a_class_of_the_caller():
    class Point:
        def __init__(self, x):
            self.x = x

    def work(world):
        total = torch.tensor(10**world.rank)
        dist.all_reduce(total)
        return Point(total.item() + world.rank)

    results = launch(work, 4, device="cpu")

    assert [type(result) for result in results] == [Point] * 4
    assert [result.x for result in results] == [1111, 1112, 1113, 1114]


def test_a_single_rank_is_a_process_without_a_group():
    def alone(world):
        loss = (torch.ones(2, requires_grad=True) * 2).sum()
        return world.rank, world.size, os.getpid(), dist.is_initialized(), torch.get_num_threads(), loss

    [(rank, size, pid, connected, threads, loss)] = launch(alone, 1, device="cpu", threads=3)

    assert (rank, size, connected) == (0, 1, False)
    assert pid != os.getpid()
    assert threads == 3
    assert loss.item() == 4.0  # a tensor that still has its graph in the rank arrives as a number


def test_in_process_calls_the_function_in_this_process(capsys):
    seen = []

    def here(world, thing):
        seen.append(thing)  # not pickled by value: the same object
        return os.getpid(), world.size, dist.is_initialized()

    thing = LOCK
    assert launch(here, 1, thing, device="cpu", in_process=True) == [(os.getpid(), 1, False)]
    assert seen == [LOCK]
    with pytest.raises(ZeroDivisionError) as caught:
        launch(lambda world: 1 / 0, 1, device="cpu", in_process=True)
    assert type(caught.value) is ZeroDivisionError
    assert capsys.readouterr().out == ""


def test_large_arguments_and_results_are_unchanged():
    sent = torch.arange(12_500_000, dtype=torch.float32)  # 50 MB

    results = launch(lambda world, given: given + world.rank, 2, sent, device="cpu")

    assert torch.equal(results[0], sent)
    assert torch.equal(results[1], sent + 1)


def test_launches_leave_no_file_descriptor_open():
    def work(world, fail):
        if fail:
            raise ValueError("on purpose")

    launch(work, 1, False, device="cpu")  # starts processes that live as long as this one, such as the resource tracker
    gc.collect()
    before = psutil.Process().num_fds()
    launch(work, 2, False, device="cpu")
    with suppress(RankError):
        launch(work, 2, True, device="cpu")
    gc.collect()
    assert psutil.Process().num_fds() <= before


def test_the_package_exports_the_function_launch(start_python):
    """Also if the module of that name has been imported before or in between."""
    code = """
        from ddp_tutorial import launch
        assert callable(launch), launch
        import ddp_tutorial.training.trainer, ddp_tutorial
        assert callable(ddp_tutorial.launch), ddp_tutorial.launch
        from ddp_tutorial import World, launch
        assert callable(launch), launch
    """
    process = start_python("-c", "\n".join(line.strip() for line in code.split("\n")))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


# --- callers ----------------------------------------------------------------------------------------------------

SMALL_LAUNCH = """
import torch
import torch.distributed as dist
from ddp_tutorial.processes.launcher import launch

SCALE = 10

def scaled(number):
    return SCALE * number

def total(world, start):
    number = torch.tensor(scaled(start + world.rank))
    dist.all_reduce(number)
    return number.item()

print("top level of", __name__)
print("total", launch(total, 2, 1, device="cpu"))
"""


def test_functions_of_a_script_run_and_a_missing_guard_is_reported(tmp_path, start_python):
    """Two launches run at the same time and do not compete for a port.

    `python -c` has no file that ranks could import. A script has a file, and every rank would start ranks again.
    """
    script = tmp_path / "unguarded.py"
    script.write_text(SMALL_LAUNCH)
    command, unguarded = start_python("-c", SMALL_LAUNCH, cwd=tmp_path), start_python(script, cwd=tmp_path)
    out, err = command.communicate(timeout=90)
    assert (command.returncode, err) == (0, "")
    assert out.splitlines() == ["top level of __main__", "total [30, 30]"]  # 10 * 1 + 10 * 2
    out, err = unguarded.communicate(timeout=90)
    assert unguarded.returncode == 1
    first, *others = out.splitlines()
    assert first == "top level of __main__"
    assert others  # from the first rank; the other rank may have been terminated earlier
    assert set(others) <= {f"[rank {rank}] top level of __mp_main__" for rank in "01"}
    assert f"MissingGuardError: {script} calls launch at its top level" in err
    assert err.endswith('if __name__ == "__main__":\n    launch(...)\n')
    assert err.count("Traceback") == 1


def test_an_error_class_of_a_script_is_the_same_in_its_ranks():
    on_the_rank, here = (type("OwnError", (ValueError,), {"__module__": name}) for name in ("__mp_main__", "__main__"))
    assert Raised.of(on_the_rank()).is_a(here)


def test_the_process_group_listens_on_the_loopback_interface_only():
    def listening(world, parent):
        dist.barrier()
        found = [
            connection.laddr
            for process in (psutil.Process(), psutil.Process(parent))
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        dist.barrier()
        return int(os.environ["MASTER_PORT"]), found

    for port, addresses in launch(listening, 2, os.getpid(), device="cpu"):
        assert port in {address.port for address in addresses}  # the parent's store
        assert {address.ip for address in addresses} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


# --- output -----------------------------------------------------------------------------------------------------


def test_output_of_a_rank_and_its_children_is_ordered_and_prefixed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def talk(world):
        print("first", world.rank)
        print("second", world.rank, file=sys.stderr)
        os.system(f"echo third {world.rank}; echo fourth {world.rank} >&2")
        os.write(1, b"fifth, as C++ code would\n")
        print("sixth, häßlich ☃", end="")  # without a newline at the end

    launch(talk, 2, device="auto")

    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "2 ranks on cpu, gloo"
    assert err == ""
    for rank in range(2):
        assert [line for line in lines[1:] if line.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] first {rank}",
            f"[rank {rank}] second {rank}",
            f"[rank {rank}] third {rank}",
            f"[rank {rank}] fourth {rank}",
            f"[rank {rank}] fifth, as C++ code would",
            f"[rank {rank}] sixth, häßlich ☃",
        ]
    assert len(lines) == 13


def test_without_echo_nothing_is_shown(capfd):
    launch(lambda world: print("loud"), 1, device="cpu", echo=False)
    assert capfd.readouterr() == ("", "")
    launch(lambda world: print("loud"), 1, device="cpu")
    assert capfd.readouterr() == ("[rank 0] loud\n", "")


class RecordingConsole(Console):
    def __init__(self):
        self.events = []

    def line(self, rank, text):
        self.events.append(("line", rank, text))

    def progress(self, done, total, numbers):
        self.events.append(("progress", done, total, numbers))

    def close(self, logs):
        self.events.append(("close", [log.rank for log in logs]))


def test_progress_of_rank_0_reaches_the_parent(monkeypatch):
    console = RecordingConsole()
    monkeypatch.setattr(sys.modules["ddp_tutorial.processes.launcher"], "make_console", lambda echo: console)

    def work(world):
        for done in range(1, 3):
            progress(done, 2, loss=world.rank + 0.5)

    launch(work, 2, device="cpu")

    assert console.events == [
        ("progress", 1, 2, {"loss": 0.5}),
        ("progress", 2, 2, {"loss": 0.5}),
        ("close", [0, 1]),
    ]


def test_progress_outside_a_launch_has_no_effect(capfd):
    progress(1, 2, loss=3.0)
    launch(lambda world: progress(1, 2), 1, device="cpu", in_process=True)
    assert capfd.readouterr() == ("", "")


# --- failures ---------------------------------------------------------------------------------------------------


def fail_on_rank_1(how, **options):
    """Fail on rank 1 while rank 0 waits for it. Both ranks have printed a line before."""

    def fail(world):
        print("hello from", world.rank)
        dist.barrier()
        if world.rank == 1:
            how()
        dist.barrier()

    with pytest.raises(RankError) as caught:
        launch(fail, 2, device="cpu", echo=False, **options)
    assert caught.value.rank == 1
    assert caught.value.log == "hello from 1"
    assert str(caught.value).startswith(f"rank 1 {caught.value.reason}")
    assert "Meanwhile rank 0 " in str(caught.value)
    return caught.value


def test_rank_0_is_named_if_it_fails_while_others_wait(monkeypatch):
    """The other ranks learn of the failure, raise too, and exit long before rank 0 has closed its files."""
    monkeypatch.setattr(sys.modules["ddp_tutorial.processes.launcher"], "RANK_ZERO_SECONDS", 60.0)

    def prepare(world):
        with rank_zero_first(world):
            if world.is_main:
                raise ConfigError("no disk")

    def prepare_late(world):
        pids = [None] * world.size
        dist.all_gather_object(pids, os.getpid())
        try:
            prepare(world)
        finally:
            if world.is_main:
                wait_until(lambda: all(map(is_gone, pids[1:])))
                time.sleep(GRACE_SECONDS + 1)

    with pytest.raises(RankError) as caught:
        launch(prepare_late, 3, device="cpu", echo=False)
    assert (caught.value.rank, caught.value.reason) == (0, "raised ConfigError: no disk")
    assert caught.value.is_a(ConfigError)
    assert not caught.value.is_a(RankZeroFailedError)
    assert str(caught.value).count("raised RankZeroFailedError: rank 0 failed while rank ") == 2


def test_an_error_that_resembles_rank_0s_failure_is_still_a_cause():
    def fail(world):
        if world.rank == 1:
            raise ValueError("rank 0 failed while rank 1 was waiting for it: no")
        time.sleep(1000)

    with pytest.raises(RankError) as caught:
        launch(fail, 2, device="cpu", echo=False)
    assert (caught.value.rank, caught.value.is_a(RankZeroFailedError)) == (1, False)


def test_an_error_keeps_its_type_even_if_the_parent_cannot_import_it():
    class TooSmallError(ConfigError):
        pass

    def fail(world):
        class OfTheRankError(TooSmallError):
            pass

        raise OfTheRankError("ValueError: 3 is too small")

    with pytest.raises(RankError) as caught:
        launch(fail, 1, device="cpu", echo=False)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.reason == "raised OfTheRankError: ValueError: 3 is too small"
    assert error.message == "ValueError: 3 is too small"
    assert all(map(error.is_a, (TooSmallError, ConfigError, ValueError, Exception)))
    assert not any(map(error.is_a, (KeyError, RuntimeError, RankError)))


def test_a_rank_that_raises_is_named_with_its_source_line_and_output():
    def divide():
        return 1 / 0  # the failing line

    error = fail_on_rank_1(divide)

    assert error.reason == "raised ZeroDivisionError: division by zero"
    assert "return 1 / 0  # the failing line" in error.traceback
    assert "Traceback (most recent call last)" in error.traceback
    for part in (error.traceback.rstrip(), "Last lines that rank 1 printed:\n    hello from 1"):
        assert part in str(error)


def test_a_rank_that_raises_is_named_with_the_line_of_a_cell():
    """The source of a cell is in no file; linecache stores it under a made-up name."""
    import linecache

    source = "def cell(world):\n    x = 1\n    raise ValueError('from a cell')\n"
    namespace = {"__name__": "__main__"}
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(keepends=True), "<cell 7>")
    exec(compile(source, "<cell 7>", "exec"), namespace)
    try:
        with pytest.raises(RankError) as caught:
            launch(namespace["cell"], 1, device="cpu")
    finally:
        del linecache.cache["<cell 7>"]
    assert '"<cell 7>", line 3' in caught.value.traceback
    assert "raise ValueError('from a cell')" in caught.value.traceback


def test_a_rank_killed_by_sigkill_is_named():
    error = fail_on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert error.reason == "was killed by SIGKILL"
    assert error.traceback == error.message == ""
    assert not error.is_a(BaseException)


def test_a_rank_killed_by_a_signal_without_a_name_is_named() -> None:
    number = signal.SIGRTMIN + 1
    assert fail_on_rank_1(lambda: os.kill(os.getpid(), number)).reason == f"was killed by signal {number}"


def test_a_rank_that_calls_os_exit_is_named():
    assert fail_on_rank_1(lambda: os._exit(3)).reason == "exited with code 3 before it returned a result"


def test_a_rank_that_calls_sys_exit_has_failed_even_with_code_0():
    error = fail_on_rank_1(lambda: sys.exit(0))
    assert error.reason == "raised SystemExit: 0"
    assert "sys.exit(0)" in error.traceback


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_exception_that_is_not_an_exception_subclass_is_named(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("by hand")

    error = fail_on_rank_1(fail)
    assert error.reason == f"raised {kind.__name__}: by hand"
    assert error.is_a(kind)
    assert 'raise kind("by hand")' in error.traceback


def test_an_exception_whose_message_cannot_be_shown_is_named() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fail() -> None:
        raise BrokenError

    assert fail_on_rank_1(fail).reason.startswith("raised BrokenError: its message cannot be shown")


@pytest.mark.spawned
def test_a_crash_in_native_code_leaves_a_stack_in_the_log():
    with pytest.raises(RankError, match="rank 0 was killed by SIGSEGV") as caught:
        launch(lambda world: os.kill(os.getpid(), signal.SIGSEGV), 1, device="cpu", echo=False)
    assert "most recent call first" in caught.value.log
    assert "test_launch.py" in caught.value.log


def test_an_early_return_is_reported_with_advice_about_collectives():
    def leave_early(world):
        if world.rank == 1:
            return
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError) as caught:
        launch(leave_early, 2, device="cpu", echo=False)
    assert caught.value.rank == 0  # rank 1 behaved correctly: the error is rank 0's
    assert "dist.all_reduce(torch.ones(1))" in caught.value.traceback
    assert "Meanwhile rank 1 had returned." in str(caught.value)
    assert "Every rank must enter every collective" in str(caught.value)


def test_the_timeout_starts_when_all_ranks_have_started(tmp_path, monkeypatch):
    left, listen, seen = [], _Ranks._listen_until, tmp_path / "seen"

    def noted(self, deadline):
        left.append(deadline - time.monotonic())
        if 30 < left[-1] <= 60:
            seen.touch()
        return listen(self, deadline)

    def return_when_seen(world):
        while not seen.exists():
            time.sleep(0.01)

    monkeypatch.setattr(_Ranks, "_listen_until", noted)
    launch(return_when_seen, 2, device="cpu", timeout=60)
    assert left[0] > START_SECONDS  # no rank has reported yet that it has started
    assert any(30 < each <= 60 for each in left)


def test_a_function_without_a_world_parameter_is_rejected_before_start():
    for fn, args in ((lambda: 1, ()), (lambda world: 1, (2,)), (lambda world, *, key: 1, ())):
        with pytest.raises(TypeError, match=r"The first parameter must be `world`"):
            launch(fn, 2, *args, device="cpu")


def test_after_a_timeout_every_rank_reports_its_stack(monkeypatch):
    """One rank waits in a collective, one sleeps, and one is stopped and cannot respond."""
    monkeypatch.setattr(sys.modules["ddp_tutorial.processes.launcher"], "REPORT_SECONDS", 10.0)  # for the first two

    def hang(world):
        dist.barrier()
        if world.rank == 1:
            time.sleep(1000)  # the line that rank 1 is executing
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(5))

    timeout = 12.0  # enough to start three ranks on a busy machine
    start = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        launch(hang, 3, device="cpu", timeout=timeout, echo=False)
    assert timeout <= time.monotonic() - start < timeout + 60
    assert isinstance(caught.value, TimeoutError)
    assert "did not finish within 12 s (still running: rank 0, 1, 2)" in str(caught.value)
    first, second, third = re.split(r"^rank \d was still running\n", str(caught.value), flags=re.MULTILINE)[1:]
    assert re.search(r"collective \d+, gloo:all_reduce of \[\[5\]\]: waiting", first)
    assert "dist.all_reduce(torch.ones(5))" in first
    assert "time.sleep(1000)  # the line that rank 1 is executing" in second
    assert "barrier" in second
    assert "finished" in second
    assert "The rank did not respond" in third


def test_a_rank_that_returned_but_does_not_exit_is_named():
    def linger(world):
        threading.Thread(target=time.sleep, args=(1000,)).start()  # not a daemon: Python waits for it

    with pytest.raises(RankTimeoutError, match="rank 0 did not finish within 12 s") as caught:
        launch(linger, 1, device="cpu", timeout=12, echo=False)
    assert "had returned" in str(caught.value)


def test_a_flood_of_output_does_not_delay_the_timeout():
    start = time.monotonic()
    with pytest.raises(RankTimeoutError):
        launch(lambda world: os.system("timeout 90 yes"), 1, device="cpu", timeout=4, echo=False)
    assert time.monotonic() - start < 4 + 60, "it waited for the end of what the rank does outside of Python"


def test_without_a_pidfd_the_sentinel_detects_an_exit():
    """A rank on a cluster node has no process ID if it exits early."""
    sentinel, theirs = os.pipe()
    descriptor = exit_descriptor(SimpleNamespace(pid=None, sentinel=sentinel))
    assert not connection.wait([descriptor], 0)
    os.close(theirs)
    assert connection.wait([descriptor], 0)
    os.close(descriptor)
    os.close(sentinel)


def start_a_program_and_fork(world):
    """Start a program and a fork that inherit the rank's descriptors, including the one that signals its exit."""
    os.system("sleep 1000 & echo pid $!")
    if (child := os.fork()) == 0:
        time.sleep(1000)
        os._exit(0)
    print("pid", child)


@pytest.mark.spawned
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("hangs", "did not finish within 8 s"),
        ("raises", "raised ValueError: on purpose"),
        ("is killed", "was killed by SIGKILL"),
    ],
)
def test_processes_started_by_a_rank_are_killed_with_it(how, reason):
    """Rank 1 fails after both ranks started processes. The children of a dead rank are no longer known as such.

    The launch detects the exit of rank 1 immediately; a timeout would report a different reason.
    """

    def work(world, how, start):
        start(world)
        dist.barrier()  # both ranks have started their processes
        if world.rank == 1 and how == "raises":
            raise ValueError("on purpose")
        if world.rank == 1 and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    console = RecordingConsole()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["ddp_tutorial.processes.launcher"], "make_console", lambda echo: console)
        with pytest.raises(RankError, match=f"rank . {reason}"):
            launch(work, 2, how, start_a_program_and_fork, device="cpu", timeout=8 if how == "hangs" else 60)
    pids = [int(event[2].split()[1]) for event in console.events if event[0] == "line" and event[2].startswith("pid")]
    try:
        assert len(pids) == 4
        assert wait_until(lambda: all(map(is_gone, pids)))
    finally:
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


@pytest.mark.spawned
def test_a_rank_exits_cleanly_while_torchs_threads_hold_tensors(capfd):
    def leave_work_behind(world):
        import atexit

        import torch._dynamo

        atexit.register(print, f"rank {world.rank} has called its exit functions")
        for _ in range(3000):
            dist.all_reduce(torch.ones(1000), async_op=True)
        return world.rank

    assert launch(leave_work_behind, 2, timeout=300) == [0, 1]
    shown = capfd.readouterr().out
    assert shown.count("has called its exit functions") == 2, shown
    assert "terminate called" not in shown


def test_a_rank_error_survives_pickling():
    """A pool of processes, such as a sweep, sends errors in this way."""
    for kind in (RankError, RankTimeoutError):
        raised = Raised.of(ValueError("no"))
        error = pickle.loads(pickle.dumps(kind(1, "raised ValueError: no", "trace", "log", "others", raised)))
        assert type(error) is kind
        assert (error.rank, error.reason, error.traceback, error.log) == (1, "raised ValueError: no", "trace", "log")
        assert error.raised == raised
        assert str(error) == str(kind(1, "raised ValueError: no", "trace", "log", "others"))


# --- interrupts and a parent that dies ----------------------------------------------------------------------------

HANGING_LAUNCH = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
import torch.multiprocessing
from ddp_tutorial.processes.launcher import launch

def hang(world):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # such ranks take a while to end
    if "interrupt" not in sys.argv:  # otherwise the parent has already printed the number
        print("pid", os.getpid())
    time.sleep(1000)

spawn = torch.multiprocessing.spawn

def spawn_and_be_interrupted(*args, **options):
    context = spawn(*args, **options)
    for process in context.processes:
        print("[rank ?] pid", process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)  # long enough for any thread to take it
    return context

if "interrupt" in sys.argv:
    torch.multiprocessing.spawn = spawn_and_be_interrupted
print("ready", flush=True)
launch(hang, 2, device="cpu")
"""


def start_hanging_launch(start_python, *arguments):
    """Start a script that launches two ranks, in its own session."""
    process = start_python("-c", HANGING_LAUNCH, *arguments, start_new_session=True)
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


@pytest.fixture
def hanging(start_python):
    return start_hanging_launch(start_python)


def pids_of_ranks(process):
    """Return the process IDs of two ranks, once both have reached the function."""
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(lines), process.communicate()
    # An interrupted `print` of the parent may write its line twice, so wait until its main thread waits for events.
    assert wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    return [int(line.split()[-1]) for line in lines]


def assert_interrupted_once(process, pids):
    out, err = process.communicate(timeout=300)
    assert out == ""
    assert err.count("KeyboardInterrupt") == 1, err
    assert err.count("Traceback") == 1, err  # the parent's traceback; the ranks are silent
    assert process.returncode == -signal.SIGINT
    assert wait_until(lambda: all(map(is_gone, pids)))


def test_an_interrupt_of_the_process_group_raises_once(hanging):
    pids = pids_of_ranks(hanging)
    os.killpg(hanging.pid, signal.SIGINT)
    assert_interrupted_once(hanging, pids)


# To block SIGINT in the main thread is not enough: where there is another thread (the store's, those of a notebook's
# kernel), that one takes the signal, and Python raises KeyboardInterrupt in the main thread all the same.
def test_an_interrupt_while_ranks_start_raises_once_and_terminates_them(start_python):
    hanging = start_hanging_launch(start_python, "interrupt")
    pids = pids_of_ranks(hanging)
    assert_interrupted_once(hanging, pids)


# The same while the ranks are being ended: any that are left would keep the parent from ending, too.
def test_a_second_interrupt_leaves_no_rank_behind(hanging):
    pids = pids_of_ranks(hanging)
    os.killpg(hanging.pid, signal.SIGINT)
    time.sleep(0.3)  # the ranks ignore the first signal
    os.killpg(hanging.pid, signal.SIGINT)
    _, err = hanging.communicate(timeout=300)
    assert "KeyboardInterrupt" in err
    assert hanging.returncode == -signal.SIGINT
    assert wait_until(lambda: all(map(is_gone, pids)))


def test_ranks_do_not_outlive_a_killed_parent(hanging):
    pids = pids_of_ranks(hanging)
    hanging.kill()
    assert wait_until(lambda: all(map(is_gone, pids)))
    assert hanging.communicate(timeout=300) == ("", "")


def test_a_rank_exits_if_its_parent_died_before_it_could_ask():
    """The kernel kills a rank when its parent dies only if the rank has already requested it."""
    origin = SimpleNamespace(parent=os.getppid(), dies_with_thread=False)  # not the actual parent of the child
    if (child := os.fork()) == 0:
        _exit_with_parent(origin)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_processes_that_start_during_a_kill_are_killed_too(monkeypatch):
    killed = []
    found = iter([["first"], ["started meanwhile"], []])

    def marked(*_):
        return [SimpleNamespace(kill=partial(killed.append, name)) for name in next(found)]

    monkeypatch.setattr(process_tags, "tagged_processes", marked)
    process_tags.kill_tagged("VARIABLE", bool)
    assert killed == ["first", "started meanwhile"]


def test_a_process_that_is_about_to_execute_its_program_is_found(monkeypatch):
    """Until the kernel has loaded the program, the environment and the command line are empty."""
    environ, cmdline, early = psutil.Process.environ, psutil.Process.cmdline, iter(range(2))

    def early_environ(process):
        return {} if process == started and next(early, None) is not None else environ(process)

    monkeypatch.setattr(psutil.Process, "environ", early_environ)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: [] if process == started else cmdline(process))
    with subprocess.Popen(["sleep", "300"], env=os.environ | {"VARIABLE": "tag"}) as sleeping:
        started = psutil.Process(sleeping.pid)
        try:
            assert process_tags.tagged_processes("VARIABLE", "tag".__eq__) == [started]
        finally:
            sleeping.kill()


# --- what cannot be sent ------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail if the test starts a process."""

    def start(*_args, **_options):
        pytest.fail("a process was started")

    monkeypatch.setattr(torch.multiprocessing, "spawn", start)


@pytest.mark.usefixtures("nothing_starts")
def test_an_argument_that_cannot_be_pickled_is_named_before_ranks_start():
    def train(world, steps, settings):
        pass

    with pytest.raises(TypeError, match=r"argument 'settings' of .*train\(\)\['locks'\]\[1\] \(lock\) cannot be sent"):
        launch(train, 2, 3, {"locks": [1, LOCK]}, device="cpu")
    with pytest.raises(TypeError, match=r"argument 'steps' of .*train\(\) \(lock\) .*Create it inside the function"):
        launch(train, 2, LOCK, {}, device="cpu")


@pytest.mark.usefixtures("nothing_starts")
def test_a_variable_that_cannot_be_pickled_is_named_before_ranks_start():
    guard = threading.Lock()

    def uses_closure(world):
        return guard.locked()

    def uses_global(world):
        return LOCK.locked()

    with pytest.raises(TypeError, match=r"the variable 'guard' that .*uses_closure\(\) uses \(lock\)"):
        launch(uses_closure, 2, device="cpu")
    with pytest.raises(TypeError, match=r"the global variable 'LOCK' that .*uses_global\(\) uses \(lock\)"):
        launch(uses_global, 2, device="cpu")


def test_a_result_that_cannot_be_pickled_is_named():
    def locked(world):
        return {"f": 1, "g": [0, threading.Lock()]} if world.rank == 1 else None

    with pytest.raises(RankError) as caught:
        launch(locked, 2, device="cpu")
    assert caught.value.rank == 1
    assert "result['g'][1] (lock) cannot be sent back to the parent" in caught.value.reason
    assert "Return plain data instead" in caught.value.reason


def test_a_result_that_cannot_be_unpickled_is_reported():
    class Unwilling:
        def __init__(self):
            self.home = os.getpid()

        def __setstate__(self, state):
            raise ValueError("I am at home elsewhere")

    reason = "returned a value that the parent process cannot unpickle: ValueError: I am at home"
    with pytest.raises(RankError, match=reason):
        launch(lambda world: Unwilling(), 1, device="cpu")


# --- bad arguments ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("given", "error", "advice"),
    [
        ({"nprocs": 0}, ValueError, r"'nprocs' must be a positive integer such as 2, got 0"),
        ({"nprocs": -1}, ValueError, r"'nprocs' must be a positive integer such as 2, got -1"),
        ({"nprocs": True}, ValueError, r"'nprocs' must be .*got True"),
        ({"nprocs": "2"}, ValueError, r"'nprocs' must be .*got '2'"),
        ({"nprocs": 2.0}, ValueError, r"'nprocs' must be .*got 2\.0"),
        ({"timeout": 0}, ValueError, r"'timeout' must be a positive number of seconds, or None .*got 0"),
        ({"timeout": -1.5}, ValueError, r"'timeout' must be a positive number of seconds, or None .*got -1\.5"),
        ({"collective_timeout": math.inf}, ValueError, r"'collective_timeout' must be a positive number .*got inf"),
        ({"threads": 0}, ValueError, r"'threads' must be a positive integer, or None .*got 0"),
        ({"fn": 2}, TypeError, r"launch\(fn, nprocs\): 'fn' must be a function, got 2"),
        ({"nprocs": 2, "in_process": True}, ValueError, r"got 2\. Use nprocs=1, or omit in_process"),
        ({"device": "gpu"}, ValueError, r"device must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        ({"device": "cuda"}, ValueError, r"device='cuda' requires one GPU .*2 ranks.*got 0\. Use device='cpu'"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected_with_advice(monkeypatch, given, error, advice):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    call = SimpleNamespace(**({"fn": print, "nprocs": 2, "device": "cpu"} | given))
    fn, nprocs = call.__dict__.pop("fn"), call.__dict__.pop("nprocs")
    with pytest.raises(error, match=advice):
        launch(fn, nprocs, **vars(call))


@pytest.mark.spawned
@pytest.mark.parametrize("pipes", [5, 100])
def test_a_launch_that_cannot_start_leaves_no_descriptor_open(pipes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes or processes are exhausted."""
    left, pipe = [0], os.pipe

    def scarce() -> tuple[int, int]:
        left[0] -= 1
        return pipe() if left[0] >= 0 else no_more()

    def no_more(*_: object, **__: object) -> Any:
        raise OSError("there are no more")

    monkeypatch.setattr(os, "pipe", scarce)
    monkeypatch.setattr(torch.multiprocessing, "spawn", no_more)
    counts = []
    for _ in range(3):
        left[0] = pipes
        with pytest.raises(OSError, match="no more"):
            launch(print, 4, device="cpu", echo=False)
        gc.collect()
        counts.append(psutil.Process().num_fds())
    assert counts[0] == counts[2]


def test_the_collective_timeout_is_respected():
    def late(world):
        if world.rank == 1:
            time.sleep(100)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?i)timed? ?out"):
        launch(late, 2, device="cpu", echo=False, collective_timeout=2)
    assert time.monotonic() - start < 90
    with pytest.raises(ValueError, match=r"'collective_timeout' must be a positive number of seconds, got 0"):
        launch(late, 2, device="cpu", collective_timeout=0)
