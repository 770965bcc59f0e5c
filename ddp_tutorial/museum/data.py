"""Bugs that repeat samples, skip samples, or assign samples to the wrong split."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, random_split

from ddp_tutorial.museum.parts import DATA, Exhibit, Result, ddp, loader, net, weights
from ddp_tutorial.world import World


def splits_by_rank(world: World) -> Result:
    torch.manual_seed(world.rank)
    train, test = random_split(DATA, [16, 8])
    mine: DistributedSampler[Any] = DistributedSampler(train, world.size, world.rank, shuffle=False)
    seen = [int(number) for batch, *_ in DataLoader(train, 4, sampler=mine) for number in batch]
    return {"seen": seen, "held_out": list(test.indices)}


def splits_alike(world: World) -> Result:
    torch.manual_seed(world.rank)
    train, test = random_split(DATA, [16, 8], generator=torch.Generator().manual_seed(0))
    mine: DistributedSampler[Any] = DistributedSampler(train, world.size, world.rank, shuffle=False)
    seen = [int(number) for batch, *_ in DataLoader(train, 4, sampler=mine) for number in batch]
    return {"seen": seen, "held_out": list(test.indices)}


def shuffles_files_by_rank(world: World) -> Result:
    files = [list(range(k, k + 4)) for k in range(0, 24, 4)]
    random.Random(f"seed {world.rank}").shuffle(files)
    order = [number for file in files for number in file]
    train, test = order[:16], order[16:]
    return {"seen": train[world.rank :: world.size], "held_out": test}


# -------------------------------------------------------------------------------------------------------- sharded twice


def deals_twice(world: World) -> Result:
    mine = Subset(DATA, range(world.rank, len(DATA), world.size))
    again: DistributedSampler[Any] = DistributedSampler(mine, world.size, world.rank)
    return {"seen": [int(number) for batch, *_ in DataLoader(mine, 4, sampler=again) for number in batch]}


def deals_once(world: World) -> Result:
    mine = Subset(DATA, range(world.rank, len(DATA), world.size))
    return {"seen": [int(number) for batch, *_ in DataLoader(mine, 4, shuffle=True) for number in batch]}


def skips_batches_of_its_own(world: World) -> Result:
    batches = enumerate(loader(world, batch=4))
    return {"seen": [int(n) for i, (numbers, *_) in batches if i % world.size == world.rank for n in numbers]}


class _Stream(IterableDataset[int]):
    """Stream of this rank's sample indices (from 0 to 23), grouped by simulated `DataLoader` worker.

    The bug is that the indices, which are already sharded by rank, are sharded again across all ranks' workers.
    """

    def __init__(self, world: World, readers: int) -> None:
        self.world, self.readers = world, readers

    def __iter__(self) -> Iterator[int]:
        world = self.world
        for reader in range(self.readers):  # simulates parallel workers
            place = world.rank * self.readers + reader
            mine = islice(range(24), world.rank, None, world.size)
            yield from islice(mine, place, None, world.size * self.readers)


def offsets_each_worker_twice(world: World) -> Result:
    return {"seen": list(_Stream(world, readers=2))}


def reads_all_on_each_rank(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    for numbers, x, y in DataLoader(DATA, 4, shuffle=False):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers.tolist()
    return {"seen": seen}


def reads_its_share(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    for numbers, x, y in DataLoader(DATA, 4, sampler=DistributedSampler(DATA, world.size, world.rank, shuffle=False)):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers.tolist()
    return {"seen": seen}


def shares_out_with_another_order(world: World) -> Result:
    """Shard the sample order by rank, but shuffle the samples with a different seed on each rank."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(world.rank)).tolist()
    return {"seen": order[world.rank :: world.size]}


# --------------------------------------------------------------------------------------------------------------- epochs


