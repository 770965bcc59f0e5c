"""Kernels whose ranks are forked, not spawned, for notebooks under nbval: `python -m pytest -p tests.kernels --nbval`.

More than half of a notebook's processor time is spent importing torch, in every rank of every launch. `forked` says
what differs in a forked rank. The ranks of the notebooks in `SPAWNED` are spawned, as a learner's are. So are those of
the notebooks that a browser executes (test_browser.py), and of two that papermill executes (test_notebooks.py).
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import forked

# They are about the start and the end of processes, or what torch reads when it is imported.
SPAWNED = {"01_processes", "11_debugging_hangs", "12_fault_tolerance"}

# Run by a kernel before its first cell, to which it leaves no name: a cell that forgot an import has to fail.
STARTUP = """
def _fork_ranks():
    import sys
    sys.path.append({tests!r})
    import torch.multiprocessing
    import forked
    torch.multiprocessing.spawn = forked.spawn

_fork_ranks()
del _fork_ranks
"""


FOLDER = pytest.StashKey[str]()  # of the IPython profile


def forking_profile(folder: Path) -> dict[str, str]:
    """Create an IPython profile in `folder`. Return the environment with which a kernel forks its ranks."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "fork_ranks.py").write_text(STARTUP.format(tests=str(Path(__file__).parent)))
    return {"IPYTHONDIR": str(folder), forked.LENT: forked.lent()}


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.stash[FOLDER] = folder.name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """nbval starts a notebook's kernel when its first cell is set up; the kernel inherits the environment."""
    with pytest.MonkeyPatch.context() as patch:
        if item.path.suffix == ".ipynb" and item.path.stem not in SPAWNED:
            for name, value in forking_profile(Path(item.config.stash[FOLDER])).items():
                patch.setenv(name, value)
        yield
