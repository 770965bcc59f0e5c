"""What machine and which versions a number was measured with; and environment variables for the length of a block."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from ddp_tutorial.config import ConfigError


def cores() -> int:
    """The cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int:
    """The bytes of main memory that this machine has, or that a container may use of them."""
    there = psutil.virtual_memory().total
    try:
        return min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or it says "max"
        return there


def describe_environment() -> dict[str, Any]:
    """Versions and hardware as JSON: enough to judge whether two measurements can be compared."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


@contextmanager
def variables_restored(*names: str) -> Iterator[None]:
    """Give these environment variables the values at the end of the block that they had at its beginning."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _processor() -> str:
    """The processor's model name, from Linux's /proc; elsewhere what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def integer_variable(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the value of an environment variable that must be an integer, or `default` if it is not set.

    Raises:
        ConfigError: If it is not an integer, or is not set and has no default.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} should be a whole number") from None
