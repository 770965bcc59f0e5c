"""Count the parameters, FLOPs and activations of a dense decoder-only transformer.

FLOPs follow the convention of Kaplan et al. (2020) and of PaLM's model FLOPs utilization (Chowdhery et al., 2022,
appendix B). A weight requires 2 FLOPs per token in the forward pass and 4 in the backward pass. In a layer's forward
pass, attention requires 4 s h FLOPs per token (s: sequence length, h: width). The causal mask is ignored, so FLOPs are
counted as if every token attended to all s tokens. A token embedding is a lookup and requires no FLOPs.

Activation sizes follow Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
"""

from dataclasses import dataclass
from typing import Literal

Recomputation = Literal["none", "selective", "half", "full"]


@dataclass(frozen=True)
class Transformer:
    """The shape of a model.

    Attributes:
        name: The name of the model.
        layers: The number of layers.
        width: The size of the residual stream.
        heads: The number of attention heads.
        vocabulary: The number of tokens in the vocabulary, including padding.
        sequence: The number of tokens in a sequence.
        kv_heads: The number of key and value heads (default: `heads`).
        feed_forward: The inner size of the feed-forward layer (default: 4 times the width).
        gated: Whether the feed-forward layer has a gate (SwiGLU), and therefore three matrices.
        tied: Whether the output layer shares the matrix of the token embeddings.
        positions: The number of learned position embeddings, or 0.
        biases: Whether linear and normalization layers have biases.
        dropout: Whether the model uses dropout and therefore stores dropout masks.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    tied: bool = False
    positions: int = 0
    biases: bool = False
    dropout: bool = False

    @property
    def kv_width(self) -> int:
        """The total width of all key heads, which equals the total width of all value heads."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def inner(self) -> int:
        """The inner size of the feed-forward layer."""
        return self.feed_forward or 4 * self.width

    @property
    def layer_matrices(self) -> int:
        """The number of parameters in a layer's weight matrices."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_width
        return attention + (3 if self.gated else 2) * self.width * self.inner

    @property
    def layer_parameters(self) -> int:
        """The number of parameters per layer."""
        norms = 2 * self.width
        if not self.biases:
            return self.layer_matrices + norms
        attention = 2 * self.width + 2 * self.kv_width
        feed_forward = (2 if self.gated else 1) * self.inner + self.width
        return self.layer_matrices + 2 * norms + attention + feed_forward

    @property
    def parameters(self) -> int:
        """The number of parameters. A shared matrix counts once."""
        embeddings = (self.vocabulary * (1 if self.tied else 2) + self.positions) * self.width
        return self.layers * self.layer_parameters + embeddings + self.width * (2 if self.biases else 1)

    @property
    def matrices(self) -> int:
        """The number of parameters in the weight matrices of all layers and the output layer, excluding embeddings."""
        return self.layers * self.layer_matrices + self.vocabulary * self.width

    @property
    def attention_flops(self) -> int:
        """Attention FLOPs per token in the forward pass of all layers, ignoring the causal mask."""
        return 4 * self.layers * self.sequence * self.width

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs per token in the forward and backward passes, excluding recomputation."""
        return 3 * (2 * self.matrices + self.attention_flops)

    def activation_bytes(self, recomputation: Recomputation = "none", tensor: int = 1, *, fused: bool = True) -> float:
        """Return the number of activation bytes that the forward pass stores per token per layer, at 2 bytes per value.

        For a GPT with dropout and sequence parallelism, the result is h (34 + 5 a s / h) / t, in the notation of
        table 2 of Korthikanti et al.

        Args:
            recomputation: "full" stores only the input of a layer. "selective" recomputes the attention scores. "half"
                recomputes every other matrix product and the operations between matrix products, and therefore stores
                about half of the activations. This corresponds to torchtitan's selective option "op".
            tensor: The degree t of tensor and sequence parallelism.
            fused: Whether a fused kernel computes attention. A fused kernel never stores the scores.
        """
        h, f = self.width, self.inner
        if recomputation == "full":
            return 2 * h / tensor
        masks = 2 * h if self.dropout else 0
        attention = (
            2 * h + 2 * h + 4 * self.kv_width + 2 * h
        )  # input; queries; keys and values; input of the projection
        feed_forward = 2 * h + (6 * f if self.gated else 4 * f)
        scores = 0 if fused or recomputation == "selective" else self.heads * self.sequence * (5 if self.dropout else 4)
        stored = 4 * h + attention + feed_forward + masks + scores
        return (stored / 2 if recomputation == "half" else stored) / tensor


MODELS = {
    model.name: model
    for model in (
        Transformer("GPT-2", 12, 768, 12, 50257, 1024, tied=True, positions=1024, biases=True, dropout=True),
        Transformer("GPT-2 XL", 48, 1600, 25, 50257, 1024, tied=True, positions=1024, biases=True, dropout=True),
        Transformer("GPT-3 175B", 96, 12288, 96, 51200, 2048, tied=True, positions=2048, biases=True, dropout=True),
        Transformer("Llama 2 7B", 32, 4096, 32, 32000, 4096, feed_forward=11008, gated=True),
        Transformer("Llama 2 13B", 40, 5120, 40, 32000, 4096, feed_forward=13824, gated=True),
        Transformer("Llama 2 70B", 80, 8192, 64, 32000, 4096, kv_heads=8, feed_forward=28672, gated=True),
        Transformer("Llama 3.1 8B", 32, 4096, 32, 128256, 8192, kv_heads=8, feed_forward=14336, gated=True),
        Transformer("Llama 3.1 70B", 80, 8192, 64, 128256, 8192, kv_heads=8, feed_forward=28672, gated=True),
        Transformer("Llama 3.1 405B", 126, 16384, 128, 128256, 8192, kv_heads=8, feed_forward=53248, gated=True),
    )
}
