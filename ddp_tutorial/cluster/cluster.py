"""Two machines on a laptop: `Cluster`.

    with Cluster(nodes=2, rate="1gbit") as cluster:
        for ended in cluster.run("hostname"):
            print(ended.node, ended.output)
        cluster.torchrun("-m", "ddp_tutorial", "train", "tiny")
        speeds = cluster.launch(measure)      # measure(world) on every rank
        cluster.cut(1)

Each node has a host name (n0, n1, ...), an address (10.0.0.1, ...), a loopback interface and processes of its own, and
reaches the others over a network with a real rate: the kernel holds packets back, nothing is simulated. What the nodes
share is the machine: its cores, its memory and its disk, and so its files. Nothing outside of the cluster can connect
to it.

It needs Linux. Root may always make one; others may where the system lets them make user namespaces (most do).
"""

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from ddp_tutorial.cluster import network
from ddp_tutorial.cluster.box import NO_DELAY, receive, send
from ddp_tutorial.cluster.delay import seconds_of
from ddp_tutorial.cluster.running import Ended, Process, wait
from ddp_tutorial.config import ConfigError, FailedError
from ddp_tutorial.processes.errors import RankError, RankTimeoutError, lost_connection

Result = TypeVar("Result")
Command = str | os.PathLike[str]
PORT = 29_500  # where ranks meet
_START_SECONDS = 30.0
_GRACE_SECONDS = 5.0  # for the other ranks of a launch, when one has failed


