"""The servers that fork the ranks of tests: the state of a rank, and who may use the servers."""

import json
import os
from pathlib import Path

import pytest

import forked
from ddp_tutorial import World, launch


def parent(world: World) -> int:
    return os.getppid()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_the_fork_server_has_no_pyarrow_thread() -> None:
    launch(parent, 2, device="cpu", echo=False)
    for server in forked.servers():
        threads = [path.read_text().strip() for path in Path(f"/proc/{server}/task").glob("*/comm")]
        assert threads
        assert not [name for name in threads if "jemalloc" in name]


def test_shared_servers_fork_the_ranks_of_a_different_process(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, own = forked.lent(), set(forked.servers())
    assert len(json.loads(lent)) == len(own) == forked.SERVERS
    monkeypatch.setattr(forked, "_servers", [])  # as in a process without servers
    monkeypatch.setenv(forked.LENT, lent)
    parents = launch(parent, 3, device="cpu", echo=False)
    assert set(parents) == own
    assert all(isinstance(server, forked._Borrowed) for server in forked._servers)
