"""Every exercise accepts its solution, and rejects each wrong answer with a reason. The same check serves learners."""

import ast
import builtins
import importlib
import math
import os
import pkgutil
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException
from torch.nn import functional as F

import ddp_tutorial.exercises
import forked
from ddp_tutorial.cluster import Cluster, unsupported_reason
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.exercises import (
    Card,
    Exercise,
    WrongAnswerError,
    expect,
    fault_tolerance,
    globals_in,
    plain_torch,
    processes,
    reading_data_fast,
)
from ddp_tutorial.exercises.torchrun import LIMIT_SECONDS, Torchrun
from ddp_tutorial.experiments.notebooks import find_notebooks
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.spawn import rank_environment
from ranks import free_port

EXERCISES = {
    f"{module.name}.{name}": value
    for module in pkgutil.iter_modules(ddp_tutorial.exercises.__path__)
    for name, value in vars(importlib.import_module(f"ddp_tutorial.exercises.{module.name}")).items()
    if isinstance(value, Exercise)
}
# Answers whose ranks wait for each other until the timeout. Other mistakes are reported earlier.
STUCK = {
    ("ddp_from_scratch.bucket_ddp", "waits until every gradient has arrived"),
    ("loss_scaling.step_together", "asks the others only if it has overflowed"),
    ("bug_museum.find_bad_sharding", "reads each shard to its end"),
}
WRONG = [(name, mistake) for name, exercise in EXERCISES.items() for mistake in exercise.wrong]


def test_answers_that_hang_are_among_the_wrong_answers():
    assert set(WRONG) >= STUCK


def unanswered(*args):
    raise NotImplementedError("your turn")


@pytest.fixture
def patient(monkeypatch):
    """Give answers more time, because a machine may be busy. The limit is for answers that never return."""

    def launch_patiently(*args, timeout, **options):
        return launch(*args, timeout=max(timeout, 90), **options)

    monkeypatch.setattr(ddp_tutorial.exercises, "launch", launch_patiently)


@pytest.fixture
def patient_workers(monkeypatch):
    """Give the workers of `mini_torchrun` more time, and a port that no other process opens while they import torch."""

    def create_server(address):
        host, port = address
        return socket.create_server((host, port or free_port()))

    monkeypatch.setattr(processes, "socket", SimpleNamespace(create_server=create_server))
    monkeypatch.setattr(processes, "_WAIT", 90)
    monkeypatch.setattr(processes, "_BUSY", 90)


class ForkedRun(Torchrun):
    """Run of a script on forked ranks, which saves nine CPU seconds. If a rank fails, the others are terminated."""

    def __init__(self, script, nprocs, *arguments, folder):
        self.stdout_path = Path(mkdtemp(dir=folder), "stdout")
        self.stdout_path.touch()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = rank_environment(nprocs, 1, self.store.port)
        command = [str(script), *map(str, arguments)]
        self.context = forked.spawn(run_script, (environ, command, str(self.stdout_path)), nprocs, join=False)
        self.agent, self.code, self.failure = self, None, ""
        self.deadline = time.monotonic() + LIMIT_SECONDS

    def __exit__(self, *_):
        for process in self.context.processes:
            process.kill()
            process.join()

    def poll(self):
        try:
            if self.code is None and self.context.join(timeout=0):
                self.code = 0
        except ProcessException as error:
            self.code, self.failure = 1, str(error)
        return self.code

    def error(self):
        return self.failure

    def ranks(self):
        return [psutil.Process(process.pid) for process in self.context.processes if process.is_alive()]

    def children(self, recursive):
        return self.ranks()

    def cpu_times(self):
        """Return the time of this process, which stands in for torchrun: the run asks once all ranks have ended."""
        return psutil.Process().cpu_times()


def run_script(rank, environ, command, stdout):
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    os.dup2(os.open(stdout, os.O_WRONLY | os.O_APPEND), 1)
    torch.set_num_threads(1)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


@pytest.fixture
def forked_scripts(monkeypatch):
    """Run scripts on forked ranks. `test_the_solution_passes` and `test_train_script` use torchrun."""
    for module in (plain_torch, fault_tolerance):
        monkeypatch.setattr(module, "Torchrun", ForkedRun)


