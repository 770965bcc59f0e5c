"""Ranks that wait for each other forever are terminated and reported with their lines; other ranks are
undisturbed.
"""

import inspect
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.benches import hangs as bench
from ddp_tutorial.compat import default_store
from ddp_tutorial.debug import CollectiveError, hangs, recorder, watching
from ddp_tutorial.debug.hangs import Diagnosis, RankStatus, diagnose
from ddp_tutorial.debug.recorder import Call, Line, calls
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World, process_group
from ranks import TORCHRUN, wait_until

# ----------------------------------------------------------------------------------------- the verdict, without ranks

HERE, THERE = Line("train.py", 5, "step"), Line("train.py", 7, "step")
REDUCE = Call("0", 1, "all_reduce", ((3,),), ("Float",), (HERE,), done=True)


def numbered(*of_rank: Call) -> RankStatus:
    return RankStatus(tuple(replace(call, number=number) for number, call in enumerate(of_rank, 1)))


WAITS = replace(REDUCE, done=False)


def test_matching_ranks_get_no_verdict() -> None:
    assert diagnose({0: numbered(REDUCE, REDUCE), 1: numbered(REDUCE, REDUCE)}).kind == "none"
    assert diagnose({0: numbered(), 1: numbered()}).kind == "none"


def test_a_collective_that_all_ranks_have_entered_is_not_a_hang() -> None:
    """Collectives that DDP starts in C++ behave like this."""
    assert diagnose({0: numbered(WAITS, REDUCE), 1: numbered(WAITS, REDUCE)}).kind == "none"


