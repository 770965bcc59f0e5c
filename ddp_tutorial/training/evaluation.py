"""Compute the loss and metrics on validation samples, independently of the number of ranks."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, call_loss
from ddp_tutorial.accumulation.loss_check import evaluating
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.config import ConfigError
from ddp_tutorial.rng import preserved_rng
from ddp_tutorial.sharding.permutation import shard_indices
from ddp_tutorial.sharding.samples import Data
from ddp_tutorial.sharding.sharded import to_device
from ddp_tutorial.training.metrics import MakeMetric, state_of, value_of
from ddp_tutorial.world import World


@torch.no_grad()
def evaluate(
    world: World,
    model: nn.Module,
    loss: Loss,
    validation_data: Data,
    count: int,
    batch_size: int,
    precision: Precision | None = None,
    metrics: Mapping[str, MakeMetric] | None = None,
) -> dict[str, float]:
    """Return the mean loss and metrics over the first `count` validation samples, or all samples if there are fewer.

    Collective. Each rank evaluates different samples, `batch_size` at a time, without padding. Each mean is the sum
    over all samples divided by the total count. With sharded weights, a forward pass is collective. Therefore, a rank
    with fewer batches than rank 0 runs an additional forward pass and discards the result. The modules' training modes
    and the random number generators' states are restored, so evaluation does not affect training.

    Raises:
        ConfigError: If the loss and `metrics` define the same metric, or if a metric's value is not a number.
    """
    metrics = metrics or {}
    updated = {name: make() for name, make in metrics.items()}
    precision = precision or Precision(world=world)
    mine, of_rank_zero = (
        shard_indices(np.arange(min(count, len(validation_data))), rank, world.size) for rank in (world.rank, 0)
    )
    sums: dict[str, tuple[float, float]] = {}
    with preserved_rng(world.device), evaluating(model):
        for start in range(0, len(of_rank_zero), batch_size):
            own = mine[start : start + batch_size]
            batch: Any = to_device(validation_data.fetch(own if len(own) else of_rank_zero[:1]), world.device)
            with precision.autocast():
                _, pairs = call_loss(loss, model, batch)
                for name, metric in updated.items():
                    (metric if len(own) else metrics[name]()).update(model, batch)
            if not len(own):
                continue
            for name, (total, counted) in pairs.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(total), before[1] + float(counted)
    states = {name: state_of(metric) for name, metric in updated.items()} if len(mine) else {}
    gathered = all_gather(world, (sums, states))
    of_ranks = [each for each, _ in gathered]  # empty on a rank without samples
    names = dict.fromkeys(name for each in of_ranks for name in each)
    totals = {name: [sum(each[name][i] for each in of_ranks if name in each) for i in range(2)] for name in names}
    means = {name: total / counted if counted else math.nan for name, (total, counted) in totals.items()}
    if both := means.keys() & metrics:
        raise ConfigError(
            f"the loss function and 'metrics' both define a metric named {sorted(both)[0]!r}; rename it in 'metrics'"
        )
    return means | {
        name: value_of(name, metric, [states[name] for _, states in gathered if states])
        for name, metric in updated.items()
    }
