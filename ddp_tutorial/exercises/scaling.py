"""Exercises on a fair speedup, an honest confidence interval, and a fair benchmark, for notebook 14_scaling."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_tutorial.exercises import Answer, Exercise, expect, number, on_ranks
from ddp_tutorial.world import World

# ---------------------------------------------------------------------------------------------------- 1. a fair speedup


class Timing(NamedTuple):
    """A row of a benchmark table. `seconds` is the run's duration, including the evaluation time `evaluating`."""

    ranks: int
    threads: int  # per rank
    batch: int  # samples per step over all ranks
    steps: int
    seconds: float
    evaluating: float


TABLE = [
    Timing(ranks=1, threads=1, batch=32, steps=100, seconds=26.0, evaluating=6.0),  # 160 samples/s
    Timing(ranks=1, threads=2, batch=32, steps=100, seconds=16.0, evaluating=3.2),  # 250
    Timing(ranks=1, threads=2, batch=64, steps=100, seconds=25.0, evaluating=3.2),  # 294
    Timing(ranks=2, threads=1, batch=32, steps=300, seconds=40.5, evaluating=10.5),  # 320
]
# The fastest one-process run uses one thread, as is common for small models, and is not in the first row.
_SMALL = [
    Timing(ranks=2, threads=1, batch=8, steps=50, seconds=3.0, evaluating=1.0),  # 200
    Timing(ranks=1, threads=4, batch=8, steps=100, seconds=9.0, evaluating=1.0),  # 100
    Timing(ranks=1, threads=1, batch=8, steps=100, seconds=8.0, evaluating=3.0),  # 160
    Timing(ranks=1, threads=1, batch=4, steps=100, seconds=2.0, evaluating=1.0),  # 400, with a different batch
]


def _test_speed_up(answer: Answer) -> str:
    for rows, expected, sums in [
        (TABLE, 1.28, "320 samples/s against 250"),
        (_SMALL, 1.25, "200 samples/s against 160"),
    ]:
        got = number(answer, list(rows))
        table = "\n".join(f"  {row}" for row in rows)
        case = f"For\n{table}\nthe result must be {expected} ({sums}), got {got:.4g}.{_why(rows, got)}"
        expect(abs(got - expected) < 1e-6, case)
    return "The speedup compares training times for the same work, with the best one-process run as the baseline."


def _why(rows: Sequence[Timing], got: float) -> str:
    """Return a hint if a common mistake produces the result `got`, or an empty string otherwise."""
    reasons = {
        _against_the_first: "the first one-process row is not the fastest one-process row with the same global batch",
        _with_evaluation: "the seconds include the evaluation",
        _any_batch: "a baseline with a different global batch does different work",
        _ratio_of_seconds: "the rows have different numbers of steps, so compare throughputs",
        _efficiency: "this is the efficiency, which is the speedup divided by the number of ranks",
    }
    return next((f" Hint: {reason}." for wrong, reason in reasons.items() if abs(wrong(rows) - got) < 1e-6), "")


def _fair_speed_up(rows: Sequence[Timing]) -> float:
    def rate(row: Timing) -> float:
        return row.batch * row.steps / (row.seconds - row.evaluating)

    ranks = next(row for row in rows if row.ranks == 2)
    baselines = [row for row in rows if row.ranks == 1 and row.batch == ranks.batch]
    return rate(ranks) / max(map(rate, baselines))


def _rate(row: Timing) -> float:
    return row.batch * row.steps / (row.seconds - row.evaluating)


def _two(rows: Sequence[Timing]) -> Timing:
    return next(row for row in rows if row.ranks == 2)


def _against_the_first(rows: Sequence[Timing]) -> float:
    return _rate(_two(rows)) / _rate(next(row for row in rows if row.ranks == 1))


def _with_evaluation(rows: Sequence[Timing]) -> float:
    two = _two(rows)
    rates = [row.batch * row.steps / row.seconds for row in rows if row.ranks == 1 and row.batch == two.batch]
    return two.batch * two.steps / two.seconds / max(rates)


def _any_batch(rows: Sequence[Timing]) -> float:
    return _rate(_two(rows)) / max(_rate(row) for row in rows if row.ranks == 1)


