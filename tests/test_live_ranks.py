"""Persistent ranks keep their variables, survive errors, hangs and interrupts, and never outlive their parent."""

import array
import ast
import fcntl
import io
import json
import math
import os
import random
import re
import runpy
import select
import shlex
import signal
import socket
import stat
import sys
import termios
import threading
import time
from contextlib import ExitStack, contextmanager, redirect_stdout
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_tutorial.benches import as_text
from ddp_tutorial.benches.ranks import measure
from ddp_tutorial.config import ConfigError
from ddp_tutorial.debug.hangs import REPORT_SECONDS, CollectiveError, watching
from ddp_tutorial.live import controller
from ddp_tutorial.live.display import RankResults
from ddp_tutorial.live.magics import MagicError, RankMagics, _ranks_of
from ddp_tutorial.live.pool import Ranks
from ddp_tutorial.live.script import ScriptStep, assignment_step, indented, launch_command, make_script
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import launch
from kernel import Kernel
from ranks import is_gone, wait_until

IMPORTS = "import os, signal, sys, time, torch, torch.distributed as dist"
PATIENCE = 1.0


@pytest.fixture(scope="module")
def one_pool(ranks_are_forked):
    with Ranks(2, threads=1, device="cpu", wait_timeout=PATIENCE) as ranks:
        ranks.execute(IMPORTS)
        yield ranks
        pids = [each["pid"] for each in ranks.status()]
    assert gone(pids), "stopped, and yet there"


@pytest.fixture
def ranks(one_pool):
    """Return working ranks, whatever the previous test did to them."""
    if any(each["state"] != "ready" for each in one_pool.status()):
        one_pool.restart()
    one_pool.execute(IMPORTS)
    return one_pool


def gone(pids, within=30.0):
    return wait_until(lambda: all(is_gone(pid) for pid in pids if pid), within)


def are_together(ranks):
    ranks.execute("import torch, torch.distributed as dist; together = torch.tensor(world.rank + 1)")
    ranks.execute("dist.all_reduce(together)")
    return [int(each) for each in ranks.get("together")] == [3, 3]


@contextmanager
def interrupt_after(seconds, ranks):
    """Interrupt the next call of a pool, `seconds` after the ranks have been asked."""
    before = ranks._number

    def interrupt():
        wait_until(lambda: ranks._number > before)  # an earlier interrupt would not reach the pool
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# --------------------------------------------------------------------------------------------- what they keep, and say


def test_variables_persist_between_calls(ranks):
    ranks.execute("x = 10 * world.rank\ndef twice():\n    return 2 * x")
    assert repr(ranks.execute("twice()")) == "rank 0: 0\nrank 1: 20"
    assert ranks.get("x") == [0, 10]
    ranks.put(x=7, y=[1, 2])
    assert ranks.get("x + len(y)") == [9, 9]
    ranks.put(on=[1], x=8)
    assert ranks.get("x") == [7, 8]
    assert ranks.get("x", on=[1]) == [8]
    offset = 5
    assert ranks.run(lambda world, more: world.rank + offset + more, 100) == [105, 106]


def test_a_class_of_a_cell_can_be_returned(ranks):
    ranks.execute("from dataclasses import dataclass\n@dataclass\nclass Found:\n    rank: int\nit = Found(world.rank)")
    assert [each.rank for each in ranks.get("it")] == [0, 1]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("1 + 1", "all ranks: 2"),
        ("world.rank", "rank 0: 0\nrank 1: 1"),
        ("x = 1", ""),
        ("world.rank;", ""),
        ("if world.rank: 1\nelse: 2", ""),
        ("torch.ones(2, 2)", "all ranks:\ntensor([[1., 1.],\n        [1., 1.]])"),
        ("world.rank or None", "rank 1: 1"),
        ("", ""),
        ("# nothing", ""),
    ],
)
def test_the_last_expression_is_grouped_by_equal_values(ranks, source, shown):
    assert repr(ranks.execute(source)) == shown


