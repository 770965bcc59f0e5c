"""The command line, called in this process: a new one needs two seconds to import torch before it does anything.

What only a process can show is left to tests that start one: that `python -m ddp_tutorial` finds its commands, that
they import what they need, that nothing is said when Python ends.
"""

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from ddp_tutorial.__main__ import main


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `python -m ddp_tutorial ARGUMENTS` prints, and its exit code."""
    out, err, code = StringIO(), StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(sys, "argv", ["ddp-tutorial", *arguments])
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as leave:
            code = int(leave.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
