"""What all tests share."""

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent  # of the repository

# The same examples on every machine and in every run; no time limit each, for the machine may be busy.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")


@pytest.fixture
def root() -> Path:
    """The root of the repository, for a test that runs elsewhere."""
    return ROOT


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in: what a run leaves behind, also one of another process, goes there."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
