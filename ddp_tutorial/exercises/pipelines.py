"""The exercises of 18_pipelines: the order of 1F1B, how many micro-batches fill a pipeline, and stages that balance."""

import copy
import math
from collections.abc import Sequence
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
        said = f"{stages} stages, {micro_batches} micro-batches"
        table = [_row(answer, stage, stages, micro_batches) for stage in range(stages)]
        try:
            check(table, stages, micro_batches)
        except ScheduleError as error:
            raise WrongAnswerError(f"{said}: {error}.") from None
        right = one_f_one_b(stages, micro_batches)
        for rank, (got, most) in enumerate(zip(peaks(table), peaks(right), strict=True)):
            expect(
                got <= most,
                f"{said}: stage {rank} keeps the activations of {got} micro-batches at a time, and 1F1B of no more "
                f"than {most}. It does {_shown(table[rank])}.",
            )
        slow, quick = simulate(table).makespan, simulate(right).makespan
        expect(
            slow <= quick,
            f"{said}: with 1 s for a forward and 2 s for a backward it takes {slow:g} s, and 1F1B {quick:g} s. Stage "
            f"0 does {_shown(table[0])}.",
        )
    ours = [_row(answer, stage, 2, 4) for stage in range(2)]
    on_ranks(_run_it, 2, ours, stuck="Two real ranks that did as your rows say did not end.", timeout=30)
    return "Two real ranks did as your rows say, and have the gradient of one process, bit for bit."


def _row(answer: Answer, stage: int, stages: int, micro_batches: int) -> list[Action]:
    got = answer(stage, stages, micro_batches)
    try:
        row = [(str(kind), int(m)) for kind, m in got]
    except (TypeError, ValueError):
        raise WrongAnswerError(f"Return a list such as [('F', 0), ('B', 0)]; you gave {got!r}.") from None
    expect({kind for kind, _ in row} <= {"F", "B"}, f"An action is 'F' or 'B'; you gave {got!r}.")
    return [Action("F" if kind == "F" else "B", stage, m) for kind, m in row]


def _shown(row: Sequence[Action]) -> str:
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
        expect(torch.equal(got, right), "On real ranks the gradient was another.")


def _order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
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
    row = _order(stage, stages, micro_batches)
    return row[: len(row) - (stages - 1 - stage)]


