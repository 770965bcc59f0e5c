"""Gradients that are not those of the whole batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.museum.parts import DATA, Exhibit, Result, ddp, loader, net, pieces, weights
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------ a hook sees one micro-batch


def reduces_the_last_micro_batch(world: World, accumulate: int = 2) -> Result:
    model, syncing = net(), False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def average(gradient: torch.Tensor) -> torch.Tensor:
        if syncing:
            dist.all_reduce(gradient)
            gradient = gradient / world.size
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(average)
    for k, x, y in pieces(world, accumulate):
        syncing = k == accumulate - 1
        (F.mse_loss(model(x), y) / accumulate).backward()
        if syncing:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def reduces_what_was_accumulated(world: World, accumulate: int = 2) -> Result:
    model, syncing = net(), False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def average(parameter: torch.Tensor) -> None:
        if syncing and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    for k, x, y in pieces(world, accumulate):
        syncing = k == accumulate - 1
        (F.mse_loss(model(x), y) / accumulate).backward()
        if syncing:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def reduces_one_layers_last_micro_batch(world: World, accumulate: int = 3) -> Result:
    model, calls = ddp(), 0
    model.register_comm_hook(None, lambda _, bucket: _ready(bucket.buffer()))  # nothing: the hooks below do it
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % accumulate == 0:
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
        return gradient

    model.module[2].weight.register_hook(hook)
    for k, x, y in pieces(world, accumulate, batch=12):
        (F.mse_loss(model(x), y) / accumulate).backward()
        if k == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model)}


def _ready(tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


# ----------------------------------------------------------------------------------- a hook that is given the parameter


def averages_weights(world: World) -> Result:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def average(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= world.size

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def averages_gradients(world: World) -> Result:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def averages_weights_before_adam(world: World) -> Result:
    model = net(nn.LayerNorm(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=4):
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def adds_gradients_up(world: World) -> Result:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


# ------------------------------------------------------------------------------------------------------------- clipping


def clips_before_unscaling(world: World, scale: float = 1024.0) -> Result:
    model, scaler = ddp(), GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def clips_after_unscaling(world: World, scale: float = 1024.0) -> Result:
    model, scaler = ddp(), GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def clips_values_before_unscaling(world: World, scale: float = 512.0) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _, x, y in loader(world):
        (scale * F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


# ------------------------------------------------------------------------------------------ what the wrapper cannot see


def unfreezes_after_wrapping(world: World) -> Result:
    body = net()
    body[0].requires_grad_(False)
    model = DistributedDataParallel(body)
    body[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def unfreezes_before_wrapping(world: World) -> Result:
    body = net()
    body[0].requires_grad_(False)
    body[0].requires_grad_(True)
    model = DistributedDataParallel(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def adds_a_layer_after_wrapping(world: World) -> Result:
    model = ddp(nn.Identity())
    model.module[2] = nn.LayerNorm(8).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, x, y in loader(world, batch=4):
        F.l1_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def wraps_on_gpus_only(world: World) -> Result:
    model: nn.Module = net()
    if world.device.type == "cuda":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def wraps_everywhere(world: World) -> Result:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def goes_past_the_wrapper(world: World) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world):
        F.mse_loss(model.module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def never_leaves_no_sync(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _, x, y in loader(world):
        with model.no_sync():
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def sums_the_loss(world: World) -> Result:
    """A sum over 8 samples in one process is twice the average of the sums over 4 and 4."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def divides_the_sum_by_all_samples(world: World) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, x, y in loader(world):
        (world.size * F.mse_loss(model(x), y, reduction="sum")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


def averages_unequal_batches(world: World) -> Result:
    model, samples = ddp(), DATA[:21]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _, x, y in zip(*(part.split(7) for part in samples), strict=True):  # 4 and 3 on two ranks
        F.mse_loss(model(x[world.rank :: world.size]), y[world.rank :: world.size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


GRADIENTS = (
    Exhibit(
        "gradients",
        "With accumulation, a hook of `register_hook` is given the gradient of this micro-batch, not the sum so far; "
        "ranks exchange the last micro-batch and keep their own of the others.",
        "The loss falls, no error; with one micro-batch, all is right.",
        reduces_the_last_micro_batch,
        reduces_what_was_accumulated,
        ("drift", "one process"),
        (reduces_one_layers_last_micro_batch,),
    ),
    Exhibit(
        "gradients",
        "`register_post_accumulate_grad_hook` hands over the parameter. Taken for the gradient, it is the weights that "
        "are averaged, and each rank steps with a gradient of its own.",
        "The loss falls nearly as it should.",
        averages_weights,
        averages_gradients,
        ("drift", "one process"),
        (averages_weights_before_adam,),
    ),
    Exhibit(
        "gradients",
        "Losses are summed over samples, and DDP averages over ranks: the gradient shrinks with each rank more.",
        "Two ranks learn more slowly than one.",
        sums_the_loss,
        divides_the_sum_by_all_samples,
        ("one process",),
        (adds_gradients_up, averages_unequal_batches),
    ),
    Exhibit(
        "gradients",
        "Clipping comes before `unscale_`, so that the limit holds for gradients that are a thousand times too large.",
        "It learns, as slowly as with a tiny learning rate.",
        clips_before_unscaling,
        clips_after_unscaling,
        ("division",),
        (clips_values_before_unscaling,),
    ),
    Exhibit(
        "gradients",
        "DDP takes hold of parameters that need a gradient when it is made. What is unfrozen or added after that is "
        "never averaged.",
        "Nothing; rank 0's checkpoint has rank 0's layer.",
        unfreezes_after_wrapping,
        unfreezes_before_wrapping,
        ("drift", "one process"),
        (adds_a_layer_after_wrapping,),
    ),
    Exhibit(
        "gradients",
        "On a CPU the model is not wrapped, though the script was started on several ranks: each trains alone.",
        "Nothing, and the ranks are fast.",
        wraps_on_gpus_only,
        wraps_everywhere,
        ("drift", "one process"),
        (goes_past_the_wrapper, never_leaves_no_sync),
    ),
)
