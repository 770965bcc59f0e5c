"""Detect ranks whose memory use grows with each step, and identify the tensors responsible.

A memory leak may crash a run only after hours, but the growth is visible after a minute. Listing all live tensors takes
about a tenth of a second. The detector therefore lists the tensors only twice, after detecting growth. If a kind of
tensor leaks, the second list contains more tensors of this kind.
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
from ddp_tutorial.config import named_ranks
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import StepObservation

MB = 1e6
# The first steps allocate memory that later steps reuse.
_WARM_UP = 10
# Number of steps between two calculations of the slope, and between the two lists of live tensors.
_EVERY = 10
_MOST_REPORTED = 3


class MemoryGrowth(Detector):
    """Detector of ranks whose private memory grows by more than `mb_per_step` MB per step.

    The memory must grow from each quarter of the last `window` steps to the next. On a GPU, the detector also checks
    the memory that PyTorch has allocated. The detector reports a finding at least ten steps after it detects the
    growth. The finding lists the shapes and dtypes of the tensors whose number has increased in the meantime. Shared
    memory, such as a memory-mapped file, is not counted.
    """

    name: ClassVar[str] = "memory"
    size: ClassVar[int] = 1

    def __init__(self, mb_per_step: float = 0.5, window: int = 40) -> None:
        """Store the arguments.

        Args:
            mb_per_step: The growth in MB per step above which a rank is reported.
            window: The number of steps over which growth is measured.

        Raises:
            ValueError: If `mb_per_step` is not positive, or if `window` is below 8.
        """
        if mb_per_step <= 0 or window < 8:
            raise ValueError(
                "'mb_per_step' must be positive, and 'window' must be at least 8 steps, got "
                f"mb_per_step={mb_per_step} and window={window}"
            )
        self.mb_per_step, self.window = mb_per_step, window

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._own = ProcessMemory()
        self._from = program.step + _WARM_UP
        self._used = [deque[float](maxlen=self.window), deque[float](maxlen=self.window)]
        self._reported: set[int] = set()
        self._before: dict[Kind, LiveTensors] = {}  # the live tensors when the growth was detected
        self._slopes: dict[int, float] = {}  # suspected rank -> growth in MB per step
        self._listed_at = 0

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return the growth of this rank's memory use in MB per step."""
        device = self.program.world.device
        on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        values = [self._own() / MB, on_gpu / MB]
        step, growth = self.program.step, 0.0
        if step >= self._from:
            for kept, value in zip(self._used, values, strict=True):
                kept.append(value)
            if step % _EVERY == 0 and len(self._used[0]) == self.window:
                growth = max(growth_per_step(list(kept)) for kept in self._used)
        return [growth]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return a finding at least ten steps after memory growth is detected on a rank. Collective."""
        if self._slopes:
            return self._compare_lists(step)
        slopes = {rank: growth for rank, [growth] in enumerate(reports) if growth > self.mb_per_step}
        self._slopes = {rank: growth for rank, growth in slopes.items() if rank not in self._reported}
        if self.program.world.rank in self._slopes:
            self._before = live_tensors()
        self._listed_at = self.program.step
        return []

    def _compare_lists(self, step: int) -> list[Finding]:
        """Compare the two lists of live tensors if the first list is at least `_EVERY` steps old. Collective."""
        between = self.program.step - self._listed_at
        if between < _EVERY:
            return []
        slopes, self._slopes = self._slopes, {}
        ranks = tuple(slopes)
        self._reported |= set(ranks)
        mine = describe_growth(self._before, live_tensors()) if self.program.world.rank in ranks else []
        self._before = {}
        of_ranks = self.program.gather(mine)
        description = ", ".join(f"{slopes[rank]:.1f} MB per step on rank {rank}" for rank in ranks)
        kinds = "; ".join(f"on rank {rank}, {', '.join(of_ranks[rank]) or 'none'}" for rank in ranks)
        where = next((of_ranks[rank][0] for rank in ranks if of_ranks[rank]), "memory")
        message = (
            f"{named_ranks(ranks)} {'uses' if len(ranks) == 1 else 'use'} more memory after each step: {description}, "
            f"over {self.window} steps. New tensors in the last {between} steps, according to Python's garbage "
            f"collector: {kinds}. A common cause is a stored loss that keeps its graph: store loss.item() or "
            "loss.detach()"
        )
        return [Finding(self.name, step, ranks, message, "warning", where)]


class Kind(NamedTuple):
    """The properties by which live tensors are grouped.

    Attributes:
        has_graph: Whether the tensors are outputs of an autograd graph.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    has_graph: bool

    def __str__(self) -> str:
        """Return a description of the properties."""
        where = "" if self.device == "cpu" else f" on {self.device}"
        graph = " with its autograd graph" if self.has_graph else ""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{where}{graph}"


