"""Ranks that stay: started once, called many times.

    with Ranks(2) as ranks:
        ranks.execute("import torch, torch.distributed as dist; x = torch.tensor(world.rank)")
        ranks.execute("dist.all_reduce(x)")
        ranks.get("x")                              # [tensor(1), tensor(1)]
        ranks.run(lambda world, y: world.rank + y, 10)   # [10, 11]

What a rank has, it keeps: variables live on after a call, and also after one that failed, was interrupted or hung.
Ranks are started and kept as `launch` does it: a pipe each, a store on the loopback interface, and none of them
outlives this process. With `Ranks(2, cluster=Cluster(2, "1gbit"))` they are on two hosts, with a link between them that
carries 1 Gbit/s; see `ddp_tutorial.cluster`.
"""

import atexit
import pickle
import weakref
from collections.abc import Callable, Iterable
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
    """`n` ranks that are alive until `stop`, or until the block ends that they are used in.

    - `cluster`: put them on its nodes, as many on each, where they talk through its links; on the CPU only. A cluster
      that is not up, such as `Cluster(2, "1gbit")`, is brought up, and ended by `stop`; one that is up is left so.
    - `threads`: torch's threads in each rank; by default the cores of this machine shared out evenly.
    - `device`, `backend`: as for `launch`.
    - `wait_timeout`: seconds that a rank may wait in a collective for one that does not come. Where it waits longer,
      the call ends with `CollectiveError`, which says who waits where; a rank that computes is waited for.
    - `echo`: show what the ranks print, draw and display.

    Every call blocks until all ranks that take part have ended it. Where it fails on a rank, `RankError` is raised with
    that rank's own lines; the others end it too, and all live on. Where ranks are then not in step with one another, or
    have lost one another, they form a new process group: what holds the old one, such as a `DistributedDataParallel`,
    has to be made again, and all else lives on. An interrupt ends the call on all ranks. A rank that has died is said
    to be dead, and `restart` replaces it.
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
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ConfigError(f"n={n!r}: should be a whole number of ranks, 1 or more, such as 2")
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ConfigError(f"threads={threads!r}: should be 1 or more, or None to share out the cores")
        for name, seconds in (("wait_timeout", wait_timeout), ("collective_timeout", collective_timeout)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: should be a positive number of seconds")
        place: Backend = LocalBackend(n) if cluster is None else ClusterBackend(n, cluster)
        if cluster is not None and device == "cuda":
            raise ConfigError("device='cuda': ranks on the nodes of a cluster are on the CPU. Use 'cpu' or 'auto'.")
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
            self._up()
        except BaseException:
            self.stop()
            raise

    @property
    def description(self) -> str:
        """What they are: `2 ranks on cpu, gloo`, on how many nodes, with which links; and what a crowd costs."""
        said = announce(self.n, self.device, self.backend) + self._place.description
        return "\n".join(filter(None, [said, oversubscription_warning(self.n, self.device, cores())]))

    @property
    def nodes(self) -> int:
        """How many hosts they are on."""
        return self._place.nodes

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        dead = [f"rank {each.rank} {each.death}" for each in self._workers if each.death]
        return f"Ranks({self.n}: {', '.join(dead) or ('alive' if self._workers else 'stopped')})"

    # ------------------------------------------------------------------------------------------------ what one does

    def run(self, fn: Callable[..., Any], *args: Any, on: Iterable[int] | None = None) -> list[Any]:
        """Call `fn(world, *args)` on all ranks, or those of `on`; their results, in order of rank."""
        call = dump_call(fn, args)
        cells = {name: lines for name, lines in cell_sources().items() if name not in self._known}
        results = self._call("run", call, cells, on=on)
        if on is None:
            self._known |= set(cells)
        return [pickle.loads(result) for result in results.values()]

    def execute(
        self, code: str, on: Iterable[int] | None = None, *, name: str = "", cell: str = "", offset: int = 0
    ) -> RankResults:
        """Run source in the namespace of each rank, where `world` is; what the last expression shows, by rank.

        `name` is what tracebacks call it; `cell` the whole cell, in which `code` begins after `offset` lines.
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
        """The value that a name, or an expression, has on each rank, in order of rank."""
        return [pickle.loads(value) for value in self._call("get", name, on=on).values()]

    def put(self, on: Iterable[int] | None = None, **values: Any) -> None:
        """Give names a value on all ranks, or those of `on`: `ranks.put(rate=0.1)`."""
        try:
            sent = cloudpickle.dumps(values)
        except Exception as error:
            raise TypeError(f"{', '.join(values)} cannot be sent to another process: {error}") from None
        self._call("put", sent, on=on)

    def nothing(self) -> None:
        """A call of nothing on all ranks, to measure what calls cost."""
        self._call("nothing")

    def ask(self, kind: str, *content: Any, rank: int = 0) -> Any:
        """For completion and inspection: one of these questions to one rank, which must not be busy."""
        return self._call(kind, *content, on=[rank])[rank]

    def status(self) -> list[dict[str, Any]]:
        """For each rank: its number, its node (None on this machine itself), its process, whether it is alive ("ready")
        or how it died, and its memory in bytes."""
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
        """Start ranks anew, and form a group: the dead ones where there are any, else all of them. The others keep
        their variables. `everything=True` starts all anew. Returns the ranks that were started."""
        if not self._workers:
            raise RuntimeError("these ranks have been stopped. Start new ones.")
        with interrupts_deferred():
            self._receive(0.0)
            dead = [each for each in self._workers if each.death]
            if everything is None:
                everything = not dead
            anew = self._workers if everything else dead
            ranks = [each.rank for each in anew]
            self._place.check(ranks)
            for each in anew:
                each.close(self._selector)
            terminate_all([each.process for each in anew], self._mark if everything else "")
            fresh = [WorkerHandle(rank) for rank in ranks]
            for each in fresh:
                self._workers[each.rank] = each
            self._known = set()
            self._start(fresh)
        self._up()
        return ranks

    def stop(self) -> None:
        """End all ranks, and what they have started. More often does no harm."""
        _pools.discard(self)
        with interrupts_deferred():
            people, self._workers = self._workers, []
            for each in people:
                each.close(self._selector)
            if people:
                terminate_all([each.process for each in people if each.process], self._mark)
            self._place.close()
            self._has_group = False


def _stop_all() -> None:
    for pool in list(_pools):
        pool.stop()


atexit.register(_stop_all)