@pytest.mark.usefixtures("patient", "patient_workers")
@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name):
    right, said = EXERCISES[name].verdict(EXERCISES[name].solution)
    assert right, said
    assert said.startswith("Right. ")


@pytest.mark.usefixtures("forked_scripts")
@pytest.mark.parametrize("name", [name for name in EXERCISES if isinstance(EXERCISES[name].solution, Path)])
def test_the_solution_of_a_script_also_passes_on_forked_ranks(name):
    """Wrong scripts run in the same way, so they are rejected for their mistakes."""
    right, said = EXERCISES[name].verdict(EXERCISES[name].solution)
    assert right, said


@pytest.mark.usefixtures("patient")
def test_the_packages_own_buckets_pass_the_learners_check():
    def wrap(world, model, cap):
        config = DDPConfig(variant="bucket", bucket_cap_mb=cap / 2**20, find_unused_parameters=True)
        return data_parallel(model, world, config)

    right, said = EXERCISES["ddp_from_scratch.bucket_ddp"].verdict(wrap)
    assert right, said


@pytest.mark.usefixtures("patient")
def test_memory_that_a_torch_thread_releases_late_is_tolerated():
    """Gloo's thread may hold gathered memory after the all-gather has completed. Here, a thread always does."""
    exercise = EXERCISES["sharded_state.sharded_module"]

    def slow_to_let_go(module, world):
        whole = sum(parameter.numel() for parameter in module.parameters())
        piece, forward = exercise.solution(module, world)

        def held_for_a_moment(x):
            threading.Timer(0.3, len, [torch.zeros(whole)]).start()
            return forward(x)

        return piece, held_for_a_moment

    right, said = exercise.verdict(slow_to_let_go)
    assert right, said


def pads_a_list_in_place(indices, rank, size):
    while len(indices) % size:
        indices.append(None)
    return (index for index in indices[rank::size] if index is not None)


def counts_gradients_from_one(ready, nbytes, latency, bandwidth):
    buckets = EXERCISES["choosing_a_bucket_size.best_buckets"].solution([*ready], [*nbytes], latency, bandwidth)
    ready.insert(0, 0.0)
    nbytes.insert(0, 0)
    return buckets


def drops_out_in_place(x, indices, p, seed, step):
    return x.copy_(EXERCISES["randomness.sample_dropout"].solution(x, indices, p, seed, step))


def ring_of_equal_chunks(world, tensor):
    padded = F.pad(tensor, (0, -len(tensor) % world.size))
    send, recv = dist.send, dist.recv
    tagged = {
        "send": lambda data, other: send(data, other, tag=1),
        "recv": lambda data, other: recv(data, other, tag=1),
    }
    with patch.multiple(dist, **tagged):
        EXERCISES["collectives.whole_ring"].solution(world, padded)
    tensor.copy_(padded[: len(tensor)])


def halves_of_equal_chunks(world, tensor):
    padded = F.pad(tensor, (0, -len(tensor) % world.size))
    EXERCISES["collectives.halving_doubling"].solution(world, padded)
    tensor.copy_(padded[: len(tensor)])


def validates_before_the_first_step(world, step, validate, most):
    best = math.inf
    for steps in range(most + 1):
        if steps:
            step()
        both = torch.tensor(validate())
        dist.all_reduce(both)
        if steps and both[0] / both[1] >= best:
            return steps
        best = both[0] / both[1]
    return most


def warms_up_each_setup_twice(setups, rounds, synchronize):
    for name in setups:
        for _ in range(2):
            setups[name]()
            synchronize()
    measured = EXERCISES["scaling.fair_benchmark"].solution(setups, rounds, synchronize)
    return {name: measured[name] for name in reversed(setups)}


class KeepsTheLoadedDict(EXERCISES["sharding_data.step_sampler"].solution):
    """Sampler that continues to use the dict that was loaded, as its own state."""

    def __init__(self, *arguments):
        self.state = {}
        super().__init__(*arguments)

    def __setattr__(self, name, value):
        (self.state if name in {"epoch", "taken"} else vars(self))[name] = value

    def __getattr__(self, name):
        return vars(self)["state"][name]

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


