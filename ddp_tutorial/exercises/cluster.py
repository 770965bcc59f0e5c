"""The exercises of 15_cluster: how long the wire takes, and how long a far one; how many micro-batches a slow network
wants; and which host is lost."""

from collections.abc import Mapping

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect


def _number(answer: Answer, *arguments: object) -> float:
    got = answer(*arguments)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise WrongAnswerError(f"Return a number; you gave {got!r}.")
    return got


# ----------------------------------------------------------------------------------------------- 1. seconds on the wire


def _wire_seconds(nbytes: int, ranks: int, bits_per_second: float) -> float:
    sent = 2 * (ranks - 1) / ranks * nbytes  # by each rank, in a ring
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
    _takes_bits_for_bytes: "networks are sold in bits a second, and a byte has 8",
    _sends_all_to_each: "a ring sends a part of the bytes in each round, not all of them",
    _sends_once: "this is right for two ranks; of more, each sends 2 (N - 1) / N times the bytes",
    _without_headers: "1,448 bytes of a message take 1,514 on the wire",
}


def _test_wire(answer: Answer) -> str:
    for case in [(3_318_784, 2, 1e8), (3_318_784, 8, 1e9), (2**20, 4, 1e10)]:
        right, got = _wire_seconds(*case), _number(answer, *case)
        why = next((f" Look again: {why}." for wrong, why in _WHY.items() if abs(wrong(*case) - got) < 1e-9), "")
        nbytes, ranks, bits = case
        said = f"{nbytes:,} bytes over {ranks} ranks at {bits:,.0f} bit/s: expected {right:.6f} s, got {got:.6f} s."
        expect(abs(got / right - 1) < 1e-3, said + why)
    return "The rest of what you measure is latency, and the processor, which has to copy and add."


wire_seconds = Exercise(
    task=(
        "wire_seconds(nbytes, ranks, bits_per_second): return the seconds for which each rank's link is busy in a ring "
        "all-reduce of nbytes, if 1,448 bytes of a message take 1,514 on the wire."
    ),
    test=_test_wire,
    solution=_wire_seconds,
    wrong={
        "takes bits for bytes": _takes_bits_for_bytes,
        "sends all bytes in each round": _sends_all_to_each,
        "forgets that more ranks send more": _sends_once,
        "forgets the headers": _without_headers,
    },
    hints=(
        "A ring of N ranks has 2 (N - 1) rounds, and in each of them a rank sends an N-th of the bytes.",
        "So each sends 2 (N - 1) / N * nbytes. Then headers, then 8 bits a byte, then the rate.",
    ),
)

# ---------------------------------------------------------------------------------------------------------- 2. far away


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
    _data_unasked: "in each round word that the receiver is ready goes one way, and then the data come the other",
    _delayed_once: "each tensor waits for the one before it, so each has its own delays",
    _all_for_each: "nbytes are the bytes of all tensors together, so they are sent once",
    _two_ranks: "this is right for two ranks; more have more rounds",
}


def _test_far(answer: Answer) -> str:
    for case in [(3_318_784, 1, 2, 5e-3, 1.2e8), (3_318_784, 30, 2, 5e-3, 1.2e8), (2**20, 3, 8, 1e-3, 1.2e7)]:
        right, got = _far_seconds(*case), _number(answer, *case)
        why = next((f" Look again: {why}." for wrong, why in _WHY_FAR.items() if abs(wrong(*case) - got) < 1e-9), "")
        nbytes, tensors, ranks, delay, bandwidth = case
        said = f"{nbytes:,} bytes in {tensors} tensors, {ranks} ranks, {1e3 * delay:g} ms, {bandwidth:,.0f} bytes/s"
        expect(abs(got / right - 1) < 1e-3, f"{said}: expected {right:.4f} s, got {got:.4f} s.{why}")
    return "So far away, few large all-reduces: the bytes are the same, and the delays are not."


