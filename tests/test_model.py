"""The GPT."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ddp_tutorial.accumulation.memory import PeakMemory, count_saved_bytes
from ddp_tutorial.collectives import digest
from ddp_tutorial.training.gpt import GPT, loss_sum


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, heads=2, width=32, context=16)


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def test_a_later_token_changes_no_earlier_logits(model: GPT) -> None:
    model.eval()
    tokens = some_tokens(2, 16)
    before = model(tokens)
    assert before.shape == (2, 16, 256)
    for position in (0, 7, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        assert (after[:, position] - before[:, position]).abs().max() > 1e-3


def test_shorter_inputs_give_the_beginning_of_longer_outputs(model: GPT) -> None:
    tokens = some_tokens(1, 16)
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5], rtol=0, atol=1e-5)


def test_the_head_and_the_embedding_share_one_tensor(model: GPT) -> None:
    assert model.head.weight is model.tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tokens.weight" in names
    assert "head.weight" not in names  # counted once


def test_the_same_seed_gives_the_same_weights() -> None:
    torch.manual_seed(3)
    first = digest(GPT(layers=1, width=16).state_dict())
    torch.manual_seed(3)
    assert digest(GPT(layers=1, width=16).state_dict()) == first
    torch.manual_seed(4)
    assert digest(GPT(layers=1, width=16).state_dict()) != first


def test_a_saved_and_loaded_model_gives_equal_logits(model: GPT, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.items() >= {"layers": 2, "heads": 2, "width": 32, "context": 16}.items()
    loaded = GPT.from_pretrained(tmp_path / "model")
    assert digest(loaded.state_dict()) == digest(model.state_dict())
    assert loaded.head.weight is loaded.tokens.weight
    tokens = some_tokens(2, 16)
    assert torch.equal(loaded.eval()(tokens), model.eval()(tokens))


def test_saved_files_cannot_execute_code(model: GPT, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".json", ".md"}


def test_generation_is_a_function_of_prompt_and_seed(model: GPT) -> None:
    prompt = some_tokens(4)
    torch.manual_seed(1)
    first = model.generate(prompt, 20, seed=5)
    torch.manual_seed(2)  # regardless of the state of the process
    assert torch.equal(model.generate(prompt, 20, seed=5), first)
    assert not torch.equal(model.generate(prompt, 20, seed=6), first)
    assert first.shape == (24,)
    assert torch.equal(first[:4], prompt)
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_a_prompt_longer_than_the_context_is_kept(model: GPT) -> None:
    prompt = some_tokens(40)
    out = model.generate(prompt, 5)
    assert torch.equal(out[:40], prompt)
    assert torch.equal(out[40:], model.generate(prompt[-16:], 5)[16:])


def test_temperature_zero_selects_the_most_likely_token(model: GPT) -> None:
    prompt = some_tokens(4)
    likeliest = model.eval()(prompt[None])[0, -1].argmax()
    assert model.generate(prompt, 1, temperature=0.0)[-1] == likeliest


@pytest.mark.parametrize("training", [True, False])
def test_generation_restores_the_training_mode(model: GPT, training: bool) -> None:
    model.train(training)
    model.generate(some_tokens(3), 2)
    assert model.training is training
    assert all(module.training is training for module in model.modules())


def test_dropout_is_active_in_training_only() -> None:
    torch.manual_seed(0)
    model = GPT(layers=1, heads=2, width=32, context=16, dropout=0.5)
    tokens = some_tokens(1, 16)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_recomputing_is_bitwise_identical_with_dropout_and_saves_memory() -> None:
    gradients, kept = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=4, heads=2, width=32, context=32, dropout=0.2, recompute=recompute)
        tokens = torch.randint(256, (4, 33))
        with count_saved_bytes(model) as saved:
            loss = loss_sum(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
        kept.append(saved.nbytes)
    assert torch.equal(*gradients)
    assert kept[1] < kept[0] / 3


def test_peak_memory_counts_new_tensors_while_they_exist() -> None:
    old = torch.ones(1000)
    with PeakMemory() as memory:
        doubled = old * 2  # 4,000 bytes
        assert memory.bytes_in_use == 4000
        _ = (doubled + 1).view(10, 100)  # another 4,000; a view shares its memory
        del _
        old.add_(1)  # existed before
        assert memory.bytes_in_use == 4000
    assert memory.peak_bytes == 8000
    del doubled
    assert memory.bytes_in_use == 0


def test_recomputed_activations_exist_for_one_block_at_a_time() -> None:
    """The peak falls to less than a half, but it stays above the bytes that the forward pass saves."""
    peaks, tokens = [], some_tokens(16, 33)
    for recompute in (False, True):
        model = GPT(layers=4, heads=2, width=32, context=32, recompute=recompute)
        with PeakMemory() as memory:
            loss_sum(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        peaks.append(memory.peak_bytes)
        assert memory.bytes_in_use == sum(weight.nbytes for weight in model.parameters())  # the gradients
    with count_saved_bytes(model) as saved:
        loss = loss_sum(model(tokens[:, :-1]), tokens[:, 1:])
    assert saved.nbytes < peaks[1] < peaks[0] / 2
    del loss


def test_the_sum_of_losses_equals_the_mean_times_the_count(model: GPT) -> None:
    tokens = some_tokens(3, 17)
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    mean = F.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1))
    torch.testing.assert_close(loss_sum(logits, targets), mean * 48, rtol=1e-5, atol=0)  # 3 samples of 16


def test_the_initial_loss_is_that_of_a_uniform_guess(model: GPT) -> None:
    tokens = some_tokens(8, 17)
    loss = loss_sum(model(tokens[:, :-1]), tokens[:, 1:]).item() / (8 * 16)
    assert loss == pytest.approx(math.log(256), abs=0.1)  # 5.545: all 256 bytes are equally likely


def test_a_width_that_heads_do_not_divide_is_rejected() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of heads=4, got 30"):
        GPT(width=30, heads=4)
