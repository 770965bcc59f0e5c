"""Sweeps: a grid, its keys, points in separate processes, and the resulting table."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import psutil
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from commands import call
from ddp_tutorial.commands.sweep import sweep
from ddp_tutorial.config import CONFIGS, ConfigError
from ddp_tutorial.experiments import parameter_check, sweeps, tables
from ddp_tutorial.experiments.execute import _MARK, _Follower, end_processes_of, write_page
from ddp_tutorial.experiments.notebooks import NOTEBOOKS
from ddp_tutorial.experiments.sweeps import (
    Point,
    SweepInterruptedError,
    code_version,
    expand_grid,
    folder_of,
    key_of,
    nested,
    plan_sweep,
    read_grid,
    read_points,
)
from ddp_tutorial.files import locked, observe_disk

# A notebook to sweep: it does what it is told, in a moment, and keeps a list of who has been there.
PARAMETERS = """
name: str = ""  # folder below runs/
how: str = "well"  # how it ends
number: float = 1  # what it measures
""".strip()
BODY = """
import json, os, subprocess, time
from pathlib import Path
folder = Path("runs") / name
with open("visitors", "a") as file:
    print(folder.name, file=file)
""".strip()
END = """
# here it ends, one way or another
subprocess.Popen(["sleep", "300"])
if how == "badly":
    raise ValueError("no such luck\\nin three\\nlines")
if how == "dead":
    os._exit(3)
if how == "late" and not Path("hurry").exists():
    time.sleep(300)
""".strip()
RESULT = """
result = {"status": "finished", "metrics": {"value": 10.0 * number, "kind": type(number).__name__}}
if how == "stopped":
    result["status"] = "stopped"
if how != "silent":
    (folder / "result.json").write_text(json.dumps(result))
