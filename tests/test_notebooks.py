"""The committed notebooks: outputs that belong to their source, nothing of the machine in them, and they run.

nbval executes all of them, in a command of its own in `make test`, and compares the outputs with the committed ones.
Here papermill executes the experiments, whose parameters matter, and live_ranks, whose magics matter: papermill's exit
code also reports failures without an error message, which nbval misses. In the other notebooks, a cell that could fail
like that is rejected without executing it.
"""

import ast
import builtins
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import torch
from papermill.inspection import inspect_notebook
from torch.nn.parallel import DistributedDataParallel

import kernels
from ddp_tutorial import TaskConfig
from ddp_tutorial.config import ConfigError
from ddp_tutorial.experiments.execute import read_parameters
from ddp_tutorial.experiments.notebooks import WIDGET, _cell_id, find_notebooks, is_current

NOTEBOOKS = find_notebooks()
NUMBERED = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.stem)]
DEEP_DIVES = [path for path in NOTEBOOKS if path.parent.name == "deep_dives"]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# The notebooks that papermill executes, with arguments that make them quick.
SMALL = {
    "bucket_size": ["-f", "ddp_tutorial/configs/tiny.yaml", "-p", "steps", "2", "-p", "repeats", "1"],
    "compare": ["-p", "steps", "2"],
    "live_ranks": [],
    "data_strategies": ["-p", "steps", "2", "-p", "repeats", "1"],
    "round_length": [
        "-f",
        "ddp_tutorial/configs/tiny.yaml",
        *["-p", "steps", "4", "-p", "seeds", "1", "-p", "length", "2"],
    ],
    "scaling": [
        "-f",
        "ddp_tutorial/configs/tiny.yaml",
        *["-p", "steps", "2", "-p", "repeats", "1", "-p", "launches", "1"],
    ],
    "strategies": ["-f", "ddp_tutorial/configs/tiny.yaml", "-p", "steps", "2", "-p", "repeats", "1"],
    "train": ["-f", "ddp_tutorial/configs/tiny.yaml", "-p", "name", "small"],
}
EXECUTED = [path for path in NOTEBOOKS if path.stem in SMALL]
SPAWNED = {"compare"}  # as for users; the other notebooks fork their ranks, which is faster
ROOT = Path(__file__).parent.parent
# A time of day, a date, a run's folder. Not four digits by themselves: images are text too, and hold any of them.
STAMP = re.compile(r"\b\d\d:\d\d:\d\d\b|\b20\d\d-[01]\d-[0-3]\d\b|\b20\d\d[01]\d[0-3]\d-\d{6}\b")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


MAGICS = r"%%writefile (-a )?runs/[\w./]+\.py"
OF_LIVE_RANKS = r"%%ranks( --raises)?( \d)?|%%rank0"


def python_of(cell):
    """Return the Python code of a cell: the whole cell, the file that `%%writefile` writes, or the code for ranks."""
    first, _, rest = cell.source.partition("\n")
    if re.fullmatch(f"{MAGICS}|{OF_LIVE_RANKS}", first):
        return rest
    return re.sub(r"%(load_ext ddp_tutorial|ranks .*)$", "...", cell.source, flags=re.MULTILINE)


def parameter_names(path):
    [cell] = [cell.source for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", [])]
    return [statement.target.id for statement in ast.parse(cell).body]


def test_a_figure_is_saved_if_and_only_if_a_page_shows_it():
    tags = [tag for path in NOTEBOOKS for cell in code_cells(path) for tag in cell.metadata.get("tags", [])]
    saved = {tag.removeprefix("save:") for tag in tags if tag.startswith("save:")}
    pages = [ROOT / "README.md", *(ROOT / "book").glob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"\]\((?:\.\./)?notebooks/figures/(\w+)\.png", page.read_text())
    }
    assert saved == shown == {path.stem for path in (ROOT / "notebooks" / "figures").iterdir()}


def test_every_notebook_is_found_and_experiments_have_small_parameters():
    assert {"00_quickstart", "01_processes", "train"} <= {path.stem for path in NOTEBOOKS}
    others = {path.stem for path in NOTEBOOKS if path not in NUMBERED and path not in DEEP_DIVES}
    assert others == set(SMALL) >= SPAWNED


