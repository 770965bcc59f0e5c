"""One optimizer step from many micro-batches: the same result for any split, and one synchronization between ranks."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ddp_tutorial.accumulation.invariant import InvariantStrategy, add_across_ranks, bit_reversed
from ddp_tutorial.accumulation.loss import LossError, StepLoss, Totals, call_loss
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.rng import seeded_rng
from ddp_tutorial.sharding.permutation import shard_micro_batches
from ddp_tutorial.sharding.sources import make_source
from ddp_tutorial.training.config import ModelConfig, TaskConfig, TrainConfig
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.training.step import make_train_step
from ddp_tutorial.training.tasks import launch_training, make_trainer
from ddp_tutorial.world import World
from ranks import error_of

CONTEXT = 8
VARIANTS = ["naive", "flat", "bucket", "torch"]
# float32, summed in a different order
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads after tests of the invariant strategy, which uses one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size)


# ------------------------------------------------------------------------------------------------ micro-batches


def test_a_failed_step_leaves_no_gradient_of_earlier_micro_batches() -> None:
    model = nn.Linear(3, 1)
    calls: list[bool] = []

    def loss(module: Any, batch: Any) -> Any:
        calls.append(torch.is_grad_enabled())  # false in the check for a mean loss
        if sum(calls) == 2:
            raise ValueError("the second micro-batch")
        return module(batch[0]).sum(), len(batch[0])

    source = make_source(TensorDataset(torch.ones(8, 3)), 4, World())
    step = make_train_step(model, source, loss, World(), TrainConfig(accumulation=2))
    with pytest.raises(ValueError, match="the second micro-batch"):
        step()
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_a_step_without_micro_batches_is_rejected() -> None:
    model = data_parallel(nn.Linear(2, 2), World())
    with pytest.raises(ValueError, match="at least 1 micro-batch, got 0"):
        accumulate(model, StepLoss(next_token_loss, World()), [])


# ------------------------------------------------------------------------------------------------- on real ranks


def tokens_of(rank: int, number: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(256, (count, CONTEXT + 1), generator=generator)


def counts_of(rank: int, size: int, parts: int) -> list[int]:
    """Return the number of samples in each micro-batch: ragged, and sometimes zero."""
    return [(3 * rank + 5 * number + size) % 5 for number in range(parts)]


def batches_of(rank: int, size: int, parts: int) -> list[dict[str, torch.Tensor]]:
    return [{"tokens": tokens_of(rank, number, count)} for number, count in enumerate(counts_of(rank, size, parts))]


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=1, heads=2, width=16, context=CONTEXT)


def gradient_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def step(world: World, variant: str, parts: int) -> dict[str, Any]:
    link = LinkConfig(latency_ms=0, megabytes_per_second=1e6)
    model = data_parallel(make_model(), world, DDPConfig.model_validate({"variant": variant, "simulated_link": link}))
    sent: list[int] = []
    assert model.link is not None
    model.link.observer = lambda transfer: sent.append(transfer.nbytes)
    loss = StepLoss(next_token_loss, world)
    found = {"gradients": [], "losses": []}
    for _ in range(2):  # the second step expects the count of the first
        model.module.zero_grad()
        sent.clear()
        totals = accumulate(model, loss, batches_of(world.rank, world.size, parts))
        found["gradients"].append(gradient_of(model.module))
        found["losses"].append(totals.means()["loss"])
    return {**found, "counts": totals.counts, "sent": sent}


class Failing(nn.Module):
    """A model that raises an error in its second forward pass, once."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.calls = make_model(), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("out of luck")
        return self.gpt(tokens)


def after_an_error(world: World, variant: str) -> torch.Tensor:
    """Return the gradient of a step after a step that failed inside `no_sync`."""
    model = data_parallel(Failing(), world, DDPConfig.model_validate({"variant": variant}))
    batches, loss = batches_of(world.rank, world.size, 4), StepLoss(next_token_loss, world)
    with pytest.raises(ValueError, match="out of luck"):
        accumulate(model, loss, batches)
    model.module.zero_grad()
    accumulate(model, loss, batches)
    return gradient_of(model.module)


def unequal_numbers(world: World) -> torch.Tensor:
    """Return the gradient if rank r has 1 + r micro-batches."""
    model = data_parallel(make_model(), world, DDPConfig(variant="bucket"))
    accumulate(model, StepLoss(next_token_loss, world), batches_of(world.rank, world.size, 1 + world.rank))
    return gradient_of(model.module)


