"""Bugs that make gradients differ from the global batch's gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.museum.parts import DATA, Exhibit, Result, ddp, loader, net, pieces, weights
from ddp_tutorial.world import World

# ----------------------------------------------------------------------------------- hooks that receive one micro-batch


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
    model.register_comm_hook(None, lambda _, bucket: _ready(bucket.buffer()))  # disables DDP's averaging
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


# ------------------------------------------------------------------------------------- hooks that receive the parameter


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


# ------------------------------------------------------------------------- parameters and calls that bypass the wrapper


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


def calls_the_wrapper(world: World) -> Result:
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, x, y in loader(world):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self(x), y)


def computes_the_loss_in_the_module(world: World) -> Result:
    model = DistributedDataParallel(_WithLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in loader(world, batch=4):
        model.module.loss(x, y).backward()
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
    """Sum losses over samples. The sum over 8 samples is twice the average of two ranks' sums over 4 samples each."""
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
    for _, x, y in zip(*(part.split(7) for part in samples), strict=True):  # 4 and 3 samples on two ranks
        F.mse_loss(model(x[world.rank :: world.size]), y[world.rank :: world.size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model)}


GRADIENTS = (
    Exhibit(
        "gradients",
        "A `register_hook` hook receives the current micro-batch's gradient, not the accumulated gradient. The ranks "
        "average only the last micro-batch's gradient.",
        "The loss falls without an error. With one micro-batch, the gradients are correct.",
        reduces_the_last_micro_batch,
        reduces_what_was_accumulated,
        ("drift", "one process"),
        (reduces_one_layers_last_micro_batch,),
    ),
    Exhibit(
        "gradients",
        "A `register_post_accumulate_grad_hook` hook receives the parameter. This hook treats the parameter as a "
        "gradient, so the ranks average their weights, but not their gradients.",
        "The loss falls almost as expected.",
        averages_weights,
        averages_gradients,
        ("drift", "one process"),
        (averages_weights_before_adam,),
    ),
    Exhibit(
        "gradients",
        "The loss is a sum over samples, but DDP averages over ranks, so every additional rank shrinks the gradient.",
        "The loss falls more slowly with two ranks than with one.",
        sums_the_loss,
        divides_the_sum_by_all_samples,
        ("one process",),
        (adds_gradients_up, averages_unequal_batches),
    ),
    Exhibit(
        "gradients",
        "Clipping runs before `unscale_`, when the gradients are still multiplied by the scale (by default, 65,536).",
        "The model learns as slowly as with a tiny learning rate.",
        clips_before_unscaling,
        clips_after_unscaling,
        ("division",),
        (clips_values_before_unscaling,),
    ),
    Exhibit(
        "gradients",
        "The DDP constructor registers the parameters that require gradients. DDP never averages the gradients of "
        "parameters that are unfrozen or added later.",
        "No symptom. The checkpoint contains rank 0's layer.",
        unfreezes_after_wrapping,
        unfreezes_before_wrapping,
        ("drift", "one process"),
        (adds_a_layer_after_wrapping,),
    ),
    Exhibit(
        "gradients",
        "On CPUs, the program does not wrap the model in DDP, so each rank trains its own model.",
        "No symptom. Steps are fast, because the ranks do not communicate.",
        wraps_on_gpus_only,
        wraps_everywhere,
        ("drift", "one process"),
        (never_leaves_no_sync,),
    ),
    Exhibit(
        "gradients",
        "The forward pass calls `model.module` instead of the DDP wrapper, so DDP does not average the gradients.",
        "No symptom. The checkpoint contains rank 0's model, which was trained only on rank 0's samples.",
        goes_past_the_wrapper,
        calls_the_wrapper,
        ("drift", "one process"),
        (computes_the_loss_in_the_module,),
    ),
)
