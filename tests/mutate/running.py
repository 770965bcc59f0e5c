"""Run tests in a forked process, in a copy of the repository whose source is changed.

All processes that a test starts import the copy: it is first on `sys.path` and in `PYTHONPATH`. A forked process has
imported torch and pytest already, and so have the ranks: their server is forked too, and lent to `tests/forked.py`.
"""

import ctypes
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import psutil

# The imports of tests, except the mutated package.
_PRELOADED = """torch.multiprocessing torch.distributed torch.distributed.checkpoint torch._dynamo pydantic.main
    cloudpickle datasets tensorboardX matplotlib.pyplot pytest hypothesis nbformat"""
# Plugins have been imported already, so pytest cannot rewrite their assertions; nbval takes a second to import.
_OPTIONS = "-q --tb=short -p no:cacheprovider -p no:nbval -W ignore::pytest.PytestAssertRewriteWarning"
_CHILD_SUBREAPER = 36  # of prctl: orphans become children of this process, which can then find them


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test: passed, skipped, failed, timeout or crashed."""

    test: str
    result: str
    seconds: float


class Copy:
    """A copy of a repository, whose package and tests can be changed; the rest is linked."""

    def __init__(self, root: Path, package: str, folder: Path) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)
        self.root, self.package, self.folder = root, package, folder / "copy"
        self.temporary, self.output = folder / "tmp", folder / "output.txt"
        self._times = itertools.count(1)
        self.folder.mkdir()
        for entry in root.iterdir():
            if entry.name in (package, "tests"):
                shutil.copytree(entry, self.folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not entry.name.startswith("."):
                (self.folder / entry.name).symlink_to(entry)

    @contextmanager
    def changed(self, sources: dict[str, str]) -> Iterator[None]:
        """Change files inside the block. A new modification time prevents Python from using an old compiled file."""
        before = {file: ((self.folder / file).read_text(), (self.folder / file).stat().st_mtime) for file in sources}
        for file, source in sources.items():
            _write(self.folder / file, source, next(self._times))
        try:
            yield
        finally:
            for file, (source, modified) in before.items():
                _write(self.folder / file, source, modified)

    def run(self, tests: list[str], limit: Callable[[str], float], go_on: bool = False) -> Iterator[Outcome]:
        """Run tests, given by file or by node, and yield the outcome of each until one fails. Leave no process behind.

        Args:
            limit: returns the seconds that a test may take; for the name "", the seconds until the first begins.
            go_on: continue after a failure.
        """
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        receiver, sender = multiprocessing.Pipe(duplex=False)
        others = psutil.Process().children()
        if not os.fork():
            self._run_pytest(tests, sender)
        sender.close()
        running, began = "", time.monotonic()
        try:
            while receiver.poll(limit(running)):
                match receiver.recv():
                    case str(test):
                        running, began = test, time.monotonic()
                    case (test, result):
                        yield Outcome(test, result, time.monotonic() - began)
                        if result == "failed" and not go_on:
                            return
                    case None:
                        return
            yield Outcome(running, "timeout", time.monotonic() - began)
        except EOFError:
            yield Outcome(running, "crashed", time.monotonic() - began)
        finally:
            receiver.close()
            _kill_children_except(others)

    def _run_pytest(self, tests: list[str], sender: Connection) -> None:
        """Run pytest in the forked process, and exit."""
        try:
            self._enter()
            import pytest

            files = list(dict.fromkeys(file_of(test) for test in tests))
            code = pytest.main([*files, *_OPTIONS.split()], [_Reporter(tests, sender)])
            if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                sender.send(None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _enter(self) -> None:
        """Turn this process into a process of the copy."""
        os.setsid()  # an interrupt of the driver does not reach the tests
        os.chdir(self.folder)
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        first = [str(self.folder), str(self.folder / "tests")]
        sys.path[:] = first + [path for path in sys.path if Path(path).resolve() != self.root.resolve()]
        os.environ |= {"PYTHONPATH": os.pathsep.join(first), "TMPDIR": str(self.temporary)}
        tempfile.tempdir = None  # reread TMPDIR
        sys.modules["__main__"] = ModuleType("__main__")  # spawned processes import the module they come from
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", self.package)]:
            del sys.modules[name]
        if (self.folder / "tests/forked.py").exists():
            os.environ["FORKED_SERVERS"] = _start_server()


def _start_server() -> str:
    """Fork a server of ranks, and return how `forked` connects to it."""
    from forked import PRELOADED, SERVERS

    def fork(path: bytes, arguments: list[str], kept: list[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            begin = 3
            for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
                os.closerange(begin, descriptor)
                begin = descriptor + 1
            exec(arguments[-1], {})  # the code that `python -c` would execute
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    with patch("multiprocessing.util.spawnv_passfds", fork):
        server.ensure_running()
    key = getattr(server, "_forkserver_authkey", b"")  # exists since Python 3.14
    return json.dumps([(server._forkserver_address, key.hex())] * SERVERS)


class _Reporter:
    """A pytest plugin that selects the tests, and sends the name of each as it starts and its outcome."""

    def __init__(self, tests: list[str], sender: Connection) -> None:
        self.tests, self.sender = tests, sender

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        places = {test: place for place, test in enumerate(self.tests)}
        chosen = [item for item in items if {item.nodeid, file_of(item.nodeid)} & places.keys()]
        items[:] = sorted(chosen, key=lambda item: places.get(item.nodeid, 0))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.sender.send((report.nodeid, "failed"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.sender.send(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.sender.send((report.nodeid, report.outcome))


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def preload() -> None:
    """Import the dependencies of tests, once for all forked processes.

    The function must not start a thread or initialize a GPU.
    """
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    for name in _PRELOADED.split():
        import_module(name)


def _write(path: Path, source: str, modified: float) -> None:
    path.write_text(source)
    os.utime(path, (modified, modified))


def _kill_children_except(others: list[psutil.Process]) -> None:
    """Kill children and their descendants until none is left. Orphans among them become children of this process."""
    while children := [child for child in psutil.Process().children() if child not in others]:
        descendants = [process for child in children for process in _tree(child)]
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                # A resource tracker removes the semaphores of killed processes, and then exits by itself.
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        psutil.wait_procs(descendants, timeout=5)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [*process.children(recursive=True), process]
    return []