def nothing_counted(world: World) -> str:
    """Return the error if all targets are padding, on every rank."""
    model = data_parallel(make_model(), world)
    tokens = {"tokens": torch.zeros(0, CONTEXT + 1, dtype=torch.int64)}
    return error_of(lambda: accumulate(model, StepLoss(next_token_loss, world), [tokens, tokens]))


def large_numbers(world: World, config: DDPConfig) -> list[Totals]:
    """Return the totals of three steps. Float32 would round the counts and the metric."""

    def loss(model: Any, number: int) -> tuple[Any, ...]:
        return model(torch.ones(1, 2)).sum(), 2**24 + 1 + world.rank + number, {"large": (2.0**25 + 1, 7)}

    strategy = DDPStrategy(nn.Linear(2, 1), world, loss, config, accumulation=3)
    return [strategy.backward([0, 1, 2], stop_flags=flags) for flags in (1.0, 0.0, 4.0)]


def work(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {
        (variant, parts): step(world, variant, parts) for variant in VARIANTS for parts in (1, 2, 4)
    }
    for variant in VARIANTS:
        found[variant, "after an error"] = after_an_error(world, variant)
        found[variant, "large numbers"] = large_numbers(world, DDPConfig.model_validate({"variant": variant}))
    found["unequal"] = unequal_numbers(world)
    found["nothing"] = nothing_counted(world)
    found["tree"] = add_across_ranks(world, torch.tensor([0.1 * 3**world.rank])) if world.size in (2, 4) else None
    return found


@cache
def ranks_of(size: int) -> list[dict[Any, Any]]:
    return [work(World())] if size == 1 else launch(work, size, device="cpu", threads=1, echo=False, timeout=300)


each_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


@each_size
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_give_the_gradient_and_loss_of_their_union(size: int, variant: str, parts: int) -> None:
    model = make_model()
    union = torch.cat(
        [
            tokens_of(rank, number, count)
            for rank in range(size)
            for number, count in enumerate(counts_of(rank, size, parts))
        ]
    )
    loss = F.cross_entropy(model(union[:, :-1]).flatten(0, 1), union[:, 1:].flatten())
    loss.backward()
    found = [rank[variant, parts] for rank in ranks_of(size)]
    for each in found:
        for number, gradient in enumerate(each["gradients"]):
            assert torch.equal(gradient, found[0]["gradients"][number])
            torch.testing.assert_close(gradient, gradient_of(model), **CLOSE)
        assert each["losses"] == pytest.approx([loss.item()] * 2, abs=1e-5)
        assert each["counts"] == {"loss": union[:, 1:].numel()}


def test_averaging_micro_batch_means_would_be_detected() -> None:
    def mean_gradient(tokens: torch.Tensor) -> torch.Tensor:
        model = make_model()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return gradient_of(model)

    parts = [tokens_of(0, number, count) for number, count in enumerate((1, 4))]
    wrong = (mean_gradient(parts[0]) + mean_gradient(parts[1])) / 2
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, mean_gradient(torch.cat(parts)), **CLOSE)


