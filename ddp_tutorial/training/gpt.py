"""Define a small GPT in plain PyTorch.

The GPT consists of token and position embeddings, blocks with causal attention and an MLP, and a tied output head.

The architecture is that of GPT-2 (Radford et al., 2019), without biases in linear layers. A mixin from huggingface_hub
defines `save_pretrained` and `from_pretrained`. The file formats are safetensors and JSON, so loading a model does not
execute code.
"""

import math
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal self-attention with `heads` heads. The input and the output have shape [batch, time, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Create the projections. `width` must be a multiple of `heads`."""
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention output for `x`."""
        batch, time, width = x.shape
        # [batch, time, 3 * width] -> three of [batch, heads, time, width / heads]
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A transformer block that computes x + attention(norm(x)), then x + mlp(norm(x)), for x [batch, time, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Create the layers. `width` must be a multiple of `heads`."""
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block for `x`."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.project(F.gelu(self.expand(self.norm_2(x)))))


class _Embed(nn.Module):
    """The part of a `GPT` that maps tokens [batch, time] to embeddings [batch, time, width]."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Dropout) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class _Recomputed(nn.Module):
    """A block whose activations are recomputed in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)


class GPT(nn.Module, PyTorchModelHubMixin):
    """A GPT that maps tokens [batch, time] to logits [batch, time, vocab]. The time dimension is at most `context`.

    With `recompute`, only the block inputs are stored, and the backward pass recomputes the other activations.
    Recomputation saves memory but increases computation by about a third (Chen et al., "Training deep nets with
    sublinear memory cost", 2016). The result is bitwise identical to the result without `recompute`, even with dropout.

    The initial weights depend on the state of torch's random number generator. Before you create the model, call
    `torch.manual_seed` with the same seed on every rank, so that all ranks start with the same weights.
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
        """Create a model with random weights. `width` must be a multiple of `heads`."""
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads={heads}, got {width}")
        self.context, self.recompute = context, recompute
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(self._init)
        for name, weight in self.named_parameters():
            # Each block adds two projections to the residual stream. Scale them to keep its variance constant.
            if name.endswith("project.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight  # tied: one tensor with two uses, whose gradients are summed

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.head(self.norm(x))

    def chain(self) -> dict[str, nn.Module]:
        """Return the forward pass as a sequence of named modules that a pipeline can split.

        The input of each module is the output of the previous module. The modules share this model's parameters.
        """
        parts: dict[str, nn.Module] = {"tokens": _Embed(self.tokens, self.positions, self.dropout)}
        for number, block in enumerate(self.blocks):
            parts[f"blocks.{number}"] = _Recomputed(block) if self.recompute else block
        return parts | {"norm": self.norm, "head": self.head}

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, length: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
        """Return `prompt` [time] followed by `length` sampled tokens. The same seed produces the same tokens."""
        was_training, tokens = self.training, prompt
        generator = torch.Generator(prompt.device).manual_seed(seed)
        self.eval()
        for _ in range(length):
            logits = self(tokens[None, -self.context :])[0, -1] / max(temperature, 1e-5)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)])
        self.train(was_training)
        return tokens


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy in nats, summed over all targets that are not -100.

    The result is a sum, because an average of the ranks' means may weight targets unequally.
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def next_token_loss(model: Any, samples: Any) -> tuple[torch.Tensor, int]:
    """Return the next-token prediction loss in nats, summed over all targets.

    Args:
        model: A model or function that maps tokens to logits.
        samples: A dict that contains an integer tensor `tokens` of shape [batch, time + 1].

    Returns:
        The summed loss, and the number of targets.
    """
    tokens = samples["tokens"].long()
    targets = tokens[:, 1:]
    return loss_sum(model(tokens[:, :-1]), targets), targets.numel()
