"""A notebook run with many parameters: each point of the grid in a process of its own, and one table at the end.

    runs/sweeps/NAME/
        source-sharded.repeat-1.3f09a2b1/   one point: the executed notebook, its log, result.json, point.json
        results.parquet  results.csv        a row for each point; see tables.py
        compare.ipynb    compare.html       notebooks/experiments/compare.ipynb, executed over the table

A point has a key, made from its parameters and from the code. A point that has finished under its key is not run again,
so a sweep that was interrupted carries on, and one that is changed runs what is new. Repeats are outermost: whatever
else the machine does falls on all points.
"""

import ast
import contextlib
import datetime
import hashlib
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import nbformat

from ddp_tutorial.config import Config, ConfigError, did_you_mean, merge, parse_yaml
from ddp_tutorial.experiments import end_processes_of, execute, last_lines, run_notebook
from ddp_tutorial.files import RUNS, write_json
from ddp_tutorial.manifest import CheckpointError, claimed, sha256_of_json
from ddp_tutorial.notebooks import NOTEBOOKS, source_digest
from ddp_tutorial.tables import FINISHED, FIXED, row_of, write_table

SWEEPS = RUNS / "sweeps"
COMPARE = NOTEBOOKS / "experiments" / "compare.ipynb"
PACKAGE = Path(__file__).parent
_FOLDER = re.compile(r"\w[\w.-]*")

Grid = dict[str, list[Any]]


# ------------------------------------------------------------------------------------------- from words to points


def read_grid(settings: Sequence[str]) -> Grid:
    """`["source=sharded,streamed", "steps=10"]` -> the values of each parameter, typed as YAML types them.

    A value that holds commas is written as YAML has it: `sizes=[1,2],[3]` or `text='a,b',c`. Raises `ConfigError`.
    """
    grid: Grid = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise ConfigError(f"{setting!r} is not of the form key=value,value, such as source=sharded,streamed")
        if key in grid:
            raise ConfigError(f"{key!r} is set twice; write {key}=value,value")
        values = _values(setting, text)
        told = [_as_json(setting, value) for value in values]
        if twice := [each for each in told if told.count(each) > 1]:
            raise ConfigError(f"{key!r} has the value {twice[0]} twice; to run a point again, use --repeats")
        grid[key] = values
    return grid


def _values(setting: str, text: str) -> list[Any]:
    """Text with commas is a list to YAML, without its brackets; only that YAML lets a list end in a comma."""
    empty = f"{setting!r} has an empty value; an empty text is written as ''"
    if not text or text.endswith(","):
        raise ConfigError(empty)
    try:
        return list(parse_yaml(f"[{text}]", setting))
    except ConfigError as error:
        raise ConfigError(empty if "but found ','" in str(error) else str(error)) from None


def _as_json(setting: str, value: Any) -> str:
    if isinstance(value, datetime.date):
        raise ConfigError(f"{setting!r}: {value} is a date to YAML; write it in quotes, as '{value}'")
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError(f"{setting!r}: {value} is neither text nor a finite number, nor made of these") from None


def points_of(grid: Grid, repeats: int) -> list[tuple[dict[str, Any], int]]:
    """Every combination of the values, in the order given; then all of them again, as often as there are repeats."""
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [(parameters, repeat) for repeat in range(1, repeats + 1) for parameters in combinations]


def nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`{"ddp.variant": "flat"}` -> `{"ddp": {"variant": "flat"}}`, as a notebook takes it."""
    whole: dict[str, Any] = {}
    for key, value in parameters.items():
        for part in reversed(key.split(".")):
            value = {part: value}  # noqa: PLW2901
        whole = merge(whole, value)
    return whole


def key_of(parameters: Mapping[str, Any], resolved: Mapping[str, Any], repeat: int, code: str) -> str:
    """The same for the same parameters, the same configs that a notebook makes of them, and the same code."""
    return sha256_of_json({"parameters": dict(parameters), "resolved": dict(resolved), "repeat": repeat, "code": code})[
        :16
    ]


def folder_of(parameters: Mapping[str, Any], repeat: int, key: str) -> str:
    """A name that says what is in it."""
    words = [f"{name}-{value if isinstance(value, str) else json.dumps(value)}" for name, value in parameters.items()]
    told = _clean("_".join(words))[:80].rstrip("._-") or "defaults"
    return f"{told}.repeat-{repeat}.{key[:8]}"


def _clean(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("._-")


def code_version(notebook: Any, package: Path = PACKAGE) -> str:
    """A digest of the package's source and configs, and of the notebook's code cells: of all that makes a result."""
    digest = hashlib.sha256(source_digest(notebook).encode())
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".yaml"}:
            digest.update(repr((path.relative_to(package).as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------- what a notebook takes


@dataclass(frozen=True)
class Parameters:
    """The cell of a notebook tagged `parameters`, and the one after it if that is where they are checked."""

    notebook: str
    source: str
    check: str

    @property
    def names(self) -> list[str]:
        """What the cell assigns to."""
        targets: list[ast.expr | None] = []
        for node in ast.parse(self.source).body:
            targets += node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        return [target.id for target in targets if isinstance(target, ast.Name)]

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The configs that the notebook makes of these parameters. Raises `ConfigError` if it would not have them.

        Its own first two cells decide, run here, so that a mistake in the last point shows before the first is run.
        """
        if not self.check:
            unknown = [name for name in given if name not in self.names]
            if unknown:
                hint = did_you_mean(unknown[0], self.names)
                raise ConfigError(f"{self.notebook} has no parameter {unknown[0]!r}.{hint}")
            return {}
        cells: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(compile(self.source, self.notebook, "exec"), cells)
                cells |= given
                exec(compile(self.check, self.notebook, "exec"), cells)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"{self.notebook}: the cell after the parameters raised {type(error).__name__}: {error}"
                ) from None
        return {name: value.model_dump(mode="json") for name, value in cells.items() if isinstance(value, Config)}


