"""The bytes that a hook saves, and the error that it causes: in 16 bits, or as two low-rank matrices."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.collectives import all_reduce_mean, all_reduce_sum, digest
from ddp_tutorial.ddp.buckets import MIB, Bucket
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.hooks import AllReduceHook, CastHook, PowerSGD
from ddp_tutorial.ddp.link import DirectLink, LinkModel, SimulatedLink, Transfer
from ddp_tutorial.ddp.wrappers import BucketDDP, TorchDDP, data_parallel
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.world import World
from ranks import error_of, watched


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def average(world: World, hook: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Average one bucket with these gradients of this rank."""
    parameters = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
    bucket = Bucket.of("bucket 0", list(parameters.items()))
    for place, (name, parameter) in enumerate(parameters.items()):
        parameter.grad = gradients[name].clone()
        bucket.collect(place, world.size)
    hook.start(bucket).wait()
    return {name: view.clone() for name, view in zip(bucket.names, bucket.views, strict=True)}


# ----------------------------------------------------------------------------------------------------------- 16 bits


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def gradients_of_steps(world: World, model: Any, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return gradients of a large loss, so that float16 keeps 11 bits of each."""
    gradients = []
    module = model.module
    for step in range(steps):
        x = random(6, 8, seed=100 * step + world.rank)
        (1000 * model(x).square().sum()).backward()
        if not isinstance(model, DistributedDataParallel):
            model.finish()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(1e-6 * p.grad)
        module.zero_grad()
    return gradients


def compare_with_torchs_fp16(world: World) -> dict[str, Any]:
    theirs = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    theirs.register_comm_hook(None, fp16_compress_hook)
    models: dict[str, Any] = {"torch, its own hook": theirs}
    for variant in ("torch", "bucket"):
        for cap in (None, 300 / MIB):
            config = DDPConfig(variant=variant, hook="fp16", bucket_cap_mb=cap)
            models[f"{variant}, our hook, cap {cap}"] = data_parallel(net(), world, config)
    slow = LinkConfig(latency_ms=0, megabytes_per_second=1e6)
    for variant in ("torch", "bucket"):
        config = DDPConfig(variant=variant, hook="fp16", simulated_link=slow)
        models[f"{variant}, our hook, simulated link"] = data_parallel(net(), world, config)
    return {name: gradients_of_steps(world, model) for name, model in models.items()}


def average_in_16_bits(world: World) -> dict[str, Any]:
    link = DirectLink(world)
    mine = {"weight": random(40, 30, seed=world.rank), "bias": random(7, seed=50 + world.rank)}
    exact = {name: all_reduce_mean(world, gradient.double()) for name, gradient in mine.items()}
    size = {name: all_reduce_sum(world, gradient.double().abs() / world.size) for name, gradient in mine.items()}
    hooks = {"none": AllReduceHook(link), "fp16": CastHook(link, torch.float16), "bf16": CastHook(link, torch.bfloat16)}
    found, nbytes = {}, {}
    for name, hook in hooks.items():
        transfers = watched(link)
        found[name] = average(world, hook, mine)
        nbytes[name] = [transfer.nbytes for transfer in transfers]
    extremes = torch.tensor([1e5, 1e-9, 1.0, 0.0])
    kept = {name: average(world, hook, {"p": extremes})["p"].tolist() for name, hook in hooks.items()}
    return {"exact": exact, "size": size, "found": found, "nbytes": nbytes, "extremes": kept}


def count_bytes_of_training(world: World) -> dict[str, Any]:
    heard = {}
    for hook in ("none", "fp16", "bf16"):
        model: Any = data_parallel(net(), world, DDPConfig(variant="bucket", hook=hook, bucket_cap_mb=300 / MIB))
        transfers = watched(model.link)
        gradients_of_steps(world, model)
        heard[hook] = [transfer.nbytes for transfer in transfers if transfer.name.startswith("bucket")]
        heard[f"buckets, {hook}"] = len(model.buckets)
    return heard


# ---------------------------------------------------------------------------------------------------------- PowerSGD

SHAPES = {"weight": (12, 20), "bias": (20,), "conv": (8, 4, 3, 3), "small": (2, 2), "scalar": ()}


def low_rank(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return matrices of rank 1, whose sum over N ranks has rank N, and tensors that are not matrices."""
    seed = 1000 * step + 10 * rank
    return {
        "weight": torch.outer(random(12, seed=seed), random(20, seed=seed + 1)),
        "bias": random(20, seed=seed + 2),
        "conv": torch.outer(random(8, seed=seed + 3), random(36, seed=seed + 4)).view(8, 4, 3, 3),
        "small": random(2, 2, seed=seed + 5),
        "scalar": random(seed=seed + 6),
    }


def send_low_rank(world: World) -> dict[str, Any]:
    """Run three steps with unrelated gradients, all within PowerSGD's rank."""
    link = DirectLink(world)
    hook = PowerSGD(link, world.size, rank=world.size)
    transfers = watched(link)
    steps = []
    for step in range(3):
        mine = low_rank(world.rank, step)
        steps.append((average(world, hook, mine), average(world, AllReduceHook(DirectLink(world)), mine)))
    return {"steps": steps, "transfers": [(transfer.name, transfer.nbytes) for transfer in transfers]}


FEEDBACK_STEPS = 60


def feed_errors_back(world: World) -> dict[str, Any]:
    """Run steps with gradients of full rank: a constant part and noise, as in training."""
    hook = PowerSGD(DirectLink(world), world.size, rank=1)
    delivered, true = torch.zeros(12, 20), torch.zeros(12, 20)
    behind, digests = [], []
    for step in range(FEEDBACK_STEPS):
        mine = {"weight": random(12, 20, seed=7) + random(12, 20, seed=100 + 10 * step + world.rank)}
        result = average(world, hook, mine)["weight"]
        delivered += result
        true += all_reduce_mean(world, mine["weight"])
        behind.append((true - delivered).norm().item())
        digests.append(digest({"weight": result}))
    return {
        "behind": behind,
        "true": true.norm().item(),
        "delivered + kept": delivered + all_reduce_sum(world, hook.errors["weight"]),
        "sum": true,
        "digests": digests,
    }


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)

    def forward(self, x: torch.Tensor, is_used: bool) -> torch.Tensor:
        out = self.always(x)
        return (out + self.sometimes(x) * torch.arange(12.0) if is_used else out).square().sum()


