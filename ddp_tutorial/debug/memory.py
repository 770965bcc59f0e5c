"""Does a rank keep more memory after every step, and of what? A leak ends a run after hours; its slope shows after a
minute.

To list all tensors that live takes about a tenth of a second, so that is done twice only, once a slope has shown: what
has become more from one list to the other is what grows.
"""

import gc
import os
import statistics
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations, pairwise
from typing import ClassVar, NamedTuple

import psutil
import torch

from ddp_tutorial.compat import storage_id
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program, named
from ddp_tutorial.debug.instrumentation import StepObservation

MB = 1e6
# The first steps allocate what is then used again.
_WARM_UP = 10
# A rank works out its slope once in so many steps, and looks again so many later at what lives.
_EVERY = 10
_MOST_TOLD = 3


class MemoryGrowth(Detector):
    """Ranks whose own memory grows by more than `mb_per_step`, in each quarter of the last `window` steps. On a GPU,
    that which torch has allocated there is looked at as well. It is told ten steps after it was seen, with the tensors
    that have become more in these steps, by shape and type, as Python's garbage collector knows them (`live_tensors`).

    Memory that is shared, such as a mapped file, does not count. `peak_mb` has the most of each rank so far.
    """

    name: ClassVar[str] = "memory"
    size: ClassVar[int] = 2

    def __init__(self, mb_per_step: float = 0.5, window: int = 40) -> None:
        if mb_per_step <= 0 or window < 8:
            raise ValueError(f"mb_per_step={mb_per_step}, window={window}: should be above 0, and 8 steps or more")
        self.mb_per_step, self.window = mb_per_step, window
        self.peak_mb: list[float] = []

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._own = ProcessMemory()
        self._from = program.step + _WARM_UP
        self._used = [deque[float](maxlen=self.window), deque[float](maxlen=self.window)]
        self.peak_mb = [0.0] * program.world.size
        self._told: set[int] = set()
        self._before: dict[Kind, LiveTensors] = {}  # what lived when a slope had shown
        self._slopes: dict[int, float] = {}  # of the ranks that are looked at: MB a step
        self._listed_at = 0

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        device = self.program.world.device
        on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        values = [self._own() / MB, on_gpu / MB]
        step, growth = self.program.step, 0.0
        if step >= self._from:
            for kept, value in zip(self._used, values, strict=True):
                kept.append(value)
            if step % _EVERY == 0 and len(self._used[0]) == self.window:
                growth = max(growth_per_step(list(kept)) for kept in self._used)
        return [max(values), growth]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        self.peak_mb = [max(most, used) for most, (used, _) in zip(self.peak_mb, reports, strict=True)]
        if self._slopes:
            return self._look_again(step)
        slopes = {rank: growth for rank, (_, growth) in enumerate(reports) if growth > self.mb_per_step}
        self._slopes = {rank: growth for rank, growth in slopes.items() if rank not in self._told}
        if self.program.world.rank in self._slopes:
            self._before = live_tensors()
        self._listed_at = self.program.step
        return []

    def _look_again(self, step: int) -> list[Finding]:
        """What grows, when there has been some time for it. The same on all ranks, but for what lives."""
        between = self.program.step - self._listed_at
        if between < _EVERY:
            return []
        slopes, self._slopes = self._slopes, {}
        ranks = tuple(slopes)
        self._told |= set(ranks)
        mine = describe_growth(self._before, live_tensors()) if self.program.world.rank in ranks else []
        self._before = {}
        of_ranks = self.program.gather(mine)
        told = ", ".join(f"{slopes[rank]:.1f} MB a step on rank {rank}" for rank in ranks)
        kinds = "; ".join(f"on rank {rank}, {', '.join(of_ranks[rank]) or 'none'}" for rank in ranks)
        where = next((of_ranks[rank][0] for rank in ranks if of_ranks[rank]), "memory")
        message = (
            f"{named(ranks)} {'keeps' if len(ranks) == 1 else 'keep'} more memory after each step: {told}, over "
            f"{self.window} steps. Of the tensors that Python's garbage collector knows there are more than {between} "
            f"steps ago: {kinds}. Often it is a loss that is kept with its graph: keep loss.item() or loss.detach()"
        )
        return [Finding(self.name, step, ranks, message, "warning", where)]


