"""The tables of `reproduce`: rows of benchmarks beside published numbers."""

import pytest

from commands import call
from ddp_tutorial.benches import accumulation, published, report, sources
from ddp_tutorial.benches.scaling import FOUR_RANK_ARMS, two_rank_arms


def measured(unit: str = "samples/s") -> dict[str, object]:
    names = {row.arm for table in published.TABLES.values() for row in table.rows}
    names |= {row.baseline for table in published.TABLES.values() for row in table.rows}
    return report(
        "fake", {name: [90.0, 100.0, 110.0] for name in names} | {"two_ranks": [144.0, 160.0, 176.0]}, unit, {}
    )


def test_a_table_contains_speedup_efficiency_and_published_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "run_bench", lambda name, repeats: measured())
    lines = published.as_markdown(published.reproduce("scaling", 5)).splitlines()
    assert lines[0] == (
        "| configuration | ranks | steps | time (s) | median (samples/s) | lowest to highest | speedup | efficiency "
        "| published speedup | published efficiency |"
    )
    assert "| two ranks | 2 | 64 | 25.6 | 160 | 144 to 176 | 1.60 | 80% | 1.56 | 78% |" in lines
    assert "| two ranks, twice the batch | 2 | 32 | 41.0 | 100 " in "\n".join(lines)
    assert "| two independent processes | 2 | 64 | 41.0 | 100 | 90 to 110 | 1.00 | 50% |  |  |" in lines


def test_a_shorter_time_is_a_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured("s")
    found["arms"]["async_stall"]["values"] = [22.5, 25.0, 27.5]
    monkeypatch.setattr(published, "run_bench", lambda name, repeats: found)
    table = published.as_markdown(published.reproduce("checkpoint", 5))
    assert "| stall of a background save | 1 | 100 | 90 to 110 | 4.00 |" in table
    assert "efficiency" not in table


def test_the_arms_of_the_scaling_table_are_measured() -> None:
    arms = two_rank_arms() | FOUR_RANK_ARMS
    for row in published.TABLES["scaling"].rows:
        assert row.ranks == arms[row.arm].readers
        assert arms[row.baseline].readers == 1


def test_the_arms_of_the_accumulation_and_data_tables_are_measured() -> None:
    assert [row.arm for row in published.TABLES["accumulation"].rows] == [f"k{k}" for k in accumulation.KS]
    assert {row.arm for row in published.TABLES["data"].rows} == set(sources.KINDS)


def test_an_unknown_table_is_rejected() -> None:
    done = call("reproduce", "speed")
    assert done.returncode == 2
    assert "'scaling', 'data', 'accumulation', 'checkpoint'" in done.stderr
