"""Every DDP variant and ZeRO stage trains any model like one process, or rejects it clearly.

`histories.py` defines models and training histories as data. Two and three ranks replay random histories, and the
histories of past bugs, on every arm. Each rank compares its gradients, weights and outputs with plain torch on all
ranks' samples. Set HISTORIES=2000 to search longer. A failure is reduced to a small history.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from ddp_tutorial.world import World
from histories import (
    ARMS,
    FLOOR,
    HOOKS,
    KINDS,
    OPTIMIZERS,
    STEPS,
    TOLERANCES,
    WHOLE,
    WRAPPED,
    ZEROED,
    Block,
    Draw,
    History,
    Plain,
    difference,
    replay,
    run,
)

HISTORIES = int(os.environ.get("HISTORIES", "30"))
DRAWN = {2: HISTORIES, 3: HISTORIES // 3}  # the number of histories, by the number of ranks
DDP = ("naive", "flat", "bucket", "torch", "torch, shared memory")
BUCKETS = ("bucket", "zero1")
TORCH = ("torch", "torch, shared memory")


def one(*events: str, block: Block | None = None, **options: Any) -> History:
    """Return a history of a model with one block."""
    return History((block or Block("linear"),), events, **options)


STEP = ("wrap", "backward", "step")


class Pair(NamedTuple):
    """Arms and a feature of histories that are incompatible."""

    arms: tuple[str, ...]
    feature: str
    reason: str  # a pattern of the error that every rank raises, or why the pair does not run
    example: History | None = None


# An arm may raise this error, on every rank, for a history with this feature, and must raise it for the example. Any
# other error is a failure.
REFUSALS = [
    Pair(
        BUCKETS,
        "backward without no_sync before another",
        "a forward pass started, but finish",
        one("wrap", "backward", *STEP[1:]),
    ),
    Pair(BUCKETS, "two losses", "received a second gradient before finish", one("wrap", "two losses", "step")),
    Pair(
        BUCKETS,
        "layer in two reentrant checkpoints",
        "received a second gradient before finish",
        one(*STEP, block=Block("layer in two reentrant checkpoints")),
    ),
    Pair(
        TORCH,
        "layer in two reentrant checkpoints",
        "Expected to mark a variable ready only once",
        one(*STEP, block=Block("layer in two reentrant checkpoints")),
    ),
    Pair(
        ("torch",),
        "reentrant and find_unused",
        "Expected to mark a variable ready only once",
        one(*STEP, block=Block("reentrant checkpoint"), find_unused=True),
    ),
    Pair(
        BUCKETS,
        "failing backward",
        "a forward pass started, but finish",
        one("wrap", "failing backward", "zero_grad to None", "backward", "step"),
    ),
    Pair(
        TORCH,
        "failing backward",
        "Expected to have finished reduction in the prior iteration",
        one("wrap", "failing backward", "zero_grad to None", "backward", "step"),
    ),
    Pair(
        (*DDP, "zero1"),
        "unfreeze after wrapping",
        "were frozen when the model was wrapped now require gradients",
        one("freeze", "wrap", "unfreeze", "backward", "step"),
    ),
    Pair(
        ("zero2", "zero3"),
        "unfreeze after wrapping",
        "were frozen when the model was wrapped now require gradients",
        one("freeze", "wrap", "unfreeze", "backward", "step"),
    ),
    *(
        Pair(("zero2", "zero3", "fsdp"), feature, "the model is already sharded", example)
        for feature, example in (
            ("wrap after wrapping", one("wrap", *STEP)),
            ("rewrap", one(*STEP, "zero_grad to None", "rewrap", *STEP[1:])),
        )
    ),
    Pair(
        ("zero3", "fsdp"),
        "backward before wrapping",
        "has a gradient, which sharding would discard",
        one("backward", *STEP),
    ),
    Pair(("zero1", "fsdp"), "lbfgs", "requires a closure", one(*STEP, optimizer="lbfgs")),
    Pair(("zero3",), "copy", "cannot pickle 'torch._C._distributed_c10d.ProcessGroup'", one("wrap", "copy", *STEP[1:])),
    *(
        Pair(("fsdp",), kind, "FSDP does not support non-contiguous parameters", one(*STEP, block=Block(kind)))
        for kind in ("channels_last", "transposed", "strided")
    ),
    Pair(("fsdp",), "inference", "Inplace update to inference tensor", one("wrap", "inference", *STEP[1:])),
    Pair(("fsdp",), "one number", "strategy=fsdp shards by row", one(*STEP, block=Block("one number"))),
    Pair(("fsdp",), "no number", "_chunk_cat expects non-empty tensor", one(*STEP, block=Block("no number"))),
]

# What an arm is documented not to do, although nothing can detect it: such a pair does not run.
NOT_RUN = [
    Pair(
        ("zero2", "zero3"), "gradients dropped", "zero_grad does not reach the sums that finish() has yet to hand out"
    ),
    Pair(("zero2", "zero3"), "gradients not zeroed", "finish() replaces the gradients of the step before"),
    Pair(("fsdp",), "tensor hook", "torch's fully_shard computes with parameters of its own, without these hooks"),
    Pair(("fsdp",), "gradient hook before wrapping", "torch's fully_shard replaces the parameters"),
    Pair(("torch, shared memory",), "find_unused", "DDPConfig refuses the two options together"),
    Pair(TORCH, "two losses", "torch's DDP reduces in one backward pass for each forward pass"),
    Pair(("fsdp",), "used on rank 0", "FSDPStrategy: every rank must use the same parameters"),
    Pair(("fsdp",), "failing backward", "torch's fully_shard keeps the state of a backward pass that raised"),
    Pair(
        ("zero3",), "two losses and used on rank 0", "ShardedModel: where units are used again, all ranks do the same"
    ),
    Pair(("zero2", "zero3"), "lbfgs", "ShardedGradients: for optimizers that treat each element by itself"),
]

# The histories of past bugs.
PAST = {
    "a gradient hook after wrapping": one("wrap", "gradient hook", "backward", "step", bucket_bytes=1),
    "channels_last, used on one rank": one(*STEP, block=Block("channels_last", used="on rank 0"), find_unused=True),
    "transposed, used on one rank": one(*STEP, block=Block("transposed", used="on rank 0"), find_unused=True),
    "wrapped twice": one("wrap", *STEP),
    "a layer in two reentrant checkpoints": one(*STEP, block=Block("layer in two reentrant checkpoints")),
    "two backwards of one forward": one("wrap", "two losses", "step"),
    "two backwards without no_sync": one("wrap", "backward", *STEP[1:]),
    "an error in an earlier backward": one(
        *STEP, "zero_grad to None", "failing backward", "zero_grad to None", *STEP[1:]
    ),
    "Adagrad": one(*STEP, optimizer="adagrad"),
    "LBFGS": one(*STEP, optimizer="lbfgs"),
    "a block that returns a dataclass": one(*STEP, block=Block("linear", returns="dataclass")),
    "gradients zeroed in place": one(*STEP, "zero_grad to zero", *STEP[1:]),
    "SyncBatchNorm copied": one(*STEP, "copy", "zero_grad to None", *STEP[1:], block=Block("sync batch norm")),
    "SyncBatchNorm in bfloat16": one(*STEP, block=Block("sync batch norm", "bfloat16")),
    "SyncBatchNorm evaluated on rank 0": one(
        "wrap", "evaluate on rank 0", *STEP[1:], block=Block("sync batch norm without statistics")
    ),
    "a layer unfrozen after wrapping": one(
        "freeze", *STEP, "zero_grad to None", "unfreeze", *STEP[1:], find_unused=True
    ),
}


def matches(pair: Pair, arm: str, history: History) -> bool:
    return arm in pair.arms and pair.feature in history.features()


def is_run(arm: str, history: History) -> bool:
    return not any(matches(pair, arm, history) for pair in NOT_RUN)


def is_right(arm: str, history: History, ranks: Sequence[str]) -> bool:
    """Return whether all ranks agree with one process and each other, or all raise a documented error."""
    if ranks[0].startswith("equal"):
        return len(set(ranks)) == 1
    return any(is_refused(pair, ranks) for pair in REFUSALS if matches(pair, arm, history))


def is_refused(pair: Pair, ranks: Sequence[str]) -> bool:
    return all(re.match(rf"raises \w+: .*({pair.reason})", rank, re.DOTALL) for rank in ranks)


@cache
def drawn(size: int) -> list[History]:
    """Return random histories, the same in every run. Each kind of block is first in some of them."""
    kinds = list(KINDS)
    return [Draw(1000 * size + number).history(kinds[number % len(kinds)]) for number in range(DRAWN[size])]


@cache
def outcomes(size: int) -> dict[tuple[str, History], list[str]]:
    """Return every rank's outcome of each case on this number of ranks, from one launch."""
    cases = [(arm, each) for each in drawn(size) for arm in ARMS if is_run(arm, each)]
    if size == 2:
        cases += [(arm, each) for each in PAST.values() for arm in ARMS if is_run(arm, each)]
        cases += [(arm, pair.example) for pair in REFUSALS if pair.example for arm in pair.arms]
    cases = list(dict.fromkeys(cases))
    return dict(zip(cases, run(cases, size), strict=True))


