"""Start the ranks of a pool on this machine or on the hosts of a simulated cluster.

With either backend, the pool communicates with the ranks through pipes. A backend starts the processes, provides the
rendezvous port, and maps each rank to a host.
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
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ddp_tutorial.cluster.cluster import Cluster
from ddp_tutorial.config import ConfigError, FailedError
from ddp_tutorial.live.messages import WorkerSpec
from ddp_tutorial.live.worker import serve
from ddp_tutorial.live.worker_handle import WorkerHandle
from ddp_tutorial.processes.spawn import environment, loopback_store, main_module_hidden, rank_environment
from ddp_tutorial.processes.transport import Descriptor


class LocalBackend:
    """Backend whose ranks are child processes. The pool hosts the rendezvous store on the loopback interface."""

    nodes, description, outage = 1, "", ""  # `ClusterBackend` documents these attributes

    def __init__(self, n: int) -> None:
        """Create a backend for `n` ranks."""
        self.n = n
        self.store: dist.TCPStore | None = None

    def open(self) -> None:
        """Create the rendezvous store, which must outlive the ranks."""
        self.store = loopback_store(self.n)

    def check(self, ranks: Sequence[int]) -> None:
        """Do nothing, because local ranks can always be restarted."""

    def start(self, workers: Sequence[WorkerHandle], settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """Spawn one process for each worker.

        Args:
            workers: Handles of the new ranks.
            settings: Fields of `WorkerSpec` that are the same for all ranks.
            environ: Additional environment variables.
        """
        threads = settings["threads"]
        environ = {**rank_environment(self.n, threads, self.new_port()), **environ}
        with ExitStack() as theirs, main_module_hidden(), environment(environ):
            for each in workers:
                output, messages, requests, control = map(Descriptor, each.open_pipes(theirs))
                spec = WorkerSpec(
                    rank=each.rank,
                    output=output,
                    messages=messages,
                    requests=requests,
                    control=control,
                    parent=os.getpid(),
                    dies_with_thread=threading.current_thread() is threading.main_thread(),
                    **settings,
                )
                each.process = torch.multiprocessing.spawn(serve, (spec,), 1, join=False).processes[0]

    def new_port(self) -> int:
        """Return the store's port, which never changes."""
        return self.store.port if self.store else 0

    def pids(self, workers: Sequence[WorkerHandle]) -> list[int]:
        """Return the ranks' process IDs, as the ranks see them."""
        return [each.process.pid for each in workers]

    def node_of(self, rank: int) -> str | None:
        """Return None, because there is only one machine."""
        return None

    def close(self) -> None:
        """Release the store."""
        self.store = None


class ClusterBackend:
    """Backend that runs the same number of ranks on each node of a cluster.

    The ranks rendezvous at rank 0 inside the cluster's network, on a new port each time. If the cluster is not running,
    the backend starts it, and stops it together with the pool. A cluster that is already running is neither changed nor
    stopped.
    """

    def __init__(self, n: int, cluster: Cluster) -> None:
        """Create a backend for `n` ranks on `cluster`.

        Raises:
            ConfigError: If `n` is not a multiple of the number of nodes, or if `cluster` is not a `Cluster`.
        """
        if not isinstance(cluster, Cluster):
            raise ConfigError(f"'cluster' must be a Cluster, such as Cluster(2, '1gbit'), got {cluster!r}")
        self.cluster, self.n, self.nodes = cluster, n, len(cluster)
        if n % self.nodes:
            raise ConfigError(f"the number of ranks must be a multiple of the number of nodes ({self.nodes}), got {n}")
        self.is_ours = not cluster.is_up

    @property
    def description(self) -> str:
        """Description of the nodes and their links, which is appended to the pool's description."""
        return f", on {self.nodes} node{'s' if self.nodes > 1 else ''}, {self.cluster.description}"

    @property
    def outage(self) -> str:
        """Message that lists the nodes with an unplugged cable, or an empty string."""
        out = sorted(self.cluster.unplugged)
        return f"the cable of {' and '.join(out)} is unplugged" if out else ""

    def open(self) -> None:
        """Start the cluster if it is not running."""
        if self.is_ours:
            self.cluster.close()
            self.cluster.__enter__()

    def check(self, ranks: Sequence[int]) -> None:
        """Check that `ranks` can be restarted. Restart the pool's own cluster if it has stopped.

        Raises:
            ConfigError: If a rank's node has been killed, or if a cluster that the pool did not start has stopped.
        """
        if not self.cluster.is_up:
            if not self.is_ours:
                raise ConfigError("the ranks' cluster has stopped: create a new Cluster and a new Ranks object")
            self.open()
        if off := [name for rank in ranks if (name := self.node_of(rank)) in self.cluster.off]:
            raise ConfigError(
                f"{off[0]} has been killed, so its ranks cannot be restarted. To terminate the other ranks, use `stop`"
            )

    def start(self, workers: Sequence[WorkerHandle], settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """Fork each worker's process on its node, from a process that has already imported torch."""
        common = {
            "WORLD_SIZE": self.n,
            "LOCAL_WORLD_SIZE": self._each,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_ADDR": self.cluster.names[0],
            "MASTER_PORT": 0,  # set by the request to form a group
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": settings["threads"],
        }
        with ExitStack() as theirs:
            for each in workers:
                output, *pipes = each.open_pipes(theirs)
                spec = theirs.enter_context(tempfile.TemporaryFile())
                spec.write(pickle.dumps({**settings, "rank": each.rank}))
                spec.flush()
                node = each.rank // self._each
                env = {name: str(value) for name, value in {**common, "GROUP_RANK": node}.items()} | dict(environ)
                each.process = NodeProcess(self.cluster, node, env, output, (spec.fileno(), *pipes))

    def new_port(self) -> int:
        """Return a port that no earlier rendezvous used, because rank 0 may still be using the previous port."""
        return self.cluster.new_port()

    def pids(self, workers: Sequence[WorkerHandle]) -> list[int]:
        """Return the ranks' process IDs inside the cluster."""
        return [each.process.number for each in workers]

    def node_of(self, rank: int) -> str | None:
        """Return the name of a rank's node."""
        return self.cluster.names[rank // self._each]

    def close(self) -> None:
        """Stop the cluster if this backend started it."""
        if self.is_ours:
            self.cluster.close()

    @property
    def _each(self) -> int:
        return self.n // self.nodes


Backend = LocalBackend | ClusterBackend


class NodeProcess:
    """A rank's process on a node, with the methods of `multiprocessing.Process` that a pool needs.

    The rank is not a child of the pool's process, so the cluster sends the exit code through a pipe. The pipe closes
    when the rank exits or the whole cluster stops.
    """

    def __init__(self, cluster: Cluster, node: int, env: Mapping[str, str], output: int, files: Sequence[int]) -> None:
        """Fork the process on a node.

        Args:
            cluster: Cluster of the node.
            node: Index of the node.
            env: Additional environment variables.
            output: File descriptor for stdout and stderr.
            files: Additional file descriptors that the process inherits.
        """
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
        """Wait at most `timeout` seconds for the process to exit."""
        if self.exitcode is None and connection.wait([self.sentinel], timeout):
            self.exitcode = int(os.read(self.sentinel, 16) or -signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.exitcode is None:
            with suppress(FailedError, RuntimeError):  # the cluster has stopped, and so has the rank
                self._cluster.send_signal(self.number, number)
