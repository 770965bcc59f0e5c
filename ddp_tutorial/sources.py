"""Which samples does this rank see next, and how is that resumed?

A source gives, step after step, the micro-batches of one optimiser step. Its state is one number, the cursor.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding import deal, take
from ddp_tutorial.world import World


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    `inputs` and `targets` are tokens [samples, context] (int64), targets shifted by one. `world_tokens` counts
    the targets of this micro-batch over all ranks; the index arithmetic knows it, so it costs no communication.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    world_tokens: int


class Source(Protocol):
    """An endless iterator over steps."""

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next optimiser step, on this rank."""
        ...

    def state(self) -> dict[str, int]: ...

    def restore(self, state: dict[str, int]) -> None: ...


class ShardedSource:
    """Windows of `context` tokens over a corpus in memory; every rank reads its own part of each step's batch."""

    def __init__(self, tokens: torch.Tensor, context: int, batch_size: int, seed: int, world: World) -> None:
        self.tokens, self.context, self.batch_size = tokens, context, batch_size
        self.seed, self.world = seed, world
        self.samples = count_samples(tokens, context)
        self.cursor = 0  # samples that the whole world has consumed
        if self.samples < batch_size:
            raise ConfigError(
                f"the corpus has {self.samples} samples of {context} tokens, too few for one batch of {batch_size}. "
                "Use more text, a smaller batch_size or a smaller model.context."
            )

    def __next__(self) -> list[Batch]:
        indices = take(self.samples, self.seed, self.cursor, self.batch_size)
        self.cursor += self.batch_size
        mine = deal(indices, self.world.rank, self.world.size)
        return [read_batch(self.tokens, self.context, mine, len(indices), self.world.device)]

    def state(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def restore(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]


def count_samples(tokens: torch.Tensor, context: int) -> int:
    """How many windows of `context` tokens there are; each needs one more, the target of its last."""
    return max(0, len(tokens) - 1) // context


def read_batch(
    tokens: torch.Tensor, context: int, indices: torch.Tensor, world_samples: int, device: torch.device
) -> Batch:
    """The windows at `indices` [n], as inputs and targets [n, context] on `device`."""
    positions = indices[:, None] * context + torch.arange(context + 1)
    window = tokens[positions].to(device, torch.int64, non_blocking=True)
    return Batch(window[:, :-1], window[:, 1:], world_samples * context)
