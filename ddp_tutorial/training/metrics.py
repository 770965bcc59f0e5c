"""Support validation metrics that are not a sum divided by a count, such as the area under the ROC curve."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ddp_tutorial.compat import tree_map
from ddp_tutorial.config import ConfigError
from ddp_tutorial.training.callbacks import require_same_names
from ddp_tutorial.world import World


class Metric(Protocol):
    """A metric for one evaluation. Each rank updates its own object, and computes the value from all ranks' states."""

    def update(self, model: Any, batch: Any) -> None:
        """Add a batch. The model is in evaluation mode, and no gradients are recorded."""
        ...

    def state(self) -> Any:
        """Return the accumulated state as tensors, or as dicts, lists or tuples of tensors."""
        ...

    def compute(self, states: Sequence[Any]) -> Any:
        """Return a number computed from `states`, the states of all ranks that have samples, in rank order."""
        ...


MakeMetric = Callable[[], Metric]


def check_metrics(world: World, metrics: Mapping[str, MakeMetric] | None) -> dict[str, MakeMetric]:
    """Return the metrics as a dict. Collective.

    Raises:
        ConfigError: If a value is not a class or a function, or if the metrics differ between ranks.
    """
    metrics = dict(metrics or {})
    problem = ""
    for name, make in metrics.items():
        if not callable(make):
            kind = type(make).__name__
            problem = (
                f"'metrics' must contain classes or functions that construct a metric, got an object of type {kind} "
            )
            problem += f"as {name!r}: pass the class, as in {{{name!r}: {kind}}}"
    require_same_names(world, "metrics", list(metrics), problem)
    return metrics


def state_of(metric: Metric) -> Any:
    """Return a metric's state with its tensors on the CPU, ready to be sent to all ranks."""
    return tree_map(lambda value: value.detach().cpu() if torch.is_tensor(value) else value, metric.state())


def value_of(name: str, metric: Metric, states: Sequence[Any]) -> float:
    """Return the value that a metric computes from the ranks' states.

    Raises:
        ConfigError: If the value is not a number.
    """
    value = metric.compute(states)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"compute() of metric {name!r} must return a number, got {type(value).__name__}") from None
