"""Describe the hardware and software used for a measurement, and read environment variables."""

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
    """Return the number of CPU cores available to this process, which can be lower than the machine's total."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int:
    """Return the size of the machine's main memory in bytes, or the container's memory limit if the limit is lower."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # there is no such file, or it contains "max"
        return total


def describe_environment() -> dict[str, Any]:
    """Return a JSON-compatible description of the hardware and software, so that measurements can be compared."""
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
    """Restore the environment variables `names` at the end of the block."""
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
    """Return the processor's model name from /proc on Linux, or Python's description on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def integer_variable(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the integer value of an environment variable, or `default` if the variable is not set.

    Raises:
        ConfigError: If the variable is not an integer, or is not set and `default` is None.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name} must be an integer, got {text!r}") from None
