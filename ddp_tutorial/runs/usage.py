"""Measure the memory and the seconds by phase of each rank, to identify slow ranks and memory growth."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.runs.rank_logs import LOG
from ddp_tutorial.runs.summaries import straggler
from ddp_tutorial.world import World

MB = 1e6
_EVERY = 0.2  # seconds between memory checks; one check takes a tenth of a short step


class Usage:
    """The resource usage of one rank. It sums the seconds by phase, and gathers the usage of all ranks on request."""

    def __init__(self, world: World, limit_mb: float = 0) -> None:
        """Start with zero usage.

        Args:
            world: This rank's world.
            limit_mb: Resident memory in MB above which the rank logs a warning; 0 for no limit.
        """
        self.world, self.limit_mb = world, limit_mb
        self._process = psutil.Process()
        self._before: Counter[str] = Counter()  # seconds by phase until the last `gather`
        self._since: Counter[str] = Counter()  # seconds by phase since then
        self._peak_mb = 0.0
        self._looked = -math.inf
        self._warned = False

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of one step, by phase."""
        self._since.update(seconds)

    def watch_memory(self) -> None:
        """Check the memory of this process, at most a few times a second, and warn once if it exceeds the limit."""
        if time.monotonic() - self._looked > _EVERY:
            self._memory()

    def _memory(self) -> float:
        """Return the current resident memory of this process in MB."""
        self._looked = time.monotonic()
        used = self._process.memory_info().rss / MB
        self._peak_mb = max(self._peak_mb, used)
        if self.limit_mb and used > self.limit_mb and not self._warned:
            self._warned = True
            LOG.warning(
                "rank %d uses %.0f MB of memory, more than memory_limit_mb=%g: a smaller batch_size, more accumulation "
                "or model.recompute=true would need less",
                self.world.rank,
                used,
                self.limit_mb,
            )
        return used

    def gather(self) -> dict[str, Any]:
        """Return the current memory of each rank in MB, and its seconds by phase since the last call. Collective."""
        since, self._since = self._since, Counter()
        self._before.update(since)
        return self._gather(self._memory(), since)

    def gather_totals(self) -> dict[str, Any]:
        """Return each rank's peak memory in MB, its seconds by phase over the whole run, and the straggler.

        Collective.
        """
        self._memory()
        seconds = self._before.copy()
        seconds.update(self._since)  # `+` would drop phases with zero seconds
        used = self._gather(self._peak_mb, seconds)
        return used | {"straggler": straggler(used["seconds"])}

    def _gather(self, rss_mb: float, seconds: Mapping[str, float]) -> dict[str, Any]:
        is_gpu = self.world.device.type == "cuda"
        cuda_mb = torch.cuda.max_memory_allocated(self.world.device) / MB if is_gpu else 0.0
        ranks = all_gather(self.world, (rss_mb, cuda_mb, dict(seconds)))
        phases = dict.fromkeys(name for _, _, each in ranks for name in each)
        used: dict[str, Any] = {
            "rss_mb": [round(rss, 1) for rss, _, _ in ranks],
            "seconds": {name: [round(each.get(name, 0.0), 6) for _, _, each in ranks] for name in phases},
        }
        if is_gpu:
            used["cuda_mb"] = [round(cuda, 1) for _, cuda, _ in ranks]
        return used
