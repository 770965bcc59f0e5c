"""Define exercises with a task, a check that explains mistakes, a series of hints, and a solution.

In a notebook:

    def answer(...):
        raise NotImplementedError("your turn")

    exercise.check(answer)      # reports whether the answer is correct, and if not, why
    exercise.hint()             # the next hint
    exercise.show_solution()

Each exercise also contains wrong answers with common mistakes. The tests verify that the solution passes the check and
that every wrong answer fails. Each notebook's exercises are in the module named after the notebook. `progress()` shows
which exercises you have passed.
"""

import ast
import builtins
import dis
import html
import importlib
import inspect
import pkgutil
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_tutorial.exercises.passed import Progress, progress_in, remember
from ddp_tutorial.processes.console import in_notebook
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.spawn import rename_cells

Answer = Callable[..., Any]
# Path prefixes of files that the learner did not write.
_NOT_OWN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), sys.prefix, sys.base_prefix, "<frozen")


class WrongAnswerError(AssertionError):
    """A wrong answer. The message explains the mistake to the learner."""


@dataclass
class Exercise:
    """A task for the learner, with its check, hints, solution and wrong answers.

    An answer is a function, a class, or the path of a script.

    Attributes:
        task: The assignment, which `check` prints if the answer is not filled in yet.
        test: A function that takes the answer, and returns a success message or raises `WrongAnswerError`. The
            function may start ranks.
        solution: A correct answer.
        wrong: A dict that maps a short description of each mistake to an answer with this mistake.
        hints: The hints, in the order in which `hint` prints them.
        hints_given: The number of hints printed so far.
    """

    task: str
    test: Callable[[Any], str]
    solution: Answer | Path
    wrong: dict[str, Any]
    hints: tuple[str, ...]
    hints_given: int = 0

    def check(self, answer: Answer | Path) -> None:
        """Show whether `answer` is correct, and if not, why. In a notebook, also show the task.

        Wrong answers raise no error. A correct answer is recorded for `progress` only if the cell is run interactively.
        """
        right, verdict = self.verdict(answer)
        if in_notebook():
            from IPython.display import display

            display(Card(self.task, verdict, self.name.rpartition(".")[2]))
        else:
            print(verdict)
        if right and self.name:
            remember(self.name)

    @property
    def name(self) -> str:
        """The module and variable name, such as `quickstart.mean_loss`, or "" for an exercise outside this package."""
        loaded = [module for module in _modules() if f"{__name__}.{module}" in sys.modules]
        return next((name for name, exercise in _exercises_of(loaded) if exercise is self), "")

    def verdict(self, answer: Answer | Path) -> tuple[bool, str]:
        """Return whether `answer` is correct, and the text that `check` shows."""
        try:
            with _limit_cpu_time():
                return True, f"Right. {self.test(answer)}"
        except WrongAnswerError as wrong:
            return False, f"Not yet. {wrong}"
        except NotImplementedError:
            return False, f"Your turn. {self.task}"
        except RankError as error:
            if error.is_a(NotImplementedError):
                return False, f"Your turn. {self.task}"
            if error.is_a(WrongAnswerError):
                return False, f"Not yet. {error.message}"
            return False, f"Not yet. When your answer ran on real ranks, {error}{_missing_return_hint(error)}"
        except _EndlessError as error:
            return False, f"Not yet. {_ENDLESS}{_own_line(error)}"
        except (Exception, SystemExit) as error:
            return False, f"Not yet. Your answer raised {type(error).__name__}: {error}{_own_line(error)}"

    def hint(self) -> None:
        """Print the next hint. After the last hint, print how to show the solution."""
        if self.hints_given < len(self.hints):
            self.hints_given += 1
            print(f"Hint {self.hints_given} of {len(self.hints)}: {self.hints[self.hints_given - 1]}")
        else:
            print("There are no more hints. show_solution() prints one solution.")

    def show_solution(self) -> None:
        """Print the source of the solution, ready to paste into a cell.

        Type annotations are removed, and imports missing from the notebook are added.
        """
        if isinstance(self.solution, Path):
            source = self.solution.read_text(encoding="utf-8")
        else:
            source = textwrap.dedent(inspect.getsource(self.solution))
        source = without_annotations(source.rstrip())
        lacking = imports_for(source, self.solution) if not isinstance(self.solution, Path) else []
        if private := re.match(r"(?:def|class) (_\w+)", source):  # the learner's function has no underscore
            source = re.sub(rf"\b{private[1]}\b", private[1].lstrip("_"), source)
        print("\n\n\n".join(["\n".join(lacking), source] if lacking else [source]))


@dataclass(frozen=True)
class Card:
    """The result of a check in a notebook, with the task, the verdict, and instructions for getting help.

    Attributes:
        task: The assignment.
        verdict: Whether the answer is correct, and if not, why.
        name: The exercise's variable name, or "" for an exercise outside this package.
    """

    task: str
    verdict: str
    name: str

    def __repr__(self) -> str:
        """Return the verdict, with its lines wrapped at 95 columns."""
        lines = self.verdict.split("\n")
        return "\n".join(textwrap.fill(line, 95, subsequent_indent=_indent(line)) for line in lines)

    def _repr_html_(self) -> str:
        status, _, text = self.verdict.partition(". ")
        color = {"Right": "#2a9d5c", "Not yet": "#d1603d"}.get(status, "#5b7fb5")
        help_calls = f"<code>exercises.{self.name}.hint()</code>, <code>exercises.{self.name}.show_solution()</code>"
        parts = [f"<p><b>Task.</b> {html.escape(self.task)}</p>"]
        if status != "Your turn":
            style = "white-space: pre-wrap; overflow-wrap: anywhere; font-size: inherit"
            parts.append(f'<pre style="{style}"><b style="color: {color}">{status}.</b> {html.escape(text)}</pre>')
        if self.name and status != "Right":
            parts.append(f'<p style="opacity: 0.7">Help: {help_calls}</p>')
        return f'<div style="border-left: 4px solid {color}; padding-left: 12px">{"".join(parts)}</div>'


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


