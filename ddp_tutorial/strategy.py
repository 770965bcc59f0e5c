"""How the ranks come to agree on a gradient: one method, `backward`, from the micro-batches of one step."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ddp_tutorial.ddp import DDPConfig, data_parallel
from ddp_tutorial.metrics import Mean
from ddp_tutorial.model import loss_sum
from ddp_tutorial.phases import phase
from ddp_tutorial.sharded import Share
from ddp_tutorial.world import World


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    `inputs` and `targets` are tokens [samples, context] (int64), targets shifted by one. `world_tokens` counts
    the targets of this micro-batch over all ranks; the source knows it, so it costs no communication.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    world_tokens: int


def next_token(share: Share) -> Batch:
    """To predict each token from those before it."""
    tokens = share.samples["tokens"].to(torch.int64)
    return Batch(tokens[:, :-1], tokens[:, 1:], share.world_count * (tokens.shape[1] - 1))


class Strategy(Protocol):
    """After `backward`, every rank holds the gradient of the mean loss over the tokens of all ranks."""

    def backward(self, batches: Sequence[Batch]) -> Mean:
        """Fill `.grad`; return this rank's loss, as a sum and a count."""
        ...


class DDPStrategy:
    """Every rank has the whole model and a part of the batch; the gradients are averaged as `config` says."""

    def __init__(self, model: nn.Module, world: World, config: DDPConfig | None = None) -> None:
        self.world = world
        self.model = data_parallel(model, world, config)

    def backward(self, batches: Sequence[Batch]) -> Mean:
        # Gradients are averaged over ranks: a rank's loss has to be its sum, times the ranks, over the tokens of all.
        scale = self.world.size / sum(batch.world_tokens for batch in batches)
        losses = []
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else self.model.no_sync():  # forward too: torch decides there what to reduce
                with phase("forward"):
                    loss = loss_sum(self.model(batch.inputs), batch.targets)
                with phase("backward"):
                    (loss * scale).backward()
            losses.append(loss.detach())
        with phase("finish"):
            self.model.finish()
        return Mean(torch.stack(losses).sum(), sum(batch.targets.numel() for batch in batches))
