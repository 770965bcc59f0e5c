"""Measure each rank's memory usage and phase durations, to identify slow ranks, memory growth and imbalance."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.runs.rank_logs import LOG
from ddp_tutorial.runs.summaries import straggler
from ddp_tutorial.world import World

MB = 1e6
_EVERY = 0.2  # seconds between memory checks; one check takes a tenth of a short step
_UNEVEN, _WORTH_REPORTING_MB = 1.2, 100.0  # `imbalance` reports a rank that exceeds both limits
_RESERVED = "cuda_reserved_mb"


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the peak allocated and the peak reserved GPU memory in MB. On CPUs, return an empty dict."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"cuda_mb": allocated / MB, _RESERVED: reserved / MB}


def imbalance(memory: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Return the rank that uses much more memory than the median of the other ranks, or None if there is no such rank.

    `memory` contains each rank's memory usage in MB, by kind. The result is a dict such as
    `{"rank": 1, "kind": "rss_mb", "mb": 900.0, "others_mb": 500.0}`.
    """
    for kind, each in memory.items():
        most = each.index(max(each))
        others = statistics.median([*each[:most], *each[most + 1 :]] or each)
        if each[most] > max(_UNEVEN * others, others + _WORTH_REPORTING_MB):
            return {"rank": most, "kind": kind, "mb": each[most], "others_mb": round(others, 1)}
    return None


class Usage:
    """Tracker that sums one rank's phase durations, and gathers the resource usage of all ranks on request."""

    def __init__(self, world: World, limit_mb: float = 0, gpu_limit_mb: float = 0) -> None:
        """Create a tracker with zero usage.

        The rank logs a warning if its resident memory or reserved GPU memory exceeds a nonzero limit.
        """
        self.world, self.limit_mb, self.gpu_limit_mb = world, limit_mb, gpu_limit_mb
        self._process = psutil.Process()
        self._before: Counter[str] = Counter()  # seconds by phase until the last `gather`
        self._since: Counter[str] = Counter()  # seconds by phase since then
        self._peak_mb = 0.0
        self._looked = -math.inf
        self._warned: set[str] = set()  # limits that have been exceeded

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the duration of each phase of one step, in seconds."""
        self._since.update(seconds)

    def watch_memory(self) -> None:
        """Check this process's memory usage, at most a few times per second, and warn once if a limit is exceeded."""
        if time.monotonic() - self._looked > _EVERY:
            self._memory()

    def _memory(self) -> float:
        """Return the current resident memory of this process in MB."""
        self._looked = time.monotonic()
        used = self._process.memory_info().rss / MB
        self._peak_mb = max(self._peak_mb, used)
        self._warn("memory", "memory_limit_mb", used, self.limit_mb)
        reserved = gpu_memory(self.world.device).get(_RESERVED, 0.0)
        self._warn("GPU memory", "gpu_memory_limit_mb", reserved, self.gpu_limit_mb)
        return used

    def _warn(self, what: str, setting: str, used: float, limit: float) -> None:
        """Log a warning once if `used` exceeds `limit`. A limit of 0 disables the warning."""
        if not limit or used <= limit or setting in self._warned:
            return
        self._warned.add(setting)
        LOG.warning(
            "rank %d uses %.0f MB of %s, more than %s=%g. Use a smaller batch_size, more accumulation, or "
            "model.recompute=true",
            *(self.world.rank, used, what, setting, limit),
        )

    def gather(self) -> dict[str, Any]:
        """Return each rank's current memory (MB), and its phase durations (s) since the last call. Collective."""
        since, self._since = self._since, Counter()
        self._before.update(since)
        return self._gather(self._memory(), since)

    def gather_totals(self) -> dict[str, Any]:
        """Return each rank's peak memory (MB) and total phase durations (s), plus the straggler and the imbalance.

        Collective.
        """
        self._memory()
        seconds = self._before.copy()
        seconds.update(self._since)  # `+` would drop phases with zero seconds
        used = self._gather(self._peak_mb, seconds)
        memory = {kind: each for kind, each in used.items() if kind != "seconds"}
        return used | {"straggler": straggler(used["seconds"]), "imbalance": imbalance(memory)}

    def _gather(self, rss_mb: float, seconds: Mapping[str, float]) -> dict[str, Any]:
        memory = {"rss_mb": rss_mb, **gpu_memory(self.world.device)}
        ranks = all_gather(self.world, (memory, dict(seconds)))
        phases = dict.fromkeys(name for _, each in ranks for name in each)
        return {
            **{kind: [round(each[kind], 1) for each, _ in ranks] for kind in memory},
            "seconds": {name: [round(each.get(name, 0.0), 6) for _, each in ranks] for name in phases},
        }
