"""The committed notebooks: outputs that belong to their source, nothing of the machine in them, and they run.

Here they are executed by papermill with small parameters, because its exit code also tells of failures that leave no
error message behind. That the committed outputs still hold is tested by nbval, a command of its own in `make test`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from ddp_tutorial.notebooks import WIDGET, _cell_id, find_notebooks, is_current

NOTEBOOKS = find_notebooks()
IDS = [path.stem for path in NOTEBOOKS]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)

# What makes each of them quick: papermill's arguments.
SMALL = {
    "00_quickstart": ["-p", "steps", "10", "-p", "corpus", "tales"],
    "01_processes": [],
    "02_collectives": [],
    "03_averaging_gradients": ["-p", "steps", "30"],
    "04_ddp_from_scratch": ["-p", "repeats", "3"],
    "05_inside_torch_ddp": ["-p", "steps", "40", "-p", "repeats", "3"],
    "06_sharding_data": ["-p", "training_steps", "30", "-p", "repeats", "3"],
    "07_gradient_accumulation": ["-p", "steps", "15", "-p", "repeats", "3"],
    "08_what_is_not_synced": ["-p", "steps", "40", "-p", "samples", "2000"],
    "09_checkpointing": ["-p", "kills", "2", "-p", "steps", "16"],
    "12_scaling": ["-p", "repeats", "3", "-p", "batch", "16"],
    "bucket_size": ["-f", "ddp_tutorial/configs/tiny.yaml", "-p", "steps", "2", "-p", "repeats", "1"],
    "compare": ["-p", "steps", "5"],
    "data_strategies": ["-p", "steps", "5", "-p", "repeats", "2"],
    "scaling": ["-f", "ddp_tutorial/configs/tiny.yaml", "-p", "steps", "5", "-p", "repeats", "2"],
    "train": ["-f", "ddp_tutorial/configs/tiny.yaml", "-p", "name", "small"],
}
ROOT = Path(__file__).parent.parent


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_every_notebook_is_found_and_has_small_parameters():
    assert {"00_quickstart", "01_processes", "train"} <= set(IDS)
    assert set(IDS) == set(SMALL), "a notebook without small parameters would not be executed here"


@each_notebook
def test_cells_were_executed_in_order(path):
    """Without execution counts, nbval compares nothing and passes."""
    counts = [cell.execution_count for cell in code_cells(path) if cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_outputs_come_from_the_source_beside_them(path):
    assert is_current(nbformat.read(path, as_version=4)), "run `make notebooks` and commit the result"


@each_notebook
def test_outputs_hold_nothing_of_the_machine_that_made_them(path):
    text = path.read_text()
    assert not re.findall(r"/(?:home|root|tmp|work|Users)/[\w.-]+", text)
    assert "2026" not in json.dumps([cell.outputs for cell in code_cells(path)]), "a date, or a run's folder"
    assert len(text) < 600_000, "images weigh on the history"
    assert "widgets" not in json.loads(text)["metadata"]
    assert WIDGET not in text


@each_notebook
def test_errors_are_stored_only_where_a_tag_announces_them(path):
    for cell in code_cells(path):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert not errors or "raises-exception" in cell.metadata.get("tags", [])


@each_notebook
def test_nothing_was_written_to_stderr(path):
    """A warning in a committed output is a question that the reader cannot answer."""
    for cell in code_cells(path):
        assert not [out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stderr"]


@each_notebook
def test_cell_ids_are_made_from_the_cells(path):
    taken = set()
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.id == _cell_id(cell, taken)


@each_notebook
def test_one_cell_holds_the_parameters_and_annotates_them(path):
    tagged = [cell.source for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for line in tagged[0].splitlines():
        assert re.match(r"\w+: [\w |]+ = .+  # .+", line), f"not annotated, or not explained: {line}"


@each_notebook
def test_cells_are_short(path):
    lengths = sorted(sum(map(bool, cell.source.splitlines())) for cell in code_cells(path))
    assert lengths[len(lengths) // 2] <= 8
    assert lengths[-1] <= 25


@pytest.mark.timeout(300)
@each_notebook
def test_papermill_executes_it_with_small_parameters(path, tmp_path):
    command = [sys.executable, "-m", "papermill", str(path), str(tmp_path / "out.ipynb"), "--cwd", str(tmp_path)]
    command += ["--no-progress-bar", "--execution-timeout", "300", "--kernel", "python3"]
    done = subprocess.run([*command, *SMALL[path.stem]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if path.stem == "train":
        result = json.loads((tmp_path / "runs" / "small" / "result.json").read_text())
        assert result["status"] == "finished"
        assert result["parameters"]["corpus"] == "tales"
        assert set(result["arms"]) == {"2 ranks", "1 process"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "stepz", "5"], "ConfigError: unknown parameter 'stepz'. Did you mean 'steps'?"),
        (["-p", "nprocs", "four"], "ConfigError: parameters: 'nprocs' should be a valid integer, found 'four' (text)"),
        (["-p", "nprocs", "0"], "ConfigError: parameters: 'nprocs' should be greater than or equal to 1, found 0"),
    ],
)
def test_a_wrong_parameter_ends_in_one_clear_message(arguments, said, tmp_path):
    path = next(path for path in NOTEBOOKS if path.stem == "train")
    command = [sys.executable, "-m", "papermill", str(path), str(tmp_path / "out.ipynb"), "--cwd", str(tmp_path)]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()