def parameters_in(notebook: Any, name: str) -> Parameters:
    """Find them. Raises `ConfigError` for a notebook that cannot be swept."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    places = [place for place, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", [])]
    if len(places) != 1:
        raise ConfigError(f"{name} has {len(places)} cells tagged 'parameters'; a sweep needs one")
    after = code[places[0] + 1].source if places[0] + 1 < len(code) else ""
    found = Parameters(name, code[places[0]].source, after if "read_parameters(" in after else "")
    if "name" not in found.names:
        raise ConfigError(f"{name} has no parameter 'name', the folder below runs/ that it writes result.json to")
    return found


# ------------------------------------------------------------------------------------------- running the points


@dataclass(frozen=True)
class Point:
    """One execution: what it is told, where it writes, and the key it is known by."""

    parameters: dict[str, Any]
    repeat: int
    key: str
    folder: Path

    @property
    def label(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{told} repeat={self.repeat}".strip()

    def read(self) -> dict[str, Any] | None:
        """What came of it, if it has been run under this key."""
        try:
            record = json.loads((self.folder / "point.json").read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("key") == self.key else None


@dataclass(frozen=True)
class Plan:
    """A sweep, checked, with nothing written yet."""

    notebook: Path
    folder: Path
    points: list[Point]


def plan_sweep(notebook: Path, settings: Sequence[str], repeats: int = 1, name: str = "") -> Plan:
    """The points of a sweep, each of them accepted by the notebook. Raises `ConfigError`, and writes nothing."""
    grid = read_grid(settings)
    source = _read(notebook)
    parameters = parameters_in(source, notebook.name)
    reserved = [key for key in grid if key == "name" or key in FIXED]
    if reserved:
        raise ConfigError(f"{reserved[0]!r} cannot be swept: the sweep itself decides it, or its table has it")
    name = name or _clean(notebook.stem) or "sweep"
    if not _FOLDER.fullmatch(name):
        raise ConfigError(f"the name {name!r} should be a folder below {SWEEPS}/, of letters, digits, '-', '_' and '.'")
    folder = SWEEPS / name
    code = code_version(source)
    points = []
    resolved: dict[str, dict[str, Any]] = {}  # each combination once, whatever the repeats
    for values, repeat in points_of(grid, repeats):
        told = json.dumps(values)
        if told not in resolved:
            resolved[told] = parameters.resolve({**nested(values), "name": "sweeps/point"})
        key = key_of(values, resolved[told], repeat, code)
        points.append(Point(values, repeat, key, folder / folder_of(values, repeat, key)))
    return Plan(notebook, folder, points)


def _read(notebook: Path) -> Any:
    if not notebook.is_file():
        known = sorted(path.stem for path in COMPARE.parent.glob("*.ipynb"))
        raise ConfigError(f"there is no notebook {str(notebook)!r}.{did_you_mean(notebook.stem, known)}")
    try:
        return nbformat.read(notebook, as_version=4)
    except Exception as error:  # nbformat's own, and those of whatever else the file may be
        raise ConfigError(f"{notebook} is not a notebook: {str(error).partition(chr(10))[0][:200]}") from None


@dataclass(frozen=True)
class Outcome:
    """All points of a sweep, as they are now."""

    plan: Plan
    records: list[dict[str, Any]]
    skipped: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table."""
        return [
            row_of(point.parameters, point.repeat, record["status"], record["seconds"], record["metrics"], point.key)
            for point, record in zip(self.plan.points, self.records, strict=True)
        ]

    @property
    def failures(self) -> list[tuple[Point, dict[str, Any]]]:
        """Those that did not finish."""
        both = zip(self.plan.points, self.records, strict=True)
        return [(point, record) for point, record in both if record["status"] != FINISHED]


class SweepInterruptedError(KeyboardInterrupt):
    """The point at work has been ended; those that finished are kept."""

    def __init__(self, done: int, points: int) -> None:
        super().__init__(f"interrupted; {done} of {points} points are done and kept. The same command carries on.")


