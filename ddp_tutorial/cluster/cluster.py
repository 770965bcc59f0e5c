"""Two machines on a laptop: `Cluster`.

    with Cluster(nodes=2, rate="1gbit") as cluster:
        for ended in cluster.run("hostname"):
            print(ended.node, ended.output)
        cluster.torchrun("-m", "ddp_tutorial", "train", "tiny")
        speeds = cluster.launch(measure)      # measure(world) on every rank
        cluster.disconnect(1)

Each node has a host name (n0, n1, ...), an address (10.0.0.1, ...), a loopback interface and processes of its own, and
reaches the others over a network with a real rate: the kernel holds packets back, nothing is simulated. What the nodes
share is the machine: its cores, its memory and its disk, and so its files. Nothing outside of the cluster can connect
to it.

It needs Linux. Root may always make one; others may where the system lets them make user namespaces (most do).
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
PORT = 29_500  # where ranks meet


class Cluster:
    """`nodes` hosts, for the length of a `with` block.

    `rate` is what each may send, and receive, a second: "10gbit", "1gbit", "100mbit"; None for as fast as the machine
    is. `delay` is how much longer each message is on its way, in one direction, such as "0.5ms". A process holds it;
    that needs a rate, of at most 1gbit for two nodes, and of 480mbit over their number for more (see `delay`).

    All of them work in `folder` (by default the one where you are), as with a file system in the network, or, with
    `shared_folder=False`, in a folder of its own there: n0/, n1/.

    When the block ends, and when the process that made the cluster is killed, all processes of all nodes are killed.

    Raises `ConfigError`, before anything is started, for settings that cannot be used, and where the system does not
    allow this; `unsupported_reason()` says so without raising.
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
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= network.MOST_NODES:
            raise ConfigError(f"nodes={nodes!r}: should be a whole number from 1 to {network.MOST_NODES}")
        if rate is not None:
            network.bits_per_second(rate)
        self._delay = parse_delay(delay) if delay is not None else 0.0
        if delay is not None:
            network.check_delayed(nodes, rate)
        if not Path(folder).is_dir():
            raise ConfigError(f"folder={str(folder)!r} is not there")
        self.rate, self.delay = rate, delay
        self.names = [network.name_of(node) for node in range(nodes)]
        self.addresses = [network.address_of(node) for node in range(nodes)]
        root = Path(folder).resolve()
        self.folders = [root if shared_folder else root / name for name in self.names]
        self._port = PORT
        self._box = BoxClient()
        self._runner = Runner(self._box, self.names, self.folders)
        self.off: set[str] = set()  # nodes without power
        self.unplugged: set[str] = set()  # nodes whose cable is out

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_up(self) -> bool:
        """Are its nodes there? Not before the `with` block, not after it, and not if the process that holds them has
        been killed."""
        return self._box.is_up

    @property
    def description(self) -> str:
        """Its links: `1gbit links, 0.5ms`."""
        return (f"{self.rate} links" if self.rate else "links of any rate") + (f", {self.delay}" if self.delay else "")

    def __repr__(self) -> str:
        return f"Cluster(nodes={len(self)}, rate={self.rate!r}, delay={self.delay!r})"

    def __enter__(self) -> "Cluster":
        self._box.start()
        self.off.clear()
        self.unplugged.clear()
        try:
            self._box.ask("build", len(self), self.rate, self._delay)
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that runs on the nodes, and the nodes."""
        if self._box.is_open:
            self._box.close()
            self._runner.drain_all()

    # ------------------------------------------------------------------------------------------------ what runs there

    def start(
        self,
        *argv: Command,
        node: int,
        env: Mapping[str, str] | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> Process:
        """Start a command on one node, and do not wait for it. `line(node, text)` is called for each line it prints,
        while somebody waits."""
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
        """Run a command on every node, and wait for all. `env` is added to the environment of all, `env_of[i]` to that
        of node i. Raises `TimeoutError` after `timeout` seconds, and kills them."""

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
        """`torchrun --nnodes=N --nproc-per-node=... ARGS` on every node, which meet at n0 (c10d)."""
        return self.finish(self.start_torchrun(*args, nproc_per_node=nproc_per_node, env=env, line=line), timeout)

    def start_torchrun(
        self,
        *args: Command,
        nproc_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> list[Process]:
        """As `torchrun`, without waiting."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc_per_node}", *args]
        port = self.new_port()

        def begin(node: int) -> Process:
            return self.start(*command, node=node, env={**self.torchrun_env(node, port), **(env or {})}, line=line)

        return self._runner.start_all(begin, len(self))

    def torchrun_env(self, node: int, port: int = PORT) -> dict[str, str]:
        """What tells the torchrun of a node where the agents meet; it takes each option from a variable PET_..., too.

        The same on a command line: --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n0:29500 --rdzv-id=cluster
        --rdzv-conf=is_host=1 (on n0; 0 elsewhere) --local-addr=10.0.0.1
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
        env: Mapping[str, str] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Result]:
        """Call `fn(world, *args)` on every rank of the first `nodes` nodes (by default of all), with the process group
        up; the results, by rank.

        The ranks are forks of one process that has imported torch, so that they are up at once. `meanwhile` is called
        here as soon as all have met and begun, to pull a cable for example. Raises `RankError` for the first that
        fails, and ends the others a little later; `RankTimeoutError` after `timeout` seconds.
        """
        if nodes is not None:
            self._check(nodes - 1)
        size = (nodes or len(self)) * ranks_per_node
        ranks = HostedRanks(self._runner, self.off, self.names[0], self.new_port(), size, ranks_per_node)
        return ranks.call(
            fn,
            args,
            threads=threads,
            timeout=timeout,
            collective_timeout=collective_timeout,
            env=env,
            meanwhile=meanwhile,
        )

    def fork(self, entry: str, *, node: int, env: Mapping[str, str], files: Sequence[int]) -> int:
        """Call a function, named as "package.module:function", in a new process of one node, and do not wait for it.

        It is a fork of a process that has imported the module, and by that torch, once for all. It prints into
        `files[0]`, its exit code is written to `files[1]` as text, and it is called with its own numbers of the others,
        of which there may be five. Returns its number, for `send_signal`.
        """
        self._check(node)
        return self._runner.fork("fork", entry, node, env, files)

    def send_signal(self, number: int, signalled: int) -> None:
        """Send a signal to what `fork` has started, unless that has ended."""
        self._box.ask("signal", number, int(signalled))

    def pid_of(self, number: int) -> int | None:
        """The process id, outside of the cluster, of what `fork` has started; None where it has ended."""
        for process in psutil.Process(self._box.pid).children(recursive=True):
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                inside = next(line for line in status if line.startswith("NSpid:")).split()[-1]
                if int(inside) == number:
                    return int(process.pid)
        return None

    def new_port(self) -> int:
        """A port at which ranks may meet, and at which nobody has met before."""
        self._port += 1
        return self._port - 1

    def finish(self, processes: Sequence[Process], timeout: float | None = None) -> list[CommandResult]:
        """Wait for all; raises `TimeoutError` after `timeout` seconds, and kills those that still run."""
        try:
            wait(processes, timeout)
        finally:
            self._runner.end(processes)
        return [process.poll_result() for process in processes]

    # ----------------------------------------------------------------------------------------------- the network

    @property
    def bytes_per_second(self) -> float:
        """What a link carries of a program's bytes in a second; each 1,448 of them take 1,514 on the wire."""
        return network.bits_per_second(self.rate) / 8 * 1448 / 1514 if self.rate else math.inf

    def set_rate(self, rate: str | None) -> None:
        """Give all links another rate, from now on."""
        if rate is not None:
            network.bits_per_second(rate)
        if self.delay is not None:
            network.check_delayed(len(self), rate)
        before, self.rate = self.rate, rate  # it is done also where we are interrupted while we wait for the answer
        try:
            self._box.ask("set_rate", rate)
        except ConfigError:
            self.rate = before
            raise

    def disconnect(self, node: int) -> None:
        """Pull the node's cable out: what is sent to it, and by it, is lost, and nobody is told."""
        self._check(node)
        self.unplugged.add(self.names[node])
        self._box.ask("connect", node, False)

    def reconnect(self, node: int) -> None:
        """Plug it in again. TCP sends what was lost once more, after a while."""
        self._check(node)
        self.unplugged.discard(self.names[node])
        self._box.ask("connect", node, True)

    @contextmanager
    def link_down(self, node: int) -> Iterator[None]:
        """The node's cable is out inside of the block."""
        self.disconnect(node)
        try:
            yield
        finally:
            self.reconnect(node)

    def kill(self, node: int) -> None:
        """The node loses its power: all its processes are gone at once, and its cable is dead, so that the others get
        no farewell. It does not come back."""
        self._check(node)
        self.off.add(self.names[node])
        self._box.ask("kill", node)

    def _check(self, node: int) -> None:
        if not isinstance(node, int) or not 0 <= node < len(self):
            raise ConfigError(f"node={node!r} is not one of 0 to {len(self) - 1}")


def unsupported_reason(delay: str | None = None) -> str:
    """Return one line that says why this system cannot hold a cluster, or one with such a delay; "" if it can.

    Starts a cluster of one node to find out. Raises `FailedError` if that fails for any other reason: it is a defect.
    """
    try:
        with Cluster(1, "1gbit", delay):
            return ""
    except ConfigError as error:
        return str(error)
