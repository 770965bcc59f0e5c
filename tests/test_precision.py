"""Half precision on several ranks: a common scale, one norm, and an error if no scale helps."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_tutorial.accumulation.config import PrecisionConfig
from ddp_tutorial.accumulation.loss import StepLoss
from ddp_tutorial.accumulation.micro_batches import accumulate
from ddp_tutorial.accumulation.precision import NotFiniteError, Precision, Scale, total_norm_over
from ddp_tutorial.collectives import any_rank, digest
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding.permutation import shard_micro_batches
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.training.tasks import make_trainer, train
from ddp_tutorial.training.trainer import Trainer
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")

HALF = PrecisionConfig(dtype="fp16", initial_scale=1024, growth_interval=3)
FINE = 1.0
QUICK = TaskConfig(
    corpus="stories",
    model=ModelConfig(layers=1, heads=2, width=32, context=32, dropout=0.1),
    device="cpu",
    steps=8,
    batch_size=6,
    log_every=2,
    eval_every=4,
    precision=HALF,
)


def with_precision(dtype: str, **values: Any) -> TaskConfig:
    return TaskConfig.model_validate(QUICK.model_dump() | {"precision": {"dtype": dtype}} | values)


# ------------------------------------------------------------------------------------------------ against torch's own


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 5))
def test_the_scale_evolves_like_torchs(overflows: list[bool], growth_interval: int) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=growth_interval)
    ours = Scale(2.0**12, growth_interval)
    for overflow in overflows:
        theirs.scale(weight.sum() * (math.inf if overflow else 1)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflow)
        assert ours.value == theirs.get_scale()
    assert ours.overflows == sum(overflows)


@pytest.mark.parametrize("overflow_at", [None, 1, 3])
def test_steps_are_bitwise_identical_to_those_with_torchs_scaler(overflow_at: int | None) -> None:
    def start() -> tuple[GPT, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = GPT(layers=1, heads=2, width=16, context=8)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    (mine, my_optimizer), (theirs, their_optimizer) = start(), start()
    precision = Precision(HALF)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)
    wrapped = data_parallel(mine, World())
    loss_of_step = StepLoss(next_token_loss, World(), precision)
    for step in range(6):
        tokens = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(step))
        factor = math.inf if step == overflow_at else 1.0

        accumulate(wrapped, loss_of_step, [{"tokens": tokens}])
        for weight in mine.parameters():
            assert weight.grad is not None
            weight.grad *= factor
        precision.update(my_optimizer, 0.5, FINE)

        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(theirs(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        for weight in theirs.parameters():
            weight.grad *= factor  # type: ignore[operator]
        scaler.unscale_(their_optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scaler.step(their_optimizer)
        scaler.update()
        their_optimizer.zero_grad()
    assert precision.loss_scale == scaler.get_scale()
    for name, weight in mine.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "computed"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)]
)
def test_only_matrix_products_are_computed_in_the_chosen_precision(dtype: str, computed: torch.dtype) -> None:
    trainer = make_trainer(with_precision(dtype, steps=1), World())
    seen: set[torch.dtype] = set()
    hook = trainer.model.blocks[0].register_forward_hook(
        lambda module, inputs, output: seen.add(module.expand(inputs[0]).dtype)
    )
    trainer.train()
    hook.remove()
    assert seen == {computed}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    state = trainer.train_step.optimizer.state.values()
    assert {tensor.dtype for each in state for tensor in each.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_about_as_well(dtype: str) -> None:
    half, full = (train(World(), with_precision(each, steps=30)) for each in (dtype, "fp32"))
    assert half.losses != full.losses
    assert half.losses[-1] == pytest.approx(full.losses[-1], rel=0.03)
    assert half.losses[-1] < half.losses[0] - 1


# ------------------------------------------------------------------------------------------------------ one update


def one_weight(gradient: float, scale: float = 8) -> tuple[Precision, nn.Parameter, torch.optim.SGD]:
    precision = Precision(PrecisionConfig(dtype="fp16", initial_scale=scale))
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([gradient * scale])
    return precision, weight, torch.optim.SGD([weight], lr=1)


def test_the_gradient_is_divided_by_the_scale_before_it_is_clipped() -> None:
    precision, weight, optimizer = one_weight(0.5)
    update = precision.update(optimizer, 1.0, FINE)
    assert update.applied
    assert update.norm == 0.5
    assert weight.item() == -0.5, "and not clipped, at 4, to 1, and then divided"
    assert weight.grad is None


def test_a_step_that_overflows_is_skipped_and_the_scale_is_halved() -> None:
    precision, weight, optimizer = one_weight(math.inf)
    update = precision.update(optimizer, 1.0, FINE)
    assert (update.applied, update.scale_may_help) == (False, True)
    assert (weight.item(), weight.grad, precision.loss_scale) == (0, None, 4)


@pytest.mark.parametrize(("scale", "loss"), [(1.0, FINE), (8.0, torch.tensor(math.nan)), (8.0, torch.tensor(math.inf))])
def test_a_non_finite_loss_is_an_error_for_which_no_scale_helps(scale: float, loss: torch.Tensor) -> None:
    precision, weight, optimizer = one_weight(math.nan, scale)
    update = precision.update(optimizer, 1.0, loss)
    assert (update.applied, update.scale_may_help) == (False, False)
    assert weight.item() == 0


def test_the_state_of_the_scale_is_saved_and_loaded() -> None:
    before, after = Precision(HALF), Precision(HALF)
    assert before.scale is not None
    for overflow in (True, False, True, False, False):
        before.scale.update(overflow)
    after.load_state_dict(before.state_dict())
    assert after.scale == before.scale == Scale(256, 3, steady=2, overflows=2)
    assert Precision().state_dict() == {}
    shorter = Precision(HALF.model_copy(update={"growth_interval": 1}))
    shorter.load_state_dict(before.state_dict())
    assert shorter.scale is not None
    shorter.scale.update(overflow=False)
    assert shorter.scale.value == 512
    with pytest.raises(ValueError, match="a checkpoint for precision fp32 must not contain a loss scale"):
        Precision().load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match="a checkpoint for precision fp16 must contain a loss scale"):
        before.load_state_dict({})


def test_a_scale_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"initial_scale\n.* should be greater than or equal to 1"):
        PrecisionConfig(dtype="fp16", initial_scale=0.5)


# --------------------------------------------------------------------------------------------------- on real ranks


def break_gradient(trainer: Trainer, steps: set[int], value: float) -> None:
    """Break the gradient in the backward pass of the last block, while the loss stays finite."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, value) if trainer.step_count in steps else gradient

    trainer.model.blocks[0].expand.weight.register_hook(hook)


