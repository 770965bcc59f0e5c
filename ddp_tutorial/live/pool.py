"""Start persistent ranks once, and call them many times.

    with Ranks(2) as ranks:
        ranks.execute("import torch, torch.distributed as dist; x = torch.tensor(world.rank)")
        ranks.execute("dist.all_reduce(x)")
        ranks.get("x")                              # [tensor(1), tensor(1)]
        ranks.run(lambda world, y: world.rank + y, 10)   # [10, 11]

A rank keeps its variables between calls, even after a call that failed, was interrupted or hung. As with `launch`, each
rank has its own pipes, the rendezvous store listens on the loopback interface, and no rank outlives this process.

`Ranks(2, cluster=Cluster(2, "1gbit"))` runs the ranks on two hosts with a 1 Gbit/s link between them; see
`ddp_tutorial.cluster`.
"""

import atexit
import math
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import cloudpickle
import psutil

from ddp_tutorial.cluster.cluster import Cluster
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import cores
from ddp_tutorial.live.backends import Backend, ClusterBackend, LocalBackend
from ddp_tutorial.live.controller import Controller
from ddp_tutorial.live.display import RankResults
from ddp_tutorial.live.worker_handle import WorkerHandle
from ddp_tutorial.processes.console import make_console
from ddp_tutorial.processes.spawn import (
    announce,
    cell_sources,
    interrupts_deferred,
    oversubscription_warning,
    terminate_all,
)
from ddp_tutorial.processes.transport import dump_call
from ddp_tutorial.world import COLLECTIVE_TIMEOUT, choose_backend, choose_device

_pools: "weakref.WeakSet[Ranks]" = weakref.WeakSet()