def smallest(history: History, fails: Callable[[list[History]], list[bool]], seconds: float = 60) -> History:
    """Return the history without the events, blocks and options that a failure does not need. `fails` decides."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        candidates = [each for each in history.smaller() if each != history and each.is_valid()]
        failing = [each for each, failed in zip(candidates, fails(candidates), strict=True) if failed]
        if not failing:
            break
        history = failing[0]
    return history


def kinds_of(ranks: Sequence[str]) -> list[str]:
    """Return the kind of problem on each rank in two words, such as "raises RuntimeError:"."""
    return [" ".join(rank.split()[:2]) for rank in ranks]


def report(arm: str, history: History, ranks: Sequence[str]) -> str:
    told = [f"  rank {rank} {outcome}" for rank, outcome in enumerate(ranks)]
    return "\n".join([f"{arm} does not train as one process does:", f"  {history}", *told])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("arm", ARMS)
def test_every_history_trains_as_in_one_process_or_is_rejected(arm: str, size: int) -> None:
    cases = [each for each in drawn(size) if is_run(arm, each)]
    failed = [each for each in cases if not is_right(arm, each, outcomes(size)[arm, each])]
    if not failed:
        return

    first = min(failed, key=lambda each: len(each.events) + len(each.blocks))

    def fails(candidates: list[History]) -> list[bool]:
        judged = [each for each in candidates if is_run(arm, each)]
        ranks = dict(zip(judged, run([(arm, each) for each in judged], size), strict=True))
        alike = {each for each in judged if kinds_of(ranks[each]) == kinds_of(outcomes(size)[arm, first])}
        return [each in alike and not is_right(arm, each, ranks[each]) for each in candidates]

    small = smallest(first, fails)
    [ranks] = run([(arm, small)], size)
    pytest.fail(f"{len(failed)} of {len(cases)} histories fail. {report(arm, small, ranks)}", pytrace=False)


@pytest.mark.parametrize("name", PAST)
def test_past_bugs_stay_fixed(name: str) -> None:
    for arm in ARMS:
        if is_run(arm, PAST[name]):
            ranks = outcomes(2)[arm, PAST[name]]
            assert is_right(arm, PAST[name], ranks), report(arm, PAST[name], ranks)


@pytest.mark.parametrize("pair", REFUSALS, ids=lambda pair: f"{pair.arms[0]}, {pair.feature}")
def test_a_rejected_history_raises_the_documented_error_on_every_rank(pair: Pair) -> None:
    assert pair.example is not None
    for arm in pair.arms:
        ranks = outcomes(2)[arm, pair.example]
        assert is_refused(pair, ranks), report(arm, pair.example, ranks)


# ------------------------------------------------------------------------------------------------- of the test itself


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_gradient_that_is_two_percent_too_small_is_detected(dtype: str) -> None:
    gradient = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    for scale in (1, 0.01):
        assert not difference(gradient * scale, gradient * scale, TOLERANCES[dtype])
        assert "is off by" in difference(gradient * (0.98 * scale), gradient * scale, TOLERANCES[dtype])


def test_generated_histories_cover_each_feature_and_have_gradients() -> None:
    features = {feature for history in drawn(2) for feature in history.features()}
    events = {
        *STEPS,
        *ZEROED,
        "rewrap",
        "no_sync backward",
        "two losses",
        "failing forward",
        "failing backward",
        "copy",
    }
    events |= {"evaluate", "evaluate on rank 0", "inference", "gradients not zeroed", "freeze before wrapping"}
    events |= {f"{each} {when} wrapping" for each in HOOKS for when in ("before", "after")}
    returns = {f"{what} returns {each}" for what in ("block", "model") for each in WRAPPED}
    used = {"used always", "used never", "used on rank 0"}
    assert features >= {*KINDS, *TOLERANCES, *OPTIMIZERS} - WHOLE | events | returns | used
    norms = [
        float(gradient.norm()) / FLOOR
        for history in drawn(2)[:5]
        for what, found in replay(Plain(history, World(size=2)))
        for gradient in (found.values() if what.endswith("gradient") else ())
        if gradient is not None and gradient.numel()
    ]
    assert sum(norm > 1 for norm in norms) > 0.9 * len(norms)


def test_a_failing_history_is_reduced_to_the_failing_part() -> None:
    history = next(each for each in drawn(2) if len(each.blocks) == 3 and "freeze" in each.events)
    small = smallest(history, lambda candidates: ["freeze" in each.events for each in candidates])
    assert sorted(small.events) == ["backward", "freeze", "step", "wrap"]
    assert [block.kind for block in small.blocks] == ["linear"]
