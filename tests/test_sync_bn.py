"""Batch normalisation over all ranks: as one process would, on the union of their batches."""

from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from ddp_tutorial.ddp.sync_bn import SyncBatchNorm, synchronise_batch_norm
from ddp_tutorial.ddp.variants import DDPConfig, data_parallel
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World
from ranks import error_of

SAMPLES = {1: [7], 2: [3, 4], 3: [2, 0, 5], 4: [1, 1, 4, 1]}  # of each rank: ragged, and one has none
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


def on_rank(world: World, variant: str, momentum: float | None, synchronised: bool = True) -> dict[str, Any]:
    net: nn.Module = make_net(momentum)
    if synchronised:
        net = synchronise_batch_norm(net, world)
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


def alone(world: World) -> str:
    """One value for each channel on rank 0, none on the others."""
    net = synchronise_batch_norm(nn.BatchNorm1d(3), world)
    return error_of(lambda: net(torch.ones(1 if world.is_main else 0, 3)))


def everything(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {
        (variant, momentum): on_rank(world, variant, momentum)
        for variant in ("torch", "bucket", "naive")
        for momentum in (0.1, None)
    }
    found["alone"] = alone(world)
    if min(SAMPLES[world.size]) > 1:
        found["apart"] = on_rank(world, "bucket", 0.1, synchronised=False)
    return found


@cache
def ranks_of(size: int) -> list[dict[Any, Any]]:
    if size == 1:
        return [everything(World())]
    return launch(everything, size, device="cpu", threads=1, echo=False, timeout=100)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("variant", ["torch", "bucket", "naive"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_steps_are_those_of_one_process_on_the_union(size: int, variant: str, momentum: float | None) -> None:
    expected = on_union(size, momentum)
    for rank, found in enumerate(each[variant, momentum] for each in ranks_of(size)):
        for mine, all_of_them in zip(found["losses"], expected["losses"], strict=True):
            torch.testing.assert_close(mine, part_of(all_of_them, rank, size), **CLOSE)
        assert list(found["weights"]) == list(expected["weights"]), "loads where BatchNorm loads, and back"
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], **CLOSE)
        torch.testing.assert_close(found["eval"], expected["eval"], **CLOSE)


def test_plain_batch_norm_would_have_been_noticed() -> None:
    expected = on_union(2, 0.1)["weights"]["bn.running_var"]
    means = [rank["apart"]["weights"]["bn.running_var"] for rank in ranks_of(2)]
    assert not torch.equal(*means)
    assert all(not torch.allclose(mean, expected, rtol=1e-3) for mean in means)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_value_for_a_channel_on_all_ranks_is_told_on_each(size: int) -> None:
    assert {rank["alone"] for rank in ranks_of(size)} == {
        "ValueError: 1 value for each channel, on all ranks together: there should be 2 or more"
    }


def test_every_layer_is_replaced_however_deep_and_keeps_its_tensors() -> None:
    net = make_net(0.1)
    bn, statistics = net.bn, net.bn.running_mean
    replaced = synchronise_batch_norm(net, World())
    assert replaced is net
    assert [type(module) for module in net.modules()].count(SyncBatchNorm) == 2
    assert net.bn.weight is bn.weight
    assert net.bn.running_mean is statistics
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    net = synchronise_batch_norm(nn.BatchNorm1d(1), World())
    x = torch.full((4096, 1), 100.0).to(dtype)  # the sum is more than float16 has
    x[::2] = 102
    out = net(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out[:2].flatten().float(), torch.tensor([1.0, -1.0]))


def test_in_eval_mode_nobody_is_asked() -> None:
    net = synchronise_batch_norm(nn.BatchNorm1d(3), World()).eval()
    assert torch.equal(net(torch.zeros(0, 3)), torch.zeros(0, 3))
    assert net(torch.ones(1, 3)).shape == (1, 3)


def test_two_ranks_without_a_group_raise() -> None:
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        synchronise_batch_norm(nn.BatchNorm1d(3), World(0, 2, 0, 2))
