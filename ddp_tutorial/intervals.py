"""Convert the intervals between evaluations or checkpoints to steps. An interval is specified in steps or in epochs.

checkpoint.every: 100        # steps
checkpoint.every: epoch      # the end of each epoch
checkpoint.every: 2 epochs
"""

import math
import re
from typing import Any

from pydantic_core import PydanticCustomError

from ddp_tutorial.config import ConfigError

Interval = int | str
EPOCH = "epoch"


def check_interval(value: Any, least: int) -> Interval:
    """Return `value` if it is a valid interval.

    A valid interval is at least `least` steps, or a positive number of epochs.

    Raises:
        PydanticCustomError: If the interval is invalid.
    """
    is_steps = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if is_steps or (isinstance(value, str) and _epochs(value)):
        return value
    raise PydanticCustomError(
        "interval",
        "Input should be a number of steps (at least {least}), `epoch`, or a number of epochs such as `2 epochs`",
        {"least": least},
    )


def _epochs(text: str) -> float:
    """Return the number of epochs in the interval `text`, or 0 if `text` is not an interval in epochs."""
    if text == EPOCH:
        return 1.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) epochs?", text)
    return float(found[1]) if found else 0.0


def steps_between(name: str, interval: Interval, steps_per_epoch: float | None) -> float:
    """Return the number of steps in an interval. The number may be fractional.

    Raises:
        ConfigError: If the interval is in epochs, and the length of an epoch is unknown.
    """
    if not isinstance(interval, str):
        return interval
    if steps_per_epoch is None:
        raise ConfigError(
            f"for a stream, '{name}' must be a number of steps, got {interval!r}. The length of a stream, and "
            "therefore of an epoch, is unknown"
        )
    return _epochs(interval) * steps_per_epoch


def is_due(step: int, every: float) -> bool:
    """Return whether an interval of `every` steps ends at `step`. If `every` is 0, the result is False."""
    return bool(every) and _ended(step, every) > _ended(step - 1, every)


def times_due(steps: int, every: float) -> int:
    """Return the number of times an action runs in `steps` steps, if it runs every `every` steps and at the end."""
    return _ended(steps, every) + (not is_due(steps, every)) if every else 0


def _ended(step: int, every: float) -> int:
    return math.floor(round(step / max(1, every), 6))
