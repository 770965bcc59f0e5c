"""Exercises of 14_scaling: a fair speedup, the break-even number of ranks, and the smallest efficient batch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, number
from ddp_tutorial.experiments.scaling import StepModel

# ---------------------------------------------------------------------------------------------------- 1. a fair speedup


class Timing(NamedTuple):
    """A row of a benchmark table. `seconds` is the duration of the run, `evaluating` the part spent on evaluation."""

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
# The fastest process has a single thread, as happens with small models, and is not in the first row.
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
    return "The speedup compares the same work, training time only, with the best run on one process."


def _why(rows: Sequence[Timing], got: float) -> str:
    """Name the usual mistake that gives this number, if there is one."""
    reasons = {
        _against_the_first: "the first row with one process is not the fastest one with the same global batch",
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
        "fair_speed_up(rows): return the factor by which two ranks train faster than the best one-process run that "
        "does the same work. A row has ranks, threads, batch (over all ranks), steps, seconds, and evaluating (the "
        "part of the seconds spent on evaluation)."
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
        "Among the rows with ranks == 1 and the batch of the two ranks, take the one with the highest throughput.",
    ),
)

# --------------------------------------------------------------------------------- -- 2. the break-even number of ranks

_LINKS = [
    # batch, seconds per sample, bytes, latency, bandwidth
    (256, 5e-3, 3.3e6, 50e-6, 0.125e9),  # bandwidth dominates
    (64, 5e-3, 4e3, 1e-3, 0.125e9),  # latency dominates
    (4096, 1e-4, 1e8, 5e-6, 12.5e9),
    (2, 1e-3, 1e9, 1e-5, 1e9),  # from the first two ranks on
]


def _test_break_even(answer: Answer) -> str:
    for case in _LINKS:
        batch, per_sample, nbytes, latency, bandwidth = case
        got = number(answer, *case)
        right = _break_even(*case)
        link = LinkModel(latency, bandwidth)

        def told(ranks: int, case: tuple[float, ...] = case, link: LinkModel = link) -> str:
            computing, sending = case[0] * case[1] / ranks, link.ring_seconds(case[2], ranks)
            return f"with {ranks} ranks, a rank computes for {computing:.4g} s and sends for {sending:.4g} s"

        what = f"batch {batch}, {per_sample:g} s per sample, {nbytes:g} bytes, {latency:g} s, {bandwidth:g} bytes/s"
        before = f"{told(right - 1)}, " if right > 2 else ""
        expect(got == right, f"{what}: {before}{told(right)}. The result must be {right}, got {got:g}.")
    return "With this number of ranks or more, communication takes more than half of each step."


def _break_even(batch: int, per_sample: float, nbytes: float, latency: float, bandwidth: float) -> int:
    ranks = 2
    while 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth) <= batch * per_sample / ranks:
        ranks += 1
    return ranks


def _first(sends_more: Callable[[int], bool]) -> int:
    return next(ranks for ranks in range(2, 10**6) if sends_more(ranks))


def _does_not_share_out(batch: int, per_sample: float, nbytes: float, latency: float, bandwidth: float) -> int:
    link = LinkModel(latency, bandwidth)
    limit = range(2, 10**5)
    return next((p for p in limit if link.ring_seconds(nbytes, p) > batch * per_sample), len(limit))


def _bandwidth_only(batch: int, per_sample: float, nbytes: float, latency: float, bandwidth: float) -> int:
    return _break_even(batch, per_sample, nbytes, 0.0, bandwidth)


def _one_way(batch: int, per_sample: float, nbytes: float, latency: float, bandwidth: float) -> int:
    link = LinkModel(latency, bandwidth)
    return _first(lambda p: link.ring_seconds(nbytes, p) / 2 > batch * per_sample / p)


def _whole_tensor_each_round(batch: int, per_sample: float, nbytes: float, latency: float, bandwidth: float) -> int:
    return _first(lambda p: 2 * (p - 1) * (latency + nbytes / bandwidth) > batch * per_sample / p)


def _the_last_that_is_fine(batch: int, per_sample: float, nbytes: float, latency: float, bandwidth: float) -> int:
    return _break_even(batch, per_sample, nbytes, latency, bandwidth) - 1


break_even = Exercise(
    task=(
        "break_even(batch, per_sample, nbytes, latency, bandwidth): return the smallest number of ranks (at least 2) "
        "for which a ring all-reduce of nbytes takes longer than a rank's computation on its part of the batch. "
        "Communication and computation do not overlap."
    ),
    test=_test_break_even,
    solution=_break_even,
    wrong={
        "computes the whole batch on every rank": _does_not_share_out,
        "ignores the latency": _bandwidth_only,
        "counts one half of the ring": _one_way,
        "sends all bytes in each round": _whole_tensor_each_round,
        "returns the largest number of ranks before that point": _the_last_that_is_fine,
    },
    hints=(
        "With strong scaling, the computation per rank shrinks with more ranks. How does communication change?",
        "Computation takes batch * per_sample / ranks. Communication takes 2 (ranks - 1) rounds, each with one latency "
        "and nbytes / ranks bytes.",
        "Try 2, 3, 4, ... until communication takes longer.",
    ),
)

# ------------------------------------------------------------------------------------------------ 3. the smallest batch

_STEPS = [
    (StepModel(0.0, 5e-3, 3.3e6, LinkModel(50e-6, 0.125e9)), 8, 0.9),
    (StepModel(2e-3, 5e-6, 4e8, LinkModel(5e-6, 12.5e9), buckets=16, overlap=0.8), 64, 0.9),  # partly overlapped
    (StepModel(0.0, 0.25, 8, LinkModel(0, 64)), 2, 0.9),  # communication takes as long as 4.5 samples
    (StepModel(1e-3, 1e-4, 1e6, LinkModel(20e-6, 1.25e9)), 1024, 0.5),
]


def _test_smallest_batch(answer: Answer) -> str:
    for model, ranks, wanted in _STEPS:
        right = _smallest_batch(model, ranks, wanted)
        got = number(answer, model, ranks, wanted)
        case = f"{ranks} ranks, at least {wanted:.0%} for {model}"
        if got != right and got >= 1 and int(got) == got:
            reached = model.weak_efficiency(int(got), ranks)
            beside = model.weak_efficiency(right, ranks)
            raise WrongAnswerError(
                f"{case}: the result must be {right} samples per rank, the smallest number that is enough "
                f"({beside:.2%}), got {got:g} ({reached:.2%})."
            )
        expect(got == right, f"{case}: the result must be {right} samples, got {got:g}.")
    return "This is how large jobs stay efficient, and why their global batches are so large."


def _smallest_batch(model: StepModel, ranks: int, wanted: float) -> int:
    low, high = 0, 1
    while model.compute(high) < wanted * (model.compute(high) + model.exposed(high, ranks)):
        low, high = high, 2 * high
    while high - low > 1:  # low is too few, high is enough
        middle = (low + high) // 2
        enough = model.compute(middle) >= wanted * (model.compute(middle) + model.exposed(middle, ranks))
        low, high = (low, middle) if enough else (middle, high)
    return high


def _of_all_ranks(model: StepModel, ranks: int, wanted: float) -> int:
    return ranks * _smallest_batch(model, ranks, wanted)


def _stops_doubling(model: StepModel, ranks: int, wanted: float) -> int:
    samples = 1
    while model.weak_efficiency(samples, ranks) < wanted:
        samples *= 2
    return samples


def _hides_nothing(model: StepModel, ranks: int, wanted: float) -> int:
    samples = 1
    while model.compute(samples) < wanted * (model.compute(samples) + model.communication(ranks)):
        samples += 1
    return samples


def _for_two_ranks(model: StepModel, ranks: int, wanted: float) -> int:
    return _smallest_batch(model, 2, wanted)


def _one_too_few(model: StepModel, ranks: int, wanted: float) -> int:
    return max(1, _smallest_batch(model, ranks, wanted) - 1)


smallest_batch = Exercise(
    task=(
        "smallest_batch(model, ranks, wanted): return the smallest number of samples per rank for which computation is "
        "at least the fraction `wanted` of a step. The two parts of a step, in seconds, are model.compute(samples) and "
        "model.exposed(samples, ranks)."
    ),
    test=_test_smallest_batch,
    solution=_smallest_batch,
    wrong={
        "counts the samples of all ranks": _of_all_ranks,
        "doubles and stops there": _stops_doubling,
        "ignores the overlap": _hides_nothing,
        "computes it for two ranks": _for_two_ranks,
        "returns one too few": _one_too_few,
    },
    hints=(
        "A step is computation plus exposed communication. More samples increase only the computation.",
        "The efficiency for s samples is compute(s) / (compute(s) + exposed(s, ranks)). Try 1, 2, 3, ... until it is "
        "high enough.",
        "Tens of thousands of tries are fine. For fewer, double until it is enough, then bisect.",
    ),
)
