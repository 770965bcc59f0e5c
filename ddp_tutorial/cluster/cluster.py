"""Emulate several machines on one Linux machine with `Cluster`.

Each node has its own host name (n0, n1, ...), address (10.0.0.1, ...), loopback interface and processes. The nodes are
connected by a network whose rate the kernel enforces. The traffic is real, not simulated. The nodes share the machine's
cores, memory, disk and files. Nothing outside the cluster can connect to it. A cluster requires Linux, and either root
privileges or unprivileged user namespaces, which most systems permit.

Example:
    with Cluster(nodes=2, rate="1gbit") as cluster:
        for finished in cluster.run("hostname"):
            print(finished.node, finished.output)
        cluster.torchrun("-m", "ddp_tutorial", "train", "tiny")
        speeds = cluster.launch(measure)      # measure(world) on every rank
        cluster.disconnect(1)
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ddp_tutorial.cluster import network
from ddp_tutorial.cluster.client import BoxClient
from ddp_tutorial.cluster.delay import parse_delay
from ddp_tutorial.cluster.launching import HostedRanks
from ddp_tutorial.cluster.running import CommandResult, Process, Runner, wait
from ddp_tutorial.config import ConfigError

Result = TypeVar("Result")
Command = str | os.PathLike[str]
PORT = 29_500  # first port for rendezvous


class Cluster:
    """Cluster of simulated hosts that exist for the duration of a `with` block.

    All processes on all nodes are killed when the block exits, or when the process that created the cluster is killed.
    """

    def __init__(
        self,
        nodes: int = 2,
        rate: str | None = None,
        delay: str | None = None,
        *,
        shared_folder: bool = True,
        folder: str | os.PathLike[str] = ".",
    ) -> None:
        """Check the settings. The `with` block starts the cluster.

        Args:
            nodes: Number of hosts.
            rate: Limit on each host's send rate and receive rate, such as "1gbit" or "100mbit", or None for no limit.
            delay: Additional one-way latency of each message, such as "0.5ms". With a delay, `rate` must be at most
                1gbit for two nodes, and at most 480mbit / N for N > 2 nodes.
            shared_folder: Whether all nodes use `folder` as their working directory, instead of a subfolder per node
                (n0/, n1/, ...).
            folder: Working directory of the nodes.

        Raises:
            ConfigError: If a setting is invalid. The `with` statement raises `ConfigError` if the system cannot run a
                cluster. To get the reason without an error, call `unsupported_reason()`.
        """
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= network.MOST_NODES:
            raise ConfigError(f"'nodes' must be an integer from 1 to {network.MOST_NODES}, got {nodes!r}")
        if rate is not None:
            network.bits_per_second(rate)
        self._delay = parse_delay(delay) if delay is not None else 0.0
        if delay is not None:
            network.check_delayed(nodes, rate)
        if not Path(folder).is_dir():
            raise ConfigError(f"'folder' must be an existing directory, got {str(folder)!r}")
        self.rate, self.delay = rate, delay
        self.names = [network.name_of(node) for node in range(nodes)]
        self.addresses = [network.address_of(node) for node in range(nodes)]
        root = Path(folder).resolve()
        self.folders = [root if shared_folder else root / name for name in self.names]
        self._port = PORT
        self._box = BoxClient()
        self._runner = Runner(self._box, self.names, self.folders)
        self.off: set[str] = set()  # names of killed nodes
        self.unplugged: set[str] = set()  # names of nodes whose cable is unplugged

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.names)

    @property
    def is_up(self) -> bool:
        """Whether the `with` block is active and the cluster's main process is running."""
        return self._box.is_up

    @property
    def description(self) -> str:
        """Description of the links' rate and delay, such as `1gbit links, 0.5ms`."""
        return (f"{self.rate} links" if self.rate else "links of any rate") + (f", {self.delay}" if self.delay else "")

    def __repr__(self) -> str:
        """Return a string that describes the cluster's settings."""
        return f"Cluster(nodes={len(self)}, rate={self.rate!r}, delay={self.delay!r})"

    def __enter__(self) -> "Cluster":
        """Start the nodes and the network."""
        self.off.clear()
        self.unplugged.clear()
        try:
            self._box.start()
            self._box.ask("build", len(self), self.rate, self._delay)
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the cluster."""
        self.close()

    def close(self) -> None:
        """Kill all processes on the nodes, and remove the nodes."""
        self._box.close()
        self._runner.drain_all()

    # ------------------------------------------------------------------------------------------------ running processes

    def start(
        self,
        *argv: Command,
        node: int,
        env: Mapping[str, str] | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> Process:
        """Start a command on one node without waiting for it to exit.

        Args:
            *argv: Command and arguments.
            node: Index of the node.
            env: Additional environment variables.
            line: Function to call as `line(node, text)` for each output line while the caller waits for the process.
        """
        self._check(node)
        return self._runner.start("start", [os.fspath(arg) for arg in argv], node, env, line=line)

    def run(
        self,
        *argv: Command,
        env: Mapping[str, str] | None = None,
        env_of: Sequence[Mapping[str, str]] | None = None,
        timeout: float | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> list[CommandResult]:
        """Run a command on every node, and wait until all commands have exited.

        Args:
            *argv: Command and arguments.
            env: Additional environment variables for all nodes.
            env_of: Additional environment variables for each node, one mapping per node.
            timeout: Timeout in seconds.
            line: Function to call as `line(node, text)` for each output line.

        Raises:
            TimeoutError: If a command is still running after `timeout` seconds, in which case all commands are killed.
        """

        def begin(node: int) -> Process:
            return self.start(*argv, node=node, env={**(env or {}), **(env_of[node] if env_of else {})}, line=line)

        return self.finish(self._runner.start_all(begin, len(self)), timeout)

    def torchrun(
        self,
        *args: Command,
        nproc_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> list[CommandResult]:
        """Run `torchrun --nnodes=N --nproc-per-node=... ARGS` on every node. The agents use c10d rendezvous on n0."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc_per_node}", *args]
        port = self.new_port()
        env_of = [self.torchrun_env(node, port) | dict(env or {}) for node in range(len(self))]
        return self.run(*command, env_of=env_of, timeout=timeout, line=line)

    def torchrun_env(self, node: int, port: int = PORT) -> dict[str, str]:
        """Return environment variables that contain the rendezvous settings for a node's torchrun agent.

        Each torchrun option can be set through an environment variable whose name starts with PET_. The equivalent
        command-line options are: --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n0:29500 --rdzv-id=cluster
        --rdzv-conf=is_host=1 (on n0; 0 on other nodes) --local-addr=10.0.0.1
        """
        return {
            "PET_NNODES": str(len(self)),
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"{self.names[0]}:{port}",
            "PET_RDZV_ID": "cluster",
            "PET_RDZV_CONF": f"is_host={int(node == 0)}",
            "PET_LOCAL_ADDR": self.addresses[node],
            "OMP_NUM_THREADS": "1",
        }

    def launch(
        self,
        fn: Callable[..., Result],
        *args: Any,
        nodes: int | None = None,
        ranks_per_node: int = 1,
        threads: int = 1,
        timeout: float | None = 60,
        collective_timeout: float = 60,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Result]:
        """Call `fn(world, *args)` on every rank, and return the results in rank order.

        The process group is initialized before `fn` is called. The ranks are forked from a process that has
        already imported torch, so they start quickly.

        Args:
            fn: Function to run on every rank, with the rank's `World` as the first argument.
            *args: Additional arguments for `fn`.
            nodes: Number of nodes to use (all by default).
            ranks_per_node: Number of ranks on each node.
            threads: Number of torch threads per rank.
            timeout: Timeout in seconds for all ranks to return, or None for no timeout.
            collective_timeout: Timeout in seconds for each collective, after which a waiting rank raises an error.
            meanwhile: Function to call in this process after all ranks have joined the process group, for example to
                unplug a cable.

        Raises:
            ConfigError: If `nodes` or `ranks_per_node` is out of range.
            RankError: If a rank failed, in which case the other ranks are killed after a short grace period.
            RankTimeoutError: If the ranks did not return within `timeout`.
        """
        if nodes is not None and not (isinstance(nodes, int) and 1 <= nodes <= len(self)):
            raise ConfigError(f"'nodes' must be between 1 and {len(self)}, got {nodes!r}")
        if ranks_per_node < 1:
            raise ConfigError(f"'ranks_per_node' must be a positive integer, got {ranks_per_node!r}")
        size = (nodes or len(self)) * ranks_per_node
        ranks = HostedRanks(self._runner, self.off, self.names[0], self.new_port(), size, ranks_per_node)
        return ranks.call(
            fn, args, threads=threads, timeout=timeout, collective_timeout=collective_timeout, meanwhile=meanwhile
        )

    def fork(self, entry: str, *, node: int, env: Mapping[str, str], files: Sequence[int]) -> int:
        """Call a function in a new process on one node without waiting, and return the process ID for `send_signal`.

        The process is forked from the cluster's main process, which imports the function's module and torch only once.

        Args:
            entry: Name of the function, as "package.module:function".
            node: Index of the node.
            env: Additional environment variables.
            files: Open files that the new process inherits. The first file receives the output, and the second file
                receives the exit code as text. The function is called with the descriptors of the remaining files (at
                most five).
        """
        self._check(node)
        return self._runner.fork("fork", entry, node, env, files)

    def send_signal(self, number: int, signalled: int) -> None:
        """Send a signal to a process that `fork` started, unless the process has exited."""
        self._box.ask("signal", number, int(signalled))

    def pid_of(self, number: int) -> int | None:
        """Return the ID that a process started by `fork` has outside the cluster.

        `number` is the ID that `fork` returned. The result is None if the process has exited.
        """
        for process in psutil.Process(self._box.pid).children(recursive=True):
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                inside = next(line for line in status if line.startswith("NSpid:")).split()[-1]
                if int(inside) == number:
                    return int(process.pid)
        return None

    def new_port(self) -> int:
        """Return a rendezvous port that this cluster has not used before."""
        self._port += 1
        return self._port - 1

    def finish(self, processes: Sequence[Process], timeout: float | None = None) -> list[CommandResult]:
        """Wait until all processes have exited, and return their results.

        Raises:
            TimeoutError: If a process is still running after `timeout` seconds. All `processes` are then killed.
        """
        try:
            wait(processes, timeout)
        finally:
            self._runner.end(processes)
        return [process.poll_result() for process in processes]

    # ----------------------------------------------------------------------------------------------- the network

    @property
    def bytes_per_second(self) -> float:
        """Maximum payload rate of a link in bytes per second. A frame of 1,514 bytes carries 1,448 bytes of payload."""
        return network.bits_per_second(self.rate) / 8 * 1448 / 1514 if self.rate else math.inf

    def set_rate(self, rate: str | None) -> None:
        """Set the rate of all links."""
        if rate is not None:
            network.bits_per_second(rate)
        if self.delay is not None:
            network.check_delayed(len(self), rate)
        before, self.rate = self.rate, rate  # the server sets the rate even if an interrupt arrives before its reply
        try:
            self._box.ask("set_rate", rate)
        except Exception:
            self.rate = before
            raise

    def disconnect(self, node: int) -> None:
        """Unplug the node's cable. Messages to and from the node are lost, and no process is notified."""
        self._check(node)
        self.unplugged.add(self.names[node])
        self._box.ask("connect", node, False)

    def reconnect(self, node: int) -> None:
        """Plug in the node's cable again. TCP then retransmits lost data."""
        self._check(node)
        self.unplugged.discard(self.names[node])
        self._box.ask("connect", node, True)

    def kill(self, node: int) -> None:
        """Simulate the node's power failure by disconnecting its cable and killing its processes immediately.

        The other nodes are not notified, because the cable is disconnected. A killed node cannot be restarted.
        """
        self._check(node)
        self.off.add(self.names[node])
        self._box.ask("kill", node)

    def _check(self, node: int) -> None:
        if not isinstance(node, int) or not 0 <= node < len(self):
            raise ConfigError(f"'node' must be between 0 and {len(self) - 1}, got {node!r}")


def unsupported_reason(delay: str | None = None) -> str:
    """Return a one-line reason why this system cannot run a cluster, or an empty string if it can.

    The function tries to start a one-node cluster with the given `delay`.

    Raises:
        FailedError: If the cluster fails because of a defect in this package, not because of a missing system feature.
    """
    try:
        with Cluster(1, "1gbit", delay):
            return ""
    except ConfigError as error:
        return str(error)
