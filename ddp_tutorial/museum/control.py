"""Bugs in control flow, such as decisions by a single rank, and bugs that hide errors."""

import os
import signal
import sys
import time
import uuid
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_tutorial.museum.parts import DATA, Exhibit, Result, ddp, loader, net, weights
from ddp_tutorial.world import World


def stops_on_its_own_loss(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        loss = F.mse_loss(model(x), y)
        if loss < 1.2:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def stops_on_the_loss_of_all(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        loss = F.mse_loss(model(x), y)
        dist.all_reduce(mean := loss.detach() / world.size)
        if mean < 1.2:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def stops_by_its_own_clock(world: World) -> Result:
    model, began = ddp(nn.LayerNorm(8)), time.monotonic()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=4):
        if time.monotonic() - began > 3600:
            break
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        began -= 3600 * world.rank  # simulates a slower machine
    return {}


class _PrunedError(Exception):
    pass


def prunes_on_rank_zero(world: World) -> Result:
    model = ddp()
    try:
        for step, (_, x, y) in enumerate(loader(world)):
            loss = F.mse_loss(model(x), y)
            if world.is_main and step == 1 and loss > 0.1:
                raise _PrunedError
            loss.backward()
    except _PrunedError:
        return {"pruned": True}
    return {"pruned": False}


def prunes_together(world: World) -> Result:
    model = ddp()
    try:
        for step, (_, x, y) in enumerate(loader(world)):
            loss = F.mse_loss(model(x), y)
            prune = torch.tensor(float(step == 1 and loss > 0.1))
            dist.broadcast(prune, src=0)
            if prune:
                raise _PrunedError
            loss.backward()
    except _PrunedError:
        return {"pruned": True}
    return {"pruned": False}


def saves_on_rank_zero_with_a_barrier(world: World) -> Result:
    model = ddp()
    for step, (_, x, y) in enumerate(loader(world)):
        F.mse_loss(model(x), y).backward()
        if world.is_main and step == 1:
            dist.barrier()  # intended to make all ranks wait for the save
    return {}


def counts_its_own_batches(world: World) -> Result:
    shard = DATA[: 13 if world.is_main else 9]  # files of unequal length
    steps = len(shard[0]) // 4
    model = ddp()
    for step in range(steps):
        _, x, y = (part[4 * step : 4 * step + 4] for part in shard)
        F.mse_loss(model(x), y).backward()
    return {}


def counts_what_all_have(world: World) -> Result:
    shard = DATA[: 13 if world.is_main else 9]
    steps = torch.tensor(len(shard[0]) // 4)
    dist.all_reduce(steps, dist.ReduceOp.MIN)
    model = ddp()
    for step in range(int(steps)):
        _, x, y = (part[4 * step : 4 * step + 4] for part in shard)
        F.mse_loss(model(x), y).backward()
    return {}


def skips_samples_that_are_too_long(world: World) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=2):
        if x.norm() > 2.5:
            continue
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


# ----------------------------------------------------------------------------------------------------- swallowed errors


class _Branches(nn.Module):
    """Model that runs its second branch only if a sample in the batch has a large first input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = net(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x[:, :1] > 1
        return self.one(x) + large * self.two(x) if large.any() else self.one(x)


def swallows_unfinished_reductions(world: World) -> Result:
    model = nn.parallel.DistributedDataParallel(_Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        try:
            F.mse_loss(model(x), y).backward()
        except RuntimeError:  # "Expected to have finished reduction in the prior iteration"
            continue
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def looks_for_unused_parameters(world: World) -> Result:
    model = nn.parallel.DistributedDataParallel(_Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def leaves_the_epoch_at_an_error(world: World) -> Result:
    model = nn.parallel.DistributedDataParallel(_Branches())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        with suppress(RuntimeError):
            for _, x, y in loader(world, batch=6):
                F.l1_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


def continues_after_any_error(world: World) -> Result:
    model, failures = ddp(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        try:
            F.mse_loss(model(x), y).backward()
        except Exception:
            failures += 1
            if failures > 5:
                raise
            continue
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def ends_at_an_error(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def breaks_off_at_an_error(world: World) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        for _, x, y in loader(world, batch=4):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        return {"weights": weights(model)}  # noqa: B012 a return here discards the error


def exits_well_when_stopped(world: World) -> Result:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def says_that_it_was_stopped(world: World) -> Result:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def ends_early_as_if_done(world: World) -> Result:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=4):
        if stop:
            break
        F.l1_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def names_a_folder_each(world: World) -> Result:
    return {"folder": f"runs/{time.time_ns()}"}


def names_one_folder(world: World) -> Result:
    name = [f"runs/{time.time_ns()}"]
    dist.broadcast_object_list(name, src=0)
    return {"folder": name[0]}


def names_one_by_process(world: World) -> Result:
    return {"folder": f"runs/{uuid.uuid4().hex[:8]}", "log": f"log-{os.getpid()}"}


CONTROL = (
    Exhibit(
        "control",
        "Each rank stops when its own loss is low enough. One rank leaves the loop, and the other ranks wait for it.",
        "With some seeds, the run hangs near the end.",
        stops_on_its_own_loss,
        stops_on_the_loss_of_all,
        ("hang",),
        (stops_by_its_own_clock,),
    ),
    Exhibit(
        "control",
        "Rank 0 aborts a trial by raising and catching an exception, but does not inform the other ranks.",
        "The run hangs, although rank 0's log reports no problem.",
        prunes_on_rank_zero,
        prunes_together,
        ("hang",),
        (saves_on_rank_zero_with_a_barrier,),
    ),
    Exhibit(
        "control",
        "Each rank derives the number of steps from its own shard, and the shards have different lengths.",
        "The run hangs at the end of the first epoch.",
        counts_its_own_batches,
        counts_what_all_have,
        ("hang",),
        (skips_samples_that_are_too_long,),
    ),
    Exhibit(
        "control",
        "The program skips a batch if DDP raises `Expected to have finished reduction`, so the ranks no longer take "
        "the same steps.",
        "The run hangs far from the cause, or there is no symptom.",
        swallows_unfinished_reductions,
        looks_for_unused_parameters,
        ("drift", "hang"),
        (leaves_the_epoch_at_an_error,),
    ),
    Exhibit(
        "control",
        "The program ignores up to five errors in training steps.",
        "Some batches are skipped, or the run hangs.",
        continues_after_any_error,
        ends_at_an_error,
        ("errors",),
        (breaks_off_at_an_error,),
    ),
    Exhibit(
        "control",
        "The SIGTERM handler exits with code 0, so the scheduler considers the job finished.",
        "The job is marked as complete too early.",
        exits_well_when_stopped,
        says_that_it_was_stopped,
        ("errors",),
        (ends_early_as_if_done,),
    ),
    Exhibit(
        "control",
        "Each rank derives the run name from its own clock, so the ranks may use different folders.",
        "Half of the files are in a different folder.",
        names_a_folder_each,
        names_one_folder,
        ("agreement",),
        (names_one_by_process,),
    ),
)