""".strip()


def write_notebook(path: Path, *cells: str) -> Path:
    tags = [["parameters"], *([] for _ in cells[1:])]
    code = [
        nbformat.v4.new_code_cell(cell, metadata={"tags": tag} if tag else {})
        for cell, tag in zip(cells, tags, strict=True)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(nbformat.v4.new_notebook(cells=code, metadata={"kernelspec": kernel}), path)
    return path


@pytest.fixture
def notebook(workdir: Path) -> Path:
    return write_notebook(workdir / "tiny.ipynb", PARAMETERS, BODY, END, RESULT)


def visitors() -> list[str]:
    return Path("visitors").read_text().split() if Path("visitors").exists() else []


def left_behind(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(_MARK, "")
            if process.pid != os.getpid() and mark.startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


# ----------------------------------------------------------------------------------------------- grid, points, keys


def test_values_have_the_types_that_yaml_assigns() -> None:
    assert read_grid(["steps=2,10", "rate=1e-3", "on=true,false", "none=~", "text=a,'b,c'"]) == {
        "steps": [2, 10],
        "rate": [0.001],
        "on": [True, False],
        "none": [None],
        "text": ["a", "b,c"],
    }


def test_a_value_may_contain_commas() -> None:
    assert read_grid(["sizes=[1,2],[3]", "corpus=parquet:a/b.c,hub:x/y"]) == {
        "sizes": [[1, 2], [3]],
        "corpus": ["parquet:a/b.c", "hub:x/y"],
    }


@pytest.mark.parametrize("text", ["[2, a]", "- 2\n- a\n", '[2, "a"]'])
def test_values_can_be_read_from_a_file(workdir: Path, text: str) -> None:
    Path("values.yaml").write_text(text)
    assert read_grid(["key=@values.yaml", "other=1"]) == {"key": [2, "a"], "other": [1]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("points.yaml", "- {a: 2, ddp.variant: flat}\n- {a: 0.00001, ddp.variant: 'b,c'}\n"),
        ("points.json", '[{"a": 2, "ddp.variant": "flat"}, {"a": 1e-5, "ddp.variant": "b,c"}]'),
        ("points.csv", '\ufeffa, ddp.variant\r\n2,flat\r\n1e-5,"b,c"\r\n'),
    ],
)
def test_whole_points_are_read_from_a_file(workdir: Path, name: str, text: str) -> None:
    Path(name).write_text(text.replace("b,c", "'b,c'") if name.endswith("csv") else text, encoding="utf-8", newline="")
    assert read_points(Path(name)) == [{"a": 2, "ddp.variant": "flat"}, {"a": 1e-5, "ddp.variant": "b,c"}]


def test_each_point_of_a_file_is_combined_with_the_grid() -> None:
    points = expand_grid({"b": [1, 2]}, 2, [{"a": 1, "c": 4}, {"a": 2, "c": 5}])
    first = [{"a": 1, "c": 4, "b": 1}, {"a": 1, "c": 4, "b": 2}, {"a": 2, "c": 5, "b": 1}, {"a": 2, "c": 5, "b": 2}]
    assert points == [(values, repeat) for repeat in (1, 2) for values in first]


plain = st.one_of(
    st.integers(-(10**6), 10**6), st.booleans(), st.floats(-1e9, 1e9), st.text("abc, [}:'#-*&", max_size=6)
)


@given(st.lists(st.one_of(plain, st.lists(plain, max_size=2)), min_size=1, max_size=4, unique_by=json.dumps))
def test_inline_yaml_values_are_parsed_back(values: list[object]) -> None:
    text = yaml.safe_dump(values, default_flow_style=True, width=10**6).strip()
    assert read_grid([f"key={text[1:-1]}"]) == {"key": values}


@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 4))
def test_every_combination_occurs_once_per_repeat_with_repeats_outermost(sizes: list[int], repeats: int) -> None:
    grid = {f"key{i}": list(range(size)) for i, size in enumerate(sizes)}
    points = expand_grid(grid, repeats)
    combinations = len(points) // repeats
    assert [repeat for _, repeat in points] == [1 + i // combinations for i in range(len(points))]
    for repeat in range(repeats):
        block = [tuple(values.items()) for values, _ in points[repeat * combinations :][:combinations]]
        assert len(set(block)) == combinations
        assert block == [tuple(values.items()) for values, _ in points[:combinations]]


def test_dotted_keys_are_nested() -> None:
    assert nested({"steps": 3, "ddp.variant": "flat", "ddp.simulated_link.latency_ms": 1}) == {
        "steps": 3,
        "ddp": {"variant": "flat", "simulated_link": {"latency_ms": 1}},
    }


def test_a_key_identifies_parameters_configs_repeat_and_code() -> None:
    key = key_of({"a": 1, "b": 2}, {"config": {"steps": 3}}, 1, "code")
    assert key == key_of({"b": 2, "a": 1}, {"config": {"steps": 3}}, 1, "code")
    others = [
        key_of({"a": 1, "b": "2"}, {"config": {"steps": 3}}, 1, "code"),
        key_of({"a": 1, "b": 2}, {"config": {"steps": 4}}, 1, "code"),
        key_of({"a": 1, "b": 2}, {"config": {"steps": 3}}, 2, "code"),
        key_of({"a": 1, "b": 2}, {"config": {"steps": 3}}, 1, "other code"),
    ]
    assert len({key, *others}) == 5


@given(st.dictionaries(st.from_regex(r"[a-z]\w{0,5}", fullmatch=True), plain, max_size=3), st.integers(1, 9))
def test_a_folder_name_is_a_valid_run_name(parameters: dict[str, object], repeat: int) -> None:
    from ddp_tutorial.training.config import TaskConfig

    name = f"sweeps/mine/{folder_of(parameters, repeat, '0123456789abcdef')}"
    assert TaskConfig(name=name).name == name
    assert f"repeat-{repeat}.01234567" in name


def test_a_folder_name_fits_into_255_bytes() -> None:
    name = folder_of({"prompt": "\U00020000" * 100}, 1, "0123456789abcdef")
    assert name.startswith("prompt-\U00020000\U00020000")
    assert len(name.encode()) <= 255


def test_a_page_that_cannot_be_written_leaves_the_old_one(notebook: Path) -> None:
    page = Path("page.html")
    page.write_text("the old page")

    def fail(operation: str, path: Path) -> None:
        if operation == "rename":
            raise OSError("the disk is full")

    with observe_disk(fail), pytest.raises(OSError, match="the disk is full"):
        write_page(notebook, page)
    assert page.read_text() == "the old page"


def test_a_sweep_killed_while_it_writes_its_table_leaves_no_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = tmp_path / "sweep", sweeps.write_table
    folder.mkdir()
    monkeypatch.setattr(sweeps, "run_notebook", lambda *_: (folder / "compare.html").write_text("page"))

    def killed(into: Path, rows: Any) -> None:
        write(into, rows)
        if into == folder:
            raise KeyboardInterrupt

    said: list[object] = []
    for value, writes in [(1, write), (1, write), (2, killed), (2, write)]:
        monkeypatch.setattr(sweeps, "write_table", writes)
        row = tables.row_of({}, 1, "finished", 1.0, {"loss": value}, "key")
        outcome = mock.Mock(plan=mock.Mock(folder=folder, points=[1]), failures=[], rows=[row])
        with suppress(KeyboardInterrupt):
            sweeps._write_outcome(outcome, said.append)
    assert said == ["comparing 1 points"] * 2


def test_code_is_the_packages_source_and_configs_and_the_code_cells(notebook: Path) -> None:
    source = nbformat.read(notebook, as_version=4)
    package = Path("package")
    (package / "configs").mkdir(parents=True)
    (package / "a.py").write_text("x = 1")
    (package / "configs" / "b.yaml").write_text("x: 1")
    versions = [code_version(source, package)]
    (package / "notes.txt").write_text("no code")
    assert code_version(source, package) == versions[0]
    (package / "a.py").write_text("x = 2")
    versions.append(code_version(source, package))
    (package / "configs" / "b.yaml").write_text("x: 2")
    versions.append(code_version(source, package))
    source.cells[1].source += "\n"
    versions.append(code_version(source, package))
    assert len(set(versions)) == 4


# ------------------------------------------------------------------------------------------------ what is refused


def assert_refused_in_one_line(notebook: Path, settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sweep(notebook, settings)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["how"], "a setting must have the form KEY=VALUE1,VALUE2, such as source=a,b, got 'how'"),
        (["=1"], "got '=1'"),
        (["a b=1"], "got 'a b=1'"),
        (["how="], "'how=' has an empty value"),
        (["how=a,,b"], "has an empty value"),
        (["how=a,"], "has an empty value"),
        (["how=a]"], "not valid YAML"),
        (["how=a", "how=b"], "'how' is set twice"),
        (["how=a,a"], "'how' lists the value \"a\" twice"),
        (["number=.inf"], "values must be strings, finite numbers"),
        (["how=2024-01-01"], "YAML reads 2024-01-01 as a date; quote it"),
        (["hwo=a"], "tiny.ipynb has no parameter 'hwo'. Did you mean 'how'?"),
        (["name=a"], "'name' cannot be swept"),
        (["repeat=2"], "'repeat' cannot be swept"),
        (["how=@gone.yaml"], "'how=@gone.yaml': 'gone.yaml' cannot be read: [Errno 2]"),
        (["how=@visitors"], "'visitors' must contain a YAML list of values, such as [1, 2], got str"),
        (["how=@empty"], "'empty' must contain a YAML list of values, such as [1, 2], got an empty list"),
    ],
)
def test_a_mistake_in_the_grid_is_reported_in_one_line(notebook: Path, settings: list[str], told: str) -> None:
    Path("visitors").write_text("a, b")
    Path("empty").write_text("[]")
    assert_refused_in_one_line(notebook, settings, told)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("gone.yaml", None, "'--points gone.yaml': 'gone.yaml' cannot be read: [Errno 2]"),
        ("a.yaml", "[{", "a.yaml, line 1, column 3: not valid YAML"),
        ("a.yaml", "!!python/object/apply:os.mkdir [runs]", "not valid YAML: could not determine a constructor"),
        ("a.yaml", "how: [well]", "must contain a list of points, such as [{steps: 10}, {steps: 20}]"),
        ("a.json", "[]", "must contain a list of points"),
        ("a.json", "[3]", "must contain a list of points"),
        ("a.yaml", "[{2: 1}]", "parameter names must be identifiers or dotted names such as ddp.variant, got 2"),
        ("a.yaml", "[{how: a}, {how: b, number: 2}]", "got how, number for point 2"),
        ("a.yaml", "[{how: a}, {how: a}]", 'the point {"how": "a"} occurs twice; to repeat a point, use --repeats'),
        ("a.yaml", "[{how: 2024-01-01}]", "YAML reads 2024-01-01 as a date"),
        ("a.yaml", "[{hwo: a}]", "tiny.ipynb has no parameter 'hwo'. Did you mean 'how'?"),
        ("a.yaml", "[{name: a}]", "'name' cannot be swept"),
        ("a.yaml", "[{number: 2}]", "'number' is set both on the command line and in a.yaml"),
        ("a.csv", "how\n", "must contain a list of points"),
        ("a.csv", "", "must contain a list of points"),
        ("a.csv", "how,how\na,b\n", "the header contains 'how' twice"),
        ("a.csv", "how,x\na\n", "point 1 must have one value for each of how, x, got 'a'"),
        ("a.csv", "how,x\na,\n", "got 'a,'; write an empty string as ''"),
        ("a.csv", 'how\n"a"b\n', "not valid CSV"),
    ],
)
def test_a_mistake_in_a_file_of_points_is_reported_in_one_line(
    notebook: Path, name: str, text: str | None, told: str
) -> None:
    if text is not None:
        Path(name).write_text(text)
    before = {path.name for path in Path.cwd().iterdir()}
    with pytest.raises(ConfigError) as caught:
        plan_sweep(notebook, ["number=3"], file=Path(name))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name for path in Path.cwd().iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["stepz=3"], "unknown parameter 'stepz'. Did you mean 'steps'?"),
        (["steps=3,many"], "'steps' must be a valid integer, got 'many'"),
        (["ddp.variant=nave"], "'ddp.variant' must be 'naive', 'flat', 'bucket' or 'torch'"),
        (["extends=gone"], "there is no config named 'gone'"),
    ],
)
def test_the_notebooks_own_check_runs_before_any_point(workdir: Path, settings: list[str], told: str) -> None:
    assert_refused_in_one_line(NOTEBOOKS / "experiments" / "train.ipynb", settings, told)


def test_notebooks_that_cannot_be_swept_are_rejected(workdir: Path) -> None:
    Path("text.ipynb").write_text("no JSON")
    nameless = write_notebook(Path("nameless.ipynb"), "x: int = 1")
    untagged = write_notebook(Path("untagged.ipynb"), PARAMETERS)
    content = nbformat.read(untagged, as_version=4)
    content.cells[0].metadata = {}
    nbformat.write(content, untagged)
    magic = write_notebook(Path("magic.ipynb"), f"%matplotlib inline\n{PARAMETERS}")
    broken = write_notebook(Path("broken.ipynb"), PARAMETERS, "read_parameters(")
    for path, told in [
        (Path("gone.ipynb"), "there is no notebook 'gone.ipynb'"),
        (Path("text.ipynb"), "text.ipynb is not a notebook"),
        (nameless, "nameless.ipynb must have a parameter 'name'"),
        (untagged, "untagged.ipynb must contain exactly one cell tagged 'parameters', got 0"),
        (
            magic,
            "magic.ipynb: the cell tagged 'parameters' must contain only Python code, but there is a "
            "syntax error on line 1: invalid syntax",
        ),
        (broken, "the cell after the parameters raised SyntaxError"),
    ]:
        with pytest.raises(ConfigError, match=told):
            plan_sweep(path, [])
    with pytest.raises(
        ConfigError,
        match=r"a sweep's name must be a valid folder name .* got '../x'. The sweep is stored in runs/sweeps/NAME",
    ):
        plan_sweep(write_notebook(Path("good.ipynb"), PARAMETERS), [], name="../x")


def test_the_comparison_does_not_read_the_logs_of_the_points(tmp_path: Path) -> None:
    (tmp_path / "point").mkdir()
    (tmp_path / "point" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}')  # in the notebook's own format
    with _Follower(tmp_path) as follower:
        follower.look()
        assert not follower.bars


LEAVES_TRACES = """
# read_parameters() would be here
import os
assert "LEFT" not in os.environ, "an earlier point was executed in this process"
os.environ["LEFT"] = how
print("a line that is no answer")
os.chdir("/")
if how == "exits":
    raise SystemExit(0)
