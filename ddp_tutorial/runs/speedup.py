"""Compare the throughput of runs with the throughput of a baseline. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_tutorial.config import ConfigError
from ddp_tutorial.runs.summaries import Summary, differing_settings

# Settings that determine the work of a step. Throughput can only be compared between runs with the same values.
_WORK = ("task", "corpus", "tokenizer", "model", "batch_size", "per_device_train_batch_size")


@dataclass(frozen=True)
class Speedup:
    """The throughput of a run relative to a baseline.

    Attributes:
        speedup: Throughput divided by the baseline's throughput; None if the runs are not comparable.
        efficiency: Speedup divided by the ratio of the world sizes.
    """

    speedup: float | None = None
    efficiency: float | None = None


def default_baseline(summaries: Sequence[Summary]) -> Summary | None:
    """Return the run with the fewest ranks among comparable runs, or None if no two runs are comparable."""
    rated = [run for run in summaries if run.rate and run.state in {"finished", "stopped"}]
    shared = [run for run in rated if any(run is not other and not different_work(run, other) for other in rated)]
    return min(shared, key=lambda run: run.ranks, default=None)


def require_throughput(run: Summary) -> Summary:
    """Return `run` if its log contains a throughput.

    Raises:
        ConfigError: If the log does not contain a throughput.
    """
    if not run.rate:
        raise ConfigError(f"the baseline run {run.path} did not log its throughput")
    return run


def speedup(run: Summary, baseline: Summary | None) -> Speedup:
    """Return a run's speedup and efficiency, which are None if a throughput is missing or the work differs."""
    if baseline is None or not baseline.rate or not run.rate or different_work(run, baseline):
        return Speedup()
    factor = run.rate / baseline.rate
    return Speedup(factor, factor * baseline.ranks / run.ranks)


def different_work(run: Summary, baseline: Summary) -> list[str]:
    """Return the settings that differ between two runs and affect the work of a step."""
    return [name for name in differing_settings([run, baseline]) if name.split(".")[0] in _WORK]


def not_comparable(summaries: Sequence[Summary], baseline: Summary) -> str | None:
    """Return a message that lists the runs whose work differs from the baseline's, or None if no run differs."""
    others = {run.path: names for run in summaries if (names := different_work(run, baseline))}
    if not others:
        return None
    listed = "; ".join(f"{path} ({', '.join(names)})" for path, names in others.items())
    return f"the speedup over {baseline.path} is not defined for runs with different settings: {listed}"
