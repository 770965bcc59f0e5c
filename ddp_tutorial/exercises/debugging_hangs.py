"""Exercises on coordinated stopping, flight-recorder dumps, and watchdogs, for notebook 11_debugging_hangs."""

import ast
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_tutorial.debug.hangs import CollectiveError, watching
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.world import World

Places = dict[str | None, list[int]]  # maps each collective (None if not entered) to its ranks

# ----------------------------------------------------------------------------------------------------- 1. stop together

Validate = Callable[[], tuple[float, int]]
_MOST = 6
_FALLS_TO_3: list[tuple[float, int]] = [(9, 2), (6, 2), (4, 2), (5, 2)]
_RISES_AT_2: list[tuple[float, int]] = [(4, 2), (5, 2), (5, 2), (6, 2)]
# The sum of the validation losses and the number of validation samples, for each rank and step.
_PARTS: dict[str, list[list[tuple[float, int]]]] = {
    "the loss of both ranks falls and then rises at step 4": [_FALLS_TO_3, _FALLS_TO_3],
    "rank 0's loss rises at step 2, and the mean loss rises at step 4": [_RISES_AT_2, _FALLS_TO_3],
    "rank 1's loss rises at step 2, and the mean loss rises at step 4": [_FALLS_TO_3, _RISES_AT_2],
    "rank 1 has nine times as many samples, and its loss rises at step 3": [
        [(4, 1), (3, 1), (1, 1), (1, 1), (1, 1)],
        [(36, 9), (27, 9), (30, 9), (31, 9), (32, 9)],
    ],
    "the loss falls until the last step": [[(10 - step, 2) for step in range(_MOST)]] * 2,
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
    """Return the answer's result and this rank's number of steps for each scenario in `_PARTS`."""
    return [_run_story(world, answer, parts[world.rank]) for parts in _PARTS.values()]


def _run_story(world: World, answer: Answer, mine: list[tuple[float, int]]) -> tuple[Any, int]:
    made = 0

    def step() -> None:
        nonlocal made
        made += 1
        expect(made <= 2 * _MOST, f"Take at most `most` = {_MOST} steps, got {made}.")
        dist.all_reduce(torch.ones(3))

    def validate() -> tuple[float, int]:
        return mine[min(made, len(mine)) - 1] if made else (float("inf"), 1)  # before the first step

    with watching(world, 2.0):
        returned = answer(world, step, validate, _MOST)
        dist.barrier()
    return returned, made


def _test_flat(answer: Answer) -> str:
    stuck = "A rank hangs outside a collective."
    try:
        ranks = on_ranks(_run_stories, 2, answer, stuck=stuck, timeout=60)
    except RankError as error:
        expect(not error.is_a(CollectiveError), f"The ranks enter different collectives and hang: {error.message}")
        raise
    for number, (story, parts) in enumerate(_PARTS.items()):
        expected = _expected_steps(parts)
        for rank, (returned, made) in enumerate(each[number] for each in ranks):
            case = f"If {story}, all ranks must stop after step {expected}"
            expect(made == expected, f"{case}, got {made} steps on rank {rank}.")
            expect(returned == expected, f"{case} and return {expected}, got {returned!r} on rank {rank}.")
    return "All ranks stop after the same step, based on the mean loss over all samples."


def _train_until_flat(world: World, step: Callable[[], None], validate: Validate, most: int) -> int:
    best, steps = float("inf"), 0
    while steps < most:
        step()
        steps += 1
        both = torch.tensor(validate())  # a loss sum and a count, which can be summed over ranks
        dist.all_reduce(both)
        mean = (both[0] / both[1]).item()  # the same on all ranks, so all ranks decide the same
        if mean >= best:
            break
        best = mean
    return steps


def _stopping(flat: Callable[[World, float, int, float], tuple[bool, float]]) -> Answer:
    """Return a loop that runs `stop, loss = flat(world, total, count, best)` after each step.

    The loop exits after `most` steps, or earlier if `stop` is true.
    """

    def answer(world: World, step: Callable[[], None], validate: Validate, most: int) -> int:
        best, steps = float("inf"), 0
        while steps < most:
            step()
            steps += 1
            stop, loss = flat(world, *validate(), best)
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
        "train_until_flat(world, step, validate, most): take at most `most` steps, until the mean validation loss over "
        "all ranks' samples stops falling. validate() returns this rank's loss sum and sample count. Return the number "
        "of steps."
    ),
    test=_test_flat,
    solution=_train_until_flat,
    wrong={
        "lets each rank decide for itself": _stopping(_by_itself),
        "stops on rank 0 only": _stopping(_only_rank_zero),
        "lets rank 0's own loss decide for all": _stopping(_rank_zero_for_all),
        "stops as soon as any rank's own loss does not fall": _stopping(_anybody),
        "takes the mean of the ranks' means": _stopping(_mean_of_means),
        "communicates only if its own loss does not fall": _stopping(_asks_if_it_is_flat),
    },
    hints=(
        "Which variable decides when to `break`? This variable must have the same value on all ranks in every step.",
        "You can all-reduce a loss sum and a count, but not a mean. Use one all-reduce for both numbers.",
        "In every step, before the `if`, create both = torch.tensor(validate()), all-reduce the tensor, and divide.",
    ),
)