def _ratio_of_seconds(rows: Sequence[Timing]) -> float:
    two = _two(rows)
    spent = [row.seconds - row.evaluating for row in rows if row.ranks == 1 and row.batch == two.batch]
    return min(spent) / (two.seconds - two.evaluating)


def _efficiency(rows: Sequence[Timing]) -> float:
    return _fair_speed_up(rows) / 2


fair_speed_up = Exercise(
    task=(
        "fair_speed_up(rows): return the speedup of two ranks over the best one-process run that does the same "
        "work. A row contains ranks, threads, batch (over all ranks), steps, seconds, and evaluating (the part of "
        "the seconds spent on evaluation)."
    ),
    test=_test_speed_up,
    solution=_fair_speed_up,
    wrong={
        "compares with the first row of one process": _against_the_first,
        "includes the evaluation time": _with_evaluation,
        "compares with a different global batch": _any_batch,
        "compares seconds of different numbers of steps": _ratio_of_seconds,
        "returns the efficiency": _efficiency,
    },
    hints=(
        "The two rows to compare must have the same batch, but may have different numbers of threads.",
        "The throughput is batch * steps / (seconds - evaluating).",
        "Among the rows with ranks == 1 and the same batch as the two ranks, take the row with the highest throughput.",
    ),
)

# --------------------------------------------------------------------------------------------- 2. an honest interval

Interval = tuple[float, float]
Launches = Sequence[tuple[Sequence[float], Sequence[float]]]
_EXPERIMENTS = 300
_TRUE_SPEEDUP = 1.7


def _experiment(generator: random.Random, count: int) -> list[tuple[list[float], list[float]]]:
    """Simulate `count` launches. Step times vary by launch, by setup within a launch, and slightly by round."""
    launches = []
    for _ in range(count):
        both = math.exp(generator.gauss(0, 0.3))
        medians = [both * seconds * math.exp(generator.gauss(0, 0.1)) for seconds in (_TRUE_SPEEDUP, 1)]
        baseline, ranks = ([m * math.exp(generator.gauss(0, 0.03)) for _ in range(4)] for m in medians)
        launches.append((baseline, ranks))
    return launches


def _test_honest_interval(answer: Answer) -> str:
    for count in (5, 20):
        generator, contained, widths, honest = random.Random(count), 0, [], []
        for _ in range(_EXPERIMENTS):
            launches = _experiment(generator, count)
            got = answer([(list(baseline), list(ranks)) for baseline, ranks in launches])
            expect(
                isinstance(got, tuple) and len(got) == 2 and got[0] <= got[1],
                f"The result must be a tuple (low, high) with low <= high, got {got!r}.",
            )
            contained += got[0] <= _TRUE_SPEEDUP <= got[1]
            widths.append(got[1] - got[0])
            honest.append(_width(_honest_interval(launches)))
        case = f"In {_EXPERIMENTS} simulated experiments with {count} launches"
        found = contained / _EXPERIMENTS
        expect(
            found >= 0.86,
            f"{case}, the interval must contain the true speedup with a probability of at least 90 %, got "
            f"{found:.0%}. The rounds of a launch are not independent. The speedup is the baseline's step time "
            "divided by the ranks' step time.",
        )
        factor = statistics.median(widths) / statistics.median(honest)
        expect(
            factor < 1.6,
            f"{case}, the interval is {factor:.1f} times as wide as necessary. Compare the setups within each launch. "
            "With many launches, omit the largest and smallest ratios.",
        )
    return "Your interval treats each launch as one independent value, and compares the setups within it."


def _width(interval: Interval) -> float:
    return interval[1] - interval[0]


def _honest_interval(launches: Launches) -> Interval:
    ratios = sorted(statistics.median(baseline) / statistics.median(ranks) for baseline, ranks in launches)
    n, skip = len(ratios), 0
    # The interval misses the median if at most `skip` of n coins show heads, or at most `skip` show tails.
    while 1 - 2 * sum(math.comb(n, k) for k in range(skip + 2)) / 2**n >= 0.9:
        skip += 1
    return ratios[skip], ratios[n - 1 - skip]


def _range_of_launches(launches: Launches) -> Interval:
    ratios = [statistics.median(baseline) / statistics.median(ranks) for baseline, ranks in launches]
    return min(ratios), max(ratios)


