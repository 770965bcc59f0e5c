"""Ranks that take local steps for a round, and then average their weights, match the definition."""

import math
import shutil
import warnings
from collections.abc import Callable
from contextlib import chdir
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.accumulation.precision import NotFiniteError, Precision
from ddp_tutorial.checkpoint.manifest import CheckpointError, checkpoint_name, read_manifest
from ddp_tutorial.checkpoint.storage import read_state, stored
from ddp_tutorial.collectives import digest
from ddp_tutorial.compat import default_store
from ddp_tutorial.ddp.link import DirectLink
from ddp_tutorial.local_sgd.averaging import average
from ddp_tutorial.local_sgd.config import LocalConfig
from ddp_tutorial.local_sgd.outer import OuterNesterov
from ddp_tutorial.local_sgd.rounds import Rounds
from ddp_tutorial.local_sgd.state import LocalWeightsState
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig, TrainConfig
from ddp_tutorial.training.export import load
from ddp_tutorial.training.plan import memory, step_bytes_sent
from ddp_tutorial.training.strategies import make_strategy
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World
from ranks import error_of, watched

STEPS, WIDTH = 5, 7
Weights = dict[str, torch.Tensor]

# ---------------------------------------------------------------------------------------------------------- arithmetic


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 60))
def test_a_round_ends_after_its_length_in_updates(length: int, begin: int, updates: int) -> None:
    rounds = Rounds(length, begin)
    ends = [update for update in range(1, updates + 1) if rounds.ends_round(update)]
    assert ends == list(range(begin + length, updates + 1, length))
    assert rounds.all_reduces(updates) == min(begin, updates) + len(ends)
    assert rounds.local_steps(updates) == updates - max([min(begin, updates), *ends])


def test_the_outer_step_equals_torchs_nesterov_on_the_difference() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(5)), nn.Parameter(torch.zeros(5))
    theirs.data.copy_(ours.detach())
    outer = OuterNesterov([("p", ours)], 0.7, 0.9)
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        outer.begin()
        went = torch.randn(5)
        ours.data.add_(went)
        theirs.grad = -went
        outer.step()
        sgd.step()
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"strategy": "ddp", "local": {"round": 4}},
            "'local.round' requires strategy=local_sgd, post_local_sgd or",
        ),
        (
            {"strategy": "local_sgd", "local": {"begin": 4}},
            "'local.begin' requires strategy=post_local_sgd, got",
        ),
        (
            {"strategy": "local_sgd", "local": {"outer_momentum": 0.5}},
            "'local.outer_momentum' requires strategy=diloco, got strategy=local_sgd",
        ),
        ({"strategy": "post_local_sgd"}, "'local.begin' must be at least 1 for strategy=post_local_sgd, got 0"),
        ({"strategy": "diloco", "steps": 5}, r"'local.round' must be at most 'steps' \(5\), got 8"),
        (
            {"strategy": "post_local_sgd", "steps": 20, "local": {"begin": 15}},
            r"'local.begin' \+ 'local.round' must be at most 'steps' \(20\), got 15 \+ 8",
        ),
        (
            {"strategy": "diloco", "ddp": {"variant": "flat"}},
            "'ddp.variant' requires strategy=ddp or strategy=zero1, got strategy=diloco",
        ),
        ({"strategy": "local_sgd", "oom_skips": 2}, "'oom_skips' requires strategy=ddp, got strategy=local_sgd"),
    ],
)
def test_an_invalid_option_is_rejected_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate(values)


# ---------------------------------------------------------------------------------------------------------- the model


