"""The instruments of notebook 17: recorded and delayed collectives, spans of a step, and bytes per rank."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_tutorial import launch
from ddp_tutorial.lessons.sharded_state import Network, Transfer, fastest, spans, state_bytes, watch

FORKED = {"device": "cpu", "threads": 1, "echo": False, "timeout": 120}
MESSAGE = 250_000  # elements, 1 MB


def collectives(world, rate):
    row, full = torch.ones(MESSAGE // world.size), torch.ones(MESSAGE)
    pair = dist.new_group([0, 1])
    with Network(rate) as network:
        begin = time.monotonic()
        dist.all_gather_into_tensor(full, row)
        dist.reduce_scatter_tensor(row, full)
        work = dist.all_to_all_single(torch.empty_like(full), full, async_op=True)
        returned = time.monotonic() - begin
        work.wait()
        took = time.monotonic() - begin
        dist.all_reduce(full)
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(MESSAGE, dtype=torch.int32))
        if world.rank < 2:
            dist.all_reduce(full, group=pair)
    dist.all_reduce(full)  # no longer recorded
    return network.transfers, network.sent("gather"), returned, took


def test_the_network_records_the_bytes_and_the_ranks_of_each_collective():
    for rank, (transfers, gathered, _, _) in enumerate(launch(collectives, 4, None, **FORKED)):
        everyone = [(each.kind, each.nbytes, each.ranks) for each in transfers]
        once = 750_000
        expected = [("gather", once), ("scatter", once), ("scatter", once), ("all-reduce", 2 * once)]
        assert everyone[:4] == [(*each, (0, 1, 2, 3)) for each in expected]
        assert everyone[4:] == ([("all-reduce", 1_000_000, (0, 1))] if rank < 2 else [])
        assert gathered == once


def test_a_slow_link_carries_one_transfer_at_a_time_while_the_rank_computes():
    for transfers, _, returned, took in launch(collectives, 2, 5.0, **FORKED):  # MB/s: 0.1 s for each transfer
        assert [each.kind for each in transfers] == ["gather", "scatter", "scatter"]
        assert all(each.end - each.start > 0.099 for each in transfers)
        assert transfers[2].start >= transfers[1].end >= transfers[0].end + 0.099
        assert returned < took
        assert took > 0.29


def test_spans_are_numbered_by_block():
    computed = {"forward 0": [0.0, 1.0], "forward 1": [1.0, 2.0], "backward 1": [2.0, 3.0], "backward 0": [3.0, 4.0]}
    kinds = ["gather"] * 5 + ["scatter"] * 3 + ["all-reduce"]
    found = spans(computed, [Transfer(kind, 1, (0, 1), 0.0, 1.0) for kind in kinds])
    assert [span.name for span in found if span.lane == "compute"] == list(computed)
    expected = ["gather ", "gather 0", "gather 1", "gather 1", "gather 0", "scatter 1", "scatter 0", "scatter "]
    assert [span.name for span in found if span.lane == "link"] == [*expected, "all-reduce 0"]


def sharded_step(world):
    model, plain = (nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))) for _ in range(2))
    mesh = dist.init_device_mesh("cpu", (world.size,))
    times = watch(plain)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        plain(torch.ones(2, 64)).sum().backward()

    with Network() as network:
        found = fastest({"fsdp": step}, {"fsdp": times}, network, 2)
    return state_bytes(model, optimizer), found["fsdp"]


def test_a_timed_step_has_its_transfers_and_the_times_of_its_blocks():
    for held, step in launch(sharded_step, 2, **FORKED):
        assert held == {"parameters": 16_384, "gradients": 16_384, "optimizer": 32_768}  # half of two 64 x 64
        assert sum(each.nbytes for each in step.transfers if each.kind == "scatter") == 16_384
        assert set(step.computed) == {f"{name} {number}" for name in ("forward", "backward") for number in (0, 1)}
        assert step.seconds > 0
        assert all(0 < begin <= end for begin, end in step.computed.values())
