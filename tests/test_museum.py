"""The museum of bugs: each bug is caught by a general invariant, and no correct program raises an alarm."""

import inspect
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_tutorial.museum import INVARIANTS, MUSEUM, examine
from ddp_tutorial.museum.correct import CORRECT
from ddp_tutorial.museum.invariants import applying
from ddp_tutorial.museum.issues import ISSUES
from ddp_tutorial.museum.parts import Exhibit, Program
from ddp_tutorial.museum.stage import TIMEOUT, CutError, Outcome, _counted, cut_in_write
from ddp_tutorial.world import World

VARIANTS = [(exhibit, variant) for exhibit in MUSEUM for variant in exhibit.variants]
RIGHT = [*(exhibit.fixed for exhibit in MUSEUM), *CORRECT]


def name_of(thing: object) -> str:
    return getattr(thing, "__name__", "") or getattr(thing, "name", "")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    """All programs, in one launch."""
    programs = [each.broken for each in MUSEUM] + [variant for _, variant in VARIANTS] + RIGHT
    assert len({program.__name__ for program in programs}) == len(programs)
    return examine({program.__name__: program for program in programs})


def alarms(found: dict[str, dict[str, str]], program: Program) -> dict[str, str]:
    assert found[program.__name__], "it was not examined"
    return {invariant: alarm for invariant, alarm in found[program.__name__].items() if alarm}


@pytest.mark.parametrize("exhibit", MUSEUM, ids=name_of)
def test_a_bug_is_caught_by_a_invariant_for_it(exhibit: Exhibit, found: dict[str, dict[str, str]]) -> None:
    fired = alarms(found, exhibit.broken)
    assert set(fired) & set(exhibit.caught_by), fired


@pytest.mark.parametrize(("exhibit", "variant"), VARIANTS, ids=name_of)
def test_variants_of_a_bug_are_caught_too(exhibit: Exhibit, variant: Program, found: dict[str, dict[str, str]]) -> None:
    fired = alarms(found, variant)
    assert set(fired) & set(exhibit.caught_by), fired


@pytest.mark.parametrize("program", RIGHT, ids=name_of)
def test_a_correct_program_raises_no_alarm(program: Program, found: dict[str, dict[str, str]]) -> None:
    assert not alarms(found, program)
    assert set(found[program.__name__]) == set(applying(program)), "some invariants were not tried"


def test_there_are_at_least_twenty_bugs_and_ten_correct_programs() -> None:
    assert len(MUSEUM) >= 20
    assert len(CORRECT) >= 10
    assert all(exhibit.variants for exhibit in MUSEUM)
    assert all(set(exhibit.caught_by) <= set(INVARIANTS) for exhibit in MUSEUM)


def test_each_public_thread_belongs_to_an_exhibit() -> None:
    assert set(ISSUES) <= {exhibit.name for exhibit in MUSEUM}
    assert all(re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url) for url in ISSUES.values())


def test_every_invariant_catches_some_bug() -> None:
    assert {invariant for exhibit in MUSEUM for invariant in exhibit.caught_by} == set(INVARIANTS)


@pytest.mark.parametrize("program", [each.broken for each in MUSEUM], ids=name_of)
def test_a_bug_fits_in_one_cell(program: Program) -> None:
    assert len(inspect.getsource(program).splitlines()) <= 25


def dies(world: World) -> dict[str, float]:
    import os

    os._exit(3) if world.rank == 1 else None
    return {}


def says_nothing(world: World) -> dict[str, float]:
    return {}


def test_a_dead_rank_is_reported_and_the_remaining_programs_are_examined() -> None:
    found = examine({"first": says_nothing, "dies": dies, "last": says_nothing})
    assert "a rank crashed" in found["dies"]["hang"]
    assert found["first"] == found["last"] == dict.fromkeys(applying(says_nothing), "")


