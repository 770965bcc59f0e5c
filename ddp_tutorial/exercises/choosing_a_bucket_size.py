"""Exercises on exposed communication, links, and optimal buckets, for the `choosing_a_bucket_size` deep dive."""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import combinations, pairwise

from ddp_tutorial.exercises import Answer, Exercise, expect

Interval = tuple[float, float]

# ------------------------------------------------------------------------------------------- 1. exposed communication

_TRACES: tuple[tuple[list[Interval], list[Interval], float, str], ...] = (
    ([(70, 90)], [(20, 60)], 20, "the all-reduce runs after the backward pass"),
    ([(30, 50)], [(20, 60)], 0, "the all-reduce runs during the backward pass"),
    ([(50, 75)], [(20, 60)], 15, "the all-reduce starts during the backward pass and ends after it"),
    ([(10, 70)], [(20, 60)], 20, "the all-reduce starts before the backward pass and ends after it"),
    ([(70, 80), (30, 40), (55, 65)], [(20, 60)], 15, "the three all-reduces are not in order"),
    ([(10, 30), (50, 130)], [(100, 120), (20, 60)], 60, "the two backward passes are not in order"),
    ([(0, 10)], [], 10, "there is no backward pass"),
    ([], [(20, 60)], 0, "there is no all-reduce"),
)


def _test_exposed(answer: Answer) -> str:
    for transfers, backwards, true, story in _TRACES:
        got = answer(list(transfers), list(backwards))
        expect(
            isinstance(got, int | float) and abs(got - true) < 1e-9,
            f"exposed({transfers}, {backwards}) must be {true:g}, got {got!r}: {story}. The all-reduces do not overlap "
            "with each other, and neither do the backward passes.",
        )
    return "Your function counts only the time during which the link communicates and no backward pass runs."


def _exposed(transfers: Sequence[Interval], backwards: Sequence[Interval]) -> float:
    total = sum(end - start for start, end in transfers)
    overlapped = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in transfers for b in backwards)
    return total - overlapped


def _exposed_all(transfers: Sequence[Interval], backwards: Sequence[Interval]) -> float:
    return sum(end - start for start, end in transfers)


def _exposed_after_the_last(transfers: Sequence[Interval], backwards: Sequence[Interval]) -> float:
    done = max((end for _, end in backwards), default=0)
    return sum(max(0, end - max(start, done)) for start, end in transfers)


def _exposed_whole_transfers(transfers: Sequence[Interval], backwards: Sequence[Interval]) -> float:
    outside = [a for a in transfers if not any(a[0] < b[1] and b[0] < a[1] for b in backwards)]
    return sum(end - start for start, end in outside)


def _exposed_gaps_as_well(transfers: Sequence[Interval], backwards: Sequence[Interval]) -> float:
    if not transfers:
        return 0
    begin, done = min(start for start, _ in transfers), max(end for _, end in transfers)
    return done - begin - sum(max(0, min(done, b[1]) - max(begin, b[0])) for b in backwards)


def _exposed_negative(transfers: Sequence[Interval], backwards: Sequence[Interval]) -> float:
    total = sum(end - start for start, end in transfers)
    return total - sum(min(a[1], b[1]) - max(a[0], b[0]) for a in transfers for b in backwards)


exposed = Exercise(
    task=(
        "exposed(transfers, backwards): both arguments are lists of (start, end). Return the total time during which "
        "the link communicates and no backward pass runs."
    ),
    test=_test_exposed,
    solution=_exposed,
    wrong={
        "counts all communication": _exposed_all,
        "counts only the time after the last backward pass": _exposed_after_the_last,
        "counts an all-reduce as a whole or not at all": _exposed_whole_transfers,
        "counts the gaps between all-reduces": _exposed_gaps_as_well,
        "forgets that disjoint intervals overlap by 0": _exposed_negative,
    },
    hints=(
        "Exposed communication is all communication minus the overlapped part.",
        "Two intervals (a, b) and (c, d) overlap for min(b, d) - max(a, c), or for 0 if this difference is negative.",
        "Sum the overlaps over all pairs of a transfer and a backward pass.",
    ),
)

# ---------------------------------------------------------------------------------------------------- 2. measure a link


def _samples(latency: float, bandwidth: float, seed: int) -> list[tuple[int, float]]:
    """Return 200 timings of messages of 8 sizes. Most include a delay, and no timing is below the transfer time."""
    generator = random.Random(seed)
    sizes = [4 * 8**k for k in range(8)]  # 4 bytes to 8 MB
    samples = []
    for size in sizes:
        for trial in range(25):
            seconds = (latency + size / bandwidth) * (1 + 0.02 * generator.random())
            delayed = trial > 2 and generator.random() < 0.8  # at least three are not delayed
            samples.append((size, seconds * generator.uniform(1.5, 6) + 0.001 if delayed else seconds))
    generator.shuffle(samples)
    return samples


