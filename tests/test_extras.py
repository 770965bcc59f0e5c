"""The library without the packages of the extras: it trains, and other commands name the extra that they need."""

import os
import subprocess
import sys
from pathlib import Path

import IPython
import pytest
import torch
from IPython.core.error import UsageError

import ddp_tutorial
from ddp_tutorial import StreamedSource, World
from ddp_tutorial.config import ConfigError, MissingPackageError, require_package
from ddp_tutorial.sharding.streamed import iterable_dataset

# Python imports a module of this name at startup, in the processes of ranks too.
BLOCKED = ("matplotlib", "ipywidgets", "datasets", "tensorboardX", "pyroute2", "accelerate", "transformers")
BLOCKED += ("IPython", "ipykernel", "jupyterlab", "nbclient", "nbconvert", "nbformat", "papermill", "PIL", "tabulate")
SITECUSTOMIZE = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\n"


def run_without_extras(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "without").mkdir(exist_ok=True)
    (folder / "without" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    environment = {**os.environ, "PYTHONPATH": str(folder / "without")}
    command = [sys.executable, "-m", "ddp_tutorial", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("extras")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = ("nprocs=2", "steps=2", "checkpoint.every=2", "device=cpu", "name=run", "tensorboard=true")
        return folder, run_without_extras(folder, "train", "tiny", *settings)


def test_two_ranks_train_without_the_packages_of_the_extras(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = trained
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "run" / "result.json").is_file()
    assert (done.stdout + done.stderr).count("pip install 'ddp-tutorial[logging]'") == 1  # by rank 0, once


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (("logs", "plot", "run"), "matplotlib", "notebooks"),
        (("run",), "papermill", "notebooks"),
        (("sweep", "train", "steps=2"), "papermill", "notebooks"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    arguments: tuple[str, ...],
    package: str,
    extra: str,
    trained: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = trained
    monkeypatch.chdir(folder)
    done = run_without_extras(folder, *arguments)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: the package {package} is required, but is not installed. Run: pip install 'ddp-tutorial[{extra}]'\n"
    )


def test_streams_are_read_without_datasets_unless_they_are_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = StreamedSource([torch.tensor([1.0]), torch.tensor([2.0])], 2, World(), workers=0)
    assert next(source).samples.flatten().tolist() == [1.0, 2.0]
    with pytest.raises(MissingPackageError, match=r"pip install 'ddp-tutorial\[data\]'"):
        iterable_dataset([tmp_path / "a.arrow"])


def test_a_missing_package_is_a_config_error_and_an_import_error() -> None:
    for kind in (ConfigError, ImportError):
        with pytest.raises(kind, match=r"the package nowhere is required"):
            require_package("nowhere", "data")


def test_live_ranks_reject_an_old_ipython_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IPython, "version_info", (7, 34, 0, ""))
    with pytest.raises(UsageError, match=r"^live ranks require IPython 9 or newer, got 7\.34\.0\. Run pip install"):
        ddp_tutorial.load_ipython_extension(None)