class Toy(nn.Module):
    """A model with tied, frozen and unused parameters, one that only rank 0 uses, and a local buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.again = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.again.weight = self.mix.weight
        self.first.bias.requires_grad_(False)
        self.spare, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        self.seen += len(x)
        x = torch.tanh(self.mix(self.first(x)))
        return self.again(x + self.shift if shifted else x)


def make_toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


def loss_sum(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y, shifted = batch
    return ((model(x, shifted) - y) ** 2).sum(), len(x)


def batches_of(step: int, rank: int, parts: int = 1, alike: bool = False, equal: bool = False) -> list[Any]:
    """Return ragged batches, or `equal` ones. Only rank 0 uses `shift`, or all ranks if the batches are `alike`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    counts = [3 if equal else 1 + (2 * rank + number + step) % 4 for number in range(parts)]
    draw = [torch.randn(2, count, WIDTH, generator=generator) for count in counts]
    return [(x, y, alike or rank == 0) for x, y in draw]


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda ps: torch.optim.SGD(ps, lr=0.02),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def definition(
    size: int, optimizer: str, length: int, begin: int = 0, outer: tuple[float, float] = (1.0, 0.0), parts: int = 1
) -> tuple[list[list[Weights]], Weights]:
    """Return the weights of `size` replicas in plain torch after each step, and their mean after the last.

    Runs in one process.
    """
    models = [make_toy() for _ in range(size)]
    optimizers = [MAKE[optimizer](trained_of(model)) for model in models]
    start, velocity = deepcopy(trained_of(models[0])), [torch.zeros_like(p) for p in trained_of(models[0])]
    history = []
    for step in range(STEPS):
        batches = [batches_of(step, rank, parts) for rank in range(size)]
        count = sum(len(x) for each in batches for x, _, _ in each)
        for model, each in zip(models, batches, strict=True):
            divisor = count / size if step < begin else sum(len(x) for x, _, _ in each)
            torch.stack([loss_sum(model, batch)[0] / divisor for batch in each]).sum().backward()
        replicas = list(zip(*map(trained_of, models), strict=True))
        if step < begin:
            for replica in replicas:
                used = [p.grad for p in replica if p.grad is not None]
                for p in replica if used else ():
                    p.grad = torch.stack(used).sum(0) / size
        for own in optimizers:
            own.step()
            own.zero_grad()
        is_end = step >= begin and (step + 1 - begin) % length == 0
        with torch.no_grad():
            for replica, origin, speed in zip(replicas, start, velocity, strict=True) if is_end else ():
                difference = origin - sum(replica) / size
                speed.mul_(outer[1]).add_(difference)
                origin.sub_(outer[0] * (difference + outer[1] * speed))
                for p in replica:
                    p.copy_(origin)
        if step < begin:
            start = deepcopy(trained_of(models[0]))
        history.append([weights_of(model) for model in models])
    means = {name: sum(each[name] for each in history[-1]) / size for name in history[-1][0]}
    return history, means  # type: ignore[return-value]


def weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


Case = tuple[str, str, int, int, tuple[float, float], int]
CASES: list[Case] = [
    ("local_sgd", "plain", 1, 0, (1.0, 0.0), 1),
    ("local_sgd", "sgd", 2, 0, (1.0, 0.0), 1),
    ("local_sgd", "adamw", 3, 0, (1.0, 0.0), 2),
    ("local_sgd", "adamw", 1, 0, (1.0, 0.0), 1),
    ("post_local_sgd", "sgd", 2, 2, (1.0, 0.0), 1),
    ("post_local_sgd", "adamw", 2, 1, (1.0, 0.0), 1),
    ("diloco", "adamw", 2, 0, (0.7, 0.9), 1),
    ("diloco", "sgd", 2, 0, (0.5, 0.5), 2),
    ("diloco", "adamw", 1, 0, (1.0, 0.0), 1),
]


def train(world: World, case: Case, alike: bool = False, equal: bool = False) -> dict[str, Any]:
    kind, optimizer, length, begin, (rate, momentum), parts = case
    local: dict[str, Any] = {"round": length, "begin": begin}
    local |= {"outer_learning_rate": rate, "outer_momentum": momentum} if kind == "diloco" else {}
    config = TrainConfig.model_validate({"strategy": kind, "local": local, "accumulation": parts})
    model, precision = make_toy(), Precision(world=world)
    with torch.no_grad():
        model.shift.add_(world.rank)  # all ranks have rank 0's weights
    strategy = make_strategy(config, model, world, loss_sum, precision)
    stepped = strategy.setup_optimizer(MAKE[optimizer](trained_of(model)))
    transfers = watched(strategy.link)
    history, losses = [], []
    for step in range(STEPS):
        totals = strategy.backward(batches_of(step, world.rank, parts, alike, equal))
        precision.update(stepped, 1e9, totals.sums["loss"], strategy.norm)
        history.append(weights_of(model))
        losses.append(totals.means()["loss"])
    large = [each.nbytes for each in transfers if each.nbytes > 200]
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        strategy.evaluation_weights(),
        strategy.full_parameters() as whole,
    ):  # nested: the mean is that of the ranks' own weights
        mean = weights_of(whole)
        seen = float(whole.get_buffer("seen"))
    after = all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())
    return {
        "history": history,
        "losses": losses,
        "mean": mean,
        "large": large,
        "sent": strategy.sent,  # type: ignore[attr-defined]
        "seen": (float(own["seen"]), seen),
        "is_as_before": after,
    }


