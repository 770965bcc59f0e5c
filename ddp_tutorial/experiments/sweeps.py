"""Run a notebook over a grid of parameters and collect the results in one table.

    runs/sweeps/NAME/
        source-sharded.repeat-1.3f09a2b1/   one point: the executed notebook, its log, result.json, point.json
        results.parquet  results.csv        one row per point; see tables.py
        compare.ipynb    compare.html       notebooks/experiments/compare.ipynb, executed with the table

Each point runs in its own process and has a key derived from its parameters and the code. If a point with the same key
has already finished, the sweep skips it. Therefore, an interrupted sweep resumes with the next point, and a modified
sweep runs only its new points. All points run once before any point is repeated, so that a temporary slowdown of the
machine affects all points equally.
"""

import ast
import contextlib
import csv
import datetime
import hashlib
import io
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import yaml

from ddp_tutorial.checkpoint.manifest import sha256_of_json
from ddp_tutorial.config import ConfigError, did_you_mean, merge, parse_yaml
from ddp_tutorial.experiments.execute import end_processes_of, execute, last_lines, run_notebook
from ddp_tutorial.experiments.notebooks import NOTEBOOKS, source_digest
from ddp_tutorial.experiments.parameter_check import resolve
from ddp_tutorial.experiments.tables import FINISHED, FIXED, row_of, write_table
from ddp_tutorial.files import PACKAGE, RUNS, locked, write_json

SWEEPS = RUNS / "sweeps"
COMPARE = NOTEBOOKS / "experiments" / "compare.ipynb"
_FOLDER = re.compile(r"\w[\w.-]*")

Grid = dict[str, list[Any]]


# ------------------------------------------------------------------------------------------- command-line settings


def read_grid(settings: Sequence[str]) -> Grid:
    """Return the values of each parameter in settings such as `["source=sharded,streamed", "steps=10"]`.

    Values have the types that YAML assigns. A value that contains commas is written as in YAML: `sizes=[1,2],[3]` or
    `text='a,b',c`. `steps=@FILE` reads a YAML or JSON list of values.

    Raises:
        ConfigError: If a setting is malformed, a file cannot be read, or a parameter or value is repeated.
    """
    grid: Grid = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not _is_name(key):
            raise ConfigError(f"a setting must have the form KEY=VALUE1,VALUE2, such as source=a,b, got {setting!r}")
        if key in grid:
            raise ConfigError(f"{key!r} is set twice; to sweep over several values, write {key}=VALUE1,VALUE2")
        grid[key] = values = _values(setting, text)
        if twice := _repeated([_as_json(setting, value) for value in values]):
            raise ConfigError(f"{key!r} lists the value {twice} twice; to repeat a point, use --repeats")
    return grid


def _is_name(key: object) -> bool:
    return isinstance(key, str) and all(part.isidentifier() for part in key.split("."))


def _repeated(encoded: Sequence[str]) -> str | None:
    """Return the first value that occurs more than once."""
    return next((each for each in encoded if encoded.count(each) > 1), None)


def _values(setting: str, text: str) -> list[Any]:
    """Return the values in `text`, parsed as a YAML list without brackets, or the values in FILE if `text` is "@FILE".

    Unlike in YAML, a trailing comma is an error.
    """
    if text.startswith("@"):
        return _values_in_file(setting, Path(text[1:]))
    empty = f"{setting!r} has an empty value; write an empty string as ''"
    if not text or text.endswith(","):
        raise ConfigError(empty)
    try:
        return list(parse_yaml(f"[{text}]", setting))
    except ConfigError as error:
        raise ConfigError(empty if re.search(r"^\s*,|,\s*,", text) else str(error)) from None


def _values_in_file(setting: str, path: Path) -> list[Any]:
    values = parse_yaml(_text_of(setting, path), str(path))
    if not isinstance(values, list) or not values:
        found = "an empty list" if values == [] else type(values).__name__
        raise ConfigError(f"{setting!r}: {str(path)!r} must contain a YAML list of values, such as [1, 2], got {found}")
    return values


def _text_of(setting: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a spreadsheet may begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting!r}: {str(path)!r} cannot be read: {error}") from None


