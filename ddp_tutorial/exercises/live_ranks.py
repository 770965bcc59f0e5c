"""Exercises on detecting a drifted replica, repairing a replica, and bisecting a run, for notebook live_ranks."""

import torch

from ddp_tutorial.debug.hangs import CollectiveError
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect
from ddp_tutorial.live.pool import Ranks

_MODEL = """
import torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
"""
# Name of each tensor that drifts, and the code that changes it. The weight changes by only 1e-6.
_DRIFT = {
    "0.weight": "model[0].weight.data[1, 2] += 1e-6",
    "1.running_mean": "model[1].running_mean += 0.5",
}


def _pool(n: int) -> Ranks:
    ranks = Ranks(n, threads=1, device="cpu", wait_timeout=2.0, echo=False)
    ranks.execute(_MODEL)
    return ranks


def _state(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
    return ranks.get("{name: value.clone() for name, value in model.state_dict().items()}")


def _ask(answer: Answer, ranks: Ranks) -> object:
    try:
        return answer(ranks)
    except CollectiveError as hang:
        raise WrongAnswerError(f"The ranks are waiting for each other: {hang}") from None


# ------------------------------------------------------------------------------------------ 1. find the drifted replica


def _test_drifted(answer: Answer) -> str:
    with _pool(3) as ranks:
        expect(_ask(answer, ranks) is None, "The result must be None while all replicas are equal.")
        for rank, (name, drift) in zip((2, 0), _DRIFT.items(), strict=True):
            ranks.execute(_MODEL)
            ranks.execute(drift, on=[rank])
            found = _ask(answer, ranks)
            case = f"{name!r} has drifted on rank {rank}, possibly by less than print() shows"
            expect(found == (rank, name), f"{case}: the result must be {(rank, name)}, got {found}.")
    return "You found the rank and the tensor, both for a weight and for a buffer."


def _drifted(ranks: Ranks) -> tuple[int, str] | None:
    states = ranks.get("model.state_dict()")
    for name in states[0]:
        for rank in range(3):
            others = [states[other][name] for other in range(3) if other != rank]
            if others[0].equal(others[1]) and not states[rank][name].equal(others[0]):
                return rank, name  # the other two ranks agree
    return None


def _against_rank_zero(ranks: Ranks) -> tuple[int, str] | None:
    states = ranks.get("model.state_dict()")
    for rank, state in enumerate(states):
        for name, value in state.items():
            if not value.equal(states[0][name]):
                return rank, name
    return None


def _parameters_only(ranks: Ranks) -> tuple[int, str] | None:
    states = ranks.get("dict(model.named_parameters())")
    for name in states[0]:
        for rank in range(3):
            others = [states[other][name] for other in range(3) if other != rank]
            if others[0].equal(others[1]) and not states[rank][name].equal(others[0]):
                return rank, name
    return None


def _nearly_equal(ranks: Ranks) -> tuple[int, str] | None:
    states = ranks.get("model.state_dict()")
    for name in states[0]:
        for rank in range(3):
            others = [states[other][name] for other in range(3) if other != rank]
            if not any(states[rank][name].allclose(other, atol=1e-4) for other in others):
                return rank, name
    return None


drifted = Exercise(
    task="drifted(ranks): three ranks hold replicas of a model, and at most one state dict tensor differs on one "
    "rank. Return the (rank, name) of this tensor, or None if all replicas are equal.",
    test=_test_drifted,
    solution=_drifted,
    wrong={
        "assumes that rank 0 is right": _against_rank_zero,
        "forgets the buffers": _parameters_only,
        "treats nearly equal as equal": _nearly_equal,
    },
    hints=(
        'ranks.get("model.state_dict()") returns a list with one state dict per rank.',
        "Compare tensors bitwise with a.equal(b). Rank 0 may have drifted: check whether ranks 1 and 2 agree.",
    ),
)

# --------------------------------------------------------------------------------------------------------- 2. repair it


def _test_bring_back(answer: Answer) -> str:
    with _pool(2) as ranks:
        for drift in _DRIFT.values():
            ranks.execute(drift, on=[1])
        before, pids = _state(ranks), [each["pid"] for each in ranks.status()]
        _ask(answer, ranks)
        after = _state(ranks)
        same = pids == [each["pid"] for each in ranks.status()]
        expect(same, "The ranks were restarted. Repair the running ranks: a restart loses everything else in memory.")
        for name, value in before[0].items():
            expect(after[0][name].equal(value), f"{name!r} changed on rank 0, which was right.")
            expect(after[1][name].equal(value), f"{name!r} still differs on rank 1.")
    return "Both replicas are bitwise identical again, without a restart."


def _bring_back(ranks: Ranks) -> None:
    ranks.execute("for value in model.state_dict().values(): dist.broadcast(value, src=0)")


def _average(ranks: Ranks) -> None:
    ranks.execute("for p in model.parameters(): dist.all_reduce(p.data); p.data /= world.size")


def _weights_only(ranks: Ranks) -> None:
    ranks.execute("for p in model.parameters(): dist.broadcast(p.data, src=0)")


def _on_one(ranks: Ranks) -> None:
    ranks.execute("for value in model.state_dict().values(): dist.broadcast(value, src=0)", on=[1])


def _start_anew(ranks: Ranks) -> None:
    ranks.restart()
    ranks.execute(_MODEL)


bring_back = Exercise(
    task="bring_back(ranks): rank 1's model has drifted from rank 0's model. Copy rank 0's state to rank 1 without a "
    "restart.",
    test=_test_bring_back,
    solution=_bring_back,
    wrong={
        "averages what is right with what is wrong": _average,
        "forgets the buffers": _weights_only,
        "broadcasts on rank 1 only": _on_one,
        "restarts the ranks": _start_anew,
    },
    hints=(
        'ranks.execute("...") runs code on all ranks. Which collective copies a tensor from rank 0 to all ranks?',
        "On all ranks, call dist.broadcast(tensor, src=0) for each tensor of model.state_dict(), including buffers.",
    ),
)

# ----------------------------------------------------------------------------------------- 3. the first different step

STEPS = 200
MOST_RUNS = 9  # 8 runs to bisect 200 steps (2**8 > 200), and 1 run to check whether the replicas differ
_RUN = """
import torch, torch.distributed as dist
from torch import nn
runs = 0

def run(steps):
    global model, runs
    runs += 1
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    samples = torch.Generator().manual_seed(world.rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(4, 3, generator=samples)
        model.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world.size
        if step == fault and world.rank == 1:
            model.weight.grad[0, 1] += 1e-3
        for p in model.parameters():
            p.data -= 1e-3 * p.grad
"""


def _test_first_difference(answer: Answer) -> str:
    most = 0
    with Ranks(2, threads=1, device="cpu", wait_timeout=5.0, echo=False) as ranks:
        for fault in (37, None, 1, STEPS):
            ranks.put(fault=fault)
            ranks.execute(_RUN)
            found = _ask(answer, ranks)
            most = max(most, *ranks.get("runs"))
            case = "The replicas never differ" if fault is None else f"The replicas first differ after step {fault}"
            expect(found == fault, f"{case}: the result must be {fault}, got {found}.")
            expect(
                most <= MOST_RUNS, f"run() was called {most} times, but {MOST_RUNS} calls are enough for {STEPS} steps."
            )
    return f"You found the step with at most {most} runs, and returned None if the replicas never differed."


def _differ(ranks: Ranks, steps: int) -> bool:
    ranks.execute(f"run({steps})")
    first, second = ranks.get("model.state_dict()")
    return any(not first[name].equal(second[name]) for name in first)


def _first_difference(ranks: Ranks) -> int | None:
    def differ(steps: int) -> bool:
        ranks.execute(f"run({steps})")
        first, second = ranks.get("model.state_dict()")
        return any(not first[name].equal(second[name]) for name in first)

    equal, different = 0, 200  # the replicas are equal after `equal` steps, and different after `different` steps
    if not differ(different):
        return None
    while different - equal > 1:
        middle = (equal + different) // 2
        if differ(middle):
            different = middle
        else:
            equal = middle
    return different


def _one_by_one(ranks: Ranks) -> int | None:
    return next((step for step in range(1, STEPS + 1) if _differ(ranks, step)), None)


def _last_equal(ranks: Ranks) -> int | None:
    first = _first_difference(ranks)
    return None if first is None else first - 1


def _always_a_step(ranks: Ranks) -> int | None:
    return _first_difference(ranks) or STEPS


def _rounded(ranks: Ranks) -> int | None:
    ranks.execute(f"run({STEPS})")
    first, second = ranks.get("model.weight.data")
    return None if first.allclose(second, atol=1e-4) else _first_difference(ranks)


first_difference = Exercise(
    task="first_difference(ranks): run(n) trains a new model on two ranks for n steps, at most 200. Return the "
    "first step after which the replicas are not bitwise identical, or None if there is no such step. Call "
    "run() at most 9 times.",
    test=_test_first_difference,
    solution=_first_difference,
    wrong={
        "tries one step after the other": _one_by_one,
        "returns the last step with equal replicas": _last_equal,
        "reports a step when the replicas never differ": _always_a_step,
        "treats nearly equal as equal": _rounded,
    },
    hints=(
        'ranks.execute("run(100)") trains for 100 steps. Then compare the state dicts of both ranks.',
        "Use bisection. If the replicas are equal after 100 steps, they first differ after one of the steps 101 "
        "to 200.",
    ),
)
