"""Fork the ranks of notebooks under nbval: `python -m pytest -p tests.kernels --nbval`.

Importing torch in every rank of every launch takes more than half of a notebook's CPU time. `forked` describes how a
forked rank differs from a spawned rank. Ranks are spawned, as for users, in the notebooks that a browser executes
(test_browser.py) and in a notebook that papermill executes (test_notebooks.py).

A notebook measures, and another process on the machine can spoil a measurement. With `--failed-notebooks`, pytest
executes again, from the first cell, the notebooks of which a cell failed the last time.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import forked

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


FOLDER = pytest.StashKey[str]()  # the folder of the IPython profile


def forking_profile(folder: Path) -> dict[str, str]:
    """Create an IPython profile in `folder`. Return the environment with which a kernel forks its ranks."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "fork_ranks.py").write_text(STARTUP.format(tests=str(Path(__file__).parent)))
    return {"IPYTHONDIR": str(folder), forked.LENT: forked.lent()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-notebooks", action="store_true", help="execute the notebooks that failed last time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a notebook that did not fail last time, if the option says so."""
    if not config.getoption("--failed-notebooks") or collection_path.suffix != ".ipynb":
        return None
    failed = {cell.split("::")[0] for cell in config.cache.get("cache/lastfailed", {})}
    return str(collection_path.relative_to(config.rootpath)) not in failed


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.stash[FOLDER] = folder.name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Start the kernel with the environment of the profile.

    nbval starts it when the first cell of a notebook is set up.
    """
    with pytest.MonkeyPatch.context() as patch:
        if item.path.suffix == ".ipynb":
            for name, value in forking_profile(Path(item.config.stash[FOLDER])).items():
                patch.setenv(name, value)
        yield