DIFFERENT = {
    "quickstart.shard_samples": pads_a_list_in_place,
    "choosing_a_bucket_size.best_buckets": counts_gradients_from_one,
    "randomness.sample_dropout": drops_out_in_place,
    "collectives.whole_ring": ring_of_equal_chunks,
    "collectives.halving_doubling": halves_of_equal_chunks,
    "debugging_hangs.train_until_flat": validates_before_the_first_step,
    "scaling.fair_benchmark": warms_up_each_setup_twice,
    "sharding_data.step_sampler": KeepsTheLoadedDict,
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_correct_answer_that_differs_from_the_solution_passes(name):
    right, said = EXERCISES[name].verdict(DIFFERENT[name])
    assert right, said


def test_workers_that_cannot_reach_each_other_are_reported(monkeypatch):
    """The other variables are correct, so only `init_process_group` notices the wrong address."""
    start, exercise = subprocess.Popen, EXERCISES["processes.mini_torchrun"]
    monkeypatch.setattr(processes, "_JOIN", 0.5)
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, env: start(command, env=env | {"MASTER_ADDR": "192.0.2.1"})
    )
    right, said = exercise.verdict(lambda *arguments, **options: tuple(exercise.solution(*arguments, **options)))
    assert not right
    expected = "Two workers that call init_process_group and all_reduce must exit with code 0, got codes [1, -15]."
    # The worker that did not fail first is stopped with SIGTERM, or with SIGKILL if it has not exited after a second.
    assert re.sub(r"\[(1, -(15|9)|-(15|9), 1|1, 1)\]", "[1, -15]", said) == f"Not yet. {expected}"


def test_an_unexpected_key_is_shown_and_not_sorted():
    exercise = EXERCISES["cluster.links"]
    right, said = exercise.verdict(lambda log: exercise.solution(log) | {(None, "n1"): {None, "NET/IB"}})
    assert not right
    assert "for (None, 'n1'), the result must be missing, got ['NET/IB', None]" in said


def test_an_answer_that_changes_its_argument_does_not_change_the_next_check():
    exercise = EXERCISES["reading_data_fast.file_ranges"]
    before = deepcopy(reading_data_fast._CASES)
    assert not exercise.verdict(lambda lengths, rank, size: lengths.append(0))[0]
    assert before == reading_data_fast._CASES


def test_an_answer_that_exits_does_not_end_the_kernel():
    right, said = EXERCISES["quickstart.shard_samples"].verdict(lambda indices, rank, size: sys.exit(3))
    assert not right
    assert "Your answer raised SystemExit: 3" in said