def test_equal_values_of_some_ranks_are_grouped():
    assert repr(RankResults({0: "a", 1: "b", 2: "a"}, 3)) == "ranks 0 and 2: a\nrank 1: b"
    assert repr(RankResults({0: "a"}, 1)) == "rank 0: a"


def test_output_of_ranks_is_complete_and_prefixed(ranks, capfd):
    ranks.execute("print('line', world.rank); os.system('echo a child'); sys.stderr.write('error output')")
    said = capfd.readouterr().out
    for rank in (0, 1):
        mine = [line for line in said.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] line {rank}", f"[rank {rank}] a child", f"[rank {rank}] error output"]
    ranks.execute("for i in range(20_000): print(i)", on=[1])
    assert "[rank 1] 19999\n" in capfd.readouterr().out
    ranks.execute("display({'a': world.rank})")
    assert "[rank 0] {'a': 0}\n[rank 1] {'a': 1}" in capfd.readouterr().out


def test_no_rank_listens_on_the_network(ranks):
    for pid in [os.getpid(), *(each["pid"] for each in ranks.status())]:
        for each in psutil.Process(pid).net_connections("inet"):
            assert each.status != "LISTEN" or each.laddr.ip in {"127.0.0.1", "::1"}, each


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_an_error_shows_the_ranks_lines_and_keeps_the_variables(ranks):
    ranks.execute("kept = world.rank")
    with pytest.raises(RankError) as caught:
        ranks.execute("y = 1\nif world.rank == 1:\n    raise ValueError('a bad sample')")
    assert caught.value.rank == 1
    assert caught.value.is_a(ValueError)
    assert re.search(r"call \d+, line 3, in <module>\n +raise ValueError\('a bad sample'\)", str(caught.value))
    assert "pool.py" not in str(caught.value)
    assert "member.py" not in str(caught.value)
    assert "process group" not in str(caught.value), "all were in step, so the group is kept"
    assert ranks.get("kept") == [0, 1]
    assert are_together(ranks)


def test_an_error_on_all_ranks_is_reported_once(ranks):
    with pytest.raises(RankError, match="raised NameError: name 'nobody' is not defined") as caught:
        ranks.execute("nobody")
    assert str(caught.value).count("not defined") == 2  # in the first line and at the end of the traceback
    assert re.search(r"The same failure occurred on rank [01]\.", str(caught.value))
    with pytest.raises(RankError, match="raised SyntaxError"):
        ranks.execute("x = = 1")


def test_ranks_that_wait_for_a_failed_rank_are_reported_and_woken(ranks):
    ranks.execute("kept = world.rank")
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.execute("if world.rank == 1:\n    raise ValueError('a bad sample')\ndist.all_reduce(torch.ones(3))")
    told = str(caught.value)
    assert caught.value.rank == 1
    assert "rank 1 raised ValueError: a bad sample" in told
    assert re.search(r"Rank 0 waits in all_reduce \[3\] float \(call \d+, line 3, in <module>\)", told)
    assert "rank 1 has raised an error" in told
    assert "have formed a new process group" in told
    assert time.monotonic() - began < 50
    assert ranks.get("kept") == [0, 1]
    assert are_together(ranks)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "dist.all_reduce(torch.ones(3)) if world.rank == 0 else time.sleep(60)",
            ["Rank 0 waits in all_reduce [3] float", "rank 1 has not entered it: it is at call"],
        ),
        (
            "dist.all_reduce(torch.ones(3)) if world.rank == 0 else dist.broadcast(torch.ones(2), 1); dist.barrier()",
            ["the order of collectives differs", "Rank 0 waits in all_reduce"],
        ),
        ("if world.rank == 1: dist.barrier()", ["Rank 1 waits in barrier", "rank 0 is idle"]),
    ],
    ids=["absent", "order", "ended"],
)
def test_a_hang_is_reported_and_aborted(ranks, source, said):
    ranks.execute("kept = world.rank")
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        ranks.execute(source)
    assert time.monotonic() - began < PATIENCE + 50
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert ranks.get("kept") == [0, 1]
    assert are_together(ranks)