def test_a_different_order_is_reported_with_both_lines_and_a_marked_row() -> None:
    broadcast = replace(WAITS, op="broadcast", lines=(THERE,))
    found = diagnose({0: numbered(REDUCE, WAITS), 1: numbered(REDUCE, broadcast), 2: numbered(REDUCE, WAITS)})
    assert found.kind == "order"
    assert 'Ranks 0, 2 wait in all_reduce [3] float (File "train.py", line 5, in step)' in found.verdict
    assert 'rank 1 waits in broadcast [3] float (File "train.py", line 7, in step)' in found.verdict
    marked = [line for line in found.table.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert re.fullmatch(
        r">\s+2\s+all_reduce.*waiting\s+broadcast \[3\], line 7 in step, waiting\s+all_red.*", marked[0]
    )


@pytest.mark.parametrize("other", [replace(WAITS, sizes=((4,),)), replace(WAITS, dtypes=("Double",))])
def test_different_sizes_or_types_in_one_all_reduce_are_reported(other: Call) -> None:
    assert diagnose({0: numbered(REDUCE), 1: numbered(other)}).kind == "shape"


def test_tensors_that_may_differ_between_ranks_are_allowed() -> None:
    scatter = replace(REDUCE, op="scatter", sizes=())
    assert diagnose({0: numbered(scatter), 1: numbered(replace(scatter, sizes=((3,), (3,))))}).kind == "none"


def test_a_missing_rank_is_reported_with_its_current_line() -> None:
    found = diagnose({0: numbered(REDUCE, WAITS), 1: replace(numbered(REDUCE), lines=(THERE,))})
    assert found.kind == "absent"
    assert 'rank 1 has not entered it: it is at File "train.py", line 7, in step.' in found.verdict


def test_a_rank_that_computes_is_slow_and_does_not_hang() -> None:
    found = diagnose({0: numbered(WAITS), 1: RankStatus((), (THERE,), is_busy=True)})
    assert found.kind == "slow"
    assert not found.explains("wait")


def test_two_missing_ranks_hang_if_one_of_them_does_not_compute() -> None:
    standings = {0: numbered(WAITS), 1: RankStatus((), (THERE,), is_busy=True), 2: RankStatus((), (HERE,))}
    assert diagnose(standings).kind == "absent"


def test_an_unresponsive_rank_and_a_rank_that_left_are_distinguished() -> None:
    assert "rank 1 does not respond" in diagnose({0: numbered(WAITS), 1: None}).verdict
    left = replace(numbered(REDUCE), left="finished")
    assert (
        "rank 1 has left; its last collective was all_reduce" in diagnose({0: numbered(REDUCE, WAITS), 1: left}).verdict
    )


def test_a_collective_that_lost_its_connection_has_failed() -> None:
    """The connections of the exited rank are closed, and this rank has raised an error."""
    left = replace(numbered(REDUCE), left="finished")
    found = diagnose({0: numbered(REDUCE, REDUCE), 1: left})
    assert "Rank 0 was in all_reduce [3]" in found.verdict


def test_only_the_marked_row_reports_waiting_ranks() -> None:
    """torch may mark a collective as completed late or never."""
    found = diagnose({0: numbered(WAITS, WAITS), 1: replace(numbered(WAITS), left="finished")})
    before, marked = found.table.splitlines()[1:]
    assert "waiting" not in before
    assert "waiting" in marked


def test_ranks_that_wait_for_a_failed_rank_do_not_report_the_error() -> None:
    found = diagnose({0: numbered(WAITS), 1: replace(numbered(), left="failed")})
    assert found.kind == "failed"
    assert not found.explains("wait")


def test_only_collectives_that_every_rank_remembers_are_compared() -> None:
    long = RankStatus(tuple(replace(REDUCE, number=number) for number in range(1, 301)))
    short = RankStatus(tuple(replace(REDUCE, number=number) for number in range(101, 301)))
    assert diagnose({0: long, 1: short}).kind == "none"


def test_a_rank_outside_the_group_is_not_missing() -> None:
    waits = replace(WAITS, group="1")
    pair = {"1": [0, 1]}
    standings = {0: RankStatus((waits,), members=pair), 1: RankStatus((), (THERE,), members=pair), 2: RankStatus(())}
    found = diagnose(standings)
    assert "rank 1 has not entered it" in found.verdict
    assert "rank 2" not in str(found)


def test_groups_are_compared_separately() -> None:
    pair = replace(REDUCE, group="1", op="broadcast")
    assert diagnose({0: RankStatus((REDUCE, pair)), 1: RankStatus((pair, REDUCE))}).kind == "none"


def test_an_error_is_not_explained_by_ranks_that_wait_for_its_rank() -> None:
    assert Diagnosis("absent").explains("wait")
    assert not Diagnosis("absent").explains("error")
    assert Diagnosis("order").explains("error")


# ------------------------------------------------------------------------------------------------- with real ranks

SECONDS = 1.5  # seconds that a rank may wait


def another_order(world: World) -> None:
    dist.all_reduce(torch.ones(3))
    if world.rank == 1:
        dist.broadcast(torch.ones(3), 0)  # here: rank 1
    else:
        dist.all_reduce(torch.ones(3))  # here: rank 0 or 2


def only_rank_zero(world: World) -> None:
    if world.is_main:
        dist.barrier()  # here: rank 0
    time.sleep(60)  # here: rank 1 or 2


def another_number_of_steps(world: World) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    for _ in range(3 if world.is_main else 4):
        model(torch.ones(2, 4)).sum().backward()  # here: rank 0, 1 or 2


def another_shape(world: World) -> None:
    dist.all_reduce(torch.ones(3 + world.rank))  # here: rank 0, 1 or 2
    dist.barrier()


def a_first_collective_that_one_leaves_out(world: World) -> None:
    if world.is_main:
        dist.all_reduce(torch.ones(3))  # here: rank 0
    else:
        time.sleep(60)  # here: rank 1 or 2


def marked(function: Callable[[World], None]) -> dict[int, int]:
    """Return, for each rank, the line of `function` where it hangs."""
    lines, first = inspect.getsourcelines(function)
    here = {number: line.partition("# here: ")[2] for number, line in enumerate(lines, first)}
    return {int(rank): number for number, ranks in here.items() for rank in re.findall(r"\d", ranks)}


def named(message: str) -> dict[int, int]:
    """Return, for each rank, the line of this file that the verdict names."""
    found = {}
    for part in re.split(r"; (?=rank)|\. (?=Rank)", message.partition("\n\n")[0]):
        if place := re.search(r'(?i)ranks? ([\d, ]+) .*test_hangs\.py", line (\d+)', part):
            found |= {int(rank): int(place[2]) for rank in place[1].split(",")}
    return found


HANGS = {
    another_order: ("the order of collectives differs", "broadcast"),
    only_rank_zero: ("not all ranks have entered the collective", "barrier"),
    another_number_of_steps: ("not all ranks have entered the collective", "all_reduce"),
    another_shape: ("the ranks pass different tensors", "all_reduce"),
    a_first_collective_that_one_leaves_out: ("not all ranks have entered the collective", "all_reduce"),
}


def wait_for_answers() -> None:
    """Let this rank wait for the others' answers. A rank that is paused for 1.8 s would be reported as unresponsive."""
    hangs.ANSWER_SECONDS = 60


def meet(world: World) -> None:
    """Wait for the other ranks without a collective, which would be watched."""
    store = default_store()
    number = store.add(f"met {world.rank}", 1)
    assert wait_until(lambda: all(store.add(f"met {rank}", 0) >= number for rank in range(world.size)))


def watched(world: World, function, seconds: float) -> object:
    wait_for_answers()
    with watching(world, seconds):
        return function(world)


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_a_hang_is_reported_with_rank_collective_and_line(hang) -> None:
    """Two of the three ranks may wait at the same place. The notebook and the benchmark have two ranks."""
    with pytest.raises(RankError) as caught:
        launch(watched, 3, hang, SECONDS, device="cpu", echo=False, timeout=300)
    assert not isinstance(caught.value, RankTimeoutError)
    assert caught.value.is_a(CollectiveError), caught.value
    verdict, op = HANGS[hang]
    assert verdict in caught.value.message
    assert op in caught.value.message
    assert named(caught.value.message) == marked(hang), caught.value.message


def test_the_hang_benchmark_distinguishes_correct_and_wrong_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hang names two lines. A second report has a verdict that names none."""
    monkeypatch.setattr(bench, "HANGS", {"rank_zero_only": bench.HANGS["rank_zero_only"]})
    lines = []
    found = bench.measure_hangs(2, report=lines.append)
    assert (found["of"], found["right"], found["left"], found["wrong"]) == (2, 2, 0, []), found
    assert found["other_verdicts"] == 0, "the same words each time"
    assert bench.is_good(found)
    assert len(lines) == 2
    assert "2 of 2 correct" in bench.describe(found)
    monkeypatch.setattr(bench, "_hang", lambda name: ("rank 0 waits in barrier; rank 1 waits too", 3.0, 1))
    wrong = bench.measure_hangs(1)
    assert (wrong["right"], wrong["late"], wrong["left"]) == (0, 1, 1)
    assert not bench.is_good(wrong)
    assert wrong["wrong"] == ["rank_zero_only: rank 0 waits in barrier; rank 1 waits too"]


def test_each_hang_of_the_benchmark_has_a_line_for_each_rank() -> None:
    source = Path(bench.__file__).read_text().splitlines()
    for name in bench.HANGS:
        found = bench.hang_lines(name)
        assert sorted(found) == [0, 1], name
        assert all("dist." in source[line - 1] or "backward()" in source[line - 1] for line in found.values())


# ------------------------------------------------------------------------------- the hangs of the notebook about hangs

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "11_debugging_hangs.ipynb"


def notebook_cells() -> list[Any]:
    return [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]


def test_the_notebook_shows_both_lines_of_the_hang() -> None:
    """nbval executes the notebook, and its cells assert the verdict. This reads the output that readers see."""
    cells = notebook_cells()
    [hang] = [cell.source for cell in cells if cell.source.startswith("%%writefile runs/11/hang.py")]
    lines = hang.splitlines()[1:]
    [output] = [cell.outputs[0].text for cell in cells if '"watched.py", patience' in cell.source]
    waits = re.search(r'Ranks 0, 2 wait in all_reduce \[3\] float \(File "hang.py", line (\d+), in train\)', output)
    missing = re.search(r'rank 1 has not entered it: it is at File "hang.py", line (\d+), in load_batch', output)
    assert waits is not None, output
    assert missing is not None, output
    assert lines[int(waits[1]) - 1].strip() == "dist.all_reduce(torch.ones(3))"
    assert lines[int(missing[1]) - 1].strip().startswith("queue.Queue().get()")
    assert "no hang, but a slow rank" in output


def test_the_notebook_lists_the_collectives_of_each_cause() -> None:
    [table] = [cell.outputs[0].text for cell in notebook_cells() if 'torchfrtrace")' in cell.source]
    rows = {line.split()[0]: line.split()[2:4] for line in table.splitlines()[1:]}
    assert rows == {
        "branch": ["all_reduce", "barrier"],
        "uneven": ["all_reduce", "barrier"],
        "exception": ["all_reduce", "barrier"],
        "checkpoint": ["all_gather", "all_reduce"],
        "order": ["all_reduce", "broadcast"],
    }


# ---------------------------------------------------------------------------------------------- what is left alone


def compute_until_inspected(watch: hangs.Watch, times: int) -> None:
    """Keep the CPU busy until the ranks have looked at each other this many times."""
    until = time.monotonic() + 120
    while len(watch._found) < times and time.monotonic() < until:
        pass


def busy_for_a_while(world: World) -> list[str]:
    with watching(world, 0.5) as watch:
        if world.rank == 1:
            compute_until_inspected(watch, 1)
        dist.all_reduce(torch.ones(3))
        assert wait_until(lambda: bool(watch._found))
        return [found.kind for found in watch._found.values()]


def test_ranks_wait_for_a_computing_rank_without_a_limit() -> None:
    kinds = launch(busy_for_a_while, 2, device="cpu", echo=False, timeout=300)
    assert all(kind in {"slow", "none"} for each in kinds for kind in each)
    assert "slow" in kinds[0]


@pytest.mark.parametrize(("waited", "is_busy"), [(0.0, False), (0.1, False), (0.29, True)])
def test_a_rank_whose_main_thread_waits_for_a_core_computes(
    waited: float, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 16 busy processes on one core, a rank that computed used 1 to 4 % of the time, and waited the rest."""
    schedstat = f"/proc/self/task/{threading.main_thread().native_id}/schedstat"
    lines = [f"1000 {int(5e9 + 1e9 * seconds)} 7\n" for seconds in (0.0, waited)]
    monkeypatch.setattr(hangs.Path, "read_text", lambda path: lines.pop(0) if str(path) == schedstat else "")
    monkeypatch.setattr(hangs.time, "process_time", lambda: 5.0)
    assert hangs.uses_cpu() == is_busy
    assert not lines


def computes_and_then_hangs(world: World) -> None:
    wait_for_answers()
    with watching(world, 0.5) as watch:
        if world.rank == 1:
            compute_until_inspected(watch, 2)
            time.sleep(60)  # here: rank 1
        dist.all_reduce(torch.ones(3))  # here: rank 0


def test_a_rank_that_computes_and_then_hangs_is_reported_once() -> None:
    with pytest.raises(RankError) as caught:
        launch(computes_and_then_hangs, 2, device="cpu", echo=False, timeout=300)
    assert caught.value.is_a(CollectiveError), caught.value
    assert "rank 1 has not entered it: it is at" in caught.value.message
    assert named(caught.value.message) == marked(computes_and_then_hangs)
    assert caught.value.log.count("no hang, but a slow rank") == 1


def raises(world: World) -> None:
    with watching(world, SECONDS):
        if world.rank == 1:
            raise RuntimeError("my own")
        dist.barrier()


def test_an_error_of_the_program_is_raised_unchanged() -> None:
    with pytest.raises(RankError) as caught:
        launch(raises, 2, device="cpu", echo=False, timeout=300)
    assert (caught.value.rank, caught.value.message) == (1, "my own")


def in_order(world: World) -> list[str]:
    kinds = []
    for _ in range(2):  # consecutive blocks
        with watching(world, 0.5) as watch:
            meet(world)
            model = DistributedDataParallel(nn.Linear(4, 1))
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(1.5)  # asleep, but no rank waits in a collective
            meet(world)
            dist.barrier()
            until = time.monotonic() + 4
            if world.is_main:
                kinds.append(watch.inspect().kind)
            time.sleep(max(0, until - time.monotonic()))
            meet(world)
            dist.barrier()
            kinds += [found.kind for found in watch._found.values()]
    return kinds


def test_matching_ranks_are_undisturbed_and_can_be_inspected() -> None:
    kinds = launch(in_order, 2, device="cpu", echo=False, timeout=300)
    assert kinds[0].count("none") >= 2
    assert {kind for each in kinds for kind in each} == {"none"}


def inspects_and_never_arrives(world: World) -> None:
    with watching(world, 6.0) as watch:
        calls()
        dist.barrier()
        if world.is_main:
            dist.all_reduce(torch.ones(3))
        while watch.inspect().kind != "absent":
            pass
        time.sleep(60)


def test_an_inspection_by_the_program_does_not_hide_a_hang() -> None:
    with pytest.raises(RankError) as caught:
        launch(inspects_and_never_arrives, 2, device="cpu", echo=False, timeout=120)
    assert caught.value.is_a(CollectiveError), caught.value


def leaves_its_group(world: World) -> None:
    with watching(world, 0.4):
        calls()
        dist.destroy_process_group()
        time.sleep(1)


def test_a_program_may_leave_its_group_while_it_is_watched(capfd: pytest.CaptureFixture[str]) -> None:
    launch(leaves_its_group, 2, device="cpu", timeout=300)
    assert "Traceback" not in "".join(capfd.readouterr())


def hangs_in_its_second_group(world: World) -> None:
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    with process_group(world), watching(world, SECONDS):
        calls()
        if world.is_main:
            dist.all_reduce(torch.ones(3))
        time.sleep(60)


def test_a_hang_is_reported_even_if_a_former_group_has_the_same_collective() -> None:
    with pytest.raises(RankError) as caught:
        launch(hangs_in_its_second_group, 2, device="cpu", echo=False, timeout=120)
    assert caught.value.is_a(CollectiveError), caught.value
    assert "not all ranks have entered the collective" in caught.value.message


def in_a_pair(world: World) -> None:
    wait_for_answers()
    pair = dist.new_group([0, 1])
    with watching(world, SECONDS):
        if world.rank == 0:
            dist.all_reduce(torch.ones(3), group=pair)  # here: rank 0
        elif world.rank == 1:
            time.sleep(60)  # here: rank 1
        else:
            time.sleep(20)  # longer than a busy machine needs for the report


def test_a_hang_in_a_subgroup_is_reported_for_its_ranks() -> None:
    with pytest.raises(RankError) as caught:
        launch(in_a_pair, 3, device="cpu", echo=False, timeout=300)
    assert caught.value.is_a(CollectiveError), caught.value
    assert "rank 1 has not entered it" in caught.value.message
    assert named(caught.value.message) == marked(in_a_pair)
    assert "rank 2" not in caught.value.message


@pytest.mark.parametrize(("rank", "reason", "waits"), [(0, "wait", False), (1, "wait", True), (0, "error", True)])
def test_one_rank_reports_a_hang_and_the_others_wait_for_it(
    rank: int, reason: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose collective raised an error reports it from its main thread."""
    of_ranks = {0: numbered(REDUCE), 1: numbered(replace(REDUCE, op="broadcast"))}
    watch = hangs.Watch(World(rank=rank, size=2), 1.0, 0)
    watch._store = store = dist.HashStore()
    store.set("inspection 0", reason)
    store.set(f"0 {1 - rank}", hangs.as_json.dump_json(of_ranks[1 - rank]).decode())
    monkeypatch.setattr(hangs, "progress", dict)
    monkeypatch.setattr(hangs, "_own_status", lambda: of_ranks[rank])
    done: list[object] = []
    monkeypatch.setattr(watch._left, "wait", done.append)
    monkeypatch.setattr(hangs, "exit_with", lambda error: done.append(type(error)))
    watch._answer()
    assert done == [hangs.REPORT_SECONDS] * waits + [CollectiveError]


def test_a_rank_that_nccl_still_connects_to_the_others_waits_in_its_first_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch enqueues the collective afterward, but has already recorded it. Seen on a GPU with NCCL 2.30."""
    status = {"0": {"last_enqueued_collective": -1, "last_completed_collective": -1}}
    first = {"pg_id": 0, "collective_seq_id": 1, "is_p2p": False, "retired": False}
    monkeypatch.setattr(recorder, "flight_record", lambda **_: {"pg_status": status, "entries": [first]})
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert recorder.progress() == {"0": (1, -1)}


def recorded(world: World) -> list[Call]:
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, 2, dtype=torch.float64), 0)
    return [replace(call, done=True) for call in calls()]  # torch marks it shortly after it has returned


