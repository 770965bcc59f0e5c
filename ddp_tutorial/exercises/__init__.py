"""Exercises: a task, a check that explains what is wrong, hints one by one, and a solution.

In a notebook:

    def answer(...):
        raise NotImplementedError("your turn")

    exercise.check(answer)      # says what is right, or what is not and why
    exercise.hint()             # the next hint
    exercise.show_solution()

Each exercise also has wrong answers, the mistakes that people make. The tests put the solution and every wrong
answer through the same check: the first must pass, all others must fail. The exercises of a notebook are in the
module of its name. `progress()` shows which of them you have passed.
"""

import ast
import builtins
import dis
import importlib
import inspect
import pkgutil
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

import torch

from ddp_tutorial.exercises.passed import Progress, progress_in, remember
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.spawn import rename_cells

Answer = Callable[..., Any]
# Beginnings of the names of files that no learner has written.
_NOT_OWN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), sys.prefix, sys.base_prefix, "<frozen")


class WrongAnswerError(AssertionError):
    """An answer is wrong; the message explains to the learner what."""


@dataclass
class Exercise:
    """`test(answer)` returns what is good about the answer, or raises `WrongAnswerError`; it may start ranks.

    An answer is a function, a class, or the path of a script. `wrong` maps a mistake, in a few words, to an answer that
    makes it.
    """

    task: str
    test: Callable[[Any], str]
    solution: Answer | Path
    wrong: dict[str, Any]
    hints: tuple[str, ...]
    hints_given: int = 0

    def check(self, answer: Answer | Path) -> None:
        """Print whether `answer` is right, and if not, why. Never raises for a wrong answer. A right one that a person
        has given is remembered, for `progress`."""
        right, said = self.verdict(answer)
        print(said)
        if right and self.name:
            remember(self.name)

    @property
    def name(self) -> str:
        """Its module and what it is called there, such as `quickstart.mean_loss`; "" where it is in no module here."""
        loaded = [module for module in _modules() if f"{__name__}.{module}" in sys.modules]
        return next((name for name, exercise in _exercises_of(loaded) if exercise is self), "")

    def verdict(self, answer: Answer | Path) -> tuple[bool, str]:
        """Whether `answer` is right, and what `check` prints about it."""
        try:
            with _ending():
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
            return False, f"Not yet. When your answer ran on real ranks, {error}{_of_none(error)}"
        except _EndlessError as error:
            return False, f"Not yet. {_ENDLESS}{_own_line(error)}"
        except Exception as error:
            return False, f"Not yet. Your answer raised {type(error).__name__}: {error}{_own_line(error)}"

    def hint(self) -> None:
        """Print the next hint; after the last one, say where the solution is."""
        if self.hints_given < len(self.hints):
            self.hints_given += 1
            print(f"Hint {self.hints_given} of {len(self.hints)}: {self.hints[self.hints_given - 1]}")
        else:
            print("These were all the hints. show_solution() shows one way to do it.")

    def show_solution(self) -> None:
        """Print the source of a right answer, as one would type it into a cell: without annotations, and with the
        imports that the notebook does not have."""
        if isinstance(self.solution, Path):
            source = self.solution.read_text(encoding="utf-8")
        else:
            source = textwrap.dedent(inspect.getsource(self.solution))
        source = without_annotations(source.rstrip())
        lacking = imports_for(source, self.solution) if not isinstance(self.solution, Path) else []
        print("\n\n\n".join(["\n".join(lacking), source] if lacking else [source]))


class _EndlessError(BaseException):
    """An answer computes for ever. No `except Exception` of an answer catches it."""


_SECONDS = 60.0  # of this process's own computing; what it waits for ranks does not count
_ENDLESS = f"Your answer has computed for {_SECONDS:.0f} seconds and has not ended: is there a loop without an end?"


@contextmanager
def _ending() -> Iterator[None]:
    """Raises `_EndlessError` in a block that computes for too long. In the main thread only, as signals are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise _EndlessError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _own_line(error: BaseException) -> str:
    """The line of the answer at which it was, and what it says; where it had returned, what may be wrong with that."""
    own = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_OWN)]
    if not own:
        return _of_none(error)
    place = rename_cells(f'File "{own[-1].filename}", line {own[-1].lineno}')
    return f"\nIt was at {place}: {own[-1].line}"


def _of_none(error: BaseException) -> str:
    return "\nA function without a `return` returns None. Is one missing?" if "NoneType" in str(error) else ""


def progress() -> Progress:
    """A table of all exercises, and which of them have been passed here; see `passed`."""
    return progress_in([name for name, _ in _exercises_of(_modules())])


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def _exercises_of(modules: Sequence[str]) -> Iterator[tuple[str, Exercise]]:
    for module in modules:
        for name, value in vars(importlib.import_module(f"{__name__}.{module}")).items():
            if isinstance(value, Exercise):
                yield f"{module}.{name}", value


def without_annotations(source: str) -> str:
    """The same source without the types of arguments and results, whose names a notebook need not have imported."""
    lines = source.split("\n")
    spans = []  # (line, column) of the beginning and of the end of what goes
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
    """The imports, from the module of `solution`, of the names that `source` calls and `__main__`, which is the
    notebook, does not have."""
    lacking = globals_in(source) - vars(sys.modules["__main__"]).keys() - vars(builtins).keys()
    lines = []
    for node in ast.parse(inspect.getsource(sys.modules[solution.__module__])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in lacking]
            lines += [ast.unparse(node)] if node.names else []
    return lines


def globals_in(source: str) -> set[str]:
    """The names that functions in `source` look for outside of themselves when they are called."""
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
    """Raise `WrongAnswerError` with what should have been, unless `condition`."""
    if not condition:
        raise WrongAnswerError(otherwise)


def on_ranks(run: Callable[..., Any], nprocs: int, *args: Any, stuck: str, timeout: float) -> list[Any]:
    """Run the check on real ranks. Raises `WrongAnswerError`, which begins with `stuck`, where some rank has not
    returned after `timeout` seconds."""
    try:
        return launch(run, nprocs, *args, device="cpu", timeout=timeout)  # what an answer prints is shown
    except RankTimeoutError as error:
        raise WrongAnswerError(f"{stuck}\n{error}") from None


def numbers(tensor: torch.Tensor, digits: int = 6) -> str:
    """The values of a tensor in one line."""
    return "[" + ", ".join(f"{number:.{digits}g}" for number in tensor.detach().flatten().tolist()) + "]"
