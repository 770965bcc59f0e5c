"""AdamW that lists its tensors once: torch's bits, whatever happens to parameters, gradients and state on the way."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ddp_tutorial.training.adamw import AdamW

SHAPES = [(7, 5), (33,), (3, 2, 4), (1,), ()]
STEPS = 6


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Parameter]:
    torch.manual_seed(0)
    kinds = [dtypes[number % len(dtypes)] for number in range(len(SHAPES))]
    return [nn.Parameter(torch.randn(shape).to(kind)) for shape, kind in zip(SHAPES, kinds, strict=True)]


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:2], "weight_decay": 0.1}, {"params": of[2:], "weight_decay": 0.0}]


def ours(of: list[nn.Parameter]) -> AdamW:
    return AdamW(groups(of), lr=0.01, betas=(0.8, 0.95))


def torchs(of: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(of), lr=0.01, betas=(0.8, 0.95), fused=True)


def give_gradients(
    of: list[nn.Parameter], step: int, used: Callable[[int, int], bool] = lambda step, number: True
) -> None:
    for number, parameter in enumerate(of):
        numbers = torch.Generator().manual_seed(100 * step + number)
        gradient = torch.randn(parameter.shape, generator=numbers).to(parameter.dtype)
        parameter.grad = gradient if used(step, number) else None


def assert_same(mine: AdamW, theirs: torch.optim.Optimizer) -> None:
    """Weights and state, bit for bit."""
    for own, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        for parameter, twin in zip(own["params"], other["params"], strict=True):
            assert torch.equal(parameter, twin)
            assert mine.state[parameter].keys() == theirs.state[twin].keys()
            for key, value in mine.state[parameter].items():
                assert torch.equal(value, theirs.state[twin][key]), key


@pytest.mark.parametrize(
    "used",
    [lambda step, number: True, lambda step, number: number != 1, lambda step, number: (step + number) % 3 > 0],
    ids=["all", "one never", "others each time"],
)
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64, torch.bfloat16)], ids=len)
def test_weights_and_state_have_torchs_bits(dtypes: tuple[torch.dtype, ...], used: Callable[[int, int], bool]) -> None:
    mine, theirs = parameters(dtypes), parameters(dtypes)
    own, other = ours(mine), torchs(theirs)
    for step in range(STEPS):
        for optimizer, of in ((own, mine), (other, theirs)):
            give_gradients(of, step, used)
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)  # as a schedule does
            optimizer.step()
        assert_same(own, other)


def test_tensors_are_listed_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    of = parameters()
    optimizer, listed = ours(of), []
    real = optimizer._init_group
    monkeypatch.setattr(optimizer, "_init_group", lambda *args: listed.append(1) or real(*args))
    for step in range(STEPS):
        give_gradients(of, step)
        optimizer.step()
    assert len(listed) == 2


def load_whole(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(deepcopy(state))


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As the checkpoint of sharded state does."""
    of = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for number, values in deepcopy(state["state"]).items():
        optimizer.state[of[number]].update(values)


@pytest.mark.parametrize("load", [load_whole, load_in_place])
def test_it_goes_on_with_the_state_that_was_loaded_of_either_kind(load: Callable[..., None]) -> None:
    mine, theirs, first = parameters(), parameters(), parameters()
    own, other, before = ours(mine), torchs(theirs), ours(first)
    for step in range(2):  # of its own, to be forgotten
        give_gradients(mine, 50 + step)
        own.step()
        give_gradients(first, step)
        before.step()
    with torch.no_grad():
        for parameter, twin, begun in zip(mine, theirs, first, strict=True):
            parameter.copy_(begun)
            twin.copy_(begun)
    load(own, before.state_dict())
    load(other, before.state_dict())
    for step in range(2, STEPS):
        for optimizer, of in ((own, mine), (other, theirs)):
            give_gradients(of, step)
            optimizer.step()
    assert_same(own, other)
    assert {int(own.state[parameter]["step"]) for parameter in mine} == {STEPS}


def test_a_copy_steps_by_itself() -> None:
    of = parameters()
    optimizer = ours(of)
    give_gradients(of, 0)
    optimizer.step()
    copy = deepcopy(optimizer)
    give_gradients([parameter for group in copy.param_groups for parameter in group["params"]], 1)
    copy.step()
    assert int(optimizer.state[of[0]]["step"]) == 1
    give_gradients(of, 1)
    optimizer.step()
    assert_same(copy, optimizer)


def test_hooks_are_called_once_a_step_and_a_closure_computes_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, called = AdamW([weight], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert called == ["before", "after"]
    assert not torch.equal(weight, torch.ones(3))


def test_torchs_scaler_of_gradients_works_as_with_torchs() -> None:
    """A step whose gradient overflows is left out, and not counted."""
    mine, theirs = parameters(), parameters()
    own, other = ours(mine), torchs(theirs)
    for optimizer, of in ((own, mine), (other, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))  # else it has no scale yet
        for step in range(3):
            give_gradients(of, step)
            if step == 1:
                of[0].grad = torch.full_like(of[0], torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert_same(own, other)
    assert int(own.state[mine[0]]["step"]) == 2