class LiveTensors(NamedTuple):
    """Number and total bytes of one kind of tensor. The bytes of a shared storage count only for its largest tensor."""

    number: int = 0
    nbytes: int = 0


def live_tensors() -> dict[Kind, LiveTensors]:
    """Return the number and the total size of this rank's live tensors, by kind.

    Python's garbage collector lists the tensors, so tensors that only C++ objects reference are not included. For
    example, an autograd graph's output is included, but the graph's activations are not.
    """
    numbers: Counter[Kind] = Counter()
    largest: dict[int, tuple[int, int, Kind]] = {}  # storage -> bytes of the largest tensor, bytes of the storage, kind
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):  # isinstance would query the class of a proxy
            continue
        try:
            kind = Kind(tuple(thing.shape), thing.dtype, str(thing.device), thing.grad_fn is not None)
            storage, size, viewed = storage_id(thing), thing.untyped_storage().nbytes(), thing.nbytes
        except (RuntimeError, NotImplementedError):  # a tensor type without its own storage
            continue
        numbers[kind] += 1
        if storage not in largest or viewed > largest[storage][0]:
            largest[storage] = viewed, size, kind
    nbytes: Counter[Kind] = Counter()
    for _, size, kind in largest.values():
        nbytes[kind] += size
    return {kind: LiveTensors(number, nbytes[kind]) for kind, number in numbers.items()}


def describe_growth(before: Mapping[Kind, LiveTensors], now: Mapping[Kind, LiveTensors]) -> list[str]:
    """Describe each kind of tensor whose number has grown, largest first, as in "10 of [3, 4] float32 (1.2 MB)"."""
    nothing = LiveTensors()
    grown = {
        kind: LiveTensors(number - before.get(kind, nothing).number, nbytes - before.get(kind, nothing).nbytes)
        for kind, (number, nbytes) in now.items()
        if number > before.get(kind, nothing).number
    }
    first = sorted(grown, key=lambda kind: (grown[kind].nbytes, grown[kind].number), reverse=True)[:_MOST_REPORTED]
    return [f"{grown[kind].number} of {kind} ({grown[kind].nbytes / MB:.1f} MB)" for kind in first]


class ProcessMemory:
    """Callable that returns this process's private memory in bytes.

    On Linux, the object keeps /proc/self/statm open, because a read takes only 1 us, whereas psutil takes 70 us.
    """

    def __init__(self) -> None:
        """Open /proc/self/statm if it exists."""
        self._statm: int | None = None
        with suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
            weakref.finalize(self, os.close, self._statm)

    def __call__(self) -> int:
        """Return the resident memory minus the shared memory, in bytes."""
        if self._statm is None:
            used = psutil.Process().memory_info()
            return int(used.rss - getattr(used, "shared", 0))
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def growth_per_step(used: Sequence[float]) -> float:
    """Return the growth of `used` per step if `used` grows from each quarter of its values to the next, otherwise 0.

    The growth is the median of the slopes between all pairs of values. This median (the Theil-Sen estimator) is robust
    against single jumps. Growth between only some of the quarters is a single or a temporary increase, not a leak.
    """
    length = len(used)
    quarters = [statistics.median(used[i * length // 4 : (i + 1) * length // 4]) for i in range(4)]
    rises = [b - a for a, b in pairwise(quarters)]
    if min(rises) < 0.1 * sum(rises) or sum(rises) <= 0:
        return 0.0
    return statistics.median((used[j] - used[i]) / (j - i) for i, j in combinations(range(length), 2))
