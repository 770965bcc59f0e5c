"""A small GPT in plain torch: token and position embeddings, blocks of causal attention and an MLP, a tied head.

The architecture of GPT-2 (Radford et al., 2019), pre-norm, without its biases in linear layers. `save_pretrained`
and `from_pretrained` come from the hub's mixin: safetensors and a config.json, nothing executable.
"""

import math
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal self-attention over `heads` heads: [batch, time, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        # [batch, time, 3 * width] -> three of [batch, heads, time, width / heads]
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A transformer block, [batch, time, width] -> the same: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.project(F.gelu(self.expand(self.norm_2(x)))))


class _Embed(nn.Module):
    """Tokens [batch, time] -> [batch, time, width]. Its parts stay those of the GPT that they come from."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Dropout) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class _Recomputed(nn.Module):
    """A block whose insides are forgotten in forward, and computed once more in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)


class GPT(nn.Module, PyTorchModelHubMixin):
    """Tokens [batch, time] -> logits [batch, time, vocab], where time is at most `context`.

    With `recompute`, what a block computes on the way is forgotten, and computed once more in backward: memory for the
    inputs of blocks only, against about a third more computing (Chen et al., "Training deep nets with sublinear memory
    cost", 2016). The bits are the same, dropout's too.

    The weights depend on torch's random numbers at the time: call `torch.manual_seed` with the same seed on
    every rank first, and the ranks start out equal by construction.
    """

    def __init__(
        self,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        context: int = 128,
        vocab: int = 256,
        dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not divide into heads={heads} equal parts")
        self.context, self.recompute = context, recompute
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(self._init)
        for name, weight in self.named_parameters():
            if name.endswith("project.weight"):  # 2 per layer feed the residual stream: keep its variance at one
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight  # tied: one tensor, two uses, its gradients add up

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.head(self.norm(x))

    def chain(self) -> dict[str, nn.Module]:
        """What `forward` does, as modules of which each takes what the one before gives: a pipeline cuts between them.

        They are views of this model: the same parameters, under names of their own.
        """
        parts: dict[str, nn.Module] = {"tokens": _Embed(self.tokens, self.positions, self.dropout)}
        for number, block in enumerate(self.blocks):
            parts[f"blocks.{number}"] = _Recomputed(block) if self.recompute else block
        return parts | {"norm": self.norm, "head": self.head}

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, length: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
        """`prompt` [time] followed by `length` sampled tokens; the same seed gives the same text."""
        was_training, tokens = self.training, prompt
        generator = torch.Generator(prompt.device).manual_seed(seed)
        self.eval()
        for _ in range(length):
            logits = self(tokens[None, -self.context :])[0, -1] / max(temperature, 1e-5)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)])
        self.train(was_training)
        return tokens


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats, summed over all targets but -100: sums of ranks add up, and means do not."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def next_token_loss(model: Any, samples: Any) -> tuple[torch.Tensor, int]:
    """To predict each token from those before it: the sum over all targets in nats, and how many they are.

    `samples["tokens"]` is [batch, time + 1], of any integer type; targets are the tokens shifted by one.
    """
    tokens = samples["tokens"].long()
    targets = tokens[:, 1:]
    return loss_sum(model(tokens[:, :-1]), targets), targets.numel()
