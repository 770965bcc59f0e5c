"""Every exercise accepts its solution, and rejects each wrong answer with a reason. The same check serves learners."""

import importlib
import pkgutil
import re

import pytest

import ddp_tutorial.exercises
from ddp_tutorial.exercises import Exercise, WrongAnswerError, expect
from ddp_tutorial.notebooks import find_notebooks

EXERCISES = {
    f"{module.name}.{name}": value
    for module in pkgutil.iter_modules(ddp_tutorial.exercises.__path__)
    for name, value in vars(importlib.import_module(f"ddp_tutorial.exercises.{module.name}")).items()
    if isinstance(value, Exercise)
}
WRONG = [(name, mistake) for name, exercise in EXERCISES.items() for mistake in exercise.wrong]


def unanswered(*args):
    raise NotImplementedError("your turn")


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name):
    right, said = EXERCISES[name].verdict(EXERCISES[name].solution)
    assert right, said
    assert said.startswith("Right. ")


@pytest.mark.parametrize(("name", "mistake"), WRONG)
def test_a_wrong_answer_is_rejected_with_a_reason(name, mistake):
    right, said = EXERCISES[name].verdict(EXERCISES[name].wrong[mistake])
    assert not right, f"{name} accepts an answer that {mistake}"
    assert said.startswith("Not yet. ")
    assert "your answer raised" not in said.lower(), (
        "a wrong answer should be told what is wrong with it, not how it crashed"
    )


@pytest.mark.parametrize("name", EXERCISES)
def test_an_unfilled_skeleton_is_told_the_task(name):
    right, said = EXERCISES[name].verdict(unanswered)
    assert not right
    assert said == f"Your turn. {EXERCISES[name].task}"


@pytest.mark.parametrize("name", EXERCISES)
def test_there_are_hints_wrong_answers_and_a_solution_to_show(name, capsys):
    exercise = EXERCISES[name]
    assert len(exercise.hints) >= 2
    assert len(exercise.wrong) >= 3
    for number, hint in enumerate(exercise.hints, start=1):
        exercise.hint()
        assert capsys.readouterr().out == f"Hint {number} of {len(exercise.hints)}: {hint}\n"
    exercise.hint()
    assert "show_solution()" in capsys.readouterr().out
    exercise.show_solution()
    assert re.match(r"def _\w+\(", capsys.readouterr().out)


def test_a_check_explains_and_never_raises(capsys):
    def halves(answer):
        expect(answer(4) == 2, "half of 4 is 2")
        return "Well halved."

    exercise = Exercise("halve it", halves, lambda x: x // 2, {}, ())
    exercise.check(lambda x: x // 2)
    exercise.check(lambda x: x)
    exercise.check(lambda x: x / 0)
    assert capsys.readouterr().out.splitlines() == [
        "Right. Well halved.",
        "Not yet. half of 4 is 2",
        "Not yet. Your answer raised ZeroDivisionError: division by zero",
    ]
    with pytest.raises(WrongAnswerError, match="half of 4"):
        halves(lambda x: x)


def test_every_numbered_notebook_has_exercises_and_checks_each_of_them():
    for path in find_notebooks():
        if match := re.match(r"\d\d_(\w+)", path.stem):
            own = [name.partition(".")[2] for name in EXERCISES if name.startswith(f"{match[1]}.")]
            assert len(own) >= 2, f"{path.stem} has no exercises"
            for name in own:
                assert f"exercises.{name}.check(" in path.read_text(), f"{path.stem} does not check {name}"
