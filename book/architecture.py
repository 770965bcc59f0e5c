"""Draw the rooms of the package and their imports, as an SVG file that GitHub and the book both show.

An arrow from a room leads to a room that it imports. An arrow is left out if a longer path leads to the same room.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import ddp_tutorial

PACKAGE = Path(ddp_tutorial.__file__).parent
TOP = "ddp_tutorial"
ROOT = "root"  # the modules outside of any room
ROOT_PACKAGES = {"slurm"}  # `world` imports them, so they belong to the root
Graph = dict[str, set[str]]
Node = tuple[str, int]  # a room and its level, or a point of an arrow on a level between two rooms

WIDTH, ROW, BOX, POINT = 780, 62, 112, 24  # pixels: the figure, the height of a level, the width of a room and a point


def imports() -> Graph:
    """Return the rooms that each room imports, anywhere in its files."""
    graph: Graph = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if path.parent != PACKAGE or path.stem != "__init__":
            graph.setdefault(room, set()).update(set(_imported(path)) - {room})
    return graph


def room_of(module: str) -> str:
    """Return the room of a module, named without the package: `zero.fsdp` -> `zero`, `world` -> `root`."""
    first = module.partition(".")[0]
    return first if ((PACKAGE / first).is_dir() and first not in ROOT_PACKAGES) or first == "__main__" else ROOT


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == TOP:
            for alias in node.names:
                name = f"{node.module}.{alias.name}".partition(".")[2]
                if node.module == TOP and alias.name in ddp_tutorial.__all__:
                    name = getattr(ddp_tutorial, alias.name).__module__.partition(".")[2]
                yield room_of(name)


def without_shortcuts(graph: Graph) -> Graph:
    """Return the transitive reduction of `graph`."""

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(graph[room]).union(*map(reached, graph[room]))

    return {
        room: {to for to in all_to if not any(to in reached(by) for by in all_to)} for room, all_to in graph.items()
    }


def levels(graph: Graph) -> dict[str, int]:
    """Return the length of the longest path of imports from each room."""

    @cache
    def level(room: str) -> int:
        return 1 + max(map(level, graph[room]), default=-1)

    return {room: level(room) for room in graph}


def svg() -> str:
    """Return the figure."""
    graph = without_shortcuts(imports())
    level = levels(graph)
    paths = [_points(room, to, level) for room in sorted(graph) for to in sorted(graph[room])]
    place = _places(level, paths)
    height = ROW * (max(level.values()) + 1)

    def at(node: Node) -> tuple[float, float]:
        return place[node], height - ROW * (node[1] + 0.5)

    lines = [_arrow([at(node) for node in path]) for path in paths]
    boxes = [_box(room, *at((room, number))) for room, number in sorted(level.items())]
    body = "\n".join([*lines, *boxes])
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" \
viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">
<title>The rooms of {TOP}: an arrow leads from a room to a room that it imports</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="#567"/></marker></defs>
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
{body}
</svg>
"""


def _points(room: str, to: str, level: Mapping[str, int]) -> list[Node]:
    """Return the nodes of an arrow: both rooms, and a point on each level between them."""
    between = [(f"{room} -> {to}", number) for number in range(level[room] - 1, level[to], -1)]
    return [(room, level[room]), *between, (to, level[to])]


def _places(level: Mapping[str, int], paths: list[list[Node]]) -> dict[Node, float]:
    """Return the horizontal position of each node. A node stands near the mean of its neighbors."""
    rows: dict[int, list[Node]] = {}
    neighbors: dict[Node, set[Node]] = {node: set() for node in level.items()}
    for path in paths:
        for one, other in pairwise(path):
            neighbors.setdefault(one, set()).add(other)
            neighbors.setdefault(other, set()).add(one)
    for node in sorted(neighbors):
        rows.setdefault(node[1], []).append(node)
    place = {node: x for row in rows.values() for node, x in zip(row, _spread(row, level), strict=True)}
    for _ in range(20):
        for number in [*sorted(rows), *sorted(rows, reverse=True)]:
            row = rows[number]
            row.sort(
                key=lambda node: (sum(place[each] for each in neighbors[node]) / max(1, len(neighbors[node])), node)
            )
            place |= dict(zip(row, _spread(row, level), strict=True))
    return place


def _spread(row: list[Node], level: Mapping[str, int]) -> list[float]:
    """Return evenly spaced positions for the nodes of a row, centered."""
    widths = [BOX if node[0] in level else POINT for node in row]
    gap = 24
    left = (WIDTH - sum(widths) - gap * (len(row) - 1)) / 2
    return [left + sum(widths[:i]) + gap * i + width / 2 for i, width in enumerate(widths)]


def _arrow(points: list[tuple[float, float]]) -> str:
    corners = [(x, y + side) for x, y in points for side in (-15, 15)][1:-1]  # vertical beside the boxes of a level
    drawn = " ".join(f"{x:.0f},{y:.0f}" for x, y in corners)
    return f'<polyline points="{drawn}" fill="none" stroke="#567" marker-end="url(#tip)"/>'


def _box(room: str, x: float, y: float) -> str:
    frame = 'height="30" rx="4" fill="#e8f1f8" stroke="#0072b2"'
    return (
        f'<rect x="{x - BOX / 2:.0f}" y="{y - 15:.0f}" width="{BOX}" {frame}/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{room}</text>'
    )
