"""Exercises of 15_cluster: communication times, micro-batches for a slow network, and unreachable hosts."""

from collections.abc import Mapping

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, number

# -------------------------------------------------------------------------------------------------- 1. time on the wire


def _wire_seconds(nbytes: int, ranks: int, bits_per_second: float) -> float:
    sent = 2 * (ranks - 1) / ranks * nbytes  # per rank, in a ring
    return sent * 1514 / 1448 * 8 / bits_per_second


def _takes_bits_for_bytes(nbytes: int, ranks: int, bits_per_second: float) -> float:
    return _wire_seconds(nbytes, ranks, bits_per_second) / 8


def _sends_all_to_each(nbytes: int, ranks: int, bits_per_second: float) -> float:
    return 2 * (ranks - 1) * nbytes * 1514 / 1448 * 8 / bits_per_second


def _sends_once(nbytes: int, ranks: int, bits_per_second: float) -> float:
    return nbytes * 1514 / 1448 * 8 / bits_per_second


def _without_headers(nbytes: int, ranks: int, bits_per_second: float) -> float:
    return 2 * (ranks - 1) / ranks * nbytes * 8 / bits_per_second


_WHY = {
    _takes_bits_for_bytes: "bandwidth is given in bits per second, and a byte has 8 bits",
    _sends_all_to_each: "in each round, a ring sends only a part of the bytes",
    _sends_once: "this is right only for two ranks; each of N ranks sends 2 (N - 1) / N times the bytes",
    _without_headers: "1,448 bytes of data take 1,514 bytes on the wire",
}


def _test_wire(answer: Answer) -> str:
    for case in [(3_318_784, 2, 1e8), (3_318_784, 8, 1e9), (2**20, 4, 1e10)]:
        right, got = _wire_seconds(*case), number(answer, *case)
        why = next((f" Hint: {why}." for wrong, why in _WHY.items() if abs(wrong(*case) - got) < 1e-9), "")
        nbytes, ranks, bits = case
        what = f"{nbytes:,} bytes on {ranks} ranks at {bits:,.0f} bit/s: must be {right:.6f} s, got {got:.6f} s."
        expect(abs(got / right - 1) < 1e-3, what + why)
    return "The rest of the measured time is latency, and CPU time for copies and additions."


wire_seconds = Exercise(
    task=(
        "wire_seconds(nbytes, ranks, bits_per_second): return the seconds for which each rank's link is busy in a ring "
        "all-reduce of nbytes, if every 1,448 bytes of data take 1,514 bytes on the wire."
    ),
    test=_test_wire,
    solution=_wire_seconds,
    wrong={
        "confuses bits and bytes": _takes_bits_for_bytes,
        "sends all bytes in each round": _sends_all_to_each,
        "ignores the number of ranks": _sends_once,
        "forgets the headers": _without_headers,
    },
    hints=(
        "A ring of N ranks has 2 (N - 1) rounds. In each round, a rank sends 1/N of the bytes.",
        "Each rank sends 2 (N - 1) / N * nbytes. Add the headers, convert to bits (8 per byte), divide by the rate.",
    ),
)

# ----------------------------------------------------------------------------------------------------- 2. distant hosts


def _far_seconds(nbytes: int, tensors: int, ranks: int, delay: float, bytes_per_second: float) -> float:
    rounds = 2 * (ranks - 1)
    return tensors * rounds * 2 * delay + rounds * nbytes / ranks / bytes_per_second


def _data_unasked(nbytes: int, tensors: int, ranks: int, delay: float, bytes_per_second: float) -> float:
    return _far_seconds(nbytes, tensors, ranks, delay / 2, bytes_per_second)


def _delayed_once(nbytes: int, tensors: int, ranks: int, delay: float, bytes_per_second: float) -> float:
    return _far_seconds(nbytes, 1, ranks, delay, bytes_per_second)


def _all_for_each(nbytes: int, tensors: int, ranks: int, delay: float, bytes_per_second: float) -> float:
    return tensors * _far_seconds(nbytes, 1, ranks, delay, bytes_per_second)


def _two_ranks(nbytes: int, tensors: int, ranks: int, delay: float, bytes_per_second: float) -> float:
    return _far_seconds(nbytes, tensors, 2, delay, bytes_per_second)


_WHY_FAR = {
    _data_unasked: "in each round, the receiver first sends a message that it is ready, and then the data is sent",
    _delayed_once: "each tensor waits for the previous one, so every tensor has its own delays",
    _all_for_each: "nbytes is the total of all tensors, so these bytes are sent once",
    _two_ranks: "this is right only for two ranks; more ranks need more rounds",
}


def _test_far(answer: Answer) -> str:
    for case in [(3_318_784, 1, 2, 5e-3, 1.2e8), (3_318_784, 30, 2, 5e-3, 1.2e8), (2**20, 3, 8, 1e-3, 1.2e7)]:
        right, got = _far_seconds(*case), number(answer, *case)
        why = next((f" Hint: {why}." for wrong, why in _WHY_FAR.items() if abs(wrong(*case) - got) < 1e-9), "")
        nbytes, tensors, ranks, delay, bandwidth = case
        what = f"{nbytes:,} bytes in {tensors} tensors, {ranks} ranks, {1e3 * delay:g} ms, {bandwidth:,.0f} bytes/s"
        expect(abs(got / right - 1) < 1e-3, f"{what}: must be {right:.4f} s, got {got:.4f} s.{why}")
    return "Over long distances, use few large all-reduces: they send the same bytes with fewer delays."