@each_notebook
def test_cells_are_plain_python(path):
    """nbval accepts a failing magic or shell command if its output is not compared, because it raises no error; it
    continues after a kernel exit, and skips tagged cells. Allowed are `%%writefile`, which raises on failure, and the
    magics of live ranks, which papermill checks.
    """
    for cell in code_cells(path):
        assert "%ranks" not in cell.source or path.stem in SMALL
        tree = ast.parse(python_of(cell))  # other magics, `!command` and `name?` are not Python
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not named & {"get_ipython", "exit", "quit"}
        assert "nbval-skip" not in cell.metadata.get("tags", [])


@each_notebook
def test_every_parameter_is_used_in_a_later_cell(path):
    """An unused parameter could be set to anything, also by papermill."""
    cells = [cell for cell in code_cells(path) if "parameters" not in cell.metadata.get("tags", [])]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(python_of(cell)))]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if "globals" in read:  # passed to `read_parameters`, which rejects unknown names
        return
    assert set(parameter_names(path)) <= read


@pytest.mark.parametrize(("path", "following"), [*pairwise(NUMBERED)], ids=lambda path: path.stem)
def test_each_notebook_ends_with_a_link_to_the_next_one(path, following):
    last = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"][-1]
    assert re.search(rf"[`(]{following.name}[`)]", last), (
        f"{path.name} should end with a line that links {following.name}"
    )


