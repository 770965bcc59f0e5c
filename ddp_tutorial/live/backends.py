"""Where the ranks of a pool are: on this machine, or on the hosts of a cluster, with a network between them.

The pool talks to them in the same way, through pipes. A place starts them, says where they meet, and on which host each
of them is.
"""

import os
import pickle
import signal
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import connection
from typing import Any, Protocol

import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.cluster.cluster import Cluster
from ddp_tutorial.config import ConfigError, FailedError
from ddp_tutorial.live.messages import WorkerSpec
from ddp_tutorial.live.worker import serve
from ddp_tutorial.live.worker_handle import WorkerHandle
from ddp_tutorial.processes.spawn import environment, loopback_store, main_module_hidden, rank_environment
from ddp_tutorial.processes.transport import Descriptor


class Backend(Protocol):
    """What a pool asks of it. `settings` are the fields of a `WorkerSpec` that are the same for all."""

    nodes: int

    @property
    def description(self) -> str:
        """To stand behind "2 ranks on cpu, gloo"."""

    @property
    def outage(self) -> str:
        """Why the ranks do not reach one another, where that is known; empty where they do."""

    def open(self) -> None: ...
    def check(self, ranks: Sequence[int]) -> None: ...
    def start(
        self, workers: Sequence[WorkerHandle], settings: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None: ...
    def new_port(self) -> int: ...
    def pids(self, workers: Sequence[WorkerHandle]) -> list[int]: ...
    def node_of(self, rank: int) -> str | None: ...
    def close(self) -> None: ...


class LocalBackend:
    """The ranks are children of this process. They meet at a store that it hosts, on the loopback interface."""

    nodes, description, outage = 1, "", ""

    def __init__(self, n: int) -> None:
        self.n = n
        self.store: dist.TCPStore | None = None

    def open(self) -> None:
        """Host the store, which has to live as long as the ranks."""
        self.store = loopback_store(self.n)

    def check(self, ranks: Sequence[int]) -> None:
        """Does nothing: ranks of this machine can always be started."""

    def start(self, workers: Sequence[WorkerHandle], settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """Spawn a process for each of `people`."""
        threads = settings["threads"]
        environ = {**rank_environment(self.n, threads, self.new_port()), **environ}
        with ExitStack() as theirs, main_module_hidden(), environment(environ):
            for each in workers:
                output, messages, requests, control = map(Descriptor, each.open_pipes(theirs))
                seat = WorkerSpec(
                    rank=each.rank,
                    output=output,
                    messages=messages,
                    requests=requests,
                    control=control,
                    parent=os.getpid(),
                    dies_with_thread=threading.current_thread() is threading.main_thread(),
                    **settings,
                )
                each.process = torch.multiprocessing.spawn(serve, (seat,), 1, join=False).processes[0]

    def new_port(self) -> int:
        """The store's port, which is always the same."""
        return self.store.port if self.store else 0

    def pids(self, workers: Sequence[WorkerHandle]) -> list[int]:
        """The ranks' process ids, as the ranks see them."""
        return [each.process.pid for each in workers]

    def node_of(self, rank: int) -> str | None:
        """None: there is one machine."""
        return None

    def close(self) -> None:
        """Let go of the store."""
        self.store = None


class ClusterBackend:
    """The ranks are processes of a cluster's nodes, as many on each. They meet inside of its network, at rank 0, each
    time at a new port.

    A cluster that is not up is brought up, and ended with the pool; one that is up is left as it is. Raises
    `ConfigError` where its nodes cannot have as many ranks each.
    """

    def __init__(self, n: int, cluster: Cluster) -> None:
        if not isinstance(cluster, Cluster):
            raise ConfigError(f"cluster={cluster!r}: should be a Cluster, such as Cluster(2, '1gbit')")
        self.cluster, self.n, self.nodes = cluster, n, len(cluster)
        if n % self.nodes:
            raise ConfigError(
                f"{n} rank{'s' if n > 1 else ''} on {self.nodes} nodes: each node has as many. Use a multiple of "
                f"{self.nodes}, such as {self.nodes}"
            )
        self.is_ours = not cluster.is_up

    @property
    def description(self) -> str:
        return f", on {self.nodes} node{'s' if self.nodes > 1 else ''}, {self.cluster.description}"

    @property
    def outage(self) -> str:
        out = sorted(self.cluster.unplugged)
        return f"the cable of {' and '.join(out)} is out" if out else ""

    def open(self) -> None:
        """Bring the cluster up, unless it is."""
        if self.is_ours:
            self.cluster.close()
            self.cluster.__enter__()

    def check(self, ranks: Sequence[int]) -> None:
        """Raise `ConfigError` where these ranks cannot be started again; bring our cluster up if it is gone."""
        if not self.cluster.is_up:
            if not self.is_ours:
                raise ConfigError("the cluster of these ranks has ended")
            self.open()
        if off := [name for rank in ranks if (name := self.node_of(rank)) in self.cluster.off]:
            raise ConfigError(f"{off[0]} has been killed, and does not come back. `stop` ends the other ranks")

    def start(self, workers: Sequence[WorkerHandle], settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """Fork a process for each of `people`, on its node, from one that has imported torch."""
        common = {
            "WORLD_SIZE": self.n,
            "LOCAL_WORLD_SIZE": self._each,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_ADDR": self.cluster.names[0],
            "MASTER_PORT": 0,  # comes with the request to meet
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": settings["threads"],
        }
        with ExitStack() as theirs:
            for each in workers:
                output, *pipes = each.open_pipes(theirs)
                seat = theirs.enter_context(tempfile.TemporaryFile())
                seat.write(pickle.dumps({**settings, "rank": each.rank}))
                seat.flush()
                node = each.rank // self._each
                env = {name: str(value) for name, value in {**common, "GROUP_RANK": node}.items()} | dict(environ)
                each.process = NodeProcess(self.cluster, node, env, output, (seat.fileno(), *pipes))

    def new_port(self) -> int:
        """A port at which no ranks have met before: rank 0 may still hold the last one."""
        return self.cluster.new_port()

    def pids(self, workers: Sequence[WorkerHandle]) -> list[int]:
        """The ranks' process ids inside of the cluster."""
        return [each.process.number for each in workers]

    def node_of(self, rank: int) -> str | None:
        """The name of the node that a rank is on."""
        return self.cluster.names[rank // self._each]

    def close(self) -> None:
        """End the cluster, if it is ours."""
        if self.is_ours:
            self.cluster.close()

    @property
    def _each(self) -> int:
        return self.n // self.nodes


class NodeProcess:
    """A rank's process on a node, with as much of `multiprocessing.Process` as a pool asks for.

    It is no child of this process. Its exit code comes through a pipe, at the end of which it is gone, and so it does
    where the whole cluster is.
    """

    def __init__(self, cluster: Cluster, node: int, env: Mapping[str, str], output: int, files: Sequence[int]) -> None:
        self.exitcode: int | None = None
        self.sentinel, status = os.pipe()
        weakref.finalize(self, os.close, self.sentinel)
        try:
            entry = "ddp_tutorial.live.hosted:serve_here"
            self.number = cluster.fork(entry, node=node, env=env, files=(output, status, *files))
        finally:
            os.close(status)
        self._cluster = cluster
        self.pid = cluster.pid_of(self.number)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        if self.exitcode is None and connection.wait([self.sentinel], timeout):
            self.exitcode = int(os.read(self.sentinel, 16) or -signal.SIGKILL)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.exitcode is None:
            with suppress(FailedError, RuntimeError):  # the cluster is gone, and so is the rank
                self._cluster.send_signal(self.number, number)