def run_sweep(plan: Plan, timeout: float, tell: Callable[[str], object]) -> Outcome:
    """Run the points that have not finished yet, then write the table and the comparison.

    A point that fails, or takes longer than `timeout` seconds, does not stop the others. Raises `ConfigError` where
    another sweep is at work in the same folder, `SweepInterruptedError`, and `NotebookError` if the comparison fails.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(plan.folder):
        try:
            outcome = _run_points(plan, timeout, tell)
            _write_outcome(outcome, tell)
        except KeyboardInterrupt:
            finished = sum(record["status"] == FINISHED for point in plan.points if (record := point.read()))
            raise SweepInterruptedError(finished, len(plan.points)) from None
        return outcome


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    try:
        with claimed(folder):
            end_processes_of(folder)  # of a sweep that was killed: nobody else can be at work here
            yield
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _run_points(plan: Plan, timeout: float, tell: Callable[[str], object]) -> Outcome:
    from tqdm import tqdm

    before = {point.key: record for point in plan.points if (record := point.read()) and record["status"] == FINISHED}
    records = []
    seconds = 0.5 if sys.stderr.isatty() else 60.0  # between two lines: in a file, each is kept
    nothing_to_do = len(before) == len(plan.points)
    options: dict[str, Any] = {"unit": "point", "mininterval": seconds, "miniters": 0, "smoothing": 0}
    with tqdm(total=len(plan.points), disable=nothing_to_do, **options) as bar:
        for point in plan.points:
            if point.key not in before:
                bar.set_description_str(point.label)
            record = before.get(point.key) or _run(plan.notebook, point, timeout, lambda: bar.update(0))
            if record["status"] != FINISHED:
                tell(failure_of(point, record))
            records.append(record)
            bar.update()
    return Outcome(plan, records, len(before))


def _write_outcome(outcome: Outcome, tell: Callable[[str], object]) -> None:
    """The table, and the comparison unless that of the very same table is there."""
    folder, finished = outcome.plan.folder, len(outcome.plan.points) - len(outcome.failures)
    table, page = folder / "results.csv", folder / "compare.html"
    old = table.read_bytes() if table.is_file() else b""
    write_table(folder, outcome.rows)
    if finished and not (page.is_file() and table.read_bytes() == old):
        page.unlink(missing_ok=True)
        tell(f"comparing {finished} points")
        run_notebook(COMPARE, folder, {"name": f"sweeps/{folder.name}", "table": str(folder / "results.parquet")})


def _run(notebook: Path, point: Point, timeout: float, look: Callable[[], object]) -> dict[str, Any]:
    """Run one point in a fresh folder, judge it, and note what came of it, last."""
    shutil.rmtree(point.folder, ignore_errors=True)  # of an attempt that failed, or was interrupted
    point.folder.mkdir(parents=True)
    began = time.monotonic()
    name = point.folder.relative_to(RUNS).as_posix()
    code = execute(notebook, point.folder, {**nested(point.parameters), "name": name}, look, timeout)
    seconds = round(time.monotonic() - began, 2)
    record: dict[str, Any] = {
        "schema": 1,
        "key": point.key,
        "parameters": point.parameters,
        "repeat": point.repeat,
        "seconds": seconds,
    } | _judged(point.folder, notebook.name, code, timeout)
    write_json(point.folder / "point.json", record)
    return record


def _judged(folder: Path, notebook: str, code: int | None, timeout: float) -> dict[str, Any]:
    """Finished, if papermill says so and the notebook has written its result; what papermill has noted in the notebook
    does not count, it says "completed" even when the kernel has died."""
    cell, error = _where_it_stopped(folder / notebook)
    try:
        result = json.loads((folder / "result.json").read_bytes())
        status, metrics = result["status"], dict(result["metrics"])
    except (OSError, ValueError, TypeError, KeyError):
        status, metrics = None, {}
    if code == 0 and status == FINISHED:
        return {"status": FINISHED, "metrics": metrics, "cell": None, "error": None}
    if code is None:
        return {"status": "timed out", "metrics": {}, "cell": cell, "error": f"longer than {timeout:g} s"}
    if code == 0:
        cell = None  # all of them ran
        error = "it has written no result.json" if status is None else f"its result.json says {status!r}"
    return {"status": "failed", "metrics": {}, "cell": cell, "error": error or last_lines(folder, 1)[0]}


def _where_it_stopped(executed: Path) -> tuple[str | None, str | None]:
    """The last cell that was begun, by its number and first line, and its error; as it stands in the notebook."""
    try:
        cells = [cell for cell in nbformat.read(executed, as_version=4).cells if cell.cell_type == "code"]
    except Exception:  # not written, or only half
        return None, None
    begun = [place for place, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
    if not begun:
        return None, None
    cell = cells[begun[-1]]
    first = next((line for line in cell.source.splitlines() if line.strip()), "")
    errors = [output for output in cell.outputs if output.output_type == "error"]
    told = f"{errors[0].ename}: {errors[0].evalue}".strip().splitlines()[0] if errors else None
    return f"[{begun[-1] + 1}] {first.strip()}", told


def failure_of(point: Point, record: Mapping[str, Any]) -> str:
    """One line: which point, which cell, which error, and where to look."""
    cell = f" in cell {record['cell']}" if record["cell"] else ""
    return f"{record['status']}: {point.label}{cell}: {record['error']} ({point.folder})"