def test_named_notebooks_exist_and_all_are_in_the_readme():
    in_readme = set(re.findall(r"\]\(notebooks/([\w/]+\.ipynb)\)", (ROOT / "README.md").read_text()))
    assert in_readme == {str(path.relative_to(ROOT / "notebooks")) for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
        named = set(re.findall(r"\b\d\d_\w+\.ipynb\b", "\n".join(prose)))
        assert named <= {other.name for other in NUMBERED}, f"{path.name} names a notebook that is not there"


def test_the_readme_estimates_the_reading_times():
    """At 150 words or 15 lines of code per minute, the estimates are right to within four minutes."""
    rows = re.findall(r"\]\(notebooks/([\w/]+\.ipynb)\).*\| (\d+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {
        str(path.relative_to(ROOT / "notebooks")) for path in NOTEBOOKS if path.parent.name != "experiments"
    }
    for name, minutes in rows:
        cells = nbformat.read(ROOT / "notebooks" / name, as_version=4).cells
        words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
        lines = sum(bool(line.strip()) for c in cells if c.cell_type == "code" for line in c.source.splitlines())
        assert abs(words / 150 + lines / 15 - int(minutes)) < 4, f"{name}: {words} words, {lines} lines of code"


@each_notebook
def test_cells_were_executed_in_order(path):
    """Without execution counts, nbval compares nothing and passes."""
    counts = [cell.execution_count for cell in code_cells(path) if cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_outputs_belong_to_their_source(path):
    assert is_current(nbformat.read(path, as_version=4)), "run `make notebooks` and commit the result"


def shown_sources(path):
    """Return the cells that print source code, as (cell, current source).

    The test runs only the statements of those cells that use `getsource`, and their prerequisites from all cells:
    imports and simple names.
    """
    trees = [(cell, ast.parse(python_of(cell))) for cell in code_cells(path)]
    statements = [statement for _, tree in trees for statement in tree.body]
    names = {"getsource": inspect.getsource}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and statement.module.startswith("ddp_tutorial"):
            _run(statement, names)
    for cell, tree in trees:
        printed, touched = io.StringIO(), {"getsource"}
        for statement in tree.body:
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if not (isinstance(statement, ast.Assign | ast.Expr) and used & touched):
                continue
            for name in used - names.keys() - vars(builtins).keys():
                made = [s for s in statements if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
                for each in made[:1]:
                    _run(each, names)
            with contextlib.redirect_stdout(printed):
                _run(statement, names)
            touched |= {target.id for target in getattr(statement, "targets", []) if isinstance(target, ast.Name)}
        if touched != {"getsource"} or printed.getvalue():
            yield cell, printed.getvalue()


def _run(statement, names):
    exec(compile(ast.Module([statement], []), "a cell", "exec"), names)


def stale_sources(path):
    """Return the cells whose output is not the current source."""
    return [
        cell.source
        for cell, printed in shown_sources(path)
        if not printed.strip() or printed not in "".join(out.get("text", "") for out in cell.outputs)
    ]


@each_notebook
def test_a_displayed_source_is_current(path):
    """A cell that prints a function of the package does not change with that function."""
    calls = [cell for cell in code_cells(path) if re.search(r"^\w.*\bgetsource\(", cell.source, re.MULTILINE)]
    assert len(list(shown_sources(path))) == len(calls), "a cell was passed over"
    assert stale_sources(path) == [], "execute it again: touch a cell's source, or `refresh([path], everything=True)`"


def test_a_changed_function_is_detected_in_a_notebook_that_shows_it(monkeypatch):
    shown = {
        "04_ddp_from_scratch": ("ddp_tutorial.ddp.wrappers.BucketDDP._fill_slot", "BucketDDP._fill_slot"),
        "elastic_store": ("ddp_tutorial.world.attempt_store", "attempt_store"),
    }
    for path in NUMBERED + DEEP_DIVES:
        if path.stem in shown:
            function, name = shown[path.stem]
            monkeypatch.setattr(function, stale_sources)
            [told] = stale_sources(path)
            assert f"getsource({name})" in told


@each_notebook
def test_outputs_contain_no_traces_of_the_machine(path):
    text = path.read_text()
    assert not re.findall(r"/(?:home|root|tmp|work|Users)/[\w.-]+", text)
    assert not STAMP.findall(json.dumps([cell.outputs for cell in code_cells(path)]))
    assert len(text) < 600_000, "images weigh on the history"
    assert "widgets" not in json.loads(text)["metadata"]
    assert WIDGET not in text


@pytest.mark.parametrize("form", ["%H:%M:%S", "%Y-%m-%d %H:%M", "train-%Y%m%d-%H%M%S", "runs/%Y%m%d-%H%M%S/log"])
def test_a_time_in_the_projects_format_would_be_found(form):
    assert STAMP.search(json.dumps(f"saved: {time.strftime(form)}"))


@each_notebook
def test_errors_are_stored_only_in_tagged_cells(path):
    for cell in code_cells(path):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert not errors or "raises-exception" in cell.metadata.get("tags", [])


@each_notebook
def test_no_output_contains_stderr(path):
    """A reader cannot interpret a warning in a committed output."""
    for cell in code_cells(path):
        assert not [out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stderr"]


@each_notebook
def test_cell_ids_are_derived_from_the_cells(path):
    taken = set()
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.id == _cell_id(cell, taken)


@each_notebook
def test_one_cell_defines_and_annotates_the_parameters(path):
    tagged = [cell.source for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for line in tagged[0].splitlines():
        assert re.match(r"\w+: [\w |]+ = .+  # .+", line), f"not annotated, or not explained: {line}"


@each_notebook
def test_cells_are_short(path):
    lengths = sorted(sum(map(bool, cell.source.splitlines())) for cell in code_cells(path))
    assert lengths[len(lengths) // 2] <= 8
    assert lengths[-1] <= 25


def sizes(path):
    """Return the number of cells, words of prose and figures of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return len(cells), words, sum("image/png" in output.get("data", {}) for output in outputs)


@each_notebook
def test_a_notebook_has_at_most_50_cells_1500_words_and_5_figures(path):
    cells, words, figures = sizes(path)
    within = cells <= 50 and words <= 1500 and figures <= 5
    assert within, f"{cells} cells, {words} words, {figures} figures"


def test_the_table_in_05_has_every_argument_of_ddp_with_its_default():
    """The notebook describes torch 2.13. With a different version, it describes the arguments that both have."""
    [path] = [path for path in NUMBERED if path.stem == "05_inside_torch_ddp"]
    prose = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")
    _, _, table = prose.partition("|argument|default|purpose|\n|---|---|---|\n")
    rows = re.findall(r"^\|`(\w+)`\|(?:`(\w+)`|required)\|.+\|$", table.partition("\n\n")[0], re.MULTILINE)
    described = dict(rows)
    assert len(rows) == len(described) == table.partition("\n\n")[0].count("\n") + 1
    arguments = inspect.signature(DistributedDataParallel.__init__).parameters
    defaults = {
        name: "" if argument.default is argument.empty else str(argument.default)
        for name, argument in arguments.items()
        if name != "self"
    }
    if torch.__version__.startswith("2.13."):
        assert described == defaults
    assert all(described[name] == defaults[name] for name in described.keys() & defaults.keys())


def bare_assertions(path):
    trees = [ast.parse(python_of(cell)) for cell in code_cells(path)]
    bare = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assert) and not node.msg]
    return [ast.unparse(node) for node in bare]


@each_notebook
def test_an_assertion_has_a_message(path):
    """An assertion may fail for a learner who changed a parameter or has a busy machine.

    Without a message, only `AssertionError:` appears.
    """
    assert bare_assertions(path) == []


def test_an_assertion_without_a_message_is_detected(tmp_path):
    cells = ["x = 1\nassert x == 1, f'expected 1, not {x}'", "%%ranks\nfor _ in range(2):\n    assert x == 1"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "one.ipynb")
    assert bare_assertions(tmp_path / "one.ipynb") == ["assert x == 1"]


# What a learner meets in all of them counts once for all: how ranks are started, how a figure is drawn, and exercises.
EVERYWHERE = {"launch", "plots"}
AT_MOST = 12


def names_of_ours(path):
    """Return the package's names that a notebook uses, except those that all notebooks use."""
    statements = [node for cell in code_cells(path) for node in ast.walk(ast.parse(python_of(cell)))]
    assert not [node for node in statements if isinstance(node, ast.Import) and "ddp_tutorial" in ast.unparse(node)]
    taken = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module.startswith("ddp_tutorial")]
    return {
        alias.name for node in taken if node.module != "ddp_tutorial.exercises" for alias in node.names
    } - EVERYWHERE


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_a_numbered_notebook_uses_at_most_a_dozen_of_our_names(path):
    assert len(names_of_ours(path)) <= AT_MOST, sorted(names_of_ours(path))


def test_names_of_the_package_are_counted():
    quickstart = next(path for path in NUMBERED if path.stem == "00_quickstart")
    assert {"launch_training", "load_run"} <= names_of_ours(quickstart)


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_papermill_executes_each_notebook_with_small_parameters(path, tmp_path):
    command = [sys.executable, "-m", "papermill", str(path), str(tmp_path / "out.ipynb"), "--cwd", str(tmp_path)]
    command += ["--no-progress-bar", "--execution-timeout", "300", "--kernel", "python3"]
    environment = os.environ | ({} if path.stem in SPAWNED else kernels.forking_profile(tmp_path / "ipython"))
    command += SMALL[path.stem]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if path.stem == "train":
        result = json.loads((tmp_path / "runs" / "small" / "result.json").read_text())
        assert result["status"] == "finished"
        assert result["parameters"]["corpus"] == "stories"
        assert set(result["arms"]) == {"2 ranks", "1 process"}


def test_papermill_lists_every_parameter_and_knows_those_of_the_readme(caplog):
    """Papermill cannot parse the annotation `int | None`, and warns about each parameter that it does not list."""
    listed = {path.stem: list(inspect_notebook(str(path))) for path in NOTEBOOKS}
    assert listed == {path.stem: parameter_names(path) for path in NOTEBOOKS}
    assert not caplog.records
    [command] = re.findall(r"^papermill notebooks/.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"-p (\S+)", command)) <= set(listed["train"])
    assert "-f" not in command.split()  # of a config, papermill would warn about nearly every key


def test_an_invalid_parameter_is_reported_in_one_clear_message(tmp_path):
    path = next(path for path in NOTEBOOKS if path.stem == "train")
    command = [sys.executable, "-m", "papermill", str(path), str(tmp_path / "out.ipynb"), "--cwd", str(tmp_path)]
    done = subprocess.run([*command, "-p", "stepz", "5"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ConfigError: unknown parameter 'stepz'. Did you mean 'steps'?" in done.stderr
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match=r"parameters: 'nprocs' must be a valid integer, got 'four' \(text\)"):
        read_parameters(TaskConfig, {"nprocs": "four"})
