"""The loss on text that the model has not learnt from: the same number, however many ranks compute it."""

import numpy as np
import torch

from ddp_tutorial.accumulation import next_token
from ddp_tutorial.data import Windows
from ddp_tutorial.metrics import Mean, mean_over_ranks
from ddp_tutorial.model import GPT, loss_sum
from ddp_tutorial.precision import Precision
from ddp_tutorial.sharded import Share, to_device
from ddp_tutorial.sharding import deal
from ddp_tutorial.world import World


@torch.no_grad()
def held_out_loss(
    world: World, model: GPT, held_out: Windows, samples: int, size: int, precision: Precision | None = None
) -> float:
    """Mean loss in nats per token over the first `samples` held-out samples, each seen by exactly one rank, `size` at a
    time. Collective; leaves the model in training or not, as it was."""
    precision, was_training = precision or Precision(), model.training
    model.eval()
    count = min(samples, len(held_out))
    mine = deal(np.arange(count), world.rank, world.size)
    loss = Mean(torch.zeros((), device=world.device), 0)
    for start in range(0, len(mine), size):
        indices = mine[start : start + size]
        batch = next_token(Share(to_device(held_out.fetch(indices), world.device), len(indices), count))
        with precision.autocast():
            loss += Mean(loss_sum(model(batch.inputs), batch.targets), batch.tokens)
    model.train(was_training)
    [value] = mean_over_ranks(world, [loss])
    return value
