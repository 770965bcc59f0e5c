"""The exercises of 11_debugging_hangs: compare what ranks have entered, stop together, write a watchdog."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.debug.hangs import CollectiveError, watching
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.world import World

# ---------------------------------------------------------------------------------------------- 1. the first divergence

Places = dict[str | None, list[int]]
Divergence = tuple[int, Places]

_SUM, _SMALL, _COPY, _MEET = "all_reduce [3]", "all_reduce [2]", "broadcast [3]", "barrier"
_ENTERED: dict[str, tuple[list[list[str]], Divergence | None]] = {
    "the ranks are in step": ([[_SUM, _MEET], [_SUM, _MEET]], None),
    "nobody has entered anything": ([[], [], []], None),
    "another operation comes second": ([[_SUM, _SUM, _MEET], [_SUM, _COPY, _MEET]], (1, {_SUM: [0], _COPY: [1]})),
    "the same two come in another order": ([[_SUM, _COPY], [_COPY, _SUM]], (0, {_SUM: [0], _COPY: [1]})),
    "another size comes first": ([[_SUM, _MEET], [_SMALL, _MEET]], (0, {_SUM: [0], _SMALL: [1]})),
    "rank 1 has not come to the last one": ([[_SUM, _MEET], [_SUM]], (1, {_MEET: [0], None: [1]})),
    "rank 0 has not come": ([[_SUM], [_SUM, _COPY], [_SUM, _COPY]], (1, {None: [0], _COPY: [1, 2]})),
    "rank 2 alone differs": ([[_SUM, _SUM], [_SUM, _SUM], [_SUM, _MEET]], (1, {_SUM: [0, 1], _MEET: [2]})),
    "one differs and one has not come": ([[_SUM], [_MEET], []], (0, {_SUM: [0], _MEET: [1], None: [2]})),
}


def _test_first(answer: Answer) -> str:
    for story, (entered, expected) in _ENTERED.items():
        found = answer([list(each) for each in entered])
        expect(
            found == expected,
            f"Where {story}, {entered}, the answer is {expected}; yours is {found}.",
        )
    return "The first row that differs is found, whoever differs, and so are those who have not come."


def _first_divergence(entered: Sequence[Sequence[str]]) -> Divergence | None:
    for row in range(max(map(len, entered))):
        places: Places = {}
        for rank, calls in enumerate(entered):
            what = calls[row] if row < len(calls) else None
            places.setdefault(what, []).append(rank)
        if len(places) > 1:
            return row, places
    return None


def _rows_that_all_have(entered: Sequence[Sequence[str]]) -> Divergence | None:
    return _first_divergence([each[: min(map(len, entered))] for each in entered])


def _last_row(entered: Sequence[Sequence[str]]) -> Divergence | None:
    places: Places = {}
    for rank, calls in enumerate(entered):
        places.setdefault(calls[-1] if calls else None, []).append(rank)
    return (max(map(len, entered)) - 1, places) if len(places) > 1 else None


def _operations_only(entered: Sequence[Sequence[str]]) -> Divergence | None:
    return _first_divergence([[call.split()[0] for call in calls] for calls in entered])


def _two_ranks(entered: Sequence[Sequence[str]]) -> Divergence | None:
    return _first_divergence(entered[:2])


def _from_one(entered: Sequence[Sequence[str]]) -> Divergence | None:
    found = _first_divergence(entered)
    return found and (found[0] + 1, found[1])


def _which_are_there(entered: Sequence[Sequence[str]]) -> Divergence | None:
    return _first_divergence([sorted(calls) for calls in entered])


first_divergence = Exercise(
    task=(
        "first_divergence(entered): entered has a list of collectives for each rank. Return the number of the first "
        "row in which they differ (from 0), and a dict from the collective there (None for those who have not come) to "
        "the ranks; None where they never differ."
    ),
    test=_test_first,
    solution=_first_divergence,
    wrong={
        "compares only rows that all ranks have": _rows_that_all_have,
        "compares the last collective of each rank": _last_row,
        "compares operations and not sizes": _operations_only,
        "compares the first two ranks": _two_ranks,
        "counts rows from one": _from_one,
        "compares which collectives there are, and not their order": _which_are_there,
    },
    hints=(
        "Row by row, up to the longest list. A rank whose list has ended has None in that row.",
        "For each row a dict: places.setdefault(what, []).append(rank). Ranks differ where it has more than one key.",
    ),
)

# ----------------------------------------------------------------------------------------------------- 2. stop together

HeldOut = Callable[[], tuple[float, int]]
_MOST = 6
_FALLS_TO_3: list[tuple[float, int]] = [(9, 2), (6, 2), (4, 2), (5, 2)]
_RISES_AT_2: list[tuple[float, int]] = [(4, 2), (5, 2), (5, 2), (6, 2)]
# What each rank finds after each step: the sum of the losses of its held-out samples, and how many these are.
_PARTS: dict[str, list[list[tuple[float, int]]]] = {
    "both ranks fall, and rise at step 4": [_FALLS_TO_3, _FALLS_TO_3],
    "rank 0 rises at step 2, and the mean at step 4": [_RISES_AT_2, _FALLS_TO_3],
    "rank 1 rises at step 2, and the mean at step 4": [_FALLS_TO_3, _RISES_AT_2],
    "rank 1 has nine times the samples, and rises at step 3": [
        [(4, 1), (3, 1), (1, 1), (1, 1), (1, 1)],
        [(36, 9), (27, 9), (30, 9), (31, 9), (32, 9)],
    ],
    "it falls to the end": [[(10 - step, 2) for step in range(_MOST)]] * 2,
}


def _expected_steps(parts: list[list[tuple[float, int]]]) -> int:
    best = float("inf")
    for number, of_ranks in enumerate(zip(*parts, strict=True), start=1):
        mean = sum(total for total, _ in of_ranks) / sum(count for _, count in of_ranks)
        if mean >= best or number == _MOST:
            return number
        best = mean
    raise AssertionError("the story is too short")


def _run_stories(world: World, answer: Answer) -> list[tuple[Any, int]]:
    """What the answer returned, and how many steps this rank has made, in each story."""
    return [_run_story(world, answer, parts[world.rank]) for parts in _PARTS.values()]


def _run_story(world: World, answer: Answer, mine: list[tuple[float, int]]) -> tuple[Any, int]:
    made = 0

    def step() -> None:
        nonlocal made
        made += 1
        expect(made <= 2 * _MOST, f"You make more than `most` steps, which is {_MOST}.")
        dist.all_reduce(torch.ones(3))

    def held_out() -> tuple[float, int]:
        return mine[min(made, len(mine)) - 1]

    with watching(world, 2.0):
        returned = answer(world, step, held_out, _MOST)
        dist.barrier()
    return returned, made


def _test_flat(answer: Answer) -> str:
    stuck = "Some rank is stuck, and not in a collective."
    try:
        ranks = on_ranks(_run_stories, 2, answer, stuck=stuck, timeout=60)
    except RankError as error:
        expect(not error.is_a(CollectiveError), f"The ranks do not do the same, and so they hang: {error.message}")
        raise
    for number, (story, parts) in enumerate(_PARTS.items()):
        expected = _expected_steps(parts)
        for rank, (returned, made) in enumerate(each[number] for each in ranks):
            told = f"Where {story}, all ranks should stop after step {expected}"
            expect(made == expected, f"{told}; rank {rank} made {made}.")
            expect(returned == expected, f"{told}, and return that; rank {rank} returned {returned!r}.")
    return "All ranks stop at the same step, and it is that of the mean over all samples."


def _train_until_flat(world: World, step: Callable[[], None], held_out: HeldOut, most: int) -> int:
    best, steps = float("inf"), 0
    while steps < most:
        step()
        steps += 1
        both = torch.tensor(held_out())  # a sum and a count, which can be added up
        dist.all_reduce(both)
        mean = (both[0] / both[1]).item()  # the same on all ranks, and so is what follows from it
        if mean >= best:
            break
        best = mean
    return steps


def _stopping(flat: Callable[[World, float, int, float], tuple[bool, float]]) -> Answer:
    """The loop with another decision: `flat(world, total, count, best)` says whether to stop, and the loss."""

    def answer(world: World, step: Callable[[], None], held_out: HeldOut, most: int) -> int:
        best, steps = float("inf"), 0
        while steps < most:
            step()
            steps += 1
            stop, loss = flat(world, *held_out(), best)
            if stop:
                break
            best = min(best, loss)
        return steps

    return answer


def _by_itself(world: World, total: float, count: int, best: float) -> tuple[bool, float]:
    return total / count >= best, total / count


def _only_rank_zero(world: World, total: float, count: int, best: float) -> tuple[bool, float]:
    return world.rank == 0 and total / count >= best, total / count


def _rank_zero_for_all(world: World, total: float, count: int, best: float) -> tuple[bool, float]:
    flag = torch.tensor(float(total / count >= best))
    dist.broadcast(flag, 0)
    return bool(flag), total / count


def _anybody(world: World, total: float, count: int, best: float) -> tuple[bool, float]:
    flag = torch.tensor(float(total / count >= best))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag), total / count


def _mean_of_means(world: World, total: float, count: int, best: float) -> tuple[bool, float]:
    mean = torch.tensor(total / count)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item() >= best, mean.item()


def _asks_if_it_is_flat(world: World, total: float, count: int, best: float) -> tuple[bool, float]:
    if total / count < best:
        return False, total / count
    return _rank_zero_for_all(world, total, count, best)


train_until_flat = Exercise(
    task=(
        "train_until_flat(world, step, held_out, most): make steps, `most` at most, until the mean held-out loss over "
        "all samples of all ranks has not fallen; held_out() is this rank's sum and count. Return how many steps."
    ),
    test=_test_flat,
    solution=_train_until_flat,
    wrong={
        "lets each rank decide for itself": _stopping(_by_itself),
        "stops on rank 0 only": _stopping(_only_rank_zero),
        "lets rank 0's own loss decide for all": _stopping(_rank_zero_for_all),
        "stops as soon as any rank's own loss does not fall": _stopping(_anybody),
        "takes the mean of the ranks' means": _stopping(_mean_of_means),
        "asks the others only where its own loss does not fall": _stopping(_asks_if_it_is_flat),
    },
    hints=(
        "Which variable decides about `break`? It has to have the same value on all ranks, in every step.",
        "A sum and a count can be added up over the ranks, a mean cannot: one all-reduce of two numbers.",
        "both = torch.tensor(held_out()), all-reduce it, and divide. In every step, before the `if`.",
    ),
)

# -------------------------------------------------------------------------------------------------------- 3. a watchdog

_SECONDS = 0.8
_CALM_SECONDS = 2.4  # how long a story without a hang is told
_LATEST_SECONDS = 15.0  # when a hang has to have been told of: plenty, for a busy machine
_SLOWEST_SECONDS = 10.0  # that a watchdog may take to return after the end
_NEVER = float("inf")


@dataclass
class _Story:
    """Of each rank, what it enters: (from when, until when, the collective), in seconds. What all should be told."""

    ranks: list[list[tuple[float, float, str]]]
    verdict: Divergence | None = None
    began: float = 0.0
    told: dict[int, list[Any]] = field(default_factory=lambda: {0: [], 1: [], 2: []})
    errors: dict[int, BaseException] = field(default_factory=dict)
    all_told: float | None = None  # when they were

    def entered(self, rank: int) -> list[tuple[str, bool]]:
        now = time.monotonic() - self.began
        return [(what, end <= now) for start, end, what in self.ranks[rank] if start <= now]

    def over(self) -> bool:
        """A story with a hang ends a moment after everybody has been told; the moment shows who tells twice."""
        passed = time.monotonic() - self.began
        if self.verdict is None:
            return passed > _CALM_SECONDS
        if all(self.told.values()):
            self.all_told = self.all_told or passed
            return passed > self.all_told + 0.3
        return passed > _LATEST_SECONDS

    def play(self, answer: Answer) -> list[threading.Thread]:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=5))
        self.began = time.monotonic()
        threads = [threading.Thread(target=self._one, args=(answer, rank, store), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        return threads

    def _one(self, answer: Answer, rank: int, store: dist.Store) -> None:
        try:
            answer(rank, 3, store, lambda: self.entered(rank), _SECONDS, self.told[rank].append, self.over)
        except BaseException as error:
            self.errors[rank] = error


def _stories() -> dict[str, _Story]:
    first, hangs = (0.1, 0.2, _SUM), (0.3, _NEVER)
    short = [(0.1 + 0.5 * n, 0.5 + 0.5 * n, _SUM) for n in range(4)]
    return {
        "the ranks are in step, and then compute": _Story([[first]] * 3),
        "there are many short waits, longer than `seconds` together": _Story([short, short, [(0.45, 0.5, _SUM)]]),
        "rank 2 comes a little late": _Story([[(0.1, 0.6, _SUM)], [(0.1, 0.6, _SUM)], [(0.55, 0.6, _SUM)]]),
        "the order differs in row 1": _Story(
            [[first, (*hangs, _COPY)], [first, (*hangs, _SUM)], [first, (*hangs, _COPY)]],
            (1, {_COPY: [0, 2], _SUM: [1]}),
        ),
        "rank 2 has not come": _Story(
            [[first, (*hangs, _MEET)], [first, (*hangs, _MEET)], [first]], (1, {_MEET: [0, 1], None: [2]})
        ),
        "rank 0 is the one that has not come": _Story(
            [[first], [first, (*hangs, _SUM)], [first, (*hangs, _SUM)]], (1, {None: [0], _SUM: [1, 2]})
        ),
    }


def _test_watchdog(answer: Answer) -> str:
    stories = _stories()
    threads = [thread for story in stories.values() for thread in story.play(answer)]
    latest = time.monotonic() + _LATEST_SECONDS + _SLOWEST_SECONDS
    while any(thread.is_alive() for thread in threads) and time.monotonic() < latest:
        if any(story.errors for story in stories.values()):
            break
        time.sleep(0.02)
    for name, story in stories.items():
        for rank, error in story.errors.items():
            if isinstance(error, dist.DistStoreError):
                raise WrongAnswerError(f"Where {name}, rank {rank} waits for a word in the store that nobody leaves.")
            raise error
    expect(not any(thread.is_alive() for thread in threads), "A watchdog has not returned after `over()` was true.")
    for name, story in stories.items():
        for rank, told in story.told.items():
            if story.verdict is None:
                expect(not told, f"Where {name}, there is no hang; the watchdog of rank {rank} told {told[:1]}.")
            else:
                expect(bool(told), f"Where {name}, the watchdog of rank {rank} told nothing.")
                expect(len(told) == 1, f"Where {name}, the watchdog of rank {rank} told {len(told)} times.")
                expect(told[0] == story.verdict, f"Where {name}, tell {story.verdict}; rank {rank} told {told[0]}.")
    return "Every hang is told on all ranks, once, and nobody is told of one that there is not."


def _watchdog(
    rank: int,
    size: int,
    store: dist.Store,
    entered: Callable[[], list[tuple[str, bool]]],
    seconds: float,
    tell: Callable[[Any], None],
    over: Callable[[], bool],
) -> None:
    seen, since = entered(), time.monotonic()
    while not over():
        time.sleep(0.02)
        mine = entered()
        if mine != seen:  # there is progress: the time begins anew
            seen, since = mine, time.monotonic()
        waits = bool(mine) and not mine[-1][1]
        if waits and time.monotonic() - since >= seconds:
            store.set("alarm", "")
        if not store.check(["alarm"]):  # also those who do not wait have to look, and to answer
            continue
        store.set(f"rank {rank}", json.dumps([what for what, _ in mine]))
        lists = [json.loads(store.get(f"rank {other}")) for other in range(size)]
        for row in range(max(map(len, lists))):
            places: dict[str | None, list[int]] = {}
            for other, calls in enumerate(lists):
                places.setdefault(calls[row] if row < len(calls) else None, []).append(other)
            if len(places) > 1:
                tell((row, places))
                return


def _variant(
    *,
    answers: bool = True,
    anew: bool = True,
    done_counts: bool = True,
    patient: bool = True,
    tellers: Sequence[int] = (0, 1, 2),
    once: bool = True,
    compare: Callable[[Sequence[Sequence[str]]], Any] = _first_divergence,
) -> Answer:
    """The solution with a mistake."""

    def answer(
        rank: int,
        size: int,
        store: dist.Store,
        entered: Callable[[], list[tuple[str, bool]]],
        seconds: float,
        tell: Callable[[Any], None],
        over: Callable[[], bool],
    ) -> None:
        seen, since = entered(), time.monotonic()
        while not over():
            time.sleep(0.02)
            mine = entered()
            if mine != seen and (anew or not seen):
                seen, since = mine, time.monotonic()
            waits = bool(mine) and not (done_counts and mine[-1][1])
            if waits and (not patient or time.monotonic() - since >= seconds):
                store.set("alarm", "")
            if not store.check(["alarm"]) or not (answers or waits):
                continue
            store.set(f"rank {rank}", json.dumps([what for what, _ in mine]))
            found = compare([json.loads(store.get(f"rank {other}")) for other in range(size)])
            if rank in tellers:
                tell(found)
            if once:
                return

    return answer


watchdog = Exercise(
    task=(
        "watchdog(rank, size, store, entered, seconds, tell, over): until over(), look whether this rank waits in one "
        "collective for `seconds`; then the watchdogs of all ranks tell((row, places)) once, as in exercise 1."
    ),
    test=_test_watchdog,
    solution=_watchdog,
    wrong={
        "answers only where its own rank waits": _variant(answers=False),
        "counts the time from the first collective": _variant(anew=False),
        "takes a rank that computes for one that waits": _variant(done_counts=False),
        "tells as soon as a rank waits": _variant(patient=False),
        "tells on rank 0 only": _variant(tellers=[0]),
        "tells again and again": _variant(once=False),
        "compares the last collective of each rank": _variant(compare=_last_row),
    },
    hints=(
        "Two reasons to act: my rank waits for too long, or somebody else has said so, with a key in the store.",
        "An alarm is store.set('alarm', ''). Every watchdog does store.check(['alarm']), in every round.",
        "After an alarm: leave your own list in the store, as JSON, then read those of all ranks.",
        "The time that counts is since `entered()` has last changed, and only while the last of it is not done.",
    ),
)