# ---------------------------------------------------------------------------------------------------- 2. read raw dumps

Dump = dict[str, Any]
Reading = tuple[str, int, Places]
Made = tuple[str, int, str, list[int]]  # group, number, operation, size of the input

_GROUPS = {"0": [0, 1, 2, 3], "1": [0, 2], "2": [1, 3]}


def _dump(rank: int, made: Sequence[Made]) -> Dump:
    """Return a flight-recorder dump in PyTorch's format."""
    entries = []
    for record, (group, number, op, size) in enumerate(made):
        is_p2p = op.startswith(("send", "recv"))
        tensors: dict[str, Any] = {
            f"{side}_{what}": [value] if size else []
            for side in ("input", "output")
            for what, value in (("sizes", size), ("dtypes", "Float"))
        }
        frames = [
            {"name": op.split()[0], "filename": "torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "step", "filename": "train.py", "line": 20 + number},
        ]
        entries.append(
            {
                "record_id": 40 + record,
                "pg_id": int(group),
                "process_group": (group, "default_pg" if group == "0" else "undefined"),
                "collective_seq_id": number,
                "p2p_seq_id": record if is_p2p else 0,
                "op_id": 60 + record,
                "profiling_name": f"nccl:{op}",
                "time_created_ns": 1_700_000_000_000_000_000 + 1_000_000 * record,
                **tensors,
                "state": "scheduled" if record == len(made) - 1 else "completed",
                "retired": record < len(made) - 1,
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
                "frames": frames,
            }
        )
    config = {
        name: {"name": name, "desc": "default_pg" if name == "0" else "undefined", "ranks": str(ranks)}
        for name, ranks in _GROUPS.items()
        if rank in ranks
    }
    return {"version": "2.10", "pg_config": config, "entries": entries}


def _sums(group: str, *numbers: int) -> list[Made]:
    return [(group, number, "all_reduce", [3]) for number in numbers]


_PAIRS = [_sums("1", 1, 2), _sums("2", 1, 2)] * 2  # for each rank, the all-reduces in its pair
_DUMPS: dict[str, tuple[list[list[Made]], Reading | None]] = {
    "all ranks have entered the same collectives": ([_sums("0", 1, 2, 3) + pair for pair in _PAIRS], None),
    "rank 2 calls a different operation": (
        [
            _PAIRS[rank] + _sums("0", 1) + [("0", 2, "broadcast" if rank == 2 else "all_reduce", [3])]
            for rank in range(4)
        ],
        ("0", 2, {"all_reduce [[3]]": [0, 1, 3], "broadcast [[3]]": [2]}),
    ),
    "rank 3 has not entered a collective in its pair's group": (
        [_sums("0", 1, 2) + _sums(str(1 + rank % 2), *((1, 2, 3) if rank < 3 else (1, 2))) for rank in range(4)],
        ("2", 3, {"all_reduce [[3]]": [1], None: [3]}),
    ),
    "the tensor sizes differ": (
        [_sums("0", 1) + [("0", 2, "all_reduce", [4 if rank == 1 else 3])] + _PAIRS[rank] for rank in range(4)],
        ("0", 2, {"all_reduce [[3]]": [0, 2, 3], "all_reduce [[4]]": [1]}),
    ),
    "the ring buffers start at different sequence numbers": (
        [
            [*_sums("0", *range((4, 6, 5, 6)[rank], 9)), ("0", 9, "barrier" if rank == 0 else "all_reduce", [])]
            for rank in range(4)
        ],
        ("0", 9, {"barrier []": [0], "all_reduce []": [1, 2, 3]}),
    ),
    "ranks 0 and 1 also send and receive": (
        [
            _sums("0", 1)
            + ([("0", 1, f"send {rank}->{1 - rank}", [8])] if rank == 0 else [])
            + ([("0", 1, f"recv {rank}<-{1 - rank}", [8])] if rank == 1 else [])
            + _sums("0", *((2, 3) if rank != 1 else (2,)))
            for rank in range(4)
        ],
        ("0", 3, {"all_reduce [[3]]": [0, 2, 3], None: [1]}),
    ),
}


def _test_dumps(answer: Answer) -> str:
    for story, (of_ranks, expected) in _DUMPS.items():
        found = answer({rank: _dump(rank, made) for rank, made in enumerate(of_ranks)})
        expect(found == expected, f"If {story}, the result must be {expected}, got {found}.")
    return "Your function finds every divergence, despite several groups, ring buffers, and point-to-point entries."


def _read_dumps(dumps: Mapping[int, Dump]) -> Reading | None:
    groups = {
        name: ast.literal_eval(config["ranks"]) for dump in dumps.values() for name, config in dump["pg_config"].items()
    }
    for group, ranks in groups.items():
        calls: dict[int, dict[int, str]] = {rank: {} for rank in ranks}  # sequence number -> operation and sizes
        for rank in ranks:
            for entry in dumps[rank]["entries"]:
                if entry["process_group"][0] == group and not entry["is_p2p"]:
                    op = entry["profiling_name"].partition(":")[2]
                    calls[rank][entry["collective_seq_id"]] = f"{op} {entry['input_sizes']}"
        kept = [numbers for numbers in calls.values() if numbers]
        if not kept:
            continue
        for number in range(max(map(min, kept)), max(map(max, kept)) + 1):
            places: dict[str | None, list[int]] = {}
            for rank in ranks:
                places.setdefault(calls[rank].get(number), []).append(rank)
            if len(places) > 1:
                return group, number, places
    return None


def _reading(
    *,
    members: bool = True,
    by_group: bool = True,
    by_number: bool = True,
    from_common: bool = True,
    sizes: bool = True,
    skip_p2p: bool = True,
    absent: bool = True,
) -> Answer:
    """Return a variant of the solution with a mistake."""

    def answer(dumps: Mapping[int, Dump]) -> Reading | None:
        groups: dict[str, list[int]] = {}
        for dump in dumps.values():
            for name, config in dump["pg_config"].items():
                groups[name] = ast.literal_eval(config["ranks"]) if members else list(dumps)
        for group, ranks in groups.items():
            calls: dict[int, dict[int, str]] = {rank: {} for rank in ranks}
            for rank in ranks:
                for entry in dumps[rank]["entries"]:
                    if (by_group and entry["process_group"][0] != group) or (skip_p2p and entry["is_p2p"]):
                        continue
                    number = entry["collective_seq_id"] if by_number else len(calls[rank])
                    op = entry["profiling_name"].partition(":")[2]
                    calls[rank][number] = f"{op} {entry['input_sizes']}"
            kept = [numbers for numbers in calls.values() if numbers]
            first = max(map(min, kept), default=0) if from_common else min(map(min, kept), default=0)
            for number in range(first, max(map(max, kept), default=0) + 1):
                places: Places = {}
                for rank in ranks:
                    if absent or number in calls[rank]:
                        places.setdefault(calls[rank].get(number), []).append(rank)
                if len(places if sizes else {what and what.split()[0] for what in places}) > 1:
                    return group, number, places
        return None

    return answer


read_dumps = Exercise(
    task=(
        "read_dumps(dumps): `dumps` maps each rank to its raw dump. Find the first collective at which the ranks of a "
        "group diverge. Return the group, the collective's sequence number, and a dict that maps operation and sizes, "
        "such as 'all_reduce [[3]]', to the ranks (with the key None for ranks that have not entered the collective). "
        "Return None if no group diverges."
    ),
    test=_test_dumps,
    solution=_read_dumps,
    wrong={
        "expects every rank in every group": _reading(members=False),
        "mixes the sequence numbers of different groups": _reading(by_group=False),
        "compares by position in the buffer": _reading(by_number=False),
        "starts at a sequence number that some buffers have overwritten": _reading(from_common=False),
        "compares operations but not sizes": _reading(sizes=False),
        "counts point-to-point entries": _reading(skip_p2p=False),
        "ignores ranks that have not entered": _reading(absent=False),
    },
    hints=(
        "Print one entry and dump['pg_config'], which contains each group's ranks as text. Use ast.literal_eval.",
        "For each group and rank, build a dict from collective_seq_id to operation and sizes.",
        "Compare from the largest first sequence number of any rank, because older entries are overwritten, to the "
        "largest last sequence number.",
    ),
)

# -------------------------------------------------------------------------------------------------------- 3. a watchdog

Divergence = tuple[int, Places]

_SUM, _COPY, _MEET = "all_reduce [3]", "broadcast [3]", "barrier"
_SECONDS = 0.8
_CALM_SECONDS = 2.4  # duration of a story without a hang
_LATEST_SECONDS = 15.0  # deadline for the report of a hang; long enough for a busy machine
_SLOWEST_SECONDS = 10.0  # after the end of a story, a watchdog must return within this time
_NEVER = float("inf")


@dataclass
class _Story:
    """Each rank's simulated collectives (start and end in seconds, and name), and the expected report."""

    ranks: list[list[tuple[float, float, str]]]
    verdict: Divergence | None = None
    began: float = 0.0
    reports: dict[int, list[Any]] = field(default_factory=lambda: {0: [], 1: [], 2: []})
    errors: dict[int, BaseException] = field(default_factory=dict)
    all_reported: float | None = None  # time at which every rank had reported

    def entered(self, rank: int) -> list[tuple[str, bool]]:
        now = time.monotonic() - self.began
        return [(what, end <= now) for start, end, what in self.ranks[rank] if start <= now]

    def over(self) -> bool:
        """Return whether the scenario is over. A scenario with a hang continues briefly, to detect repeated reports."""
        passed = time.monotonic() - self.began
        if self.verdict is None:
            return passed > _CALM_SECONDS
        if all(self.reports.values()):
            self.all_reported = self.all_reported or passed
            return passed > self.all_reported + 0.3
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
            answer(rank, 3, store, lambda: self.entered(rank), _SECONDS, self.reports[rank].append, self.over)
        except BaseException as error:
            self.errors[rank] = error


def _stories() -> dict[str, _Story]:
    first, hangs = (0.1, 0.2, _SUM), (0.3, _NEVER)
    short = [(0.1 + 0.5 * n, 0.5 + 0.5 * n, _SUM) for n in range(4)]
    return {
        "all ranks run the same collective and then compute": _Story([[first]] * 3),
        "many short waits take longer than `seconds` in total": _Story([short, short, [(0.45, 0.5, _SUM)]]),
        "rank 2 is slightly late": _Story([[(0.1, 0.6, _SUM)], [(0.1, 0.6, _SUM)], [(0.55, 0.6, _SUM)]]),
        "the collectives differ in row 1": _Story(
            [[first, (*hangs, _COPY)], [first, (*hangs, _SUM)], [first, (*hangs, _COPY)]],
            (1, {_COPY: [0, 2], _SUM: [1]}),
        ),
        "rank 2 has not entered the collective in row 1": _Story(
            [[first, (*hangs, _MEET)], [first, (*hangs, _MEET)], [first]], (1, {_MEET: [0, 1], None: [2]})
        ),
        "rank 0 has not entered the collective in row 1": _Story(
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
                raise WrongAnswerError(f"If {name}, rank {rank} waits for a store key that no rank sets.")
            raise error
    expect(not any(thread.is_alive() for thread in threads), "Every watchdog must return after `over()` becomes true.")
    for name, story in stories.items():
        for rank, reports in story.reports.items():
            case = f"If {name}, the watchdog of rank {rank}"
            if story.verdict is None:
                expect(not reports, f"{case} must report nothing, got {reports[:1]}.")
            else:
                expect(bool(reports), f"{case} must report the hang, got no report.")
                expect(len(reports) == 1, f"{case} must report once, got {len(reports)} reports.")
                expect(reports[0] == story.verdict, f"{case} must report {story.verdict}, got {reports[0]}.")
    return "All ranks report every hang once, and no rank raises a false alarm."


def _first_divergence(entered: Sequence[Sequence[str]]) -> Divergence | None:
    for row in range(max(map(len, entered))):
        places: Places = {}
        for rank, calls in enumerate(entered):
            what = calls[row] if row < len(calls) else None
            places.setdefault(what, []).append(rank)
        if len(places) > 1:
            return row, places
    return None


def _last_row(entered: Sequence[Sequence[str]]) -> Divergence | None:
    places: Places = {}
    for rank, calls in enumerate(entered):
        places.setdefault(calls[-1] if calls else None, []).append(rank)
    return (max(map(len, entered)) - 1, places) if len(places) > 1 else None


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
        if mine != seen:  # progress: restart the timer
            seen, since = mine, time.monotonic()
        waits = bool(mine) and not mine[-1][1]
        if waits and time.monotonic() - since >= seconds:
            store.set("alarm", "")
        if not store.check(["alarm"]):  # ranks that do not wait must also check and answer
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
    from_last_change: bool = True,
    done_counts: bool = True,
    patient: bool = True,
    tellers: Sequence[int] = (0, 1, 2),
    once: bool = True,
    compare: Callable[[Sequence[Sequence[str]]], Any] = _first_divergence,
) -> Answer:
    """Return a variant of the solution with a mistake."""

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
            if mine != seen and (from_last_change or not seen):
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
        "watchdog(rank, size, store, entered, seconds, tell, over): until over() is true, check whether this rank "
        "waits in one collective for `seconds`. If so, the watchdog of every rank must call tell((row, places)) once. "
        "`row` is the first index at which the ranks' collectives differ, and `places` maps each collective (None if "
        "not entered) to its ranks."
    ),
    test=_test_watchdog,
    solution=_watchdog,
    wrong={
        "answers only if its own rank waits": _variant(answers=False),
        "counts the time from the first collective": _variant(from_last_change=False),
        "mistakes a computing rank for a waiting rank": _variant(done_counts=False),
        "reports as soon as a rank waits": _variant(patient=False),
        "reports on rank 0 only": _variant(tellers=[0]),
        "reports repeatedly": _variant(once=False),
        "compares the last collective of each rank": _variant(compare=_last_row),
    },
    hints=(
        "There are two reasons to act: this rank waits too long, or another rank has set an alarm key in the store.",
        "Raise an alarm with store.set('alarm', ''). Every watchdog calls store.check(['alarm']) in every iteration.",
        "After an alarm, put this rank's list into the store as JSON, then read the lists of all ranks.",
        "Measure the time since `entered()` last changed, but only while its last collective is not complete.",
    ),
)
