"""The model of a training step: exact parameter counts, published formulas, consistency and monotonicity."""

import pytest

from ddp_tutorial.planning.hardware import DEVICES, NETWORKS
from ddp_tutorial.planning.plan import Plan
from ddp_tutorial.planning.step import estimate_step
from ddp_tutorial.planning.transformer import MODELS, Transformer

A100, DGX_A100 = DEVICES["A100-80"], NETWORKS["DGX A100"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("GPT-2", 124_439_808),
        ("GPT-2 XL", 1_557_611_200),
        ("Llama 2 7B", 6_738_415_616),
        ("Llama 2 13B", 13_015_864_320),
        ("Llama 2 70B", 68_976_648_192),
        ("Llama 3.1 8B", 8_030_261_248),
        ("Llama 3.1 70B", 70_553_706_496),
    ],
)
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_activations_of_a_gpt_follow_korthikanti() -> None:
    h, a, s = 12288, 96, 2048
    model = Transformer("GPT-3", 96, h, a, 51200, s, dropout=True)
    for t in (1, 8):
        assert model.activation_bytes("none", t, fused=False) == (34 * h + 5 * a * s) / t
        assert model.activation_bytes("selective", t, fused=False) == 34 * h / t
        assert model.activation_bytes("full", t) == 2 * h / t


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hsdp"])
def test_on_one_device_every_strategy_equals_ddp(strategy: str) -> None:
    model = MODELS["GPT-2"]
    alone = estimate_step(model, Plan("ddp", 1), A100, DGX_A100)
    sharded = estimate_step(model, Plan(strategy, 1), A100, DGX_A100)  # type: ignore[arg-type]
    assert sharded.memory == alone.memory
    assert sharded.seconds == alone.seconds
    assert alone.communication == 0
