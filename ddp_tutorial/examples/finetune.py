"""Train a causal language model from Hugging Face `transformers` on padded texts, with equal weights for all tokens.

    pip install 'ddp-tutorial[examples]'
    python -m ddp_tutorial.examples.finetune                                  # starts two ranks
    torchrun --nproc-per-node 2 -m ddp_tutorial.examples.finetune name=stories resume=auto checkpoint.every=20

The model is tiny and has random weights, so nothing is downloaded. To fine-tune a pretrained model, call
`AutoModelForCausalLM.from_pretrained(...)` in `model_of` and use its tokenizer in `collate`.
"""

import sys
from typing import Any

import pyarrow.parquet
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from ddp_tutorial import TrainConfig, Trainer, TrainResult, World, make_source, run
from ddp_tutorial.config import from_arguments
from ddp_tutorial.files import PROJECT
from ddp_tutorial.sharding import as_samples

DATA = PROJECT / "data" / "stories"
PADDING, IGNORED = 256, -100  # a token that is not a byte, and the label that the loss ignores


class Options(TrainConfig):
    """`TrainConfig` with the additional setting `nprocs` and different defaults."""

    steps: int = 60
    eval_every: int = 30
    eval_samples: int = 64
    batch_size: int = 16  # the global batch size
    nprocs: int = 2  # the number of ranks to start if torchrun or Slurm has not started them


def model_of(options: Options) -> nn.Module:
    """Return the model, with identical weights on all ranks."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def texts() -> list[bytes]:
    """Return the stories as bytes, each terminated by a zero byte."""
    return [text.encode() + b"\0" for text in pyarrow.parquet.read_table(DATA)["text"].to_pylist()]


def collate(rows: list[bytes]) -> dict[str, torch.Tensor]:
    """Return the tokens, the attention mask and the labels, padded to the longest text. Padded labels are `IGNORED`."""
    tokens = [torch.tensor(list(row)) for row in rows]
    labels = pad_sequence(tokens, batch_first=True, padding_value=IGNORED)
    mask = (labels != IGNORED).long()
    return {"input_ids": labels.where(mask.bool(), PADDING), "attention_mask": mask, "labels": labels}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return the summed loss, the number of tokens, and the accuracy as a (sum, count) pair.

    Averaging per-rank means would weight the tokens of short texts more than those of long texts.
    """
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]  # predict each token from the previous ones
    counted = (targets != IGNORED).sum()
    right = (logits.argmax(-1) == targets).sum()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, counted, {"accuracy": (right, counted)}


def main(world: World, options: Options) -> TrainResult:
    """Train on this rank. Collective."""
    stories = texts()
    source = make_source(stories[150:], options.batch_size, world, seed=options.seed, collate_fn=collate)
    validation = as_samples(stories[:150], collate)
    result = Trainer(model_of(options), source, loss, world, options, validation_data=validation, unit="tokens").train()
    if world.is_main:
        for step, means in result.evaluations.items():
            print(f"after step {step}: validation loss {means['loss']:.3f} nats per byte")
    return result


if __name__ == "__main__":
    chosen = from_arguments(Options, sys.argv[1:])
    run(main, chosen, nprocs=chosen.nprocs)
