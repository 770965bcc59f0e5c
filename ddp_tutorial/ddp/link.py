"""Send gradients between ranks over the machine's own link or a simulated link.

`fit_link` estimates a link's latency and bandwidth from measurements. `SimulatedLink` delays all-reduces so that they
take as long as on a link with a given latency and bandwidth. Simulated links let you study slow networks locally.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.groups import shared_group
from ddp_tutorial.world import World, require_group


def fit_link(rounds: Sequence[float], nbytes: Sequence[float], seconds: Sequence[float]) -> LinkModel:
    """Return the latency and bandwidth that best fit the measurements.

    The fit minimizes the squared relative error, so small messages have the same weight as large messages.

    Args:
        rounds: The number of consecutive messages in each measurement.
        nbytes: The total number of bytes in each measurement.
        seconds: The duration of each measurement.

    Raises:
        ValueError: If the measurements do not determine both the latency and the bandwidth, for example because all
            messages have the same size.
    """
    measured = np.asarray(seconds, dtype=float)
    if not np.all(measured > 0):
        raise ValueError(f"a measured time must be above zero, got {measured.min()} seconds")
    columns = np.column_stack([rounds, nbytes]) / measured[:, None]
    scale = np.linalg.norm(columns, axis=0)
    rank, per_byte = 0, 0.0
    if scale.all():
        columns /= scale
        (latency, per_byte), _, rank, _ = np.linalg.lstsq(columns, np.ones_like(measured), rcond=1e-6)
    if rank < 2 or per_byte <= 0:
        raise ValueError(
            f"the latency and the bandwidth cannot be determined from the {len(measured)} measurements. Measure at "
            "least two sizes. The largest size must take noticeably longer than the smallest."
        )
    if latency < 0:  # then fit the bandwidth alone
        latency, per_byte = 0.0, columns[:, 1].sum()
    return LinkModel(float(latency / scale[0]), float(scale[1] / per_byte))


class Transfer(NamedTuple):
    """A completed all-reduce on a link. Times are in seconds on the machine's monotonic clock."""

    name: str
    nbytes: int
    issued: float
    start: float
    end: float


class Link(Protocol):
    """Interface of a link, which runs all-reduces in the order in which they are started.

    Every rank must start the same all-reduces in the same order. `observer` is called after each all-reduce.
    """

    observer: Callable[[Transfer], object] | None

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start summing `tensor` over all ranks, in place. The future's value is the summed tensor."""
        ...


class DirectLink:
    """The machine's own link, which runs `torch.distributed`'s all-reduce through NCCL or gloo.

    NCCL's future completes as soon as the work is enqueued. A separate thread therefore waits until the work has
    finished, and then calls the observer.
    """

    def __init__(self, world: World) -> None:
        """Create a link between all ranks of `world`."""
        require_group(world)
        self.world = world
        self.observer: Callable[[Transfer], object] | None = None
        # A single rank has no process group, even if its backend is NCCL.
        self._calls = _calls_of("direct link") if world.backend == "nccl" and world.size > 1 else None

    def __str__(self) -> str:
        """Return the name of the link."""
        return "direct link"

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start summing `tensor` over all ranks, in place."""
        if self.world.size == 1:
            return _done(tensor)
        issued = time.monotonic()

        def arrived(reduced: Future[list[torch.Tensor]]) -> torch.Tensor:
            reduced.value()  # raises if the all-reduce failed; `then` alone would not
            if self._calls is not None and self.observer is not None:
                event = torch.cuda.current_stream().record_event()
                self._calls.put(partial(self._report, name, tensor.nbytes, issued, event))
            else:
                self._report(name, tensor.nbytes, issued)
            return tensor

        return dist.all_reduce(tensor, async_op=True).get_future().then(arrived)

    def _report(self, name: str, nbytes: int, issued: float, event: torch.cuda.Event | None = None) -> None:
        """Report an all-reduce to the observer. On a GPU, first wait for `event`."""
        if self.observer is None:
            return
        if event is not None:
            event.synchronize()
        self.observer(Transfer(name, nbytes, issued, issued, time.monotonic()))


class SimulatedLink:
    """A link that simulates the latency and bandwidth specified by a `LinkModel`.

    Each all-reduce over N ranks takes as long as a ring all-reduce on the modeled link. The transfer time is 2 (N - 1)
    latencies plus 2 (N - 1) / N times the time to send the tensor's bytes. The transfer starts when the last rank has
    joined the all-reduce and the previous all-reduce has ended.

    A thread computes the sum with a real all-reduce and then sleeps until the simulated transfer time has elapsed.
    Meanwhile, the rank continues computing, as it would while a network card transfers the data. All simulated links of
    a rank share one thread, which runs one all-reduce at a time. A simulated link cannot be faster than the machine's
    own link.
    """

    def __init__(self, world: World, model: LinkModel) -> None:
        """Create a link. Raise `ConfigError` unless all ranks run on the CPU of one machine."""
        require_group(world)
        if world.device.type != "cpu" or world.local_size != world.size:
            raise ConfigError(f"with a simulated link, all ranks must run on the CPU of one machine, got {world}")
        self.world, self.model = world, model
        self.observer: Callable[[Transfer], object] | None = None
        self._free = 0.0  # when the link is free for the next all-reduce, the same on all ranks
        if world.size > 1:
            # A separate group, because the main thread's collectives could run before the link thread's collectives on
            # one rank and after them on a different rank.
            self._group = shared_group(range(world.size), "simulated link", backend="gloo", timeout=world.timeout)
            self._calls = _calls_of("simulated link")

    def __str__(self) -> str:
        """Return the latency and the bandwidth as text."""
        return f"simulated link: {self.model}"

    def all_reduce(self, tensor: torch.Tensor, name: str = "all-reduce") -> Future[torch.Tensor]:
        """Start summing `tensor` over all ranks, in place."""
        if self.world.size == 1:
            return _done(tensor)
        future: Future[torch.Tensor] = Future()
        self._calls.put(partial(self._carry, tensor, name, time.monotonic(), future))
        return future

    def _carry(self, tensor: torch.Tensor, name: str, issued: float, future: Future[torch.Tensor]) -> None:
        try:
            self._sum(tensor, name, issued)
        except Exception as error:  # raised in the main thread, when it waits for the future
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(tensor)

    def _sum(self, tensor: torch.Tensor, name: str, issued: float) -> None:
        joined = torch.tensor(issued, dtype=torch.float64)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=self._group)  # when the last rank joined
        start = max(float(joined), self._free)
        end = start + self.model.ring_seconds(tensor.nbytes, self.world.size)
        dist.all_reduce(tensor, group=self._group)
        time.sleep(max(0.0, end - time.monotonic()))
        self._free = end
        if self.observer is not None:
            self.observer(Transfer(name, tensor.nbytes, issued, start, time.monotonic()))


def _done(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future


Call = Callable[[], object]
_threads: WeakKeyDictionary[dist.ProcessGroup, dict[str, SimpleQueue[Call | None]]] = WeakKeyDictionary()


def _calls_of(name: str) -> SimpleQueue[Call | None]:
    """Return the call queue of the thread `name`. The thread runs until the default process group is destroyed."""
    default = dist.group.WORLD
    assert default is not None
    threads = _threads.setdefault(default, {})
    if name not in threads:
        calls: SimpleQueue[Call | None] = SimpleQueue()
        threads[name] = calls
        finalize(default, calls.put, None).atexit = False
        threading.Thread(target=_make_calls, args=(calls,), name=name, daemon=True).start()
    return threads[name]


def _make_calls(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it references a link, which would otherwise stay alive while this thread waits