def overflow_on_rank_1(world: World, variant: str) -> dict[str, Any]:
    config = with_precision("fp16") if variant == "default" else QUICK
    trainer = make_trainer(
        TaskConfig.model_validate(config.model_dump() | {"precision": HALF, "ddp": DDPConfig(variant=variant)}),  # type: ignore[arg-type]
        world,
    )
    if world.rank == 1:
        break_gradient(trainer, {2, 3}, math.inf)
    scales, weights, rates = [], [], []
    for _ in range(8):
        rates.append(trainer.train_step.scheduler.get_last_lr()[0])
        trainer.step()
        scales.append(trainer.train_step.precision.loss_scale)
        weights.append(digest(trainer.model.state_dict()))
    trainer.finish()
    return {"scales": scales, "weights": weights, "rates": rates, "losses": trainer.log.losses}


def no_number_on_rank_1(world: World, dtype: str, where: str) -> str:
    trainer = make_trainer(with_precision(dtype, accumulation=2), world)
    block = trainer.model.blocks[0]
    if world.rank == 1 and where == "loss":
        block.expand.register_forward_hook(lambda module, args, out: out * (math.nan if trainer.step_count == 2 else 1))
    if world.rank == 1 and where == "gradient":
        break_gradient(trainer, {2}, math.nan)
    if world.rank == 1 and where == "weight":
        with torch.no_grad():
            block.expand.weight[0, 0] = math.nan
    before = digest(trainer.model.state_dict())

    def steps() -> None:
        nonlocal before
        for _ in range(4):
            before = digest(trainer.model.state_dict())
            trainer.step()

    told = error_of(steps)
    assert digest(trainer.model.state_dict()) == before, "before it has reached the weights"
    return told


CASES = [("fp32", "loss"), ("fp16", "loss"), ("fp32", "gradient"), ("bf16", "weight")]


