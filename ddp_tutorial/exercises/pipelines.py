"""Exercises on the 1F1B order, a zero-bubble schedule, and balanced stages, for notebook 18_pipelines."""

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.pipeline.runner import StageRunner
from ddp_tutorial.pipeline.schedules import Action, ScheduleError, Table, check, one_f_one_b, peaks, simulate
from ddp_tutorial.pipeline.stages import balance, split_into_stages
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------- 1. the order of 1F1B

_SIZES = [(1, 3), (2, 2), (2, 5), (3, 4), (4, 8), (4, 4)]  # stages, micro-batches


def _test_order(answer: Answer) -> str:
    for stages, micro_batches in _SIZES:
        case = f"{stages} stages, {micro_batches} micro-batches"
        table = [_row(answer, stage, stages, micro_batches) for stage in range(stages)]
        try:
            check(table, stages, micro_batches)
        except ScheduleError as error:
            raise WrongAnswerError(f"{case}: {error}.") from None
        right = one_f_one_b(stages, micro_batches)
        for rank, (got, most) in enumerate(zip(peaks(table), peaks(right), strict=True)):
            expect(
                got <= most,
                f"{case}: stage {rank} must keep the activations of at most {most} micro-batches at a time, got {got}. "
                f"Its order is {_formatted(table[rank])}.",
            )
        slow, quick = simulate(table).makespan, simulate(right).makespan
        expect(
            slow <= quick,
            f"{case}: with 1 s per forward and 2 s per backward pass, the step must take {quick:g} s, as in 1F1B, "
            f"got {slow:g} s. Stage 0's order is {_formatted(table[0])}.",
        )
    ours = [_row(answer, stage, 2, 4) for stage in range(2)]
    on_ranks(_run_it, 2, ours, stuck="Two real ranks hang when they run your order.", timeout=30)
    return "Two real ranks ran your order, and their gradient is bitwise identical to the gradient of one process."


_Row = list[tuple[str, int]]


def _pairs(got: Any) -> _Row:
    """Return the answer's result as a list of (kind, micro-batch)."""
    try:
        return [(str(kind), int(m)) for kind, m in got]
    except (TypeError, ValueError):
        raise WrongAnswerError(f"The result must be a list such as [('F', 0), ('B', 0)], got {got!r}.") from None


def _row(answer: Answer, stage: int, stages: int, micro_batches: int) -> list[Action]:
    row = _pairs(answer(stage, stages, micro_batches))
    expect({kind for kind, _ in row} <= {"F", "B"}, f"An action must be 'F' or 'B', got {row}.")
    return [Action("F" if kind == "F" else "B", stage, m) for kind, m in row]


def _formatted(row: Sequence[Action]) -> str:
    return " ".join(f"{kind}{m}" for kind, _, m in row)


def _loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


def _run_it(world: World, table: Table) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    one, batches = copy.deepcopy(model), list(torch.randn(4, 3, 4))
    for batch in batches:
        _loss(one, batch)[0].backward()
    stage = split_into_stages(model, ["2"])[world.rank]
    StageRunner(table, {world.rank: stage}, _loss, peers=(0, 1), place=world.rank).run(batches)
    there = dict(zip(map(id, model.parameters()), one.parameters(), strict=True))
    for parameter in stage.parameters():
        got, right = parameter.grad, there[id(parameter)].grad
        assert got is not None
        assert right is not None
        expect(torch.equal(got, right), "On real ranks, the gradient differs from the gradient of one process.")


def _order_of_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    ahead = min(stages - 1 - stage, micro_batches)
    row = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            row.append(("F", m + ahead))
        row.append(("B", m))
    return row


def _all_forwards_first(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]


def _ahead_by(ahead: int, micro_batches: int) -> list[tuple[str, int]]:
    ahead = max(0, min(ahead, micro_batches))
    row = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        row += [("F", m + ahead)] if m + ahead < micro_batches else []
        row.append(("B", m))
    return row


