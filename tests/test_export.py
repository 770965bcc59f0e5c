"""A run's model after the run: evaluated, sampled, exported, and equal when loaded again."""

import errno
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

from commands import call
from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.config import ConfigError
from ddp_tutorial.config import load as load_config
from ddp_tutorial.files import observe_disk
from ddp_tutorial.sharding.corpus import decode
from ddp_tutorial.sharding.tokenizer import load_tokenizer
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.export import config_of, evaluate, export, load, sample
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.training.tasks import launch_training
from ddp_tutorial.training.trainer import TrainResult
from ddp_tutorial.training.weights import WEIGHTS, load_state, load_weights, save_model
from disk import failing

COMMAND = [sys.executable, "-m", "ddp_tutorial"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """One run on two ranks for all tests of this file, which only read it."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_config("tiny", TaskConfig, ["name=mine", "checkpoint.every=10", "device=cpu"])
        made = launch_training(config, echo=False)
    return TrainResult(**{**vars(made), "run": folder / made.run})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_one_process_finds_the_loss_that_two_ranks_logged(result: TrainResult) -> None:
    found = evaluate(result.run)
    assert found["eval_loss"] == pytest.approx(result.eval_losses[20], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert found["bits_per_token"] == pytest.approx(found["eval_loss"] / math.log(2))
    assert (found["samples"], found["tokens"]) == (32, 32 * 32)
    assert evaluate(result.run, samples=64)["eval_loss"] != found["eval_loss"]


def test_an_exported_model_gives_the_same_logits_when_loaded(result: TrainResult, tmp_path: Path) -> None:
    export(result.run, tmp_path / "exported")
    tokens = torch.randint(256, (2, 16))
    with torch.no_grad():
        expected = load(result.run)(tokens)
        assert torch.equal(GPT.from_pretrained(tmp_path / "exported")(tokens), expected)
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert {"model.safetensors", "config.json", "training.json"} <= names
    assert json.loads((tmp_path / "exported" / "training.json").read_text())["steps"] == 20


def test_an_export_never_replaces_a_folder(result: TrainResult, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists; choose a new folder"):
        export(result.run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unfinished_run_exports_the_model_of_its_newest_checkpoint(result: TrainResult, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(result.run, killed)
    shutil.rmtree(killed / "model")
    whole = load(result.run).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in load(killed).state_dict().items())
    (killed / "checkpoints" / "step_00000020" / "model.safetensors").write_bytes(b"")
    early = load(killed).state_dict()
    assert not torch.equal(early["tokens.weight"], whole["tokens.weight"])
    shutil.rmtree(killed / "checkpoints")
    with pytest.raises(ConfigError, match="neither a model nor a valid checkpoint"):
        load(killed)


def test_weights_that_do_not_fit_the_model_are_rejected(result: TrainResult, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(result.run, unfinished)
    shutil.rmtree(unfinished / "model")
    size = config_of(result.run).model.size
    for folder in (result.run, unfinished):
        for changed in ({"layers": 0}, {"layers": 2}, {"width": 8}):
            with pytest.raises(ConfigError, match="do not match the model"):
                load(folder, GPT(**size | changed))
    turned, state = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2, bias=False).state_dict()
    with pytest.raises(ConfigError, match="size mismatch"):
        load_state(turned, state, tmp_path)


def test_a_missing_model_is_reported(result: TrainResult) -> None:
    from ddp_tutorial.checkpoint.storage import stored

    with pytest.raises(ConfigError, match="train with best_model=true"):
        load(result.run, best=True)
    folder = result.run / "checkpoints" / "step_00000020"
    with pytest.raises(CheckpointError, match="must contain exactly one 'rng' file, shared by all ranks"):
        stored(folder, "rng")


def test_the_same_seed_generates_the_same_text(result: TrainResult) -> None:
    first = sample(result.run, "Once", length=30, seed=1)
    assert first.startswith("Once")
    assert first == sample(result.run, "Once", length=30, seed=1)
    assert first != sample(result.run, "Once", length=30, seed=2)
    assert sample(result.run, "Once", length=9, temperature=0, seed=1) == sample(
        result.run, "Once", length=9, temperature=0, seed=2
    )


def test_the_commands_print_what_the_functions_return(result: TrainResult, tmp_path: Path) -> None:
    done = run("evaluate", str(result.run), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"run": str(result.run), **evaluate(result.run)}
    assert call("evaluate", str(result.run)).stdout.startswith("validation loss ")
    done = call("sample", str(result.run), "--prompt", "Once", "--length", "12", "--seed", "3")
    assert done.stdout == sample(result.run, "Once", length=12, seed=3) + "\n"
    done = run("export", str(result.run), str(tmp_path / "out"))
    assert (done.returncode, done.stdout.split(":")[0]) == (0, str(tmp_path / "out"))


def test_an_empty_prompt_is_rejected(result: TrainResult) -> None:
    done = call("sample", str(result.run), "--prompt", "")
    assert (done.returncode, done.stderr.startswith("error: the prompt must contain at least one character")) == (
        2,
        True,
    )


def test_a_prompt_without_tokens_is_rejected(result: TrainResult, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(result.run / "words.json"))
    tokenizer = load_tokenizer(str(result.run / "words.json"))
    monkeypatch.setattr("ddp_tutorial.training.export.load_tokenizer", lambda name: tokenizer)
    with pytest.raises(ConfigError, match="the prompt must contain at least one token"):
        sample(result.run, " ", length=3)


def test_a_generated_token_that_is_not_a_byte_is_replaced() -> None:
    for dtype in (torch.int64, torch.uint16):  # generated tokens, and the tokens of a file
        assert decode(torch.tensor([72, 300, 105], dtype=dtype)) == "H\ufffdi"


def test_the_perplexity_of_a_diverged_model_is_infinite(result: TrainResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_tutorial.training.export.evaluate_here", lambda *_: {"loss": 1000.0})
    assert evaluate(result.run)["perplexity"] == math.inf
    monkeypatch.setattr("ddp_tutorial.training.export.evaluate_here", lambda *_: {"loss": math.nan})
    assert math.isnan(evaluate(result.run)["perplexity"])
    assert json.loads(call("evaluate", str(result.run), "--json").stdout)["perplexity"] is None


def test_a_model_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save_model(model, tmp_path / "model")
    left = tmp_path / ".model.7.part"  # left by a killed run
    left.mkdir()
    with pytest.raises(OSError, match="No space"), observe_disk(failing(("fsync", WEIGHTS), errno.ENOSPC)):
        save_model(other, tmp_path / "model")
    load_weights(other, tmp_path / "model")
    assert torch.equal(other.weight, model.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
