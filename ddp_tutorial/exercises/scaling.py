"""The exercises of 14_scaling: a fair speed-up from a table of unlike runs, the number of ranks at which sending takes
longer than computing, and the batch that makes up for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect
from ddp_tutorial.experiments.scaling import StepModel


def _number(answer: Answer, *arguments: object) -> float:
    got = answer(*arguments)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise WrongAnswerError(f"Return a number; you gave {got!r}.")
    return got


# --------------------------------------------------------------------------------------------------- 1. a fair speed-up


class Timing(NamedTuple):
    """A row of a benchmark's table. `seconds` is the whole time of the run, and `evaluating` the part of it that was
    evaluation, not training."""

    ranks: int
    threads: int  # of each rank
    batch: int  # samples of a step, over all ranks
    steps: int
    seconds: float
    evaluating: float


TABLE = [
    Timing(ranks=1, threads=1, batch=32, steps=100, seconds=26.0, evaluating=6.0),  # 160 samples/s
    Timing(ranks=1, threads=2, batch=32, steps=100, seconds=16.0, evaluating=3.2),  # 250
    Timing(ranks=1, threads=2, batch=64, steps=100, seconds=25.0, evaluating=3.2),  # 294
    Timing(ranks=2, threads=1, batch=32, steps=300, seconds=40.5, evaluating=10.5),  # 320
]
# The fastest process is one with a single thread, as happens with small models; and it is not the first.
_SMALL = [
    Timing(ranks=2, threads=1, batch=8, steps=50, seconds=3.0, evaluating=1.0),  # 200
    Timing(ranks=1, threads=4, batch=8, steps=100, seconds=9.0, evaluating=1.0),  # 100
    Timing(ranks=1, threads=1, batch=8, steps=100, seconds=8.0, evaluating=3.0),  # 160
    Timing(ranks=1, threads=1, batch=4, steps=100, seconds=2.0, evaluating=1.0),  # 400, of another batch
]


def _test_speed_up(answer: Answer) -> str:
    for rows, expected, sums in [
        (TABLE, 1.28, "320 samples/s against 250"),
        (_SMALL, 1.25, "200 samples/s against 160"),
    ]:
        got = _number(answer, list(rows))
        table = "\n".join(f"  {row}" for row in rows)
        said = f"From\n{table}\nexpected {expected} ({sums}), got {got:.4g}.{_why(rows, got)}"
        expect(abs(got - expected) < 1e-6, said)
    return "The same work, training only, and against the best that one process can do."


def _why(rows: Sequence[Timing], got: float) -> str:
    """Which of the usual mistakes gives this number, if one does."""
    reasons = {
        _against_the_first: "the first row with one process is not the fastest one with the same global batch",
        _with_evaluation: "evaluation is inside of the timer",
        _any_batch: "a baseline with another global batch takes different steps, which are more or less efficient",
        _ratio_of_seconds: "the rows have different numbers of steps, so compare rates",
        _efficiency: "this is the speed-up divided by the number of ranks, its efficiency; we asked for the speed-up",
    }
    return next((f" Look again: {reason}." for wrong, reason in reasons.items() if abs(wrong(rows) - got) < 1e-6), "")


def _speed_up(rows: Sequence[Timing]) -> float:
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
    return _speed_up(rows) / 2


fair_speed_up = Exercise(
    task=(
        "fair_speed_up(rows): return the factor by which two ranks train faster than the best one-process run that "
        "does the same work. A row has ranks, threads, batch (of all ranks), steps, seconds, and evaluating (of the "
        "seconds)."
    ),
    test=_test_speed_up,
    solution=_speed_up,
    wrong={
        "compares with the first row of one process": _against_the_first,
        "leaves evaluation inside the timer": _with_evaluation,
        "compares with another global batch": _any_batch,
        "compares seconds of different numbers of steps": _ratio_of_seconds,
        "returns the efficiency": _efficiency,
    },
    hints=(
        "What is the same in the two rows to compare, and what may differ? Not the batch; the threads may.",
        "A rate is batch * steps / (seconds - evaluating).",
        "Of the rows with ranks == 1 and the batch of the two ranks, take the one with the highest rate.",
    ),
)

# --------------------------------------------------------------------------------- 2. where sending outweighs computing

_LINKS = [
    # batch, seconds a sample, bytes, latency, bandwidth
    (256, 5e-3, 3.3e6, 50e-6, 0.125e9),  # bandwidth decides
    (64, 5e-3, 4e3, 1e-3, 0.125e9),  # latency decides
    (4096, 1e-4, 1e8, 5e-6, 12.5e9),
    (2, 1e-3, 1e9, 1e-5, 1e9),  # from the first two ranks on
]


def _test_break_even(answer: Answer) -> str:
    for case in _LINKS:
        batch, per_sample, nbytes, latency, bandwidth = case
        got = _number(answer, *case)
        right = _break_even(*case)
        link = LinkModel(latency, bandwidth)

        def told(ranks: int, case: tuple[float, ...] = case, link: LinkModel = link) -> str:
            computing, sending = case[0] * case[1] / ranks, link.ring_seconds(case[2], ranks)
            return f"with {ranks} ranks a rank computes {computing:.4g} s and sends {sending:.4g} s"

        said = f"batch {batch}, {per_sample:g} s a sample, {nbytes:g} bytes, {latency:g} s, {bandwidth:g} bytes/s"
        before = f"{told(right - 1)}, " if right > 2 else ""
        expect(got == right, f"{said}: {before}{told(right)}. So it is {right}; you gave {got:g}.")
    return "From that many ranks on, half of each step or more goes into communication."


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
        "break_even(batch, per_sample, nbytes, latency, bandwidth): return the smallest number of ranks, from 2 on, at "
        "which a ring all-reduce of nbytes takes longer than a rank needs to compute its part of the batch. Nothing "
        "overlaps."
    ),
    test=_test_break_even,
    solution=_break_even,
    wrong={
        "computes the whole batch on every rank": _does_not_share_out,
        "leaves the latency out": _bandwidth_only,
        "counts one half of the ring": _one_way,
        "sends all bytes in each round": _whole_tensor_each_round,
        "returns the last number of ranks that is fine": _the_last_that_is_fine,
    },
    hints=(
        "Strong scaling: computing shrinks with the number of ranks. What does sending do?",
        "Computing: batch * per_sample / ranks. Sending: 2 (ranks - 1) rounds, of a latency and nbytes / ranks bytes.",
        "Try 2, 3, 4, ... until sending takes longer.",
    ),
)

# ----------------------------------------------------------------------------------------------- 3. a batch that scales

_STEPS = [
    (StepModel(0.0, 5e-3, 3.3e6, LinkModel(50e-6, 0.125e9)), 8, 0.9),
    (StepModel(2e-3, 5e-6, 4e8, LinkModel(5e-6, 12.5e9), buckets=16, overlap=0.8), 64, 0.9),  # hidden in part
    (StepModel(0.0, 0.25, 8, LinkModel(0, 64)), 2, 0.9),  # an eighth of a second of sending, as long as 4.5 samples
    (StepModel(1e-3, 1e-4, 1e6, LinkModel(20e-6, 1.25e9)), 1024, 0.5),
]


def _test_smallest_batch(answer: Answer) -> str:
    for model, ranks, wanted in _STEPS:
        right = _smallest_batch(model, ranks, wanted)
        got = _number(answer, model, ranks, wanted)
        said = f"{ranks} ranks, {wanted:.0%} wanted of {model}"
        if got != right and got >= 1 and int(got) == got:
            reached = model.weak_efficiency(int(got), ranks)
            beside = model.weak_efficiency(right, ranks)
            raise WrongAnswerError(
                f"{said}: {got:g} samples for each rank give {reached:.2%}; {right} give {beside:.2%}, and are the "
                "fewest that reach it."
            )
        expect(got == right, f"{said}: a number of samples, 1 or more; you gave {got:g}, expected {right}.")
    return "This is what makes large jobs possible, and why their global batches are so large."


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
        "smallest_batch(model, ranks, wanted): return the fewest samples for each rank with which computing is at "
        "least `wanted` of a step. model.compute(samples) and model.exposed(samples, ranks) are its two parts, in "
        "seconds."
    ),
    test=_test_smallest_batch,
    solution=_smallest_batch,
    wrong={
        "counts the samples of all ranks": _of_all_ranks,
        "doubles and stops there": _stops_doubling,
        "thinks that nothing is hidden": _hides_nothing,
        "works it out for two ranks": _for_two_ranks,
        "gives one too few": _one_too_few,
    },
    hints=(
        "A step is computing plus the sending that is not hidden. More samples lengthen the first, not the second.",
        "Efficiency of s samples: compute(s) / (compute(s) + exposed(s, ranks)). Try 1, 2, 3, ... until it is enough.",
        "Tens of thousands of tries are fine. For fewer, double until it is enough, and then halve the interval.",
    ),
)
