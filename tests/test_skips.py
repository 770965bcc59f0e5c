"""In CI, a test may skip only for an allowed reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skips import is_permitted

TESTS = """
import pytest

def test_needs_a_gpu():
    pytest.skip("needs 1 GPU(s) that torch can use, found 0")

def test_is_broken():
    pytest.skip("TypeError: unexpected keyword argument")

@pytest.mark.xfail(strict=True)
def test_is_known_to_fail():
    assert False
"""
MODULE = 'import pytest\npytest.importorskip("no_such_package")\n'


@pytest.mark.parametrize(
    ("reason", "as_root", "as_a_user"),
    [
        ("needs 2 GPU(s) that torch can use, found 0", True, True),
        ("needs Linux's /proc", True, True),
        ("slurmctld, munged not installed (Debian: slurm-wlm, munge, iproute2)", False, True),
        ("three times, Ray did not start: TypeError", False, False),
        ("could not import 'ray': No module named 'ray'", False, False),
        ("", False, False),
    ],
)
def test_a_skip_is_allowed_only_for_a_listed_reason(reason: str, as_root: bool, as_a_user: bool) -> None:
    assert is_permitted(reason, root=True) == as_root
    assert is_permitted(reason, root=False) == as_a_user


def test_an_unlisted_skip_fails_only_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "skips", "--continue-on-collection-errors", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ends = {}
    for ci in ("true", ""):
        done = subprocess.run(
            command,
            env=environment | {"CI": ci},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        ends[ci] = done.returncode, done.stdout
    assert ends[""][0] == 0, ends[""][1]
    code, output = ends["true"]
    assert code != 0
    assert "does not permit in CI: TypeError: unexpected keyword argument" in output
    assert "does not permit in CI: could not import 'no_such_package'" in output
    assert "found 0" not in output, "a permitted skip fails"
