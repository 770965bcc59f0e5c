"""Correct programs that look wrong. No invariant may report a violation for these programs."""

import math
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.museum.parts import DATA, Program, Result, ddp, loader, net, weights, write
from ddp_tutorial.world import World


def accumulates_without_talking(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world):
        for k, (a, b) in enumerate(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)):
            with model.no_sync() if k < accumulate - 1 else nullcontext():
                (F.mse_loss(model(a), b) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def weighs_ragged_batches(world: World) -> Result:
    model, samples = ddp(), DATA[:21]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _, x, y in zip(*(part.split(7) for part in samples), strict=True):
        mine = slice(world.rank, None, world.size)
        loss = F.mse_loss(model(x[mine]), y[mine], reduction="sum")
        (loss * world.size / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def shuffles_with_one_seed(world: World) -> Result:
    model = ddp()
    seen: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, world.size, world.rank, seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = []
        for numbers, x, y in DataLoader(DATA, 8 // world.size, sampler=sampler):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += numbers.tolist()
    return {"weights": weights(model), "seen": seen}


def draws_one_order_for_all(world: World) -> Result:
    torch.manual_seed(5)  # the same on all ranks, so each rank takes its shard of one order
    order = torch.randperm(24)
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in order.split(8):
        mine = numbers[world.rank :: world.size]
        F.mse_loss(model(DATA[mine][1]), DATA[mine][2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "seen": order[world.rank :: world.size].tolist()}


def drops_out_by_rank(world: World) -> Result:
    model = ddp(nn.Dropout(0.2), nn.LayerNorm(8))
    torch.manual_seed(100 + world.rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def normalises_its_part(world: World) -> Result:
    model = ddp(nn.BatchNorm1d(8))  # per-rank statistics differ from those of one process, but this is not a bug
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def keeps_a_part_frozen(world: World) -> Result:
    body = net(nn.LayerNorm(8))
    body[0].requires_grad_(False)
    model = nn.parallel.DistributedDataParallel(body)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _, x, y in loader(world):
        F.l1_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into, self.out = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(x).tanh()).sum(1, keepdim=True)


def ties_weights(world: World) -> Result:
    model = nn.parallel.DistributedDataParallel(_Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def clips_and_schedules(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for _, x, y in loader(world, batch=4):
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "norm": norm.item(), "rate": schedule.get_last_lr()[0]}


def shares_the_optimizers_state(world: World) -> Result:
    """Shard the optimizer state. The shards differ between ranks, although the replicas are identical."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def joins_those_that_are_done(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = DATA[:15] if world.is_main else DATA[15:]
    with Join([model]):
        for _, x, y in zip(*(part.split(3) for part in mine), strict=True):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {}


def stops_early_together(world: World) -> Result:
    model, losses = ddp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world, batch=4):
        loss = F.mse_loss(model(x), y)
        dist.all_reduce(mean := loss.detach() / world.size)
        losses.append(mean.item())
        if len(losses) > 2 and losses[-1] > losses[-2] > losses[-3]:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "loss": losses[-1]}


def evaluates_on_rank_zero(world: World) -> Result:
    """Evaluate all samples on one rank while the other ranks wait."""
    model = ddp()
    F.mse_loss(model(DATA[:4][1]), DATA[:4][2]).backward()  # all ranks train on the same four samples
    loss = torch.zeros((), dtype=torch.float64)
    if world.is_main:
        with torch.no_grad():
            loss = F.mse_loss(model.module(DATA[:][1]), DATA[:][2])
    dist.broadcast(loss, src=0)
    return {"loss": loss.item()}


def steps_over_an_overflow(world: World, scale: float = 2.0) -> Result:
    model = ddp()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def averages_the_weights_it_has_had(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model.module)
        optimizer.zero_grad()
    return {"weights": weights(average)}


def holds_out_the_end(world: World) -> Result:
    return {"seen": list(range(world.rank, 20, world.size)), "held_out": list(range(20, 24))}


def tells_of_a_signal(world: World) -> Result:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            sys.exit(75)
    return {"weights": weights(model)}


def tries_once_more(world: World) -> Result:
    """Retry the batch after an error. Errors are injected only into single-process runs, so no other rank waits."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world, batch=24):
        try:
            loss = F.mse_loss(model(x), y)
        except RuntimeError:
            loss = F.mse_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def saves_every_other_step(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if path.exists():
        start, of_model, of_optimizer = torch.load(path)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    for step, (_, x, y) in enumerate(loader(world, batch=4)):
        if step >= start:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.is_main and step % 2:
                write(path, (step + 1, model.state_dict(), optimizer.state_dict()))
    return {"weights": weights(model)}


def keeps_its_random_numbers(world: World, folder: Path) -> Result:
    model, start, path = ddp(nn.Dropout(0.3)), 0, folder / f"rank-{world.rank}.pt"
    torch.manual_seed(50 + world.rank)
    numbers = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if path.exists():
        start, of_model, of_optimizer, numbers = torch.load(path)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    for step, (_, x, y) in enumerate(loader(world)):
        if numbers is not None and step == start:
            torch.set_rng_state(numbers)  # now, after the loader has drawn a random number for its workers
        if step >= start:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            write(path, (step + 1, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    return {"weights": weights(model)}


def keeps_the_first_of_equals(losses: list[float]) -> int:
    known = [step for step, loss in enumerate(losses) if not math.isnan(loss)]
    return min(known, key=lambda step: losses[step])


def compares_digests(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    tensors = [*model.state_dict().values()]
    tensors += [value for each in optimizer.state.values() for value in each.values()]
    mine = [tensor.numpy().tobytes() for tensor in tensors]
    of_all: list[Any] = [None] * world.size
    dist.all_gather_object(of_all, mine)
    return all(each == of_all[0] for each in of_all)


CORRECT: tuple[Program, ...] = (
    accumulates_without_talking,
    weighs_ragged_batches,
    shuffles_with_one_seed,
    draws_one_order_for_all,
    drops_out_by_rank,
    normalises_its_part,
    keeps_a_part_frozen,
    ties_weights,
    clips_and_schedules,
    shares_the_optimizers_state,
    joins_those_that_are_done,
    stops_early_together,
    evaluates_on_rank_zero,
    steps_over_an_overflow,
    averages_the_weights_it_has_had,
    holds_out_the_end,
    tells_of_a_signal,
    tries_once_more,
    saves_every_other_step,
    keeps_its_random_numbers,
    keeps_the_first_of_equals,
    compares_digests,
)
