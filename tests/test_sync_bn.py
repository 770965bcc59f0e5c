"""Batch normalization over all ranks equals one process with all batches."""

import copy
import io
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.sync_bn import SyncBatchNorm, synchronize_batch_norm
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World
from ranks import error_of, open_files

SAMPLES = {1: [7], 2: [3, 4], 3: [2, 0, 5], 4: [1, 1, 4, 1]}  # samples of each rank: ragged, and one rank has none
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def make_net(momentum: float | None) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(2, 3, 3)),
        ("bn", nn.BatchNorm2d(3, momentum=momentum)),
        ("act", nn.GELU()),
        ("flat", nn.Flatten()),
        ("inner", nn.Sequential(nn.Linear(3 * 16, 5), nn.BatchNorm1d(5, affine=False, track_running_stats=False))),
        ("head", nn.Linear(5, 1)),
    ]
    return nn.Sequential(OrderedDict(layers)).double()


def data_of(step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    # far from zero, where a mean of squares less a square of means would lose its digits
    return 1000 + torch.randn(sum(SAMPLES[size]), 2, 6, 6, generator=generator, dtype=torch.float64)


def part_of(data: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return data.split(SAMPLES[size])[rank]


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def two_steps(net: nn.Module, losses: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(2):
        found.append(losses(step))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": found, "weights": weights_of(net)}


def on_union(size: int, momentum: float | None) -> dict[str, Any]:
    net = make_net(momentum)

    def losses(step: int) -> torch.Tensor:
        out = net(data_of(step, size)).square()
        out.mean().backward()
        return out.detach()

    found = two_steps(net, losses)
    net.eval()
    return found | {"eval": net(data_of(9, size)).detach()}


def on_rank(world: World, variant: str, momentum: float | None, synchronized: bool = True) -> dict[str, Any]:
    net: nn.Module = make_net(momentum)
    if synchronized:
        net = synchronize_batch_norm(net, world)
    model = data_parallel(net, world, DDPConfig(variant=variant, sync_buffers=False))  # type: ignore[arg-type]
    everywhere = sum(SAMPLES[world.size])

    def losses(step: int) -> torch.Tensor:
        out = model(part_of(data_of(step, world.size), world.rank, world.size)).square()
        (out.sum() * world.size / everywhere).backward()
        model.finish()
        return out.detach()

    found = two_steps(net, losses)
    net.eval()
    return found | {"eval": net(data_of(9, world.size)).detach()}


def one_value(world: World) -> str:
    """Return the error of one value per channel on rank 0 and none on the other ranks."""
    net = synchronize_batch_norm(nn.BatchNorm1d(3), world)
    return error_of(lambda: net(torch.ones(1 if world.is_main else 0, 3)))


def half_precision(world: World, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and statistics of a 16-bit layer; the sums exceed float16's range."""
    net = synchronize_batch_norm(nn.BatchNorm1d(1), world).to(dtype)
    x = wide_range(world.size)[world.rank].to(dtype).requires_grad_()
    out = net(x)
    (out * factors_of(x).to(dtype)).sum().backward()
    return {"out": out.detach(), "x.grad": x.grad, "weight.grad": net.weight.grad, **net.state_dict()}


def wide_range(size: int) -> tuple[torch.Tensor, ...]:
    x = torch.full((2048, 1), 100.0)
    x[::2] = 102
    return x.chunk(size)


def factors_of(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(x)) % 4 / 2)[:, None]


def copied(world: World) -> list[torch.Tensor]:
    """Return the training outputs of a layer, of its deep copy, and of a saved and loaded layer."""
    net = synchronize_batch_norm(nn.Sequential(nn.BatchNorm1d(3)), world)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    nets = [net, copy.deepcopy(net), torch.load(file, weights_only=False)]
    return [each(torch.arange(6.0).reshape(2, 3) ** (1 + world.rank)).detach() for each in nets]


def evaluated_alone(world: World) -> torch.Tensor | None:
    """Evaluate a layer without running statistics on rank 0 only."""
    net = synchronize_batch_norm(nn.BatchNorm1d(3, track_running_stats=False), world).eval()
    return net(torch.arange(6.0).reshape(2, 3)).detach() if world.is_main else None


def groups_made(world: World) -> int:
    """Return the number of sockets and other files that ten more models open.

    Files that are closed meanwhile do not count: Gloo may still be closing sockets that it needed only to connect.
    """
    before = open_files()
    for _ in range(10):
        synchronize_batch_norm(nn.BatchNorm1d(3), world)
    return len(open_files() - before)


def everything(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {
        (variant, momentum): on_rank(world, variant, momentum)
        for variant in ("torch", "bucket", "naive")
        for momentum in (0.1, None)
    }
    found["one value"] = one_value(world)
    if world.size > 1:
        found |= {dtype: half_precision(world, dtype) for dtype in (torch.float16, torch.bfloat16)}
        found["copied"], found["evaluated alone"] = copied(world), evaluated_alone(world)
        found["files"] = groups_made(world)
    if min(SAMPLES[world.size]) > 1:
        found["apart"] = on_rank(world, "bucket", 0.1, synchronized=False)
    return found


@cache
def ranks_of(size: int) -> list[dict[Any, Any]]:
    if size == 1:
        return [everything(World())]
    return launch(everything, size, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("variant", ["torch", "bucket", "naive"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_steps_equal_those_of_one_process_on_all_samples(size: int, variant: str, momentum: float | None) -> None:
    expected = on_union(size, momentum)
    for rank, found in enumerate(each[variant, momentum] for each in ranks_of(size)):
        for mine, all_of_them in zip(found["losses"], expected["losses"], strict=True):
            torch.testing.assert_close(mine, part_of(all_of_them, rank, size), **CLOSE)
        assert list(found["weights"]) == list(expected["weights"]), "loads where BatchNorm loads, and back"
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], **CLOSE)
        torch.testing.assert_close(found["eval"], expected["eval"], **CLOSE)


def test_plain_batch_norm_would_be_detected() -> None:
    expected = on_union(2, 0.1)["weights"]["bn.running_var"]
    means = [rank["apart"]["weights"]["bn.running_var"] for rank in ranks_of(2)]
    assert not torch.equal(*means)
    assert all(not torch.allclose(mean, expected, rtol=1e-3) for mean in means)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_value_per_channel_is_an_error_on_every_rank(size: int) -> None:
    assert {rank["one value"] for rank in ranks_of(size)} == {
        "ValueError: expected more than 1 value per channel across all ranks, got 1"
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_half_precision_matches_float32_on_all_samples(size: int, dtype: torch.dtype) -> None:
    net = nn.BatchNorm1d(1)
    parts = wide_range(size)
    x = torch.cat(parts).requires_grad_()
    out = net(x)
    (out * torch.cat([factors_of(part) for part in parts])).sum().backward()
    close = {"rtol": 2e-2, "atol": 0.0}
    weight = sum(rank[dtype]["weight.grad"].float() for rank in ranks_of(size))
    torch.testing.assert_close(weight, net.weight.grad, **close)
    assert x.grad is not None
    of_ranks = [rank[dtype] for rank in ranks_of(size)]
    for found, expected, gradient in zip(of_ranks, out.chunk(size), x.grad.chunk(size), strict=True):
        assert found["out"].dtype == found["running_mean"].dtype == dtype
        torch.testing.assert_close(found["out"].float(), expected.detach(), **close)
        assert (found["x.grad"].float() - gradient).norm() < 0.02 * gradient.norm()
        torch.testing.assert_close(found["running_mean"].float(), net.running_mean, **close)
        torch.testing.assert_close(found["running_var"].float(), net.running_var, **close)
        assert found["num_batches_tracked"] == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_copied_or_saved_layer_still_synchronizes(size: int) -> None:
    union = torch.cat([torch.arange(6.0).reshape(2, 3) ** (1 + rank) for rank in range(size)])
    expected = nn.BatchNorm1d(3)(union).detach().split(2)
    for rank, mine in zip(ranks_of(size), expected, strict=True):
        for found in rank["copied"]:
            torch.testing.assert_close(found, mine)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_rank_can_evaluate_alone_without_running_statistics(size: int) -> None:
    expected = nn.BatchNorm1d(3)(torch.arange(6.0).reshape(2, 3)).detach()
    torch.testing.assert_close(ranks_of(size)[0]["evaluated alone"], expected)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_models_share_one_process_group(size: int) -> None:
    assert {rank["files"] for rank in ranks_of(size)} == {0}


def test_every_layer_is_replaced_and_keeps_its_tensors() -> None:
    net = make_net(0.1)
    bn, statistics = net.bn, net.bn.running_mean
    replaced = synchronize_batch_norm(net, World())
    assert replaced is net
    layers = [layer for layer in net.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert [type(layer) for layer in layers] == [SyncBatchNorm, SyncBatchNorm]
    assert net.bn.weight is bn.weight
    assert net.bn.running_mean is statistics


def test_a_layer_used_in_several_places_stays_one_layer() -> None:
    bn = nn.BatchNorm1d(4)
    block = nn.Sequential(nn.Linear(4, 4), bn)
    net = nn.Sequential(bn, nn.ReLU(), bn, block, block)
    synchronize_batch_norm(net, World())
    assert type(net[0]) is SyncBatchNorm
    assert net[2] is net[0]
    assert net[3] is net[4]
    assert net[3][1] is net[0]


def test_the_layer_has_the_attributes_of_torchs_layer() -> None:
    options = {"eps": 0.1, "momentum": 0.2, "affine": False, "track_running_stats": False}
    torchs = nn.SyncBatchNorm(3, **options)  # type: ignore[arg-type]
    ours = synchronize_batch_norm(nn.BatchNorm1d(3, **options), World())  # type: ignore[arg-type]
    assert repr(ours).partition("process_group")[0] == repr(torchs).partition("process_group")[0]
    assert ours.num_features == 3
    without_bias = nn.BatchNorm1d(3, bias=False)
    assert list(synchronize_batch_norm(without_bias, World()).state_dict()) == list(without_bias.state_dict())


def test_a_synchronized_layer_is_left_unchanged() -> None:
    net = synchronize_batch_norm(nn.BatchNorm1d(3), World())
    assert synchronize_batch_norm(net, World()) is net


def test_in_eval_mode_any_number_of_samples_is_accepted() -> None:
    net = synchronize_batch_norm(nn.BatchNorm1d(3), World()).eval()
    assert torch.equal(net(torch.zeros(0, 3)), torch.zeros(0, 3))
    assert net(torch.ones(1, 3)).shape == (1, 3)


def test_two_ranks_without_a_group_raise() -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        synchronize_batch_norm(nn.BatchNorm1d(3), World(0, 2, 0, 2))