def gives_up_once(world: World) -> dict[str, Any]:
    """In the first run, rank 1 times out in the first all-reduce, as if rank 0 had been paused inside it."""
    dist.all_reduce(torch.ones(1))
    if world.rank == 1 and world.timeout.total_seconds() == TIMEOUT:
        time.sleep(TIMEOUT)
        raise RuntimeError("Timed out waiting 500ms for recv operation to complete")
    dist.all_reduce(torch.ones(1))
    return {}


def test_a_rank_that_was_kept_waiting_by_a_paused_rank_is_no_alarm() -> None:
    found = examine({"gives up once": gives_up_once})
    assert found["gives up once"] == dict.fromkeys(applying(gives_up_once), "")


def diverges(world: World) -> dict[str, Any]:
    return {"loss": float("nan"), "weights": torch.tensor([1.0, float("nan")])}


def takes_any_file_for_a_finished_run(world: World, folder: Path) -> dict[str, torch.Tensor] | None:
    if (folder / "done.pt").exists():
        return None
    torch.save(obj=1, f=folder / "done.pt")
    return {"weights": torch.ones(2)}


def test_equal_nan_is_no_alarm_and_a_missing_result_is_one() -> None:
    programs = [diverges, takes_any_file_for_a_finished_run]
    found = examine({program.__name__: program for program in programs})
    assert not alarms(found, diverges)
    missing = "killed during write 1: weights: the resumed run does not return this value"
    assert alarms(found, takes_any_file_for_a_finished_run) == {"cuts": missing}


def returns_numbers_and_tensors(world: World, folder: Path) -> dict[str, Any]:
    return {
        "loss": torch.tensor(0.7, dtype=torch.float64) if world.rank else 0.7,
        "count": 2.0 if world.rank else torch.tensor([2])[0],
    }


def returns_different_numbers_and_tensors(world: World, folder: Path) -> dict[str, Any]:
    return {"loss": 1.0 if world.rank else torch.tensor(3.0)}


def returns_a_number_or_a_vector(world: World, folder: Path) -> dict[str, Any]:
    return {"losses": torch.ones(2) if world.rank else 1.0}


def test_a_number_is_compared_with_a_tensor() -> None:
    programs = [returns_numbers_and_tensors, returns_different_numbers_and_tensors, returns_a_number_or_a_vector]
    found = examine({program.__name__: program for program in programs})
    assert not alarms(found, programs[0])
    assert alarms(found, programs[1])["agreement"] == "loss: differences of up to 2 between rank 0 and rank 1"
    assert alarms(found, programs[2])["agreement"] == "losses: 1 values for rank 0, 2 for rank 1"


@pytest.mark.parametrize("is_open", [False, True], ids=["path", "open file"])
def test_a_kill_during_a_write_leaves_half_of_the_file(is_open: bool, tmp_path: Path) -> None:
    torch.save(torch.ones(1000), tmp_path / "whole.pt")
    outcome, path = Outcome(), tmp_path / "half.pt"
    with _counted(outcome), cut_in_write(1)(outcome), path.open("wb") as file, pytest.raises(CutError):
        torch.save(torch.ones(1000), file if is_open else path)
    assert 0.4 < path.stat().st_size / (tmp_path / "whole.pt").stat().st_size < 0.6
    assert outcome.saves == []


def test_files_of_programs_are_removed_even_if_a_rank_dies(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def writes(world: World, folder: Path, fails: bool = False) -> dict[str, float]:
        (folder / f"{world.rank}.pt").touch()
        with told.open("a") as file:
            file.write(f"{folder}\n")
        if fails:
            dies(world)
        return {}

    found = examine({"writes": writes, "writes and dies": partial(writes, fails=True)})
    assert found["writes"] == dict.fromkeys(applying(writes), "")
    assert "a rank crashed" in found["writes and dies"]["hang"]
    folders = set(map(Path, told.read_text().splitlines()))
    assert len(folders) > len(found)
    assert not any(folder.exists() for folder in folders)
