"""What all trainers train: a model, samples, a loss, an optimizer and its schedule, and how many steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from ddp_tutorial.examples import digits as example
from ddp_tutorial.sharding.corpus import load_corpus
from ddp_tutorial.sharding.samples import TokenBlocks
from ddp_tutorial.training.gpt import GPT

Batch = dict[str, Tensor]

LONG = {0, 2, 4, 6, 8}  # of 16 stories: however they are dealt out, one by one or in runs, one rank has more to tell


class Samples(Dataset[Batch]):
    """A map-style dataset of dictionaries, which is what the Trainers of others take; the same object for all."""

    def __init__(self, rows: list[Batch]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


@dataclass(frozen=True)
class Work:
    """Each rank has `per_rank` samples in each of `steps` steps. An epoch is over when all samples have been seen."""

    model: Callable[[], nn.Module]  # always with the same weights
    loss: Callable[[Any, Batch], tuple[Tensor, Any]]  # a sum over what a batch has, and of how many
    samples: Dataset[Batch]
    per_rank: int
    steps: int
    learning_rate: float = 3e-3
    clip: float = 1.0  # largest norm of the gradient
    shuffle: bool = False  # the samples, in another way in each epoch; or else they come in the order in which they lie
    save_after: int | None = None  # a step, after which a checkpoint is written into the working directory
    resume: bool = False  # from that checkpoint

    def mean(self, model: Any, batch: Batch) -> Tensor:
        """The loss as most scripts have it: a mean over the samples of this rank."""
        total, count = self.loss(model, batch)
        return total / count

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.1, fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """A line up for a tenth of the steps, then half a cosine down to nothing. To be stepped after each step."""
        warm = max(1, self.steps // 10)

        def factor(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            return (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def first(self, count: int) -> "Work":
        """The same with the first `count` samples only."""
        return replace(self, samples=Subset(self.samples, range(count)))


def digits(steps: int = 40, per_rank: int = 16) -> Work:
    """The convolutional net of `examples/digits.py`, whose BatchNorm sees the samples of its own rank."""
    pixels, numbers = example.images("train").tensors

    def model() -> nn.Module:
        torch.manual_seed(0)
        return example.Net()

    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["pixels"]), batch["digit"], reduction="sum"), len(batch["digit"])

    rows = [{"pixels": image, "digit": digit} for image, digit in zip(pixels, numbers, strict=True)]
    return Work(model, loss, Samples(rows), per_rank, steps)


def perceptron(steps: int = 20, per_rank: int = 4, *, dropout: float = 0.0) -> Work:
    """Two layers on 64 of the digits, so that an epoch is short. No tensor is used twice: Hugging Face's Trainer does
    not save a model that ties weights, as `gpt` does, unless it is one of its own kind (`PreTrainedModel`)."""
    work = digits(steps, per_rank)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))

    return replace(work, model=model).first(64)


def gpt(
    steps: int = 40,
    per_rank: int = 8,
    *,
    layers: int = 2,
    heads: int = 4,
    width: int = 64,
    context: int = 64,
) -> Work:
    """The language model of this package, on its text."""
    blocks = TokenBlocks(load_corpus("python").train, context)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(layers, heads, width, context)

    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    needed = min(len(blocks), 4 * steps * per_rank)  # enough for four ranks without a second epoch
    rows = [{"tokens": row.long()} for row in blocks.fetch(np.arange(needed))["tokens"]]
    return Work(model, loss, Samples(rows), per_rank, steps)


def stories(steps: int = 40, per_rank: int = 8, *, longest: int = 96) -> Work:
    """Stories of different lengths, padded: a rank with short ones has fewer bytes to tell than another."""
    texts = pyarrow.parquet.read_table(example.DATA.parent / "stories")["text"].to_pylist()
    rows = []
    for number, text in enumerate(texts[: 4 * steps * per_rank]):
        story = torch.tensor(list(text.encode())[: longest if number % 16 in LONG else longest // 4])
        rows.append(
            {
                "tokens": F.pad(story[:-1], (0, longest - len(story))),
                "labels": F.pad(story[1:], (0, longest - len(story)), value=-100),
            }
        )

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(layers=1, heads=2, width=32, context=longest)

    def loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch["tokens"]).flatten(0, 1)
        total = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        return total, (batch["labels"] != -100).sum()

    return Work(model, loss, Samples(rows), per_rank, steps)