def torchs_own(world: World, optimizer: str, length: int, begin: int) -> list[Weights]:
    """Run the same steps with torch's averager, and with its hook and optimizer if `begin` is given.

    All ranks use the same parameters: torch averages parameters with a gradient, and aborts if these differ between
    ranks.
    """
    model, history = make_toy(), []
    made = MAKE[optimizer](trained_of(model))
    averager = PeriodicModelAverager(period=length, warmup_steps=begin + length - 1)
    wrapped: nn.Module = model
    if begin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its import warns
            from torch.distributed.optim import PostLocalSGDOptimizer
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        state = PostLocalSGDState(None, None, begin, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        made = PostLocalSGDOptimizer(made, averager)
    for step in range(STEPS):
        count = sum(len(x) for rank in range(world.size) for x, _, _ in batches_of(step, rank))
        for batch in batches_of(step, world.rank, alike=True):
            total, own = loss_sum(wrapped, batch)
            (total / (count / world.size if step < begin else own)).backward()
        made.step()
        if not begin:
            averager.average_parameters(trained_of(model))
        made.zero_grad()
        history.append(weights_of(model))
    return history


def averaged_by_both(world: World) -> list[torch.Tensor]:
    torch.manual_seed(world.rank)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((), (3, 5), (0,), (7,))]
    theirs = deepcopy(ours)
    average(world, DirectLink(world), ours)
    assert dist.group.WORLD is not None
    average_parameters(iter(theirs), dist.group.WORLD)
    return [torch.cat([p.detach().reshape(-1) for p in each]) for each in (ours, theirs)]


