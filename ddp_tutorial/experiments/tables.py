"""Read and write a sweep's table, which contains one row per point, and compare groups of rows.

The columns are the swept parameters, then `repeat`, `status` and `seconds`, then the metrics, then `key`. The table is
stored as results.parquet, which preserves types, and as results.csv, which any program can open.
"""

import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.files import write_atomically

Row = Mapping[str, Any]

BEFORE_METRICS, AFTER_METRICS = ("repeat", "status", "seconds"), ("key",)
FIXED = {*BEFORE_METRICS, *AFTER_METRICS}
FINISHED = "finished"


def row_of(parameters: Row, repeat: int, status: str, seconds: float, metrics: Row, key: str) -> dict[str, Any]:
    """Return one row with all metrics that are numbers, strings, booleans or None.

    If a metric has the same name as another column, " (measured)" is appended to the metric's name.
    """
    plain = {name: value for name, value in metrics.items() if isinstance(value, bool | int | float | str | None)}
    taken = {*parameters, *FIXED}
    measured = {f"{name} (measured)" if name in taken else name: value for name, value in plain.items()}
    return {**parameters, "repeat": repeat, "status": status, "seconds": seconds, **measured, "key": key}


def write_table(folder: Path, rows: Sequence[Row]) -> None:
    """Write `results.parquet` and `results.csv` to `folder`, each atomically."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.table({name: _of_one_type([row.get(name) for row in rows]) for name in columns(rows)})
    for name, write in (("results.parquet", parquet.write_table), ("results.csv", csv.write_csv)):
        file = io.BytesIO()
        write(table, file)
        write_atomically(folder / name, file.getvalue())


def read_table(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a `results.parquet` file.

    Raises:
        ConfigError: If the file is not a sweep table.
    """
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{str(path)!r} is not a sweep table: {str(error).partition(chr(10))[0]}") from None
    if not rows or not rows[0].keys() >= FIXED:
        raise ConfigError(f"{str(path)!r} is not a sweep table, which must contain the columns {sorted(FIXED)}")
    return rows


def columns(rows: Sequence[Row]) -> list[str]:
    """Return all columns in this order: parameters, repeat, status, seconds, metrics (by first appearance), and key."""
    seen = dict.fromkeys(name for row in rows for name in row)
    return [*(name for name in seen if name not in AFTER_METRICS), *AFTER_METRICS]


def parameters_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of the columns that contain swept parameters."""
    names = columns(rows)
    return names[: names.index(BEFORE_METRICS[0])]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of the columns with numeric metrics, followed by `seconds`, which is a point's duration."""
    names = columns(rows)
    measured = [name for name in names[names.index(BEFORE_METRICS[-1]) + 1 :] if name not in AFTER_METRICS]
    return [name for name in measured if any(map(_is_number, (row.get(name) for row in rows)))] + ["seconds"]


@dataclass(frozen=True)
class Group:
    """The values of a metric over all repeats of one combination of parameters."""

    parameters: dict[str, Any]
    values: list[float]

    @property
    def label(self) -> str:
        """The parameters as text."""
        return ", ".join(f"{name}={value}" for name, value in self.parameters.items()) or "all"

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)


def groups_of(rows: Sequence[Row], metric: str) -> list[Group]:
    """Group the values of `metric` in the finished rows by the parameters that vary.

    Raises:
        ConfigError: If no row contains this metric.
    """
    known = metrics_of(rows)
    if metric not in known:
        raise ConfigError(f"the table has no metric {metric!r}.{did_you_mean(metric, known)}")
    names = [name for name in parameters_of(rows) if len({json.dumps(row[name]) for row in rows}) > 1]
    groups: dict[str, Group] = {}
    for row in rows:
        if row["status"] == FINISHED and _is_number(row.get(metric)):
            values = {name: row[name] for name in names}
            groups.setdefault(json.dumps(values), Group(values, [])).values.append(float(row[metric]))
    return list(groups.values())


def series_of(groups: Sequence[Group]) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """Arrange groups for a figure.

    Returns:
        The name of the parameter with the most distinct values, for the x-axis, and one series per combination of the
        other parameters. A series maps each value of the x-axis parameter to the metric's values.
    """
    names = list(groups[0].parameters)
    count = {name: len({json.dumps(group.parameters[name]) for group in groups}) for name in names}
    x = max(names, key=count.__getitem__, default="")
    series: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        others = (f"{name}={value}" for name, value in group.parameters.items() if name != x)
        label = ", ".join(others) or "a repeat"
        series.setdefault(label, {})[str(group.parameters.get(x, "all"))] = group.values
    return x, series