class Kind(NamedTuple):
    """What tensors have in common that are counted together. `has_graph`: they are the end of what autograd keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    has_graph: bool

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        graph = ", with the graph that has made it" if self.has_graph else ""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{where}{graph}"


class LiveTensors(NamedTuple):
    """How many tensors of a kind there are, and their bytes; memory that several share counts for the largest."""

    number: int = 0
    nbytes: int = 0


def live_tensors() -> dict[Kind, LiveTensors]:
    """All tensors that Python objects hold on this rank, as the garbage collector lists them. What only C++ holds, such
    as the activations of a graph, is not among them; the tensor at the end of that graph is."""
    numbers: Counter[Kind] = Counter()
    largest: dict[int, tuple[int, int, Kind]] = {}  # of each storage: the bytes that a tensor shows, and its own
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):  # isinstance would ask a proxy for its class
            continue
        try:
            kind = Kind(tuple(thing.shape), thing.dtype, str(thing.device), thing.grad_fn is not None)
            storage, size, shown = storage_id(thing), thing.untyped_storage().nbytes(), thing.nbytes
        except (RuntimeError, NotImplementedError):  # a kind of tensor without memory of its own
            continue
        numbers[kind] += 1
        if storage not in largest or shown > largest[storage][0]:
            largest[storage] = shown, size, kind
    nbytes: Counter[Kind] = Counter()
    for _, size, kind in largest.values():
        nbytes[kind] += size
    return {kind: LiveTensors(number, nbytes[kind]) for kind, number in numbers.items()}


def describe_growth(before: Mapping[Kind, LiveTensors], now: Mapping[Kind, LiveTensors]) -> list[str]:
    """The kinds of which there are more, those first that have grown by most bytes: "10 of [3, 4] float32 (1.2 MB)"."""
    nothing = LiveTensors()
    grown = {
        kind: LiveTensors(number - before.get(kind, nothing).number, nbytes - before.get(kind, nothing).nbytes)
        for kind, (number, nbytes) in now.items()
        if number > before.get(kind, nothing).number
    }
    first = sorted(grown, key=lambda kind: (grown[kind].nbytes, grown[kind].number), reverse=True)[:_MOST_TOLD]
    return [f"{grown[kind].number} of {kind} ({grown[kind].nbytes / MB:.1f} MB)" for kind in first]


class ProcessMemory:
    """The bytes of this process that it shares with no other, each time it is called.

    On Linux, /proc/self/statm stays open: to read it takes a microsecond, and psutil takes 70.
    """

    def __init__(self) -> None:
        self._statm: int | None = None
        with suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
            weakref.finalize(self, os.close, self._statm)

    def __call__(self) -> int:
        if self._statm is None:
            used = psutil.Process().memory_info()
            return int(used.rss - getattr(used, "shared", 0))
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def growth_per_step(used: Sequence[float]) -> float:
    """By how much `used` grows from one value to the next: the median of the slopes between all pairs of values (Theil
    and Sen), which single jumps do not move. 0 where it has not grown in each quarter: it has been growing then, or it
    will go down again, but it does not leak."""
    length = len(used)
    quarters = [statistics.median(used[i * length // 4 : (i + 1) * length // 4]) for i in range(4)]
    rises = [b - a for a, b in pairwise(quarters)]
    if min(rises) < 0.1 * sum(rises) or sum(rises) <= 0:
        return 0.0
    return statistics.median((used[j] - used[i]) / (j - i) for i, j in combinations(range(length), 2))