def several(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {case: train(world, case) for case in CASES}
    found["equal"] = train(world, CASES[0], equal=True)
    if world.size > 1:
        found["theirs"] = {case: torchs_own(world, *case[1:4]) for case in (CASES[1], CASES[4])}
        found["ours"] = {case: train(world, case, alike=True)["history"] for case in found["theirs"]}
        found["averaged"] = averaged_by_both(world)
    return found


@cache
def trained(size: int) -> list[dict[Any, Any]]:
    if size == 1:
        return [several(World())]
    return launch(several, size, device="cpu", threads=1, echo=False, timeout=300)


def far(found: Weights, expected: Weights) -> float:
    return max(float((found[name] - each).abs().max()) for name, each in expected.items())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_has_the_weights_of_the_definition_in_each_step(size: int) -> None:
    """The definition runs replicas in one process: the same sums, in a different order for four ranks."""
    for case in CASES:
        _, optimizer, length, begin, outer, parts = case
        history, mean = definition(size, optimizer, length, begin, outer, parts)
        for rank, found in enumerate(each[case] for each in trained(size)):
            for step in range(STEPS):
                assert far(found["history"][step], history[step][rank]) < 2e-5, (case, rank, step)
            assert far(found["mean"], mean) < 2e-5, (case, rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_are_bitwise_identical_only_after_a_round(size: int) -> None:
    for case in CASES:
        _, _, length, begin, _, _ = case
        rounds = Rounds(length, begin)
        for step in range(STEPS):
            weights = [digest(rank[case]["history"][step]) for rank in trained(size)]
            assert len(set(weights)) == (size if rounds.local_steps(step + 1) else 1), (case, step)
        assert len({digest(rank[case]["mean"]) for rank in trained(size)}) == 1, case


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rounds_of_one_plain_sgd_step_are_data_parallelism(size: int) -> None:
    """The reference is one process on all batches, within 2e-5: the mean of the steps is the step of the mean."""
    model = make_toy()
    optimizer = MAKE["plain"](trained_of(model))
    for step in range(STEPS):
        pairs = [loss_sum(model, batch) for rank in range(size) for batch in batches_of(step, rank, equal=True)]
        (torch.stack([total for total, _ in pairs]).sum() / sum(count for _, count in pairs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in trained(size):
        assert far(rank["equal"]["history"][-1], weights_of(model)) < 2e-5


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_diloco_with_rate_1_and_no_momentum_is_local_sgd(size: int) -> None:
    averaging, diloco = CASES[3], CASES[-1]
    assert averaging[1:] == diloco[1:]
    for rank in trained(size):
        for step in range(STEPS):
            assert far(rank[diloco]["history"][step], rank[averaging]["history"][step]) < 1e-6


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_equal_torchs_averager_and_post_local_optimizer(size: int) -> None:
    """Means are bitwise identical.

    Steps are within 1e-5, because the loss is divided by its count in a different order.
    """
    for rank in trained(size):
        ours, theirs = rank["averaged"]
        assert torch.equal(ours, theirs)
        for case, history in rank["theirs"].items():
            for step in range(STEPS):
                assert far(rank["ours"][case][step], history[step]) < 1e-5, (case, step)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_counted_bytes_equal_planned_bytes(size: int) -> None:
    nbytes = sum(p.nbytes for p in trained_of(make_toy()))
    for case in CASES:
        kind, _, length, begin, _, _ = case
        rounds = Rounds(length, begin)
        for rank in trained(size):
            expected = rounds.all_reduces(STEPS)
            is_within = bool(
                rounds.local_steps(STEPS)
            )  # then `full_parameters` has averaged once more, after the count
            averages = expected - begin + is_within  # with whether a gradient was not finite, in one number
            small = averages * 4 + begin * 4 * len(trained_of(make_toy()))  # and the used parameters
            sizes = [nbytes] * begin + [nbytes + 4] * (expected - begin)
            assert rank[case]["large"] == (sizes if size > 1 else []), case
            assert rank[case]["sent"] == pytest.approx(
                2 * (size - 1) / size * ((expected + is_within) * nbytes + small), abs=10 * STEPS
            ), kind


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluation_uses_the_mean_and_training_continues_with_own_weights(size: int) -> None:
    for case in CASES:
        for rank in trained(size):
            assert rank[case]["is_as_before"], case
            assert rank[case]["seen"][1] == trained(size)[0][case]["seen"][0], case
            ends = [step for step in range(STEPS) if not Rounds(*case[2:4]).local_steps(step + 1)]
            for step in ends:  # within a round, each rank knows its own loss only
                assert rank[case]["losses"][step] == trained(size)[0][case]["losses"][step]


# ------------------------------------------------------------------------------------------- communication in a round

COLLECTIVES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather_object", "irecv", "isend", "recv"),
    *("reduce_scatter_tensor", "send"),
]
ROUND = 4


def counted_collectives(world: World, kind: str) -> list[list[str]]:
    """Return the names of the collectives of each step of two rounds, without those of the first step."""
    strategy = make_strategy(TrainConfig(strategy=kind, local=LocalConfig(round=ROUND)), make_toy(), world, loss_sum)
    precision, called = Precision(world=world), list[str]()
    optimizer = strategy.setup_optimizer(MAKE["adamw"](trained_of(strategy.module)))  # type: ignore[attr-defined]
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            real = getattr(dist, name)

            def call(*args: Any, _name: str = name, _real: Any = real, **named: Any) -> Any:
                called.append(_name)
                return _real(*args, **named)

            patch.setattr(dist, name, call)
        for step in range(2 * ROUND):
            totals = strategy.backward(batches_of(step, world.rank), stop_flags=float(step == 1 and world.rank == 1))
            precision.update(optimizer, 1.0, totals.sums["loss"], strategy.norm)
            steps.append([*called, f"stop flags {totals.stop_flags:g}"])
            called.clear()
    return steps[1:]


def alone_in_a_round(world: World) -> int:
    """Rank 1 starts its steps after rank 0 has taken all but one of its round, so no step may wait for rank 1."""
    strategy = make_strategy(
        TrainConfig(strategy="diloco", local=LocalConfig(round=ROUND)), make_toy(), world, loss_sum
    )
    precision = Precision(world=world)
    optimizer = strategy.setup_optimizer(MAKE["adamw"](trained_of(strategy.module)))  # type: ignore[attr-defined]
    store = default_store()
    for step in range(2 * ROUND):
        if world.rank == 1 and step == ROUND:
            store.wait(["rank 0 is ahead"])
        totals = strategy.backward(batches_of(step, world.rank))
        precision.update(optimizer, 1.0, totals.sums["loss"], strategy.norm)
        if world.rank == 0 and step == 2 * ROUND - 2:
            store.set("rank 0 is ahead", "yes")
    return strategy.local_steps  # type: ignore[attr-defined]


def overflowing(world: World, kind: str, bad_step: int, evaluate_at: int = 0) -> tuple[int, str]:
    """Train while the last rank's gradient is not finite in one step; return the steps that succeeded and the error."""

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        total, count = loss_sum(model, batch)
        return total * (math.inf if done + 1 == bad_step and world.rank == world.size - 1 else 1), count

    done, own = 0, []
    local = LocalConfig(round=ROUND, begin=2 if kind == "post_local_sgd" else 0)
    strategy = make_strategy(TrainConfig(strategy=kind, local=local), make_toy(), world, loss)
    optimizer = strategy.setup_optimizer(MAKE["adamw"](trained_of(strategy.module)))  # type: ignore[attr-defined]
    precision = Precision(world=world)
    try:
        while done < 3 * ROUND:
            totals = strategy.backward(batches_of(done, world.rank))
            precision.update(optimizer, 1.0, totals.sums["loss"], strategy.norm)
            done += 1
            assert all(bool(p.isfinite().all()) for p in strategy.module.parameters())  # type: ignore[attr-defined]
            if done == evaluate_at:
                own = [p.detach().clone() for p in strategy.module.parameters()]  # type: ignore[attr-defined]
                with strategy.full_parameters():
                    pass
    except NotFiniteError as error:
        assert all(map(torch.equal, own, strategy.module.parameters()))  # type: ignore[attr-defined]
        return done, str(error)
    return done, ""


OVERFLOWS = {  # strategy, the step that overflows, the step after which the model is evaluated -> successful steps
    ("local_sgd", 2, 0): 3,
    ("local_sgd", ROUND, 0): 3,
    ("diloco", ROUND + 1, 0): 7,
    ("diloco", ROUND + 1, ROUND + 2): 6,
    ("post_local_sgd", 3, 0): 5,
    ("local_sgd", 99, 0): 3 * ROUND,
}


def communicating(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {kind: counted_collectives(world, kind) for kind in ("local_sgd", "diloco")}
    found["alone"] = alone_in_a_round(world)
    found["errors"] = {case: overflowing(world, *case) for case in OVERFLOWS}
    found["repeated"] = [digest(train(world, CASES[6])["history"][-1]) for _ in range(2)]
    return found


@cache
def communicated(size: int) -> list[dict[Any, Any]]:
    return launch(communicating, size, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_ranks_communicate_only_in_the_last_step_of_a_round(size: int, kind: str) -> None:
    """The last step sums the totals, averages the weights, and broadcasts the model's buffer."""
    for rank in communicated(size):
        last = ["all_reduce", "all_reduce", "broadcast"]
        within = [["stop flags 0"]] * (ROUND - 1)
        assert rank[kind] == [
            *within[1:],
            [*last, "stop flags 1"],
            *within,
            [*last, "stop flags 0"],
        ]  # the flag of step 1 arrives at the end of the round


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_does_not_wait_for_others_within_a_round(size: int) -> None:
    assert [rank["alone"] for rank in communicated(size)] == [0] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", OVERFLOWS)
def test_all_ranks_raise_the_same_error_when_they_average(size: int, case: tuple[str, int, int]) -> None:
    errors = [rank["errors"][case] for rank in communicated(size)]
    assert errors == [errors[0]] * size
    done, error = errors[0]
    assert done == OVERFLOWS[case]
    assert error.startswith(
        f"step {case[1]}: the gradient on rank {size - 1} is not finite, first" if done < 12 else ""
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_round_is_bitwise_repeatable(size: int) -> None:
    for rank in communicated(size):
        assert rank["repeated"][0] == rank["repeated"][1]


# --------------------------------------------------------------------------------------------------- the trainer

BASE: dict[str, Any] = {
    "corpus": "stories:300",
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
    "device": "cpu",
    "steps": 7,
    "batch_size": 12,
    "warmup_steps": 2,
    "eval_every": 2,
    "eval_samples": 6,
    "checkpoint": {"every": 1, "keep_last": 100},
    "tensorboard": False,
}
FLAVOURS: dict[str, dict[str, Any]] = {
    "local_sgd": {"strategy": "local_sgd", "local": {"round": 3}, "best_model": True},
    "post_local_sgd": {
        "strategy": "post_local_sgd",
        "local": {"round": 3, "begin": 2},
        "accumulation": 2,
        "optimizer": "sgd",
    },
    "diloco": {
        "strategy": "diloco",
        "local": {"round": 3},
        "checkpoint": {**BASE["checkpoint"], "background": True},
    },
}
OVERFLOWING = {  # all ranks skip some steps
    "diloco-float16": FLAVOURS["diloco"]
    | {"precision": {"dtype": "fp16", "initial_scale": 2.0**24, "growth_interval": 2}}
}
AT = [1, 3, 4, 6]  # within a round, and at the end of one


def run(world: World, flavour: str, **values: Any) -> dict[str, Any]:
    trainer = make_trainer(TaskConfig.model_validate(BASE | (FLAVOURS | OVERFLOWING)[flavour] | values), world)
    result = trainer.train()
    optimizer = trainer.train_step.optimizer
    state = {f"{i}.{key}": value for i, each in enumerate(optimizer.state.values()) for key, value in each.items()}
    return {
        "weights": result.weights,
        "losses": result.losses,
        "eval": result.eval_losses,
        "own": digest(
            dict(trainer.model.state_dict()) | {key: value for key, value in state.items() if value is not None}
        ),
    }


def lives_of_two(world: World) -> dict[tuple[str, Any], dict[str, Any]]:
    """Return, for each variant, the full run, a run that is evaluated and saved at other steps, and the killed runs."""
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    for flavour in FLAVOURS | OVERFLOWING:
        found[flavour, "whole"] = run(world, flavour, name=flavour)
        found[flavour, "silent"] = run(world, flavour, name=f"{flavour}-silent", eval_every=50, checkpoint={"every": 0})
        for step in AT:
            again = Path("runs") / f"{flavour}-{step}"
            if world.is_main:
                shutil.copytree(Path("runs") / flavour, again)
                for later in range(step + 1, BASE["steps"] + 1):
                    shutil.rmtree(again / "checkpoints" / checkpoint_name(later))
                (again / "result.json").unlink()
                shutil.rmtree(again / "model")
            found[flavour, step] = run(world, flavour, name=again.name, resume="auto")
    return found


def on_three(world: World) -> dict[Any, Any]:
    """Resume checkpoints of two ranks on three: possible at the end of a round, rejected within a round."""
    found: dict[Any, Any] = {}
    for flavour in FLAVOURS:
        ends = next(step for step in (3, 5) if Rounds(3, 2 if "post" in flavour else 0).local_steps(step) == 0)
        for step in (ends, ends + 1):
            start = {"name": f"{flavour}-{step}-on-3", "resume": f"runs/{flavour}/checkpoints/{checkpoint_name(step)}"}
            if step == ends:
                found[flavour] = run(world, flavour, **start)
            else:
                found[flavour, "within"] = error_of(lambda: run(world, flavour, **start))  # noqa: B023
                start["name"] += "-mean"
                found[flavour, "mean"] = run(world, flavour, **start, resume_without=["local"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lives")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[Any, dict[str, Any]]]:
    with chdir(folder):
        return launch(lives_of_two, 2, device="cpu", threads=1, echo=False, timeout=200)


@pytest.fixture(scope="module")
def three(folder: Path, two: Any) -> list[dict[Any, Any]]:
    with chdir(folder):
        return launch(on_three, 3, device="cpu", threads=1, echo=False, timeout=200)


@pytest.mark.parametrize("flavour", FLAVOURS | OVERFLOWING)
@pytest.mark.parametrize("step", AT)
def test_a_killed_run_resumes_bitwise_identically_in_and_after_a_round(
    two: list[dict[Any, dict[str, Any]]], flavour: str, step: int
) -> None:
    for rank in two:
        assert rank[flavour, step] == rank[flavour, "whole"]
    assert two[0][flavour, step]["weights"] == two[1][flavour, step]["weights"]
    assert two[0][flavour, step]["own"] != two[1][flavour, step]["own"], "the last round is not over"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_evaluating_and_saving_do_not_affect_training(two: Any, flavour: str) -> None:
    for rank in two:
        whole, silent = rank[flavour, "whole"], rank[flavour, "silent"]
        assert {**silent, "eval": {}} == {**whole, "eval": {}}
        assert silent["eval"][BASE["steps"]] == whole["eval"][BASE["steps"]]


def test_a_checkpoint_within_a_round_contains_the_mean_of_the_weights(two: Any, folder: Path) -> None:
    for flavour in FLAVOURS:
        within = folder / "runs" / flavour / "checkpoints" / checkpoint_name(4)
        files = read_manifest(within).components["local"].files
        own = [read_state(within / file.path) for file in files]
        assert [each["alone"] for each in own] == [2 if "post" in flavour else 1] * 2
        mean = stored(within, "model")
        for name, tensor in mean.items():
            assert torch.equal(tensor, own[0]["weights"][name] / 2 + own[1]["weights"][name] / 2), name
        assert digest(own[0]["weights"]) != digest(own[1]["weights"])
    end = read_manifest(folder / "runs" / "diloco" / "checkpoints" / checkpoint_name(3))
    [first, _] = end.components["local"].files
    where = folder / "runs" / "diloco" / "checkpoints" / checkpoint_name(3) / first.path
    assert read_state(where) == {"alone": 0, "length": 3, "begin": 0, "weights": {}}, (
        "at the end of a round nothing is written twice"
    )
    with chdir(folder):
        assert load("runs/local_sgd", best=True).state_dict().keys() == load("runs/local_sgd").state_dict().keys()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_other_world_sizes_can_resume_only_at_the_end_of_a_round(two: Any, three: Any, flavour: str) -> None:
    before = two[0][flavour, "whole"]["losses"]
    for rank in three:
        assert rank[flavour]["losses"][:3] == before[:3]
        assert rank[flavour]["losses"] == pytest.approx(before, rel=0.05)
        assert rank[flavour]["weights"] == three[0][flavour]["weights"]
        told = rank[flavour, "within"]
        assert told.startswith(CheckpointError.__name__)
        assert (
            "after 1 of the 3 steps of a round. Its 2 ranks have different weights, which cannot be loaded on 3 ranks."
            in told
        )
        assert "\n" not in told
        assert rank[flavour, "mean"]["losses"] == pytest.approx(before, rel=0.05)


def test_the_round_length_can_change_only_at_the_end_of_a_round() -> None:
    model, other = make_toy(), make_toy()
    saved = LocalWeightsState(model, World(), Rounds(4), lambda: 2).state_dict()
    with pytest.raises(CheckpointError, match=r"after 2 of the 4 steps of a round\. Resume with local\.round=4"):
        LocalWeightsState(other, World(), Rounds(2), lambda: 0).load_state_dict(saved)
    model.spare.data.add_(1)
    LocalWeightsState(other, World(), Rounds(4), lambda: 0).load_state_dict(saved)
    assert torch.equal(other.spare, model.spare)
    LocalWeightsState(other, World(), Rounds(2), lambda: 0).load_state_dict({**saved, "alone": 0, "weights": {}})


# ---------------------------------------------------------------------------------------------------------- the plan


def test_a_dry_run_reports_average_traffic_and_outer_optimizer_memory() -> None:
    values = BASE | {"steps": 100}
    ddp, local, post, diloco = (
        TaskConfig.model_validate(values | each)
        for each in (
            {},
            {"strategy": "local_sgd", "local": {"round": 10}},
            {"strategy": "post_local_sgd", "local": {"round": 10, "begin": 20}},
            {"strategy": "diloco", "local": {"round": 50}},
        )
    )
    assert [step_bytes_sent(each, 1000, 4, 1) for each in (ddp, local, post, diloco)] == [6000, 600, 1680, 120]
    one, other = memory(local, 1, ranks=4), memory(diloco, 1, ranks=4)
    assert one["optimizer"] == memory(ddp, 1, ranks=4)["optimizer"]
    assert other["outer"] == 8 * other["parameters"]
    assert other["total"] == one["total"] + other["outer"]
