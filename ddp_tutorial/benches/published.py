"""Compare this machine's measurements with published measurements. Run `python -m ddp_tutorial reproduce NAME`.

The published numbers are from the README of Forgather's example "DDP Trainer". The example trains a small transformer
on Tiny Stories with one to four GPUs. The published runs differ in the number of steps and in the global batch size,
and evaluate within the timed region. This package's benchmarks do the same work in every arm. Therefore, compare ratios
instead of samples per second.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from ddp_tutorial.benches import run_bench


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        label: The label of the configuration.
        arm: The arm of the benchmark.
        ranks: The number of ranks.
        baseline: The arm relative to which the speedup is computed.
        published: The published speedup over the published baseline, or None if no speedup was published.
        scale: The number of ranks divided by the baseline's number of ranks, or None if the table does not compare
            numbers of ranks.
        batch: The global batch size, from which the number of steps in the table is computed.
    """

    label: str
    arm: str
    ranks: int
    baseline: str
    published: float | None = None
    scale: int | None = None
    batch: int = 64


@dataclass(frozen=True)
class Table:
    """A table, and the benchmark that measures the table's arms.

    Attributes:
        bench: The name of the benchmark.
        rows: The rows.
        samples: The number of samples for which the table reports steps and time, or None if it reports neither.
    """

    bench: str
    rows: tuple[Row, ...]
    samples: int | None = None


_SINGLE, _DISPATCHED, _SHARDED, _FOUR = 1804, 2224, 2818, 5262  # published, in samples/s
_SHARDED_ITERABLE, _FAST_ITERABLE = 1977, 1971

TABLES = {
    "scaling": Table(
        "scaling",
        (
            Row("one process", "one_thread", 1, "one_thread", 1.0, 1),
            Row("two ranks", "two_ranks", 2, "one_thread", _SHARDED / _SINGLE, 2),
            Row("two independent processes", "independent", 2, "one_thread", scale=2),
            Row("two ranks, twice the batch", "two_ranks_weak", 2, "one_thread", scale=2, batch=128),
            Row("four ranks", "four_ranks", 4, "one_thread_of_four", _FOUR / _SINGLE, 4),
        ),
        samples=4096,
    ),
    "data": Table(
        "sources",
        (
            Row("sharded", "sharded", 2, "sharded", 1.0),
            Row("dispatched", "dispatched", 2, "sharded", _DISPATCHED / _SHARDED),
            Row("streamed", "streamed", 2, "sharded", _SHARDED_ITERABLE / _SHARDED),
            Row("fast_stream", "fast_stream", 2, "sharded", _FAST_ITERABLE / _SHARDED),
        ),
    ),
    "accumulation": Table("accumulation", tuple(Row(f"accumulation={k}", f"k{k}", 2, "k1") for k in (1, 2, 4, 8))),
    "checkpoint": Table(
        "checkpoint",
        (
            Row("save", "sync_save", 1, "sync_save"),
            Row("stall of a background save", "async_stall", 1, "sync_save"),
            Row("torch.save and fsync", "torch_save", 1, "sync_save"),
        ),
    ),
}


def reproduce(name: str, repeats: int) -> dict[str, Any]:
    """Run a table's benchmark, and return the benchmark's report with the table's rows under the key `rows`."""
    found = run_bench(TABLES[name].bench, repeats)
    return found | {"rows": [_measured(row, found["arms"], TABLES[name].samples) for row in TABLES[name].rows]}


def _measured(row: Row, arms: dict[str, Any], samples: int | None) -> dict[str, Any]:
    arm, baseline = arms[row.arm], arms[row.baseline]
    # The arms alternate, so background load affects both values in a repeat, but not their ratio.
    ratio = statistics.median(a / b for a, b in zip(arm["values"], baseline["values"], strict=True))
    speedup = 1 / ratio if arm["unit"] == "s" else ratio
    return {
        "configuration": row.label,
        "ranks": row.ranks,
        "steps": samples and samples // row.batch,
        "seconds": samples and samples / arm["median"],
        "unit": arm["unit"],
        "median": arm["median"],
        "low": arm["low"],
        "high": arm["high"],
        "speedup": speedup,
        "efficiency": speedup / row.scale if row.scale else None,
        "published_speedup": row.published,
        "published_efficiency": row.published / row.scale if row.published and row.scale else None,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Return the rows of a `reproduce` report as a Markdown table."""
    rows = result["rows"]
    columns = {
        "configuration": [row["configuration"] for row in rows],
        "ranks": [str(row["ranks"]) for row in rows],
        **({"steps": [str(row["steps"]) for row in rows]} if rows[0]["steps"] else {}),
        **({"time (s)": [f"{row['seconds']:.1f}" for row in rows]} if rows[0]["steps"] else {}),
        f"median ({rows[0]['unit']})": [f"{row['median']:,.4g}" for row in rows],
        "lowest to highest": [f"{row['low']:,.4g} to {row['high']:,.4g}" for row in rows],
    }
    for name in ("speedup", "efficiency", "published_speedup", "published_efficiency"):
        values = [row[name] for row in rows]
        if any(value is not None for value in values):
            form = "{:.0%}" if name.endswith("efficiency") else "{:.2f}"
            columns[name.replace("_", " ")] = ["" if value is None else form.format(value) for value in values]
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    repeats = next(iter(result["arms"].values()))["repeats"]
    note = "Each speedup is the median of the per-repeat ratios."
    return f"{table}\n\nMedian of {repeats} repeats; {result['environment'].get('cores', '?')} cores. {note}"