def as_text(groups: Sequence[Group], metric: str) -> str:
    """Return a text table in which each row contains a group's median, minimum, maximum and number of repeats."""
    width = max([len(group.label) for group in groups], default=0)
    head = f"{'':{width}} {'median':>12} {'lowest':>12} {'highest':>12} {'repeats':>8}   {metric}"
    lines = [
        f"{group.label:{width}} {group.median:>12,.5g} {min(group.values):>12,.5g} {max(group.values):>12,.5g} "
        f"{len(group.values):>8}"
        for group in groups
    ]
    return "\n".join([head, *lines])


@dataclass(frozen=True)
class Effect:
    """The ratio or the difference of two groups' values, with a confidence interval.

    Attributes:
        estimate: The median effect over all pairs with one value from each group (Hodges and Lehmann, 1963).
        low: The lower end of the interval.
        high: The upper end of the interval.
        confidence: The probability that such an interval contains the true value. With few values, the confidence is
            below 0.95 even if the interval spans all pairs. For two groups of 3 values, for example, the confidence is
            0.90.
        is_ratio: Whether the effect is a ratio. If a value is not positive, the effect is a difference.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    is_ratio: bool

    @property
    def is_distinguishable(self) -> bool:
        """Whether an interval exists and excludes equality (a ratio of 1 or a difference of 0)."""
        return self.confidence > 0 and not self.low <= float(self.is_ratio) <= self.high

    def __str__(self) -> str:
        """Return the estimate and its interval. With one value in each group, there is no interval."""
        if self.confidence == 0:
            return f"{self.estimate:.4g} (no interval)"
        interval = f"{self.confidence:.0%} interval {self.low:.4g} to {self.high:.4g}"
        return f"{self.estimate:.4g} ({interval})" + ("" if self.is_distinguishable else ", indistinguishable")


def effect_of(group: Group, baseline: Group) -> Effect:
    """Estimate the effect of a group relative to a baseline group.

    The ends of the interval are the k-th smallest and the k-th largest effects over all pairs. The confidence follows
    from the distribution of Mann and Whitney (1947). The integer k is as large as possible for a confidence of at least
    95 %, and is at least 1. The values must be independent. Turns of the same launch are not independent, so an
    interval computed from turns is too narrow.

    Args:
        group: A group with at least one value. A useful interval requires at least 3 values.
        baseline: The reference group, with the same requirements.
    """
    is_ratio = min(*group.values, *baseline.values) > 0
    pairs = sorted(a / b if is_ratio else a - b for a in group.values for b in baseline.values)
    sizes = len(group.values), len(baseline.values)
    orders, counts = math.comb(sum(sizes), sizes[0]), _orders(*sizes)
    tail, k = counts[0], 1
    while k < len(pairs) // 2 and (wider := tail + counts[k]) <= 0.025 * orders:
        tail, k = wider, k + 1
    return Effect(statistics.median(pairs), pairs[k - 1], pairs[-k], 1 - 2 * tail / orders, is_ratio)


def _orders(a: int, b: int) -> list[int]:
    """Count the orderings of a + b values by the number of pairs in which the first group's value is larger.

    The counts are the coefficients of the product of (1 - x^(b + i)) / (1 - x^i) over i from 1 to a. The list ends at
    half the number of pairs, because the distribution is symmetric.
    """
    counts = [1] + [0] * (a * b // 2)
    for i in range(1, a + 1):
        for pairs in range(len(counts) - 1, b + i - 1, -1):
            counts[pairs] -= counts[pairs - b - i]
        for pairs in range(i, len(counts)):
            counts[pairs] += counts[pairs - i]
    return counts


def differences(groups: Sequence[Group]) -> list[str]:
    """Sort the groups by descending median, and compare neighboring groups with `effect_of`.

    Returns:
        One line per comparison.
    """
    if len(groups) > 1 and all(len(group.values) == 1 for group in groups):
        return ["With only one value per group, differences cannot be tested. Rerun the sweep with --repeats 3."]
    ordered = sorted(groups, key=lambda group: group.median, reverse=True)
    return [_difference(above, below) for above, below in pairwise(ordered)]


def _difference(above: Group, below: Group) -> str:
    if above.values == below.values:
        return f"{above.label} and {below.label}: identical values"
    if min(len(above.values), len(below.values)) < 2:
        return f"{above.label} and {below.label}: with only one value, the difference cannot be tested"
    effect = effect_of(above, below)
    return f"{above.label} {'/' if effect.is_ratio else '-'} {below.label}: {effect}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    """Convert a column to a single type. A mix of integers and floats becomes floats; any other mix becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return list(values)
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return [value if isinstance(value, str) or value is None else json.dumps(value) for value in values]
