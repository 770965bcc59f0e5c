"""Implement `python -m ddp_tutorial doctor`, which checks this machine's support for distributed training.

Each check performs a real operation, such as launching two ranks, opening a port, or writing a file to shared memory.
"""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.environment import cores, describe_environment
from ddp_tutorial.files import RUNS
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

GIB = 2**30
Probe = Callable[[], tuple[bool | None, str, str]]  # the fields of a `Finding` after its name
PACKAGES = ("torch", "numpy", "datasets", "papermill", "jupyterlab")


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the check.
        ok: Whether the check passed, or None if it neither passed nor failed.
        text: Description of the result.
        advice: The recommended action, or an empty string.
    """

    name: str
    ok: bool | None
    text: str
    advice: str = ""


def examine() -> list[Finding]:
    """Run every check and return the results.

    If a check raises an exception, its result is a failed `Finding` that contains the error.
    """
    findings = []
    for name, look in _PROBES.items():
        try:
            findings.append(Finding(name, *look()))
        except Exception as error:
            findings.append(Finding(name, False, f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]))
    return findings


def _versions() -> tuple[bool | None, str, str]:
    found = []
    missing = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    advice = f"missing: {', '.join(missing)}; pip install 'ddp-tutorial[notebooks]'" if missing else ""
    return not missing or None, f"Python {platform.python_version()}, {', '.join(found)}", advice


def _processor() -> tuple[bool | None, str, str]:
    count = cores()
    model = describe_environment()["processor"]
    advice = "" if count > 1 else "two ranks share one core: the results are correct, but there is no speedup"
    return (True if count > 1 else None), f"{count} cores, {model or platform.machine()}", advice


def _memory() -> tuple[bool | None, str, str]:
    memory = psutil.virtual_memory()
    ranks = int(memory.available // (0.5 * GIB))
    advice = "" if ranks >= 4 else "a rank on the CPU needs about 0.5 GiB: close other programs, or use fewer ranks"
    return (
        ranks >= 2,
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free, enough for {ranks} ranks",
        advice,
    )


def _gpus() -> tuple[bool | None, str, str]:
    count = torch.cuda.device_count()
    if not count:
        advice = "the GPU code is not tested on this machine; on a machine with a GPU, run: pytest -m cuda"
        return None, f"no GPU that torch {torch.__version__} can use; the notebooks do not need one", advice
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return (
        True,
        f"{count}: {names}; NCCL {'yes' if dist.is_nccl_available() else 'no'}",
        "to test the GPU code, run: pytest -m cuda",
    )


def _backends() -> tuple[bool | None, str, str]:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    text = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in there.items())
    return there["gloo"], text, "" if there["gloo"] else "install a torch build with gloo: pip install torch"


def _loopback() -> tuple[bool | None, str, str]:
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=2):
        port = server.getsockname()[1]
    if not names:
        return None, f"127.0.0.1 accepts connections (port {port})", "no interface lo or lo0: set GLOO_SOCKET_IFNAME"
    return True, f"{names[0]}, 127.0.0.1 accepts connections on free ports, such as {port}", ""


def _hostname() -> tuple[bool | None, str, str]:
    name = socket.gethostname()
    try:
        return True, f"{name} resolves to {socket.gethostbyname(name)}", ""
    except OSError:
        advice = "launch does not need a host name; run torchrun with --standalone or --rdzv-endpoint=127.0.0.1:0"
        return None, f"{name} does not resolve to an address", advice


def _port() -> tuple[bool | None, str, str]:
    """Check whether port 29500, torchrun's default, is free."""
    try:
        with socket.create_server(("127.0.0.1", 29500)):
            return True, "29500, torchrun's default, is free", ""
    except OSError:
        return None, "29500, torchrun's default, is in use", "run torchrun with --standalone or --master-port"


def _shared_memory() -> tuple[bool | None, str, str]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None, "no /dev/shm, which exists only on Linux", ""
    free = shutil.disk_usage(folder).free
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * 2**20)
    advice = "" if free > GIB / 4 else "source.workers needs shared memory: start a container with --shm-size=1g"
    return free > GIB / 16, f"{free / GIB:.1f} GiB free in /dev/shm", advice


def _folder() -> tuple[bool | None, str, str]:
    place = RUNS if RUNS.is_dir() else Path()
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        return False, f"{place.resolve().name}/ is not writable", "change to a writable folder: runs are saved in it"
    return (
        free > GIB,
        f"{free / GIB:.0f} GiB free for runs/",
        "" if free > GIB else "free disk space for runs and checkpoints",
    )


def _add(world: World) -> float:
    return float(all_reduce_sum(world, torch.tensor(float(world.rank + 1))))


def _ranks() -> tuple[bool | None, str, str]:
    results = launch(_add, 2, device="cpu", echo=False, timeout=60)
    well = results == [3.0, 3.0]
    return well, f"two ranks all-reduced 1 and 2 over gloo to {results[0]:g}", ""


_PROBES: dict[str, Probe] = {
    "versions": _versions,
    "processor": _processor,
    "memory": _memory,
    "GPUs": _gpus,
    "backends": _backends,
    "loopback": _loopback,
    "hostname": _hostname,
    "ports": _port,
    "shared memory": _shared_memory,
    "disk": _folder,
    "ranks": _ranks,
}


def verdict(findings: list[Finding]) -> str:
    """Return a one-line summary of the features that work on this machine, or of the failed checks."""
    broken = [finding.name for finding in findings if finding.ok is False]
    if broken:
        return f"failed checks: {', '.join(broken)}"
    gpus = torch.cuda.device_count()
    where = f"on {gpus} GPUs with NCCL, and on CPUs" if gpus > 1 else "on CPUs with gloo"
    fast = "" if gpus > 1 or cores() > 1 else ", without speedup on one core"
    system = "" if sys.platform == "linux" else f" ({sys.platform} is not tested)"
    return f"several ranks will work {where}{fast}{system}"
