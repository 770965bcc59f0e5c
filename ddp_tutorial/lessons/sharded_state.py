"""Helpers for notebook 17_sharded_state that record or delay collectives, time a model's blocks, and count bytes."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_LEAST_BYTES = 256  # smaller messages are losses and counts
# The kind of each function, and the number of times that a rank sends (W - 1) / W of the full tensor.
_KINDS = {
    "all_reduce": ("all-reduce", 2),
    "all_gather_into_tensor": ("gather", 1),
    "all_gather_single": ("gather", 1),
    "reduce_scatter_tensor": ("scatter", 1),
    "reduce_scatter_single": ("scatter", 1),
    "all_to_all_single": ("scatter", 1),
}


class Transfer(NamedTuple):
    """A collective on this rank.

    Attributes:
        kind: "all-reduce", "gather" or "scatter".
        nbytes: The number of bytes that this rank sends with a bandwidth-optimal algorithm.
        ranks: The ranks of the process group.
        start: The time, in seconds, at which the link starts this transfer.
        end: The time, in seconds, at which the link completes this transfer.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    start: float
    end: float


class Network:
    """Context manager that records this rank's collectives in `transfers`.

    If `megabytes_per_second` is set, gathers and scatters are delayed to simulate a link with this bandwidth. The link
    carries one transfer at a time, while the rank computes. All-reduces are then neither delayed nor recorded, so use
    DDP's `simulated_link` to delay them (see `follow`). Collectives that PyTorch starts in C++ are never recorded.
    """

    def __init__(self, megabytes_per_second: float | None = None) -> None:
        """Store the bandwidth. If the bandwidth is None, transfers are not delayed."""
        self.rate = None if megabytes_per_second is None else megabytes_per_second * 1e6
        self.transfers: list[Transfer] = []
        self._free = 0.0  # the time at which the link has carried all transfers so far

    def __enter__(self) -> "Network":
        """Replace the functions of `torch.distributed`."""
        self._real: dict[str, Callable[..., Any]] = {
            name: getattr(dist, name) for name in _KINDS if hasattr(dist, name)
        }
        for name in self._real:
            setattr(dist, name, partial(self._call, name))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the functions of `torch.distributed`."""
        for name, function in self._real.items():
            setattr(dist, name, function)

    def _call(self, name: str, *tensors: Any, async_op: bool = False, **options: Any) -> Any:
        (kind, times), group = _KINDS[name], options.get("group")
        given = [*tensors, *options.values()]
        full = max((t.nbytes for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()), default=0)
        start = end = time.monotonic()
        is_slow = self.rate is not None and kind != "all-reduce" and full >= _LEAST_BYTES
        if full >= _LEAST_BYTES:
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            nbytes = times * full * (len(ranks) - 1) // len(ranks)
            if is_slow:
                start = max(start, self._free)
                end = self._free = start + nbytes / (self.rate or 1.0)
            if is_slow or self.rate is None:
                self.transfers.append(Transfer(kind, nbytes, ranks, start, end))
        work = self._real[name](*tensors, async_op=async_op or is_slow, **options)
        if not is_slow:
            return work
        delayed = _Delayed(work, end)
        return delayed if async_op else delayed.wait()

    def follow(self, link: Any) -> None:
        """Record the all-reduces of a `ddp_tutorial.ddp.link.Link`."""

        def record(transfer: Any) -> None:
            self.transfers.append(Transfer("all-reduce", transfer.nbytes, (), transfer.start, transfer.end))

        link.observer = record

    def sent(self, kind: str = "") -> int:
        """Return the number of bytes in all transfers, or in the transfers of one kind."""
        return sum(transfer.nbytes for transfer in self.transfers if kind in ("", transfer.kind))


class _Delayed:
    """Asynchronous handle that completes when the handle `work` completes, but not before the time `end`."""

    def __init__(self, work: Any, end: float) -> None:
        self.work, self.end = work, end

    def is_completed(self) -> bool:
        return bool(self.work.is_completed()) and time.monotonic() >= self.end

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.end - time.monotonic()))


def watch(blocks: Iterable[nn.Module]) -> dict[str, list[float]]:
    """Return a dict in which each step stores the blocks' times in seconds, such as "forward 0" -> [start, end].

    A block's forward pass lasts from its forward pre-hook to its forward hook. A block's backward pass starts when its
    output's gradient is ready, and ends when its last parameter gradient is ready.
    """
    times: dict[str, list[float]] = {}

    def forward_starts(number: int, *_: object) -> None:
        times[f"forward {number}"] = [time.monotonic()]

    def forward_ends(number: int, block: nn.Module, inputs: object, output: torch.Tensor) -> None:
        times[f"forward {number}"].append(time.monotonic())
        output.register_hook(partial(backward_starts, number))

    def backward_starts(number: int, _: object) -> None:
        times[f"backward {number}"] = [time.monotonic(), 0.0]

    def gradient_arrives(number: int, _: object) -> None:
        times[f"backward {number}"][1] = time.monotonic()

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(forward_starts, number))
        block.register_forward_hook(partial(forward_ends, number))
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(partial(gradient_arrives, number))
    return times


class Span(NamedTuple):
    """An interval from `start` to `end`, in seconds, in one lane of a figure (see `figures.lanes`)."""

    lane: str
    name: str
    start: float
    end: float


def spans(computed: Mapping[str, Sequence[float]], transfers: Iterable[Transfer]) -> list[Span]:
    """Return spans for the intervals that `watch` and `Network` recorded in a step.

    The name of a gather or a scatter contains the index of its block. All-reduces are numbered consecutively.
    """
    blocks = list(range(len(computed) // 2))
    order = {"gather": ["", *blocks, *blocks[::-1]], "scatter": [*blocks[::-1], ""], "all-reduce": range(99)}
    numbers = {kind: iter(each) for kind, each in order.items()}
    found = [Span("compute", name, *times) for name, times in computed.items()]
    return found + [Span("link", f"{t.kind} {next(numbers[t.kind])}", t.start, t.end) for t in transfers]


class TimedStep(NamedTuple):
    """A timed step, with its duration in seconds, the block times that `watch` recorded, and the network transfers."""

    seconds: float
    computed: dict[str, list[float]]
    transfers: list[Transfer]


def fastest(
    steps: Mapping[str, Callable[[], object]],
    watched: Mapping[str, dict[str, list[float]]],
    network: Network,
    repeats: int = 6,
) -> dict[str, TimedStep]:
    """Run the steps alternately, and return each step's fastest repeat, excluding the first repeat. Collective.

    The first repeat is excluded because the package's first step also checks the loss function, which requires
    additional forward passes.
    """
    found: dict[str, TimedStep] = {}
    for number, (name, step) in enumerate(list(steps.items()) * (1 + repeats)):
        network.transfers = []
        dist.barrier()
        begin = time.monotonic()
        step()
        seconds = time.monotonic() - begin
        if number >= len(steps) and (name not in found or seconds < found[name].seconds):
            found[name] = TimedStep(seconds, dict(watched[name]), network.transfers)
    return found


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the tensors' size in bytes. A repeated tensor counts once, and a DTensor counts as its local shard."""
    once = {id(tensor): tensor for tensor in tensors if tensor is not None}.values()
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in once)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the sizes, in bytes, of the parameters, gradients and optimizer state that this rank stores."""
    parameters = list(model.parameters())
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(parameter.grad for parameter in [*parameters, *stepped]),
        "optimizer": local_bytes(v for state in optimizer.state.values() for k, v in state.items() if k != "step"),
    }