def _counts_from_the_other_end(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return _order(stages - 1 - stage, stages, micro_batches)


order_of_1f1b = Exercise(
    task=(
        "order_of_1f1b(stage, stages, micro_batches): return what this stage does in one step of 1F1B, in order, as a "
        "list of ('F', m) and ('B', m) for the forward and the backward of micro-batch m."
    ),
    test=_test_order,
    solution=_order,
    wrong={
        "does all forwards first": _all_forwards_first,
        "goes ahead by no forward": _nobody_ahead,
        "goes ahead by one forward too many": _one_too_many,
        "goes ahead by as many on all stages": _all_alike,
        "does the backward before the forward": _backward_first,
        "stops when there are no forwards left": _no_cool_down,
        "counts stages from the other end": _counts_from_the_other_end,
    },
    hints=(
        "The last stage can turn round at once: F0 B0 F1 B1 ... What does the stage before it have to do meanwhile?",
        "Stage s first does stages - 1 - s forwards, or all if there are fewer; then a forward and a backward in turn.",
        "When no forwards are left, the backwards go on alone. Each list has every micro-batch once as F, once as B.",
    ),
)

# ---------------------------------------------------------------------------------------------- 2. enough micro-batches

_WANTED = [(2, 0.2), (4, 0.2), (8, 0.1), (8, 0.5), (3, 0.34), (1, 0.01), (16, 0.05)]  # stages, at most


def _test_fewest(answer: Answer) -> str:
    for stages, at_most in _WANTED:
        got = answer(stages, at_most)
        if isinstance(got, bool) or not isinstance(got, (int, float)) or got != int(got) or got < 1:
            raise WrongAnswerError(f"Return a whole number, 1 or more; you gave {got!r}.")
        right = _fewest(stages, at_most)
        there = simulate(one_f_one_b(stages, right)).bubble
        reached = (stages - 1) / (int(got) + stages - 1)
        expect(
            int(got) == right,
            f"{stages} stages, a bubble of at most {at_most:.0%}: {int(got)} micro-batches leave one of {reached:.1%}, "
            f"{right} one of {there:.1%}, and are the fewest that are enough.",
        )
    return "About four times as many micro-batches as stages, for a bubble of a fifth."


def _fewest(stages: int, at_most: float) -> int:
    micro_batches = 1
    while (stages - 1) / (micro_batches + stages - 1) > at_most + 1e-9:
        micro_batches += 1
    return micro_batches


def _over_what_is_busy(stages: int, at_most: float) -> int:
    return max(1, math.ceil((stages - 1) / at_most - 1e-9))


def _counts_itself(stages: int, at_most: float) -> int:
    return max(1, math.ceil(stages * (1 - at_most) / at_most - 1e-9))


def _one_too_few(stages: int, at_most: float) -> int:
    return max(1, _fewest(stages, at_most) - 1)


def _as_many_as_stages(stages: int, at_most: float) -> int:
    return stages


fewest_micro_batches = Exercise(
    task=(
        "fewest_micro_batches(stages, at_most): return how many micro-batches a step needs at least, for a bubble of "
        "no more than `at_most` of all ranks' time. All stages take equally long."
    ),
    test=_test_fewest,
    solution=_fewest,
    wrong={
        "divides by the time that ranks are busy": _over_what_is_busy,
        "lets every stage wait for all stages": _counts_itself,
        "gives one too few": _one_too_few,
        "takes as many as there are stages": _as_many_as_stages,
    },
    hints=(
        "A rank is busy for as many slots as there are micro-batches. How many slots does the whole step take?",
        "The step takes micro_batches + stages - 1 slots, so (stages - 1) / (micro_batches + stages - 1) is idle.",
        "Try 1, 2, 3, ... Leave room for rounding: compare with at_most + 1e-9.",
    ),
)

# ----------------------------------------------------------------------------------------------- 3. stages that balance

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
        said = f"costs {costs}, {stages} stages"
        if not isinstance(got, (list, tuple)) or not all(isinstance(each, int) for each in got):
            raise WrongAnswerError(f"Return a list of places, such as [2, 4]; you gave {got!r}.")
        begins = [0, *got]
        expect(len(begins) == stages, f"{said}: {stages - 1} stages begin after the first; you gave {list(got)}.")
        rising = all(a < b for a, b in zip(begins, [*got, len(costs)], strict=True))
        expect(rising, f"{said}: with {list(got)} some stage is empty, or the places do not rise.")
        best = _dearest(costs, balance(costs, stages))
        expect(
            _dearest(costs, got) == best,
            f"{said}: with {list(got)} the dearest stage costs {_dearest(costs, got)}; it need not cost more than "
            f"{best}. A pipeline is as slow as its slowest stage.",
        )
    return "No other cut has a cheaper dearest stage."


def _dearest(costs: Sequence[float], begins: Sequence[int]) -> float:
    ends = [*begins, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip([0, *begins], ends, strict=True))


def _cut(costs: Sequence[float], stages: int) -> list[int]:
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
    return [*_cut(costs, stages), len(costs)]


def _may_be_empty(costs: Sequence[float], stages: int) -> list[int]:
    return [place for place, cost in enumerate(costs) if cost == max(costs)][: stages - 1]


cut_evenly = Exercise(
    task=(
        "cut_evenly(costs, stages): return where each stage but the first begins (places in `costs`, rising), so that "
        "the dearest stage costs as little as possible. Modules stay in their order, and no stage is empty."
    ),
    test=_test_cut,
    solution=_cut,
    wrong={
        "gives each stage as many modules": _as_many_modules_each,
        "fills each stage up to the mean": _fills_up_to_the_mean,
        "gives where stages end": _gives_ends,
        "begins at the dearest modules": _may_be_empty,
    },
    hints=(
        "There are few modules: all cuts can be tried, and the best one taken.",
        "To place `count` cuts from `after` on: choose the first, then place count - 1 from behind it.",
        "The dearest stage: max(sum(costs[a:b])) over the places a where stages begin and b where they end.",
    ),
)
