"""Mutation operators: every small change of a source file that its tests should detect.

A mutant replaces the text of one node of the syntax tree, so every other line keeps its number and format.
Documentation, type hints, messages (f-strings, the arguments of `raise`), `if TYPE_CHECKING` and `__repr__` are not
changed.
"""

import ast
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

_PAIRS: list[tuple[type, type]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
]
_SWAPPED = {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult} | dict(_PAIRS) | {b: a for a, b in _PAIRS}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TYPE_HINTS = {"annotation", "returns", "bases"}
_DOCUMENTATION = {"description", "examples"}  # keyword arguments of pydantic's fields


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Args:
        file: path of the file, relative to the root of the repository.
        line: first line of the statement that contains the change. For a default value, the function's first statement.
        before: the source lines that change, as one line without indentation.
        after: the same lines with the change.
        source: the whole file with the change.
    """

    file: str
    line: int
    before: str
    after: str
    source: str


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    found = []
    for line, node, text in _changes(ast.parse(source), 1):
        mutated = _replace(source, node, text)
        last = node.end_lineno + mutated.count("\n") - source.count("\n")
        before, after = _lines(source, node.lineno, node.end_lineno), _lines(mutated, node.lineno, last)
        found.append(Mutant(file, line, before, after, mutated))
    return sorted(found, key=lambda mutant: mutant.line)


def _changes(node: ast.AST, line: int) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield the line of a statement, the node to replace and its replacement, for a node and all below it."""
    if _is_left_alone(node):
        return
    if isinstance(node, ast.FunctionDef):
        line = next((statement for statement in node.body if not _is_left_alone(statement)), node).lineno
    elif isinstance(node, ast.stmt):
        line = node.lineno
    for replaced, text in (*_in_expression(node), *_in_statement(node)):
        yield line, replaced, text
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in _TYPE_HINTS:
                yield from _changes(child, line)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.JoinedStr() | ast.Raise() | ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=name):
            return name in _DOCUMENTATION
    return False


def _in_expression(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _SWAPPED:
            yield node, f"({_with(node, ops=[_SWAPPED[type(operator)]()])})"
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in _SWAPPED and not _is_text(node):
            yield node, f"({_with(node, op=_SWAPPED[type(operator)]())})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, str(value + 1)
        case ast.IfExp(test=test):
            yield from ((test, constant) for constant in ("True", "False"))
        case ast.comprehension(ifs=tests):
            yield from ((test, "True") for test in tests)
        case ast.Call(func=function, keywords=keywords):
            if isinstance(function, ast.Name) and function.id in _FUNCTIONS:
                yield function, _FUNCTIONS[function.id]
            for dropped in keywords:
                if dropped.arg and not _is_left_alone(dropped):
                    yield node, _with(node, keywords=[keyword for keyword in keywords if keyword is not dropped])


def _in_statement(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.AugAssign(op=operator, value=value) if type(operator) in _SWAPPED and not _is_text(value):
            yield node, _with(node, op=_SWAPPED[type(operator)]())
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield node, "return None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"
        case ast.If(test=test):
            yield from ((test, constant) for constant in ("True", "False"))
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield test, "False"  # with True, it would never end
        case ast.Try(handlers=handlers):
            yield from ((handler.type, "()") for handler in handlers if handler.type)  # catches no exception
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"


def _is_text(node: ast.AST) -> bool:
    """Return whether the node is text or joins text. An operator other than `+` and `/` raises a TypeError there."""
    match node:
        case ast.BinOp(left=left, right=right):
            return _is_text(left) or _is_text(right)
        case ast.JoinedStr() | ast.Constant(value=str() | bytes()):
            return True
    return False


def _with(node: ast.AST, **fields: object) -> str:
    """Return the source of a node some of whose fields are different."""
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.unparse(changed)


def _replace(source: str, node: ast.AST, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)  # column numbers of the tree count bytes
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + text.encode() + after).decode()


def _lines(source: str, first: int, last: int) -> str:
    return " ".join(line.strip() for line in source.splitlines()[first - 1 : last])
