"""Collectives are compared before they run, on real ranks, in cases that torch and gloo would accept."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.debug import CollectiveError, fingerprinted
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World


def caught(fn, size=2):
    with pytest.raises(RankError) as error:
        launch(fn, size, device="cpu", echo=False, timeout=300)
    assert error.value.is_a(CollectiveError), error.value
    return error.value


def different_sizes(world: World) -> None:
    numbers = torch.ones(3 if world.rank else 5)
    with fingerprinted(world):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(numbers)


def test_different_sizes_are_reported_before_a_rank_has_a_wrong_sum() -> None:
    error = caught(different_sizes)
    assert "the ranks pass different tensors to the same all_reduce" in error.message
    assert "ank 0 waits in all_reduce [5] float32" in error.message
    assert "ank 1 waits in all_reduce [3] float32" in error.message
    line = different_sizes.__code__.co_firstlineno + 4
    assert error.message.count(f"line {line}, in different_sizes") == 2
    assert ">  2" in error.message


def different_types(world: World) -> None:
    with fingerprinted(world):
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if world.rank else torch.float32))


def different_order(world: World) -> None:
    with fingerprinted(world):
        if world.rank:
            dist.broadcast(torch.ones(3), 0)
        else:
            dist.all_reduce(torch.ones(3))


def different_roots(world: World) -> None:
    with fingerprinted(world):
        dist.broadcast(torch.ones(3), src=world.rank)


def beside_backward(world: World) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with fingerprinted(world):
        loss = model(torch.ones(1, 2)).sum()
        if world.rank:
            dist.broadcast(torch.ones(3), 0)
        loss.backward()


@pytest.mark.parametrize(
    ("fn", "first", "second"),
    [
        (different_types, "all_reduce [4] float32", "all_reduce [4] float64"),
        (different_order, "all_reduce [3] float32", "broadcast from 0 [3] float32"),
        (different_roots, "broadcast from 0 [3] float32", "broadcast from 1 [3] float32"),
        (beside_backward, "all_reduce [6] float32", "broadcast from 0 [3] float32"),
    ],
)
def test_any_difference_is_reported_with_both_sides(fn, first, second) -> None:
    message = caught(fn).message
    assert f"ank 0 waits in {first}" in message
    assert f"ank 1 waits in {second}" in message


def correct(world: World) -> tuple[list[float], float, list[int]]:
    torch.manual_seed(world.rank)
    model = DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    pair = dist.new_group([1, 2])
    said = [0] * world.size
    with fingerprinted(world):
        for _ in range(3):
            with model.no_sync():
                model(torch.randn(world.rank + 1, 2)).sum().backward()
            model(torch.randn(world.rank + 1, 2)).sum().backward()
        if world.rank:  # a subgroup: the other ranks do not participate, and their numbering is unchanged
            dist.all_reduce(torch.ones(world.size), group=pair)
        dist.all_gather_object(said, "a word of another length" * world.rank)
        dist.barrier()
        numbers = torch.ones(2)
        dist.all_reduce(numbers, async_op=True).wait()
        if world.rank == 0:
            dist.send(numbers, 1)
        elif world.rank == 1:
            dist.recv(numbers, 0)
        for step in range(120):  # more collectives than fingerprints are kept
            dist.broadcast(numbers, step % world.size)
    return model.module.weight.grad.flatten().tolist(), float(numbers[0]), [len(each) for each in said]


def test_matching_collectives_run_unchanged() -> None:
    results = launch(correct, 3, device="cpu", echo=False, timeout=300)
    assert results[0] == results[1] == results[2]
    assert results[0][1:] == (3.0, [0, 24, 48])


def test_a_single_rank_has_no_differences() -> None:
    with fingerprinted(World()):
        assert torch.ones(2).sum() == 2