class Ranks(Controller):
    """Pool of `n` ranks that run until `stop` is called or the `with` block exits.

    Every call blocks until all participating ranks have finished. If a call fails on a rank, the pool stops the call on
    the other ranks, and raises `RankError` with the failed rank's traceback. If a rank waits too long in a collective,
    a `CollectiveError` reports the collectives that each rank has entered. An interrupt stops the call on all ranks.

    The ranks keep running after a failure. If the ranks have lost a connection, or have not finished the same
    collectives, they form a new process group. Recreate objects that use the old group, such as
    `DistributedDataParallel`. All other variables are kept. If a rank dies, `restart` replaces it.
    """

    def __init__(
        self,
        n: int,
        *,
        cluster: Cluster | None = None,
        threads: int | None = None,
        device: str = "auto",
        backend: str = "auto",
        wait_timeout: float = 10.0,
        collective_timeout: float = COLLECTIVE_TIMEOUT.total_seconds(),
        echo: bool = True,
    ) -> None:
        """Start the ranks, and form a process group.

        Args:
            n: Number of ranks.
            cluster: Cluster whose nodes run the ranks, on CPUs only. Each node runs the same number of ranks. If the
                cluster is not running, as in `cluster=Cluster(2, "1gbit")`, the pool starts it, and `stop` stops it.
            threads: Number of torch threads per rank. By default, the ranks share this machine's cores evenly.
            device: "cpu", "cuda" or "auto", as for `launch`.
            backend: "gloo", "nccl" or "auto", as for `launch`.
            wait_timeout: Maximum time in seconds that a rank may wait in a collective that not all ranks enter. The
                timeout does not apply while the missing ranks are still computing.
            collective_timeout: Timeout of the process group in seconds.
            echo: Whether to show the ranks' output, figures and displayed values.

        Raises:
            ConfigError: If an argument is invalid.
            RankError: If a rank failed to start.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ConfigError(f"'n' must be a positive integer such as 2, got {n!r}")
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ConfigError(
                f"'threads' must be a positive integer, or None to divide the cores evenly, got {threads!r}"
            )
        for name, seconds, is_valid in (
            ("wait_timeout", wait_timeout, wait_timeout > 0),
            ("collective_timeout", collective_timeout, 0 < collective_timeout < math.inf),
        ):
            if not is_valid:
                raise ConfigError(f"'{name}' must be a positive number of seconds, got {seconds!r}")
        place: Backend = LocalBackend(n) if cluster is None else ClusterBackend(n, cluster)
        if cluster is not None and device == "cuda":
            raise ConfigError("'device' must be 'cpu' or 'auto' on a cluster, got 'cuda'. The nodes have no GPU")
        kind = choose_device("cpu" if cluster is not None else device, local_size=n, backend=backend)
        carrier = choose_backend(backend, kind)
        threads = threads or max(1, cores() // n)
        super().__init__(n, place, threads, kind.type, carrier, wait_timeout, collective_timeout, echo)
        self.cluster = cluster
        try:
            with interrupts_deferred():
                _pools.add(self)
                self._place.open()
                self._workers = [WorkerHandle(rank) for rank in range(n)]
                self._start(self._workers)
            self._wait_until_started()
        except BaseException:
            self.stop()
            raise

    @property
    def description(self) -> str:
        """Summary of the pool, such as `2 ranks on cpu, gloo`. On a cluster, the summary includes the nodes and links.

        If many ranks share the CPU cores, a second line contains a warning.
        """
        text = announce(self.n, self.device, self.backend) + self._place.description
        return "\n".join(filter(None, [text, oversubscription_warning(self.n, self.device, cores())]))

    @property
    def nodes(self) -> int:
        """Number of hosts on which the ranks run."""
        return self._place.nodes

    def __enter__(self) -> "Ranks":
        """Return the pool, which is already running."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the ranks."""
        self.stop()

    def __repr__(self) -> str:
        """Return a summary such as `Ranks(2: alive)`, which also describes dead ranks."""
        dead = [f"rank {each.rank} {each.death}" for each in self._workers if each.death]
        return f"Ranks({self.n}: {', '.join(dead) or ('alive' if self._workers else 'stopped')})"

    # ------------------------------------------------------------------------------------------------ running calls

    def run(self, fn: Callable[..., Any], *args: Any, on: Iterable[int] | None = None) -> list[Any]:
        """Call `fn(world, *args)` on all ranks, or on the ranks in `on`, and return the results in rank order."""
        call = dump_call(fn, args)
        cells = {name: lines for name, lines in cell_sources().items() if name not in self._known}
        results = self._call("run", call, cells, on=on)
        if on is None:
            self._known |= set(cells)
        return [pickle.loads(result) for result in results.values()]

    def execute(
        self, code: str, on: Iterable[int] | None = None, *, name: str = "", cell: str = "", offset: int = 0
    ) -> RankResults:
        """Run source code in each rank's namespace, which contains `world`.

        Args:
            code: Source code to run.
            on: Ranks that run the code. The default is all ranks.
            name: File name for tracebacks.
            cell: Source code of the whole notebook cell.
            offset: Number of lines in `cell` before `code`.

        Returns:
            Dict that maps each rank to the text representation of the last expression's value. Values with a rich
            representation are displayed instead.
        """
        name = name or f"call {self._number + 1}"
        bundles = self._call("execute", code, name, cell or code, offset, on=on)
        console = make_console(self.echo)
        for rank, bundle in bundles.items():
            if bundle is not None and bundle.is_rich and self.echo:
                self._workers[rank].display(bundle, console)
        plain = {rank: each.text for rank, each in bundles.items() if each is not None and not each.is_rich}
        return RankResults(plain, self.n)

    def get(self, name: str, on: Iterable[int] | None = None) -> list[Any]:
        """Return the value of a variable or expression on each rank, in rank order."""
        return [pickle.loads(value) for value in self._call("get", name, on=on).values()]

    def put(self, /, on: Iterable[int] | None = None, **values: Any) -> None:
        """Assign variables on all ranks, or on the ranks in `on`, for example `ranks.put(rate=0.1)`."""
        self.assign(values, on)

    def assign(self, values: Mapping[str, Any], on: Iterable[int] | None = None) -> None:
        """Assign variables, as `put` does. A variable may have any name, even `on`.

        Raises:
            TypeError: If a value cannot be pickled.
        """
        try:
            sent = cloudpickle.dumps(values)
        except Exception as error:
            raise TypeError(f"{', '.join(values)} cannot be sent to another process: {error}") from None
        self._call("put", sent, on=on)

    def nothing(self) -> None:
        """Run an empty call on all ranks, to measure the overhead of calls."""
        self._call("nothing")

    def ask(self, kind: str, *content: Any, rank: int = 0) -> Any:
        """Send a completion or inspection request to one idle rank, and return the reply."""
        return self._call(kind, *content, on=[rank])[rank]

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each rank.

        Returns:
            A dict for each rank with the keys "rank", "node" (None without a cluster), "pid" (None for a dead rank),
            "state" ("ready", or how the rank died) and "memory" (in bytes).
        """
        with interrupts_deferred():
            self._receive(0.0)
        found = []
        for each in self._workers:
            memory = 0
            with suppress(psutil.Error):
                memory = 0 if each.death else psutil.Process(each.process.pid).memory_info().rss
            pid = None if each.death else each.process.pid
            state, node = each.death or "ready", self._place.node_of(each.rank)
            found.append({"rank": each.rank, "node": node, "pid": pid, "state": state, "memory": memory})
        return found

    def restart(self, *, everything: bool | None = None) -> list[int]:
        """Restart the dead ranks, or all ranks if no rank is dead, and form a new process group.

        The other ranks keep their variables. If a process cannot be started, call `restart` again.

        Args:
            everything: True restarts all ranks, and False restarts only dead ranks.

        Returns:
            The ranks that were restarted.

        Raises:
            RuntimeError: If the pool has been stopped.
        """
        if not self._workers:
            raise RuntimeError("the ranks have been stopped: create a new Ranks object")
        with interrupts_deferred():
            self._receive(0.0)
            dead = [each for each in self._workers if each.death]
            if everything is None:
                everything = not dead
            replaced = self._workers if everything else dead
            ranks = [each.rank for each in replaced]
            self._place.check(ranks)
            for each in replaced:
                each.close(self._selector)
            terminate_all([each.process for each in replaced if each.process], self._mark if everything else "")
            fresh = [WorkerHandle(rank) for rank in ranks]
            for each in fresh:
                self._workers[each.rank] = each
            self._known, self._has_group = set(), False
            self._start(fresh)
        self._wait_until_started()
        return ranks

    def stop(self) -> None:
        """Terminate all ranks and the processes that they started. A second call has no effect."""
        _pools.discard(self)
        with interrupts_deferred():
            workers, self._workers = self._workers, []
            for each in workers:
                each.close(self._selector)
            if workers:
                terminate_all([each.process for each in workers if each.process], self._mark)
            self._place.close()
            self._has_group = False


def _stop_all() -> None:
    for pool in list(_pools):
        pool.stop()


atexit.register(_stop_all)
