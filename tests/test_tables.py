"""The table of a sweep, and values derived from it."""

from pathlib import Path

import pytest

from ddp_tutorial.config import ConfigError
from ddp_tutorial.experiments.tables import (
    Group,
    as_text,
    differences,
    groups_of,
    metrics_of,
    parameters_of,
    read_table,
    row_of,
    series_of,
    write_table,
)

ROWS = [
    row_of(
        {"source": source, "steps": 5},
        repeat,
        "finished",
        1.5,
        {"rate": rate + repeat, "note": "x"},
        f"{source}{repeat}",
    )
    for repeat in (1, 2)
    for source, rate in (("a", 10.0), ("b", 20.0))
]
FAILED = row_of({"source": "c", "steps": 5}, 1, "failed", 0.5, {}, "c1")


def test_a_table_is_read_back_as_written(tmp_path: Path) -> None:
    write_table(tmp_path, [*ROWS, FAILED])
    back = read_table(tmp_path / "results.parquet")
    assert back[:4] == ROWS
    assert back[4] == FAILED | {"rate": None, "note": None}
    assert list(back[0]) == ["source", "steps", "repeat", "status", "seconds", "rate", "note", "key"]
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([1, 2], [1, 2]),
        ([1, 2.5], [1.0, 2.5]),
        ([1, None], [1, None]),
        (["a", 1], ["a", "1"]),
        ([True, 1], ["true", "1"]),
        ([[1, 2], [3]], ["[1, 2]", "[3]"]),
    ],
)
def test_a_column_has_one_type(values: list[object], stored: list[object], tmp_path: Path) -> None:
    write_table(tmp_path, [row_of({"x": value}, 1, "finished", 1.0, {}, "k") for value in values])
    assert [row["x"] for row in read_table(tmp_path / "results.parquet")] == stored


def test_a_metric_named_like_a_parameter_is_renamed() -> None:
    row = row_of({"steps": 5}, 1, "finished", 1.0, {"steps": 4, "seconds": 2.0, "all": [1, 2]}, "k")
    assert row == {
        "steps": 5,
        "repeat": 1,
        "status": "finished",
        "seconds": 1.0,
        "steps (measured)": 4,
        "seconds (measured)": 2.0,
        "key": "k",
    }


def test_columns_are_identified_by_their_position() -> None:
    assert parameters_of([*ROWS, FAILED]) == ["source", "steps"]
    assert metrics_of([*ROWS, FAILED]) == ["rate", "seconds"]  # text is not a number


def test_groups_are_repeats_of_equal_parameters_without_failures() -> None:
    groups = groups_of([*ROWS, FAILED], "rate")
    assert [(group.label, group.values) for group in groups] == [("source=a", [11.0, 12.0]), ("source=b", [21.0, 22.0])]
    assert as_text(groups, "rate").splitlines()[1].split() == ["source=a", "11.5", "11", "12", "2"]
    with pytest.raises(ConfigError, match=r"the table has no metric 'rte'\. Did you mean 'rate'"):
        groups_of(ROWS, "rte")


def test_the_x_axis_is_the_parameter_with_the_most_values() -> None:
    groups = [Group({"a": a, "b": b}, [a + b]) for a in (1, 2) for b in (1, 2, 3)]
    x, series = series_of(groups)
    assert x == "b"
    assert series == {"a=1": {"1": [2], "2": [3], "3": [4]}, "a=2": {"1": [3], "2": [4], "3": [5]}}
    assert series_of([Group({}, [1.0])]) == ("", {"a repeat": {"all": [1.0]}})


def test_a_difference_is_reported_if_ranges_do_not_overlap() -> None:
    apart = differences([Group({"x": 1}, [10, 11, 12]), Group({"x": 2}, [20, 22, 24])])
    assert apart == [
        "x=2 has 100.0% more than x=1: the ranges do not overlap (by chance in 1 of 10 cases)"
    ]  # 2 of (6 choose 3)
    [within] = differences([Group({"x": 1}, [10, 20]), Group({"x": 2}, [15, 30])])
    assert within.startswith("x=2 and x=1: within the spread (medians: 50.0% more")
    assert differences([Group({"x": 1}, [1, 1]), Group({"x": 2}, [1, 1])])[0].endswith("identical values")
    assert "differences cannot be judged" in differences([Group({"x": 1}, [1]), Group({"x": 2}, [2])])[0]
    assert differences([Group({"x": 1}, [1])]) == []


def test_an_invalid_table_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no table")
    for name in ("text", "gone"):
        with pytest.raises(ConfigError, match="is not the table of a sweep") as caught:
            read_table(tmp_path / name)
        assert "\n" not in str(caught.value)
