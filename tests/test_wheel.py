"""The wheel: its content, and what a package that was installed from it does. `make wheel-check` installs one."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from ddp_tutorial import files
from ddp_tutorial.experiments import notebooks

BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
PARTS = ("ddp_tutorial", "notebooks", "data", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of a wheel, which was built from a copy of the repository."""
    root, folder = Path(__file__).parent.parent, tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        copy(root / name, folder / name)
    (folder / "notebooks" / "work").mkdir(exist_ok=True)
    (folder / "notebooks" / "work" / "mine.ipynb").touch()  # a learner's own files stay out of the wheel
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "dist"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    [wheel] = (folder / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def relative_files(folder: Path) -> set[str]:
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {path.as_posix() for path in paths if path.parent.name != "__pycache__"}


def installed(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the wheel's package instead of the repository's."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_the_wheel_contains_the_package_the_notebooks_and_the_data(unpacked: Path, root: Path) -> None:
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"ddp_tutorial"}
    own = [path.relative_to(notebooks.NOTEBOOKS).as_posix() for path in notebooks.find_notebooks()]
    expected = {f"notebooks/{name}" for name in own} | {f"data/{name}" for name in relative_files(root / "data")}
    assert relative_files(unpacked / "ddp_tutorial") == expected | relative_files(root / "ddp_tutorial")


LOOK = """
from ddp_tutorial.experiments.notebooks import NOTEBOOKS, chapters
from ddp_tutorial.sharding.corpus import load_corpus
print(NOTEBOOKS, [(each.part, each.path.stem) for each in chapters()], len(load_corpus("stories").train))
"""


def test_the_installed_package_finds_its_notebooks_data_and_parts(unpacked: Path, workdir: Path) -> None:
    from ddp_tutorial.sharding.corpus import load_corpus

    chapters = [(each.part, each.path.stem) for each in notebooks.chapters()]
    tokens = len(load_corpus("stories").train)
    done = installed(unpacked, "-c", LOOK)
    assert done.stdout == f"{unpacked / 'ddp_tutorial' / 'notebooks'} {chapters} {tokens}\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["notebooks"], "copy them to a new folder: ddp-tutorial copy-notebooks FOLDER"),
        (["sweep", "notebooks/experiments/train.ipynb", "steps=2"], "Did you mean 'train'?"),
        (["sweep", "train", "stepz=2"], "unknown parameter 'stepz'. Did you mean 'steps'?"),
    ],
)
def test_an_installed_command_says_what_to_type(arguments: list[str], told: str, unpacked: Path, workdir: Path) -> None:
    done = installed(unpacked, "-m", "ddp_tutorial", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"{told}\n")
    assert not list(workdir.iterdir())


def test_copied_notebooks_have_their_data_and_no_outputs(tmp_path: Path, root: Path) -> None:
    notebooks.copy_notebooks(tmp_path / "copy")
    copies = {path.relative_to(tmp_path / "copy").as_posix(): path for path in tmp_path.rglob("*.ipynb")}
    assert set(copies) == {path.relative_to(root).as_posix() for path in notebooks.find_notebooks()}
    for name, path in copies.items():
        copy, original = (nbformat.read(each, as_version=4) for each in (path, root / name))
        nbformat.validate(copy)
        assert [(cell.source, cell.metadata) for cell in copy.cells] == [
            (cell.source, cell.metadata) for cell in original.cells
        ]
        code = [cell for cell in copy.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
    assert relative_files(tmp_path / "copy" / "data") == relative_files(root / "data")
    with pytest.raises(FileExistsError):
        notebooks.copy_notebooks(tmp_path / "copy")


def test_runs_are_written_to_the_home_directory_if_the_working_directory_is_read_only(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_TUTORIAL_RUNS", "")  # restored at the end
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files._find_runs() == Path("runs")
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    elsewhere = tmp_path / "ddp_tutorial"
    assert files._find_runs() == elsewhere / "runs"
    assert capsys.readouterr().err == f"{workdir} is read-only, so runs are written to {elsewhere / 'runs'}\n"
    assert Path.cwd() == elsewhere  # for cells that write to runs/...
    assert files._find_runs() == elsewhere / "runs"  # as in the ranks, which say nothing
    assert capsys.readouterr().err == ""


def test_importing_the_package_does_not_require_a_home_directory(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_TUTORIAL_RUNS", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", None)  # it raises an error for a user without an entry in /etc/passwd
    assert files._find_runs() == Path("runs")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert files._find_runs() == Path("runs")
