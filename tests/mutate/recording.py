"""Record which tests execute which lines, in every process: tests, forked and spawned ranks, and workers.

Each source file calls `_hit` before each of its statements. Tracing would miss processes that are killed, and
autograd's threads.
"""

import ast
from collections import defaultdict

_PRELUDE = """
def _hit(line, seen=set()):
    import os
    key = os.environ.get("PYTEST_CURRENT_TEST", ""), line
    if key not in seen:
        seen.add(key)
        file = os.open({hits!r}, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{name}:{{line}}\\t{{key[0]}}\\n".encode())
        except OSError:  # a test limits the size of files
            pass
        finally:
            os.close(file)
"""
ANY = ""  # in place of a test: an import executes the line, or a process without pytest's environment variable


def recorded(source: str, name: str, hits: str) -> str:
    """Return a source file that writes the lines it executes to the file `hits`, which must exist."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                setattr(node, field, [each for statement in statements for each in _with_hit(statement)])
    start = next(place for place, statement in enumerate(tree.body) if not _must_be_first(statement))
    tree.body[start:start] = ast.parse(_PRELUDE.format(hits=hits, name=name)).body
    return ast.unparse(tree)


def _with_hit(statement: ast.stmt) -> list[ast.stmt]:
    return [*([] if _must_be_first(statement) else ast.parse(f"_hit({statement.lineno})").body), statement]


def _must_be_first(statement: ast.stmt) -> bool:
    """Return whether the statement is a docstring, or an import from `__future__`."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
            return True
    return False


def covering(hits: str) -> dict[str, set[str]]:
    """Return for each `file:line` the tests that execute it."""
    tests: dict[str, set[str]] = defaultdict(set)
    for entry in hits.splitlines():
        line, test = entry.split("\t")
        tests[line].add(test.rpartition(" ")[0])  # without the phase, such as "(call)"
    return dict(tests)