def test_a_rank_that_finished_the_call_is_not_waited_for_long(ranks, monkeypatch):
    monkeypatch.setattr(ranks, "wait_timeout", 120)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 0 is idle"):
        ranks.execute("if world.rank == 1: dist.barrier()")
    assert time.monotonic() - began < 60


def test_a_rank_that_computes_is_waited_for(ranks):
    slow = "if world.rank == 1:\n    end = time.monotonic() + 2.5\n    while time.monotonic() < end: sum(range(1000))\n"
    ranks.execute(f"x = torch.ones(1)\n{slow}dist.all_reduce(x)")
    assert [each.item() for each in ranks.get("x")] == [2.0, 2.0]


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "time.sleep(60)",
        "import contextlib\nwith contextlib.suppress(KeyboardInterrupt): time.sleep(60)",
        "dist.barrier() if world.rank == 0 else time.sleep(60)",
    ],
)
def test_an_interrupt_stops_the_call_and_keeps_the_ranks(ranks, source):
    ranks.execute("kept = world.rank")
    before = ranks.status()
    with interrupt_after(1.0, ranks), pytest.raises(KeyboardInterrupt) as caught:
        ranks.execute(source)
    assert re.search(r"rank 1 (was at call \d+, line \d|had finished the call)", str(caught.value))
    assert [each["pid"] for each in ranks.status()] == [each["pid"] for each in before]
    assert ranks.get("kept") == [0, 1]
    assert are_together(ranks)


