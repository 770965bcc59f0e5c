"""Create one torchrun script from the cells that ranks have run."""

import ast
import io
import math
import shlex
import textwrap
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_BEGINNING = '''"""Cells of live ranks, as one script{where}:

{command}
"""

import os

import torch
import torch.distributed as dist

from ddp_tutorial import World

os.environ.setdefault("MPLBACKEND", "agg")
torch.set_num_threads({threads})
world = World.detect(device="{device}", backend="{backend}")
display = print
if world.size > 1:
    dist.init_process_group(world.backend)
'''
_END = """
# ---
if dist.is_initialized():
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class ScriptStep:
    """One step of the script.

    Attributes:
        source: Source code of the step.
        on: Ranks that run the step, or None for all ranks.
        lacks: Name of a variable whose value is omitted from the script.
    """

    source: str
    on: tuple[int, ...] | None = None
    lacks: str = ""


def assignment_step(name: str, value: Any) -> ScriptStep:
    """Return the step that assigns `value` to `name` on all ranks.

    Only numbers are written to the script. Strings and objects may contain secrets, and scripts are often shared.
    """
    if type(value) in {bool, int, float} and math.isfinite(value):
        return ScriptStep(f"{name} = {value!r}")
    message = f"assign a value to {name} here: the script does not contain the value that %ranks put sent"
    return ScriptStep(f"raise NotImplementedError({message!r})", lacks=name)


def launch_command(name: str, n: int, nodes: int = 1) -> str:
    """Return the command that runs the script `name` on `n` ranks.

    With several nodes, run the command on each node. `n0` is a placeholder for the first node's name.
    """
    script = shlex.quote(name)
    if nodes == 1:
        return f"torchrun --nproc-per-node {n} {script}"
    meet = "--rdzv-backend c10d --rdzv-endpoint n0:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {n // nodes} {meet} {script}"


def make_script(
    steps: Iterable[ScriptStep], name: str, n: int, threads: int, device: str, backend: str, nodes: int = 1
) -> str:
    """Return the source code of the whole script, including the command that runs it.

    If a step ends with an expression, the script prints the value of the expression, prefixed with the rank.
    """
    where = f". Run it on each of the {nodes} nodes, and replace n0 with the first node's name" if nodes > 1 else ""
    command = launch_command(name, n, nodes).replace("\\", r"\\").replace('"', r"\"")  # for the docstring
    parts = [_BEGINNING.format(where=where, command=command, threads=threads, device=device, backend=backend)]
    for step in steps:
        source = _printing(step.source.strip("\n"))
        if step.on is not None:
            ranks = f"world.rank == {step.on[0]}" if len(step.on) == 1 else f"world.rank in {step.on}"
            source = f"if {ranks}:\n{indented(source)}"
        parts.append(f"\n# ---\n{source}\n")
    return "".join(parts) + _END


def _printing(source: str) -> str:
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if not tree.body:
        return f"{source}\npass"
    if not isinstance(last, ast.Expr) or source.rstrip().endswith(";") or _is_statement(last.value):
        return source
    lines = source.split("\n")
    assert last.end_lineno is not None
    # Column offsets count UTF-8 bytes.
    before = lines[last.lineno - 1].encode()[: last.col_offset].decode()
    after = lines[last.end_lineno - 1].encode()[last.end_col_offset :].decode()
    expression = ast.get_source_segment(source, last)
    opening, closing = 'print(f"[rank {world.rank}]", ', ")"
    body = [*lines[: last.lineno - 1], f"{before}{opening}{expression}{closing}{after}", *lines[last.end_lineno :]]
    return "\n".join(body)


def _is_statement(value: ast.expr) -> bool:
    """Return whether `value` is a call whose result should not be printed.

    Examples are `print(...)` and `dist.all_reduce(x)`.
    """
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in {
        "print",
        "display",
        "show",
        "all_reduce",
        "broadcast",
        "barrier",
        "backward",
        "step",
    }


def indented(source: str) -> str:
    """Indent source code by four spaces, except for the continuation lines of multi-line strings."""
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            opened.append(token.start[0])
        if name == "FSTRING_END":
            inside.update(range(opened.pop() + 1, token.end[0] + 1))
        if name == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    lines: Sequence[str] = source.split("\n")
    return "\n".join(
        line if number in inside else textwrap.indent(line, "    ") for number, line in enumerate(lines, start=1)
    )