far_seconds = Exercise(
    task=(
        "far_seconds(nbytes, tensors, ranks, delay, bytes_per_second): return the seconds that gloo's ring all-reduces "
        "of `tensors` tensors, with nbytes bytes in total, take one after another. Every message between hosts is "
        "delayed by `delay` seconds, and data is sent only after the receiver's message that it is ready."
    ),
    test=_test_far,
    solution=_far_seconds,
    wrong={
        "sends data before the receiver is ready": _data_unasked,
        "counts the delays of one tensor only": _delayed_once,
        "sends all bytes for each tensor": _all_for_each,
        "has two rounds for any number of ranks": _two_ranks,
    },
    hints=(
        "A ring of N ranks has 2 (N - 1) rounds. How many messages does a round send one after another?",
        "In a round, the ready message takes one delay; then 1/N of the bytes takes one delay plus its transfer time.",
        "Add tensors * 2 (N - 1) * 2 * delay and 2 (N - 1) / N * nbytes / bytes_per_second.",
    ),
)

# --------------------------------------------------------------------------------------- 3. the number of micro-batches


def _micro_batches(compute: float, communication: float, wanted: float) -> int:
    number = 1
    while number * compute < wanted * (number * compute + communication):
        number += 1
    return number


def _one_too_few(compute: float, communication: float, wanted: float) -> int:
    return max(1, _micro_batches(compute, communication, wanted) - 1)


def _as_long_as_communication(compute: float, communication: float, wanted: float) -> int:
    number = 1
    while number * compute < communication:
        number += 1
    return number


def _of_the_communication(compute: float, communication: float, wanted: float) -> int:
    number = 1
    while number * compute < wanted * communication:
        number += 1
    return number


def _test_micro_batches(answer: Answer) -> str:
    for compute, communication, wanted in [(0.1, 0.28, 0.8), (0.1, 0.028, 0.9), (0.05, 0.001, 0.9), (0.02, 1.0, 0.5)]:
        right, got = _micro_batches(compute, communication, wanted), number(answer, compute, communication, wanted)
        if got != right:
            reached = {n: n * compute / (n * compute + communication) for n in (got, right)}
            raise WrongAnswerError(
                f"{compute} s per micro-batch, {communication} s of communication per step, at least {wanted:.0%}: "
                f"the result must be {right} micro-batches, the smallest number that is enough "
                f"({reached[right]:.0%} of a step), got {got:g} ({reached[got]:.0%})."
            )
    return "The batch grows by the same factor. Notebook 08 shows how that affects the loss."


micro_batches = Exercise(
    task=(
        "micro_batches(compute, communication, wanted): return the smallest number of micro-batches per step for which "
        "the ranks compute for at least the fraction `wanted` of the step. A micro-batch takes `compute` seconds. The "
        "ranks communicate once per step for `communication` seconds, without overlap."
    ),
    test=_test_micro_batches,
    solution=_micro_batches,
    wrong={
        "returns one too few": _one_too_few,
        "stops when computation takes as long as communication": _as_long_as_communication,
        "uses a fraction of the communication, not of the step": _of_the_communication,
        "communicates after each micro-batch": lambda compute, communication, wanted: 1,
    },
    hints=(
        "A step of n micro-batches takes n * compute + communication. Which fraction of it is computation?",
        "Try n = 1, 2, 3, ... until n * compute / (n * compute + communication) is at least `wanted`.",
    ),
)

# ------------------------------------------------------------------------------------------------- 4. unreachable hosts

Missed = Mapping[str, set[str]]


def _who_is_lost(missed: Missed) -> set[str]:
    named = set().union(*missed.values())
    return {host for host in named if all(host in missed[other] for other in missed if other != host)}


def _anybody_misses(missed: Missed) -> set[str]:
    return set().union(*missed.values())


def _asks_the_first(missed: Missed) -> set[str]:
    return set(missed[min(missed)])


def _asks_the_lost(missed: Missed) -> set[str]:
    return {host for host in missed if len(missed[host]) == len(missed) - 1}


def _test_who_is_lost(answer: Answer) -> str:
    cases: list[tuple[str, Missed, set[str]]] = [
        ("n1's cable is cut", {"n0": {"n1"}, "n1": {"n0", "n2"}, "n2": {"n1"}}, {"n1"}),
        ("n0's cable is cut", {"n0": {"n1", "n2"}, "n1": {"n0"}, "n2": {"n0"}}, {"n0"}),
        ("n2 has no power, and does not report", {"n0": {"n2"}, "n1": {"n2"}}, {"n2"}),
        ("only the link between n0 and n2 is broken", {"n0": {"n2"}, "n1": set(), "n2": {"n0"}}, set()),
        ("with two hosts, it is unknown whose cable is cut", {"n0": {"n1"}, "n1": {"n0"}}, {"n0", "n1"}),
    ]
    for story, missed, right in cases:
        got = answer({host: set(each) for host, each in missed.items()})
        if not isinstance(got, (set, frozenset)):
            raise WrongAnswerError(f"The result must be a set of names, got {got!r}.")
        expect(got == right, f"{story}: for {missed}, the result must be {right or 'empty'}, got {got or 'empty'}.")
    return "One host's view is not enough: if n1 is unplugged, n1 cannot reach any other host."


who_is_lost = Exercise(
    task=(
        "who_is_lost(missed): return the set of hosts that no other host can reach. `missed` maps each host that still "
        "reports to the hosts that did not answer it, such as {'n0': {'n1'}, 'n2': {'n1'}}."
    ),
    test=_test_who_is_lost,
    solution=_who_is_lost,
    wrong={
        "returns every host that any host misses": _anybody_misses,
        "trusts the first host": _asks_the_first,
        "returns only hosts that still report": _asks_the_lost,
    },
    hints=(
        "To decide about n1, use the reports of all hosts except n1 itself.",
        "A host without power is not a key of `missed`, but may be lost: collect the names from the sets, too.",
        "A host is lost if it is in missed[other] for every other host that reports.",
    ),
)
