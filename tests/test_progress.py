"""Exercises that a person has passed are recorded and shown; those that a program has passed are not."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_tutorial.exercises import Exercise, passed, progress, quickstart
from ddp_tutorial.experiments.notebooks import chapters
from kernel import Kernel

ALL = progress()  # in the repository, where nobody has passed anything, or somebody has


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> Path:
    """Simulate a person. Return the file of passed exercises, which does not exist yet."""
    monkeypatch.setattr(passed, "a_person_is_there", lambda: True)
    return workdir / passed.FILE


def of(name: str) -> bool:
    """Return whether the table marks the exercise as passed."""
    module, _, exercise = name.partition(".")
    [chapter] = [each for each in progress().chapters if each.name.endswith(module)]
    return chapter.exercises[exercise]


def test_only_a_right_answer_is_recorded(person: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exercise = quickstart.shard_samples
    exercise.check(exercise.wrong["pads with copies"])
    exercise.check(lambda *_: 1 / 0)
    assert not person.exists()
    exercise.check(exercise.solution)
    exercise.check(exercise.solution)
    exercise.check(exercise.wrong["pads with copies"])  # a passed exercise stays passed
    assert person.read_text() == "quickstart.shard_samples\n"
    assert of("quickstart.shard_samples")
    assert not of("quickstart.mean_loss")
    told = capsys.readouterr().out
    assert told.count("Right. ") == 2
    assert "runs" not in told


def test_an_answer_from_a_test_is_not_recorded(workdir: Path) -> None:
    quickstart.shard_samples.check(quickstart.shard_samples.solution)
    assert list(workdir.iterdir()) == []


def test_a_kernel_distinguishes_a_person_from_nbval_and_papermill(workdir: Path) -> None:
    code = "from ddp_tutorial.exercises import quickstart as exercises, progress\n"
    check = "exercises.shard_samples.check(exercises.shard_samples.solution)"
    kernel = Kernel(workdir)
    try:
        assert kernel.run(code + check)["shown"][0]["text/plain"].startswith("Right. ")
        assert list(workdir.iterdir()) == []
        assert kernel.run(check, person=True)["shown"][0]["text/plain"].startswith("Right. ")
        assert (workdir / passed.FILE).read_text() == "quickstart.shard_samples\n"
        assert "[x] shard_samples" in kernel.run("progress()")["result"]
    finally:
        kernel.end()


def test_an_exercise_outside_the_package_is_not_recorded(person: Path) -> None:
    own = Exercise("say yes", lambda answer: "Yes.", lambda: "yes", {}, ())
    own.check(own.solution)
    assert own.name == ""
    assert not person.exists()


@pytest.mark.usefixtures("person")
def test_kernels_that_record_concurrently_lose_nothing() -> None:
    names = [f"module_{number % 7}.exercise_{number}" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:  # each opens the file again, as a different process would
        list(pool.map(passed.remember, names))
    # An empty line is harmless: somebody has taken a line, of which a part was there, for one that was cut short.
    assert sorted(filter(None, passed.FILE.read_text().split("\n"))) == sorted(names)


@pytest.mark.parametrize(
    "found", [b"", b"\n\n", b"quickstart.mean_loss", b"quickstart.mean_lo", b"\xff\x00{]\n", b"quickstart.gone\n"]
)
def test_a_damaged_file_loses_only_its_damaged_lines(found: bytes, person: Path) -> None:
    person.parent.mkdir()
    person.write_bytes(found)
    assert of("quickstart.mean_loss") == (found == b"quickstart.mean_loss")
    quickstart.shard_samples.check(quickstart.shard_samples.solution)
    assert of("quickstart.shard_samples")
    assert person.read_bytes().startswith(found)
    assert of("quickstart.mean_loss") == (found == b"quickstart.mean_loss")


def test_a_failing_disk_is_reported_in_one_line_after_the_verdict(
    person: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    person.mkdir(parents=True)
    quickstart.shard_samples.check(quickstart.shard_samples.solution)
    right, told = capsys.readouterr().out.splitlines()
    assert right.startswith("Right. ")
    assert (
        told
        == "(The result was not recorded for progress(), because runs/exercises.txt cannot be written: Is a directory.)"
    )
    assert not of("quickstart.shard_samples")


def test_the_table_lists_every_exercise_under_its_notebook() -> None:
    shown = [(each.part, each.path) for each in ALL.chapters]
    known = [(each.part, each.path) for each in chapters()]
    assert [each for each in known if each in shown] == shown
    assert {"00_quickstart", "live_ranks", "14_scaling"} <= {each.name for each in ALL.chapters}
    assert "experiments" not in str([each.path for each in ALL.chapters])
    assert sum(len(each.exercises) for each in ALL.chapters) > 50


def test_a_fresh_clone_has_no_passed_exercises_in_text_and_html(workdir: Path) -> None:
    table = progress()
    total = sum(len(each.exercises) for each in table.chapters)
    assert str(table) == f"0 of {total} exercises passed"
    assert "00_quickstart             0 of 3  [ ] shard_samples  [ ] mean_loss" in repr(table)
    assert "&#10003;" not in table._repr_html_()
    passed.FILE.parent.mkdir()
    passed.FILE.write_text("quickstart.mean_loss\n")
    assert "1 of 3  [ ] shard_samples  [x] mean_loss" in repr(progress())
    assert f"<p>1 of {total} exercises passed</p>" in progress()._repr_html_()
    assert "shard_samples, <b>&#10003;&nbsp;mean_loss</b>" in progress()._repr_html_()


def test_links_of_the_table_are_relative_to_the_current_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, link in (("notebooks", ""), ("notebooks/experiments", "../"), (".", "notebooks/")):
        monkeypatch.chdir(root / folder)
        assert f'<a href="{link}00_quickstart.ipynb">00_quickstart</a>' in progress()._repr_html_()
    monkeypatch.chdir(tmp_path)  # a copy of one notebook without the others
    assert "00_quickstart" in progress()._repr_html_()
    assert "<a " not in progress()._repr_html_()


def test_exercises_and_parameters_do_not_import_notebook_tools() -> None:
    """Importing them would take 1.5 s in the first cell."""
    code = "import sys, ddp_tutorial.exercises.quickstart, ddp_tutorial.experiments.execute as execute"
    code += "; assert execute.read_parameters; print({'nbformat', 'nbclient'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "set()"
