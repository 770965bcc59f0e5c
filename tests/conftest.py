"""Fixtures and settings of all tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from hypothesis import settings

import forked
from ddp_tutorial.world import NCCL_SHARES_GPUS
from skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  # hooks

ROOT = Path(__file__).parent.parent  # the root of the repository

# The same examples on every machine and in every run; no time limit each, for the machine may be busy.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

# What a script starts by `make test &` ignores interrupts, which tests send, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SPAWN = torch.multiprocessing.spawn


@pytest.fixture(autouse=True, scope="module")
def ranks_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork ranks, which takes tenths of a second. Tests of how ranks start and exit are marked `spawned`."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("spawned"):
            patch.setattr(torch.multiprocessing, "spawn", forked.spawn)
        yield


@pytest.fixture(autouse=True)
def ranks_are_spawned_where_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("spawned"):
        monkeypatch.setattr(torch.multiprocessing, "spawn", SPAWN)


@pytest.fixture(autouse=True)
def gpus_are_there(request: pytest.FixtureRequest) -> None:
    if mark := request.node.get_closest_marker("cuda"):
        wanted, found = mark.kwargs.get("gpus", 1), torch.cuda.device_count()
        if os.environ.get(NCCL_SHARES_GPUS) == "1":  # two ranks can share each GPU
            found *= 2
        if found < wanted:
            pytest.skip(f"needs {wanted} GPU(s) that torch can use, found {found}")


@pytest.fixture
def root() -> Path:
    """The root of the repository, for a test that runs in a different directory."""
    return ROOT


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, for files of runs and their processes."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