def on_a_rank(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {variant: overflow_on_rank_1(world, variant) for variant in ("torch", "bucket", "flat")}
    found |= {case: no_number_on_rank_1(world, *case) for case in CASES}
    found["any"] = [any_rank(world, flag) for flag in (False, world.rank == 1, True)]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("two"))
        return launch(on_a_rank, 2, device="cpu", echo=False, timeout=300)


@pytest.mark.parametrize("variant", ["torch", "bucket", "flat"])
def test_an_overflow_on_one_rank_is_skipped_on_all_ranks(variant: str, two: list[dict[Any, Any]]) -> None:
    first, second = (rank[variant] for rank in two)
    assert first == second
    # two good steps; two halvings at steps 3 and 4; then three good ones double it once
    assert first["scales"] == [1024, 1024, 512, 256, 256, 256, 512, 512]
    weights = first["weights"]
    assert weights[1] == weights[2] == weights[3]
    assert len(set(weights)) == 6
    assert first["rates"][2] == first["rates"][3] == first["rates"][4], "the schedule waits, too"
    assert all(map(math.isfinite, first["losses"]))
    assert first["losses"][-1] < first["losses"][0]


def test_an_overflow_on_one_rank_is_known_to_all_ranks(two: list[dict[Any, Any]]) -> None:
    assert [rank["any"] for rank in two] == [[False, True, True]] * 2


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            ("fp32", "loss"),
            "step 3: the gradient is not finite. On rank 1, the loss of micro-batch 0, and therefore the gradient of "
            "'norm.bias' and others.",
        ),
        (
            ("fp16", "loss"),
            "step 3: the gradient is not finite. On rank 1, the loss of micro-batch 0, and therefore the gradient of "
            "'norm.bias' and others.",
        ),
        (
            ("fp32", "gradient"),
            "step 3: the gradient is not finite. On rank 1, the gradient of micro-batch 0 for parameter "
            "'blocks.0.expand.weight', the first in the backward pass.",
        ),
        (
            ("bf16", "weight"),
            "step 1: the gradient is not finite. On rank 1, parameter 'blocks.0.expand.weight' itself.",
        ),
    ],
)
def test_a_nan_that_is_a_bug_is_reported_with_step_rank_and_parameter(
    case: tuple[str, str], told: str, two: list[dict[Any, Any]]
) -> None:
    assert [rank[case] for rank in two] == [f"{NotFiniteError.__name__}: {told}"] * 2


def test_an_invariant_half_precision_run_is_bitwise_identical_on_two_ranks() -> None:
    config = with_precision("fp16", strategy="invariant", micro_batches=2)
    one = launch(train, 1, config, device="cpu", echo=False)[0]
    for rank in launch(train, 2, config, device="cpu", echo=False):
        assert rank.weights == one.weights


def test_the_gradient_of_a_split_batch_is_scaled_like_a_whole_batch() -> None:
    tokens = torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(0))

    def gradient(precision: Precision, parts: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = data_parallel(GPT(layers=1, heads=2, width=16, context=8), World())
        batches = [{"tokens": part} for part in shard_micro_batches(tokens, 0, 1, parts)]
        totals = accumulate(model, StepLoss(next_token_loss, World(), precision), batches)
        assert totals.means()["loss"] < 10, "the loss itself is not scaled"
        return torch.cat([weight.grad.flatten() for weight in model.module.parameters() if weight.grad is not None])

    expected = gradient(Precision(), 1)
    for parts in (1, 3):
        torch.testing.assert_close(gradient(Precision(HALF), parts) / 1024, expected, rtol=0.05, atol=1e-3)


def test_an_update_clears_the_gradient_even_if_it_was_skipped() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient, made in ((1.0, True), (math.nan, False)):
        weight.grad = torch.full((3,), gradient)
        assert Precision().update(optimizer, 1.0, 0.0).applied == made
        assert weight.grad is None


def test_the_norm_over_one_rank_requires_no_group() -> None:
    norm = total_norm_over([torch.tensor([3.0]), torch.tensor([[4.0]])], None, 1, torch.device("cpu"))
    assert (norm.item(), norm.dtype) == (5.0, torch.float32)
    assert total_norm_over([], None, 1, torch.device("cpu")).item() == 0