class _EndlessError(BaseException):
    """Raised when an answer exceeds its CPU time limit.

    This class does not inherit from `Exception`, so that the answer's own handlers do not catch the error.
    """


_SECONDS = 60.0  # limit of this process's CPU time; waiting for ranks does not count
_AGAIN = 0.5  # CPU seconds after which the error is raised again, because a bare `except` in the answer may catch it
_ENDLESS = f"Your answer has used {_SECONDS:.0f} seconds of CPU time and has not returned. Check for an infinite loop."


@contextmanager
def _limit_cpu_time() -> Iterator[None]:
    """Raise `_EndlessError` if the block exceeds the CPU time limit. The limit applies only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise _EndlessError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _own_line(error: BaseException) -> str:
    """Return the location and source of the answer's line that raised `error`, or a hint if no such line exists."""
    own = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_OWN)]
    if not own:
        return _missing_return_hint(error)
    place = rename_cells(f'File "{own[-1].filename}", line {own[-1].lineno}')
    return f"\nThe error occurred in {place}: {own[-1].line}"


def _missing_return_hint(error: BaseException) -> str:
    return (
        "\nA function without a `return` returns None. Check for a missing `return`."
        if "NoneType" in str(error)
        else ""
    )


def progress() -> Progress:
    """Return a table that lists all exercises and marks those passed on this machine (see `passed`)."""
    return progress_in([name for name, _ in _exercises_of(_modules())])


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def _exercises_of(modules: Sequence[str]) -> Iterator[tuple[str, Exercise]]:
    for module in modules:
        for name, value in vars(importlib.import_module(f"{__name__}.{module}")).items():
            if isinstance(value, Exercise):
                yield f"{module}.{name}", value


def without_annotations(source: str) -> str:
    """Return `source` without type annotations, because a notebook may not have imported the types."""
    lines = source.split("\n")
    spans = []  # (line, column) of the start and end of each annotation
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            spans.append(((node.lineno, node.col_offset + len(node.arg)), _end(node.annotation)))
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            arrow = lines[node.returns.lineno - 1].rindex(" ->", 0, node.returns.col_offset)
            spans.append(((node.returns.lineno, arrow), _end(node.returns)))
    for (line, column), (last, end) in sorted(spans, reverse=True):
        lines[line - 1 : last] = [lines[line - 1][:column] + lines[last - 1][end:]]
    return "\n".join(lines)


def imports_for(source: str, solution: Answer) -> list[str]:
    """Return the imports in `solution`'s module that `source` requires but the notebook (`__main__`) lacks."""
    lacking = globals_in(source) - vars(sys.modules["__main__"]).keys() - vars(builtins).keys()
    lines = []
    for node in ast.parse(inspect.getsource(sys.modules[solution.__module__])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in lacking]
            lines += [ast.unparse(node)] if node.names else []
    return lines


def globals_in(source: str) -> set[str]:
    """Return the names of the globals that the functions in `source` read."""
    found: set[str] = set()
    codes = [compile(source, "solution", "exec")]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        found |= {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return found


def _end(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def expect(condition: bool, otherwise: str) -> None:
    """Raise `WrongAnswerError` with the message `otherwise`, unless `condition` is true."""
    if not condition:
        raise WrongAnswerError(otherwise)


def number(answer: Answer, *arguments: object) -> float:
    """Return the answer's result, or raise `WrongAnswerError` if the result is not a number."""
    result = answer(*arguments)
    if isinstance(result, bool) or not isinstance(result, (int, float)):
        raise WrongAnswerError(f"The result must be a number, got {result!r}.")
    return result


@contextmanager
def counted(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield a list that records, by name, each call to one of the `torch.distributed` functions in `names`."""
    calls: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return call

    changed: dict[str, Any] = {name: counting(name, getattr(dist, name)) for name in names}
    with patch.multiple(dist, **changed):
        yield calls


def on_ranks(run: Callable[..., Any], nprocs: int, *args: Any, stuck: str, timeout: float) -> list[Any]:
    """Run a check on `nprocs` ranks, and return the result of each rank.

    Raises:
        WrongAnswerError: If a rank has not returned after `timeout` seconds. The message starts with `stuck`.
    """
    try:
        return launch(run, nprocs, *args, device="cpu", timeout=timeout)  # the output of the answer is shown
    except RankTimeoutError as error:
        raise WrongAnswerError(f"{stuck}\n{error}") from None


def numbers(tensor: torch.Tensor, digits: int = 6) -> str:
    """Format the values of a tensor on one line."""
    return "[" + ", ".join(f"{number:.{digits}g}" for number in tensor.detach().flatten().tolist()) + "]"
