"""Models as users write them: the same losses on one, two and three ranks, and exact resumption after a crash."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ddp_tutorial import TrainConfig, Trainer, World, launch, make_source, synchronise_batch_norm
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

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
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

    sizes = {"vocab_size": TOKENS, "n_positions": CONTEXT, "n_embd": 16, "n_head": 2, "n_layer": 2}
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
    return nn.Sequential(Residual(1, 4), Residual(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


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


def trainer_of(world: World, case: Case, crash_at: int = 0, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = synchronise_batch_norm(case.model(), world)
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if crash_at and calls > crash_at:
            raise CrashError
        return case.loss(model, batch)

    config = TrainConfig.model_validate({"steps": STEPS, "warmup_steps": 2} | case.settings | settings)
    return Trainer(model, make_source(case.data(), 12, world), loss, world, config)


def losses_and_weights(world: World, **settings: Any) -> dict[str, tuple[list[float], str]]:
    results = {name: trainer_of(world, case, **settings).train() for name, case in CASES.items()}
    return {name: (result.losses, result.weights) for name, result in results.items()}


def crash_and_resume(world: World, **settings: Any) -> dict[str, str]:
    """Return the digest of the weights of runs that a crash interrupted in step 4."""
    weights = {}
    for name, case in CASES.items():
        saved = {"name": name, "resume": "auto", "checkpoint": {"every": 1}} | settings
        with pytest.raises(CrashError):
            trainer_of(world, case, crash_at=3, **saved).train()
        resumed = trainer_of(world, case, **saved)
        weights[name] = resumed.train().weights
        assert resumed.start.step == 3
    return weights


def test_models_of_users_have_the_same_losses_on_one_two_and_three_ranks() -> None:
    alone = losses_and_weights(World())
    for size in (2, 3):
        for rank in launch(losses_and_weights, size, device="cpu", echo=False):
            for name, (losses, _) in rank.items():
                assert losses == pytest.approx(alone[name][0], rel=1e-5), (name, size)
                assert len(set(losses)) == STEPS, name


def test_models_of_users_have_the_same_losses_compiled() -> None:
    alone = losses_and_weights(World())
    compiled = partial(losses_and_weights, compile={"backend": "eager"})
    for rank in launch(compiled, 2, device="cpu", echo=False):
        for name, (losses, _) in rank.items():
            assert losses == pytest.approx(alone[name][0], rel=1e-5), name


def test_models_of_users_resume_bitwise_identical_after_a_crash() -> None:
    undisturbed = launch(losses_and_weights, 2, device="cpu", echo=False)
    resumed = launch(crash_and_resume, 2, device="cpu", echo=False)
    for rank in range(2):
        assert resumed[rank] == {name: weights for name, (_, weights) in undisturbed[rank].items()}