def test_a_dead_rank_is_reported_and_restart_replaces_it(ranks):
    ranks.execute("kept = world.rank")
    with pytest.raises(RankError, match=r"rank 1 was killed by SIGKILL") as caught:
        ranks.execute("if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert "Rank 0 is still running and keeps its variables" in str(caught.value)
    living, dead = ranks.status()
    assert (living["state"], dead["state"], dead["pid"]) == ("ready", "was killed by SIGKILL", None)
    assert living["memory"] > 10e6 > dead["memory"] == 0
    with pytest.raises(RankError, match="rank 1 is dead: the process was killed by SIGKILL"):
        ranks.execute("1")
    assert repr(ranks.execute("kept", on=[0])) == "rank 0: 0", "to save what it has"
    assert ranks.restart() == [1]
    assert are_together(ranks)
    assert ranks.get("kept", on=[0]) == [0]
    with pytest.raises(RankError, match="NameError"):
        ranks.get("kept")
    assert ranks.restart() == [0, 1], "with no dead one, all start anew"
    assert are_together(ranks)
    with pytest.raises(RankError, match="NameError"):
        ranks.get("kept", on=[0])


def test_unsupported_actions_are_rejected_with_an_explanation(ranks):
    for wrong, words in (
        (lambda: Ranks(0), "'n' must be a positive integer such as 2, got 0"),
        (lambda: Ranks(2, threads=0), "'threads' must be .*got 0"),
        (lambda: Ranks(2, wait_timeout=0), "'wait_timeout' must be .*got 0"),
        (lambda: Ranks(2, collective_timeout=math.inf), "'collective_timeout' must be .*got inf"),
        (lambda: ranks.execute("1", on=[2]), "rank must be between 0 and 1, got 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            wrong()
    with pytest.raises(TypeError, match="lock"):
        ranks.put(lock=threading.Lock())
    with pytest.raises(RankError, match="cannot be sent back"):
        ranks.get("sys._getframe()")
    assert are_together(ranks)


def test_results_are_in_rank_order_and_each_rank_runs_a_call_once(ranks):
    ranks.execute("count = 0")
    assert ranks.run(lambda world: world.rank, on=[1, 0]) == [0, 1]
    ranks.execute("count += 1", on=[1, 1])
    assert ranks.get("count") == [0, 1]


def test_a_rank_that_does_not_join_the_group_is_reported(ranks):
    os.kill(ranks.status()[1]["pid"], signal.SIGSTOP)
    with (
        mock.patch.object(controller, "GROUP_SECONDS", 1.0),
        pytest.raises(RankTimeoutError, match="rank 0 did not join the process group within 1 s"),
    ):
        ranks._form_group()
    ranks.restart()
    ranks.execute("import os; del os.environ['MASTER_ADDR']", on=[1])
    with pytest.raises(RankError, match="rank 1 raised KeyError: 'MASTER_ADDR'"):
        ranks._form_group()
    ranks.restart(everything=True)
    assert are_together(ranks)


def test_the_ranks_have_a_group_after_an_interrupted_restart(ranks):
    with (
        mock.patch.object(ranks, "_wait_until_started", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ranks.restart(everything=True)
    assert are_together(ranks)


def test_ranks_that_could_not_be_started_can_be_restarted(ranks):
    start, pids = ranks._place.start, []

    def start_one(workers, *settings):
        start(workers[:1], *settings)
        pids.append(workers[0].process.pid)
        raise OSError("out of processes")

    with mock.patch.object(ranks._place, "start", start_one), pytest.raises(OSError, match="out of processes"):
        ranks.restart(everything=True)
    assert [each["state"] for each in ranks.status()] == ["could not be started"] * 2
    with pytest.raises(RankError, match="rank 0 is dead: the process could not be started"):
        ranks.execute("1")
    assert ranks.restart() == [0, 1]
    assert are_together(ranks)
    assert gone(pids)


def test_an_error_outside_of_a_collective_keeps_the_group_even_after_a_restart(ranks):
    ranks.restart(everything=True)
    assert are_together(ranks)
    os.kill(ranks.status()[1]["pid"], signal.SIGKILL)
    assert wait_until(lambda: ranks.status()[1]["state"] == "was killed by SIGKILL")
    assert ranks.restart() == [1]
    assert are_together(ranks)
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        ranks.execute("1 / 0")
    assert "process group" not in str(caught.value)


def test_an_error_keeps_the_group_if_ranks_belong_to_different_subgroups(ranks):
    ranks.execute(
        "import torch, torch.distributed as dist; mine = [dist.new_group([0]), dist.new_group([1])][world.rank]"
    )
    ranks.execute("both = dist.new_group([0, 1]); one = torch.ones(1)")
    ranks.execute("for _ in range(world.rank + 1): dist.all_reduce(one, group=mine)")
    ranks.execute("dist.all_reduce(one, group=both)")
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        ranks.execute("1 / 0")
    assert "process group" not in str(caught.value)
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        ranks.execute("dist.broadcast(one, 0, group=both) if world.rank == 0 else 1 / 0")
    assert "have formed a new process group" in str(caught.value)
    assert are_together(ranks)


def test_an_exception_whose_message_cannot_be_shown_is_reported(ranks):
    ranks.execute("class Broken(Exception):\n    def __str__(self):\n        raise KeyError")
    for raised in (ranks.execute, lambda code: ranks.execute(code, on=[1])):
        with pytest.raises(
            RankError, match=r"rank \d raised Broken: its message cannot be shown, because __str__ raised KeyError"
        ):
            raised("raise Broken")
    assert are_together(ranks)


def test_a_rank_may_exit_while_a_request_is_sent_to_it(ranks):
    """The pool then closes the pipe of a request that it has not written yet."""
    worker = ranks._workers[1]
    worker.process.kill()
    assert wait_until(lambda: select.select([worker._exit], [], [], 0)[0])
    ranks._begin("nothing", on=ranks._workers)
    while not worker.death:
        assert ranks._receive(30.0)
    assert ranks.restart() == [1]
    assert are_together(ranks)


def watched(world, is_slow):
    with watching(world, 0.5) as watch:
        if is_slow:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2))
            until = time.monotonic() + 3 * world.rank
            while time.monotonic() < until:
                pass
            dist.all_reduce(torch.ones(2))
            return watch.inspect().kind
        if world.is_main:
            return dist.broadcast(torch.ones(2), 0)
        return dist.all_reduce(torch.ones(2))


def test_watching_ignores_the_collectives_of_the_previous_group(ranks, monkeypatch):
    mismatch = "dist.all_reduce(torch.ones(3)) if world.rank == 0 else dist.broadcast(torch.ones(2), 1)"
    with pytest.raises(CollectiveError, match="the order of collectives differs"):
        ranks.execute(mismatch)
    monkeypatch.setattr(ranks, "wait_timeout", 60.0)
    assert ranks.run(watched, True) == ["none", "none"]


def test_the_diagnosis_of_watching_reaches_the_notebook(ranks, monkeypatch):
    monkeypatch.setattr(ranks, "wait_timeout", 60.0)
    with pytest.raises(RankError, match="rank 0 raised CollectiveError: the order of collectives differs") as caught:
        ranks.run(watched, False)
    assert caught.value.is_a(CollectiveError)
    assert ranks.restart() == [0]
    time.sleep(REPORT_SECONDS)
    assert are_together(ranks), "rank 1 raised its own error, so its monitoring thread does not terminate it"


# ------------------------------------------------------------------------------------------------ 100 random acts

# What is done, on all ranks; and what has to be told, by one of these errors; None where all is well.
ACTS = {
    "work": ("x = torch.ones(1); dist.all_reduce(x)", None, ""),
    "print": ("for i in range(5000): print('so much to say', i)", None, ""),
    "raise": ("raise ValueError('oh')", RankError, "oh"),
    "raise on one": ("if world.rank == {rank}: raise ValueError('oh')", RankError, "rank {rank} raised ValueError"),
    "leave": ("if world.rank == {rank}: sys.exit(3)\ndist.barrier()", RankError, "rank {rank} raised SystemExit"),
    "exit": ("if world.rank == {rank}: os._exit(3)\ndist.barrier()", RankError, "rank {rank} exited with code 3"),
    "kill": ("if world.rank == {rank}: os.kill(os.getpid(), 9)", RankError, "rank {rank} was killed by SIGKILL"),
    "hang": ("if world.rank == {rank}: dist.barrier()", CollectiveError, "ank {rank} waits in barrier"),
    "interrupt": ("time.sleep(60)", KeyboardInterrupt, "interrupted"),
    "interrupt in collective": ("time.sleep(60) if world.rank == {rank} else dist.barrier()", KeyboardInterrupt, ""),
}
ODDS = {"work": 30, "print": 12, "raise": 14, "raise on one": 14, "leave": 4, "exit": 5, "kill": 5, "hang": 4}
ODDS |= {"interrupt": 8, "interrupt in collective": 4}


def test_a_hundred_random_actions_leave_a_working_pool_and_no_process(ranks):
    assert sum(ODDS.values()) == 100
    chance = random.Random(0)
    acts = [name for name, times in ODDS.items() for _ in range(times)]
    chance.shuffle(acts)
    pids, ranks.echo = set(), False
    try:
        for name in acts:
            rank = chance.randrange(2)
            source, error, said = ACTS[name]
            pids |= {each["pid"] for each in ranks.status()}
            source = source.replace("{rank}", str(rank))
            if error is None:
                ranks.execute(source)
                continue
            with pytest.raises(error) as caught:  # noqa: PT012
                if error is KeyboardInterrupt:
                    with interrupt_after(chance.uniform(0.1, 0.3), ranks):
                        ranks.execute(source)
                else:
                    ranks.execute(source)
            assert said.replace("{rank}", str(rank)) in str(caught.value), f"{name}: {caught.value}"
            if name in {"exit", "kill"}:
                assert ranks.restart() == [rank]
                ranks.execute(IMPORTS, on=[rank])
            assert ranks.execute("1 + 1") == {0: "2", 1: "2"}
    finally:
        ranks.echo = True
    assert are_together(ranks)
    alive = {each["pid"] for each in ranks.status()}
    assert gone(pids - alive - {None}), "a rank that was replaced is still there"


def test_a_ranks_death_is_detected_despite_its_child_processes(monkeypatch):
    """The ranks are spawned, because only a spawned rank's sentinel leaks into its child processes."""
    monkeypatch.setattr(torch.multiprocessing, "spawn", sys.modules["torch.multiprocessing.spawn"].spawn)
    with Ranks(2, threads=1, device="cpu", echo=False) as pool:
        pool.execute(IMPORTS)
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            pool.execute(
                "if world.rank == 1:\n    os.system('sleep 50 &')\n"
                "    if os.fork(): os.kill(os.getpid(), 9)\n    time.sleep(50)\n    os._exit(0)\n"
                "dist.barrier()"
            )
        assert time.monotonic() - began < 45


def test_waking_a_rank_keeps_its_other_connections_open(ranks):
    """An example is a connection to a database on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as database, ExitStack() as stack:
        ranks.put(port=database.getsockname()[1])
        ranks.execute("import socket; database = socket.create_connection(('127.0.0.1', port))")
        sessions = [stack.enter_context(database.accept()[0]) for _ in range(2)]
        with pytest.raises(CollectiveError, match="the order of collectives differs"):
            ranks.execute("dist.all_reduce(torch.ones(3)) if world.rank == 0 else dist.broadcast(torch.ones(2), 1)")
        assert all(each.was_woken for each in ranks._workers)
        ranks.execute("database.sendall(b'still open')")
        for session in sessions:
            session.settimeout(20)
            assert session.recv(10) == b"still open"
    assert are_together(ranks)


def unread(sender):
    """Return the number of unread bytes in a pipe."""
    found = array.array("i", [0])
    fcntl.ioctl(sender._fd, termios.FIONREAD, found)
    return found[0]


def test_a_stopped_rank_does_not_block_the_pool(ranks, monkeypatch):
    """Not during 400 progress checks, not with full pipes, and not with a request that is larger than a pipe."""
    monkeypatch.setattr(controller, "POLL_SECONDS", 0.005)
    control, pid, waiting = ranks._workers[1]._control, ranks.status()[1]["pid"], []

    def stop():
        time.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        waiting.append(unread(control))
        os.write(control._fd, bytes(1 << 16)[: fcntl.fcntl(control._fd, fcntl.F_GETPIPE_SZ) - waiting[0]])
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt, match="rank 1 did not react to an interrupt, and was killed"):
        ranks.execute("time.sleep(60)")
    stopper.join()
    assert waiting[0] < 200, "more than one unanswered look"

    assert ranks.restart() == [1]
    os.kill(ranks.status()[1]["pid"], signal.SIGSTOP)
    with interrupt_after(0.4, ranks), pytest.raises(KeyboardInterrupt, match="rank 1 did not react"):
        ranks.put(large=bytes(1 << 20))
    assert ranks.get("len(large)", on=[0]) == [1 << 20]


@pytest.mark.parametrize("what", ["wake", "interrupt"])
def test_messages_for_an_earlier_call_do_not_affect_a_later_call(ranks, what):
    """A slow rank may read a message only after the next call has started."""
    late = threading.Timer(0.3, lambda: ranks._workers[0].control(what, ranks._number - 1))
    late.start()
    ranks.execute("time.sleep(0.6)")
    late.join()
    assert are_together(ranks)


# -------------------------------------------------------------------------------------------------------- a script


def run_script(world, script):
    """Return the lines that a script prints, in the process group of `launch`."""
    printed = io.StringIO()
    with (
        redirect_stdout(printed),
        mock.patch.object(dist, "init_process_group") as initialize,
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(str(script))
    initialize.assert_called_once_with("gloo")
    return printed.getvalue().splitlines()


def test_cells_become_a_script_for_all_ranks(tmp_path):
    steps = [
        ScriptStep("import torch\nimport torch.distributed as dist"),
        assignment_step("rate", 0.5),
        ScriptStep('text = """one\n  two"""\nx = rate * torch.ones(1)', (1,)),
        ScriptStep("x = torch.zeros(1)", (0,)),
        ScriptStep("dist.all_reduce(x)\nx.item()  # the sum"),
        ScriptStep("é = 2; é"),
        ScriptStep("(len(text),\n text)", (1,)),
    ]
    script = tmp_path / "out.py"
    script.write_text(make_script(steps, "out.py", 2, 1, "cpu", "gloo"))
    said = launch(run_script, 2, script, device="cpu", threads=1, echo=False)
    assert said == [
        ["[rank 0] 0.5", "[rank 0] 2"],
        ["[rank 1] 0.5", "[rank 1] 2", "[rank 1] (9, 'one\\n  two')"],
    ]


@pytest.mark.parametrize("value", ["a token", {"token": 1}, b"token", lambda: "token", math.inf])
def test_a_script_contains_no_text_or_object_from_put(value):
    step = assignment_step("secret", value)
    assert step.lacks == "secret"
    assert "token" not in step.source
    with pytest.raises(NotImplementedError, match="assign a value to secret here"):
        exec(step.source)


@pytest.mark.parametrize("name", ["my runs/out file.py", 'a"""b.py', "a\\b'.py"])
def test_a_script_describes_how_to_run_it_under_any_name(name):
    assert shlex.split(launch_command(name, 2))[-1] == name
    assert launch_command(name, 2) in ast.get_docstring(ast.parse(make_script([], name, 2, 1, "cpu", "gloo")))


def test_lines_inside_strings_are_not_indented():
    assert indented('x = """a\nb"""\ny = 1') == '    x = """a\nb"""\n    y = 1'


@pytest.mark.parametrize(
    ("text", "found"), [("", None), ("0", [0]), ("1-3", [1, 2, 3]), ("0,2", [0, 2]), ("2 0", [0, 2])]
)
def test_ranks_of_a_cell_are_parsed(text, found):
    assert _ranks_of(text, 4) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [("4", "got 4"), ("x", "must be specified as in"), ("1-9", "got 4"), ("3-1", "must be specified as in")],
)
def test_nonexistent_ranks_are_rejected(text, said):
    with pytest.raises(MagicError, match=said):
        _ranks_of(text, 4)


@pytest.fixture
def magics():
    """Return magics whose pool records each action."""
    magics = RankMagics(None)
    magics.notebook = mock.Mock(user_ns={"known": 1})
    magics.pool = mock.Mock(n=2, threads=1, device="cpu", backend="gloo", nodes=1)
    return magics


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("restart 1", "restart: unrecognized arguments: 1"),
        ("stop 1", "stop: unrecognized arguments: 1"),
        ("put known unknown", "this notebook has no variable 'unknown'"),
        ("put 'known", "%ranks put 'known: a quotation mark must be closed"),
    ],
)
def test_a_rejected_command_changes_nothing(magics, line, said):
    pool = magics.pool
    with pytest.raises(MagicError, match=said):
        magics.ranks(line)
    assert pool.mock_calls == []
    assert magics.pool is pool
    assert magics.steps == []


