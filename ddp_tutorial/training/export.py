"""Load, evaluate, sample from, and export a run's model."""

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torch import nn

from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.checkpoint.storage import stored
from ddp_tutorial.config import ConfigError, check
from ddp_tutorial.files import directory_written_atomically, write_json
from ddp_tutorial.runs.folder import folder_of
from ddp_tutorial.sharding.tokenizer import BYTES, load_tokenizer
from ddp_tutorial.training.config import TaskConfig, is_import_path
from ddp_tutorial.training.evaluation import evaluate as evaluate_here
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.training.tasks import samples_of, task_of
from ddp_tutorial.training.weights import load_state, load_weights, write_model
from ddp_tutorial.world import World, choose_device


def config_of(run: str | Path) -> TaskConfig:
    """Return a run's settings. Raise `ConfigError` if `run` is not a run folder, or if a script trained the model."""
    path = folder_of(run).config
    content = json.loads(path.read_text())
    if "corpus" not in content:
        raise ConfigError(
            f"{run} was started from a script, not from a config, so its model is unknown; pass the model to "
            "ddp_tutorial.load"
        )
    return check(TaskConfig, content, origin=str(path))


def _without_imports(config: TaskConfig, run: str | Path) -> TaskConfig:
    """Return `config`. Raise `ConfigError` if the model is imported, because loading must not execute a run's code."""
    imported = config.model.imported["class"] if config.model.imported else config.task
    if config.model.imported or is_import_path(config.task):
        raise ConfigError(
            f"the model of {run} is defined by {imported}, but loading a run never imports code. Construct the "
            "model and pass it to ddp_tutorial.load"
        )
    return config


def load(run: str | Path, model: nn.Module | None = None, *, best: bool = False) -> nn.Module:
    """Return a run's final model in evaluation mode.

    If the run has not finished, return the model from the newest valid checkpoint.

    Args:
        run: The directory of the run.
        model: A model of the same architecture, into which the weights are loaded. Required if a script trained the
            model, or if the run's config imports the model.
        best: Whether to load the best weights (saved with `best_model=true`) instead of the final weights.

    Raises:
        ConfigError: If the run folder does not contain the model.
    """
    folder = folder_of(run)
    kept = sorted(folder.best.glob("step_*"))
    if best and not kept:
        raise ConfigError(f"{folder.path} does not contain a best model; train with best_model=true")
    if best or folder.model.is_dir():
        where = kept[-1] if best else folder.model
        if model is None:
            # huggingface_hub prints a message, which would corrupt JSON on stdout
            with redirect_stdout(io.StringIO()):
                _without_imports(config_of(run), run)
                return GPT.from_pretrained(where)
        load_weights(model, where)
        return model.eval()
    found, _ = latest_valid(World(), folder.checkpoints)
    if found is None:
        raise ConfigError(
            f"{folder.path} contains neither a model nor a valid checkpoint; finish the run, or rerun it with "
            "checkpoint.every=100"
        )
    model = model or task_of(config := _without_imports(config_of(run), run)).model(config)
    load_state(model, stored(found, "model"), found)
    return model.eval()


def evaluate(run: str | Path, *, samples: int | None = None, best: bool = False) -> dict[str, Any]:
    """Evaluate a run's model on the first `samples` validation samples, in one process.

    `samples` defaults to the setting `eval_samples`.

    The loss is in nats per token. The result also contains the perplexity and the loss in bits per token. With the
    `bytes` tokenizer, a token is one byte.
    """
    config, model = config_of(run), load(run, best=best)
    world, task = World(device=choose_device(config.device if config.device == "cpu" else "auto")), task_of(config)
    if config.loss is not None:
        raise ConfigError(
            f"{run} was trained with the custom loss {config.loss}, but this command imports no user code; evaluate "
            "the model in a script"
        )
    _, validation = samples_of(config, world)
    count = min(samples or config.eval_samples or len(validation), len(validation))
    loss = evaluate_here(world, model.to(world.device), task.loss, validation, count, config.batch_size)["loss"]
    return {
        "eval_loss": loss,
        "perplexity": math.inf if loss > 700 else math.exp(loss),  # math.exp(710) raises OverflowError
        "bits_per_token": loss / math.log(2),
        "samples": count,
        task.unit: count * task.units_per_sample(config),
    }


def sample(
    run: str | Path, prompt: str, *, length: int = 200, temperature: float = 0.8, seed: int = 0, best: bool = False
) -> str:
    """Return `prompt` followed by `length` tokens that the run's model generates.

    Raises:
        ConfigError: If the prompt is empty, if the run's model is not a GPT, or if the tokens cannot be decoded.
    """
    if not prompt:
        raise ConfigError("the prompt must contain at least one character, got an empty prompt")
    model = load(run, best=best)
    if not isinstance(model, GPT):
        raise ConfigError(f"{run} did not train a language model; text generation requires a run with task=gpt")
    config = config_of(run)
    if config.has_tokens and config.tokenizer == BYTES:
        raise ConfigError(
            f"{run} was trained on {config.corpus!r} without a tokenizer, so its tokens cannot be decoded. Set "
            "'tokenizer' to the path of the tokenizer.json that produced the tokens, and train again"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    tokens = tokenizer.encode(prompt)
    if not len(tokens):
        raise ConfigError(f"the prompt must contain at least one token, but the tokenizer produced none for {prompt!r}")
    generated = model.generate(tokens, length, temperature=temperature, seed=seed)
    return tokenizer.decode(generated)


def export(run: str | Path, folder: Path, *, best: bool = False) -> None:
    """Write a run's model to a new `folder`, as safetensors and JSON. `GPT.from_pretrained(folder)` loads the model.

    The file `training.json` in `folder` contains the run's settings.

    Raises:
        ConfigError: If `folder` exists, or if the run's model cannot be loaded.
    """
    config, model = config_of(run), load(run, best=best)
    try:
        with directory_written_atomically(folder) as aside:
            write_model(model, aside)
            write_json(aside / "training.json", config.model_dump(mode="json"))
    except FileExistsError as error:
        raise ConfigError(f"{error}; choose a new folder") from None
