"""Does a rank keep more memory after every step? A leak ends a run after hours; its slope shows after a minute."""

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import ClassVar

import psutil
import torch

from ddp_tutorial.debug.detector import Detector, Finding, Program, Said, named
from ddp_tutorial.debug.taps import Seen

MB = 1e6
# The first steps allocate what is then used again.
_WARM_UP = 10
# A rank works out its slope once in so many steps.
_EVERY = 10


class MemoryGrowth(Detector):
    """Ranks whose own memory grows by more than `mb_per_step`, in each quarter of the last `window` steps. On a GPU,
    that which torch has allocated there is looked at as well.

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
        self._process = psutil.Process()
        self._from = program.step + _WARM_UP
        self._used = [deque[float](maxlen=self.window), deque[float](maxlen=self.window)]
        self.peak_mb = [0.0] * program.world.size
        self._told: set[int] = set()

    def say(self, seen: Seen) -> Sequence[float]:
        used = self._process.memory_info()
        device = self.program.world.device
        on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        values = [(used.rss - getattr(used, "shared", 0)) / MB, on_gpu / MB]
        step, growth = self.program.step, 0.0
        if step >= self._from:
            for kept, value in zip(self._used, values, strict=True):
                kept.append(value)
            if step % _EVERY == 0 and len(self._used[0]) == self.window:
                growth = max(growth_per_step(list(kept)) for kept in self._used)
        return [max(values), growth]

    def judge(self, step: int, said: Said) -> list[Finding]:
        self.peak_mb = [max(most, used) for most, (used, _) in zip(self.peak_mb, said, strict=True)]
        by_rank = {rank: growth for rank, (_, growth) in enumerate(said)}
        ranks = tuple(rank for rank, each in by_rank.items() if each > self.mb_per_step and rank not in self._told)
        if not ranks:
            return []
        self._told |= set(ranks)
        told = ", ".join(f"{by_rank[rank]:.1f} MB a step on rank {rank}" for rank in ranks)
        message = (
            f"{named(ranks)} {'keeps' if len(ranks) == 1 else 'keep'} more memory after each step: {told}, over "
            f"{self.window} steps. Often it is a loss that is kept with its graph: keep loss.item() or loss.detach()"
        )
        return [Finding(self.name, step, ranks, message, "warning", "memory")]


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