def _pools_the_rounds(launches: Launches) -> Interval:
    return _honest_interval([([a], [b]) for baseline, ranks in launches for a, b in zip(baseline, ranks, strict=True)])


def _compares_across_launches(launches: Launches) -> Interval:
    baselines, ranks = ([statistics.median(each[setup]) for each in launches] for setup in (0, 1))
    return min(baselines) / max(ranks), max(baselines) / min(ranks)


def _first_launch_only(launches: Launches) -> Interval:
    return _range_of_launches([([a], [b]) for a, b in zip(*launches[0], strict=True)])


def _inverted(launches: Launches) -> Interval:
    low, high = _honest_interval(launches)
    return 1 / high, 1 / low


honest_interval = Exercise(
    task=(
        "honest_interval(launches): each launch is a pair (baseline, ranks) of lists of step times in seconds. "
        "Return an interval (low, high) that contains the true median speedup with a probability of at least 90 %, "
        "for any number of launches that is at least 5."
    ),
    test=_test_honest_interval,
    solution=_honest_interval,
    wrong={
        "takes the range of any number of launches": _range_of_launches,
        "treats rounds as independent": _pools_the_rounds,
        "compares the setups of different launches": _compares_across_launches,
        "looks at one launch only": _first_launch_only,
        "divides the other way round": _inverted,
    },
    hints=(
        "Reduce each launch to the ratio of its two medians.",
        "With five launches, return the smallest and the largest ratio. With 20 launches, that interval is too wide.",
        "Sort the n ratios, and omit k ratios at each end. The interval misses the median if at most k of n coins "
        "show heads, or at most k show tails. Increase k while the interval contains the median with a probability "
        "of at least 90 %.",
    ),
)

# ------------------------------------------------------------------------------------------------ 3. a fair benchmark

Setups = Mapping[str, Callable[[], None]]
Benchmark = Callable[[Setups, int, Callable[[], None]], dict[str, list[float]]]
_ROUNDS = 4
_START, _WORK, _STRAGGLER = 1.5, 0.1, 0.3  # seconds for the first step, a later step, and a step on the slow rank


class _Device:
    """A simulated accelerator that runs its work sequentially in the background."""

    def __init__(self) -> None:
        self.done, self.calls = 0.0, list[str]()

    def setup(self, name: str, first: float, later: float) -> Callable[[], None]:
        """Return a step function that takes `first` seconds in the first call, and `later` seconds in later calls."""

        def step() -> None:
            seconds = later if name in self.calls else first
            self.calls.append(name)
            self.done = max(self.done, time.perf_counter()) + seconds

        return step

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        while (left := self.done - time.perf_counter()) > 0:
            time.sleep(left)


def _run_benchmark(world: World, answer: Benchmark) -> tuple[dict[str, list[float]], list[str]]:
    device, straggler = _Device(), _STRAGGLER if world.rank else _WORK
    setups = {
        "steady": device.setup("steady", _WORK, _WORK),
        "slow start": device.setup("slow start", _START, _WORK),
        "straggler": device.setup("straggler", straggler, straggler),
    }
    return answer(dict(setups), _ROUNDS, device.synchronize), device.calls