def skip_a_parameter(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Train with a parameter that no rank uses in the second step; return what was applied or kept, and the sum."""
    module, name = Sometimes(), "sometimes.weight"
    options = {"variant": "bucket", "hook": "powersgd", "powersgd_rank": 1, "find_unused_parameters": True}
    model = data_parallel(module, world, DDPConfig.model_validate(options))
    applied, true = torch.zeros(12, 12), torch.zeros(12, 12)
    for step, is_used in enumerate((True, False, True)):
        x = random(4, 12, seed=10 * step + world.rank)
        if is_used:
            true += all_reduce_mean(world, torch.autograd.grad(module(x, is_used), module.sometimes.weight)[0])
        model(x, is_used).backward()
        model.finish()
        if (gradient := module.sometimes.weight.grad) is not None:
            applied += gradient
        module.zero_grad()
    assert model.kept is not None
    return applied + all_reduce_sum(world, model.kept.errors[name]), true


class Backwards(nn.Module):
    """A model that registers its layers in reverse, so that the first step's buckets have the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(14, 12)
        self.second = nn.Linear(16, 14)
        self.first = nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def train_low_rank(world: World) -> dict[str, Any]:
    """Train with one sample per rank and step, so gradients have at most rank N, in many buckets, before and after a
    rebuild.
    """
    heard = {}
    for name, options in {
        "none": {},
        "exact": {"hook": "powersgd", "powersgd_rank": world.size},
        "nothing is worth it": {"hook": "powersgd", "powersgd_rank": 100},
    }.items():
        torch.manual_seed(1)
        module = Backwards()
        model: Any = data_parallel(module, world, DDPConfig(variant="bucket", bucket_cap_mb=500 / MIB, **options))
        layouts, gradients = [], []
        for step in range(4):
            layouts.append([bucket.names for bucket in model.buckets])
            model(random(1, 12, seed=10 * step + world.rank)).square().sum().backward()
            model.finish()
            gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
            module.zero_grad()
        heard[name] = {"layouts": layouts, "gradients": gradients}
    return heard


def regress(world: World) -> dict[str, Any]:
    """Fit a matrix of full rank to noisy samples, with a hook of rank 1."""
    heard: dict[str, Any] = {}
    wanted = random(24, 16, seed=1)
    for hook in ("none", "powersgd"):
        torch.manual_seed(world.rank)
        module = nn.Linear(24, 16)
        options = {"powersgd_rank": 1} if hook == "powersgd" else {}
        model: Any = data_parallel(module, world, DDPConfig(variant="bucket", hook=hook, **options))
        transfers = watched(model.link)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for step in range(100):
            x = random(32, 24, seed=100 * step + world.rank)
            y = x @ wanted + 0.1 * random(32, 16, seed=100 * step + 50 + world.rank)
            loss = F.mse_loss(model(x), y) * 8
            loss.backward()
            model.finish()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(all_reduce_mean(world, loss.detach()).item() / 8)
        heard[hook] = {
            "first": losses[0],
            "last": sum(losses[-10:]) / 10,
            "weights": digest(dict(module.state_dict())),
            "nbytes": sum(t.nbytes for t in transfers if t.name.startswith("bucket")),
        }
    return heard


def send_half_precision(world: World) -> dict[str, Any]:
    gradients = {"weight": low_rank(world.rank, 0)["weight"].bfloat16()}
    exact = all_reduce_mean(world, gradients["weight"].double())
    return {"exact": exact, "found": average(world, PowerSGD(DirectLink(world), world.size, 3), gradients)["weight"]}


def send_complex_numbers(world: World) -> dict[str, Any]:
    link = DirectLink(world)
    mine = {"weight": torch.complex(random(12, 20, seed=world.rank), random(12, 20, seed=10 + world.rank))}
    hooks = {
        "fp16": CastHook(link, torch.float16),
        "bf16": CastHook(link, torch.bfloat16),
        "powersgd": PowerSGD(link, world.size),
    }
    exact = all_reduce_mean(world, mine["weight"])
    return {name: (average(world, hook, mine)["weight"], exact) for name, hook in hooks.items()}


def fail_inside(world: World) -> dict[str, str]:
    """Raise an error in the observer of the link, in a different thread."""

    def watch(transfer: Transfer) -> None:
        raise ValueError("no more paper")

    heard = {}
    for variant in ("torch", "bucket"):
        for hook in ("none", "fp16"):
            for link in (LinkConfig(latency_ms=0), None):
                model: Any = data_parallel(net(), world, DDPConfig(variant=variant, hook=hook, simulated_link=link))
                if model.link is None:
                    continue  # torch's own hook has no observer

                def step(model: Any = model) -> None:
                    model.link.observer = watch
                    model(random(6, 8, seed=0)).sum().backward()
                    model.finish()

                heard[f"{variant}, {hook}, {'direct' if link is None else 'simulated'}"] = error_of(step)
    return heard


def lose_the_others(world: World) -> dict[str, str] | None:
    """Let all ranks except rank 0 exit. Runs last."""
    links = {"direct": DirectLink(world), "simulated": SimulatedLink(world, LinkModel(0.0, 1e9))}
    all_reduce_mean(world, torch.zeros(1))
    if world.rank > 0:
        dist.destroy_process_group()
        time.sleep(1.0)
        return None
    time.sleep(0.3)
    mine = {"weight": torch.ones(12, 20)}
    return {
        f"{hook}, {kind}": error_of(lambda make=make, link=link: average(world, make(link), mine))
        for kind, link in links.items()
        for hook, make in {
            "none": AllReduceHook,
            "fp16": lambda link: CastHook(link, torch.float16),
            "powersgd": lambda link: PowerSGD(link, 2),
        }.items()
    }


ALL: list[Callable[[World], Any]] = [
    compare_with_torchs_fp16,
    average_in_16_bits,
    count_bytes_of_training,
    send_low_rank,
    feed_errors_back,
    skip_a_parameter,
    train_low_rank,
    regress,
    send_half_precision,
    send_complex_numbers,
    fail_inside,
    lose_the_others,
]


def everything(world: World) -> dict[str, Any]:
    return {each.__name__: each(world) for each in ALL}


@pytest.fixture(scope="module", params=[2, 3])
def nprocs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def heard(nprocs: int) -> list[dict[str, Any]]:
    """Return the results of each rank. The ranks are started once for all tests."""
    return launch(everything, nprocs, device="cpu", threads=1, echo=False, timeout=300)


# ---------------------------------------------------------------------------------------------------- 16 bits: tests


def test_fp16_is_bitwise_identical_to_torchs_hook_on_two_ranks(heard: list[dict[str, Any]], nprocs: int) -> None:
    """On three ranks, the difference is within 11 bits, because a third is rounded before or after the cast."""
    for each in heard:
        said = dict(each["compare_with_torchs_fp16"])
        theirs = said.pop("torch, its own hook")
        assert len(said) == 6
        for name, ours in said.items():
            for step in range(3):
                if nprocs == 2:
                    assert digest(ours[step]) == digest(theirs[step]), name
                else:
                    torch.testing.assert_close(ours[step], theirs[step], rtol=5e-3, atol=1.0)


def test_fp16_gives_bitwise_identical_results_on_all_ranks(heard: list[dict[str, Any]]) -> None:
    for name in heard[0]["compare_with_torchs_fp16"]:
        for step in range(3):
            assert len({digest(each["compare_with_torchs_fp16"][name][step]) for each in heard}) == 1


@pytest.mark.parametrize(("hook", "bits"), [("fp16", 11), ("bf16", 8)])
def test_16_bits_are_within_their_precision_of_the_exact_mean(
    heard: list[dict[str, Any]], nprocs: int, hook: str, bits: int
) -> None:
    """Each part is rounded once, as is each of the N - 1 sums.

    The error is at most N times half a unit in the last place of the sum of the absolute values.
    """
    for each in heard:
        said = each["average_in_16_bits"]
        for name, exact in said["exact"].items():
            error = (said["found"][hook][name] - exact).abs()
            assert (error <= 1.01 * nprocs * 2.0**-bits * said["size"][name] + 1e-6).all()
            assert error.max() > 0  # otherwise, nothing was cast
            assert digest(said["found"][hook]) == digest(heard[0]["average_in_16_bits"]["found"][hook])


def test_16_bits_send_exactly_half_of_the_bytes(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        assert each["average_in_16_bits"]["nbytes"] == {"none": [4828], "fp16": [2414], "bf16": [2414]}
        said = each["count_bytes_of_training"]
        assert said["buckets, none"] > 1
        assert sum(said["none"]) == 3 * 4 * (8 * 16 + 16 + 16 * 8 + 8)  # three steps of all parameters
        for hook in ("fp16", "bf16"):
            assert sum(said[hook]) * 2 == sum(said["none"])
            assert len(said[hook]) == len(said["none"])


def test_fp16_overflows_and_underflows_where_bf16_does_not(heard: list[dict[str, Any]], nprocs: int) -> None:
    for each in heard:
        said = each["average_in_16_bits"]["extremes"]
        large, small, one, zero = said["fp16"]
        assert (large, small, zero) == (float("inf"), 0.0, 0.0)
        assert one == pytest.approx(1.0, rel=2e-3)
        assert said["bf16"] == pytest.approx([1e5, 1e-9, 1.0, 0.0], rel=nprocs * 2.0**-8)
        assert said["none"] == pytest.approx([1e5, 1e-9, 1.0, 0.0], rel=1e-6)


# --------------------------------------------------------------------------------------------------- PowerSGD: tests


@pytest.mark.parametrize("step", range(3))
def test_powersgd_is_exact_if_its_rank_is_sufficient(heard: list[dict[str, Any]], step: int) -> None:
    for each in heard:
        found, exact = each["send_low_rank"]["steps"][step]
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES


@pytest.mark.parametrize("step", range(3))
def test_vectors_and_small_matrices_are_sent_exactly(heard: list[dict[str, Any]], nprocs: int, step: int) -> None:
    for each in heard:
        found, exact = each["send_low_rank"]["steps"][step]
        for name in ("bias", "small", "scalar"):
            if nprocs == 2:
                assert torch.equal(found[name], exact[name])
            else:  # summed in a different order, because of its different position in the message
                torch.testing.assert_close(found[name], exact[name])


def test_powersgd_sends_the_number_of_bytes_of_the_formula(heard: list[dict[str, Any]], nprocs: int) -> None:
    """P is n x rank and Q is m x rank, for matrices of 12 x 20 and 8 x 36. Uncompressed gradients are sent with P."""
    rank = nprocs
    first = 4 * (rank * (12 + 8) + 20 + 4 + 1)
    second = 4 * rank * (20 + 36)
    assert first + second < 4 * (12 * 20 + 8 * 36 + 20 + 4 + 1)
    for each in heard:
        assert each["send_low_rank"]["transfers"] == [("bucket 0", first), ("bucket 0, Q", second)] * 3


def test_powersgd_gives_bitwise_identical_results_on_all_ranks(heard: list[dict[str, Any]]) -> None:
    assert len({tuple(each["feed_errors_back"]["digests"]) for each in heard}) == 1
    for step in range(3):
        assert len({digest(each["send_low_rank"]["steps"][step][0]) for each in heard}) == 1
    assert len({each["regress"]["powersgd"]["weights"] for each in heard}) == 1


def test_delivered_gradients_and_errors_of_powersgd_sum_to_all_gradients(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        said = each["feed_errors_back"]
        torch.testing.assert_close(said["delivered + kept"], said["sum"], rtol=1e-4, atol=1e-3)


def test_powersgd_keeps_the_error_of_a_parameter_that_a_step_does_not_use(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        kept, true = each["skip_a_parameter"]
        torch.testing.assert_close(kept, true, rtol=1e-4, atol=1e-3)


def test_the_errors_of_powersgd_do_not_grow(heard: list[dict[str, Any]]) -> None:
    """Each step sends rank 1 of 12. Without error feedback, most of each gradient would be lost."""
    for each in heard:
        behind = each["feed_errors_back"]["behind"]
        assert behind[0] > 0
        assert max(behind[40:]) < 1.25 * max(behind[:40])
        assert behind[-1] < 0.5 * each["feed_errors_back"]["true"]


@pytest.mark.parametrize("step", range(4))
def test_powersgd_works_in_many_and_in_rebuilt_buckets(heard: list[dict[str, Any]], step: int) -> None:
    for each in heard:
        said = each["train_low_rank"]
        assert len(said["exact"]["layouts"][step]) >= 3
        for name, exact in said["none"]["gradients"][step].items():
            # Q of the step before may be nearly at right angles to what is sought, and then float32 is not much.
            assert (said["exact"]["gradients"][step][name] - exact).norm() < 0.02 * exact.norm()
        first = heard[0]["train_low_rank"]["exact"]["gradients"][step]
        assert digest(said["exact"]["gradients"][step]) == digest(first)


def test_the_buckets_are_rebuilt_under_powersgd(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        layouts = each["train_low_rank"]["exact"]["layouts"]
        assert layouts[0] != layouts[1]
        assert layouts[1] == layouts[2] == layouts[3]


@pytest.mark.parametrize("step", range(4))
def test_a_rank_that_saves_no_bytes_does_not_compress(heard: list[dict[str, Any]], step: int) -> None:
    for each in heard:
        said = each["train_low_rank"]
        assert digest(said["nothing is worth it"]["gradients"][step]) == digest(said["none"]["gradients"][step])


def test_training_with_powersgd_approaches_the_exact_loss_with_fewer_bytes(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        exact, compressed = each["regress"]["none"], each["regress"]["powersgd"]
        assert exact["last"] < 0.02  # the noise is 0.01
        assert exact["last"] <= compressed["last"] * 1.05
        assert compressed["last"] < 2 * exact["last"] < 0.01 * exact["first"]
        # 24 x 16 weights and 16 biases, or rank 1 of them: 16 + 24 and 16
        assert exact["nbytes"] == 100 * 4 * (24 * 16 + 16)
        assert compressed["nbytes"] == 100 * 4 * (16 + 24 + 16)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_every_hook_keeps_the_imaginary_part(heard: list[dict[str, Any]], hook: str) -> None:
    for each in heard:
        found, exact = each["send_complex_numbers"][hook]
        torch.testing.assert_close(found, exact, rtol=0.03, atol=0.03)


# ------------------------------------------------------------------------------------------------------- and failure


def test_a_hook_raises_the_error_of_its_all_reduce(heard: list[dict[str, Any]]) -> None:
    said = heard[0]["lose_the_others"]
    assert len(said) == 6
    for name, error in said.items():
        assert error.startswith("RuntimeError: "), name


def test_a_thread_error_is_raised_by_backward_or_finish(
    heard: list[dict[str, Any]],
) -> None:
    for each in heard:
        assert len(each["fail_inside"]) == 7
        for name, error in each["fail_inside"].items():
            assert "no more paper" in error, name


def test_powersgd_supports_parameters_in_half_precision(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        said = each["send_half_precision"]
        assert said["found"].dtype == torch.bfloat16
        assert (said["found"] - said["exact"]).norm() < 0.05 * said["exact"].norm()


def test_a_rank_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"PowerSGD approximation \('rank'\) must be at least 1, got 0"):
        PowerSGD(DirectLink(World()), 1, rank=0)


def test_the_first_q_depends_only_on_the_name() -> None:
    hook = PowerSGD(DirectLink(World()), 1, rank=2)
    like = torch.zeros(1)
    torch.manual_seed(1)
    first = hook.first_q("a", 5, like)
    torch.manual_seed(2)
    assert torch.equal(hook.first_q("a", 5, like), first)
    assert not torch.equal(hook.first_q("b", 5, like), first)
    assert first.shape == (5, 2)


@pytest.mark.parametrize(
    ("rank", "shape", "worth"),
    [
        (1, (2, 2), False),  # 4 numbers either way
        (1, (2, 3), True),  # 5 for 6
        (2, (12, 20), True),  # 64 for 240
        (8, (12, 20), False),  # 256 for 240
        (1, (50,), False),
        (1, (), False),
        (1, (8, 4, 3, 3), True),  # 8 + 36 for 288
        (1, (0, 5), False),
    ],
)
def test_a_matrix_is_compressed_only_if_this_saves_bytes(rank: int, shape: tuple[int, ...], worth: bool) -> None:
    assert PowerSGD(DirectLink(World()), 1, rank=rank).is_compressible(torch.Size(shape)) is worth


def test_variants_support_the_documented_hooks() -> None:
    """A single process never compresses. The config rejects unsupported combinations."""
    model = data_parallel(net(), World(), DDPConfig(variant="bucket", hook="bf16"))
    assert isinstance(model, BucketDDP)
    assert isinstance(model.hook, AllReduceHook)
    assert isinstance(data_parallel(net(), World(), DDPConfig(variant="torch", hook="bf16")), TorchDDP)


def test_the_errors_of_powersgd_survive_a_change_of_its_rank() -> None:
    hook, link = PowerSGD(DirectLink(World()), 1, rank=2), DirectLink(World())
    hook.errors, hook.qs = {"weight": torch.ones(3, 4)}, {"weight": torch.ones(4, 2)}
    same, other = PowerSGD(link, 1, rank=2), PowerSGD(link, 1, rank=1)
    for each in (same, other):
        each.load_state_dict(hook.state_dict())
        assert torch.equal(each.errors["weight"], torch.ones(3, 4))
    assert (list(same.qs), list(other.qs)) == (["weight"], [])


def test_the_error_of_a_parameter_that_is_no_longer_compressed_is_sent() -> None:
    hook = PowerSGD(DirectLink(World()), 1, rank=9)
    hook.load_state_dict({"rank": 1, "errors": {"weight": torch.ones(3, 4)}, "qs": {}})
    sent = [average(World(), hook, {"weight": torch.zeros(3, 2, 2)})["weight"] for _ in range(2)]
    assert (sent[0].unique().tolist(), sent[1].unique().tolist(), hook.errors) == ([1], [0], {})


def test_powersgd_with_loss_scaling_is_rejected() -> None:
    settings = {"ddp": {"variant": "bucket", "hook": "powersgd"}, "precision": {"dtype": "fp16"}}
    with pytest.raises(ValidationError, match=r"'ddp.hook' must not be powersgd with precision.dtype=fp16"):
        TrainConfig.model_validate(settings)
