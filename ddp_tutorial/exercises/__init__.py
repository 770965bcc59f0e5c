"""Exercises: a task, a check that explains what is wrong, hints one by one, and a solution.

In a notebook:

    def answer(...):
        raise NotImplementedError("your turn")

    exercise.check(answer)      # says what is right, or what is not and why
    exercise.hint()             # the next hint
    exercise.show_solution()

Each exercise also brings wrong answers, the mistakes that people make. The tests put the solution and every wrong
answer through the same check: the first must pass, all others must fail. The exercises of a notebook are in the
module of its name.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddp_tutorial.launcher import RankError, RankTimeoutError, launch

Answer = Callable[..., Any]


class WrongAnswerError(AssertionError):
    """What is wrong with an answer, in words for the one who gave it."""


@dataclass
class Exercise:
    """`test(answer)` returns what is good about the answer, or raises `WrongAnswerError`; it may start ranks.

    `wrong` maps a mistake, in a few words, to an answer that makes it.
    """

    task: str
    test: Callable[[Answer], str]
    solution: Answer
    wrong: dict[str, Answer]
    hints: tuple[str, ...]
    hints_given: int = 0

    def check(self, answer: Answer) -> None:
        """Print whether `answer` is right, and if not, why. Never raises for a wrong answer."""
        print(self.verdict(answer)[1])

    def verdict(self, answer: Answer) -> tuple[bool, str]:
        """Is it right, and what is there to say?"""
        try:
            return True, f"Right. {self.test(answer)}"
        except WrongAnswerError as wrong:
            return False, f"Not yet. {wrong}"
        except NotImplementedError:
            return False, f"Your turn. {self.task}"
        except RankError as error:
            if error.reason.startswith("raised NotImplementedError"):
                return False, f"Your turn. {self.task}"
            if error.reason.startswith("raised WrongAnswerError: "):
                return False, f"Not yet. {error.reason.removeprefix('raised WrongAnswerError: ')}"
            return False, f"Not yet. When your answer ran on real ranks, {error}"
        except Exception as error:
            return False, f"Not yet. Your answer raised {type(error).__name__}: {error}"

    def hint(self) -> None:
        """Print the next hint; after the last one, say where the solution is."""
        if self.hints_given < len(self.hints):
            self.hints_given += 1
            print(f"Hint {self.hints_given} of {len(self.hints)}: {self.hints[self.hints_given - 1]}")
        else:
            print("These were all the hints. show_solution() shows one way to do it.")

    def show_solution(self) -> None:
        """Print the source of a right answer."""
        print(textwrap.dedent(inspect.getsource(self.solution)).rstrip())


def expect(condition: bool, otherwise: str) -> None:
    """Raise `WrongAnswerError` with what should have been, unless `condition`."""
    if not condition:
        raise WrongAnswerError(otherwise)


def on_ranks(run: Callable[..., Any], nprocs: int, *args: Any, stuck: str, timeout: float) -> list[Any]:
    """Run the check on real ranks. If one waits for ever, that is what is wrong with the answer; `stuck` says so."""
    try:
        return launch(run, nprocs, *args, device="cpu", echo=False, timeout=timeout)
    except RankTimeoutError as error:
        raise WrongAnswerError(f"{stuck}\n{error}") from None


def numbers(tensor: torch.Tensor, digits: int = 6) -> str:
    """What is in a tensor, in a line."""
    return "[" + ", ".join(f"{number:.{digits}g}" for number in tensor.detach().flatten().tolist()) + "]"
