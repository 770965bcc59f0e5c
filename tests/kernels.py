"""Kernels whose ranks are forked, not spawned, for notebooks under nbval: `python -m pytest -p tests.kernels --nbval`.

More than half of what such a notebook computes is to import torch, in each rank of each launch. `forked` tells what is
the same in a forked rank and what is not. Spawned, as a learner's are, are the ranks of the notebooks in `SPAWNED`, and
all that papermill (test_notebooks.py) and a browser (test_browser.py) execute: the experiments, the quickstart and live
ranks once more.
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


FOLDER = pytest.StashKey[str]()  # for IPYTHONDIR


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    startup = Path(folder.name, "profile_default", "startup")
    startup.mkdir(parents=True)
    (startup / "fork_ranks.py").write_text(STARTUP.format(tests=str(Path(__file__).parent)))
    config.stash[FOLDER] = folder.name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """nbval starts a notebook's kernel when its first cell is set up; the kernel inherits the environment."""
    with pytest.MonkeyPatch.context() as patch:
        if item.path.suffix == ".ipynb" and item.path.stem not in SPAWNED:
            patch.setenv("IPYTHONDIR", item.config.stash[FOLDER])
            patch.setenv(forked.LENT, forked.lent())
        yield