def test_the_recorder_reports_the_same_calls_on_all_ranks() -> None:
    of_ranks = launch(recorded, 2, device="cpu", echo=False, timeout=300)
    first, second = of_ranks[0]
    assert of_ranks[1] == of_ranks[0]
    assert (first.number, first.op, first.sizes, first.dtypes) == (1, "all_reduce", ((3,),), ("Float",))
    assert (second.number, second.what, second.dtypes) == (2, "broadcast [2, 2]", ("Double",))
    assert [call.lines[0].function for call in (first, second)] == ["recorded"] * 2
    assert second.lines[0].number == first.lines[0].number + 1


def calls_of_two_worlds(world: World) -> list[list[str]]:
    found = []
    for size in (1, 2):
        with process_group(world):  # the first time, the group of `launch`
            pair = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(size), group=pair)
            recorder.ignore_former_groups()
            dist.all_reduce(torch.ones(10 * size))  # the first collective in the default group
            found.append([call.what for call in calls()])
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def test_only_former_groups_are_ignored() -> None:
    expected = [["all_reduce [1]", "all_reduce [10]"], ["all_reduce [2]", "all_reduce [20]"]]
    assert launch(calls_of_two_worlds, 2, device="cpu", echo=False, timeout=300) == [expected] * 2


def test_a_nonpositive_time_is_rejected() -> None:
    with (
        pytest.raises(ValueError, match="'seconds' must be a positive number, such as 30, got 0"),
        watching(World(), 0),
    ):
        pass


def test_a_single_rank_never_waits() -> None:
    with watching(World(), 1) as watch:
        assert watch.inspect().kind == "none"


SCRIPT = """
import time, torch.distributed as dist
from ddp_tutorial import run
from ddp_tutorial.debug import watching

def main(world):
    with watching(world, 1.5):
        if world.is_main:
            dist.barrier()
        time.sleep(60)

if __name__ == "__main__":
    run(main, device="cpu")
"""


def test_under_torchrun_the_verdict_is_on_stderr_and_all_ranks_exit(workdir: Path) -> None:
    Path("script.py").write_text(SCRIPT)
    done = subprocess.run([*TORCHRUN, "script.py"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    said = r'entered the collective\. Rank 0 waits in barrier \(File ".*script.py", line 9'
    assert re.search(f"CollectiveError: not all ranks have {said}", done.stderr)


def test_train_reports_an_injected_hang(workdir: Path) -> None:
    command = [sys.executable, "-m", "ddp_tutorial", "train", "tiny", "device=cpu", "--watch", "2"]
    fault = ["--fault", "hang rank=1 step=3 phase=backward"]
    done = subprocess.run([*command, *fault], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "rank 1 has not entered it" in done.stderr
    assert "faults.py" in done.stderr
