"""Pipeline schedules of all sizes: complete, ordered, and without deadlock."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.config import ConfigError
from ddp_tutorial.pipeline.config import StagesConfig
from ddp_tutorial.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    Action,
    ScheduleError,
    Table,
    check,
    deadlocks,
    gpipe,
    interleaved,
    one_f_one_b,
    peaks,
    simulate,
)

F, B = FORWARD, BACKWARD
SIZES = [(ranks, micro_batches) for ranks in range(1, 7) for micro_batches in range(1, 13)]
each_size = pytest.mark.parametrize("ranks", range(1, 7))


def tables(ranks: int, micro_batches: int) -> dict[str, tuple[Table, int]]:
    """Return each schedule for this number of ranks, and its number of stages."""
    return {
        "gpipe": (gpipe(ranks, micro_batches), ranks),
        "1f1b": (one_f_one_b(ranks, micro_batches), ranks),
        "interleaved, 2": (interleaved(ranks, micro_batches, 2), 2 * ranks),
        "interleaved, 3": (interleaved(ranks, micro_batches, 3), 3 * ranks),
    }


@each_size
def test_every_schedule_is_complete_ordered_and_terminates(ranks: int) -> None:
    for micro_batches in range(1, 13):
        for name, (table, stages) in tables(ranks, micro_batches).items():
            check(table, stages, micro_batches)
            assert not deadlocks(table, "buffered"), (name, ranks, micro_batches)


def test_1f1b_of_three_stages_matches_the_paper() -> None:
    rows = [" ".join(f"{kind}{m}" for kind, _, m in row) for row in one_f_one_b(3, 4)]
    assert rows == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_interleaved_of_two_ranks_matches_the_paper() -> None:
    rows = [" ".join(f"{kind}{m}.{stage}" for kind, stage, m in row) for row in interleaved(2, 2, 2)]
    assert rows == ["F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0", "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1"]


costs = st.floats(0.01, 10)


@given(st.sampled_from(SIZES), costs, costs, st.floats(0, 5))
def test_the_times_of_a_plan_respect_all_dependencies(
    size: tuple[int, int], forward: float, backward: float, send: float
) -> None:
    for table, stages in tables(*size).values():
        plan = simulate(table, forward, backward, send)
        when = {timed.action: timed for rank in plan.ranks for timed in rank}
        for row, ran in zip(table, plan.ranks, strict=True):
            assert [timed.action for timed in ran] == list(row)
            assert all(before.end <= after.start for before, after in pairwise(ran))
        for (kind, stage, m), timed in when.items():
            assert timed.end - timed.start == pytest.approx(forward if kind == F else backward)
            if kind == F and stage:
                late = send if size[0] > 1 else 0  # stages on the same rank send nothing
                assert timed.start >= when[F, stage - 1, m].end + late
            if kind == B:
                assert timed.start >= when[F, stage, m].end
                assert stage == stages - 1 or timed.start >= when[B, stage + 1, m].end
        assert 0 <= plan.bubble < 1


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_the_bubble_matches_the_formula(ranks: int, micro_batches: int) -> None:
    formula = (ranks - 1) / (micro_batches + ranks - 1)
    for table in (gpipe(ranks, micro_batches), one_f_one_b(ranks, micro_batches)):
        assert simulate(table, 1, 2).bubble == pytest.approx(formula)
    if micro_batches % ranks == 0:
        for v in (2, 3):  # stages that are 1 / v as long: the fill takes 1 / v as long, and nothing else changes
            plan = simulate(interleaved(ranks, micro_batches, v), 1 / v, 2 / v)
            assert plan.bubble == pytest.approx((ranks - 1) / (v * micro_batches + ranks - 1))


def test_a_makespan_computed_by_hand() -> None:
    # F0 at stage 0 until 1, sent until 1.5, at stage 1 until 2.5, backward until 4.5, sent until 5, backward until 7
    assert simulate(one_f_one_b(2, 1), 1, 2, send=0.5).makespan == 7
    # the second stage, three times as slow, has 4 x (3 + 6) to do after the first forward; then B3 is left
    assert simulate(one_f_one_b(2, 4), [1, 3], [2, 6]).makespan == 1 + 4 * 9 + 2


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_1f1b_stores_fewer_micro_batches_than_gpipe(ranks: int, micro_batches: int) -> None:
    assert peaks(gpipe(ranks, micro_batches)) == [micro_batches] * ranks
    assert peaks(one_f_one_b(ranks, micro_batches)) == [min(micro_batches, ranks - rank) for rank in range(ranks)]


def test_schedules_that_support_plain_sends() -> None:
    """With blocking sends, GPipe terminates. 1F1B terminates if a send and the next receive are combined.

    Interleaved terminates reliably only with buffered sends.
    """
    for ranks, micro_batches in SIZES:
        assert not deadlocks(gpipe(ranks, micro_batches), "blocking")
        assert not deadlocks(one_f_one_b(ranks, micro_batches), "batched")
        stuck = deadlocks(one_f_one_b(ranks, micro_batches), "blocking")
        assert bool(stuck) == (ranks > 1 and micro_batches > 1)
    assert deadlocks(interleaved(4, 8, 2), "batched")
    said = deadlocks(one_f_one_b(2, 2), "blocking")
    assert said == "rank 0 waits to send F1 of stage 0 to rank 1; rank 1 waits to send B0 of stage 1 to rank 0"


F0, F1, B0, B1 = Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([F0, F1, B0], "rank 0 never runs B1 of stage 0"),
        ([F0, F1, F1, B0, B1], "rank 0 runs F1 of stage 0 twice"),
        ([B0, F0, F1, B1], "rank 0 runs B0 of stage 0 before the corresponding forward pass"),
        ([F0, Action(F, 1, 0), B0], "rank 0 runs F0 of stage 1, which belongs to a different rank"),
        ([F0, Action(F, 0, 2), B0], "rank 0 runs F2 of stage 0, which belongs to a different rank"),
    ],
)
def test_an_invalid_table_is_rejected_with_the_reason(row: list[Action], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        check([row, one_f_one_b(2, 2)[1]], 2, 2)


def test_ranks_that_deadlock_are_named() -> None:
    first = [F0, B0, F1, B1]  # waits for the gradient of 0, while the other wants to see both forward first
    with pytest.raises(
        ScheduleError, match=r"rank 0 waits for B0 of stage 1 before B0 of stage 0; rank 1 waits for F1"
    ):
        check([first, gpipe(2, 2)[1]], 2, 2)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "per_rank", "said"),
    [
        ("1f1b", 4, 3, 1, r"at least 4 micro-batches \(one per rank\), got 3"),
        ("interleaved", 4, 3, 2, r"at least 4 micro-batches \(one per rank\), got 3"),
        ("interleaved", 2, 4, 1, "at least 2 stages per rank, got 1"),
        ("1f1b", 2, 4, 2, "requires 1 stage per rank, got 2"),
    ],
)
def test_unsupported_numbers_are_rejected_in_one_line(
    schedule: str, ranks: int, micro_batches: int, per_rank: int, said: str
) -> None:
    config = StagesConfig.model_validate({"schedule": schedule, "micro_batches": micro_batches, "per_rank": per_rank})
    with pytest.raises(ConfigError, match=said) as error:
        config.on(ranks)
    assert "\n" not in str(error.value)