far_seconds = Exercise(
    task=(
        "far_seconds(nbytes, tensors, ranks, delay, bytes_per_second): return the seconds that gloo's ring all-reduces "
        "of `tensors` tensors take, one after another, which have nbytes bytes together. A message needs `delay` "
        "seconds more from one host to another, and data leave only when the receiver has sent word that it is ready."
    ),
    test=_test_far,
    solution=_far_seconds,
    wrong={
        "sends data unasked": _data_unasked,
        "delays the tensors only once": _delayed_once,
        "sends all bytes for each tensor": _all_for_each,
        "has two rounds for any number of ranks": _two_ranks,
    },
    hints=(
        "A ring of N ranks has 2 (N - 1) rounds. How many times does something travel in one, after something else?",
        "A round: word that the receiver is ready, one delay; then an N-th of the bytes, one delay and their time.",
        "tensors * 2 (N - 1) * 2 * delay, and 2 (N - 1) / N * nbytes / bytes_per_second.",
    ),
)

# -------------------------------------------------------------------------------------------- 3. how many micro-batches


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
        right, got = _micro_batches(compute, communication, wanted), _number(answer, compute, communication, wanted)
        if got != right:
            reached = {n: n * compute / (n * compute + communication) for n in (got, right)}
            raise WrongAnswerError(
                f"{compute} s a micro-batch, {communication} s of communication a step, {wanted:.0%} wanted: "
                f"{got:g} micro-batches compute during {reached[got]:.0%} of a step, and {right} during "
                f"{reached[right]:.0%}, which are the fewest that are enough."
            )
    return "And the batch has grown as often: whether the loss likes that is another question (notebook 08)."


micro_batches = Exercise(
    task=(
        "micro_batches(compute, communication, wanted): return the fewest micro-batches in a step with which the ranks "
        "compute during at least `wanted` of it. A micro-batch computes `compute` seconds; the ranks communicate once "
        "a step, for `communication` seconds, and nothing of that is hidden."
    ),
    test=_test_micro_batches,
    solution=_micro_batches,
    wrong={
        "gives one too few": _one_too_few,
        "stops when computing is as long as communication": _as_long_as_communication,
        "takes the part of the communication, not of the step": _of_the_communication,
        "always talks after each micro-batch": lambda compute, communication, wanted: 1,
    },
    hints=(
        "A step of n micro-batches takes n * compute + communication. Which part of it is computing?",
        "Try n = 1, 2, 3, ... until n * compute / (n * compute + communication) is at least `wanted`.",
    ),
)

# ------------------------------------------------------------------------------------------------------- 4. who is lost

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
        ("n2 has no power, and says nothing", {"n0": {"n2"}, "n1": {"n2"}}, {"n2"}),
        ("only the way between n0 and n2 is broken", {"n0": {"n2"}, "n1": set(), "n2": {"n0"}}, set()),
        ("of two, nobody can tell whose cable it is", {"n0": {"n1"}, "n1": {"n0"}}, {"n0", "n1"}),
    ]
    for story, missed, right in cases:
        got = answer({host: set(each) for host, each in missed.items()})
        if not isinstance(got, (set, frozenset)):
            raise WrongAnswerError(f"Return a set of names; you gave {got!r}.")
        expect(got == right, f"{story}: from {missed} expected {right or 'nobody'}, got {got or 'nobody'}.")
    return "What one host sees is not enough: n1 without a cable would call all the others lost."


who_is_lost = Exercise(
    task=(
        "who_is_lost(missed): return a set with the hosts that none of the others reaches. `missed` says of each host "
        "that still speaks which hosts have not answered it, such as {'n0': {'n1'}, 'n2': {'n1'}}."
    ),
    test=_test_who_is_lost,
    solution=_who_is_lost,
    wrong={
        "takes everyone whom anybody misses": _anybody_misses,
        "believes the first": _asks_the_first,
        "waits for the lost ones to say so": _asks_the_lost,
    },
    hints=(
        "Whose word counts about n1? That of all who speak, but for n1 itself.",
        "A host without power is no key of `missed`, and yet it may be lost: collect the names from the sets, too.",
        "Lost is who is in missed[other] for every other host that speaks.",
    ),
)