def _nobody_ahead(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return _ahead_by(0, micro_batches)


def _one_too_many(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return _ahead_by(stages - stage, micro_batches)


def _all_alike(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return _ahead_by(stages - 1, micro_batches)


def _backward_first(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    ahead = min(stages - 1 - stage, micro_batches)
    turns = [each for m in range(micro_batches - ahead) for each in (("B", m), ("F", m + ahead))]
    return [("F", m) for m in range(ahead)] + turns + [("B", m) for m in range(micro_batches - ahead, micro_batches)]


def _no_cool_down(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    row = _order_of_1f1b(stage, stages, micro_batches)
    return row[: len(row) - (stages - 1 - stage)]


def _counts_from_the_other_end(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return _order_of_1f1b(stages - 1 - stage, stages, micro_batches)


order_of_1f1b = Exercise(
    task=(
        "order_of_1f1b(stage, stages, micro_batches): return this stage's actions in one step of 1F1B, in order. "
        "The result is a list of ('F', m) and ('B', m) for the forward and backward passes of micro-batch m."
    ),
    test=_test_order,
    solution=_order_of_1f1b,
    wrong={
        "runs all forward passes first": _all_forwards_first,
        "runs no forward pass ahead": _nobody_ahead,
        "runs one forward pass too many ahead": _one_too_many,
        "runs the same number of forward passes ahead on all stages": _all_alike,
        "runs the backward pass before the forward pass": _backward_first,
        "stops when no forward pass is left": _no_cool_down,
        "counts stages from the other end": _counts_from_the_other_end,
    },
    hints=(
        "The last stage can alternate from the start: F0 B0 F1 B1 ... What must the previous stage do meanwhile?",
        "Stage s first runs stages - 1 - s forward passes (or all, if there are fewer), then alternates F and B.",
        "When no forward passes are left, run the remaining backward passes. Each micro-batch occurs once as F and "
        "once as B.",
    ),
)

# ------------------------------------------------------------------------------------------------------ 2. zero bubble

_ROWS = [(1, 3), (2, 2), (2, 5), (3, 4), (4, 8), (4, 5)]  # stages, micro-batches


def _times(table: Sequence[_Row]) -> list[dict[tuple[str, int], int]]:
    """Return the end time of each action on each stage, assuming that every action takes one second.

    Raises:
        WrongAnswerError: If the stages wait for each other forever.
    """
    ends: list[dict[tuple[str, int], int]] = [{} for _ in table]
    free = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(table):
            while len(ends[stage]) < len(row):
                kind, m = row[len(ends[stage])]
                needs = {"F": [(stage - 1, "F")], "B": [(stage, "F"), (stage + 1, "B")], "W": [(stage, "B")]}[kind]
                inputs = [ends[other].get((need, m)) for other, need in needs if 0 <= other < len(table)]
                if None in inputs:
                    break
                free[stage] = 1 + max([free[stage], *(each for each in inputs if each is not None)])
                ends[stage][kind, m] = free[stage]
                moved = True
    for stage, row in enumerate(table):
        if len(ends[stage]) < len(row):
            kind, m = row[len(ends[stage])]
            raise WrongAnswerError(
                f"{len(table)} stages: stage {stage} waits forever to run {kind}{m}, because no stage computes "
                f"the input of {kind}{m}."
            )
    return ends


def _test_zero_bubble(answer: Answer) -> str:
    for stages, micro_batches in _ROWS:
        case = f"{stages} stages, {micro_batches} micro-batches"
        table = []
        for stage in range(stages):
            row = _pairs(answer(stage, stages, micro_batches))
            wanted = sorted((kind, m) for kind in "FBW" for m in range(micro_batches))
            expect(
                sorted(row) == wanted,
                f"{case}: stage {stage} must run F, B and W of each micro-batch once, got {_shown(row)}.",
            )
            table.append(row)
        slowest = max(end for ends in _times(table) for end in ends.values())
        best = 3 * micro_batches + stages - 1
        for stage, row in enumerate(table):
            most = max(accumulate(({"F": 1, "B": 0, "W": -1}[kind] for kind, _ in row), initial=0))
            expect(
                most <= stages,
                f"{case}: stage {stage} must keep at most {stages} micro-batches between F and W, got {most}. Its "
                f"order is {_shown(row)}.",
            )
        expect(
            slowest <= best,
            f"{case}: with one second per action, the step must take {best} s, got {slowest} s. Stage 0's order is "
            f"{_shown(table[0])}.",
        )
    return (
        "The step takes 2 (stages - 1) seconds less than 1F1B, and no stage keeps more micro-batches than stage 0 "
        "does in 1F1B."
    )


def _shown(row: _Row) -> str:
    return " ".join(f"{kind}{m}" for kind, m in row)


def _zero_bubble_order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    ahead = min(stages - 1 - stage, micro_batches)
    row, done = [("F", m) for m in range(ahead)], 0
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            row.append(("F", m + ahead))
        row.append(("B", m))
        if m >= stage:  # leave `stage` weight gradients for the end
            row.append(("W", done))
            done += 1
    return row + [("W", m) for m in range(done, micro_batches)]


def _weights_at_once(stage: int, stages: int, micro_batches: int) -> _Row:
    row: _Row = []
    for kind, m in _order_of_1f1b(stage, stages, micro_batches):
        row += [("B", m), ("W", m)] if kind == "B" else [(kind, m)]
    return row


def _weights_last(stage: int, stages: int, micro_batches: int) -> _Row:
    return _order_of_1f1b(stage, stages, micro_batches) + [("W", m) for m in range(micro_batches)]


def _no_weights(stage: int, stages: int, micro_batches: int) -> _Row:
    return _order_of_1f1b(stage, stages, micro_batches)


def _weights_first(stage: int, stages: int, micro_batches: int) -> _Row:
    row: _Row = []
    for kind, m in _order_of_1f1b(stage, stages, micro_batches):
        row += [("W", m), ("B", m)] if kind == "B" else [(kind, m)]
    return row


def _keeps_from_the_other_end(stage: int, stages: int, micro_batches: int) -> _Row:
    row: _Row = []
    kept = stages - 1 - stage
    for kind, m in _order_of_1f1b(stage, stages, micro_batches):
        row.append((kind, m))
        if kind == "B" and m >= kept:
            row.append(("W", m - kept))
    return row + [("W", m) for m in range(max(0, micro_batches - kept), micro_batches)]


zero_bubble_order = Exercise(
    task=(
        "zero_bubble_order(stage, stages, micro_batches): return this stage's actions in one step, in order, as a "
        "list of ('F', m), ('B', m) and ('W', m). Each action takes one second. The step must take 3 * "
        "micro_batches + stages - 1 seconds, and a stage may keep at most `stages` micro-batches between F and W."
    ),
    test=_test_zero_bubble,
    solution=_zero_bubble_order,
    wrong={
        "computes each weight gradient at once, as 1F1B does": _weights_at_once,
        "computes all weight gradients at the end": _weights_last,
        "computes no weight gradients": _no_weights,
        "computes the weight gradient before the input gradient": _weights_first,
        "delays the weight gradients of the first stage": _keeps_from_the_other_end,
    },
    hints=(
        "Start from 1F1B. W actions can wait, so use them to fill the time in which a stage would wait for the next B.",
        "The first stage waits for gradients at the end of the step, so the other stages should send them early.",
        "Stage s postpones s weight gradients until no B is left. It runs W of micro-batch m - s after B of "
        "micro-batch m.",
    ),
)

# -------------------------------------------------------------------------------------------------- 3. balanced stages

_MODELS: list[tuple[list[int], int]] = [
    ([1, 1, 1, 1], 2),
    ([4, 1, 1, 1, 1], 2),
    ([3, 3, 3, 3, 5, 1], 3),
    ([1, 1, 1, 9], 3),
    ([2, 2, 2, 3, 3, 4, 2], 3),
    ([5, 4, 3, 2, 1], 5),
    ([6, 1, 1, 1, 1, 6], 2),
    ([1, 8, 1, 8, 1], 3),
]


def _test_cut(answer: Answer) -> str:
    for costs, stages in _MODELS:
        got = answer(list(costs), stages)
        case = f"costs {costs}, {stages} stages"
        if not isinstance(got, (list, tuple)) or not all(isinstance(each, int) for each in got):
            raise WrongAnswerError(f"The result must be a list of indices such as [2, 4], got {got!r}.")
        begins = [0, *got]
        expect(len(begins) == stages, f"{case}: the result must contain {stages - 1} indices, got {list(got)}.")
        rising = all(a < b for a, b in zip(begins, [*got, len(costs)], strict=True))
        expect(rising, f"{case}: the indices must increase, and no stage may be empty, got {list(got)}.")
        best = _dearest(costs, balance(costs, stages))
        expect(
            _dearest(costs, got) == best,
            f"{case}: the cost of the most expensive stage must be {best}, got {_dearest(costs, got)} with "
            f"{list(got)}. A pipeline is as slow as its slowest stage.",
        )
    return "No other split reduces the cost of the most expensive stage."


def _dearest(costs: Sequence[float], begins: Sequence[int]) -> float:
    ends = [*begins, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip([0, *begins], ends, strict=True))


def _cut_evenly(costs: Sequence[float], stages: int) -> list[int]:
    def cuts(after: int, count: int) -> list[list[int]]:
        if count == 0:
            return [[]]
        return [[first, *rest] for first in range(after, len(costs)) for rest in cuts(first + 1, count - 1)]

    def dearest(begins: Sequence[int]) -> float:
        ends = [*begins, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip([0, *begins], ends, strict=True))

    return min(cuts(1, stages - 1), key=dearest)


def _as_many_modules_each(costs: Sequence[float], stages: int) -> list[int]:
    return [len(costs) * stage // stages for stage in range(1, stages)]


def _fills_up_to_the_mean(costs: Sequence[float], stages: int) -> list[int]:
    begins: list[int] = []
    mean, filled = sum(costs) / stages, 0.0
    for place, cost in enumerate(costs):
        left = stages - 1 - len(begins)
        if place and left and (filled + cost > mean or len(costs) - place == left):
            begins.append(place)
            filled = 0.0
        filled += cost
    return begins + list(range(len(costs) - (stages - 1 - len(begins)), len(costs)))


def _gives_ends(costs: Sequence[float], stages: int) -> list[int]:
    return [*_cut_evenly(costs, stages), len(costs)]


def _may_be_empty(costs: Sequence[float], stages: int) -> list[int]:
    return [place for place, cost in enumerate(costs) if cost == max(costs)][: stages - 1]


cut_evenly = Exercise(
    task=(
        "cut_evenly(costs, stages): return the start index of each stage except the first, in increasing order. "
        "Minimize the cost of the most expensive stage. Modules keep their order, and no stage is empty."
    ),
    test=_test_cut,
    solution=_cut_evenly,
    wrong={
        "gives each stage the same number of modules": _as_many_modules_each,
        "fills each stage up to the mean": _fills_up_to_the_mean,
        "returns the ends of stages": _gives_ends,
        "starts stages at the most expensive modules": _may_be_empty,
    },
    hints=(
        "There are few modules, so you can try all splits and return the best one.",
        "To place `count` cuts after `after`, choose the first cut, then place count - 1 cuts after it.",
        "A stage that starts at a and ends before b costs sum(costs[a:b]). Minimize the maximum over all stages.",
    ),
)
