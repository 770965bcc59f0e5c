"""With CI=true, a test may skip only for a reason in this file. Any other skip is a failure.

An allowed reason is a fact about the machine, such as the number of GPUs. A broken feature, or a package that `make
setup` did not install, is not a fact about the machine.
"""

import os
import re
from collections.abc import Generator

import pytest

PERMITTED = (
    r"needs \d+ GPU\(s\) that torch can use, found \d+",
    r"needs emulated GPUs.*",
    r"needs Linux.*",
    r"a cluster requires Linux.*",
    r"needs a C\+\+ compiler",
    r"needs root to act as a second user",
    r".*the kernel does not permit namespaces.*",
)
# `.ci/run` installs Debian's packages if it runs as root, and fails if it cannot. Another user cannot install them.
PERMITTED_WITHOUT_ROOT = (r".*not installed \(Debian: .*\)",)

Report = pytest.TestReport | pytest.CollectReport


def is_permitted(reason: str, *, root: bool) -> bool:
    """Return whether a test may skip for `reason` when CI=true."""
    patterns = PERMITTED if root else PERMITTED + PERMITTED_WITHOUT_ROOT
    return any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in patterns)


def _checked(report: Report) -> Report:
    """Turn a skip that is not permitted into a failure."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return report
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not is_permitted(reason, root=os.geteuid() == 0):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/skips.py does not permit in CI: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, Report]:
    return _checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, Report]:
    return _checked((yield))