def test_samples_of_unequal_length_are_weighted_by_their_tokens() -> None:
    lengths = [8, 1, 5, 3]
    tokens = tokens_of(0, 0, 4)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    union = make_model()
    F.cross_entropy(union(tokens[:, :-1]).flatten(0, 1), targets.flatten()).backward()
    cut = data_parallel(make_model(), World())

    def loss(model: Any, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        target = targets[row]
        sum_ = F.cross_entropy(model(tokens[row : row + 1, :-1])[0], target, reduction="sum")
        return sum_, (target != -100).sum()

    totals = accumulate(cut, StepLoss(loss, World()), [0, 1, 2, 3])
    torch.testing.assert_close(gradient_of(cut.module), gradient_of(union), **CLOSE)
    assert totals.counts["loss"] == sum(lengths)


def test_targets_are_the_inputs_shifted_by_one() -> None:
    tokens = torch.tensor([[108, 109, 110, 111, 112], [100, 101, 102, 103, 104]], dtype=torch.uint8)
    seen: list[torch.Tensor] = []

    def sure_of_the_next(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return 1e4 * F.one_hot(inputs + 1, 256).float()

    loss, count = next_token_loss(sure_of_the_next, {"tokens": tokens})
    assert (float(loss), count) == (0.0, 8)
    assert seen[0].tolist() == [[108, 109, 110, 111], [100, 101, 102, 103]]


@pytest.mark.parametrize("make", [DDPStrategy, lambda model, world, loss: InvariantStrategy(model, world, loss, 4)])
def test_two_ranks_without_a_group_raise(make: Any) -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        make(make_model(), world_of(0, 2), next_token_loss)


@each_size
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_communicate_once_per_step_for_any_number_of_micro_batches(size: int, variant: str) -> None:
    for rank in ranks_of(size):
        sent = [rank[variant, parts]["sent"] for parts in (1, 2, 4)]
        assert sent[0] == sent[1] == sent[2]
        assert sum(sent[0]) >= (size > 1) * sum(parameter.nbytes for parameter in make_model().parameters())


@each_size
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_synchronizes_again_after_an_error_inside_no_sync(size: int, variant: str) -> None:
    for rank in ranks_of(size):
        torch.testing.assert_close(rank[variant, "after an error"], rank[variant, 4]["gradients"][0], **CLOSE)


@each_size
@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_counts_and_stop_flags_are_not_rounded(size: int, variant: str) -> None:
    count = sum(2**24 + 1 + rank + number for rank in range(size) for number in range(3))
    for rank in ranks_of(size):
        for totals, votes in zip(rank[variant, "large numbers"], (1, 0, 4), strict=True):
            assert (totals.counts["loss"], totals.stop_flags) == (count, votes * size)
            assert (totals.sums["large"], totals.counts["large"]) == (3 * size * (2**25 + 1), 21 * size)


@each_size
def test_ranks_may_have_different_numbers_of_micro_batches(size: int) -> None:
    union = torch.cat(
        [batch["tokens"] for rank in range(size) for batch in batches_of(rank, size, 1 + rank)],
    )
    model = make_model()
    F.cross_entropy(model(union[:, :-1]).flatten(0, 1), union[:, 1:].flatten()).backward()
    for rank in ranks_of(size):
        torch.testing.assert_close(rank["unequal"], gradient_of(model), **CLOSE)


@each_size
def test_a_step_without_counted_elements_raises_on_all_ranks(size: int) -> None:
    for rank in ranks_of(size):
        assert rank["nothing"].startswith("ValueError: the loss function counted no elements on any rank")


# ------------------------------------------------------------------------------ the same bits on 1, 2 and 4 ranks


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_bit_reversed_neighbors_differ_by_half_of_the_count(count: int) -> None:
    order = bit_reversed(count)
    assert sorted(order) == list(range(count))
    assert all(b - a == count // 2 for a, b in zip(order[0::2], order[1::2], strict=False))


@pytest.mark.parametrize("size", [2, 4])
def test_the_tree_across_ranks_first_adds_the_most_distant_pairs(size: int) -> None:
    x = [torch.tensor([0.1 * 3**rank]) for rank in range(size)]
    expected = x[0] + x[1] if size == 2 else (x[0] + x[2]) + (x[1] + x[3])
    assert all(torch.equal(rank["tree"], expected) for rank in ranks_of(size))


def test_seeding_depends_on_seed_step_and_number_and_is_local() -> None:
    def thrown(*entropy: int) -> list[float]:
        with seeded_rng(*entropy):
            return torch.rand(3).tolist()

    before = torch.get_rng_state()
    assert thrown(0, 1, 2) == thrown(0, 1, 2)
    assert len({tuple(thrown(*entropy)) for entropy in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1)]}) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_after_50_steps_are_bitwise_identical_on_1_2_and_4_ranks(workdir: object) -> None:
    """Train on real text with dropout. The single process has two threads."""
    model = ModelConfig(layers=2, heads=2, width=32, context=32, dropout=0.1)
    config = TaskConfig(corpus="python", strategy="invariant", micro_batches=4, steps=50, model=model)
    weights, losses = {}, {}
    for size in (1, 2, 4):
        result = launch_training(config.model_copy(update={"nprocs": size}), threads=2 if size == 1 else 1, echo=False)
        weights[size], losses[size] = result.weights, result.losses
    assert weights[1] == weights[2] == weights[4]
    assert losses[1] == pytest.approx(losses[2], abs=1e-6)
    assert losses[1] == pytest.approx(losses[4], abs=1e-6)
    assert losses[1][-1] < losses[1][0] - 1


def test_a_plain_sum_would_not_be_bitwise_identical() -> None:
    """Otherwise, the tree would not be necessary."""
    generator = torch.Generator().manual_seed(0)
    a, b, c, d = torch.randn(4, 1000, generator=generator)
    assert not torch.equal(((a + b) + c) + d, (a + c) + (b + d))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.one_hot(x, 256).float() * self.used.weight


def test_a_parameter_that_no_rank_used_has_no_gradient() -> None:
    module = Unused()
    strategy = InvariantStrategy(module, World(), next_token_loss, 2)
    strategy.backward([{"tokens": part} for part in shard_micro_batches(tokens_of(0, 0, 4), 0, 1, 2)])
    assert module.used.weight.grad is not None
    assert module.unused.weight.grad is None


@pytest.mark.parametrize(
    ("micro_batches", "size", "told"),
    [
        (3, 1, "must be a power of two"),
        (0, 1, "must be a power of two"),
        (4, 3, r"at most 'micro_batches' \(4\), got 3"),
        (2, 4, r"at most 'micro_batches' \(2\), got 4"),
    ],
)
def test_micro_batches_that_do_not_divide_evenly_are_rejected(
    micro_batches: int, size: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_tutorial.accumulation.invariant.require_group", lambda world: None)
    with pytest.raises(ConfigError, match=told):
        InvariantStrategy(nn.Linear(1, 1), world_of(0, size), next_token_loss, micro_batches)


def test_an_invariant_step_with_one_micro_batch_counts_from_step_0() -> None:
    strategy = InvariantStrategy(make_model(), World(), next_token_loss, 1)
    assert (strategy.micro_batches_per_rank, strategy.state_dict()["step"]) == (1, 0)
    strategy.backward([{"tokens": tokens_of(0, 0, 4)}])
    assert strategy.state_dict()["step"] == 1


@pytest.mark.parametrize("pair", [1.0, (1,), (1, 2, 3), (True, 1), (1, "2"), (torch.ones(2), 1), [1, 2]], ids=str)
def test_a_metric_that_is_not_a_sum_and_a_count_is_rejected_by_name(pair: Any) -> None:
    with pytest.raises(LossError, match="metric 'accuracy' must be"):
        call_loss(lambda model, batch: (torch.tensor(3.0), 2, {"accuracy": pair}), None, None)


def test_an_error_describes_the_result_of_the_loss() -> None:
    with pytest.raises(LossError, match=r"got \(1 \(int\), a tensor of shape \[2\]\)"):
        call_loss(lambda model, batch: (torch.tensor(3.0), 2, {"accuracy": (1, torch.ones(2))}), None, None)


def test_sums_and_counts_of_the_loss_and_metrics_have_no_graph() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    total, parts = call_loss(lambda model, batch: (weight * 2, 2, {"accuracy": (weight * 1, 4)}), None, None)
    assert total.requires_grad
    assert parts == {"loss": (6.0, 2), "accuracy": (3.0, 4)}
    assert not any(isinstance(each, torch.Tensor) and each.requires_grad for pair in parts.values() for each in pair)


def test_running_statistics_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"the model must not have buffers.*'0\.running_mean'"):
        InvariantStrategy(nn.Sequential(nn.BatchNorm1d(3)), World(), next_token_loss, 4)


def test_each_gradient_of_an_invariant_model_has_its_parameters_dtype() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)])
    strategy = InvariantStrategy(model, World(), lambda module, batch: (sum(p.sum() for p in module), 1), 2)
    strategy.backward([None, None])
    assert [(p.grad.dtype, p.grad.tolist()) for p in model] == [(p.dtype, [1.0, 1.0]) for p in model]