@pytest.mark.parametrize("name", [name for name in EXERCISES if isinstance(EXERCISES[name].solution, Path)])
def test_importing_a_script_changes_no_signal_handler(name):
    """`progress` imports all modules of the package, including the scripts."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    runpy.run_path(str(EXERCISES[name].solution))
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, before[number])
    assert after == before


@pytest.fixture(scope="module")
def hosts():
    if reason := unsupported_reason():
        pytest.skip(reason)  # without hosts, the check of `hierarchical` does not measure the bytes between them
    with Cluster(3, "1gbit") as cluster:
        yield nullcontext(cluster)


@pytest.mark.usefixtures("forked_scripts")
@pytest.mark.parametrize(("name", "mistake"), WRONG)
def test_a_wrong_answer_is_rejected_with_a_reason(name, mistake, request, monkeypatch):
    if (name, mistake) not in STUCK:
        request.getfixturevalue("patient")
    if name == "cluster.hierarchical":
        hosts = request.getfixturevalue("hosts")  # one cluster for all wrong answers
        monkeypatch.setattr(ddp_tutorial.exercises.cluster, "Cluster", lambda *_: hosts)
    right, said = EXERCISES[name].verdict(EXERCISES[name].wrong[mistake])
    assert not right, f"{name} accepts an answer that {mistake}"
    assert said.startswith("Not yet. ")
    assert "your answer raised" not in said.lower(), (
        "a wrong answer should be told what is wrong with it, not how it crashed"
    )
    assert ("did not finish within" in said) == ((name, mistake) in STUCK), said


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["quickstart.shard_samples", "quickstart.mean_loss"], ids=["here", "on ranks"])
def test_an_unfilled_skeleton_prints_the_task(name):
    """nbval checks this for every other exercise, because notebooks are committed with unfilled skeletons."""
    right, said = EXERCISES[name].verdict(unanswered)
    assert not right
    assert said == f"Your turn. {EXERCISES[name].task}"


@pytest.mark.parametrize("name", EXERCISES)
def test_every_exercise_has_hints_wrong_answers_and_a_solution(name, capsys):
    exercise = EXERCISES[name]
    assert len(exercise.hints) >= 2
    assert len(exercise.wrong) >= 3
    for number, hint in enumerate(exercise.hints, start=1):
        exercise.hint()
        assert capsys.readouterr().out == f"Hint {number} of {len(exercise.hints)}: {hint}\n"
    exercise.hint()
    assert "show_solution()" in capsys.readouterr().out
    exercise.show_solution()
    beginning = (
        '"""Train with `torchrun '
        if isinstance(exercise.solution, Path)
        else r"((from|import) .*\n)*\n*(def [a-z]\w+\(|class [A-Z]\w+\b)"
    )
    assert re.match(beginning, capsys.readouterr().out)


def test_a_solution_is_shown_without_types_and_with_comments(capsys):
    def _longer(
        ranks: int,
        of: "dict[str, list[int]]",  # this stays
    ) -> dict[str, int]:
        """-> this too"""
        return {name: ranks * len(numbers) for name, numbers in of.items()}

    Exercise("", str, _longer, {}, ()).show_solution()
    assert capsys.readouterr().out.splitlines() == [
        "def longer(",
        "    ranks,",
        "    of,  # this stays",
        "):",
        '    """-> this too"""',
        "    return {name: ranks * len(numbers) for name, numbers in of.items()}",
    ]


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_as_shown_can_be_pasted_into_its_notebook(name, capsys, monkeypatch):
    """Neither its definition nor a call needs anything that the notebook has not imported."""
    module = name.partition(".")[0]
    chapters = [path for path in find_notebooks() if path.parent.name != "experiments"]
    [path] = [path for path in chapters if re.fullmatch(rf"(\d\d_)?{module}", path.stem)]
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    imports = ast.parse(next(source for source in cells if "from ddp_tutorial" in source)).body
    imported = ast.Module([each for each in imports if isinstance(each, ast.Import | ast.ImportFrom)], [])
    notebook = ModuleType("__main__")
    exec(compile(imported, str(path), "exec"), vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    EXERCISES[name].show_solution()
    solution = capsys.readouterr().out
    if not isinstance(EXERCISES[name].solution, Path):  # a script has imports of its own
        exec(solution, vars(notebook))
        assert globals_in(solution) <= vars(notebook).keys() | vars(builtins).keys()
        [checked] = re.findall(rf"\b{name.partition('.')[2]}\.check\((\w+)\)", "\n".join(cells))
        assert checked in vars(notebook), f"the notebook's cell checks {checked}, which the solution does not define"


def test_a_solution_is_shown_with_the_imports_that_the_notebook_lacks(capsys, monkeypatch):
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    EXERCISES["plain_torch.ragged_step"].show_solution()
    lacking = ["from contextlib import nullcontext", "import torch", "import torch.distributed as dist"]
    lacking += ["from torch import nn", "from torch.nn import functional as F", "", "", "def ragged_step("]
    shown = capsys.readouterr().out.splitlines()
    assert [line[:16] for line in shown[:8]] == [line[:16] for line in lacking]
    exec("from contextlib import nullcontext\nimport torch\nfrom torch import nn", vars(notebook))
    EXERCISES["plain_torch.ragged_step"].show_solution()
    assert capsys.readouterr().out.startswith(f"{lacking[2]}\n{lacking[4]}\n\n\ndef ")


def test_in_a_notebook_a_check_shows_the_task_beside_the_verdict(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("ddp_tutorial.exercises.in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    exercise = Exercise("make_list(n): return a list", lambda answer: answer(), str, {}, ())
    long_line = "  " + "word " * 30

    def wrong():
        raise WrongAnswerError(f"2 < 3\n{long_line}")

    exercise.check(lambda: "Well done.")
    exercise.check(wrong)
    right, not_yet = shown
    assert capsys.readouterr().out == ""
    assert repr(right) == "Right. Well done."
    assert repr(not_yet).startswith("Not yet. 2 < 3\n  word word")
    assert max(map(len, repr(not_yet).splitlines())) <= 95
    assert "make_list(n): return a list" in right._repr_html_()
    assert "make_list(n): return a list" in not_yet._repr_html_()
    assert "2 &lt; 3" in not_yet._repr_html_()


def test_a_check_explains_and_never_raises(capsys):
    def halves(answer):
        expect(answer(4) == 2, "half of 4 is 2")
        return "Well halved."

    exercise = Exercise("halve it", halves, lambda x: x // 2, {}, ())
    exercise.check(lambda x: x // 2)
    exercise.check(lambda x: x)
    exercise.check(lambda x: x / 0)
    *said, line = capsys.readouterr().out.splitlines()
    assert said == [
        "Right. Well halved.",
        "Not yet. half of 4 is 2",
        "Not yet. Your answer raised ZeroDivisionError: division by zero",
    ]
    assert re.fullmatch(
        r'The error occurred in File "\S+test_exercises.py", line \d+: exercise.check\(lambda x: x / 0\)', line
    )
    with pytest.raises(WrongAnswerError, match="half of 4"):
        halves(lambda x: x)


def test_an_answer_that_returns_none_is_asked_for_its_return(capsys):
    EXERCISES["quickstart.shard_samples"].check(lambda indices, rank, size: None)
    assert capsys.readouterr().out.endswith(
        "A function without a `return` returns None. Check for a missing `return`.\n"
    )


def test_an_endless_answer_is_aborted_and_its_line_is_shown(monkeypatch, capsys):
    def shard(indices, rank, size):
        while True:
            try:
                sum(indices)
            except Exception:
                return indices

    monkeypatch.setattr(ddp_tutorial.exercises, "_SECONDS", 0.2)
    EXERCISES["quickstart.shard_samples"].check(shard)
    said = capsys.readouterr().out
    assert said.startswith("Not yet. Your answer has used 60 seconds of CPU time and has not returned")
    assert re.search(
        r"The error occurred in File .*test_exercises.py\", line \d+: (while True|try|sum\(indices\))", said
    )
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_an_endless_answer_that_catches_every_error_is_aborted(monkeypatch):
    def shard(indices, rank, size):
        with suppress(BaseException):  # like a bare `except`
            while time.process_time() < deadline:
                sum(indices)
        while time.process_time() < deadline:
            pass
        return indices

    monkeypatch.setattr(ddp_tutorial.exercises, "_SECONDS", 0.2)
    monkeypatch.setattr(ddp_tutorial.exercises, "_AGAIN", 0.1)
    deadline = time.process_time() + 10
    right, said = EXERCISES["quickstart.shard_samples"].verdict(shard)
    assert not right
    assert said.startswith("Not yet. Your answer has used 60 seconds of CPU time and has not returned")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_output_of_an_answer_on_ranks_is_shown(capsys):
    def mean_loss(world, loss_sum, count):
        print(f"{count} tokens")
        return float(loss_sum / count)

    EXERCISES["quickstart.mean_loss"].check(mean_loss)
    said = capsys.readouterr().out
    assert {"[rank 0] 1 tokens", "[rank 1] 3 tokens"} <= set(said.splitlines())
    assert "Not yet. " in said


def test_every_teaching_notebook_has_exercises_and_checks_all_of_them():
    for path in find_notebooks():
        if match := re.match(r"(?:\d\d_)(\w+)|(?=live_ranks)(\w+)", path.stem):
            own = [name.partition(".")[2] for name in EXERCISES if name.startswith(f"{match[1] or match[2]}.")]
            assert len(own) >= 2, f"{path.stem} has no exercises"
            for name in own:
                cells = nbformat.read(path, as_version=4).cells
                shown = [cell.outputs[-1].data for cell in cells if f"exercises.{name}.check(" in cell.source]
                assert len(shown) == 1, f"{path.stem} does not check {name} once"
                task = EXERCISES[f"{match[1] or match[2]}.{name}"].task
                if name == "repair":  # the skeleton is a program with bugs
                    assert shown[0]["text/plain"].startswith("Not yet. ")
                else:
                    card = Card(task, f"Your turn. {task}", name)
                    assert shown[0]["text/plain"] == repr(card), f"{path.stem}: {name} is committed with an answer"
                    assert shown[0]["text/html"] == card._repr_html_()