if how == "dies":
    os._exit(0)
if how == "hangs":
    import time
    time.sleep(100)
""".strip()


def test_planning_runs_each_points_cells_in_a_separate_process(workdir: Path) -> None:
    notebook = write_notebook(Path("traces.ipynb"), PARAMETERS, LEAVES_TRACES)
    assert len(plan_sweep(notebook, ["how=well,better"]).points) == 2
    assert "LEFT" not in os.environ
    assert Path.cwd() == workdir


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exits", "raised SystemExit: 0"),
        ("dies", "exited with code 0"),
        ("hangs", "took more than 1 s"),
    ],
)
def test_planning_reports_cells_that_exit_or_hang(how: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_check, "CELL_SECONDS", 1 if how == "hangs" else 60)
    answer = parameter_check._answer_of_fork("traces.ipynb", ["", LEAVES_TRACES], {"how": how})
    assert json.loads(answer) == {"error": f"traces.ipynb: the cell after the parameters {told}"}


def test_the_command_rejects_a_mistake_with_exit_code_2(notebook: Path) -> None:
    done = call("sweep", "tiny.ipynb", "hwo=x")
    assert done.returncode == 2
    assert done.stderr == "error: tiny.ipynb has no parameter 'hwo'. Did you mean 'how'?\n"
    assert not Path("runs").exists()


def test_the_command_rejects_a_file_of_points_with_exit_code_2(notebook: Path) -> None:
    Path("points.csv").write_text("how\n")
    before = sorted(Path.cwd().iterdir())
    for name in ("points.csv", "gone.yaml"):
        done = call("sweep", "tiny.ipynb", "--points", name)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"error: '--points {name}': ")
    assert sorted(Path.cwd().iterdir()) == before


def test_a_changed_config_file_creates_new_points(workdir: Path) -> None:
    """A parameter names the file and stays the same."""
    train = NOTEBOOKS / "experiments" / "train.ipynb"
    shutil.copy(CONFIGS / "base.yaml", "mine.yaml")
    [before] = plan_sweep(train, ["extends=mine.yaml"]).points
    assert plan_sweep(train, ["extends=mine.yaml"]).points == [before]
    with Path("mine.yaml").open("a") as file:
        file.write("\neval_samples: 3\n".replace("eval_samples", "log_every"))
    [after] = plan_sweep(train, ["extends=mine.yaml"]).points
    assert (before.parameters, before.repeat) == (after.parameters, after.repeat)
    assert before.key != after.key


def test_a_dry_run_prints_commands_that_run_the_points(notebook: Path) -> None:
    result = CliRunner().invoke(sweep, ["tiny.ipynb", "how=well,badly", "number=2", "--dry-run", "--json"])
    first, second = json.loads(result.output)["commands"]
    assert visitors() == []
    assert not Path("runs").exists()
    [well, _] = plan_sweep(Path("tiny.ipynb"), ["how=well,badly", "number=2"]).points
    assert "how: badly" in second
    well.folder.mkdir(parents=True)
    command = [sys.executable, "-m", *shlex.split(first), "--no-progress-bar"]
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0
    assert json.loads((well.folder / "result.json").read_text())["metrics"] == {"value": 20.0, "kind": "int"}
    assert Path(f"{well.folder.name}.ipynb").is_file()


def test_a_command_keeps_the_types_of_values_and_names_other_runs(
    notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Papermill reads YAML 1.1, in which 1e-05 is a string."""
    values = [
        {"number": 1e-5, "how": "it's $HOME"},
        {"number": 10**20, "how": "1e-5"},
        {"number": [None, True], "how": ""},
    ]
    Path("points.json").write_text(json.dumps(values))
    plan = plan_sweep(notebook, [], file=Path("points.json"))
    commands = [shlex.split(command) for command in plan.commands]
    assert [yaml.safe_load(command[-1]) for command in commands] == [point.arguments for point in plan.points]
    assert [{key: yaml.safe_load(command[-1])[key] for key in values[0]} for command in commands] == values
    monkeypatch.setattr(sweeps, "RUNS", Path("/elsewhere"))
    point = Point({}, 1, "key", Path("/elsewhere/sweeps/a"))
    assert point.command(notebook).startswith("env DDP_TUTORIAL_RUNS=/elsewhere papermill ")


