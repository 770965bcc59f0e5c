"""Define the model, samples, loss, optimizer, scheduler and number of steps for the run that all trainers perform."""

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

# The positions of long stories in each group of 16. Interleaved and contiguous shards have unequal numbers of tokens.
LONG = {0, 2, 4, 6, 8}


class Samples(Dataset[Batch]):
    """A map-style dataset whose samples are dictionaries, a format that all trainers accept."""

    def __init__(self, rows: list[Batch]) -> None:
        """Store the samples."""
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return self.rows[index]


@dataclass(frozen=True)
class Work:
    """The definition of a training run.

    Attributes:
        model: A function that returns a model, always with the same weights.
        loss: A function that returns the sum of the loss over a batch, and the number of items in the sum.
        samples: The training samples. An epoch ends when all samples have been used.
        per_rank: The number of samples per rank per step.
        steps: The number of steps.
        learning_rate: The peak learning rate.
        clip: The maximum gradient norm.
        shuffle: Whether to shuffle the samples in each epoch. Otherwise, the samples are used in order.
        save_after: The step after which to write a checkpoint to the working directory.
        resume: Whether to resume from the checkpoint in the working directory.
        report: A function to call once per step with the mean loss over all ranks.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Batch], tuple[Tensor, Any]]
    samples: Dataset[Batch]
    per_rank: int
    steps: int
    learning_rate: float = 3e-3
    clip: float = 1.0
    shuffle: bool = False
    save_after: int | None = None
    resume: bool = False
    report: Callable[[float], object] = lambda loss: None

    def mean(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean loss over this rank's samples, as in most training scripts."""
        total, count = self.loss(model, batch)
        return total / count

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an AdamW optimizer for the parameters of `model`."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.1, fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return a learning-rate scheduler with linear warm-up over a tenth of the steps and cosine decay to zero.

        The scheduler must advance after each step.
        """
        warm = max(1, self.steps // 10)

        def factor(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            return (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def digits(steps: int = 40, per_rank: int = 16) -> Work:
    """Return a run that trains the CNN of `examples/digits.py`. BatchNorm is not synchronized across ranks."""
    pixels, numbers = example.images("train").tensors

    def model() -> nn.Module:
        torch.manual_seed(0)
        return example.Net()

    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["pixels"]), batch["digit"], reduction="sum"), len(batch["digit"])

    rows = [{"pixels": image, "digit": digit} for image, digit in zip(pixels, numbers, strict=True)]
    return Work(model, loss, Samples(rows), per_rank, steps)


def perceptron(steps: int = 20, per_rank: int = 4, *, dropout: float = 0.0) -> Work:
    """Return a run that trains a two-layer perceptron on only 64 digit images, so that epochs are short.

    Unlike the model of `gpt`, the perceptron has no tied weights. Hugging Face's Trainer saves a model with tied
    weights only if the model is a `PreTrainedModel`.
    """
    work = digits(steps, per_rank)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))

    return replace(work, model=model, samples=Subset(work.samples, range(64)))


def gpt(
    steps: int = 40,
    per_rank: int = 8,
    *,
    layers: int = 2,
    heads: int = 4,
    width: int = 64,
    context: int = 64,
) -> Work:
    """Return a run that trains this package's language model on the `python` corpus."""
    blocks = TokenBlocks(load_corpus("python").train, context)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(layers, heads, width, context)

    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    needed = min(len(blocks), 4 * steps * per_rank)  # one epoch is enough for four ranks
    rows = [{"tokens": row.long()} for row in blocks.fetch(np.arange(needed))["tokens"]]
    return Work(model, loss, Samples(rows), per_rank, steps)


def stories(steps: int = 40, per_rank: int = 8, *, longest: int = 96) -> Work:
    """Return a run that trains a language model on padded stories of different lengths.

    On a rank with short stories, the loss covers fewer tokens than on a rank with long stories.
    """
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
