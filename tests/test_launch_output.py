"""Output of ranks other than results: log lines and figures; and concurrent launches."""

import base64
import logging
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from ddp_tutorial.processes import spawn
from ddp_tutorial.processes.console import NotebookConsole
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.spawn import oversubscription_warning


def without_pytests_logging(monkeypatch):
    """Reset Python's logging to that of a fresh process.

    Used inside a test, because pytest sets its handlers when a test starts.
    """
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)


def test_the_logging_setup_of_the_parent_applies_in_the_ranks(capfd, monkeypatch):
    def talk(world):
        logging.debug("too much")
        logging.info("told by %d", world.rank)
        logging.getLogger("mine").warning("by name")

    without_pytests_logging(monkeypatch)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s | %(message)s")
    launch(talk, 2, device="cpu")
    lines = capfd.readouterr().out.splitlines()
    for rank in range(2):
        own = [f"[rank {rank}] INFO | told by {rank}", f"[rank {rank}] WARNING | by name"]
        assert [line for line in lines if f"rank {rank}]" in line] == own
    assert len(lines) == 4


def test_without_a_logging_setup_ranks_show_only_warnings(capfd, monkeypatch):
    without_pytests_logging(monkeypatch)

    def talk(world):
        logging.getLogger("mine").info("too much")
        logging.getLogger("mine").warning("a warning")

    launch(talk, 1, device="cpu")
    assert capfd.readouterr().out == "[rank 0] a warning\n"


def test_a_figure_of_a_rank_appears_under_its_number(capsys, monkeypatch):
    displayed = []

    def show(data, raw):
        print(f"a picture: {raw}")
        displayed.append(data["image/png"])

    monkeypatch.setattr("IPython.display.display", show)
    monkeypatch.setattr(sys.modules[launch.__module__], "make_console", lambda echo: NotebookConsole())

    def draw(world):
        import matplotlib.pyplot as plt

        plt.figure(figsize=(1 + world.rank, 1))
        plt.plot([1, 2])
        plt.show()
        print("figures left open:", plt.get_fignums())

    launch(draw, 2, device="cpu")
    pictures = [f"[rank {rank}]\na picture: True\n" for rank in range(2)]
    assert capsys.readouterr().out == (
        "[rank 0] figures left open: []\n[rank 1] figures left open: []\n" + "".join(pictures)
    )
    first, second = (int.from_bytes(base64.b64decode(each)[16:20]) for each in displayed)  # a PNG's width
    assert 50 < first < second < 200


def test_concurrent_launches_get_their_own_results_and_leave_no_trace():
    """Children inherit process-wide state.

    Ranks once had the port and the mark of a different thread's launch, joined its group, and were killed with it.
    """

    def add_up(world, mine):
        everyones = torch.tensor(mine + world.rank)
        dist.all_reduce(everyones)
        return everyones.item()

    def work(number):
        for turn in range(3):
            mine = 100 * number + 10 * turn
            found.append((launch(add_up, 2, mine, device="cpu", threads=1, timeout=300, echo=False), 2 * mine + 1))

    found: list[tuple[list[int], int]] = []
    before, main = dict(os.environ), sys.modules["__main__"]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert all(results == [expected] * 2 for results, expected in found), found
    assert dict(os.environ) == before
    assert sys.modules["__main__"] is main


def test_threads_of_ranks_sleep_while_waiting_unless_configured(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert spawn.rank_environment(2, 2, 0)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert spawn.rank_environment(2, 2, 0)["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(
    ("ranks", "device", "cores", "told"),
    [
        (16, "cpu", 2, None),
        (17, "cpu", 2, "17 ranks share 2 cores: "),
        (64, "cpu", 1, "64 ranks share 1 core: "),
        (64, "cpu", 64, None),
        (64, "cuda", 2, None),
    ],
)
def test_many_ranks_per_core_cause_a_warning_about_the_cost(ranks, device, cores, told):
    warning = oversubscription_warning(ranks, device, cores)
    assert warning is None if told is None else warning.startswith(told)


def test_a_rank_that_cannot_be_killed_is_named_and_not_waited_for(monkeypatch):
    """The ranks appear to stay in the kernel. `launch` returns, and the error names both ranks."""
    monkeypatch.setattr(spawn, "END_SECONDS", 0.1)
    monkeypatch.setattr(spawn, "has_exited", lambda process: False)

    def fail(world):
        raise ValueError(f"of process {os.getpid()}")

    with pytest.raises(RankError) as caught:
        launch(fail, 1, device="cpu", echo=False)
    pid = caught.value.message.split()[-1]
    [note] = caught.value.__notes__
    assert note.startswith(f"rank 0's process {pid} still exists after SIGKILL: ")
    assert note in caught.value._render_traceback_()  # the output of a notebook


def test_too_many_ranks_for_the_cores_cause_a_warning(capsys, monkeypatch):
    warn = f"{launch.__module__}.oversubscription_warning"
    monkeypatch.setattr(warn, lambda ranks, device, cores: f"{ranks} are many")
    launch(lambda world: None, 1, device="cpu")
    assert capsys.readouterr().out == "1 are many\n"
