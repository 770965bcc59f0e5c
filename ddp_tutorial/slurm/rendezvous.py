"""Connect the ranks of a Slurm step through a free port, which rank 0 publishes in a private file.

Slurm provides the node names, but no port. A port computed from the job ID may already be in use, and every user of the
cluster can compute it. Instead, rank 0 listens on a port that the operating system chooses. Rank 0 writes its host, its
port and a nonce to `runs/.rendezvous/CLUSTER-JOB.RESTART.STEP`. The folder has mode 0700, and the file has mode 0600.
The other ranks wait for that file, connect, and compare the nonce, so they never use an earlier job's store.

This module registers the URL scheme `slurm` with torch. `init_process_group` then accepts addresses such as
`slurm://node01/mycluster-7.0.0` as its `init_method`.
"""

import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import RUNS, write_atomically

FOLDER = RUNS / ".rendezvous"
_CONNECT_TIMEOUT = timedelta(seconds=10)  # per attempt, because an earlier job's file may name a host that is down


def slurm_address(host: str, cluster: str, job: int, restarts: int, step: int) -> str:
    """Return the `init_method` of a job step. A requeued job uses a different address."""
    return f"slurm://{host}/{cluster}-{job}.{restarts}.{step}"


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the step's store, the rank and the world size, like torch's rendezvous handlers. Collective."""
    address, query = urlsplit(url), parse_qs(urlsplit(url).query)
    rank, size = int(query["rank"][0]), int(query["world_size"][0])
    host, path = address.hostname or "localhost", FOLDER / address.path.lstrip("/")
    if rank:
        yield _connect(path, timeout), rank, size
        return
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    store.set("nonce", nonce := secrets.token_hex(16))
    # When all ranks have initialized the process group, torch drops this generator, and the file is removed.
    with _published(path, {"host": host, "port": store.port, "nonce": nonce}):
        yield store, rank, size


@contextmanager
def _published(path: Path, meeting: dict[str, Any]) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(path.parent)
    write_atomically(path, json.dumps(meeting).encode(), mode=0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _connect(path: Path, timeout: timedelta) -> dist.Store:
    """Connect to the store whose address rank 0 writes to `path`.

    Raises:
        ConfigError: If a different user owns or can access the folder.
        RuntimeError: If rank 0 does not write the file within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with suppress(OSError, RuntimeError, json.JSONDecodeError):  # no file yet, or only an earlier job's file
            _require_private(path.parent)
            meeting = json.loads(path.read_text())
            store = dist.TCPStore(meeting["host"], meeting["port"], is_master=False, timeout=_CONNECT_TIMEOUT)
            if store.get("nonce").decode() == meeting["nonce"]:
                store.set_timeout(timeout)
                return store
        time.sleep(0.05)
    raise RuntimeError(
        f"rank 0 did not publish its address in {path.absolute()} within {timeout.total_seconds():.0f} s. If the "
        "nodes do not share the working directory, set MASTER_ADDR to rank 0's host, and MASTER_PORT to a free port."
    )


def _require_private(folder: Path) -> None:
    """Raise `ConfigError` if a different user owns or can access the folder."""
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder.absolute()} must belong to the job's user and be inaccessible to other users: remove it, or run "
            f"chmod 700 {folder}"
        )


register_rendezvous_handler("slurm", _rendezvous)