_LINKS = ((1e-3, 100e6), (50e-6, 10e9), (20e-6, 300e9), (50e-3, 10e6))


def _test_measure_link(answer: Answer) -> str:
    for seed, (latency, bandwidth) in enumerate(_LINKS):
        got = answer(_samples(latency, bandwidth, seed))
        expect(
            isinstance(got, tuple) and len(got) == 2,
            f"measure_link must return a tuple (latency, bandwidth), got {got!r}.",
        )
        for name, value, true in (("latency", got[0], latency), ("bandwidth", got[1], bandwidth)):
            expect(
                abs(value / true - 1) < 0.1,
                f"The {name} must be within 10 % of {true:g}, got {value:g} ({value / true - 1:+.0%}). The link's "
                f"latency is {latency:g} s, and its bandwidth is {bandwidth:g} bytes/s.",
            )
    return "Your latency and bandwidth are within 10 % on four links, although most samples were delayed."


def _measure_link(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    fastest: dict[int, float] = {}
    for nbytes, seconds in samples:  # delays only make a sample slower
        fastest[nbytes] = min(seconds, fastest.get(nbytes, seconds))
    latency = fastest[min(fastest)]  # the bytes of the smallest message take almost no time
    return latency, max(fastest) / (fastest[max(fastest)] - latency)


def _measure_by_mean(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    sizes = sorted({nbytes for nbytes, _ in samples})
    mean = {size: statistics.mean(seconds for nbytes, seconds in samples if nbytes == size) for size in sizes}
    return mean[sizes[0]], sizes[-1] / (mean[sizes[-1]] - mean[sizes[0]])


def _measure_by_median(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    sizes = sorted({nbytes for nbytes, _ in samples})
    median = {size: statistics.median(seconds for nbytes, seconds in samples if nbytes == size) for size in sizes}
    return median[sizes[0]], sizes[-1] / (median[sizes[-1]] - median[sizes[0]])


def _measure_without_latency(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    latency, _ = _measure_link(samples)
    largest = max(nbytes for nbytes, _ in samples)
    return latency, largest / min(seconds for nbytes, seconds in samples if nbytes == largest)


def _measure_least_squares(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    fit = statistics.linear_regression(*zip(*samples, strict=True))
    return fit.intercept, 1 / fit.slope


measure_link = Exercise(
    task=(
        "measure_link(samples): `samples` is a list of (bytes, seconds) for many messages of 4 bytes to 8 MB. Most "
        "messages are delayed. Without a delay, a message of n bytes takes latency + n / bandwidth. Return (latency, "
        "bandwidth)."
    ),
    test=_test_measure_link,
    solution=_measure_link,
    wrong={
        "averages the samples for each size": _measure_by_mean,
        "takes the median for each size, although most samples are delayed": _measure_by_median,
        "divides the largest message's size by its total time": _measure_without_latency,
        "fits a line to all samples": _measure_least_squares,
    },
    hints=(
        "A delay only makes a sample slower. Which statistic of the samples for one size ignores delays?",
        "The smallest message has almost no bytes, so its fastest sample is the latency.",
        "For the bandwidth, subtract the latency from the fastest sample of the largest message.",
    ),
)

# ------------------------------------------------------------------------------------------- 3. the best of all buckets

Buckets = Sequence[Sequence[int]]


def _end(buckets: Buckets, ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> float:
    """Return the time at which the last all-reduce ends."""
    free = 0.0
    for bucket in buckets:
        start = max(free, *(ready[index] for index in bucket))
        free = start + latency + sum(nbytes[index] for index in bucket) / bandwidth
    return free


def _all_splits(count: int) -> Iterator[Buckets]:
    """Yield all ways to split `count` gradients into consecutive buckets."""
    for cuts in range(count):
        for places in combinations(range(1, count), cuts):
            yield [range(a, b) for a, b in pairwise([0, *places, count])]


def _problem(count: int, seed: int) -> tuple[list[float], list[int], float, float]:
    generator = random.Random(seed)
    steps = [generator.choice([0.5, 1.0, 3.0]) for _ in range(count)]
    ready = [sum(steps[: k + 1]) for k in range(count)]
    nbytes = [generator.choice([1, 10, 200, 1000]) for _ in range(count)]
    carrying = ready[-1] * generator.choice([0.5, 1.0, 1.5])  # time to send all bytes, without latency
    return ready, nbytes, round(ready[-1] / 20, 2), float(round(sum(nbytes) / carrying))


def _test_best_buckets(answer: Answer) -> str:
    for count, seed in ((2, 0), (2, 1), *((9, seed) for seed in range(2, 14)), (300, 14), (300, 15)):
        problem = _problem(count, seed)
        started = time.process_time()
        got = [list(bucket) for bucket in answer(*deepcopy(problem))]
        took = time.process_time() - started
        case = f"best_buckets with {count} gradients" + (f", {problem}," if count < 10 else "")
        expect(
            [index for bucket in got for index in bucket] == list(range(count)) and all(got),
            f"{case} must return lists that contain the indices 0 to {count - 1} in this order, got {got}.",
        )
        best = min(_end(each, *problem) for each in _all_splits(count)) if count < 10 else _optimum(*problem)
        mine = _end(got, *problem)
        expect(
            mine < best * (1 + 1e-9),
            f"{case} must return buckets whose last all-reduce ends at {best:.3f} s, got {mine:.3f} s.",
        )
        expect(took < 5, f"{case} must take less than 5 s of CPU time, got {took:.0f} s. Do not try all assignments.")
    return "Your buckets are optimal for 2, 9 and 300 gradients, at all tested latencies and bandwidths."


def _optimum(ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> float:
    return _end(_best_buckets(ready, nbytes, latency, bandwidth), ready, nbytes, latency, bandwidth)


def _best_buckets(ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> list[list[int]]:
    # best[i]: the earliest time at which the first i gradients can be sent, and the start of the last bucket
    best: list[tuple[float, int]] = [(0.0, 0)]
    for i in range(1, len(ready) + 1):
        in_bucket, options = 0, []
        for j in range(i - 1, -1, -1):  # the last bucket contains the gradients j to i - 1
            in_bucket += nbytes[j]
            end = max(best[j][0], ready[i - 1]) + latency + in_bucket / bandwidth
            options.append((end, j))
        best.append(min(options))
    buckets: list[list[int]] = []
    i = len(ready)
    while i > 0:
        j = best[i][1]
        buckets.insert(0, list(range(j, i)))
        i = j
    return buckets


def _one_bucket(ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> list[list[int]]:
    return [list(range(len(ready)))]


def _one_each(ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> list[list[int]]:
    return [[index] for index in range(len(ready))]


def _same_cap(ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> list[list[int]]:
    """Return the best buckets that a single bucket size cap can produce."""

    def split(cap: int) -> list[list[int]]:
        buckets: list[list[int]] = [[]]
        for index in range(len(ready)):
            if sum(nbytes[i] for i in buckets[-1]) >= cap:
                buckets.append([])
            buckets[-1].append(index)
        return buckets

    caps = sorted({sum(nbytes[a:b]) for a in range(10) for b in range(a + 1, len(nbytes) + 1)})
    return min(map(split, caps[:: 1 + len(caps) // 60]), key=lambda each: _end(each, ready, nbytes, latency, bandwidth))


def _all_that_is_ready(
    ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float
) -> list[list[int]]:
    """Return the buckets of a schedule that sends all ready gradients as one bucket whenever the link is free."""
    buckets: list[list[int]] = []
    free, index = 0.0, 0
    while index < len(ready):
        start = max(free, ready[index])
        bucket = [i for i in range(index, len(ready)) if ready[i] <= start]
        free = start + latency + sum(nbytes[i] for i in bucket) / bandwidth
        buckets.append(bucket)
        index = bucket[-1] + 1
    return buckets


def _drops_the_last(ready: Sequence[float], nbytes: Sequence[int], latency: float, bandwidth: float) -> list[list[int]]:
    return _best_buckets(ready, nbytes, latency, bandwidth)[:-1]


best_buckets = Exercise(
    task=(
        "best_buckets(ready, nbytes, latency, bandwidth): gradient i has nbytes[i] bytes and is ready at time "
        "ready[i]. The times are in ascending order. Return buckets (lists of consecutive indices) whose last "
        "all-reduce ends as early as possible. A bucket of n bytes takes latency + n / bandwidth, and the link sends "
        "one bucket at a time."
    ),
    test=_test_best_buckets,
    solution=_best_buckets,
    wrong={
        "always returns one bucket": _one_bucket,
        "sends every gradient separately": _one_each,
        "uses the same cap for all buckets": _same_cap,
        "sends all ready gradients whenever the link is free": _all_that_is_ready,
        "loses the last bucket": _drops_the_last,
    },
    hints=(
        "Let best(i) be the earliest time at which the first i gradients can be sent. best(0) is 0.",
        "If the last bucket contains the gradients j to i - 1, it ends at max(best(j), ready[i - 1]) + latency + "
        "bucket_bytes / bandwidth. best(i) is the minimum over all j.",
        "Compute best(1), best(2), ... in a list, and store the j of each minimum. Follow these indices back from the "
        "end to find the buckets.",
    ),
)