def test_put_assigns_all_variables_or_none(magics, ranks):
    ranks.execute("known = 0")
    magics.pool = ranks
    magics.notebook.user_ns["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        magics.ranks("put known lock")
    assert ranks.get("known") == [0, 0]
    assert magics.steps == []


def test_put_assigns_a_variable_of_any_name(magics, ranks):
    magics.pool = ranks
    magics.notebook.user_ns |= {"on": 1, "self": 2}
    magics.ranks("put on self")
    assert ranks.get("on, self") == [(1, 2), (1, 2)]
    ranks.put(self=3)
    assert ranks.get("self") == [3, 3]


def test_a_script_may_be_written_to_the_home_folder(magics, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    magics.ranks("script ~/mine/out.py")
    assert "torchrun" in (tmp_path / "mine/out.py").read_text()


# --------------------------------------------------------------------------------------------------- in a notebook


@pytest.fixture
def notebook(tmp_path):
    notebook = Kernel(tmp_path)
    yield notebook
    notebook.end()


FIGURE = """%%ranks
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(2, 1))
_ = axes.plot([0, world.rank])
plt.show()"""


def test_magics_leave_no_ranks_after_the_kernel(notebook, tmp_path):
    assert "no ranks are running" in notebook.run("%load_ext ddp_tutorial\n%ranks status")["error"]
    assert (
        notebook.run("%ranks start -n 2 --threads 1 --wait-timeout 2 --device cpu")["printed"]
        == "2 ranks on cpu, gloo\n"
    )
    cell = notebook.run("%%ranks\nimport torch, torch.distributed as dist\nloss = torch.tensor(world.rank)\nloss")
    assert cell["result"] == "rank 0: tensor(0)\nrank 1: tensor(1)"
    assert not cell["error"]
    assert notebook.run("%ranks get loss")["result"] == "[tensor(0), tensor(1)]"
    assert notebook.run("sum(loss)")["result"] == "tensor(1)"
    assert notebook.run("config = {'rate': 2}\n%ranks put config")["error"] == ""
    assert notebook.run("%%rank0\nconfig['rate']")["result"] == "rank 0: 2"

    drawn = notebook.run(FIGURE)
    assert not drawn["error"]
    assert [bool(each.get("image/png")) for each in drawn["shown"]] == [True, True], "a figure from each rank"
    assert drawn["printed"] == "[rank 0]\n[rank 1]\n"

    failed = notebook.run("%%ranks 1\nx = 1\nx / 0")
    said = rf"Cell In\[{failed['number']}\], line 3, in <module>\n +x / 0"
    assert re.search(said, failed["error"]), failed["error"]
    assert "RankError: rank 1 raised ZeroDivisionError" in failed["error"]
    assert "pool.py" not in failed["error"]
    hung = notebook.run("%%ranks\nif world.rank == 0:\n    dist.barrier()")
    said = rf"Rank 0 waits in barrier \(Cell In\[{hung['number']}\], line 3, in <module>\)"
    assert re.search(said, hung["error"]), hung["error"]
    assert "pool.py" not in hung["error"]

    notebook.run("%%ranks\nimport os")
    pids = json.loads(notebook.run("%ranks get os.getpid()")["result"])

    def both_sleep():
        wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)), 120)

    sleep = "%%ranks\nimport time\nopen(f'up{world.rank}', 'w').close()\ntime.sleep(1000)"
    asleep = notebook.interrupted(sleep, when=both_sleep)
    assert asleep["error"].startswith("KeyboardInterrupt: interrupted"), asleep["error"]
    after = notebook.run("%%ranks\ndist.all_reduce(loss)\nloss")
    assert not after["error"], after["error"]
    assert after["result"] == "all ranks: tensor(1)"
    assert "cumsum" in notebook.run("%%rank0\nloss.cumsum?")["printed"]
    answer = notebook.client.complete("%%ranks\nconf", reply=True, timeout=60)
    assert "config" in answer["content"]["matches"]
    assert notebook.run("%ranks script 'an out.py'")["printed"] == (
        "an out.py: torchrun --nproc-per-node 2 'an out.py'\n"
        "First assign a value to config in the script. The script contains values from %ranks put only if they are "
        "numbers.\n"
    )
    script = tmp_path / "an out.py"
    assert "loss" in script.read_text()
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert len(pids) == 2
    assert not gone(pids, within=0.1)
    notebook.manager.shutdown_kernel(now=True)
    assert gone(pids), "ranks have outlived their kernel"


def test_a_call_is_faster_than_a_launch():
    """`python -m ddp_tutorial bench ranks` measures the difference with spawned ranks."""
    found = measure(repeats=2)
    assert found["ratios"]["pool_call_vs_launch"] < 1
    assert "pool_cell" in as_text(found)