def test_help_lists_the_experiments() -> None:
    text = " ".join(CliRunner().invoke(sweep, ["--help"]).output.split())
    assert f"Experiments: {', '.join(sweeps.experiments_by_name())}." in text
    assert {"compare", "round_length", "train"} <= sweeps.experiments_by_name().keys()


# -------------------------------------------------------------------------------------------------------- running


def run(notebook: Path, *settings: str, timeout: float = 60, repeats: int = 1) -> tuple[sweeps.Outcome, list[str]]:
    said: list[str] = []
    return sweeps.run_sweep(plan_sweep(notebook, settings, repeats), timeout, said.append), said


def test_failures_are_reported_with_their_cell_and_other_points_run(
    notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[dict[str, object]] = []
    monkeypatch.setattr(sweeps, "run_notebook", lambda notebook, folder, parameters: compared.append(parameters))
    outcome, said = run(notebook, "how=badly,dead,well")
    assert [record["status"] for record in outcome.records] == ["failed", "failed", "finished"]
    line = "# here it ends, one way or another"
    assert [(record["cell"], record["error"]) for _, record in outcome.failures] == [
        (f"[4] {line}", "ValueError: no such luck"),
        (f"[4] {line}", "nbclient.exceptions.DeadKernelError: Kernel died"),
    ]
    assert said[0].startswith(f"failed: how=badly repeat=1 in cell [4] {line}: ValueError: no such luck (runs/sweeps/")
    for point, _ in outcome.failures:
        assert (point.folder / "tiny.ipynb").is_file()
        assert (point.folder / "papermill.log").is_file()
    assert compared == [{"name": "sweeps/tiny", "table": "runs/sweeps/tiny/results.parquet"}]
    assert tables.read_table("runs/sweeps/tiny/results.parquet") == [
        {"value": None, "kind": None} | row for row in outcome.rows
    ]
    assert left_behind(Path.cwd()) == []  # each process has started a sleep
    [(badly, record), _] = outcome.failures
    rerun: list[Point] = []
    monkeypatch.setattr(sweeps, "_run", lambda notebook, point, timeout, look: rerun.append(point) or record)
    again, _ = run(notebook, "how=well,badly")  # one point has finished, the other is rerun
    assert (again.skipped, rerun) == (1, [badly])


@pytest.mark.parametrize(
    ("code", "result", "status", "error"),
    [
        (0, {"status": "finished", "metrics": {"x": 1}}, "finished", None),
        (0, None, "failed", "wrote no result.json"),
        (0, {"status": "stopped", "metrics": {}}, "failed", "wrote status 'stopped' to result.json"),
        (0, {"status": "finished"}, "failed", "wrote no result.json"),
        (0, ["no object"], "failed", "wrote no result.json"),
        (1, {"status": "finished", "metrics": {}}, "failed", "the last thing it said"),
        (138, {"status": "finished", "metrics": {}}, "failed", "the last thing it said"),
        (None, {"status": "finished", "metrics": {}}, "timed out", "took longer than 3 s"),
    ],
)
def test_a_point_succeeds_by_papermills_exit_code_and_its_result(
    code: int | None, result: object, status: str, error: str | None, tmp_path: Path
) -> None:
    (tmp_path / "papermill.log").write_text("much\nthe last thing it said\n")
    if result is not None:
        (tmp_path / "result.json").write_text(json.dumps(result))
    judged = sweeps._outcome_of(tmp_path, "gone.ipynb", code, 3.0)
    assert (judged["status"], judged["error"]) == (status, error)
    assert judged["metrics"] == ({"x": 1} if status == "finished" else {})


def test_a_point_has_a_timeout(notebook: Path) -> None:
    outcome, _ = run(notebook, "how=late", timeout=8)
    [(_, record)] = outcome.failures
    assert (record["status"], record["error"]) == ("timed out", "took longer than 8 s")
    assert record["seconds"] < 120
    assert left_behind(Path.cwd()) == []
    assert not Path("runs/sweeps/tiny/compare.html").exists()  # there is nothing to compare
    assert tables.read_table("runs/sweeps/tiny/results.parquet")[0]["status"] == "timed out"


def test_changed_parameters_or_code_rerun_a_point(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_run", lambda notebook, point, timeout, look: fake(point))
    monkeypatch.setattr(sweeps, "run_notebook", lambda *_: None)
    ran: list[Point] = []

    def fake(point: Point) -> dict[str, object]:
        ran.append(point)
        point.folder.mkdir(parents=True)
        record = {"key": point.key, "status": "finished", "seconds": 1.0, "metrics": {"value": 1}}
        (point.folder / "point.json").write_text(json.dumps(record))
        return record

    run(notebook, "number=1,2")
    assert run(notebook, "number=1,2")[0].skipped == len(ran) == 2
    run(notebook, "number=1,2", repeats=2)
    assert [point.repeat for point in ran] == [1, 1, 2, 2]
    run(notebook, "number=2,3")
    assert [point.parameters for point in ran[4:]] == [{"number": 3}]
    write_notebook(notebook, PARAMETERS, BODY, END, RESULT + "\nprint()")
    assert run(notebook, "number=1,2")[0].skipped == 0
    assert len({point.folder for point in ran}) == len(ran) == 7


def test_a_folder_in_use_is_rejected(notebook: Path) -> None:
    Path("runs/sweeps/tiny").mkdir(parents=True)
    with locked(Path("runs/sweeps/tiny")), pytest.raises(ConfigError, match="is in use by another run"):
        run(notebook, "how=well")
    assert visitors() == []


def test_leftover_processes_of_a_killed_sweep_are_killed(workdir: Path) -> None:
    def sleeper(folder: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "300"], env=os.environ | {_MARK: str(workdir / folder)})

    mine, point, other = sleeper("mine"), sleeper("mine/point"), sleeper("mine-2")
    try:
        end_processes_of(workdir / "mine")
        assert mine.wait(60) == point.wait(60) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, point, other):
            process.kill()
            process.wait()


