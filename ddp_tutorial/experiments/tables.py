"""The table of a sweep, with one row per execution, and comparisons of its groups.

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

    If a metric has the same name as another column, " (measured)" is appended to its name.
    """
    plain = {name: value for name, value in metrics.items() if isinstance(value, bool | int | float | str | None)}
    taken = {*parameters, *FIXED}
    measured = {f"{name} (measured)" if name in taken else name: value for name, value in plain.items()}
    return {**parameters, "repeat": repeat, "status": status, "seconds": seconds, **measured, "key": key}


def write_table(folder: Path, rows: Sequence[Row]) -> None:
    """Write `results.parquet` and `results.csv` in `folder`, each atomically."""
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
        ConfigError: If the file is not the table of a sweep.
    """
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{str(path)!r} is not the table of a sweep: {str(error).partition(chr(10))[0]}") from None
    if not rows or not rows[0].keys() >= FIXED:
        raise ConfigError(f"{str(path)!r} is not the table of a sweep: its rows must have the keys {sorted(FIXED)}")
    return rows


def columns(rows: Sequence[Row]) -> list[str]:
    """Return all columns: parameters, repeat, status, seconds, metrics in order of first appearance, and key."""
    seen = dict.fromkeys(name for row in rows for name in row)
    return [*(name for name in seen if name not in AFTER_METRICS), *AFTER_METRICS]


def parameters_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of the swept parameters."""
    names = columns(rows)
    return names[: names.index(BEFORE_METRICS[0])]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of numeric metrics, then `seconds`, the time of the whole execution."""
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
        ConfigError: If no row has this metric.
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
        The name of the parameter with the most values, for the x-axis, and one series per combination of the other
        parameters. A series maps a value of the x-axis parameter to the values of the metric.
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
    """Return a table with one line per group: the median, lowest and highest value."""
    width = max([len(group.label) for group in groups], default=0)
    head = f"{'':{width}} {'median':>12} {'lowest':>12} {'highest':>12} {'repeats':>8}   {metric}"
    lines = [
        f"{group.label:{width}} {group.median:>12,.5g} {min(group.values):>12,.5g} {max(group.values):>12,.5g} "
        f"{len(group.values):>8}"
        for group in groups
    ]
    return "\n".join([head, *lines])


def differences(groups: Sequence[Group]) -> list[str]:
    """Compare neighboring groups in descending order of their medians.

    If the ranges of two groups overlap, the difference is within the spread. Ranges can also be disjoint by chance. For
    a and b values from the same distribution, this happens in 2 of (a + b choose a) cases.

    Returns:
        One line per comparison.
    """
    if len(groups) > 1 and all(len(group.values) == 1 for group in groups):
        return ["One value per group has no spread, so differences cannot be judged. Use --repeats 3."]
    ordered = sorted(groups, key=lambda group: group.median, reverse=True)
    return [_difference(above, below) for above, below in pairwise(ordered)]


def _difference(above: Group, below: Group) -> str:
    both = f"{above.label} and {below.label}"
    if above.values == below.values:
        return f"{both}: identical values"
    a, b = len(above.values), len(below.values)
    if min(a, b) < 2:
        return f"{both}: one value has no spread, so the difference cannot be judged"
    more = f"{above.median / below.median - 1:.1%} more" if below.median > 0 else "more"
    if min(above.values) <= max(below.values):
        return f"{both}: within the spread (medians: {more}, but the ranges overlap)"
    chance = f"by chance in 1 of {math.comb(a + b, a) // 2} cases"
    return f"{above.label} has {more} than {below.label}: the ranges do not overlap ({chance})"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    """Convert a column to a single type: a mix of integers and floats becomes floats, any other mix becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return list(values)
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return [value if isinstance(value, str) or value is None else json.dumps(value) for value in values]
