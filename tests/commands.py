"""Call the command line in this process, because a new process needs two seconds to import torch.

Tests that start a process check what only a process shows: `python -m ddp_tutorial` finds its commands, the commands
import their dependencies, and Python exits without a message.
"""

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from ddp_tutorial.__main__ import main


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the output of `python -m ddp_tutorial ARGUMENTS`, and its exit code."""
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
