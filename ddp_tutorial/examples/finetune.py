"""A causal language model of Hugging Face's `transformers` on texts of varying length, padded, each token counted once.

    pip install 'ddp-tutorial[examples]'
    python -m ddp_tutorial.examples.finetune                                  # two ranks, started here
    torchrun --nproc-per-node 2 -m ddp_tutorial.examples.finetune name=stories resume=auto checkpoint.every=20

The model is a tiny one with random weights, so that nothing is downloaded; for one that has been trained, put
`AutoModelForCausalLM.from_pretrained(...)` into `model_of`, and its tokenizer into `collate`.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from ddp_tutorial import TrainConfig, Trainer, TrainResult, World, make_source, run
from ddp_tutorial.config import from_arguments
from ddp_tutorial.sharding import as_samples

DATA = Path(__file__).parents[2] / "data" / "stories"
PADDING, IGNORED = 256, -100  # a token that is no byte, and the label that a loss leaves out


class Options(TrainConfig):
    """What can be said as key=value: the settings of every run, with defaults of our own, and two more."""

    steps: int = 60
    eval_every: int = 30
    eval_samples: int = 64
    batch_size: int = 16  # of a step, over all ranks
    nprocs: int = 2  # ranks to start, where torchrun or Slurm have not started them


def model_of(options: Options) -> nn.Module:
    """The same weights on all ranks."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def texts() -> list[bytes]:
    """The stories, each ended by a zero."""
    return [text.encode() + b"\0" for text in pyarrow.parquet.read_table(DATA)["text"].to_pylist()]


def collate(rows: list[bytes]) -> dict[str, torch.Tensor]:
    """One batch, as long as its longest text: tokens, and as labels the same, with `IGNORED` in place of padding."""
    tokens = [torch.tensor(list(row)) for row in rows]
    labels = pad_sequence(tokens, batch_first=True, padding_value=IGNORED)
    mask = (labels != IGNORED).long()
    return {"input_ids": labels.where(mask.bool(), PADDING), "attention_mask": mask, "labels": labels}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """A sum over tokens and how many they are: a mean for each rank would give a token of a short text more weight."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]  # each token is to be told from those before it
    counted = (targets != IGNORED).sum()
    right = (logits.argmax(-1) == targets).sum()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, counted, {"accuracy": (right, counted)}


def main(world: World, options: Options) -> TrainResult:
    """What each rank does."""
    stories = texts()
    source = make_source(stories[150:], options.batch_size, world, seed=options.seed, collate_fn=collate)
    held_out = as_samples(stories[:150], collate)
    result = Trainer(model_of(options), source, loss, world, options, validation_data=held_out, unit="tokens").train()
    if world.is_main:
        for step, means in result.evaluations.items():
            print(f"after step {step}: loss {means['loss']:.3f} nats a byte on stories held out")
    return result


if __name__ == "__main__":
    chosen = from_arguments(Options, sys.argv[1:])
    run(main, chosen, nprocs=chosen.nprocs)
