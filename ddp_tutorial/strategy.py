"""How the ranks come to agree on a gradient: one method, `backward`, from the micro-batches of one step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.metrics import Mean
from ddp_tutorial.model import loss_sum
from ddp_tutorial.sources import Batch
from ddp_tutorial.world import World, require_group


class Strategy(Protocol):
    """After `backward`, every rank holds the gradient of the mean loss over the tokens of all ranks."""

    def backward(self, batches: Sequence[Batch]) -> Mean:
        """Fill `.grad`; return this rank's loss, as a sum and a count."""
        ...


class DDPStrategy:
    """Every rank has the whole model and a part of the batch; torch's DDP averages the gradients during backward.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        require_group(world)
        self.world = world
        self.model = model
        self._no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        if world.size > 1:
            gpu = [world.device.index] if world.device.type == "cuda" else None
            wrapped = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
            self.model, self._no_sync = wrapped, wrapped.no_sync

    def backward(self, batches: Sequence[Batch]) -> Mean:
        # DDP averages over ranks: a rank's loss has to be its sum, times the ranks, over the tokens of all of them.
        scale = self.world.size / sum(batch.world_tokens for batch in batches)
        losses = []
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else self._no_sync():  # forward too: there DDP decides what to reduce
                loss = loss_sum(self.model(batch.inputs), batch.targets)
                (loss * scale).backward()
            losses.append(loss.detach())
        return Mean(torch.stack(losses).sum(), sum(batch.targets.numel() for batch in batches))
