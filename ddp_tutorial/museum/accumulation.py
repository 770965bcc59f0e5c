"""Bugs in gradient accumulation over several micro-batches."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from ddp_tutorial.museum.parts import Exhibit, Result, ddp, loader, pieces, weights
from ddp_tutorial.world import World


def adds_micro_batches_up(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k, x, y in pieces(world, accumulate):
        F.mse_loss(model(x), y).backward()
        if k == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def averages_micro_batches(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k, x, y in pieces(world, accumulate):
        (F.mse_loss(model(x), y) / accumulate).backward()
        if k == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def divides_by_ranks_not_pieces(world: World, accumulate: int = 2) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k, x, y in pieces(world, accumulate):
        loss = F.l1_loss(model(x), y)
        (loss / world.size * 2).backward()
        if k == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def steps_at_zero(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (_, x, y) in enumerate(pieces(world, accumulate)):
        (F.mse_loss(model(x), y) / accumulate).backward()
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def steps_at_the_last(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (_, x, y) in enumerate(pieces(world, accumulate)):
        (F.mse_loss(model(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def steps_before_the_last(world: World, accumulate: int = 2) -> Result:
    model, since = ddp(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, x, y in pieces(world, accumulate):
        if since == accumulate:  # checked before this micro-batch, but never after the last
            optimizer.step()
            optimizer.zero_grad()
            since = 0
        (F.mse_loss(model(x), y) / accumulate).backward()
        since += 1
    if accumulate == 1:
        optimizer.step()
    return {"weights": weights(model)}


def leaks_into_the_next_epoch(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(world, 8 // accumulate, samples=20)
    for _ in range(2):
        for i, (_, x, y) in enumerate(batches):
            (F.mse_loss(model(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


def ends_each_epoch_with_a_step(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(world, 8 // accumulate, samples=20)
    for _ in range(2):
        for i, (_, x, y) in enumerate(batches):
            together = min(accumulate, len(batches) - i // accumulate * accumulate)
            (F.mse_loss(model(x), y) / together).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


def forgets_the_rest_of_an_epoch(world: World, accumulate: int = 2) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()  # nothing leaks: the remainder is discarded
        for i, (_, x, y) in enumerate(loader(world, 8 // accumulate, samples=20)):
            (F.l1_loss(model(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


def enables_sync_after_the_forward_pass(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k, x, y in pieces(world, accumulate):
        loss = F.mse_loss(model(x), y) / accumulate
        model.require_backward_grad_sync = k == accumulate - 1
        loss.backward()
        if k == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def enables_sync_before_the_forward_pass(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k, x, y in pieces(world, accumulate):
        with model.no_sync() if k < accumulate - 1 else nullcontext():
            (F.mse_loss(model(x), y) / accumulate).backward()
        if k == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def runs_all_forward_passes_without_sync(world: World, accumulate: int = 2) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world):
        with model.no_sync() if accumulate > 1 else nullcontext():
            losses = [F.l1_loss(model(a), b) for a, b in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


ACCUMULATION = (
    Exhibit(
        "gradients",
        "DDP decides in the forward pass whether to synchronize. The program enables synchronization between the "
        "forward and the backward pass of the last micro-batch.",
        "The loss falls, but more slowly than without accumulation.",
        enables_sync_after_the_forward_pass,
        enables_sync_before_the_forward_pass,
        ("drift", "division"),
        (runs_all_forward_passes_without_sync,),
    ),
    Exhibit(
        "gradients",
        "Micro-batch gradients are summed instead of averaged, so the effective learning rate grows with the number "
        "of micro-batches.",
        "No symptom, or the loss diverges.",
        adds_micro_batches_up,
        averages_micro_batches,
        ("division",),
        (divides_by_ranks_not_pieces,),
    ),
    Exhibit(
        "gradients",
        "`i % accumulate == 0` is true for the first micro-batch, so the program takes a step after this micro-batch, "
        "but not after the last one.",
        "No symptom.",
        steps_at_zero,
        steps_at_the_last,
        ("division",),
        (steps_before_the_last,),
    ),
    Exhibit(
        "gradients",
        "An epoch ends during an accumulation, and the remaining gradients are added to the next epoch's gradients.",
        "No symptom.",
        leaks_into_the_next_epoch,
        ends_each_epoch_with_a_step,
        ("division",),
        (forgets_the_rest_of_an_epoch,),
    ),
)
