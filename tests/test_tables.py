"""The table of a sweep, and values derived from it."""

import itertools
import math
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from ddp_tutorial.config import ConfigError
from ddp_tutorial.experiments.tables import (
    Group,
    _orders,
    as_text,
    differences,
    effect_of,
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


def test_neighboring_groups_are_compared_by_their_ratio() -> None:
    apart = differences([Group({"x": 1}, [10, 11, 12]), Group({"x": 2}, [20, 22, 24])])
    assert apart == ["x=2 / x=1: 2 (90% interval 1.667 to 2.4)"]  # 1 - 2 / (6 choose 3)
    [within] = differences([Group({"x": 1}, [10, 20]), Group({"x": 2}, [15, 30])])
    assert within == "x=2 / x=1: 1.5 (67% interval 0.75 to 3), indistinguishable"
    [signed] = differences([Group({"x": 1}, [-1, -2]), Group({"x": 2}, [1, 2])])
    assert signed == "x=2 - x=1: 3 (67% interval 2 to 4)"
    assert differences([Group({"x": 1}, [1, 1]), Group({"x": 2}, [1, 1])])[0].endswith("identical values")
    assert "differences cannot be tested" in differences([Group({"x": 1}, [1]), Group({"x": 2}, [2])])[0]
    assert "with only one value" in differences([Group({"x": 1}, [1]), Group({"x": 2}, [2, 3])])[0]
    assert differences([Group({"x": 1}, [1])]) == []


@pytest.mark.parametrize(("a", "b"), [(3, 3), (5, 5), (5, 8), (10, 4)])
def test_the_interval_of_an_effect_contains_the_true_ratio_with_its_confidence(a: int, b: int) -> None:
    random = np.random.default_rng(0)
    draws = [[np.exp(random.normal(size=size)).tolist() for size in (a, b)] for _ in range(2000)]
    effects = [effect_of(Group({}, [3 * x for x in first]), Group({}, second)) for first, second in draws]
    confidence = effects[0].confidence
    assert 0.95 <= confidence < 0.99 or confidence == 1 - 2 / math.comb(a + b, a)
    assert sum(each.low <= 3 <= each.high for each in effects) / 2000 == pytest.approx(confidence, abs=0.015)
    assert statistics.median(each.estimate for each in effects) == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 4), (3, 3), (4, 2), (3, 5)])
def test_orders_are_counted_like_an_enumeration(a: int, b: int) -> None:
    found = [0] * (a * b + 1)
    for ours in itertools.combinations(range(a + b), a):
        found[sum(rank - place for place, rank in enumerate(ours))] += 1
    assert _orders(a, b) == found[: a * b // 2 + 1]


def test_one_value_has_no_interval_and_100_values_take_a_second() -> None:
    single = effect_of(Group({}, [2.0]), Group({}, [1.0]))
    assert not single.is_distinguishable
    assert str(single) == "2 (no interval)"
    began = time.process_time()
    many = effect_of(Group({}, [2.0 + i / 100 for i in range(100)]), Group({}, [1.0 + i / 1000 for i in range(100)]))
    assert time.process_time() - began < 5  # a recursive count takes a minute
    assert many.confidence == pytest.approx(0.95, abs=0.001)
    assert 2 < many.low < many.estimate < many.high < 3


def test_an_invalid_table_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no table")
    for name in ("text", "gone"):
        with pytest.raises(ConfigError, match="is not a sweep table") as caught:
            read_table(tmp_path / name)
        assert "\n" not in str(caught.value)
