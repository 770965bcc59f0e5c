"""Models as users write them: the same losses on one and two ranks, and exact resumption after a crash."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ddp_tutorial import TrainConfig, Trainer, World, launch, make_source, synchronize_batch_norm
from ddp_tutorial.accumulation.loss import Loss

pytestmark = pytest.mark.usefixtures("workdir")
STEPS = 6
TOKENS, CONTEXT = 32, 12


# ------------------------------------------------------------------------------------------------------- nanoGPT


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attention(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT with a tied embedding that computes its own loss, as nanoGPT's model does."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(CausalBlock(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width, bias=False), nn.Linear(width, TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def tokens() -> Dataset[Any]:
    text = torch.randint(TOKENS, (50, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def nano_gpt_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    _, mean = model(*batch)
    return mean * batch[1].numel(), batch[1].numel()


# ----------------------------------------------------------------------------------------------------- Hugging Face


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": TOKENS, "n_positions": CONTEXT, "n_embd": 16, "n_head": 2, "n_layer": 1}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def gpt2_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    logits = model(input_ids=batch[0]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


# ----------------------------------------------------------------------------------------------------------- ResNet


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def res_net() -> nn.Module:
    return nn.Sequential(Residual(1, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def images() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(40, 1, 6, 6, generator=generator), torch.randint(3, (40,), generator=generator))


def image_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int, dict[str, Any]]:
    logits = model(batch[0])
    right = (logits.argmax(1) == batch[1]).sum()
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(logits), {"accuracy": (right, len(logits))}


# ------------------------------------------------------------------------ tied, frozen and conditional parameters


class Branching(nn.Module):
    """Tied, frozen and conditional parameters: a rank without a positive sample does not use `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight
        self.frozen, self.extra = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.decoder(torch.tanh(self.frozen(self.encoder(x))))
        positive = x[:, 0] > 1
        if positive.any():
            x = torch.where(positive[:, None], self.extra(x), x)
        return x


def vectors() -> Dataset[Any]:
    x = torch.randn(44, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sin())


def square_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1).sum(), len(batch[0])


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    loss: Loss
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "nanoGPT": Case(NanoGPT, tokens, nano_gpt_loss),
    "GPT-2": Case(gpt2, tokens, gpt2_loss),
    "ResNet": Case(res_net, images, image_loss),
    "branching": Case(Branching, vectors, square_loss, {"ddp": {"find_unused_parameters": True}}),
}


class CrashError(Exception):
    pass


def failing_after(calls: int, loss: Loss) -> Loss:
    """Return a loss that raises `CrashError` once training has called it `calls` times."""

    def counted(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls -= torch.is_grad_enabled()
        if calls < 0:
            raise CrashError
        return loss(model, batch)

    return counted


def trainer_of(world: World, case: Case, loss: Loss | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = synchronize_batch_norm(case.model(), world)
    source = make_source(case.data(), 12, world)
    config = TrainConfig.model_validate(
        {"steps": STEPS, "warmup_steps": 2, "tensorboard": False} | case.settings | settings
    )
    return Trainer(model, source, loss or case.loss, world, config)


def test_training_a_model_takes_at_most_25_lines() -> None:
    for case in CASES.values():
        parts = (case.data, case.loss, trainer_of)
        assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 25


SAVED = {"resume": "auto", "checkpoint": {"every": 1}}
MODES: dict[str, dict[str, Any]] = {"plain": {}, "compiled": {"compile": {"backend": "eager"}}}


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: str
    resumed: str  # the weights of a run that a crash interrupted in step 4


def outcome(world: World, case: Case, name: str, **settings: Any) -> Outcome:
    whole = trainer_of(world, case, **settings).train()
    settings |= SAVED | {"name": name}
    with pytest.raises(CrashError):
        trainer_of(world, case, failing_after(3, case.loss), **settings).train()
    resumed = trainer_of(world, case, **settings)
    result = resumed.train()
    assert resumed.start.step == 3
    assert result.losses == whole.losses, name
    return Outcome(whole.losses, whole.weights, result.weights)


def outcomes(world: World) -> dict[str, Outcome]:
    return {
        f"{name}-{mode}": outcome(world, case, f"{name}-{mode}-{world.size}", **settings)
        for name, case in CASES.items()
        for mode, settings in MODES.items()
    }


def test_custom_models_have_the_same_losses_on_one_and_two_ranks() -> None:
    """Each model, compiled and not, is also interrupted and resumed on both numbers of ranks."""
    ranks = [rank for size in (1, 2) for rank in launch(outcomes, size, device="cpu", threads=1, echo=False)]
    for rank in ranks:
        for name, found in rank.items():
            expected = ranks[0][name.replace("compiled", "plain")].losses
            assert len(set(found.losses)) == STEPS, name
            assert found.losses == pytest.approx(expected, abs=1e-5), name
            assert found.resumed == found.weights, name