def test_a_sweep_under_nohup_ignores_a_closed_terminal(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_sweep(*_: object, **__: object) -> None:
        handlers.extend(map(signal.getsignal, before))
        raise SweepInterruptedError(0, 1)

    handlers: list[object] = []
    monkeypatch.setattr(sweeps, "run_sweep", run_sweep)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert CliRunner().invoke(sweep, [str(notebook)]).exit_code == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert handlers == [signal.default_int_handler, signal.SIG_IGN]


def test_an_interrupted_sweep_resumes_without_losing_points(notebook: Path) -> None:
    """Interrupt the second of two points, resume, and rerun the command once more."""
    arguments = ["sweep", "tiny.ipynb", "how=well,late", "number=2"]
    command = [sys.executable, "-m", "ddp_tutorial", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 120
    while len(visitors()) < 2 or not any("sleep 300" in each for each in left_behind(Path.cwd())):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    last = said.strip().splitlines()[-1]
    assert last == "error: interrupted; 1 of 2 points are done and saved. To resume, rerun the command."
    assert "Traceback" not in said
    assert left_behind(Path.cwd()) == []
    assert not Path("runs/sweeps/tiny/results.parquet").exists()

    Path("hurry").touch()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["points"], told["skipped"], told["failed"]) == (2, 1, [])
    assert [command.split()[:2] for command in told["commands"]] == [["papermill", "tiny.ipynb"]] * 2
    came = visitors()
    assert came[1] == came[2] != came[0]  # only the interrupted point again
    assert len(came) == 3
    rows = tables.read_table("runs/sweeps/tiny/results.parquet")
    assert rows == told["rows"]
    assert list(rows[0]) == ["how", "number", "repeat", "status", "seconds", "value", "kind", "key"]
    assert [(row["how"], row["number"], row["value"]) for row in rows] == [("well", 2, 20.0), ("late", 2, 20.0)]
    assert {row["kind"] for row in rows} == {"int"}  # the typed value, not a string
    assert Path("runs/sweeps/tiny/results.csv").read_text().startswith('"how","number","repeat"')
    for written in ("compare.ipynb", "compare.html", "result.json"):
        assert (Path("runs/sweeps/tiny") / written).is_file()

    executed = Path("runs/sweeps/tiny/compare.ipynb").stat().st_mtime_ns
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 points: 2 finished (2 of them before)\n")
    assert done.stdout.splitlines()[-2:] == told["commands"]
    assert visitors() == came
    assert Path("runs/sweeps/tiny/compare.ipynb").stat().st_mtime_ns == executed  # of the same table