def _test_fair_benchmark(answer: Answer) -> str:
    stuck = "The ranks wait for each other. Both ranks must enter the same collectives."
    (seconds, calls), (other, _) = on_ranks(_run_benchmark, 2, answer, stuck=stuck, timeout=60)
    names = ["steady", "slow start", "straggler"]
    expect(
        isinstance(seconds, dict)
        and sorted(seconds) == sorted(names)
        and all(isinstance(each, list) and len(each) == _ROUNDS for each in seconds.values()),
        f"The result must be a dict with a list of {_ROUNDS} numbers for each of {names}, got {seconds!r}.",
    )
    counts = {name: calls.count(name) for name in names}
    expect(
        min(counts.values()) > _ROUNDS,
        f"The first step of each setup is a warm-up and must not be measured, so {_ROUNDS} rounds require more than "
        f"{_ROUNDS} steps per setup, got {counts}.",
    )
    measured = calls[-len(names) * _ROUNDS * (min(counts.values()) // _ROUNDS) :]  # a round may repeat each step
    switches = [(a, b) for a, b in pairwise(measured) if a != b]
    expect(
        len(switches) >= 2 * _ROUNDS,
        f"The setups must alternate, got the steps in this order: {', '.join(calls)}.",
    )
    expect(
        len(set(switches)) > len(names),
        "The order of the setups must change from round to round. Otherwise, each setup always follows the same setup.",
    )
    expect(
        min(seconds["steady"]) >= _WORK,
        f"A step of the setup 'steady' takes {_WORK} s on the device, got {min(seconds['steady']):.4f} s. The step "
        "returns before the device is done.",
    )
    expect(
        min(seconds["straggler"]) >= _STRAGGLER,
        f"The setup 'straggler' takes {_STRAGGLER} s on rank 1, got {min(seconds['straggler']):.4f} s on rank 0. The "
        "slowest rank determines the step time.",
    )
    slowest = max(max(each) for each in seconds.values())
    expect(
        slowest < _START,
        f"Only the warm-up of the setup 'slow start' takes {_START} s, got a round of {slowest:.2f} s. Wait until the "
        "device is idle before you start the timer.",
    )
    expect(seconds == other, "Both ranks must return the same numbers, for example the maximum over the ranks.")
    return (
        "Your benchmark is fair: it excludes the warm-up, alternates between the setups, and waits for the device and "
        "for all ranks."
    )


def _fair_benchmark(setups: Setups, rounds: int, synchronize: Callable[[], None]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in setups}
    for index in range(rounds + 1):
        for name in list(setups)[:: -1 if index % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            setups[name]()
            synchronize()
            dist.barrier()  # waits until the slowest rank is done
            elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if index > 0:  # the first round is the warm-up
                seconds[name].append(elapsed.item())
    return seconds


def _benchmark_with(
    setups: Setups,
    rounds: int,
    synchronize: Callable[[], None],
    *,
    warm_up: int = 1,
    reverse: bool = True,
    by_setup: bool = False,
    wait: bool = True,
    barrier: bool = True,
    agree: bool = True,
    wait_in_warm_up: bool = True,
) -> dict[str, list[float]]:
    """Run a variant of the solution with one change."""
    seconds: dict[str, list[float]] = {name: [] for name in setups}
    order = [
        (index, name)
        for index in range(rounds + warm_up)
        for name in list(setups)[:: -1 if (index % 2 if reverse else index < warm_up) else 1]
    ]
    if by_setup:
        order.sort(key=lambda each: list(setups).index(each[1]))
    for index, name in order:
        dist.barrier()
        begin = time.perf_counter()
        setups[name]()
        if wait and (index >= warm_up or wait_in_warm_up):
            synchronize()
        if barrier:
            dist.barrier()
        elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        if agree:
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX if barrier else dist.ReduceOp.AVG)
        if index >= warm_up:
            seconds[name].append(elapsed.item())
    return seconds


fair_benchmark = Exercise(
    task=(
        "fair_benchmark(setups, rounds, synchronize): setups maps names to functions that start one step on this "
        "rank's device. synchronize() waits until the device is done. Return a dict that maps each name to a list of "
        "`rounds` step times in seconds, measured until all ranks are done. The dict must be identical on all ranks."
    ),
    test=_test_fair_benchmark,
    solution=_fair_benchmark,
    wrong={
        "measures the first step": partial(_benchmark_with, warm_up=0),
        "measures one setup after the other": partial(_benchmark_with, by_setup=True),
        "always uses the same order": partial(_benchmark_with, reverse=False),
        "does not wait for the device": partial(_benchmark_with, wait=False),
        "does not wait for the device after the warm-up": partial(_benchmark_with, wait_in_warm_up=False),
        "averages over the ranks": partial(_benchmark_with, barrier=False),
        "returns each rank's own clock": partial(_benchmark_with, agree=False),
    },
    hints=(
        "Write a loop over the rounds, and inside it a loop over the setups. The first round is the warm-up.",
        "All ranks must be done before the timer starts and before it stops. Call synchronize(), then dist.barrier().",
        "Reverse the order of the setups in every second round. Take the maximum over the ranks with dist.all_reduce.",
    ),
)