def read_points(path: Path) -> list[dict[str, Any]]:
    """Return the points in a file, as one dict of parameters per point.

    A YAML or JSON file contains a list such as `[{steps: 10, nprocs: 1}, {steps: 20, nprocs: 2}]`. In a CSV file, each
    row after the header is a point, and its values have the types that YAML assigns.

    Raises:
        ConfigError: If the file cannot be read, or if its points are invalid, are duplicated, or set different
            parameters.
    """
    setting = f"--points {path}"
    text = _text_of(setting, path)
    points = _csv_points(setting, text) if path.suffix.lower() == ".csv" else parse_yaml(text, str(path))
    if not isinstance(points, list) or not points or not all(isinstance(point, dict) and point for point in points):
        raise ConfigError(
            f"{setting!r}: the file must contain a list of points, such as [{{steps: 10}}, {{steps: 20}}]"
        )
    names = list(points[0])
    if wrong := [name for name in names if not _is_name(name)]:
        raise ConfigError(
            f"{setting!r}: parameter names must be identifiers or dotted names such as ddp.variant, got {wrong[0]!r}"
        )
    for number, point in enumerate(points, 1):
        if point.keys() != points[0].keys():
            raise ConfigError(
                f"{setting!r}: all points must set the same parameters as the first point ({', '.join(names)}), got "
                f"{', '.join(map(str, point))} for point {number}"
            )
    for value in (value for point in points for value in point.values()):
        _as_json(setting, value)
    if twice := _repeated([_as_json(setting, point) for point in points]):
        raise ConfigError(f"{setting!r}: the point {twice} occurs twice; to repeat a point, use --repeats")
    return points


def _csv_points(setting: str, text: str) -> list[dict[str, Any]]:
    try:
        rows = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except csv.Error as error:
        raise ConfigError(f"{setting!r}: the file is not valid CSV: {error}") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if twice := _repeated(header):
        raise ConfigError(f"{setting!r}: the header contains {twice!r} twice")
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header) or not all(value.strip() for value in row):
            raise ConfigError(
                f"{setting!r}: point {number} must have one value for each of {', '.join(header)}, got "
                f"{','.join(row)!r}; write an empty string as ''"
            )
    return [
        {name: parse_yaml(value, f"{setting}: {name}={value}") for name, value in zip(header, row, strict=True)}
        for row in rows[1:]
    ]


def _as_json(setting: str, value: Any) -> str:
    if isinstance(value, datetime.date):
        raise ConfigError(f"{setting!r}: YAML reads {value} as a date; quote it, as in '{value}'")
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{setting!r}: values must be strings, finite numbers, or lists and mappings of such values, got {value}"
        ) from None


def expand_grid(
    grid: Grid, repeats: int, points: Sequence[Mapping[str, Any]] = ({},)
) -> list[tuple[dict[str, Any], int]]:
    """Return all combinations with repeat number 1, in the given order, then with repeat number 2, and so on.

    Each element of `points` is combined with every combination of the values in `grid`.
    """
    combinations = [
        {**point, **dict(zip(grid, values, strict=True))} for point in points for values in product(*grid.values())
    ]
    return [(parameters, repeat) for repeat in range(1, repeats + 1) for parameters in combinations]


def nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted names to nested dicts, as the notebook expects.

    For example, `{"ddp.variant": "flat"}` becomes `{"ddp": {"variant": "flat"}}`.
    """
    whole: dict[str, Any] = {}
    for key, value in parameters.items():
        for part in reversed(key.split(".")):
            value = {part: value}  # noqa: PLW2901
        whole = merge(whole, value)
    return whole


def key_of(parameters: Mapping[str, Any], resolved: Mapping[str, Any], repeat: int, code: str) -> str:
    """Return a key that identifies the parameters, resolved configs, repeat number and code."""
    return sha256_of_json({"parameters": dict(parameters), "resolved": dict(resolved), "repeat": repeat, "code": code})[
        :16
    ]


def folder_of(parameters: Mapping[str, Any], repeat: int, key: str) -> str:
    """Return a point's folder name, which is a shortened form of the point's parameters, repeat number and key."""
    words = [f"{name}-{value if isinstance(value, str) else json.dumps(value)}" for name, value in parameters.items()]
    name = _clean("_".join(words)).encode()[:80].decode(errors="ignore").rstrip("._-") or "defaults"
    return f"{name}.repeat-{repeat}.{key[:8]}"


def _clean(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("._-")


def code_version(notebook: Any, package: Path = PACKAGE) -> str:
    """Return a digest of all code that affects a result.

    The digest covers the package's source and configs, and the notebook's code cells.
    """
    digest = hashlib.sha256(source_digest(notebook).encode())
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".yaml"}:
            digest.update(repr((path.relative_to(package).as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------- notebook parameters


@dataclass(frozen=True)
class Parameters:
    """The source of a notebook's `parameters` cell, and of the next cell if that cell calls `read_parameters`."""

    notebook: str
    source: str
    check: str

    @property
    def names(self) -> list[str]:
        """The names of the variables that the parameters cell assigns."""
        targets: list[ast.expr | None] = []
        for node in ast.parse(self.source).body:
            targets += node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        return [target.id for target in targets if isinstance(target, ast.Name)]

    def resolve(self, points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the configs that the notebook creates for each point.

        For each point, the parameter cells are executed in a separate process. Therefore, a mistake in the last point
        is reported before the first point runs.

        Raises:
            ConfigError: If the notebook rejects the parameters of a point.
        """
        if self.check:
            return resolve(self.notebook, [self.source, self.check], points)
        unknown = [name for point in points for name in point if name not in self.names]
        if unknown:
            hint = did_you_mean(unknown[0], self.names)
            raise ConfigError(f"{self.notebook} has no parameter {unknown[0]!r}.{hint}")
        return [{} for _ in points]


def parameters_in(notebook: Any, name: str) -> Parameters:
    """Return the parameters of a notebook.

    Raises:
        ConfigError: If the notebook does not contain exactly one `parameters` cell, or if this cell is not Python code
            or has no parameter "name".
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    places = [place for place, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", [])]
    if len(places) != 1:
        raise ConfigError(f"{name} must contain exactly one cell tagged 'parameters', got {len(places)}")
    after = code[places[0] + 1].source if places[0] + 1 < len(code) else ""
    parameters = Parameters(name, code[places[0]].source, after if "read_parameters(" in after else "")
    try:
        names = parameters.names
    except SyntaxError as error:
        raise ConfigError(
            f"{name}: the cell tagged 'parameters' must contain only Python code, but there is a "
            f"syntax error on line {error.lineno}: {error.msg}"
        ) from None
    if "name" not in names:
        raise ConfigError(
            f"{name} must have a parameter 'name', which specifies the folder under runs/ for result.json"
        )
    return parameters


# ------------------------------------------------------------------------------------------- running the points


@dataclass(frozen=True)
class Point:
    """One run of the sweep's notebook, with its parameters, repeat number, key and output folder."""

    parameters: dict[str, Any]
    repeat: int
    key: str
    folder: Path

    @property
    def label(self) -> str:
        """The parameters and the repeat number as text."""
        settings = " ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{settings} repeat={self.repeat}".strip()

    @property
    def arguments(self) -> dict[str, Any]:
        """The notebook's parameters, including the folder for its result."""
        return {**nested(self.parameters), "name": self.folder.relative_to(RUNS).as_posix()}

    def command(self, notebook: Path) -> str:
        """Return a shell command that runs only this point and saves the executed notebook in the current directory."""
        # Papermill reads YAML 1.1, which requires 1.0e-05 and parses JSON's 1e-05 as a string.
        arguments = yaml.safe_dump(self.arguments, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip()
        runs = [] if Path("runs") == RUNS else ["env", f"DDP_TUTORIAL_RUNS={RUNS}"]
        return shlex.join([*runs, "papermill", str(notebook), f"{self.folder.name}.ipynb", "-y", arguments])

    def read(self) -> dict[str, Any] | None:
        """Return the point's record, or None if the point has not been run with this key."""
        try:
            record = json.loads((self.folder / "point.json").read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("key") == self.key else None


@dataclass(frozen=True)
class Plan:
    """A sweep whose points have been validated. No files have been written yet."""

    notebook: Path
    folder: Path
    points: list[Point]

    @property
    def commands(self) -> list[str]:
        """The shell command of each point."""
        return [point.command(self.notebook) for point in self.points]


def plan_sweep(
    notebook: Path, settings: Sequence[str], repeats: int = 1, name: str = "", file: Path | None = None
) -> Plan:
    """Return the validated plan of a sweep, without writing any files.

    Args:
        notebook: The path of a notebook, or the name of one of the project's experiments, such as `train`.
        settings: The values of each parameter; see `read_grid`.
        repeats: The number of runs of each point.
        name: The folder under `runs/sweeps/`. Defaults to the notebook's name.
        file: A file with points, which are combined with the settings; see `read_points`.

    Raises:
        ConfigError: If the settings or the points are invalid, or if the notebook would reject a point.
    """
    grid, from_file = read_grid(settings), read_points(file) if file else [{}]
    if twice := [key for key in grid if key in from_file[0]]:
        raise ConfigError(f"{twice[0]!r} is set both on the command line and in {file}; remove one of the settings")
    notebook = _find(notebook)
    source = _read(notebook)
    parameters = parameters_in(source, notebook.name)
    reserved = [key for key in (*from_file[0], *grid) if key == "name" or key in FIXED]
    if reserved:
        raise ConfigError(
            f"{reserved[0]!r} cannot be swept: this name is reserved for a parameter that the sweep sets, or "
            "for a column of its table. Sweep a different parameter"
        )
    name = name or _clean(notebook.stem) or "sweep"
    if not _FOLDER.fullmatch(name):
        raise ConfigError(
            "a sweep's name must be a valid folder name (letters, digits, '-', '_' and '.', not starting with '-' or "
            f"'.'), got {name!r}. The sweep is stored in {SWEEPS}/NAME"
        )
    folder = SWEEPS / name
    code = code_version(source)
    combinations = [values for values, _ in expand_grid(grid, 1, from_file)]
    resolved = parameters.resolve([{**nested(values), "name": "sweeps/point"} for values in combinations])
    points = []
    for (values, repeat), configs in zip(expand_grid(grid, repeats, from_file), cycle(resolved)):
        key = key_of(values, configs, repeat, code)
        points.append(Point(values, repeat, key, folder / folder_of(values, repeat, key)))
    return Plan(notebook, folder, points)


def experiments_by_name() -> dict[str, Path]:
    """Return a dict that maps the names of the project's experiments, such as `train`, to notebook paths."""
    return {path.stem: path for path in sorted(COMPARE.parent.glob("*.ipynb"))}


def _find(notebook: Path) -> Path:
    """Return a notebook's path. `notebook` is a path, or the name of one of the project's experiments."""
    experiments = experiments_by_name()
    if notebook.is_file():
        return notebook
    if str(notebook) in experiments:
        return experiments[str(notebook)]
    raise ConfigError(f"there is no notebook {str(notebook)!r}.{did_you_mean(notebook.stem, list(experiments))}")


def _read(notebook: Path) -> Any:
    try:
        return nbformat.read(notebook, as_version=4)
    except Exception as error:  # nbformat raises many types, depending on the file's content
        raise ConfigError(f"{notebook} is not a notebook: {str(error).partition(chr(10))[0][:200]}") from None


@dataclass(frozen=True)
class Outcome:
    """The points of a sweep and their records. `skipped` is the number of points that had already finished."""

    plan: Plan
    records: list[dict[str, Any]]
    skipped: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the sweep's table, one per point."""
        return [
            row_of(point.parameters, point.repeat, record["status"], record["seconds"], record["metrics"], point.key)
            for point, record in zip(self.plan.points, self.records, strict=True)
        ]

    @property
    def failures(self) -> list[tuple[Point, dict[str, Any]]]:
        """The points that did not finish, with their records."""
        both = zip(self.plan.points, self.records, strict=True)
        return [(point, record) for point, record in both if record["status"] != FINISHED]


class SweepInterruptedError(KeyboardInterrupt):
    """Raised when a sweep is interrupted. The current point has been terminated, and finished points are kept."""

    def __init__(self, done: int, points: int) -> None:
        """Build a message with the number of finished points and instructions for resuming."""
        super().__init__(f"interrupted; {done} of {points} points are done and saved. To resume, rerun the command.")


def run_sweep(plan: Plan, timeout: float, report: Callable[[str], object]) -> Outcome:
    """Run the points that have not finished yet, then write the table and the comparison.

    A point that fails or times out does not stop the sweep.

    Args:
        plan: The sweep.
        timeout: The timeout of each point in seconds.
        report: A function to call with a line of text for each failure and for the comparison.

    Raises:
        ConfigError: If a different sweep is running in the plan's folder.
        SweepInterruptedError: If the sweep is interrupted.
        NotebookError: If the comparison failed.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(plan.folder):
        try:
            outcome = _run_points(plan, timeout, report)
            _write_outcome(outcome, report)
        except KeyboardInterrupt:
            finished = sum(record["status"] == FINISHED for point in plan.points if (record := point.read()))
            raise SweepInterruptedError(finished, len(plan.points)) from None
        return outcome


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with locked(folder):
        end_processes_of(folder)  # left by a killed sweep; the lock ensures that no other sweep is running
        yield


def _run_points(plan: Plan, timeout: float, report: Callable[[str], object]) -> Outcome:
    from tqdm import tqdm

    before = {point.key: record for point in plan.points if (record := point.read()) and record["status"] == FINISHED}
    records = []
    seconds = 0.5 if sys.stderr.isatty() else 60.0  # between updates; in a file, each update adds a line
    nothing_to_do = len(before) == len(plan.points)
    options: dict[str, Any] = {"unit": "point", "mininterval": seconds, "miniters": 0, "smoothing": 0}
    with tqdm(total=len(plan.points), disable=nothing_to_do, **options) as bar:
        for point in plan.points:
            if point.key not in before:
                bar.set_description_str(point.label)
            record = before.get(point.key) or _run(plan.notebook, point, timeout, lambda: bar.update(0))
            if record["status"] != FINISHED:
                report(failure_of(point, record))
            records.append(record)
            bar.update()
    return Outcome(plan, records, len(before))


def _write_outcome(outcome: Outcome, report: Callable[[str], object]) -> None:
    """Write the table, and run the comparison notebook unless it has already been run on the same table."""
    folder, finished = outcome.plan.folder, len(outcome.plan.points) - len(outcome.failures)
    table, page = folder / "results.csv", folder / "compare.html"
    with TemporaryDirectory() as new:
        write_table(Path(new), outcome.rows)
        if not table.is_file() or (Path(new) / table.name).read_bytes() != table.read_bytes():
            page.unlink(missing_ok=True)  # before the table changes, or a crash would leave a page of the old table
    write_table(folder, outcome.rows)
    if finished and not page.is_file():
        report(f"comparing {finished} points")
        run_notebook(COMPARE, folder, {"name": f"sweeps/{folder.name}", "table": str(folder / "results.parquet")})


def _run(notebook: Path, point: Point, timeout: float, look: Callable[[], object]) -> dict[str, Any]:
    """Run one point in an empty folder, and write and return its record."""
    shutil.rmtree(point.folder, ignore_errors=True)  # left by a failed or interrupted attempt
    point.folder.mkdir(parents=True)
    began = time.monotonic()
    code = execute(notebook, point.folder, point.arguments, look, timeout)
    seconds = round(time.monotonic() - began, 2)
    record: dict[str, Any] = {
        "schema": 1,
        "key": point.key,
        "parameters": point.parameters,
        "repeat": point.repeat,
        "seconds": seconds,
    } | _outcome_of(point.folder, notebook.name, code, timeout)
    write_json(point.folder / "point.json", record)
    return record


def _outcome_of(folder: Path, notebook: str, code: int | None, timeout: float) -> dict[str, Any]:
    """Return a point's status, metrics, failed cell and error.

    A point counts as finished if papermill exits with code 0 and the notebook's result reports completion. The executed
    notebook's recorded status is not sufficient, because it is "completed" even if the kernel died.
    """
    cell, error = _failed_cell(folder / notebook)
    try:
        result = json.loads((folder / "result.json").read_bytes())
        status, metrics = result["status"], dict(result["metrics"])
    except (OSError, ValueError, TypeError, KeyError):
        status, metrics = None, {}
    if code == 0 and status == FINISHED:
        return {"status": FINISHED, "metrics": metrics, "cell": None, "error": None}
    if code is None:
        return {"status": "timed out", "metrics": {}, "cell": cell, "error": f"took longer than {timeout:g} s"}
    if code == 0:
        cell = None  # all cells ran
        error = "wrote no result.json" if status is None else f"wrote status {status!r} to result.json"
    return {"status": "failed", "metrics": {}, "cell": cell, "error": error or last_lines(folder, 1)[0]}


def _failed_cell(executed: Path) -> tuple[str | None, str | None]:
    """Return the number, first line and error of the last cell that was started in the executed notebook."""
    try:
        cells = [cell for cell in nbformat.read(executed, as_version=4).cells if cell.cell_type == "code"]
    except Exception:  # the file is missing, or incomplete
        return None, None
    started = [place for place, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
    if not started:
        return None, None
    cell = cells[started[-1]]
    first = next((line for line in cell.source.splitlines() if line.strip()), "")
    errors = [output for output in cell.outputs if output.output_type == "error"]
    message = f"{errors[0].ename}: {errors[0].evalue}".strip().splitlines()[0] if errors else None
    return f"[{started[-1] + 1}] {first.strip()}", message


def failure_of(point: Point, record: Mapping[str, Any]) -> str:
    """Return a line with the failed point's status, label, cell, error and folder."""
    cell = f" in cell {record['cell']}" if record["cell"] else ""
    return f"{record['status']}: {point.label}{cell}: {record['error']} ({point.folder})"