def test_a_step_requires_its_number_of_micro_batches() -> None:
    with pytest.raises(ValueError, match="a step must have 4 micro-batches on each rank, got 1"):
        InvariantStrategy(make_model(), World(), next_token_loss, 4).backward(batches_of(0, 1, 1))


def test_two_invariant_runs_with_the_same_config_are_identical(workdir: object) -> None:
    config = TaskConfig(
        corpus="stories:200", strategy="invariant", steps=5, model=ModelConfig(layers=1, heads=1, width=16, context=16)
    )
    first, second = (launch_training(config, threads=1, echo=False) for _ in range(2))
    assert first.weights == second.weights
    assert first.losses == second.losses


def test_invariant_training_restores_the_number_of_threads(workdir: object) -> None:
    before = torch.get_num_threads()
    config = TaskConfig(
        corpus="stories:200", strategy="invariant", steps=1, model=ModelConfig(layers=1, heads=1, width=16, context=16)
    )
    try:
        torch.set_num_threads(3)
        trainer = make_trainer(config, World())
        assert torch.get_num_threads() == 1
        trainer.train()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_seeding_a_block_does_not_affect_gpus_unless_one_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs' generators were seeded"))
    with seeded_rng(1, 2):
        first = torch.rand(3)
    with seeded_rng(1, 2, device=torch.device("cpu")):
        assert torch.equal(torch.rand(3), first)