def never_sets_the_epoch(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, world.size, world.rank, shuffle=True)
    orders: list[list[int]] = []
    for _ in range(3):
        orders.append([])
        for numbers, x, y in DataLoader(DATA, 8 // world.size, sampler=sampler):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            orders[-1] += numbers.tolist()
    return {"weights": weights(model), "orders": orders}


def sets_the_epoch(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, world.size, world.rank, shuffle=True)
    orders: list[list[int]] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append([])
        for numbers, x, y in DataLoader(DATA, 8 // world.size, sampler=sampler):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            orders[-1] += numbers.tolist()
    return {"weights": weights(model), "orders": orders}


def reseeds_in_each_epoch(world: World) -> Result:
    """Set the same seed in every epoch, so that every epoch uses the same order."""
    orders: list[list[int]] = []
    for _ in range(2):
        torch.manual_seed(5)
        orders.append(torch.randperm(24)[world.rank :: world.size].tolist())
    return {"orders": orders}


# ------------------------------------------------------------------------------------------------------- random numbers


def draws_the_same_noise(world: World) -> Result:
    torch.manual_seed(0)
    model = ddp(nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def draws_its_own_noise(world: World) -> Result:
    torch.manual_seed(0)
    model = ddp(nn.Dropout(0.5))
    torch.manual_seed(1 + world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + 0.1 * torch.randn_like(x))


def augments_alike(world: World) -> Result:
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(_Noisy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


# -------------------------------------------------------------------------------------------------------------- padding


def evaluates_padding(world: World) -> Result:
    data, model = Subset(DATA, range(23)), net()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.size, world.rank, shuffle=False)
    found = torch.zeros(2, dtype=torch.float64)
    for _, x, y in DataLoader(data, 4, sampler=sampler):
        found += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    dist.all_reduce(found)
    return {"loss": (found[0] / found[1]).item()}


def evaluates_each_sample(world: World) -> Result:
    data, model = Subset(DATA, range(23)), net()
    mine = range(world.rank, len(data), world.size)
    found = torch.zeros(2, dtype=torch.float64)
    for _, x, y in DataLoader(data, 4, sampler=mine):
        found += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    dist.all_reduce(found)
    return {"loss": (found[0] / found[1]).item()}


def evaluates_all_but_the_rest(world: World) -> Result:
    data, model = Subset(DATA, range(21)), net(nn.LayerNorm(8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.size, world.rank, drop_last=True)
    right = torch.zeros(2, dtype=torch.float64)
    for _, x, y in DataLoader(data, 2, sampler=sampler):
        right += torch.tensor([(model(x) - y).abs().lt(1).sum(), len(x)])
    dist.all_reduce(right)
    return {"right": right[0].item(), "of": right[1].item()}


SAMPLES = (
    Exhibit(
        "data",
        "Without `set_epoch`, `DistributedSampler` shuffles with the same seed in every epoch.",
        "No symptom. The model sees the same batches in every epoch.",
        never_sets_the_epoch,
        sets_the_epoch,
        ("epochs",),
        (reseeds_in_each_epoch,),
    ),
    Exhibit(
        "data",
        "The random split into training and test samples uses a different seed on each rank, so a rank trains on "
        "other ranks' test samples.",
        "The test loss is too low.",
        splits_by_rank,
        splits_alike,
        ("once",),
        (shuffles_files_by_rank,),
    ),
    Exhibit(
        "data",
        "A sampler shards a dataset that is already sharded, so half of the samples are never used.",
        "An epoch takes half of the expected time.",
        deals_twice,
        deals_once,
        ("once",),
        (skips_batches_of_its_own, offsets_each_worker_twice),
    ),
    Exhibit(
        "data",
        "Without a sampler, each rank reads the whole dataset, and all ranks do the same work.",
        "The replicas are identical, but two ranks are no faster than one.",
        reads_all_on_each_rank,
        reads_its_share,
        ("once", "copies"),
        (shares_out_with_another_order,),
    ),
    Exhibit(
        "data",
        "All ranks use the same seed, so dropout draws the same mask on each rank.",
        "No visible symptom. The noise does not average out.",
        draws_the_same_noise,
        draws_its_own_noise,
        ("copies",),
        (augments_alike,),
    ),
    Exhibit(
        "data",
        "`DistributedSampler` repeats samples so that all shards have the same length. The test loss counts the "
        "repeated samples twice.",
        "The test loss depends on the number of ranks.",
        evaluates_padding,
        evaluates_each_sample,
        ("one process",),
        (evaluates_all_but_the_rest,),
    ),
)