class Cluster:
    """`nodes` hosts, for the length of a `with` block.

    `rate` is what each may send, and receive, a second: "10gbit", "1gbit", "100mbit"; None for as fast as the machine
    is. `delay` is how much longer each message is on its way, in one direction, such as "0.5ms". A process holds it;
    that needs a rate, of at most 1gbit for two nodes, and of 480mbit over their number for more (see `delay`).

    All of them work in `folder` (by default the one where you are), as with a file system in the network, or, with
    `shared_folder=False`, in a folder of its own there: n0/, n1/.

    When the block ends, and when the process that made the cluster is killed, all processes of all nodes are killed.

    Raises `ConfigError`, before anything is started, for settings that cannot be used, and where the system does not
    allow this; `why_not()` says so without raising.
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
        self._delay = seconds_of(delay) if delay is not None else 0.0
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
        self._lock = threading.Lock()  # one question at a time
        self._processes: list[Process] = []
        self.off: set[str] = set()  # nodes without power
        self.unplugged: set[str] = set()  # nodes whose cable is out
        self._channel: socket.socket | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_up(self) -> bool:
        """Are its nodes there? Not before the `with` block, not after it, and not if the process that holds them has
        been killed."""
        return self._channel is not None and self._box.poll() is None

    @property
    def in_words(self) -> str:
        """Its links: `1gbit links, 0.5ms`."""
        return (f"{self.rate} links" if self.rate else "links of any rate") + (f", {self.delay}" if self.delay else "")

    def __repr__(self) -> str:
        return f"Cluster(nodes={len(self)}, rate={self.rate!r}, delay={self.delay!r})"

    def __enter__(self) -> "Cluster":
        _look_at_the_system()
        refused = []
        for as_whom in ((), ("-U", "-r")) if os.geteuid() == 0 else (("-U", "-r"),):
            if (error := self._start(as_whom)) is None:
                break
            refused.append(error)
        else:
            raise ConfigError(f"no cluster: this system does not allow namespaces ({refused[-1]})")
        self.off.clear()
        self.unplugged.clear()
        try:
            self._ask("build", len(self), self.rate, self._delay)
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, as_whom: tuple[str, ...]) -> str | None:
        """Start the box; the reason if that is not possible."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        python = [sys.executable, "-m", "ddp_tutorial.cluster.box", str(its.fileno())]
        # Its forks are ranks. Where no name server answers, torch warns in each that it does not know who connects.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | _environment()
        with its, tempfile.TemporaryFile() as errors:
            self._box = subprocess.Popen(
                ["unshare", *as_whom, *namespaces, *python],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[its.fileno()],
                env=environ,
                start_new_session=True,  # an interrupt is for this process to handle
            )
            self._channel = ours
            its.close()
            try:
                self._ask("hello")
            except FailedError:
                self.close()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().split("\n")
                return said[-1] or f"unshare has ended with {self._box.returncode}"
        return None

    def close(self) -> None:
        """End all that runs on the nodes, and the nodes."""
        if self._channel is None:
            return
        self._channel.close()  # the box ends then, and the kernel all others
        self._channel = None
        try:
            self._box.wait(5)
        except subprocess.TimeoutExpired:
            self._box.kill()
            self._box.wait()
        with suppress(TimeoutError):
            wait(self._running(), _GRACE_SECONDS)

    def _ask(self, name: str, *args: Any, fds: Sequence[int] = ()) -> Any:
        if self._channel is None:
            raise RuntimeError("the cluster is not there: use it inside of 'with Cluster(...) as cluster:'")
        try:
            with self._lock:
                send(self._channel, (name, args), list(fds))
                (error, answer), _ = receive(self._channel)
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._box.wait(_GRACE_SECONDS)
            holder = "delays its messages" if self._box.returncode == NO_DELAY else "holds it"
            raise FailedError(f"the cluster has ended: the process that {holder} is gone") from None
        if error is not None:
            raise ConfigError(error)
        return answer

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
        return self._begin("start", [os.fspath(arg) for arg in argv], node, env, (), line)

    def run(
        self,
        *argv: Command,
        env: Mapping[str, str] | None = None,
        env_of: Sequence[Mapping[str, str]] | None = None,
        timeout: float | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> list[Ended]:
        """Run a command on every node, and wait for all. `env` is added to the environment of all, `env_of[i]` to that
        of node i. Raises `TimeoutError` after `timeout` seconds, and kills them."""
        several = [
            self.start(*argv, node=node, env={**(env or {}), **(env_of[node] if env_of else {})}, line=line)
            for node in range(len(self))
        ]
        return self.finish(several, timeout)

    def torchrun(
        self,
        *args: Command,
        nproc_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        line: Callable[[str, str], None] | None = None,
    ) -> list[Ended]:
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
        return [
            self.start(*command, node=node, env={**self.torchrun_env(node, port), **(env or {})}, line=line)
            for node in range(len(self))
        ]

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
        from ddp_tutorial.processes.transport import dump_call

        if nodes is not None:
            self._check(nodes - 1)
        size = (nodes or len(self)) * ranks_per_node
        port = self.new_port()
        with ExitStack() as stack:
            call = stack.enter_context(tempfile.TemporaryFile())
            call.write(pickle.dumps((threads, collective_timeout, dump_call(fn, args))))
            call.flush()
            results = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
            ranks = []
            for rank in range(size):
                node, local = divmod(rank, ranks_per_node)
                variables = {
                    "RANK": rank,
                    "WORLD_SIZE": size,
                    "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": ranks_per_node,
                    "MASTER_ADDR": self.names[0],
                    "MASTER_PORT": port,
                    "OMP_NUM_THREADS": threads,
                }
                files = (call.fileno(), results[rank].fileno())
                environ = {name: str(value) for name, value in variables.items()} | dict(env or {})
                ranks.append(self._begin("fork", "ddp_tutorial.cluster.rank:call_here", node, environ, files, None))
            try:
                if meanwhile:
                    self._wait_until_up(ranks, results, timeout)
                    meanwhile()
                self._wait_for_ranks(ranks, timeout, collective_timeout)
            finally:
                self._end(ranks)
            outcomes = [_read(result) for result in results]
        # the cause among several failures: that of a rank which heard of no other; a host without power says nothing
        failed = [
            (ranks[rank].node in self.off, bool(outcome and lost_connection(str(outcome[1]))), rank)
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome[0] == "raised"
        ]
        if failed:
            raise self._failure(min(failed)[-1], ranks, outcomes)
        return [pickle.loads(outcome[1]) for outcome in outcomes]

    def _wait_until_up(self, ranks: list[Process], results: Sequence[IO[bytes]], timeout: float | None) -> None:
        """Until all ranks have met, or one has ended, or the time is up."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not all(os.fstat(result.fileno()).st_size for result in results) and time.monotonic() < deadline:
            if any(rank.code is not None for rank in ranks):
                return
            with suppress(TimeoutError):
                wait(ranks, 0.02)

    def _wait_for_ranks(self, ranks: list[Process], timeout: float | None, collective_timeout: float) -> None:
        try:
            wait(ranks, timeout, until=lambda: any(rank.code for rank in ranks if rank.node not in self.off))
            with suppress(TimeoutError):  # where a host has gone in silence, the others wait in their collective
                wait(ranks, _GRACE_SECONDS + (collective_timeout if self.off else 0))
        except TimeoutError:
            printed = "\n".join(rank.output for rank in ranks)
            raise RankTimeoutError(0, f"was still running after {timeout} s", log=printed) from None

    def _failure(self, rank: int, ranks: list[Process], outcomes: list[Any]) -> RankError:
        outcome, node = outcomes[rank], ranks[rank].node
        reason = f"raised {outcome[1]}" if outcome else f"has ended with {ranks[rank].code}"
        others = [f"rank {i} raised {each[1]}" for i, each in enumerate(outcomes) if i != rank and each]
        others = [line for line in others if "raised b'" not in line]
        raised = outcome[1] if outcome else None
        return RankError(
            rank, f"on {node} {reason}", log=ranks[rank].output.strip(), others="\n".join(others), raised=raised
        )

    def fork(self, entry: str, *, node: int, env: Mapping[str, str], files: Sequence[int]) -> int:
        """Call a function, named as "package.module:function", in a new process of one node, and do not wait for it.

        It is a fork of a process that has imported the module, and by that torch, once for all. It prints into
        `files[0]`, its exit code is written to `files[1]` as text, and it is called with its own numbers of the others,
        of which there may be five. Returns its number, for `send_signal`.
        """
        return self._fork("fork", entry, node, env, files)

    def send_signal(self, number: int, signalled: int) -> None:
        """Send a signal to what `fork` has started, unless that has ended."""
        self._ask("signal", number, int(signalled))

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

    def _fork(
        self, kind: str, what: str | list[str], node: int, env: Mapping[str, str] | None, files: Sequence[int]
    ) -> int:
        self._check(node)
        environ = _environment() | dict(env or {})
        with open(os.devnull) as nothing:
            fds = [nothing.fileno(), *files]
            number: int = self._ask(kind, what, node, environ, str(self.folders[node]), fds=fds)
        return number

    def _begin(
        self,
        kind: str,
        what: str | list[str],
        node: int,
        env: Mapping[str, str] | None,
        files: tuple[int, ...],
        line: Callable[[str, str], None] | None,
    ) -> Process:
        stdout, its_stdout = os.pipe()
        status, its_status = os.pipe()
        try:
            pid = self._fork(kind, what, node, env, (its_stdout, its_status, *files))
        except BaseException:
            os.close(stdout)
            os.close(status)
            raise
        finally:
            os.close(its_stdout)
            os.close(its_status)
        process = Process(self.names[node], pid, stdout, status, partial(self._ask, "signal"), line)
        self._processes = [*self._running(), process]
        return process

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.code is None]

    def finish(self, processes: Sequence[Process], timeout: float | None = None) -> list[Ended]:
        """Wait for all; raises `TimeoutError` after `timeout` seconds, and kills those that still run."""
        try:
            wait(processes, timeout)
        finally:
            self._end(processes)
        return [process.ended() for process in processes]

    def _end(self, processes: Sequence[Process]) -> None:
        """Kill those that still run."""
        if self._channel is None:
            return
        running = [process for process in processes if process.code is None]
        for process in running:
            process.kill()
        with suppress(TimeoutError):
            wait(running, _GRACE_SECONDS)
        if any(process.code == -signal.SIGKILL for process in processes):
            self._ask("hello")  # raises if all of them have been killed because the cluster has ended

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
        self._ask("set_rate", rate)
        self.rate = rate

    def cut(self, node: int) -> None:
        """Pull the node's cable out: what is sent to it, and by it, is lost, and nobody is told."""
        self._check(node)
        self._ask("connect", node, False)
        self.unplugged.add(self.names[node])

    def mend(self, node: int) -> None:
        """Plug it in again. TCP sends what was lost once more, after a while."""
        self._check(node)
        self._ask("connect", node, True)
        self.unplugged.discard(self.names[node])

    @contextmanager
    def link_down(self, node: int) -> Iterator[None]:
        """The node's cable is out inside of the block."""
        self.cut(node)
        try:
            yield
        finally:
            self.mend(node)

    def kill(self, node: int) -> None:
        """The node loses its power: all its processes are gone at once, and its cable is dead, so that the others get
        no farewell. It does not come back."""
        self._check(node)
        self.off.add(self.names[node])
        self._ask("kill", node)

    def _check(self, node: int) -> None:
        if not isinstance(node, int) or not 0 <= node < len(self):
            raise ConfigError(f"node={node!r} is not one of 0 to {len(self) - 1}")


def why_not(delay: str | None = None) -> str:
    """Why no cluster can be made here, or none with such a delay, in one line; empty where it can. Makes one, of one
    node, to find out."""
    try:
        with Cluster(1, "1gbit", delay):
            return ""
    except ConfigError as error:
        return str(error)


def _look_at_the_system() -> None:
    """Raise `ConfigError` where there is no hope."""
    if sys.platform != "linux":
        raise ConfigError(f"no cluster: it needs the namespaces of Linux, and this is {sys.platform}")
    from shutil import which

    if which("unshare") is None:
        raise ConfigError("no cluster: the command 'unshare' is missing (package util-linux)")
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        raise ConfigError("no cluster: the package pyroute2 is missing. Try: pip install pyroute2") from None


def _environment() -> dict[str, str]:
    """That of this process, and Python finds the same modules in it."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _read(result: IO[bytes]) -> Any:
    """A rank's outcome; None where it has left none."""
    result.seek(1)  # the byte before it said that it was up
    content = result.read()
    return pickle.loads(content) if content else None
