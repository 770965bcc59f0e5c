"""The table of a sweep: a row for each execution, and what repeats and parameters show in it.

Columns are the parameters that were swept, then `repeat`, `status` and `seconds`, then the metrics, then `key`. Kept as
results.parquet, which has types, and results.csv, which any program can open.
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
    """One row, with the metrics that are a number, a text, a bool or None. " (measured)" is added to the name of a
    metric that is also the name of another column."""
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
    """The rows of a `results.parquet`. Raises `ConfigError` for anything else."""
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{str(path)!r} is not the table of a sweep: {str(error).partition(chr(10))[0]}") from None
    if not rows or not rows[0].keys() >= FIXED:
        raise ConfigError(f"{str(path)!r} is not the table of a sweep: it should have rows, with {sorted(FIXED)}")
    return rows


def columns(rows: Sequence[Row]) -> list[str]:
    """All columns: parameters, repeat, status and seconds, metrics in the order in which they first appear, the key."""
    seen = dict.fromkeys(name for row in rows for name in row)
    return [*(name for name in seen if name not in AFTER_METRICS), *AFTER_METRICS]


def parameters_of(rows: Sequence[Row]) -> list[str]:
    """The columns of the swept parameters."""
    names = columns(rows)
    return names[: names.index(BEFORE_METRICS[0])]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The columns of metrics that have numbers, then `seconds`, the time of the whole execution."""
    names = columns(rows)
    measured = [name for name in names[names.index(BEFORE_METRICS[-1]) + 1 :] if name not in AFTER_METRICS]
    return [name for name in measured if any(map(_is_number, (row.get(name) for row in rows)))] + ["seconds"]


@dataclass(frozen=True)
class Group:
    """The numbers of all repeats of one combination of parameters."""

    parameters: dict[str, Any]
    values: list[float]

    @property
    def label(self) -> str:
        """Its parameters, as a text."""
        return ", ".join(f"{name}={value}" for name, value in self.parameters.items()) or "all"

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def groups_of(rows: Sequence[Row], metric: str) -> list[Group]:
    """The values of `metric` in the finished rows, grouped by those parameters that vary. Raises `ConfigError` for a
    metric that no row has."""
    known = metrics_of(rows)
    if metric not in known:
        raise ConfigError(f"no metric of the table is called {metric!r}.{did_you_mean(metric, known)}")
    names = [name for name in parameters_of(rows) if len({json.dumps(row[name]) for row in rows}) > 1]
    found: dict[str, Group] = {}
    for row in rows:
        if row["status"] == FINISHED and _is_number(row.get(metric)):
            values = {name: row[name] for name in names}
            found.setdefault(json.dumps(values), Group(values, [])).values.append(float(row[metric]))
    return list(found.values())


def series_of(groups: Sequence[Group]) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """For a figure: the name of the parameter with the most values, for the x axis, and for each combination of the
    others a series: value of that parameter -> values of the metric."""
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
    """A line for each group: median, lowest and highest value."""
    width = max([len(group.label) for group in groups], default=0)
    head = f"{'':{width}} {'median':>12} {'lowest':>12} {'highest':>12} {'repeats':>8}   {metric}"
    lines = [
        f"{group.label:{width}} {group.median:>12,.5g} {min(group.values):>12,.5g} {max(group.values):>12,.5g} "
        f"{len(group.values):>8}"
        for group in groups
    ]
    return "\n".join([head, *lines])


def differences(groups: Sequence[Group]) -> list[str]:
    """A line for each two neighbours in the order of medians: is one above the other, or is that within the spread?

    It is within the spread where the ranges of their values overlap. Ranges can also be apart by chance: for a and b
    values from the same distribution they are in 2 of (a + b choose a) cases.
    """
    if len(groups) > 1 and all(len(group.values) == 1 for group in groups):
        return ["One value each: without a spread, nothing can be said of their differences. Use --repeats 3 or more."]
    ordered = sorted(groups, key=lambda group: group.median, reverse=True)
    return [_difference(above, below) for above, below in pairwise(ordered)]


def _difference(above: Group, below: Group) -> str:
    both = f"{above.label} and {below.label}"
    if above.values == below.values:
        return f"{both}: equal, to the last digit"
    a, b = len(above.values), len(below.values)
    if min(a, b) < 2:
        return f"{both}: one value is no spread, so this cannot be told"
    more = f"{above.median / below.median - 1:.1%} more" if below.median > 0 else "more"
    if min(above.values) <= max(below.values):
        return f"{both}: within the spread (medians: {more}, but the ranges overlap)"
    return f"{above.label} has {more} than {below.label}: apart (by luck alone in 1 of {math.comb(a + b, a) // 2})"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    """The values of a column with one type for all: integers beside floats become floats, other mixtures text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return list(values)
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return [value if isinstance(value, str) or value is None else json.dumps(value) for value in values]
